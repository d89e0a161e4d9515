"""What a plan would do on chips that are not here: every program compiled for them, sized and priced, and none run."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import re
import time
from typing import Any, NamedTuple

import jax
from absl import logging as log
from jax.sharding import Mesh

from routed.contracts import UserError
from routed.engine import hlo
from routed.engine.compilation import Lowerings, batching_of, lower_group
from routed.engine.execution import make_groups
from routed.engine.schedule import Group
from routed.plan.config import problem_of
from routed.plan.runs import Run
from routed.system.chips import CHIPS, PRICED, Chip
from routed.system.interconnect import Collective
from routed.system.platform import tracing_for

#: Share of the peak at which kernels are taken to run, of which XLA estimates no cycles: what it estimates of a dense FFN of 2,048 x
#: 4,096 on a v5e.
KERNEL_RATE = 0.5
#: What libtpu asks of a machine that is no TPU, and several processes at once.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class Topology(NamedTuple):
    """Chips of one kind; a chip may be several devices, each with its share of the chip's rates and memory."""

    name: str
    chip: Chip
    chips: int
    devices: list[Any]

    @property
    def share(self) -> float:
        """Of a chip, that a device has."""
        return self.chips / len(self.devices)


class Estimate(NamedTuple):
    """What the compiled program of a group tells, for one device and a batch of runs.

    Seconds of compiling; bytes of arguments and results, and of intermediate arrays; cycles of a training step by purpose; seconds of
    its kernels, of which cycles are not known; cycles of an evaluation; other instructions without an estimate; collectives of a step.
    """

    seconds: float
    held: float
    temporary: float
    cycles: dict[str, float]
    kernels: float
    evaluation: float
    unestimated: int
    collectives: list[Collective]


class Spent(NamedTuple):
    """Seconds of a step by XLA's cycles, of them collectives; by the roofline, and what bounds that; tokens/s and the share of the
    peak that the model's FLOPs reach, by cycles; hours of the group."""

    step: float
    collectives: float
    roofline: float
    bound: str
    tokens: float
    mfu: float
    hours: float


class Shortage(Exception):
    """Why a program does not fit on a chip."""


def topology_of(text: str) -> Topology:
    """The chips that CHIP:SHAPE names, such as v5e:8x8.

    Raises:
      UserError: an unknown chip or shape; libtpu is missing, or not the release that this JAX wants.
    """
    name, _, shape = text.partition(":")
    tpus = [known for known, chip in CHIPS.items() if chip.clock]
    if name not in tpus or not re.fullmatch(r"\d+(x\d+)+", shape):
        raise UserError(
            f"--topology={text}: unknown; name a chip of {', '.join(tpus)} and a shape, such as v5e:2x4 or v4:2x2x2"
        )
    _require_libtpu(text)
    os.environ.update(ENVIRONMENT)
    jax.config.update("jax_platforms", "cpu")  # or JAX looks for TPUs here
    from jax.experimental import topologies

    try:
        devices = topologies.get_topology_desc(topology_name=text, platform="tpu").devices
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"--topology={text}: it cannot be described: {str(error).splitlines()[0]}") from error
    return Topology(text, CHIPS[name], math.prod(map(int, shape.split("x"))), list(devices))


def _require_libtpu(text: str) -> None:
    asked = next(one for one in importlib.metadata.requires("jax") or () if one.startswith("libtpu"))
    release = asked.partition(";")[0].strip()  # libtpu==0.0.42.*
    install = f"pip install '{release}'"
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(f"--topology={text}: compiling for a TPU needs libtpu (200 MB): {install}")
    found = importlib.metadata.version("libtpu")
    if not found.startswith(release.partition("==")[2].rstrip("*")):
        raise UserError(f"--topology={text}: libtpu {found} is not the one for jax {jax.__version__}: {install}")


