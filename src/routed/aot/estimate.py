"""Costs of a group's programs on chips of another machine: bytes, FLOPs, cycles and seconds."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from routed.aot import hlo
from routed.aot.interconnect import Collective
from routed.aot.topology import Topology
from routed.engine.compilation import Lowerings, batching_of, lower_group
from routed.engine.limits import shortage
from routed.engine.schedule import Group
from routed.plan.config import problem_of
from routed.settings.tree import flatten
from routed.system.machine import floor
from routed.system.platform import tracing_for

#: Share of the peak at which kernels run: an assumption, since XLA estimates no cycles of kernels and nobody has
#: measured them. Blocks at the border of two experts are computed twice. (Of a dense FFN of 2,048 x 4,096 on a v5e XLA
#: estimates .92.)
KERNEL_RATE = 0.5


class Estimate(NamedTuple):
    """Costs of a group's compiled programs, for one device and a batch of runs."""

    seconds: float  # to compile
    resident: float  # bytes of arguments and results, of the larger program
    temporary: float  # bytes of intermediate arrays, of the larger program
    flops: float  # of the products of a training step
    evaluation_flops: float  # of the products of an evaluation
    cycles: dict[str, float]  # purpose -> cycles of a step (TPUs)
    kernels: float  # seconds of a step's kernels, of which cycles are unknown
    evaluation: float  # cycles of an evaluation
    unestimated: int  # instructions without an estimate
    endless: int  # loops without a known end, which count once
    collectives: list[Collective]  # of a step

    @property
    def shares(self) -> dict[str, float]:
        """Shares of a step's cycles by purpose, the largest first."""
        total = sum(self.cycles.values())
        return {name: self.cycles[name] / total for name in sorted(self.cycles, key=lambda name: -self.cycles[name])}


class Times(NamedTuple):
    """Seconds and rates of a group on a topology."""

    step: float  # seconds by XLA's cycles, or for GPUs by the roofline of the compiled products
    collectives: float  # seconds of the step's collectives
    roofline: float  # least seconds of a step, by the model's FLOPs and the least bytes
    bound: str  # "FLOPs" or "bytes", the larger part of the roofline
    flops: float  # of the model on a device
    moved: float  # least bytes that a device moves
    tokens: float  # a second, of real runs, without padding
    mfu: float  # share of the peak that the FLOPs of real runs reach in `step`
    hours: float  # of the whole group


class Shortage(Exception):
    """A program needs more memory than a chip has; the text says how much."""


def measure(group: Group, mesh: Mesh, topology: Topology) -> tuple[Estimate, Times]:
    """Compiles the programs of a group for a topology and estimates their costs.

    Raises:
      Shortage: the chips have too little memory.
    """
    lowered = lower_group(group.config, group.pool, group.size, mesh)
    try:
        estimate = estimate_of(lowered, group, mesh, topology)
    except jax.errors.JaxRuntimeError as error:
        if not (short := shortage(error)):
            raise
        raise Shortage(f"needs {short[0]} of a chip's {short[1]}") from error
    needed, available = estimate.resident + estimate.temporary, topology.device_memory
    if needed > available:  # the compiler for GPUs does not look
        raise Shortage(f"needs {needed / 1e9:.3g} GB of a device's {available / 1e9:.3g} GB")
    return estimate, times_of(estimate, group, mesh, least_bytes(lowered.states), topology)


def estimate_of(lowered: Lowerings, group: Group, mesh: Mesh, topology: Topology) -> Estimate:
    """Compiles the programs of a group and reads their costs."""
    started = time.perf_counter()
    with tracing_for(mesh):
        programs: list[Any] = [lowered.advance.compile(), lowered.record.compile()]
    seconds = time.perf_counter() - started
    training, recording = (hlo.Module(program.as_text()) for program in programs)
    # The loop over steps, without a known end, is the loop with the optimiser.
    loops = training.loops(_counter(training, topology), strict=False)
    step = max(loops, key=lambda sums: _sum_of(sums, "updates"))
    evaluation = recording.total(recording.entry, _counter(recording, topology), strict=False)
    turns = group.size // mesh.shape["run"] if batching_of(group.config, mesh) == "map" else 1
    resident, temporary = max((memory_of(program) for program in programs), key=sum)
    return Estimate(
        seconds=seconds,
        resident=resident,
        temporary=temporary,
        flops=turns * _sum_of(step, "flops"),
        evaluation_flops=_sum_of(evaluation, "flops"),
        cycles={key[1]: turns * value for key, value in step.items() if key[0] == "cycles"},
        kernels=turns * _sum_of(step, "kernels"),
        evaluation=_sum_of(evaluation, "cycles"),
        unestimated=int(_sum_of(step, "unestimated") + _sum_of(evaluation, "unestimated")),
        endless=int(_sum_of(step, "endless") + _sum_of(evaluation, "endless")),
        collectives=hlo.collectives(step),
    )


