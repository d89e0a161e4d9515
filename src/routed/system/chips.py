"""Accelerators as their makers state them, and what an hour of one costs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from routed.system.interconnect import Collective, nodes, torus


class Chip(NamedTuple):
    """A chip: a part of the name that JAX gives it, and its rates.

    Dense peak FLOP/s by type of the factors, bytes of memory and bytes/s to it, price of an hour in dollars, seconds of a
    collective. `clock` is that of the cycles in which XLA counts (TPUs).
    """

    kind: str
    peak: dict[str, float]
    memory: float
    bandwidth: float
    price: float
    seconds: Callable[[Collective], float]
    clock: float = 0.0


#: Of what the prices are; nobody has confirmed them since.
PRICED = "list prices on demand as known in 2026, not quotes"

# TPUs: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}, jax.experimental.pallas.tpu.get_tpu_info; a float32 product is one of bfloat16 there
# by JAX's default; v4 and v5p close rings from 4 x 4 x 4 on, v5e and v6e at 16 x 16. A clock is an assumption: the one at which the units
# named there reach the peak, 4 or 8 of 128 x 128 (v4, v5e, v5p), of v6e two of 256 x 256 with two products a cycle each. By XLA's estimate of
# a product of 8,192 x 8,192 these clocks give .90, .88, .90 and .70 of the peak. GPUs: NVIDIA's data sheets of the SXM models, TF32 for
# float32, NVLink 600 (A100) and 900 GB/s both ways, a 400 Gb/s port a GPU. A hop: How to Scale Your Model, part 3.
CHIPS = {
    "v4": Chip("TPU v4", {"bfloat16": 275e12, "float32": 275e12}, 34.4e9, 1228e9, 3.22, partial(torus, axes=3, closes=64), 1.05e9),
    "v5e": Chip("TPU v5 lite", {"bfloat16": 197e12, "float32": 197e12}, 17.2e9, 819e9, 1.20, partial(torus, axes=2, closes=256), 1.5e9),
    "v5p": Chip("TPU v5", {"bfloat16": 459e12, "float32": 459e12}, 103e9, 2765e9, 4.20, partial(torus, axes=3, closes=64, link=100e9), 1.75e9),
    "v6e": Chip("TPU v6", {"bfloat16": 918e12, "float32": 918e12}, 34.4e9, 1638e9, 2.70, partial(torus, axes=2, closes=256, link=100e9), 1.75e9),
    "a100": Chip("A100", {"bfloat16": 312e12, "float32": 156e12}, 85.9e9, 2039e9, 3.43, partial(nodes, inside=300e9)),
    "h100": Chip("H100", {"bfloat16": 989e12, "float32": 495e12}, 85.9e9, 3350e9, 6.88, nodes),
    "h200": Chip("H200", {"bfloat16": 989e12, "float32": 495e12}, 151e9, 4800e9, 7.91, nodes),
}  # fmt: skip


def chip_of(kind: str) -> Chip | None:
    """The chip to which JAX gives the name `kind`; None if it is not known."""
    return next((chip for chip in CHIPS.values() if chip.kind in kind), None)
