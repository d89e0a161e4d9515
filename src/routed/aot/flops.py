"""FLOPs of the products of a compiled program, read from its text for any platform."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial

from routed.aot.hlo import Module


def flops_of_lines(module: Module) -> Callable[[str], dict[tuple[str, ...], float]]:
    """Returns a measure of the FLOPs of an instruction of a module, for `Module.total` and `Module.loops`."""
    shapes = {}
    for lines in module.computations.values():
        for line in lines:
            if named := re.match(r"\s*(?:ROOT )?%(\S+) = ", line):
                shapes[named[1]] = _axes(line[named.end() :])
    return partial(_measure, shapes)


def _measure(shapes: dict[str, tuple[int, ...]], line: str) -> dict[tuple[str, ...], float]:
    count = flops(line, shapes)
    return {("flops",): count} if count else {}


def flops(line: str, shapes: dict[str, tuple[int, ...]]) -> float:
    """Returns the FLOPs of a product of matrices, a convolution or a kernel that states them; 0 for others.

    `shapes` has the shapes of the instructions that the line names.
    """
    if kernel := re.search(r'"cost_estimate":\{"flops":"(\d+)"', line):
        return float(kernel[1])
    called = re.search(r" (dot|convolution|custom-call)\(([^)]*)\)", line)
    if not called:
        return 0.0
    operands = [shapes[name] for name in re.findall(r"%([^\s,]+)", called[2]) if name in shapes]
    result = _axes(line.partition(" = ")[2])
    target = re.search(r'custom_call_target="(__cu\w+\$[^"]*)"', line)
    contracted = re.search(r'lhs_contracting_dim(?:ension)?s(?:=\{|":\[)"?([\d,"]*)', line)
    if (called[1] == "dot" or (target and target[1].startswith("__cublas"))) and contracted:
        axes = [int(axis) for axis in re.findall(r"\d+", contracted[1])]
        return 2.0 * math.prod(result) * math.prod(operands[0][axis] for axis in axes)
    if called[1] == "convolution":
        return _convolution(line, operands[0], operands[1], result)
    if target and target[1].startswith("__cudnn$conv"):  # its labels are those of the convolution forward
        if target[1].endswith("BackwardInput"):
            return _convolution(line, result, operands[1], operands[0])
        if target[1].endswith("BackwardFilter"):
            return _convolution(line, operands[0], result, operands[1])
        return _convolution(line, operands[0], operands[1], result)
    return 0.0


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