def memory_of(program: Any) -> tuple[int, int]:
    """Returns the bytes of a compiled program: arguments and results, and intermediate arrays."""
    analysis = program.memory_analysis()
    arrays = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return arrays, analysis.temp_size_in_bytes


def _counter(module: hlo.Module, topology: Topology) -> Callable[[str], dict[tuple[str, ...], float]]:
    products = hlo.flops_of_lines(module)

    def count(line: str) -> dict[tuple[str, ...], float]:
        update = {("updates",): 1.0} if "/optimiser" in line else {}
        return hlo.cycles(line) | products(line) | _kernel(line, topology) | hlo.traffic(line) | update

    return count


def _sum_of(sums: dict[tuple[str, ...], float], name: str) -> float:
    return sum(value for key, value in sums.items() if key[0] == name)


def _kernel(line: str, topology: Topology) -> dict[tuple[str, ...], float]:
    """Measures the seconds of a kernel: its FLOPs at KERNEL_RATE of the peak, or its arrays read and written once."""
    cost = re.search(r'"cost_estimate":\{"flops":"(\d+)"', line)
    if not cost:
        return {}
    rates, shapes = topology.rates, re.findall(r"\b[a-z]+(\d+)\[([\d,]*)\]", line.partition("metadata=")[0])
    size = sum(int(bits) / 8 * math.prod(int(n) for n in axes.split(",") if n) for bits, axes in shapes)
    return {("kernels",): floor(rates, float(cost[1]) / KERNEL_RATE, size, "bfloat16").seconds}


def times_of(estimate: Estimate, group: Group, mesh: Mesh, moved: float, topology: Topology) -> Times:
    """Converts an estimate to seconds; a device moves `moved` bytes a step at least.

    Without cycles (GPUs) products run at the peak: no step is shorter than that.
    """
    config, clock = group.config, topology.target.clock
    tokens, model, *_ = problem_of(config).cost(config)
    dtype = flatten(config).get("transformer.dtype", "float32")  # that of models without the setting
    batches, evaluations = math.ceil(len(group.runs) / group.size), config.steps // config.eval_every + 1
    runs = len(group.runs) / batches  # the other runs of a batch are padding
    flops, rates = model * group.size / mesh.size, topology.rates
    collectives = sum(topology.target.seconds(collective) for collective in estimate.collectives)
    roofline = floor(rates, flops, moved, dtype)
    if clock:
        step, evaluation = sum(estimate.cycles.values()) / clock + estimate.kernels, estimate.evaluation / clock
    else:
        step = floor(rates, estimate.flops, moved, dtype).seconds
        evaluation = floor(rates, estimate.evaluation_flops, 0, dtype).seconds
    step += collectives
    return Times(
        step=step,
        collectives=collectives,
        roofline=roofline.seconds,
        bound=roofline.bound,
        flops=flops,
        moved=moved,
        tokens=tokens * runs / step,
        mfu=model * runs / mesh.size / rates.peak[dtype] / step,
        hours=batches * (config.steps * step + evaluations * evaluation) / 3600,
    )


def least_bytes(states: Any) -> float:
    """Returns the least bytes that a training step moves on a device: 6 P + 2 O.

    P bytes of parameters are read forward and backward, and once more by the update that writes them; their gradient is
    written and read; O bytes of the optimiser's arrays are read and written.
    """

    def local(tree) -> float:
        leaves = jax.tree.leaves(tree)
        return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in leaves)

    return 6 * local(states["params"]) + 2 * local(states["opt"])
