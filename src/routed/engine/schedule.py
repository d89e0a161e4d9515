"""Which runs come next: of the first group with any that are ready those that others wait for, then the first.

To find them costs the same however many wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from graphlib import TopologicalSorter
from typing import NamedTuple

from routed.plan.config import problem_of
from routed.plan.runs import Run


class Group(NamedTuple):
    """Runs that one compiled program serves."""

    name: str
    runs: list[Run]
    pool: int  # training samples in a world
    size: int  # runs that advance together

    @property
    def config(self):
        """Any run's config: they differ in traced settings only."""
        return self.runs[0].config


def work_of(group: Group) -> float:
    """As good a measure of the time of all its runs as FLOPs."""
    return len(group.runs) * group.config.steps * problem_of(group.config).cost(group.config).work


class Schedule:
    """The runs of some groups that are not `done`; true as long as there are any. A run waits for those that it needs.

    Raises:
      graphlib.CycleError: runs wait for each other.
    """

    def __init__(self, groups: Sequence[Group], done: Collection[str]):
        self.groups = groups
        self.places = {run.key: (i, j) for i, group in enumerate(groups) for j, run in enumerate(group.runs)}
        pending = [run for group in groups for run in group.runs if run.key not in done]
        self.order = TopologicalSorter({run.key: {*run.needs}.difference(done) for run in pending})
        self.order.prepare()
        # In their order learned runs came last, and those that wait for them were a batch of their own, mostly padding.
        self.awaited = {key for run in pending for key in run.needs}
        self.ready: list[list[tuple[bool, int]]] = [[] for _ in groups]  # a heap for each: (awaited by nobody, place)
        self._collect()

    def __bool__(self) -> bool:
        return self.order.is_active()

    def take(self) -> tuple[Group, list[Run]]:
        """The next batch, and its group."""
        group, places = next((g, p) for g, p in zip(self.groups, self.ready, strict=True) if p)
        return group, [group.runs[heapq.heappop(places)[1]] for _ in range(min(group.size, len(places)))]

    def take_again(self, keys: list[str]) -> tuple[Group, list[Run]] | None:
        """The batch of a checkpoint; None if this plan has other groups, or does not want all of it."""
        places = [self.places.get(key) for key in keys]
        i, _ = places[0] or (-1, -1)
        ready = {place for _, place in self.ready[i]}
        mine = [place[1] for place in places if place is not None and place[0] == i and place[1] in ready]
        if len(mine) < len(keys) or len(keys) > self.groups[i].size:
            return None
        self.ready[i] = [one for one in self.ready[i] if one[1] not in mine]
        heapq.heapify(self.ready[i])
        return self.groups[i], [self.groups[i].runs[place] for place in mine]

    def finish(self, batch: list[Run]) -> None:
        """These runs are done: those that waited for them may be ready."""
        self.order.done(*[run.key for run in batch])
        self._collect()

    def _collect(self) -> None:
        for key in self.order.get_ready():
            i, place = self.places[key]
            heapq.heappush(self.ready[i], (key not in self.awaited, place))