def describe(runs: list[Run], mesh: Mesh, topology: Topology) -> str:
    """The plan as text: memory, step, collectives, time and price of each group, and whether it fits."""
    chip, share = topology.chip, topology.share
    groups, hours, unfit = make_groups(runs, mesh, int(chip.memory * share * mesh.size)), 0.0, 0
    lines = [
        f"{len(runs)} runs on {topology.chips} chips {topology.name}, mesh"
        f" {' x '.join(f'{name} {size}' for name, size in mesh.shape.items())}: compiled for them, and not run"
    ]
    for count, group in enumerate(groups):
        log.info("compiling %d of %d programs for %s: %s", count + 1, len(groups), topology.name, group.name)
        lines.append(
            f"group {group.name}: {len(group.runs)} runs in batches of {group.size} ({batching_of(group.config, mesh)})"
        )
        try:
            estimate, spent = measure(group, mesh, topology)
        except Shortage as shortage:
            unfit += 1
            lines.append(f"  does not fit: {shortage}; {_mend(group, mesh)}")
            continue
        hours += spent.hours
        lines += _lines(estimate, spent, topology)
    lines.append(
        f"in all about {hours:.3g} hours and {hours * topology.chips * chip.price:,.2f} dollars ({chip.price:.2f} for a chip and an"
        f" hour, {PRICED})" + (f", without {unfit} of {len(groups)} groups, which do not fit" if unfit else "")
    )
    return "\n".join(lines)


def measure(group: Group, mesh: Mesh, topology: Topology) -> tuple[Estimate, Spent]:
    """What the program of a group takes on the chips of a topology.

    Raises:
      Shortage: they have not enough memory.
    """
    lowered = lower_group(group.config, group.pool, group.size, mesh)
    try:
        estimate = estimate_of(lowered, group, mesh, topology)
    except jax.errors.JaxRuntimeError as error:
        if not (shortage := re.search(r"Used (\S+) of (\S+) hbm", str(error))):
            raise
        raise Shortage(f"needs {shortage[1]} of a chip's {shortage[2]}") from error
    return estimate, seconds_of(estimate, group, mesh, least_bytes(lowered.states), topology)


def estimate_of(lowered: Lowerings, group: Group, mesh: Mesh, topology: Topology) -> Estimate:
    """Compiles the program of a group, and reads what XLA says of it."""
    begun = time.perf_counter()
    with tracing_for(mesh):
        compiled: Any = lowered.advance.compile()
    seconds = time.perf_counter() - begun
    memory, module = compiled.memory_analysis(), hlo.Module(compiled.as_text())
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes

    def count(line: str) -> dict[tuple[str, ...], float]:
        return hlo.cycles(line) | _kernel(line, topology) | hlo.sends(line)

    def sum_of(sums: dict[tuple[str, ...], float], name: str) -> float:
        return sum(value for key, value in sums.items() if key[0] == name)

    # The loop over steps is the largest that does not know its turns; all else is done once a batch, with its evaluation.
    step = max(module.loops(count, strict=False), key=lambda one: sum_of(one, "cycles"), default={})
    whole = module.within(module.entry, count, strict=False)
    turns = group.size // mesh.shape["run"] if batching_of(group.config, mesh) == "map" else 1
    cycles = {key[1]: turns * value for key, value in step.items() if key[0] == "cycles"}
    return Estimate(
        seconds=seconds,
        held=held,
        temporary=memory.temp_size_in_bytes,
        cycles=cycles,
        kernels=turns * sum_of(step, "kernels"),
        evaluation=sum_of(whole, "cycles") - sum(cycles.values()),
        unestimated=int(sum_of(whole, "unestimated")),
        collectives=hlo.collectives(step),
    )


def _kernel(line: str, topology: Topology) -> dict[tuple[str, ...], float]:
    """Seconds of a kernel: its FLOPs at KERNEL_RATE of the peak, or to read and write its arrays once."""
    cost = re.search(r'"cost_estimate":\{"flops":"(\d+)"', line)
    if not cost:
        return {}
    chip, shapes = topology.chip, re.findall(r"\b[a-z]+(\d+)\[([\d,]*)\]", line.partition("metadata=")[0])
    size = sum(int(bits) / 8 * math.prod(int(n) for n in axes.split(",") if n) for bits, axes in shapes)
    by_flops = float(cost[1]) / (chip.peak["bfloat16"] * KERNEL_RATE)
    return {("kernels",): max(by_flops, size / chip.bandwidth) / topology.share}


