"""Two independent mixtures of Gaussians in orthogonal subspaces, of which one alone decides the target (ours).

A sample is in one of C relevant clusters and, independently, in one of C irrelevant clusters. The C^2 pairs are the
cells, and routing is judged by cells. A share s of the squared distances between cells lies in the irrelevant mixture;
the total distance does not depend on s.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray

from routed.contracts import AT_LEAST_1, FROM_MINUS_1_TO_1, Batch, Column
from routed.settings.setting import Setting, at_least, within
from routed.tasks.task import Task, World
from routed.tasks.worlds import clusters_of, posterior, separated


class Fixed(NamedTuple):
    """One constellation of centres at separation 1, a random frame, and a target per relevant cluster.

    Both mixtures use the same constellation, so that neither is easier to find. Relevant clusters differ along the
    first half of the frame's columns, irrelevant clusters along the second half.
    """

    centres: Float[Array, "C D"]
    frame: Float[Array, "F F"]  # F = 2 D; orthonormal
    targets: Float[Array, "C O"]


class Draws(NamedTuple):
    """Cells, relevant + C irrelevant, and N(0, I) noise."""

    cluster: Int[Array, " T"]
    noise: Float[Array, "T F"]


def fixed(keys: Key[Array, " n"], data) -> Fixed:
    """Draws the centres and N(0, I) targets of `gmm` with the same seed, and the frame.

    The frame is rotated at random, since Adam distinguishes coordinate axes.
    """
    size = 2 * data.dim
    frame, _ = jnp.linalg.qr(jax.random.normal(jax.random.fold_in(keys[0], 1), (size, size)))
    return Fixed(
        centres=separated(keys[0], data.clusters, data.dim),
        frame=frame,
        targets=jax.random.normal(keys[1], (data.clusters, data.target_dim)),
    )


def draw(fixed: Fixed, cluster_key: PRNGKeyArray | None, noise_key: PRNGKeyArray, size: int, data) -> Draws:
    """Draws cells, all equally likely, and N(0, I) noise in all dimensions.

    The irrelevant cluster is independent of the relevant cluster.
    """
    return Draws(
        cluster=clusters_of(cluster_key, (size,), data.clusters**2),
        noise=jax.random.normal(noise_key, (size, len(fixed.frame))),
    )


def batch(world: World, draws: Draws, data) -> Batch:
    """Computes x = c (sqrt(1 - s) F_1 mu_a + sqrt(s) F_2 mu_b) + noise and y = v_a for the cell (a, b).

    The squared distance of cells (a, b) and (a', b') is c^2 ((1 - s) |mu_a - mu_a'|^2 + s |mu_b - mu_b'|^2): at least
    c^2 D where both clusters differ. The variance between cells is c^2 mean |mu - mean mu|^2 at every s.
    """
    centres, frame, targets = world.fixed
    relevant, irrelevant = draws.cluster % data.clusters, draws.cluster // data.clusters
    parts = (
        jnp.sqrt(1 - data.irrelevant_fraction) * centres[relevant],
        jnp.sqrt(data.irrelevant_fraction) * centres[irrelevant],
    )
    x = data.separation * jnp.concatenate(parts, axis=1) @ frame.T + draws.noise
    return Batch(x=x, y=targets[relevant], cluster=draws.cluster)


def bayes(world: World, batch: Batch, data) -> Float[Array, "T O"]:
    """Computes E[y|x] = sum_a p(a|x) v_a, where p(a|x) = p(a|F_1^T x).

    Directions orthogonal to F_1 are independent of a. At s = 1 every p(a|x) is 1 / C: the prediction is the mean of
    the v_a, with loss 1, and only an oracle that sees the cell has a lower loss.
    """
    centres, frame, targets = world.fixed
    relevant = batch.x @ frame[:, : centres.shape[1]]
    return posterior(relevant, jnp.sqrt(1 - data.irrelevant_fraction) * data.separation * centres) @ targets


def groupings(world: World, data) -> dict[str, Float[Array, "labels groups"]]:
    """Returns the membership of cells in relevant and in irrelevant clusters."""
    cell = jnp.arange(data.clusters**2)
    numbers = {"relevant": cell % data.clusters, "irrelevant": cell // data.clusters}
    return {name: jax.nn.one_hot(number, data.clusters) for name, number in numbers.items()}


def at(world: World, step, data) -> World:
    """Swaps the two mixtures from step `data.swap_step` on: each lies along the other half of the frame.

    At s = .5 the law of the inputs stays the same, and only the target depends on the other mixture.
    """
    frame, shifted = world.fixed.frame, (data.swap_step > 0) & (step >= data.swap_step)
    frame = jnp.where(shifted, jnp.roll(frame, frame.shape[1] // 2, axis=1), frame)
    return world._replace(fixed=world.fixed._replace(frame=frame))


TASK = Task(
    tokens="rows",
    targets={"constant": "vector"},
    fixed=fixed,
    draw=draw,
    batch=batch,
    bayes=bayes,
    dims=lambda data: 2 * data.dim,
    outputs=lambda data: data.target_dim,
    labels=lambda data: data.clusters**2,
    groupings=groupings,
    at=at,
    columns={
        f"router/{name}_by_{which}": column
        for which in ("relevant", "irrelevant")
        for name, column in {
            "ami": Column(
                f"adjusted mutual information of\nexperts and {which} clusters",
                "Adjusted mutual information of the chosen expert and this label alone: 1 is the same partition, "
                "about 0 is unrelated.",
                FROM_MINUS_1_TO_1,
            ),
            "sparsity": Column(
                f"effective experts per {which} cluster",
                "Mean over the values of this label of exp H(expert | value): how many experts share it.",
                AT_LEAST_1,
                log=True,
            ),
        }.items()
    },
    reads=("clusters", "dim", "separation"),
    settings={
        "irrelevant_fraction": Setting(
            0.5,
            "s: of the squared distances between clusters, what lies between those that do not matter for the target",
            within(0.0, 1.0),
            traced=True,
        ),
        "swap_step": Setting(
            0,
            "step from which the two mixtures have changed places, in training and in evaluations; 0: never",
            at_least(0),
            traced=True,
        ),
    },
)
