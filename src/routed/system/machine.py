"""What this machine can do: the rates that floors are made of."""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np


def matrix_rate() -> float:
    """FLOP/s of a large float32 product on all cores: the best of five."""
    a = jnp.ones((2048, 2048), jnp.float32)
    product = jax.jit(lambda a: a @ a)
    return max(2 * 2048**3 / _time(lambda: product(a).block_until_ready()) for _ in range(5))


def memory_bandwidth() -> float:
    """Bytes/s of x += y on arrays far larger than the caches: the best of five."""
    x, y = np.zeros(2**26, np.float32), np.ones(2**26, np.float32)
    return max(3 * x.nbytes / _time(lambda: np.add(x, y, out=x)) for _ in range(5))


def _time(function) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


#: FLOP/s of one device in bfloat16, dense, as its maker states them; by a part of the name JAX gives the device.
PEAKS = {
    "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5p": 459e12, "TPU v5": 459e12, "TPU v6": 918e12,
    "H200": 989e12, "H100": 989e12, "A100": 312e12,
}  # fmt: skip


@functools.cache
def peak() -> float:
    """FLOP/s of all devices: their maker's number, or on a CPU the rate of a large product, measured once."""
    kind = jax.devices()[0].device_kind
    known = [rate for name, rate in PEAKS.items() if name in kind]
    return known[0] * jax.device_count() if known else matrix_rate()
