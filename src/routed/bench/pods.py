"""What the experiments would take on TPUs and GPUs that nobody has here: the largest program of each, compiled for them.

Needs their compilers beside this JAX (launch/README.md says how they are installed). An hour on a core for all cases.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np
from jax.sharding import Mesh

from routed.aot.estimate import Shortage, measure
from routed.aot.topology import Topology, topology_of
from routed.contracts import UserError
from routed.engine.compilation import batching_of
from routed.engine.devices import make_mesh
from routed.engine.execution import make_groups
from routed.engine.schedule import Group, work_of
from routed.plan import experiment
from routed.plan.checks import validate
from routed.plan.runs import plan_runs
from routed.settings.tree import override
from routed.tasks.image_files import SETS, ImageSet, Split

#: scale -> slices that every file is compiled for.
SLICES = {"default": ("v5e:2x4", "v5e:8x8", "v4:2x2x2", "v5p:2x2x2"), "paper": ("v5e:2x4", "v5e:8x8")}
#: Files whose headline is measured, at each scale and on each slice.
FILES = (
    "gmm_router", "dictionary_router", "subspaces_router", "sequence_router", "image_clusters_router", "cluster_cnn", "router_zoo",
    "theory_specialists", "theory_spurious", "theory_two_gaussians", "geometry", "regret", "law", "shares", "gmm_causes", "cluster_causes",
    "patch_router", "patch_wrn", "competition_gmm", "competition_lm", "chen_text",
)  # fmt: skip
#: Images and text that need no files.
IMAGES = {"data.images": "patterns"}
TEXT = {"data.name": "artificial", "data.tokens": "bytes", "data.languages": ("qaa", "qba"), "arms": ("learned",)}
SHARED = TEXT | {"mesh.data": 8, "mesh.expert": 8, "data.eval_rows": 64, "selection.group_size": 114}
#: By file, in the place of data that are read: of the size of the real ones.
STAND_IN: dict[str, dict[str, Any]] = {
    "image_clusters_router": IMAGES,
    "patch_wrn": {"data.images": "blank"},
    "competition_lm": {"data.name": "artificial", "data.languages": ("qaa",)},
    "chen_text": {"data.sentences": "artificial", "data.clusters": 4},
}
#: T5's own width, where the paper's is 32.
WIDE = {"transformer.dim": 768, "transformer.width": 2048, "experts.width": 2048}

#: (experiment, what changes, slices)
CASES: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    *((f"{name}:{scale}", STAND_IN.get(name, {}), slices) for name in FILES for scale, slices in SLICES.items()),
    ("gmm_router:default", {}, ("v6e:2x4", "h200:8")),
    ("gmm_router:fig2a", {}, ("v5e:2x4",)),
    ("t5_mc4:fig5", TEXT, SLICES["default"]),
    ("t5_dialects:default", {}, SLICES["default"]),
    ("t5_mc4:fig5,gpu", TEXT, ("v5e:2x4", "h200:8")),
    ("t5_mc4:fig5,paper", SHARED, ("v5e:8x8", "v5p:4x4x4", "h100:8x8")),
    ("t5_mc4:fig5,paper", SHARED | WIDE, ("v5e:8x8", "v5p:4x4x4")),
)


def _blank(folder: object) -> tuple[Split, Split, int]:
    """Images of the number and shape of CIFAR-10's, all black."""
    del folder
    train, test = (Split(np.zeros((n, 32, 32, 3), np.uint8), np.arange(n) % 10, "blank images") for n in (50000, 10000))
    return train, test, 10


def bench(rounds: int, baseline: str | None) -> list[dict[str, Any]]:
    """A record for each case and slice, also as a table.

    Raises:
      UserError: a baseline was asked for; a compiler is missing, or not of the release that this JAX wants.
    """
    del rounds  # a compiler does not vary
    if baseline:
        raise UserError("--baseline: bench pods compiles, and compares with nothing")
    records = []
    for name in sorted({name for _, _, names in CASES for name in names}):
        _apart(_there, name)  # before the first hour
    for spec, changes, names in CASES:
        for name in names:
            records.append({"experiment": spec + (" wide" if WIDE.items() <= changes.items() else ""), "slice": name})
            records[-1] |= _apart(_record_on, spec, changes, name)
            print(row(records[-1]), flush=True)
    head = f"| {' | '.join(HEADS)} |"
    print("\n".join(["", head, "|---" * len(HEADS) + "|", *map(row, records)]), flush=True)
    return records


