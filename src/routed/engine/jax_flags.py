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

#: Flags that change no number, as patterns of families and names: devices and transfers, caches, logs, checks that end
#: in an error, experiments without a part in these programs. Any other flag may change numbers.
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
        if name not in FIRST:  # of another package, such as jax.test_util
            continue
        if (name.upper() in os.environ or value != FIRST[name]) and not HARMLESS.fullmatch(name):
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
