"""The two kinds of experiments, samples and text, behind one face: what the engine needs to know of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from routed import feed, language, models, run
from routed.data import TASKS, images, samples, text
from routed.metrics import agreement, churn, group_hit
from routed.run import Program


class Kind(NamedTuple):
    """What the engine asks of an experiment.

    program(config, pool, mesh) -> Program, `mesh` where devices share a run; loss: the column that validates a run;
    given(config) -> arrays that all runs share; feed(config, seed, rows) -> (first, steps) -> those rows of
    the batches of these steps; feed_shape(config, steps); offline(config, history) ->
    further columns; data_bytes(config, pool) -> bytes of one run's data; data(config) -> what config.json says of them;
    cost(config) -> (tokens, FLOPs) of a step, FLOPs None where they are not counted; watched: runs are few and long, so that
    event files are worth their while; fuse: what XLA's YNNPACK may fuse on a CPU.
    """

    program: Callable[[ConfigDict, int, Mesh | None], Program]
    loss: str
    given: Callable[[ConfigDict], Any]
    feed: Callable[..., Callable[[int, int], Any]]
    feed_shape: Callable[[ConfigDict, int], Any]
    offline: Callable[[ConfigDict, dict[str, np.ndarray]], dict[str, np.ndarray]]
    data_bytes: Callable[[ConfigDict, int], int]
    data: Callable[[ConfigDict], str]
    cost: Callable[[ConfigDict], tuple[int, float | None]]
    watched: bool
    fuse: str


def _offline(config: ConfigDict, history: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Columns that need several evaluations at once, or scikit-learn."""
    del config
    if "choices" not in history:
        return {}
    choices = history["choices"]
    columns = [agreement(counts) for counts in history["counts"]]
    found = {f"router/{name}": np.array([one[name] for one in columns]) for name in columns[0]}
    found["router/churn"] = np.array([np.nan] + [churn(a, b) for a, b in zip(choices[1:], choices[:-1], strict=True)])
    found["router/churn_to_final"] = np.array([churn(one, choices[-1]) for one in choices])
    if "groups" in history:
        found["router/group_hit"] = np.array([group_hit(history["groups"][0], counts) for counts in history["counts"]])
    return found


SAMPLES = Kind(
    program=lambda config, pool, mesh: run.program(config, pool),
    loss="test/loss",
    given=lambda config: TASKS[config.data.name].given(config.data),
    feed=lambda config, seed, rows=slice(None): lambda first, steps: (),
    feed_shape=lambda config, steps: (),
    offline=_offline,
    data_bytes=lambda config, pool: samples.bytes_of(TASKS[config.data.name], config.data, pool),
    data=lambda config: images.described(config.data) if config.data.name == "images" else "generated from the seed",
    cost=lambda config: (config.batch_size, None),
    watched=False,
    fuse="LIBRARY_FUSION_TYPE_REDUCE",
)

TEXT = Kind(
    program=lambda config, pool, mesh: language.program(config, mesh),
    loss="eval/loss",
    given=feed.given,
    feed=feed.feed,
    feed_shape=feed.feed_shape,
    offline=language.offline,
    data_bytes=lambda config, pool: 0,  # on the host, shared by all runs
    data=lambda config: f"{config.data.name} {feed.corpus(config).digest}",
    cost=lambda config: (
        config.batch_size * (config.data.input_length + text.lengths(config.data)[1]),
        config.batch_size * models.flops_per_row(config),
    ),
    watched=True,
    fuse="",
)


def kind_of(config: ConfigDict) -> Kind:
    """The kind of an experiment, by where its data come from."""
    return TEXT if config.data.name in text.SOURCES else SAMPLES