def _apart(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What a function says in a process of its own: a compiler that crashes takes its process along (libtpu 0.0.42.1 does on some programs)."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        try:
            return process.submit(function, *arguments).result()
        except BrokenProcessPool:
            return {"program": "", "fits": "the compiler crashed"}


def _there(name: str) -> dict[str, Any]:
    """Nothing, where the compiler of a slice is there."""
    topology_of(name)
    return {}


def _record_on(spec: str, changes: dict[str, Any], name: str) -> dict[str, Any]:
    SETS["blank"] = ImageSet(_blank)  # in a process of its own
    return record(spec, changes, topology_of(name))


def record(spec: str, changes: dict[str, Any], topology: Topology) -> dict[str, Any]:
    """The largest program of an experiment on a slice: its arms, what a device holds, a step, and the runs of the group."""
    mesh, group = largest_group(spec, changes, topology.devices, int(topology.device_memory))
    about = {"program": group.name, "runs": len(group.runs), "batch": f"{group.size} {batching_of(group.config, mesh)}"}
    try:
        estimate, spent = measure(group, mesh, topology)
    except Shortage as shortage:
        return about | {"fits": f"does not fit: {shortage}"}
    return about | {
        "fits": True, "compile_seconds": estimate.seconds, "held_mb": estimate.resident / 1e6, "temporary_mb": estimate.temporary / 1e6,
        "step_us": 1e6 * spent.step, "cycles": {name: round(share, 3) for name, share in estimate.shares.items()},
        "flops": estimate.flops, "model_flops": spent.flops, "moved_mb": spent.moved / 1e6, "collectives_us": 1e6 * spent.collectives, "roofline_us": 1e6 * spent.roofline, "bound": spent.bound,
        "tokens_per_second": spent.tokens, "mfu": spent.mfu, "hours": spent.hours,
        "dollars": spent.hours * topology.chips * topology.target.price,
    }  # fmt: skip


def largest_group(spec: str, changes: dict[str, Any], devices: Sequence[Any], memory: int) -> tuple[Mesh, Group]:
    """The group of most work of an experiment's figure, in batches that fit into `memory` bytes a device, and the mesh."""
    module, config = experiment.configure(spec, [])
    config = override(config, changes)
    validate(config)
    sweep = experiment.figure_of(module, config).sweep(config)
    mesh = make_mesh(config, devices)
    return mesh, max(make_groups(plan_runs(config, sweep, []), mesh, memory * mesh.size), key=work_of)


#: column -> what a row of the table says there.
HEADS: dict[str, Any] = {
    "experiment": lambda one: one["experiment"],
    "slice": lambda one: one["slice"],
    "program": lambda one: one["program"].partition("/")[0],
    "runs, a batch": lambda one: f"{one['runs']}, {one['batch']}",
    "MB a device": lambda one: f"{one['held_mb']:,.0f} + {one['temporary_mb']:,.0f}",
    "us a step": lambda one: f"{one['step_us']:,.0f}",
    "of it": lambda one: ", ".join(f"{name} {share:.0%}" for name, share in list(one["cycles"].items())[:2]),
    "collectives": lambda one: f"{one['collectives_us']:,.0f}",
    "roofline": lambda one: f"{one['roofline_us']:,.1f} ({one['bound']})",
    "M tokens/s": lambda one: f"{one['tokens_per_second'] / 1e6:,.2f}",
    "of the peak": lambda one: f"{one['mfu']:.2%}",
    "all its runs": lambda one: f"{one['hours']:.2g} h" if one["hours"] > 0.1 else f"{3600 * one['hours']:.2g} s",
    "$": lambda one: f"{one['dollars']:,.2f}",
}


def row(one: dict[str, Any]) -> str:
    """A row of the table."""
    if one["fits"] is not True:
        return f"| {one['experiment']} | {one['slice']} | {one['program']} | {one['fits']} |"
    return f"| {' | '.join(text(one) for text in HEADS.values())} |"
