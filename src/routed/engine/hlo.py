"""What a compiled program does, read from its text: cycles that XLA estimates, by purpose, and what its collectives send."""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping

from routed.system.interconnect import SENT, Collective

#: purpose -> what the name of an instruction says, the first that fits, else it is `other`: the scopes of the program (`evaluation`,
#: `optimiser`), modules of the models, and JAX's own names of functions and primitives.
PURPOSES: dict[str, str] = {
    "evaluation": r"/evaluation/",
    "random numbers": r"threefry|random_|\(_randint|\(_uniform|\(_normal|\(_gumbel|\(_bernoulli|\(_shuffle",
    "optimiser": r"/optimiser",
    "routing": r"(?i:moe)\.(route|select)|/router",
    "attention": r"/(self|cross|bias)/",
    "products": r"dot_general|conv_general|gmm",
    "dispatch": r"(?i:moe)",
}
#: What is counted of instructions, by a key whose first part says what it is.
Sums = Mapping[tuple[str, ...], float]


class Module:
    """The text of a compiled program as its computations, and which of them a training step runs."""

    def __init__(self, text: str):
        self.computations: dict[str, list[str]] = {}
        lines: list[str] = []
        for line in text.splitlines():
            if header := re.match(r"(?:ENTRY )?%(\S+) \(.*\{$", line):
                lines = self.computations.setdefault(header[1], [])
                if line.startswith("ENTRY"):
                    self.entry = header[1]
            lines.append(line)

    def turns(self, line: str) -> int | None:
        """How often an instruction runs what it calls; None for a loop that does not know."""
        if " while(" not in line:
            return 1
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', line):
            return int(known[1])
        # A TPU's program says it in the condition alone: a counter that starts at 0, below a constant.
        condition = self.computations[re.findall(r"condition=%([^\s,}]+)", line)[0]]
        end = "\n".join(condition)
        below = re.search(r"ROOT [^\n]* compare\(%\S+, %([^\s,)]+)\), direction=LT", end)
        bound = re.search(rf"%{re.escape(below[1])} = s32\[\]\S* constant\((\d+)\)", end) if below else None
        return int(bound[1]) if bound else None

    def within(self, name: str, measure: Callable[[str], Sums], strict: bool = True) -> dict[tuple[str, ...], float]:
        """The sums of what `measure` says of the instructions of a computation and of what they call.

        Loops that do not know their turns are counted as `endless`, and what they have once.

        Raises:
          ValueError: `strict`, and a loop that does not know its turns has some of it.
        """

        @functools.cache
        def of(name: str) -> dict[tuple[str, ...], float]:
            sums: dict[tuple[str, ...], float] = defaultdict(float)
            for line in self.computations[name][1:]:
                turns = self.turns(line)
                parts = [inner for inner in (measure(line), *map(of, called(line))) if inner]
                if parts and turns is None:
                    if strict:
                        raise ValueError(f"a loop in a step that does not know its turns: {line.strip()}")
                    sums[("endless",)] += 1
                for inner in parts:
                    for key, value in inner.items():
                        sums[key] += value * (1 if turns is None else turns)
            return dict(sums)

        return of(name)

    def loops(self, measure: Callable[[str], Sums], strict: bool = True) -> list[dict[tuple[str, ...], float]]:
        """What the bodies of loops have that do not know their turns: the loop over steps, and any other, if they have anything."""
        bodies = [called(line) for lines in self.computations.values() for line in lines if self.turns(line) is None]
        sums = [self.within(name, measure, strict) for names in bodies for name in names]
        return [one for one in sums if one]


def called(line: str) -> list[str]:
    """The computations that an instruction runs."""
    if re.search(r" async-(?:update|done)\(", line):  # what async-start runs
        return []
    groups = re.findall(r"(?:calls|to_apply|body|condition|\w+_computations?)=\{?((?:%[^\s,}]+(?:, )?)+)", line)
    return [name for group in groups for name in re.findall(r"%([^\s,}]+)", group)]


def sent(text: str) -> list[Collective]:
    """The collectives of one training step.

    The loop over steps is the one with collectives whose turns the program does not know; loops inside count as often as they turn.

    Raises:
      ValueError: no such loop, or several, or a collective that is not understood: nothing is left out in silence.
    """
    steps = Module(text).loops(sends)
    if len(steps) != 1:
        raise ValueError(f"{len(steps)} loops over steps with collectives, not one")
    return collectives(steps[0])


def sends(line: str) -> dict[tuple[str, ...], float]:
    """Bytes and calls of the collective of an instruction."""
    if not (one := collective(line)):
        return {}
    key = (one.kind, str(one.devices))
    return {("bytes", *key): one.bytes, ("calls", *key): one.calls}


def collectives(sums: Sums) -> list[Collective]:
    """The collectives that are among sums of `sends`."""
    keys = [key[1:] for key in sums if key[0] == "bytes"]
    return [
        Collective(kind, int(devices), sums["bytes", kind, devices], int(sums["calls", kind, devices]))
        for kind, devices in keys
    ]


def collective(line: str) -> Collective | None:
    """The collective of an instruction; None if it has none, or each device is a group.

    Raises:
      ValueError: it is not understood.
    """
    kinds = r"(?:ragged-)?(?:all-(?:reduce|gather|to-all)|reduce-scatter|collective-[a-z]+)"
    match = re.search(rf" = (.*?) ({kinds})(-start)?\(", line)
    if not match:
        return None
    shape, kind, start = match.groups()
    if kind not in SENT:
        raise ValueError(f"unknown collective: {line.strip()}")
    devices = 2 if kind == "collective-permute" else _devices(line)
    size = 0.0
    for bits, axes in re.findall(r"\b(?:pred|[a-z]+(\d+))[a-z0-9]*\[([\d,]*)\]", shape):
        size += int(bits or 8) / 8 * math.prod(int(n) for n in axes.split(",") if n)
    if start and kind != "all-reduce":  # its shape is that of operand, result and some counters
        whole = {"all-gather": devices / (devices + 1), "reduce-scatter": 1 / (devices + 1)}
        size = (size - 4 * shape.count("u32[]")) * whole.get(kind, 1 / 2)
    return Collective(kind, devices, size, 1) if devices > 1 else None


def _devices(line: str) -> int:
    """Devices of a group: {{0,1},{2,3}}, [2,4]<=[8], or mesh['a'=2,'b'=4] {'b'}, whose devices may be in another order, device_ids=(..)."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(listed[1].split(","))
    if shaped := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
        return int(shaped[1])
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\([^{]*\))? \{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(part or sizes[axis]) for axis, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2]))
    raise ValueError(f"unknown groups: {line.strip()}")


def cycles(line: str) -> dict[tuple[str, ...], float]:
    """Cycles that XLA estimates for an instruction, by its purpose; TPUs only. Where it has no estimate it says 2^63 - 1."""
    estimated = re.search(r'"estimated_cycles":"(\d+)"', line)
    if not estimated:
        return {}
    if int(estimated[1]) >= 2**62:
        return {("unestimated",): 1.0}
    named = re.search(r'op_name="([^"]*)"', line)
    return {("cycles", purpose(named[1] if named else "")): float(estimated[1])}


def purpose(name: str) -> str:
    """What an instruction is for, by its name in the program."""
    return next((one for one, pattern in PURPOSES.items() if re.search(pattern, name)), "other")
