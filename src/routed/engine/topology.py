"""What a plan would do on chips that are not here: every program compiled for them, sized and priced, and none run."""

from __future__ import annotations

from absl import logging as log
from jax.sharding import Mesh

from routed.engine.compilation import batching_of
from routed.engine.estimate import Estimate, Shortage, Spent, measure
from routed.engine.execution import make_groups
from routed.engine.schedule import Group
from routed.engine.targets import Topology
from routed.plan.run import Run
from routed.system.chips import PRICED

#: Times the FLOPs of the model from which on a program is said to compute what nobody asked for.
DENSE = 2.0


def describe(runs: list[Run], mesh: Mesh, topology: Topology) -> str:
    """The plan as text: memory, step, collectives, time and price of each group, and whether it fits."""
    chip = topology.chip
    groups, hours, unfit = make_groups(runs, mesh, topology.memory(mesh)), 0.0, 0
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


def _lines(estimate: Estimate, spent: Spent, topology: Topology) -> list[str]:
    chip, needed = topology.chip, estimate.held + estimate.temporary
    there = chip.memory * topology.share
    moved = ", ".join(
        f"{one.calls:.0f} {one.kind} of {one.devices}, {one.bytes / 1e6:,.3g} MB" for one in estimate.collectives
    )
    shares = ", ".join(f"{name} {share:.0%}" for name, share in estimate.shares.items() if share >= 0.005)
    unknown = [
        f"XLA estimates nothing of {estimate.unestimated} instructions" if estimate.unestimated else "",
        f"{estimate.endless} loops that do not say their turns count once" if estimate.endless else "",
    ]
    cycles = (
        f"{sum(estimate.cycles.values()):,.0f} cycles ({shares})"
        f"{f' and kernels of {1e6 * estimate.kernels:,.0f} us' if estimate.kernels else ''}; an evaluation {estimate.evaluation:,.0f}"
        if chip.clock
        else "no cycles, as XLA estimates none for GPUs"
    )
    times = estimate.flops / spent.flops
    return [
        f"  compiled in {estimate.seconds:.0f} s; fits: a device holds {estimate.held / 1e6:,.0f} + {estimate.temporary / 1e6:,.0f} MB"
        f" (arguments + temporary), {needed / there:.1%} of its {there / 1e9:.3g} GB",
        f"  a step of a batch: {'; '.join([cycles, *filter(None, unknown)])}",
        f"  a device computes {estimate.flops / 1e9:,.4g} GFLOP in products (its model's: {spent.flops / 1e9:,.4g}"
        f"{f'; {times:.3g} times as many, so try another dispatch' if times > DENSE else ''}), and moves {spent.moved / 1e6:,.4g} MB"
        " at least",
        f"  collectives of a step: {moved or 'none'}",
        f"  {'' if chip.clock else 'at least '}{1e6 * spent.step:,.1f} us a step"
        f" {f'at {chip.clock / 1e9:g} GHz' if chip.clock else 'by the products at the peak or those bytes'}"
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
