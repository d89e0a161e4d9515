"""Sums of samples from a few of many Gaussians, as in dictionary learning (Dikkala et al. 2023, 3.6 and C.3)."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray
from ml_collections import ConfigDict

from routed.contracts import AT_LEAST_1, Batch, Column
from routed.settings.setting import refuse
from routed.tasks.task import Task, World
from routed.tasks.worlds import clusters_of, posterior, separated

#: Most combinations of atoms of the test samples: routing is judged by combination.
JUDGED = 512


class Fixed(NamedTuple):
    """Centres at separation 1, a weight vector of each centre, and all combinations of `data.rank` atoms, shuffled."""

    centres: Float[Array, "C D"]
    weights: Float[Array, "C D"]
    atoms: Int[Array, "P R"]


class Draws(NamedTuple):
    """Numbers of combinations, and the noise of each atom of a combination."""

    cluster: Int[Array, " T"]
    noise: Float[Array, "T R D"]


#: The most atoms in the list of all combinations.
LISTED = 10_000_000


def judged(data) -> int:
    """Returns the number of combinations of the test samples: the first combinations of the random order."""
    return min(JUDGED, math.comb(data.clusters, data.rank))


def fixed(keys: Key[Array, " n"], data) -> Fixed:
    """Draws centres, weights N(0, I/D), and an order of the combinations."""
    order, weights = jax.random.split(keys[1])
    every = np.array(list(itertools.combinations(range(data.clusters), data.rank)), np.int32)
    return Fixed(
        centres=separated(keys[0], data.clusters, data.dim),
        weights=jax.random.normal(weights, (data.clusters, data.dim)) / jnp.sqrt(data.dim),
        atoms=jax.random.permutation(order, every),
    )


def draw(fixed: Fixed, cluster_key: PRNGKeyArray | None, noise_key: PRNGKeyArray, size: int, data) -> Draws:
    """Draws combinations: any combination for training, the judged combinations in turn for tests."""
    cluster = clusters_of(cluster_key, (size,), judged(data) if cluster_key is None else len(fixed.atoms))
    return Draws(cluster, jax.random.normal(noise_key, (size, data.rank, data.dim)))


def batch(world: World, draws: Draws, data) -> Batch:
    """Returns x = the sum of the atoms' samples, and y by `data.target`.

    cross: (sum_i w_i)^T x (C.3, which has the paper's numbers); atoms: sum_i w_i^T x_i, each sample with the weights of
    its atom; centres: sum_i w_i^T mu_i (3.6, as printed).
    """
    centres, weights, atoms = world.fixed
    at = centres[atoms[draws.cluster]] * data.separation
    vectors, each = weights[atoms[draws.cluster]], at + draws.noise
    x = each.sum(1)
    inputs = {"cross": x[:, None], "atoms": each, "centres": at}[data.target]
    return Batch(x=x, y=(vectors * jnp.broadcast_to(inputs, vectors.shape)).sum((1, 2))[:, None], cluster=draws.cluster)


def bayes(world: World, batch: Batch, data) -> Float[Array, "T O"]:
    """Computes E[y|x] as a sum over all combinations.

    Given a combination, x is N(sum_i mu_i, R I), so E[x_i|x] = mu_i + (x - sum mu) / R.
    """
    centres, weights, atoms = world.fixed
    at = centres * data.separation
    sums, total = at[atoms].sum(1), weights[atoms].sum(1)  # [P, D]
    constant = (at[atoms] * weights[atoms]).sum((1, 2))  # [P]: sum_i w_i^T mu_i

    def expected(x):
        likely = posterior(x[None], sums, data.rank)[0]
        if data.target == "centres":
            return likely @ constant
        along = (total * x[None]).sum(-1)
        if data.target == "atoms":
            along = constant + (along - (total * sums).sum(-1)) / data.rank
        return likely @ along

    return jax.lax.map(expected, batch.x, batch_size=64)[:, None]


def groupings(world: World, data) -> dict[str, Float[Array, "labels groups"]]:
    """Returns the groups of judged combinations by atom: 1 if the combination contains the atom."""
    return {"atom": jax.nn.one_hot(world.fixed.atoms[: judged(data)], data.clusters).sum(1)}


def _check(config: ConfigDict) -> None:
    clusters, rank = config.data.clusters, config.data.rank
    if rank > clusters:
        refuse("data.rank", rank, f"a sample has at most data.clusters={clusters} atoms")
    # The logarithm, as the number of combinations may have a billion digits.
    logs = math.lgamma(clusters + 1) - math.lgamma(rank + 1) - math.lgamma(clusters - rank + 1)
    if logs + math.log(rank) > math.log(LISTED):
        refuse(
            "data.rank",
            rank,
            f"all combinations of data.clusters={clusters} atoms are listed, and there are e^{logs:.0f}; lower either, "
            f"to at most {LISTED:,} atoms in the list",
        )


TASK = Task(
    tokens="rows",
    targets={"cross": "vector", "atoms": "vector", "centres": "vector"},
    fixed=fixed,
    draw=draw,
    batch=batch,
    bayes=bayes,
    signal=lambda data: data.dim,
    labels=judged,
    groupings=groupings,
    columns={
        "router/sparsity_by_atom": Column(
            "effective experts per atom",
            "Mean over the dictionary's atoms of exp H(expert | atom).",
            log=True,
            bounds=AT_LEAST_1,
        )
    },
    reads=("clusters", "dim", "rank", "separation"),
    check=_check,
)
