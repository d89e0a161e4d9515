"""Chips for which programs are compiled: memory, clock, network and price of an hour."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from routed.aot.interconnect import Collective, nodes, torus
from routed.system.chips import CHIPS, Chip


class Target(NamedTuple):
    """A chip with bytes of memory, dollars of an hour, and the time of a collective in seconds.

    `clock` (Hz) belongs to the cycles in which XLA counts; 0 for GPUs, of which XLA estimates no cycles.
    """

    chip: Chip
    memory: float
    price: float
    seconds: Callable[[Collective], float]
    clock: float = 0.0


#: Source of the prices; nobody has confirmed them since.
PRICED = "list prices on demand as known in 2026, not quotes"

# v4 and v5p close rings from 4 x 4 x 4 on, v5e and v6e at 16 x 16. A clock is an assumption: with it the matrix units
# of jax.experimental.pallas.tpu.get_tpu_info reach the peak, 4 or 8 of 128 x 128 (v4, v5e, v5p), two of 256 x 256 with
# two products a cycle each (v6e). By XLA's estimate of a product of 8,192 x 8,192 these clocks give .90, .88, .90 and
# .70 of the peak. GPUs: NVLink of 600 (A100) and 900 GB/s both ways, a 400 Gb/s port a GPU. A hop: How to Scale Your
# Model, part 3.
TARGETS = {
    "v4": Target(CHIPS["v4"], 34.4e9, 3.22, partial(torus, axes=3, closes=64), 1.05e9),
    "v5e": Target(CHIPS["v5e"], 17.2e9, 1.20, partial(torus, axes=2, closes=256), 1.5e9),
    "v5p": Target(CHIPS["v5p"], 103e9, 4.20, partial(torus, axes=3, closes=64, link=100e9), 1.75e9),
    "v6e": Target(CHIPS["v6e"], 34.4e9, 2.70, partial(torus, axes=2, closes=256, link=100e9), 1.75e9),
    "a100": Target(CHIPS["a100"], 85.9e9, 3.43, partial(nodes, inside=300e9)),
    "h100": Target(CHIPS["h100"], 85.9e9, 6.88, nodes),
    "h200": Target(CHIPS["h200"], 151e9, 7.91, nodes),
}
