"""A sweep over several machines: part I of N, the same on every machine, balanced by cost."""

from __future__ import annotations

import re

import numpy as np
from ml_collections import ConfigDict

from routed.contracts import UserError
from routed.plan.config import problem_of
from routed.plan.run import Run
from routed.plan.runs import groups


def parse(text: str, of: str = "--shard=") -> tuple[int, int]:
    """(I, N) of `I/N`, which an option or a file has given.

    Raises:
      UserError: another form, or I not among 1 to N.
    """
    match = re.fullmatch(r"([0-9]{1,5})/([0-9]{1,5})", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"{of}{text}: expected I/N with I from 1 to N, N at most 99999, e.g. --shard=2/8")
    return int(match[1]), int(match[2])


def part(runs: list[Run], text: str) -> list[Run]:
    """Part I of N of a plan. Runs that need each other stay together, and runs of one program as far as balance allows.

    Families (runs that need each other) are sorted by program, and the sequence is cut where the cost reaches 1/N, 2/N,
    ...:
    no part is further from its share than one family, and few programs are compiled twice.

    Raises:
      UserError: `text` is not I/N.
    """
    number, parts = parse(text)
    by_program = groups(runs)
    costs = [cost(group[0].config) for group in by_program]
    program = {run.key: i for i, group in enumerate(by_program) for run in group}
    sequence = sorted(families(runs), key=lambda family: min(program[run.key] for run in family))  # stable
    sizes = np.array([sum(costs[program[run.key]] for run in family) for family in sequence])
    middle = np.cumsum(sizes) - sizes / 2
    owners = np.minimum((parts * middle / sizes.sum()).astype(int), parts - 1)
    keys = {run.key for family, owner in zip(sequence, owners, strict=True) if owner == number - 1 for run in family}
    return [run for run in runs if run.key in keys]


def families(runs: list[Run]) -> list[list[Run]]:
    """Groups runs that need each other, directly or not; in the order of their first members."""
    parent = {run.key: run.key for run in runs}

    def root(key: str) -> str:
        while parent[key] != key:
            parent[key] = key = parent[parent[key]]
        return key

    for run in runs:
        for needed in run.needs:
            parent[root(run.key)] = root(needed)
    members: dict[str, list[Run]] = {}
    for run in runs:
        members.setdefault(root(run.key), []).append(run)
    return list(members.values())


def cost(config: ConfigDict) -> float:
    """Cost of a run's training, in FLOPs that take as long."""
    return config.steps * problem_of(config).cost(config).work
