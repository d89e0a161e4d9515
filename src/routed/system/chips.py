"""Peak rates of accelerators as their makers state them."""

from __future__ import annotations

from typing import NamedTuple


class Chip(NamedTuple):
    """Rates of a chip.

    `kind` is a part of the name that JAX gives it; `peak` the dense FLOP/s by type of the factors; `bandwidth` bytes/s
    of its memory.
    """

    kind: str
    peak: dict[str, float]
    bandwidth: float


# TPUs: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}; by JAX's default a float32 product is one of bfloat16 there.
# GPUs: NVIDIA's data sheets of the SXM models, TF32 for float32.
CHIPS = {
    "v4": Chip("TPU v4", {"bfloat16": 275e12, "float32": 275e12}, 1228e9),
    "v5e": Chip("TPU v5 lite", {"bfloat16": 197e12, "float32": 197e12}, 819e9),
    "v5p": Chip("TPU v5", {"bfloat16": 459e12, "float32": 459e12}, 2765e9),
    "v6e": Chip("TPU v6", {"bfloat16": 918e12, "float32": 918e12}, 1638e9),
    "a100": Chip("A100", {"bfloat16": 312e12, "float32": 156e12}, 2039e9),
    "h100": Chip("H100", {"bfloat16": 989e12, "float32": 495e12}, 3350e9),
    "h200": Chip("H200", {"bfloat16": 989e12, "float32": 495e12}, 4800e9),
}


def chip_of(kind: str) -> Chip | None:
    """Returns the chip to which JAX gives the name `kind`, None for an unknown name."""
    return next((chip for chip in CHIPS.values() if chip.kind in kind), None)
