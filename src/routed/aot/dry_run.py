"""Plan of a command on chips of another machine: every program compiled for them, sized and priced, and none run."""

from __future__ import annotations

from absl import logging as log
from jax.sharding import Mesh

from routed.aot.estimate import Estimate, Shortage, Times, measure
from routed.aot.topology import PRICED, Topology
from routed.engine.compilation import batching_of
from routed.engine.execution import make_groups
from routed.engine.schedule import Group
from routed.plan.run import Run

#: A program with more than this many times the FLOPs of its model computes products that nobody asked for.
DENSE = 2.0


def describe(runs: list[Run], mesh: Mesh, topology: Topology) -> str:
    """Returns the plan as text: memory, step, collectives, time and price of each group that fits."""
    price, chips = topology.target.price, topology.chips
    groups, hours, unfit = make_groups(runs, mesh, topology.memory(mesh)), 0.0, 0
    sizes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    lines = [f"{len(runs)} runs on {chips} chips {topology.name}, mesh {sizes}: compiled for them, and not run"]
    for count, group in enumerate(groups):
        log.info("compiling %d of %d programs for %s: %s", count + 1, len(groups), topology.name, group.name)
        lines.append(
            f"group {group.name}: {len(group.runs)} runs in batches of {group.size} ({batching_of(group.config, mesh)})"
        )
        try:
            estimate, times = measure(group, mesh, topology)
        except Shortage as shortage:
            unfit += 1
            lines.append(f"  does not fit: {shortage}; {_mend(group, mesh)}")
            continue
        hours += times.hours
        lines += _lines(estimate, times, topology)
    lines.append(
        f"in all about {hours:.3g} hours and {hours * chips * price:,.2f} dollars"
        f" ({price:.2f} for a chip and an hour, {PRICED})"
        + (f", without {unfit} of {len(groups)} groups, which do not fit" if unfit else "")
    )
    return "\n".join(lines)


def _lines(estimate: Estimate, times: Times, topology: Topology) -> list[str]:
    """Describes the costs of a group, in five parts."""
    clock, available = topology.target.clock, topology.device_memory
    moved = ", ".join(
        f"{collective.calls:.0f} {collective.kind} of {collective.devices}, {collective.bytes / 1e6:,.3g} MB"
        for collective in estimate.collectives
    )
    more = estimate.flops / times.flops
    dense = f"; {more:.3g} times as many, so try another dispatch" if more > DENSE else ""
    source = f"at {clock / 1e9:g} GHz" if clock else "by the products at the peak or those bytes"
    waiting = f", of it {1e6 * times.collectives:,.1f} in collectives" if estimate.collectives else ""
    return [
        f"  compiled in {estimate.seconds:.0f} s; fits: a device holds {estimate.resident / 1e6:,.0f}"
        f" + {estimate.temporary / 1e6:,.0f} MB (arguments + temporary),"
        f" {(estimate.resident + estimate.temporary) / available:.1%} of its {available / 1e9:.3g} GB",
        f"  a step of a batch: {_cycles(estimate, clock)}",
        f"  a device computes {estimate.flops / 1e9:,.4g} GFLOP in products"
        f" (its model's: {times.flops / 1e9:,.4g}{dense}), and moves {times.moved / 1e6:,.4g} MB at least",
        f"  collectives of a step: {moved or 'none'}",
        f"  {'' if clock else 'at least '}{1e6 * times.step:,.1f} us a step {source}{waiting}; roofline"
        f" {1e6 * times.roofline:,.1f} ({times.bound}); {times.tokens:,.0f} tokens/s, {times.mfu:.2%} of the peak;"
        f" {times.hours:.3g} hours, {times.hours * topology.chips * topology.target.price:,.2f} dollars",
    ]


def _cycles(estimate: Estimate, clock: float) -> str:
    """Describes the cycles of a step, and the parts of the program that have none."""
    parts = ["no cycles, as XLA estimates none for GPUs"]
    if clock:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in estimate.shares.items() if share >= 0.005)
        kernels = f" and kernels of {1e6 * estimate.kernels:,.0f} us" if estimate.kernels else ""
        total = sum(estimate.cycles.values())
        parts = [f"{total:,.0f} cycles ({shares}){kernels}; an evaluation {estimate.evaluation:,.0f}"]
    if estimate.unestimated:
        parts.append(f"XLA estimates nothing of {estimate.unestimated} instructions")
    if estimate.endless:
        parts.append(f"{estimate.endless} loops that do not say their turns count once")
    return "; ".join(parts)


def _mend(group: Group, mesh: Mesh) -> str:
    if mesh.size > mesh.shape["run"]:
        return "use more chips (mesh.data), a smaller batch_size, or transformer.remat=true"
    if group.size > mesh.shape["run"]:
        return f"lower mesh.runs_per_batch below {group.size}"
    return "one run does not fit on a chip: share it (mesh.data, mesh.expert), or lower batch_size"
