"""What the T5's training step moves over a mesh: the collectives of the compiled program, and the formula they must agree with."""

from __future__ import annotations

import functools
import json
import math
import re
from collections import defaultdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from routed.contracts import TextBatch
from routed.engine.compilation import compile_group
from routed.engine.devices import make_mesh
from routed.layer.rule import rule_of
from routed.layer.selection import capacity, group_of
from routed.models import expert_axis
from routed.models.t5 import t5
from routed.models.t5_sizes import blocks_of, tokens_of
from routed.settings.tree import override

#: Meshes data x expert of 8 devices.
MESHES = ((8, 1), (1, 8), (2, 4), (4, 2))
#: A T5 that compiles in some seconds: two scanned blocks a stack, no two sizes alike.
SMALL = {
    "name": "scaling", "data.name": "artificial", "data.tokens": "bytes", "data.vocabulary": 320, "data.input_length": 32,
    "data.eval_rows": 16, "data.languages": ("qaa", "qba"), "batch_size": 16, "steps": 4, "eval_every": 2, "checkpoint.every": 1,
    "transformer.layers": 2, "transformer.sparse_layers": 2, "transformer.dim": 8, "transformer.heads": 2,
    "transformer.head_dim": 9, "transformer.width": 24, "experts.name": "gated_ffn", "experts.activation": "gelu",
    "experts.count": 16, "experts.width": 12, "selection.name": "top_k", "selection.k": 2, "selection.eval.k": 2,
    "selection.group_size": 16, "selection.capacity_factor": 1.25, "selection.eval.capacity_factor": 2.0, "dispatch": "slots",
    "optimizer.name": "adam",
}  # fmt: skip

#: Bytes that a device sends, from the bytes n of its result and the devices g of its group: rings (an all-reduce is a reduce-scatter,
#: then an all-gather), and of an all-to-all all but its own part.
SENT = {
    "all-reduce": lambda n, g: 2 * n * (g - 1) / g,
    "all-gather": lambda n, g: n * (g - 1) / g,
    "reduce-scatter": lambda n, g: n * (g - 1),
    "all-to-all": lambda n, g: n * (g - 1) / g,
    "collective-permute": lambda n, g: n,
}


