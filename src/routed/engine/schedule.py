"""The order of batches: of the first group with runs that are ready, first the runs that other runs wait for.

Each choice costs the same however many runs wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from graphlib import TopologicalSorter
from typing import NamedTuple

from routed.plan.run import Run
from routed.training.problem import ProblemPart


class Group(NamedTuple):
    """Runs that one compiled program serves, in batches of at most `size`; `pool` training samples in a world."""

    name: str
    runs: list[Run]
    pool: int
    size: int
    problem: ProblemPart

    @property
    def config(self):
        """Any run's config: they differ in traced settings only."""
        return self.runs[0].config


def work_of(group: Group) -> float:
    """Cost of all its runs, in FLOPs that take as long."""
    return len(group.runs) * group.config.steps * group.problem.cost(group.config).work


class Schedule:
    """The runs of some groups that are not `done`; true as long as there are any. A run waits for those that it needs.

    Raises:
      graphlib.CycleError: runs wait for each other.
    """

    def __init__(self, groups: Sequence[Group], done: Collection[str]):
        self.groups = groups
        self.positions = {run.key: (i, j) for i, group in enumerate(groups) for j, run in enumerate(group.runs)}
        pending = [run for group in groups for run in group.runs if run.key not in done]
        self.order = TopologicalSorter({run.key: {*run.needs}.difference(done) for run in pending})
        self.order.prepare()
        # Awaited runs come first: in the plan's order learned runs come last, and the runs that wait for them would be
        # a batch of their own, mostly padding.
        self.awaited = {key for run in pending for key in run.needs}
        self.ready: list[list[tuple[bool, int]]] = [[] for _ in groups]  # heaps of (no run awaits it, position)
        self._collect()

    def __bool__(self) -> bool:
        return self.order.is_active()

    def take(self) -> tuple[Group, list[Run]]:
        """Takes the next batch, and returns it with its group."""
        group, heap = next((g, h) for g, h in zip(self.groups, self.ready, strict=True) if h)
        return group, [group.runs[heapq.heappop(heap)[1]] for _ in range(min(group.size, len(heap)))]

    def take_again(self, keys: list[str]) -> tuple[Group, list[Run]] | None:
        """Takes the batch of a checkpoint; None if this plan has other groups, or does not need all of its runs."""
        positions = [self.positions.get(key) for key in keys]
        i, _ = positions[0] or (-1, -1)
        ready = {position for _, position in self.ready[i]}
        batch = [p[1] for p in positions if p is not None and p[0] == i and p[1] in ready]
        if len(batch) < len(keys):
            return None
        self.ready[i] = [entry for entry in self.ready[i] if entry[1] not in batch]
        heapq.heapify(self.ready[i])
        return self.groups[i], [self.groups[i].runs[position] for position in batch]

    def finish(self, batch: list[Run]) -> None:
        """Marks these runs as done; runs that waited for them may now be ready."""
        self.order.done(*[run.key for run in batch])
        self._collect()

    def _collect(self) -> None:
        for key in self.order.get_ready():
            i, position = self.positions[key]
            heapq.heappush(self.ready[i], (key not in self.awaited, position))
