"""A sweep over many machines: part I of N, the same whoever asks, balanced by cost."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from routed import models
from routed.data import TASKS, samples
from routed.kinds import kind_of
from routed.layout import traced
from routed.points import Run, groups
from routed.run import experts_per_token
from routed.selection import rule_of
from routed.words import UserError


def parse(text: str) -> tuple[int, int]:
    """(I, N) of `I/N`.

    Raises:
      UserError: another form, or I not among 1 to N.
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise UserError(f"--shard={text}: expected I/N with I from 1 to N, e.g. --shard=2/8")
    return int(found[1]), int(found[2])


def part(runs: list[Run], text: str) -> list[Run]:
    """Part I of N of a plan. Runs that need each other stay together, and those of one program as far as balance allows.

    Families (runs that need each other) are lined up program by program, and the line is cut where the cost reaches 1/N, 2/N,
    ...: no part is further from its share than one family, and few programs are compiled twice.

    Raises:
      UserError: `text` is not I/N.
    """
    number, parts = parse(text)
    costs = [cost(group[0].config) for group in groups(runs)]
    place = {run.key: i for i, group in enumerate(groups(runs)) for run in group}
    lined = sorted(families(runs), key=lambda family: min(place[run.key] for run in family))  # stable
    sizes = np.array([sum(costs[place[run.key]] for run in family) for family in lined])
    middle = np.cumsum(sizes) - sizes / 2
    owner = np.minimum((parts * middle / sizes.sum()).astype(int), parts - 1)
    mine = {run.key for family, one in zip(lined, owner, strict=True) if one == number - 1 for run in family}
    return [run for run in runs if run.key in mine]


def families(runs: list[Run]) -> list[list[Run]]:
    """Runs that need each other, directly or not, together; in the order of their first members."""
    parent = {run.key: run.key for run in runs}

    def root(key: str) -> str:
        while parent[key] != key:
            parent[key] = key = parent[parent[key]]
        return key

    for run in runs:
        for needed in run.needs:
            parent[root(run.key)] = root(needed)
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(root(run.key), []).append(run)
    return list(found.values())


def cost(config: ConfigDict) -> float:
    """FLOPs of a run's training, or as good a measure: 6 for each token and parameter that serves it."""
    tokens, flops = kind_of(config).cost(config)
    if flops is None:
        sizes = {name: sum(a.size for a in jax.tree.leaves(tree)) for name, tree in _parameters(config).items()}
        share = experts_per_token(config, rule_of(config.selection)) / config.experts.count
        served = sizes["experts"] * (share if config.model == "moe" else 1.0)
        flops = 6.0 * tokens * config.data.positions * (sizes["router"] + served)
    return config.steps * flops


def _parameters(config: ConfigDict) -> Any:
    """Shapes of the parameters of a model of samples."""
    task, model, key = TASKS[config.data.name], models.build(config), jax.random.key(0)

    def init():
        world = samples.world(task, key, config.data, config.data.samples, traced(config))
        test = samples.test_batch(task, world._replace(given=task.given(config.data)), config.data, traced(config))
        return model.init(key, test)[0]

    return jax.eval_shape(init)