def seconds_of(estimate: Estimate, group: Group, mesh: Mesh, moved: float, topology: Topology) -> Spent:
    """What a step of a batch takes, of which a device moves `moved` bytes at least, and all runs of a group."""
    config, chip = group.config, topology.chip
    tokens, flops = problem_of(config).cost(config)
    peak = chip.peak[config.transformer.dtype if "transformer" in config else "float32"]
    collectives = sum(chip.seconds(one) for one in estimate.collectives)
    step = sum(estimate.cycles.values()) / chip.clock + estimate.kernels + collectives
    by_flops = flops * group.size / mesh.size / peak / topology.share
    by_bytes = moved / chip.bandwidth / topology.share
    batches, evaluations = math.ceil(len(group.runs) / group.size), config.steps // config.eval_every + 1
    return Spent(
        step=step,
        collectives=collectives,
        roofline=max(by_flops, by_bytes),
        bound="FLOPs" if by_flops > by_bytes else "bytes",
        tokens=tokens * group.size / step,
        mfu=by_flops / step,
        hours=batches * (config.steps * step + evaluations * estimate.evaluation / chip.clock) / 3600,
    )


def least_bytes(states: Any) -> float:
    """Bytes that a training step moves on a device at least: of P bytes of parameters and O of the optimiser's, 6 P + 2 O.

    Parameters are read forward and backward, their gradient is written and read, parameters and O are read and written.
    """

    def here(tree) -> float:
        leaves = jax.tree.leaves(tree)
        return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in leaves)

    return 6 * here(states["params"]) + 2 * here(states["opt"])


def _lines(estimate: Estimate, spent: Spent, topology: Topology) -> list[str]:
    chip, total = topology.chip, sum(estimate.cycles.values())
    needed, there = estimate.held + estimate.temporary, chip.memory * topology.share
    shares = sorted(((n / total, name) for name, n in estimate.cycles.items()), reverse=True)
    moved = ", ".join(
        f"{one.calls:.0f} {one.kind} of {one.devices}, {one.bytes / 1e6:,.3g} MB" for one in estimate.collectives
    )
    return [
        f"  compiled in {estimate.seconds:.0f} s; fits: a device holds {estimate.held / 1e6:,.0f} + {estimate.temporary / 1e6:,.0f} MB"
        f" (arguments + temporary), {needed / there:.1%} of its {there / 1e9:.3g} GB",
        f"  a step of a batch: {total:,.0f} cycles ({', '.join(f'{name} {share:.0%}' for share, name in shares if share >= 0.005)})"
        f"{f' and kernels of {1e6 * estimate.kernels:,.0f} us' if estimate.kernels else ''}; an evaluation {estimate.evaluation:,.0f}"
        f"{f'; XLA estimates nothing of {estimate.unestimated} instructions' if estimate.unestimated else ''}",
        f"  collectives of a step: {moved or 'none'}",
        f"  {1e6 * spent.step:,.1f} us a step at {chip.clock / 1e9:g} GHz"
        f"{f', of it {1e6 * spent.collectives:,.1f} in collectives' if estimate.collectives else ''}; roofline"
        f" {1e6 * spent.roofline:,.1f} ({spent.bound}); {spent.tokens:,.0f} tokens/s, {spent.mfu:.2%} of the peak;"
        f" {spent.hours:.3g} hours, {spent.hours * topology.chips * chip.price:,.2f} dollars",
    ]


def _mend(group: Group, mesh: Mesh) -> str:
    if mesh.size > mesh.shape["run"]:
        return "use more chips (mesh.data), a smaller batch_size, or transformer.remat=true"
    if group.size > mesh.shape["run"]:
        return f"lower mesh.runs_per_batch below {group.size}"
    return "one run does not fit on a chip: share it (mesh.data, mesh.expert), or lower batch_size"
