"""What collectives send over the links between chips, and how long that takes."""

from __future__ import annotations

from typing import NamedTuple

#: Bytes that a device sends, from the bytes n of its result and the devices g of its group: rings (an all-reduce is a reduce-scatter,
#: then an all-gather), and of an all-to-all all but its own part.
SENT = {
    "all-reduce": lambda n, g: 2 * n * (g - 1) / g,
    "all-gather": lambda n, g: n * (g - 1) / g,
    "reduce-scatter": lambda n, g: n * (g - 1),
    "all-to-all": lambda n, g: n * (g - 1) / g,
    "collective-permute": lambda n, g: n,
}


class Collective(NamedTuple):
    """One kind of collective, summed over a training step: bytes of a device's result, and calls.

    Its groups have `devices` devices, each `stride` away from the next.
    """

    kind: str
    devices: int
    bytes: float
    calls: int
    stride: int = 1

    @property
    def sent(self) -> float:
        """Bytes that a device sends."""
        return SENT[self.kind](self.bytes, self.devices)


def torus(one: Collective, *, axes: int, closes: int, link: float = 50e9, hop: float = 1e-6) -> float:
    """Seconds of a collective on a slice of TPUs: `link` bytes/s one way, `hop` seconds; rings close in slices of `closes` chips.

    Rings use all axes at once. Of an all-to-all a quarter of all bytes crosses the middle of the longest side in each direction.
    """
    power = one.devices.bit_length() - 1
    sides = [2 ** (power // axes + (i < power % axes)) for i in range(axes)]  # as equal as a power of two can be
    ways = 1 + (one.devices >= closes)
    time = one.sent / (link * ways * sum(side > 1 for side in sides))
    if one.kind == "all-to-all":
        time = max(time, one.bytes / 4 * max(sides) / (link * ways))
    return time + one.calls * hop * sum(sides)


def nodes(
    one: Collective, *, size: int = 8, inside: float = 450e9, between: float = 50e9, call: float = 20e-6
) -> float:
    """Seconds on nodes of `size` GPUs behind a switch, joined by a network: bytes/s of a GPU one way, `call` seconds (a guess).

    A sum is made in each node first, then by each GPU of a share of it over the network.
    """
    near = min(one.devices, max(1, size // one.stride))
    far = one.bytes / near if one.kind == "all-reduce" else one.bytes
    within = SENT[one.kind](one.bytes, near) * (1 if one.kind == "all-reduce" else near / one.devices)
    return within / inside + SENT[one.kind](far, one.devices // near) / between + one.calls * call
