"""Collectives: bytes that a device sends over the links between chips, and the time that they take."""

from __future__ import annotations

from typing import NamedTuple

#: kind -> bytes that a device sends, from the bytes n of its result and the g devices of its group. Rings (an
#: all-reduce is a reduce-scatter, then an all-gather); of an all-to-all a device keeps its own part.
SENT = {
    "all-reduce": lambda n, g: 2 * n * (g - 1) / g,
    "all-gather": lambda n, g: n * (g - 1) / g,
    "reduce-scatter": lambda n, g: n * (g - 1),
    "all-to-all": lambda n, g: n * (g - 1) / g,
    "collective-permute": lambda n, g: n,
}


class Collective(NamedTuple):
    """A kind of collective, summed over a training step."""

    kind: str
    devices: int  # of a group
    bytes: float  # of a device's result
    calls: int
    stride: int = 1  # from a device of a group to the next

    @property
    def sent(self) -> float:
        """Bytes that a device sends."""
        return SENT[self.kind](self.bytes, self.devices)


def torus(collective: Collective, *, axes: int, closes: int, link: float = 50e9, hop: float = 1e-6) -> float:
    """Returns the seconds of a collective on a slice of TPUs, from `link` bytes/s one way and `hop` seconds.

    Rings close in slices of `closes` chips and use all axes at once. A quarter of all bytes of an all-to-all crosses
    the middle of the longest side in each direction.
    """
    power = collective.devices.bit_length() - 1
    sides = [2 ** (power // axes + (i < power % axes)) for i in range(axes)]  # as equal as a power of two can be
    ways = 1 + (collective.devices >= closes)
    time = collective.sent / (link * ways * sum(side > 1 for side in sides))
    if collective.kind == "all-to-all":
        time = max(time, collective.bytes / 4 * max(sides) / (link * ways))
    return time + collective.calls * hop * sum(sides)


def nodes(
    collective: Collective, *, size: int = 8, inside: float = 450e9, between: float = 50e9, call: float = 20e-6
) -> float:
    """Returns the seconds of a collective on nodes of `size` GPUs behind a switch, joined by a network.

    `inside` and `between` are bytes/s of a GPU one way, `call` seconds of a call (a guess). A sum is formed in each
    node first, then each GPU sums its share over the network.
    """
    kind, devices = collective.kind, collective.devices
    near = min(devices, max(1, size // collective.stride))
    far = collective.bytes / near if kind == "all-reduce" else collective.bytes
    sent = SENT[kind](collective.bytes, near) * (1 if kind == "all-reduce" else near / devices)
    return sent / inside + SENT[kind](far, devices // near) / between + collective.calls * call
