"""Settings of JAX and XLA: those that may change numbers are refused, since no run records them."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from typing import Any

import jax

from routed.contracts import UserError

#: Flags of `jax.config` that may change numbers, with JAX's defaults. tests/test_command_line.py compares both tables
#: with JAX's list: a new flag belongs into one of them.
_DEFAULTS = """
eager_constant_folding=False jax_allow_f16_reductions=True jax_compiler_enable_remat_pass=True jax_custom_vjp3=False
jax_default_matmul_precision=None jax_default_prng_impl=threefry2x32 jax_disable_jit=False
jax_disable_most_optimizations=False jax_embedded_constants_max_bytes=32 jax_enable_x64=False
jax_exec_time_optimization_effort=0.0 jax_explicit_x64_dtypes=1 jax_high_dynamic_range_gumbel=False
jax_memory_fitting_effort=0.0 jax_memory_fitting_level=O2 jax_mock_gpu_topology= jax_no_execution=False
jax_numpy_dtype_promotion=standard jax_optimization_level=UNKNOWN jax_pallas_poison_buffers=False
jax_pallas_use_mosaic_gpu=True jax_ragged_dot_use_gpu_pallas_triton_lowering=False
jax_ragged_dot_use_ragged_dot_instruction=True jax_random_seed_offset=0 jax_refs_to_pins=False jax_remat3=False
jax_scan3=False jax_softmax_custom_jvp=False jax_threefry_gpu_kernel_lowering=False jax_threefry_partitionable=True
jax_use_direct_linearize=True jax_use_emit_pipeline_primitive=False jax_use_magma=auto
jax_use_shardy_partitioner=True jax_use_simplified_jaxpr_constants=False mock_num_gpu_processes=0
"""
NUMBERS = dict(item.split("=") for item in _DEFAULTS.split())

#: Flags that change no number: devices and their transfers, caches, logs, checks that end in an error, experiments
#: without a part in these programs (`jax_` left out).
_NAMES = """
check_vma jax2tf_associative_scan_reductions jax2tf_default_native_serialization array_garbage_collection_guard
auto_pcast backend_target bcoo_cusparse_lowering captured_constants_report_frames captured_constants_warn_bytes
check_proxy_envs check_static_indices check_tracer_leaks compilation_cache_check_contents compilation_cache_dir
compilation_cache_expect_pgle compilation_cache_include_metadata_in_key compilation_cache_max_size
compiler_detailed_logging_min_ops cpu_collectives_implementation cpu_enable_async_dispatch
cpu_get_global_topology_timeout_minutes cpu_get_local_topology_timeout_minutes cross_host_transfer_socket_address
cross_host_transfer_timeout_seconds cross_host_transfer_transfer_size cross_host_transport_addresses
cuda_visible_devices debug_infs debug_key_reuse debug_leaked_clients_on_clear_backends debug_log_modules debug_nans
default_device disable_bwd_checks disable_vmap_shmap_error disallow_mesh_context_manager distributed_debug
dump_ir_modes dump_ir_to enable_checks enable_compilation_cache enable_custom_prng enable_pgle
enable_preemption_service enable_recoverability error_checking_behavior_divide error_checking_behavior_nan
error_checking_behavior_oob experimental_unsafe_xla_runtime_errors explain_cache_misses
export_calling_convention_version export_ignore_forward_compatibility force_dcn_cross_host_transfers
hlo_source_file_canonicalization_regex include_debug_info_in_dumps include_full_tracebacks_in_locations
legacy_prng_key log_checkpoint_residuals log_compiles logging_level mosaic_allow_hlo mutable_array_checks no_tracing
num_cpu_devices numpy_rank_promotion oneapi_visible_devices pallas_enable_debug_checks pallas_verbose_errors
persistent_cache_enable_xla_caches persistent_cache_min_compile_time_secs persistent_cache_min_entry_size_bytes
pgle_aggregation_percentile pgle_profiling_runs pjrt_client_create_options platform_name platforms pprint_use_color
raise_persistent_cache_errors remove_custom_partitioning_ptr_from_cache_key remove_size_one_mesh_axis_from_type
rocm_visible_devices send_traceback_to_runtime serialization_version share_binary_between_hosts
share_binary_between_hosts_timeout_ms sort_devices_by_process_index source_url_schema thread_guard
traceback_filtering traceback_in_locations_limit tracer_error_num_traceback_frames transfer_guard
transfer_guard_device_to_device transfer_guard_device_to_host transfer_guard_host_to_device xla_backend
xla_profile_version
"""
HARMLESS = frozenset(name if name.startswith(("check_vma", "jax2tf")) else f"jax_{name}" for name in _NAMES.split())


def values() -> dict[str, Any]:
    """Returns JAX's own list of flags with their values."""
    return {name: getattr(value, "value", value) for name, value in jax.config.values.items()}


#: The values of this process, before a user's file could set any.
_FIRST = values()


def refuse_changed() -> None:
    """Refuses a flag that may change numbers, set by a variable of the environment or by a user's file.

    Raises:
      UserError: names the flag, its value, and the way to leave it alone.
    """
    for name, value in values().items():
        is_set = name.upper() in os.environ or value != _FIRST.get(name)
        if is_set and name not in HARMLESS and str(value) != NUMBERS.get(name):
            raise UserError(
                f"{name.upper()}={value} is set, which may change numbers, and no run records it: unset it (in a file:"
                f" leave {name} as it is)"
            )
    refuse_unknown(os.environ.get("XLA_FLAGS", ""))


@functools.cache
def refuse_unknown(flags: str) -> None:
    """Refuses XLA_FLAGS that XLA cannot read, as it would end this process: another process tries them first.

    Raises:
      UserError: names the flag.
    """
    if not flags:
        return
    command = [sys.executable, "-c", "from jaxlib import xla_client; xla_client.CompileOptions()"]
    variables = os.environ | {"XLA_FLAGS": flags}
    tried = subprocess.run(command, env=variables, capture_output=True, encoding="utf-8", errors="replace")
    if tried.returncode and (
        found := re.search(r"Unknown flags? in XLA_FLAGS: .*|Couldn't interpret .*", tried.stderr)
    ):
        raise UserError(f"XLA_FLAGS={flags.strip()}: {found[0].rstrip('.')}: correct it, or leave it out")
