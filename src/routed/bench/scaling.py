"""Scaling of runs over devices: bytes of the collectives of a step, and the throughput of a sweep.

Bytes of the T5's training step on 8 virtual devices, runs an hour of the Gaussian bench on 1 to 8 cores. `bench pods`
compiles for pods.
"""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from routed.aot import hlo
from routed.aot.interconnect import Collective
from routed.bench import gmm
from routed.bench.harness import in_new_process
from routed.bench.trainings import Batch
from routed.contracts import TextBatch
from routed.engine.compilation import lower_group
from routed.engine.devices import make_mesh
from routed.layer.rule import selection_rule
from routed.layer.selection import capacity, group_of
from routed.models import expert_axis
from routed.models.t5 import t5
from routed.models.transformer_sizes import blocks_of, tokens_of
from routed.plan.config import base, canonical
from routed.settings.tree import override

#: Meshes data x expert of 8 devices.
MESHES = ((8, 1), (1, 8), (2, 4), (4, 2))
#: A T5 that compiles in some seconds: two scanned blocks a stack, no two sizes alike.
SMALL: dict[str, Any] = {"name": "scaling", "data.name": "artificial", "data.tokens": "bytes", "data.vocabulary": 320}
SMALL |= {"data.input_length": 32, "data.eval_rows": 16, "data.languages": ("qaa", "qba"), "batch_size": 16}
SMALL |= {"transformer.layers": 2, "transformer.sparse_layers": 2, "transformer.dim": 8, "transformer.heads": 2}
SMALL |= {"transformer.head_dim": 9, "transformer.width": 24, "experts.count": 16, "experts.width": 12}
SMALL |= {"experts.name": "gated_ffn", "experts.activation": "gelu", "dispatch": "slots", "selection.name": "top_k"}
SMALL |= {"selection.k": 2, "selection.eval.k": 2, "selection.group_size": 16, "selection.capacity_factor": 1.25}
SMALL |= {"selection.eval.capacity_factor": 2.0}
SMALL |= {"steps": 4, "eval_every": 2, "checkpoint.every": 1, "optimizer.name": "adam"}


def bench(rounds: int) -> list[dict[str, Any]]:
    """Returns the records of `collectives` and of `sweep`."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # of the sweep's processes
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)  # before anything asks JAX for its devices
    moved = [record for mesh in MESHES for record in collectives(override(base(), SMALL), *mesh)]
    return [*moved, *sweep(rounds)]


def sweep(rounds: int) -> list[dict[str, Any]]:
    """Returns records {devices, cores, runs_per_hour, share_of_linear}; more devices than cores cannot be faster."""
    records: list[dict[str, Any]] = []
    for devices in (1, 2, 4, 8):
        rate = in_new_process(f"from routed.bench import scaling; print(scaling.runs_per_hour({devices}, {rounds}))")
        share = rate / devices / (records[0]["runs_per_hour"] if records else rate)
        cores = len(os.sched_getaffinity(0))
        records.append({"devices": devices, "cores": cores, "runs_per_hour": rate, "share_of_linear": share})
    return records


def runs_per_hour(devices: int, rounds: int) -> float:
    """Returns the runs an hour of the Gaussian bench (constant experts, 4,000 steps of 512), a device for each core.

    Restricts this process to these cores, since one device would use the others too.
    """
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:devices])
    jax.config.update("jax_num_cpu_devices", devices)
    changes, steps, _ = gmm.CASES["constant"]
    batch = Batch(canonical(override(base(), gmm.COMMON | changes)), 32, steps)
    batch.train()  # the first call touches the memory
    return 3600 / base().steps / statistics.median(batch.step() for _ in range(rounds))


def formula(config: ConfigDict, data: int, expert: int) -> list[Collective]:
    """Returns the collectives that a training step of a T5 needs over data x expert devices.

    all-to-all, among `expert`: 2 stacks x sparse layers x 4 (slots go out and come back, and so do gradients; 6 where
    `transformer.remat` repeats the first two) x slots of a device x dim x bytes of transformer.dtype.
    all-reduce, among `data`: gradients of the experts that a device has. all-reduce, among all: gradients of everything
    else, of the embedding once for both stacks (and once more where it is tied to the logits), and the loss. All in
    transformer.dtype, but float32 for routers, norms and the matrix of the logits.

    Without a bias that balances and auxiliary losses, whose loads are further sums of E numbers a layer.
    """
    t, blocks, width = config.transformer, blocks_of(config)[1], jnp.dtype(config.transformer.dtype).itemsize
    experts, shared = 0.0, 4.0
    for path, leaf in parameters(config):
        names = [key.key for key in path]
        size = leaf.size * (4 if {"router", "scale", "head"} & {*names} else width)
        if expert_axis(path) is not None:
            experts += size / expert
        else:
            shared += size * (1 + t.tied if names[-1] == "embedding" else 1)
    calls = 2 * blocks * (6 if t.remat else 4)
    slots = sum(slots_of(config, tokens) for tokens in tokens_of(config)) / (data * expert)
    needed = (
        Collective("all-to-all", expert, calls / 2 * slots * t.dim * width, calls),
        Collective("all-reduce", data, experts, 2 * blocks, stride=expert),
        Collective("all-reduce", data * expert, shared, 2 * blocks + 1),
    )
    return [collective for collective in needed if collective.devices > 1]


def slots_of(config: ConfigDict, tokens: int) -> int:
    """Returns the slots of a sparse layer for a number of tokens: experts x capacity x groups."""
    group = group_of(config.selection.group_size, tokens)
    return (
        config.experts.count
        * capacity(selection_rule(config.selection), group, config.experts.count)
        * (tokens // group)
    )


def parameters(config: ConfigDict) -> list[tuple[Any, Any]]:
    """Returns paths and shapes of the T5's parameters, for any batch."""
    rows = TextBatch(*(jnp.zeros(shape, jnp.int32) for shape in ((1, 1), (1, 1), (1,))))
    model = t5(override(config, {"batch_size": 1, "selection.group_size": 0}))
    params, _ = jax.eval_shape(model.init, jax.random.key(0), rows)
    return jax.tree_util.tree_leaves_with_path(params)


def collectives(config: ConfigDict, data: int, expert: int) -> list[dict[str, Any]]:
    """Returns records {mesh, collective, bytes, formula}: bytes that each of data x expert devices sends in a step."""
    config = override(config, {"mesh.data": data, "mesh.expert": expert})
    program: Any = lower_group(config, 0, 1, make_mesh(config)).advance.compile()
    compiled, expected = _sent(hlo.collectives_of_step(program.as_text())), _sent(formula(config, data, expert))
    return [
        {"mesh": f"{data} x {expert}", "collective": name, "bytes": compiled.get(name), "formula": expected.get(name)}
        for name in sorted(compiled | expected)
    ]


def _sent(collectives: list[Collective]) -> dict[str, float]:
    """Sums the bytes that a device sends, by kind and devices of a group."""
    sums: dict[str, float] = defaultdict(float)
    for collective in collectives:
        sums[f"{collective.kind} of {collective.devices}"] += collective.sent
    return dict(sums)
