"""Numbers from three Gaussian experts under a gate: the data of Theorems 4.1 and 4.2 of Pham et al. (2024)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from routed.contracts import Batch
from routed.papers.pham2024.gated import GATES, NORMS, Components, answers, log_weights
from routed.settings.setting import Setting, one_of, within
from routed.tasks.task import Task, World

#: The true measure of the data. With two chosen experts, the gate `norms` chooses experts 2 and 3 for x below -1/7,
#: 1 and 2 up to .8, and 1 and 3 beyond; the gate `softmax` chooses 2 and 3 below -1/3, 1 and 2 up to 1/3, and 1 and 3
#: beyond. Every g_i is 0 only at a single point.
TRUE = Components(
    line=np.array([[2.0, 1.0], [-1.0, 1.5], [1.5, -0.5]], np.float32),  # type: ignore[arg-type]
    variance=np.array([0.2, 0.1, 0.3], np.float32),  # type: ignore[arg-type]
    gate=np.array([[1.5, 0.5], [-1.5, 0.5], [0.0, 0.0]], np.float32),  # type: ignore[arg-type]
)


class Draws(NamedTuple):
    """x uniform on [-1, 1], y given x, and the expert that generates y."""

    x: Float[Array, " T"]
    y: Float[Array, " T"]
    expert: Int[Array, " T"]


def draw(fixed, cluster_key: PRNGKeyArray | None, noise_key: PRNGKeyArray, size: int, data) -> Draws:
    """Draws x, then an expert by weight, then y from the expert; test samples are drawn like training samples."""
    where, who, noise = jax.random.split(noise_key, 3)
    x = jax.random.uniform(where, (size,), minval=-1, maxval=1)
    expert = jax.random.categorical(who, log_weights(TRUE, data.gate, data.chosen, x))
    mean = jnp.take_along_axis(answers(TRUE, x), expert[:, None], axis=1)[:, 0]
    y = mean + jnp.sqrt(jnp.asarray(TRUE.variance)[expert]) * jax.random.normal(noise, (size,))
    return Draws(x, y, expert)


def batch(world: World, draws: Draws, data) -> Batch:
    """Returns x and y as columns; cluster = the expert."""
    return Batch(draws.x[:, None], draws.y[:, None], draws.expert)


TASK = Task(
    tokens="rows",
    targets={"constant": "density"},
    draw=draw,
    batch=batch,
    dims=lambda data: 1,
    labels=lambda data: len(TRUE.variance),
    variance=lambda world, data: jnp.float32(1.0),  # losses are nats, without a scale
    has_constant=False,  # a model of a density predicts no value
    provides=frozenset({"cluster", "gated Gaussians"}),
    settings={
        "gate": Setting(
            NORMS,
            "scores that choose among three experts: norms |g(x)|, or softmax: a gate's own weights",
            one_of(GATES),
        ),
        "chosen": Setting(
            3,
            "K: experts of a sample; of fewer than 3 the likelihood jumps where a sample changes its experts",
            within(2, 3),
        ),
    },
)
