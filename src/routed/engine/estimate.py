"""What the program of a group takes on chips that are not here: read from its compiled text, and turned into seconds."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from routed.engine import hlo
from routed.engine.compilation import Lowerings, batching_of, lower_group
from routed.engine.flops import products_of
from routed.engine.limits import shortage
from routed.engine.schedule import Group
from routed.engine.targets import Topology
from routed.plan.config import problem_of
from routed.system.interconnect import Collective
from routed.system.platform import tracing_for

#: Share of the peak at which kernels are taken to run, of which XLA estimates no cycles. An assumption: blocks at the border of two
#: experts are computed twice, and nobody has measured them. (Of a dense FFN of 2,048 x 4,096 on a v5e XLA estimates .92.)
KERNEL_RATE = 0.5


class Estimate(NamedTuple):
    """What the compiled programs of a group tell, for one device and a batch of runs.

    Seconds of compiling; bytes of arguments and results, and of intermediate arrays, of the larger program; FLOPs of products in a training step, and in
    an evaluation; cycles of a step by purpose (TPUs); seconds of its kernels, of which cycles are not known; cycles of an evaluation;
    instructions without an estimate; loops counted once as they do not say their turns; collectives of a step.
    """

    seconds: float
    held: float
    temporary: float
    flops: float
    evaluation_flops: float
    cycles: dict[str, float]
    kernels: float
    evaluation: float
    unestimated: int
    endless: int
    collectives: list[Collective]

    @property
    def shares(self) -> dict[str, float]:
        """Of the cycles of a step, by purpose, the largest first."""
        total = sum(self.cycles.values())
        return {name: self.cycles[name] / total for name in sorted(self.cycles, key=lambda one: -self.cycles[one])}


class Spent(NamedTuple):
    """Seconds of a step by XLA's cycles, or where it gives none by the roofline; of them collectives; by the roofline, and what bounds
    that; the model's FLOPs on a device, and bytes that it moves at least; tokens/s of real runs and the share of the peak that their
    model's FLOPs reach in `step`; hours of the group."""

    step: float
    collectives: float
    roofline: float
    bound: str
    flops: float
    moved: float
    tokens: float
    mfu: float
    hours: float


class Shortage(Exception):
    """Why a program does not fit on a chip."""


def measure(group: Group, mesh: Mesh, topology: Topology) -> tuple[Estimate, Spent]:
    """What the program of a group takes on the chips of a topology.

    Raises:
      Shortage: they have not enough memory.
    """
    lowered = lower_group(group.config, group.pool, group.size, mesh)
    try:
        estimate = estimate_of(lowered, group, mesh, topology)
    except jax.errors.JaxRuntimeError as error:
        if not (short := shortage(error)):
            raise
        raise Shortage(f"needs {short[0]} of a chip's {short[1]}") from error
    needed, there = estimate.held + estimate.temporary, topology.chip.memory * topology.share
    if needed > there:  # the compiler for GPUs does not look
        raise Shortage(f"needs {needed / 1e9:.3g} GB of a device's {there / 1e9:.3g} GB")
    return estimate, seconds_of(estimate, group, mesh, least_bytes(lowered.states), topology)


def estimate_of(lowered: Lowerings, group: Group, mesh: Mesh, topology: Topology) -> Estimate:
    """Compiles the program of a group, and reads what XLA says of it."""
    begun = time.perf_counter()
    with tracing_for(mesh):
        programs: list[Any] = [lowered.advance.compile(), lowered.record.compile()]
    seconds = time.perf_counter() - begun
    memories, modules = [one.memory_analysis() for one in programs], [hlo.Module(one.as_text()) for one in programs]

    def counter(module: hlo.Module) -> Callable[[str], dict[tuple[str, ...], float]]:
        products = products_of(module)
        return lambda line: (
            hlo.cycles(line) | products(line) | _kernel(line, topology) | hlo.sends(line) | _update(line)
        )

    def sum_of(sums: dict[tuple[str, ...], float], name: str) -> float:
        return sum(value for key, value in sums.items() if key[0] == name)

    # The loop over steps, whose turns the program does not know, is the one with the optimiser.
    step = max(modules[0].loops(counter(modules[0]), strict=False), key=lambda sums: sum_of(sums, "updates"))
    evaluation = modules[1].within(modules[1].entry, counter(modules[1]), strict=False)
    turns = group.size // mesh.shape["run"] if batching_of(group.config, mesh) == "map" else 1
    held = [one.argument_size_in_bytes + one.output_size_in_bytes - one.alias_size_in_bytes for one in memories]
    most = int(held[1] + memories[1].temp_size_in_bytes > held[0] + memories[0].temp_size_in_bytes)
    return Estimate(
        seconds=seconds,
        held=held[most],
        temporary=memories[most].temp_size_in_bytes,
        flops=turns * sum_of(step, "flops"),
        evaluation_flops=sum_of(evaluation, "flops"),
        cycles={key[1]: turns * value for key, value in step.items() if key[0] == "cycles"},
        kernels=turns * sum_of(step, "kernels"),
        evaluation=sum_of(evaluation, "cycles"),
        unestimated=int(sum_of(step, "unestimated") + sum_of(evaluation, "unestimated")),
        endless=int(sum_of(step, "endless") + sum_of(evaluation, "endless")),
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


def _update(line: str) -> dict[tuple[str, ...], float]:
    return {("updates",): 1.0} if "/optimiser" in line else {}


def seconds_of(estimate: Estimate, group: Group, mesh: Mesh, moved: float, topology: Topology) -> Spent:
    """What a step of a batch takes, of which a device moves `moved` bytes at least, and all runs of a group.

    Without cycles (GPUs) products run at the peak: no step is shorter than that.
    """
    config, chip = group.config, topology.chip
    tokens, model, *_ = problem_of(config).cost(config)
    chosen = "transformer" in config and "dtype" in config.transformer  # other models compute in float32
    peak = topology.share * chip.peak[config.transformer.dtype if chosen else "float32"]
    batches, evaluations = math.ceil(len(group.runs) / group.size), config.steps // config.eval_every + 1
    runs = len(group.runs) / batches  # in a batch, whose other places are padding
    flops, collectives = model * group.size / mesh.size, sum(chip.seconds(one) for one in estimate.collectives)
    by_flops, by_bytes = flops / peak, moved / chip.bandwidth / topology.share
    if chip.clock:
        step, evaluation = (
            sum(estimate.cycles.values()) / chip.clock + estimate.kernels,
            estimate.evaluation / chip.clock,
        )
    else:
        step, evaluation = max(estimate.flops / peak, by_bytes), estimate.evaluation_flops / peak
    step += collectives
    return Spent(
        step=step,
        collectives=collectives,
        roofline=max(by_flops, by_bytes),
        bound="FLOPs" if by_flops > by_bytes else "bytes",
        flops=flops,
        moved=moved,
        tokens=tokens * runs / step,
        mfu=model * runs / mesh.size / peak / step,
        hours=batches * (config.steps * step + evaluations * evaluation) / 3600,
    )


def least_bytes(states: Any) -> float:
    """Bytes that a training step moves on a device at least: of P bytes of parameters and O of the optimiser's, 6 P + 2 O.

    Parameters are read forward and backward, their gradient is written and read, parameters and O are read and written.
    """

    def here(tree) -> float:
        leaves = jax.tree.leaves(tree)
        return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in leaves)

    return 6 * here(states["params"]) + 2 * here(states["opt"])
