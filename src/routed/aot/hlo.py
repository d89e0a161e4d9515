"""Text of a compiled program: its computations and loops, cycles that XLA estimates, collectives, FLOPs of products."""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping

from routed.aot.interconnect import SENT, Collective

#: purpose -> pattern of an instruction's name; the first match counts, else the purpose is `other`. Patterns are scopes
#: of the program (`evaluation`, `optimiser`), modules of the models, and JAX's names of functions and primitives.
PURPOSES: dict[str, str] = {
    "evaluation": r"/evaluation/",
    "random numbers": r"threefry|random_|\(_randint|\(_uniform|\(_normal|\(_gumbel|\(_bernoulli|\(_shuffle",
    "optimiser": r"/optimiser",
    "routing": r"(?i:moe)\.(route|select)|/router",
    "attention": r"/(self|cross|bias)/",
    "products": r"dot_general|conv_general|gmm",
    "dispatch": r"(?i:moe)",
}
#: Sums over instructions; the first part of a key names the quantity.
Sums = Mapping[tuple[str, ...], float]


class Module:
    """Computations of a compiled program, read from its text."""

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
        """Returns how many times an instruction runs its computations; None for a loop without a known end."""
        if " while(" not in line:
            return 1
        if count := re.search(r'"known_trip_count":\{"n":"(\d+)"', line):
            return int(count[1])
        # A TPU's program says it in the condition alone: a counter that starts at 0, below a constant.
        condition = "\n".join(self.computations[re.findall(r"condition=%([^\s,}]+)", line)[0]])
        below = re.search(r"ROOT [^\n]* compare\(%\S+, %([^\s,)]+)\), direction=LT", condition)
        bound = re.search(rf"%{re.escape(below[1])} = s32\[\]\S* constant\((\d+)\)", condition) if below else None
        return int(bound[1]) if bound else None

    def total(self, name: str, measure: Callable[[str], Sums], strict: bool = True) -> dict[tuple[str, ...], float]:
        """Sums `measure` over the instructions of a computation and of all computations that it calls.

        A loop without a known end is counted once, and the number of such loops is the sum `endless`.

        Raises:
          ValueError: `strict`, and such a loop contributes to a sum.
        """

        @functools.cache
        def sums_of(name: str) -> dict[tuple[str, ...], float]:
            sums: dict[tuple[str, ...], float] = defaultdict(float)
            for line in self.computations[name][1:]:
                turns = self.turns(line)
                parts = [part for part in (measure(line), *map(sums_of, called(line))) if part]
                if parts and turns is None:
                    if strict:
                        raise ValueError(f"a loop in a step that does not know its turns: {line.strip()}")
                    sums[("endless",)] += 1
                for part in parts:
                    for key, value in part.items():
                        sums[key] += value * (1 if turns is None else turns)
            return dict(sums)

        return sums_of(name)

    def loops(self, measure: Callable[[str], Sums], strict: bool = True) -> list[dict[tuple[str, ...], float]]:
        """Sums `measure` over the body of each loop without a known end, as the loop over steps; omits empty sums."""
        bodies = [called(line) for lines in self.computations.values() for line in lines if self.turns(line) is None]
        totals = [self.total(name, measure, strict) for names in bodies for name in names]
        return [sums for sums in totals if sums]


def called(line: str) -> list[str]:
    """Returns the names of the computations that an instruction runs."""
    if re.search(r" async-(?:update|done)\(", line):  # counted at async-start
        return []
    groups = re.findall(r"(?:calls|to_apply|body|condition|\w+_computations?)=\{?((?:%[^\s,}]+(?:, )?)+)", line)
    return [name for group in groups for name in re.findall(r"%([^\s,}]+)", group)]


def collectives_of_step(text: str) -> list[Collective]:
    """Returns the collectives of one training step.

    The loop over steps is the only loop with collectives and without a known end.

    Raises:
      ValueError: there is no such loop, or several, or an unknown collective: nothing is left out in silence.
    """
    steps = Module(text).loops(traffic)
    if len(steps) != 1:
        raise ValueError(f"{len(steps)} loops over steps with collectives, not one")
    return collectives(steps[0])


def traffic(line: str) -> dict[tuple[str, ...], float]:
    """Measures bytes and calls of the collective of an instruction."""
    if not (parsed := collective(line)):
        return {}
    key = (parsed.kind, str(parsed.devices))
    return {("bytes", *key): parsed.bytes, ("calls", *key): parsed.calls}


def collectives(sums: Sums) -> list[Collective]:
    """Returns the collectives in sums of `traffic`."""
    keys = [key[1:] for key in sums if key[0] == "bytes"]
    return [
        Collective(kind, int(devices), sums["bytes", kind, devices], int(sums["calls", kind, devices]))
        for kind, devices in keys
    ]