def measured(text: str) -> dict[str, float]:
    """Bytes that a device sends in one training step, by kind and devices of a group, from the text of a compiled chunk.

    The loop over steps is the one with collectives whose turns the program does not know; loops inside count as often as they turn.

    Raises:
      ValueError: no such loop, or several, or a collective that is not understood: nothing is left out in silence.
    """
    computations: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%(\S+) \(.*\{$", line):
            lines = computations.setdefault(header[1], [])
        lines.append(line)

    @functools.cache
    def within(name: str) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        for line in computations[name][1:]:
            turns = _turns(line)
            for inner in (_collective(line), *map(within, _called(line))):
                if inner and turns is None:
                    raise ValueError(f"a loop in a step that does not know its turns: {line.strip()}")
                for key, sent in inner.items():
                    sums[key] += sent * (turns or 0)
        return dict(sums)

    loops = [_called(line) for line in text.splitlines() if _turns(line) is None]
    steps = [sums for called in loops for sums in map(within, called) if sums]
    if len(steps) != 1:
        raise ValueError(f"{len(steps)} loops over steps with collectives, not one")
    return steps[0]


def _called(line: str) -> list[str]:
    """The computations that an instruction runs."""
    if re.search(r" async-(?:update|done)\(", line):  # what async-start runs
        return []
    groups = re.findall(r"(?:calls|to_apply|body|condition|\w+_computations?)=\{?((?:%[^\s,}]+(?:, )?)+)", line)
    return [name for group in groups for name in re.findall(r"%([^\s,}]+)", group)]


def _turns(line: str) -> int | None:
    """How often it runs them; None for a loop that does not know."""
    if " while(" not in line:
        return 1
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
    return int(known[1]) if known else None


def _collective(line: str) -> dict[str, float]:
    """What the collective of a line sends; nothing if it has none, or each device is a group."""
    kinds = r"(?:ragged-)?(?:all-(?:reduce|gather|to-all)|reduce-scatter|collective-[a-z]+)"
    match = re.search(rf" = (.*?) ({kinds})(-start)?\(", line)
    if not match:
        return {}
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
    return {f"{kind} of {devices}": SENT[kind](size, devices)} if devices > 1 else {}


def _devices(line: str) -> int:
    """Devices of a group: {{0,1},{2,3}}, [2,4]<=[8] or mesh['a'=2,'b'=4] {'b'}."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(listed[1].split(","))
    if shaped := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
        return int(shaped[1])
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(part or sizes[axis]) for axis, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2]))
    raise ValueError(f"unknown groups: {line.strip()}")


class Collective(NamedTuple):
    """One kind of collective, summed over a training step: bytes of a device's result, and calls.

    Its groups have `devices` devices, each `stride` away from the next.
    """

    kind: str
    devices: int
    bytes: float
    calls: int
    stride: int = 1


def formula(config: ConfigDict, data: int, expert: int) -> list[Collective]:
    """What a training step of a T5 must move over data x expert devices.

    all-to-all, among `expert`: 2 stacks x sparse layers x 4 (slots go out and come back, and so do gradients; 6 where
    `transformer.remat` makes the first two again) x slots of a device x dim x bytes of transformer.dtype.
    all-reduce, among `data`: gradients of the experts that a device holds. all-reduce, among all: gradients of everything else, of
    the embedding once for each use, and the loss. In transformer.dtype, but float32 for routers, norms and the logits' matrix.

    Without a bias that balances and auxiliary losses, whose loads are further sums of E numbers a layer.
    """
    t, blocks, width = config.transformer, blocks_of(config)[1], jnp.dtype(config.transformer.dtype).itemsize
    own, shared = 0.0, 4.0
    for path, leaf in parameters(config):
        names = [key.key for key in path]
        size = leaf.size * (4 if {"router", "scale", "head"} & {*names} else width)
        if expert_axis(path) is not None:
            own += size / expert
        else:
            shared += size * (2 + t.tied if names[-1] == "embedding" else 1)
    calls = 2 * blocks * (6 if t.remat else 4)
    slots = sum(slots_of(config, tokens) for tokens in tokens_of(config)) / (data * expert)
    moved = (
        Collective("all-to-all", expert, calls / 2 * slots * t.dim * width, calls),
        Collective("all-reduce", data, own, 2 * blocks, stride=expert),
        Collective("all-reduce", data * expert, shared, 2 * blocks + 1),
    )
    return [one for one in moved if one.devices > 1]


def slots_of(config: ConfigDict, tokens: int) -> int:
    """Slots of a sparse layer for so many tokens: experts x places x groups."""
    group = group_of(config.selection.group_size, tokens)
    return config.experts.count * capacity(rule_of(config.selection), group, config.experts.count) * (tokens // group)


def parameters(config: ConfigDict) -> list[tuple[Any, Any]]:
    """Paths and shapes of the T5's parameters, whatever the batch."""
    return _shapes(override(config, {"batch_size": 1, "selection.group_size": 0}).to_json())


@functools.lru_cache
def _shapes(config: str) -> list[tuple[Any, Any]]:
    rows = TextBatch(*(jnp.zeros(shape, jnp.int32) for shape in ((1, 1), (1, 1), (1,))))
    params, _ = jax.eval_shape(t5(ConfigDict(json.loads(config))).init, jax.random.key(0), rows)
    return jax.tree_util.tree_leaves_with_path(params)


def collectives(config: ConfigDict, data: int, expert: int) -> list[dict[str, Any]]:
    """Records {mesh, collective, bytes, formula} of what a device sends in a step, over data x expert devices."""
    config = override(config, {"mesh.data": data, "mesh.expert": expert})
    program: Any = compile_group(config, 0, 1, make_mesh(config)).advance
    sent, expected = measured(program.as_text()), dict[str, float]()
    for one in formula(config, data, expert):
        name = f"{one.kind} of {one.devices}"
        expected[name] = expected.get(name, 0.0) + SENT[one.kind](one.bytes, one.devices)
    return [
        {"mesh": f"{data} x {expert}", "collective": name, "bytes": sent.get(name), "formula": expected.get(name)}
        for name in sorted(sent | expected)
    ]
