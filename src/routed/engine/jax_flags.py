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

#: Flags of `jax.config` that may change numbers, with the defaults of JAX 0.10 and 0.11. tests/test_command_line.py
#: compares both tables with JAX's list: a new flag belongs into one of them.
_DEFAULTS = """
eager_constant_folding=False jax_allow_f16_reductions=True jax_compiler_enable_remat_pass=True jax_custom_jvp3=False
jax_custom_vjp3=False jax_default_matmul_precision=None jax_default_prng_impl=threefry2x32 jax_disable_jit=False
jax_disable_most_optimizations=False jax_embedded_constants_max_bytes=32 jax_enable_x64=False
jax_exec_time_optimization_effort=0.0 jax_explicit_x64_dtypes=1 jax_high_dynamic_range_gumbel=False
jax_memory_fitting_effort=0.0 jax_memory_fitting_level=O2 jax_mock_gpu_topology= jax_no_execution=False
jax_numpy_dtype_promotion=standard jax_optimization_level=UNKNOWN jax_pallas_poison_buffers=False
jax_pallas_use_mosaic_gpu=True jax_ragged_dot_use_gpu_pallas_triton_lowering=False
jax_ragged_dot_use_ragged_dot_instruction=True jax_random_seed_offset=0 jax_refs_to_pins=False jax_remat3=False
jax_remat_barrier_no_cotangents=False jax_scan3=False jax_softmax_custom_jvp=False
jax_threefry_gpu_kernel_lowering=False jax_threefry_partitionable=True jax_use_direct_linearize=True
jax_use_emit_pipeline_primitive=False jax_use_hlo_logistic_lowering=None jax_use_magma=auto jax_use_rgv3=True
jax_use_shardy_partitioner=True jax_use_simplified_jaxpr_constants=False mock_num_gpu_processes=0
"""
NUMBERS = dict(item.split("=") for item in _DEFAULTS.split())

#: Flags that change no number, as patterns of families and names: devices and transfers, caches, logs, checks that end
#: in an error, experiments without a part in these programs.
HARMLESS = re.compile(
    r"check_vma|jax2tf_\w+|jax_(\w+_cache_\w+|compilation_cache_\w+|raise_persistent_cache_errors|cpu_\w+|"
    r"cross_host_\w+|debug_\w+|distributed_\w+|dump_\w+|mtls_\w+|"
    r"enable_(checks|compilation_cache|custom_prng|pgle|\w+_service)|enable_recoverability|error_checking_\w+|"
    r"explain_\w+|export_\w+|include_\w+|log\w+|pgle_\w+|platform\w*|share_binary_\w+|traceback_\w+|"
    r"transfer_guard\w*|\w+_visible_devices|array_garbage_collection_guard|auto_pcast|backend_target|"
    r"legacy_prng_key|bcoo_cusparse_lowering|captured_constants_\w+|"
    r"check_(proxy_envs|static_indices|tracer_leaks)|default_device|compiler_detailed_logging_min_ops|"
    r"disable_(bwd_checks|vmap_shmap_error)|disallow_mesh_context_manager|experimental_unsafe_xla_runtime_errors|"
    r"force_dcn_\w+|hlo_source_\w+|mosaic_allow_hlo|mutable_array_checks|no_tracing|num_cpu_devices|"
    r"numpy_rank_promotion|pallas_(auto_assign_\w+|enable_debug_checks|verbose_errors)|pjrt_\w+|pprint_use_color|"
    r"raise_on_\w+|remove_\w+|send_traceback_to_runtime|serialization_version|sort_devices_\w+|source_url_schema|"
    r"thread_guard|tracer_error_\w+|use_cpp_\w+|xla_backend|xla_profile_version)"
)


def values() -> dict[str, Any]:
    """Returns JAX's own list of flags with their values."""
    return {name: getattr(value, "value", value) for name, value in jax.config.values.items()}


#: The values of this process, before a user's file could set any.
FIRST = values()


def refuse_changed() -> None:
    """Refuses a flag that may change numbers, set by a variable of the environment or by a user's file.

    Raises:
      UserError: names the flag, its value, and the way to leave it alone.
    """
    for name, value in values().items():
        if name not in FIRST and name not in NUMBERS:  # of another package, such as jax.test_util
            continue
        is_set = name.upper() in os.environ or value != FIRST.get(name)
        if is_set and not HARMLESS.fullmatch(name) and str(value) != NUMBERS.get(name):
            raise UserError(
                f"{name.upper()}={value} is set, which may change numbers, and no run records it: unset it (in a file:"
                f" leave {name} as it is)"
            )
    refuse_xla_flags(os.environ.get("XLA_FLAGS", ""))


@functools.cache
def refuse_xla_flags(flags: str) -> None:
    """Refuses XLA_FLAGS that change how numbers are rounded, and those that XLA cannot read.

    The latter would end this process: another process tries them first.

    Raises:
      UserError: names the flag.
    """
    if not flags:
        return
    if loose := re.search(r"--\w*(fast_m|excess_precision|approx|bf16_dot)\w*(=\S+)?", flags):
        raise UserError(f"XLA_FLAGS={loose[0]} may change numbers, and no run records it: leave it out")
    command = [sys.executable, "-c", "from jaxlib import xla_client; xla_client.CompileOptions()"]
    variables = os.environ | {"XLA_FLAGS": flags}
    tried = subprocess.run(command, env=variables, capture_output=True, encoding="utf-8", errors="replace")
    if tried.returncode and (
        found := re.search(r"Unknown flags? in XLA_FLAGS: .*|Couldn't interpret .*", tried.stderr)
    ):
        raise UserError(f"XLA_FLAGS={flags.strip()}: {found[0].rstrip('.')}: correct it, or leave it out")