def collective(line: str) -> Collective | None:
    """Returns the collective of an instruction; None without one, or if each device is a group.

    Raises:
      ValueError: the collective or its groups are unknown.
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
    if start and kind != "all-reduce":  # its shape has operand, result and some counters
        whole = {"all-gather": devices / (devices + 1), "reduce-scatter": 1 / (devices + 1)}
        size = (size - 4 * shape.count("u32[]")) * whole.get(kind, 1 / 2)
    return Collective(kind, devices, size, 1) if devices > 1 else None


def _devices(line: str) -> int:
    """Returns the devices of a group.

    Groups are written {{0,1},{2,3}}, [2,4]<=[8], or mesh['a'=2,'b'=4] {'b'}, where device_ids=(..) may reorder devices.
    """
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(listed[1].split(","))
    if shaped := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
        return int(shaped[1])
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\([^{]*\))? \{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(part or sizes[axis]) for axis, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2]))
    raise ValueError(f"unknown groups: {line.strip()}")


def cycles(line: str) -> dict[tuple[str, ...], float]:
    """Measures the cycles that XLA estimates for an instruction, by purpose (TPUs); 2^63 - 1 means no estimate."""
    estimated = re.search(r'"estimated_cycles":"(\d+)"', line)
    if not estimated:
        return {}
    if int(estimated[1]) >= 2**62:
        return {("unestimated",): 1.0}
    named = re.search(r'op_name="([^"]*)"', line)
    return {("cycles", purpose(named[1] if named else "")): float(estimated[1])}


def purpose(name: str) -> str:
    """Returns the purpose of an instruction, from its name in the program."""
    return next((label for label, pattern in PURPOSES.items() if re.search(pattern, name)), "other")


def flops_of_lines(module: Module) -> Callable[[str], dict[tuple[str, ...], float]]:
    """Returns a measure of the FLOPs of an instruction of a module, for `Module.total` and `Module.loops`."""
    shapes = {
        named[1]: _axes(line[named.end() :])
        for lines in module.computations.values()
        for line in lines
        if (named := re.match(r"\s*(?:ROOT )?%(\S+) = ", line))
    }
    return lambda line: {("flops",): count} if (count := flops(line, shapes)) else {}


def flops(line: str, shapes: dict[str, tuple[int, ...]]) -> float:
    """Returns the FLOPs of a product of matrices, a convolution or a kernel that states them; 0 for others.

    `shapes` has the shapes of the instructions that the line names.
    """
    if kernel := re.search(r'"cost_estimate":\{"flops":"(\d+)"', line):
        return float(kernel[1])
    call = re.search(r" (dot|convolution|custom-call)\(([^)]*)\)", line)
    if not call:
        return 0.0
    operands = [shapes[name] for name in re.findall(r"%([^\s,]+)", call[2]) if name in shapes]
    result = _axes(line.partition(" = ")[2])
    target = re.search(r'custom_call_target="(__cu\w+\$[^"]*)"', line)
    contracted = re.search(r'lhs_contracting_dim(?:ension)?s(?:=\{|":\[)"?([\d,"]*)', line)
    if (call[1] == "dot" or (target and target[1].startswith("__cublas"))) and contracted:
        axes = [int(axis) for axis in re.findall(r"\d+", contracted[1])]
        return 2.0 * math.prod(result) * math.prod(operands[0][axis] for axis in axes)
    if call[1] != "convolution" and not (target and target[1].startswith("__cudnn$conv")):
        return 0.0
    left, right = operands[:2]
    if target and target[1].endswith("BackwardInput"):  # the labels are those of the convolution forward
        left, result = result, left
    elif target and target[1].endswith("BackwardFilter"):
        right, result = result, right
    return _convolution(line, left, right, result)


def _convolution(line: str, left: tuple[int, ...], right: tuple[int, ...], result: tuple[int, ...]) -> float:
    """Counts twice the pairs of elements of `left` and `right`, without padding and holes of a dilation.

    TPUs write a product of matrices as a convolution, and a batch of products as a window with holes.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line)
    if labels is None:
        raise ValueError(f"a convolution without labels: {line.strip()}")
    window = dict(re.findall(r"(\w+)=([\d_x-]+)", (re.search(r"window=\{([^}]*)\}", line) or ["", ""])[1]))
    batches = re.search(r"batch_group_count=(\d+)", line)
    count = 2.0 * left[labels[1].index("b")] * right[labels[2].index("i")] * result[labels[3].index("f")]
    for axis in range(sum(label.isdigit() for label in labels[1])):

        def entry(name: str, default: str, axis: int = axis) -> str:
            return window[name].split("x")[axis] if name in window else default

        inputs, window_size, outputs = (
            shape[names.index(str(axis))] for shape, names in zip((left, right, result), labels.groups(), strict=True)
        )
        pad, stride = int(entry("pad", "0_0").split("_")[0]), int(entry("stride", "1"))
        holes, dilation = int(entry("lhs_dilate", "1")), int(entry("rhs_dilate", "1"))
        count *= _pairs(inputs, window_size, outputs, stride, pad, holes, dilation)
    return count / (int(batches[1]) if batches else 1)


def _pairs(left: int, right: int, result: int, stride: int, pad: int, holes: int, dilation: int) -> int:
    """Counts the pairs of a window's position and an element of the window that meet an element of the input."""
    points = ((o * stride + k * dilation - pad) for o in range(result) for k in range(right))
    return sum(point % holes == 0 and 0 <= point // holes < left for point in points)


def _axes(text: str) -> tuple[int, ...]:
    """Returns the axes of the first array in a shape."""
    shape = re.search(r"\b[a-z]+\d*[a-z0-9]*\[([\d,]*)\]", text)
    return tuple(int(n) for n in shape[1].split(",") if n) if shape else ()
