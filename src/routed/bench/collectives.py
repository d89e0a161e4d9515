"""What the T5's training step moves over a mesh: the collectives of the compiled program, and the formula they must agree with."""

from __future__ import annotations

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from routed.aot import hlo
from routed.aot.interconnect import Collective
from routed.contracts import TextBatch
from routed.engine.compilation import lower_group
from routed.engine.devices import make_mesh
from routed.layer.rule import rule_of
from routed.layer.selection import capacity, group_of
from routed.models import expert_axis
from routed.models.t5 import t5
from routed.models.transformer_sizes import blocks_of, tokens_of
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


def formula(config: ConfigDict, data: int, expert: int) -> list[Collective]:
    """What a training step of a T5 must move over data x expert devices.

    all-to-all, among `expert`: 2 stacks x sparse layers x 4 (slots go out and come back, and so do gradients; 6 where
    `transformer.remat` makes the first two again) x slots of a device x dim x bytes of transformer.dtype.
    all-reduce, among `data`: gradients of the experts that a device holds. all-reduce, among all: gradients of everything else, of
    the embedding once for both stacks (and once more where it is tied to the logits), and the loss. In transformer.dtype, but float32 for routers, norms and the logits' matrix.

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
            shared += size * (1 + t.tied if names[-1] == "embedding" else 1)
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
    program: Any = lower_group(config, 0, 1, make_mesh(config)).advance.compile()
    found, expected = (
        {f"{one.kind} of {one.devices}": one.sent for one in hlo.collectives_of_step(program.as_text())},
        dict[str, float](),
    )
    for one in formula(config, data, expert):
        name = f"{one.kind} of {one.devices}"
        expected[name] = expected.get(name, 0.0) + one.sent
    return [
        {"mesh": f"{data} x {expert}", "collective": name, "bytes": found.get(name), "formula": expected.get(name)}
        for name in sorted(found | expected)
    ]
