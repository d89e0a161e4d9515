"""Costs of the experiments on TPUs and GPUs of other machines: the largest program of each, compiled for them.

Needs their compilers of this JAX's release (launch/README.md says how to install them). An hour of a core.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np
from jax.sharding import Mesh

from routed.aot.estimate import Shortage, measure
from routed.aot.topology import Topology, topology_of
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
#: Files whose headline is compiled, at each scale and for each slice.
FILES = (
    *("gmm_router", "dictionary_router", "subspaces_router", "sequence_router", "image_clusters_router", "cluster_cnn"),
    *("router_zoo", "theory_specialists", "theory_spurious", "theory_two_gaussians", "geometry", "regret", "law"),
    *("shares", "gmm_causes", "cluster_causes", "patch_router", "patch_wrn", "competition_gmm", "competition_lm"),
    "chen_text",
)
#: Images and text that need no files.
IMAGES = {"data.images": "patterns"}
TEXT = {"data.name": "artificial", "data.tokens": "bytes", "data.languages": ("qaa", "qba"), "arms": ("learned",)}
SHARED = TEXT | {"mesh.data": 8, "mesh.expert": 8, "data.eval_rows": 64, "selection.group_size": 114}
#: file -> data of the size of the real data, without files.
STAND_IN: dict[str, dict[str, Any]] = {
    "image_clusters_router": IMAGES,
    "patch_wrn": {"data.images": "blank"},
    "competition_lm": {"data.name": "artificial", "data.languages": ("qaa",)},
    "chen_text": {"data.sentences": "artificial", "data.clusters": 4},
}
#: T5's own width, where the paper's is 32.
WIDE = {"transformer.dim": 768, "transformer.width": 2048, "experts.width": 2048}
#: (experiment, changes, slices)
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


def bench(rounds: int) -> Iterator[dict[str, Any]]:
    """Yields a record of each case and slice; prints its row of the table of launch/README.md.

    Raises:
      UserError: a compiler is missing, or not of the release that this JAX wants.
    """
    del rounds  # a compiler does not vary
    for name in sorted({name for _, _, names in CASES for name in names}):
        _in_process(_check, name)  # its compiler, before the first hour
    print(f"| {' | '.join(HEADS)} |\n{'|---' * len(HEADS)}|", flush=True)
    for spec, changes, names in CASES:
        for name in names:
            about = {"experiment": spec + (" wide" if WIDE.items() <= changes.items() else ""), "slice": name}
            record = about | _in_process(_record_on, spec, changes, name)
            print(row(record), flush=True)
            yield record


def _in_process(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Calls a function in a new process, which a crash of the compiler ends (libtpu 0.0.42.1 on some programs)."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        try:
            return process.submit(function, *arguments).result()
        except BrokenProcessPool:
            return {"program": "", "fits": "the compiler crashed"}


def _check(name: str) -> dict[str, Any]:
    """Describes a topology, which needs its compiler."""
    topology_of(name)
    return {}


def _record_on(spec: str, changes: dict[str, Any], name: str) -> dict[str, Any]:
    SETS["blank"] = ImageSet(_blank)  # in a process of its own
    return record_of(spec, changes, topology_of(name))


def _blank(folder: object) -> tuple[Split, Split, int]:
    """Returns black images of the number and shape of CIFAR-10's."""
    train, test = (Split(np.zeros((n, 32, 32, 3), np.uint8), np.arange(n) % 10, "blank images") for n in (50000, 10000))
    return train, test, 10


def record_of(spec: str, changes: dict[str, Any], topology: Topology) -> dict[str, Any]:
    """Returns the record of an experiment's largest program on a topology: memory, a step, all runs of the group."""
    mesh, group = largest_group(spec, changes, topology.devices, int(topology.device_memory))
    about = {"program": group.name, "runs": len(group.runs), "batch": f"{group.size} {batching_of(group.config, mesh)}"}
    try:
        estimate, times = measure(group, mesh, topology)
    except Shortage as shortage:
        return about | {"fits": f"does not fit: {shortage}"}
    cycles = {name: round(share, 3) for name, share in estimate.shares.items()}
    dollars = times.hours * topology.chips * topology.target.price
    memory = {"held_mb": estimate.resident / 1e6, "temporary_mb": estimate.temporary / 1e6}
    step = {"step_us": 1e6 * times.step, "cycles": cycles, "collectives_us": 1e6 * times.collectives}
    least = {"model_flops": times.flops, "moved_mb": times.moved / 1e6, "roofline_us": 1e6 * times.roofline}
    rates = {"bound": times.bound, "tokens_per_second": times.tokens, "mfu": times.mfu}
    about |= {"fits": True, "compile_seconds": estimate.seconds, "flops": estimate.flops}
    return about | memory | step | least | rates | {"hours": times.hours, "dollars": dollars}


def largest_group(spec: str, changes: dict[str, Any], devices: Sequence[Any], memory: int) -> tuple[Mesh, Group]:
    """Returns the mesh, and the group of most work of a figure, in batches of `memory` bytes a device at most."""
    module, config = experiment.configure(spec, [])
    config = override(config, changes)
    validate(config)
    sweep = experiment.figure_of(module, config).sweep(config)
    mesh = make_mesh(config, devices)
    return mesh, max(make_groups(plan_runs(config, sweep, []), mesh, memory * mesh.size), key=work_of)


#: column of the table -> its text for a record.
HEADS: dict[str, Callable[[dict[str, Any]], str]] = {
    "experiment": lambda record: record["experiment"],
    "slice": lambda record: record["slice"],
    "program": lambda record: record["program"].partition("/")[0],
    "runs, a batch": lambda record: f"{record['runs']}, {record['batch']}",
    "MB a device": lambda record: f"{record['held_mb']:,.0f} + {record['temporary_mb']:,.0f}",
    "us a step": lambda record: f"{record['step_us']:,.0f}",
    "of it": lambda record: ", ".join(f"{name} {share:.0%}" for name, share in list(record["cycles"].items())[:2]),
    "collectives": lambda record: f"{record['collectives_us']:,.0f}",
    "roofline": lambda record: f"{record['roofline_us']:,.1f} ({record['bound']})",
    "M tokens/s": lambda record: f"{record['tokens_per_second'] / 1e6:,.2f}",
    "of the peak": lambda record: f"{record['mfu']:.2%}",
    "all its runs": lambda record: (
        f"{record['hours']:.2g} h" if record["hours"] > 0.1 else f"{3600 * record['hours']:.2g} s"
    ),
    "$": lambda record: f"{record['dollars']:,.2f}",
}


def row(record: dict[str, Any]) -> str:
    """Returns the row of a record in the table."""
    if record["fits"] is not True:
        return f"| {record['experiment']} | {record['slice']} | {record['program']} | {record['fits']} |"
    return f"| {' | '.join(text(record) for text in HEADS.values())} |"
