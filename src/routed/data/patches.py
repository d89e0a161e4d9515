"""Cluster structure: the label and the cluster are signals among the patches of a sample (Chen et al. 2022, Definition 3.1).

A sample of cluster k has, in random order, one patch each of: its feature y alpha v_k, which carries the label; its centre
beta c_k, which carries the cluster; another cluster's feature with a random sign, eps gamma v_k'; and patches of noise.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PRNGKeyArray, Scalar

from routed.data.samples import Task, World, kinds
from routed.words import Batch

#: Patches of a sample that carry signals.
SIGNALS = 3
#: Test samples on which the lemmas are tried, sizes of the change in their scores, and points of the integral over the noise.
TRIED, CHANGES, POINTS = 64, (1e-3, 0.1, 1.0), 512


class Signals(NamedTuple):
    """Orthonormal signals of each cluster."""

    features: Float[Array, "C D"]
    centres: Float[Array, "C D"]


def fixed(keys: Key[Array, " n"], data) -> Signals:
    """Gaussian vectors, made orthonormal."""
    basis, _ = jnp.linalg.qr(jax.random.normal(keys[0], (data.dim, 2 * data.clusters)))
    return Signals(*jnp.split(basis.T, 2))


def draw(fixed: Signals, kind: PRNGKeyArray | None, noise: PRNGKeyArray, size: int, data, settings) -> Batch:
    """Whole samples, so that no step has to make them of their parts. y is the label, -1 or 1, or its class as one-hot."""
    keys = jax.random.split(noise, 8)
    cluster = kinds(kind, (size,), data.clusters)
    other = (cluster + jax.random.randint(keys[0], (size,), 1, data.clusters)) % data.clusters
    label, sign = (jax.random.rademacher(key, (size, 1), jnp.float32) for key in keys[1:3])

    def strength(key, low, high):
        return jax.random.uniform(key, (size, 1), minval=low, maxval=high)

    feature = (
        label * strength(keys[3], settings["data.alpha_low"], settings["data.alpha_high"]) * fixed.features[cluster]
    )
    centre = strength(keys[4], settings["data.beta_low"], settings["data.beta_high"]) * fixed.centres[cluster]
    false = sign * strength(keys[5], settings["data.gamma_low"], settings["data.gamma_high"]) * fixed.features[other]
    sigma = settings["data.patch_noise"]
    around = jax.random.normal(keys[6], (size, data.patches - SIGNALS, data.dim)) * sigma / jnp.sqrt(data.dim)
    if data.noise_outside:
        basis = jnp.concatenate(fixed)
        around -= (around @ basis.T) @ basis
        around *= sigma / jnp.maximum(jnp.linalg.norm(around, axis=-1, keepdims=True), 1e-9)  # sigma may be 0
    patches = jnp.concatenate([jnp.stack([feature, centre, false], 1), around], 1)
    order = jax.random.uniform(keys[7], (size, data.patches)).argsort(1)
    x = settings["data.input_scale"] * jnp.take_along_axis(patches, order[:, :, None], 1)
    y = label if data.target == "sign" else jax.nn.one_hot((label[:, 0] > 0).astype(int), 2)
    return Batch(x=x, y=y, cluster=cluster)


def batch(world: World, draws: Batch, data, settings) -> Batch:
    """The samples as they were drawn."""
    del world, data, settings
    return draws


def watch(params, world: World, test: Batch, key: PRNGKeyArray) -> dict[str, Array]:
    """What filters and router rows have in common with the signals, and the lemmas on smoothed routing.

    `products` [4, experts, clusters]: max_j |<w_mj, v_k>| of experts with features and with centres, then |<theta_m, v_k>| and
    |<theta_m, c_k>| of the router (its Figs. 4 and 5). Columns `signals/` average over experts the largest product of each, and
    for features the second largest too. `groups` [experts]: the cluster whose feature an expert's filters favour, which at step
    0 predicts whom it will serve (its Theorem 4.2). Only of experts and routers whose weights are patches. The key is consumed.
    """
    basis, experts = world.fixed, params["experts"].get("Dense_0", {}).get("kernel", jnp.zeros((1, 1)))
    dim = basis.features.shape[1]
    if experts.shape[-2] != dim:  # a dense net of all patches, say
        return {}
    experts = experts if experts.ndim == 3 else experts[None]  # a single model is one expert
    signed = [jnp.einsum("edf,cd->ecf", experts, signals) for signals in basis]
    strongest = [jnp.abs(one).max(-1) for one in signed]
    two = jnp.sort(strongest[0], axis=1)[:, -2:]
    seen = {
        "signals/expert_feature": two[:, 1].mean(),
        "signals/expert_second": two[:, 0].mean(),
        "signals/expert_centre": strongest[1].max(1).mean(),
    }
    outputs = test.y.shape[1]
    towards = jnp.ones(1) if outputs == 1 else jnp.array([-1.0, 1.0])  # filters of class 0 want the negative feature
    per_output = signed[0].reshape(*signed[0].shape[:2], outputs, -1) * towards[None, None, :, None]
    arrays = {"groups": per_output.max((2, 3)).argmax(1).astype(jnp.float32)}
    rows = params["router"].get("kernel", jnp.zeros((1, 1)))
    if len(rows) != dim or "features" in params["router"]:
        return seen
    routed = [jnp.abs(rows.T @ signals.T) for signals in basis]
    seen |= {
        f"signals/router_{name}": one.max(1).mean() for name, one in zip(("feature", "centre"), routed, strict=True)
    }
    seen["theory/row_sum"] = jnp.linalg.norm(rows.sum(1)) / jnp.maximum(jnp.linalg.norm(rows), 1e-12)
    seen |= lemmas(test.x[:TRIED].sum(1) @ rows, key)
    return seen | arrays | {"products": jnp.stack([*strongest, *routed])}


def chances(scores: Float[Array, "T E"]) -> Float[Array, "T E"]:
    """P(expert e has the largest score + r_e), r uniform on [0, 1]: the integral over r_e of prod_j P(r_j < s_e + r_e - s_j)."""
    at = (jnp.arange(POINTS) + 0.5) / POINTS
    below = jnp.clip(
        scores[:, :, None, None] - scores[:, None, :, None] + at[None, None, None], 0.0, 1.0
    )  # [T, e, j, points]
    own = jnp.eye(scores.shape[1], dtype=bool)[None, :, :, None]
    return jnp.where(own, 1.0, below).prod(2).mean(-1)


def lemmas(scores: Float[Array, "T E"], key: PRNGKeyArray) -> dict[str, Scalar]:
    """Smoothed routing, on scores h of the router and changed ones h': both columns are at most 1 where the lemmas hold.

    lemma51: largest |p - p'| / (E^2 |h - h'|), in the maximum norm (Lemma 5.1). lemma_c4: 1 + the largest chance of an expert
    whose score is at least 1 below the highest (Lemma C.4). The key is consumed.
    """
    experts, p, worst = scores.shape[1], chances(scores), []
    for change, one in zip(CHANGES, jax.random.split(key, len(CHANGES)), strict=True):
        moved = scores + change * jax.random.normal(one, scores.shape)
        apart = jnp.abs(chances(moved) - p).max(1) / (experts**2 * jnp.abs(moved - scores).max(1))
        worst.append(apart.max())
    hopeless = scores <= scores.max(1, keepdims=True) - 1
    return {"theory/lemma51": jnp.stack(worst).max(), "theory/lemma_c4": 1 + jnp.where(hopeless, p, 0.0).max()}


TASK = Task(
    targets=("sign", "class"),
    fixed=fixed,
    draw=draw,
    batch=batch,
    dims=lambda data: data.patches * data.dim,
    outputs=lambda data: 1 if data.target == "sign" else 2,
    watch=watch,
)
