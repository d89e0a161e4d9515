"""Patches with a label signal and a cluster signal (Chen et al. 2022, Definition 3.1).

A sample of cluster k has, in random order: the feature y alpha v_k, which carries the label; the centre beta c_k, which
carries the cluster; another cluster's feature with a random sign, eps gamma v_k'; and patches of noise.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PRNGKeyArray, Scalar
from ml_collections import ConfigDict

from routed.contracts import AT_LEAST_0, AT_LEAST_1, SHARE, Batch, Column, UserError
from routed.settings.setting import POSITIVE, Setting, at_least, refuse
from routed.tasks.task import Task, World
from routed.tasks.worlds import clusters_of

#: Patches of a sample that carry signals.
SIGNALS = 3

#: Test samples for the lemmas, sizes of the change in their scores, and points of the integral over the noise.
LEMMA_SAMPLES, CHANGES, POINTS = 64, (1e-3, 0.1, 1.0), 512


class Signals(NamedTuple):
    """Orthonormal signals of each cluster."""

    features: Float[Array, "C D"]
    centres: Float[Array, "C D"]


def fixed(keys: Key[Array, " n"], data) -> Signals:
    """Draws Gaussian vectors and makes them orthonormal."""
    basis, _ = jnp.linalg.qr(jax.random.normal(keys[0], (data.dim, 2 * data.clusters)))
    return Signals(*jnp.split(basis.T, 2))


def draw(fixed: Signals, cluster_key: PRNGKeyArray | None, noise_key: PRNGKeyArray, size: int, data) -> Batch:
    """Draws whole samples, so that no training step assembles them.

    y is the label, -1 or 1, or its class as one-hot.
    """
    keys = jax.random.split(noise_key, 8)
    cluster = clusters_of(cluster_key, (size,), data.clusters)
    other_cluster = (cluster + jax.random.randint(keys[0], (size,), 1, data.clusters)) % data.clusters
    label, sign = (jax.random.rademacher(key, (size, 1), jnp.float32) for key in keys[1:3])

    def strength(key, low, high):
        return jax.random.uniform(key, (size, 1), minval=low, maxval=high)

    feature = label * strength(keys[3], data.alpha_low, data.alpha_high) * fixed.features[cluster]
    centre = strength(keys[4], data.beta_low, data.beta_high) * fixed.centres[cluster]
    false = sign * strength(keys[5], data.gamma_low, data.gamma_high) * fixed.features[other_cluster]
    sigma = data.patch_noise
    around = jax.random.normal(keys[6], (size, data.patches - SIGNALS, data.dim)) * sigma / jnp.sqrt(data.dim)
    if data.noise_outside:
        basis = jnp.concatenate(fixed)
        around -= (around @ basis.T) @ basis
        around *= sigma / jnp.maximum(jnp.linalg.norm(around, axis=-1, keepdims=True), 1e-9)  # sigma may be 0
    patches = jnp.concatenate([jnp.stack([feature, centre, false], 1), around], 1)
    order = jax.random.uniform(keys[7], (size, data.patches)).argsort(1)
    x = data.input_scale * jnp.take_along_axis(patches, order[:, :, None], 1)
    y = label if data.target == "sign" else jax.nn.one_hot((label[:, 0] > 0).astype(int), 2)
    return Batch(x=x, y=y, cluster=cluster)


def watch(params, world: World, test: Batch, key: PRNGKeyArray) -> dict[str, Array]:
    """Computes products of filters and router rows with the signals, and the lemmas on smoothed routing.

    `products` [4, experts, clusters]: max_j |<w_mj, v_k>| of experts with features and with centres, then |<theta_m,
    v_k>| and |<theta_m, c_k>| of the router (Figs. 4 and 5). Columns `signals/` are means over experts of each expert's
    largest product, and of its second largest product with features over the largest. `groups` [experts]: the cluster
    whose feature the filters of an expert favour, which at step 0 predicts the cluster that the expert will serve
    (Theorem 4.2). Only for experts and routers whose weights are patches. The key is consumed.
    """
    basis, experts = world.fixed, params["experts"].get("Dense_0", {}).get("kernel", jnp.zeros((1, 1)))
    dim = basis.features.shape[1]
    if experts.shape[-2] != dim:  # a dense net of all patches, say
        return {}
    experts = experts if experts.ndim == 3 else experts[None]  # a single model is one expert
    signed = [jnp.einsum("edf,cd->ecf", experts, signals) for signals in basis]
    strongest = [jnp.abs(products).max(-1) for products in signed]
    two = jnp.sort(strongest[0], axis=1)[:, -2:]
    columns = {
        "signals/expert_feature": two[:, 1].mean(),
        "signals/expert_others": (two[:, 0] / jnp.maximum(two[:, 1], 1e-12)).mean(),
        "signals/expert_centre": strongest[1].max(1).mean(),
    }
    outputs = test.y.shape[1]
    towards = jnp.ones(1) if outputs == 1 else jnp.array([-1.0, 1.0])  # filters of class 0 want the negative feature
    per_output = signed[0].reshape(*signed[0].shape[:2], outputs, -1) * towards[None, None, :, None]
    arrays = {"groups": per_output.max((2, 3)).argmax(1).astype(jnp.float32)}
    rows = params["router"].get("kernel", jnp.zeros((1, 1)))
    if len(rows) != dim or "features" in params["router"]:
        return columns
    routed = [jnp.abs(rows.T @ signals.T) for signals in basis]
    columns |= {
        f"signals/router_{name}": products.max(1).mean()
        for name, products in zip(("feature", "centre"), routed, strict=True)
    }
    columns["theory/row_sum"] = jnp.linalg.norm(rows.sum(1)) / jnp.maximum(jnp.linalg.norm(rows), 1e-12)
    columns |= lemmas(test.x[:LEMMA_SAMPLES].sum(1) @ rows, key)
    return columns | arrays | {"products": jnp.stack([*strongest, *routed])}


def chances(scores: Float[Array, "T E"]) -> Float[Array, "T E"]:
    """Computes P(expert e has the largest score + r_e) with r uniform on [0, 1].

    The integral over r_e of prod_j P(r_j < s_e + r_e - s_j).
    """
    at = (jnp.arange(POINTS) + 0.5) / POINTS
    below = jnp.clip(
        scores[:, :, None, None] - scores[:, None, :, None] + at[None, None, None], 0.0, 1.0
    )  # [T, e, j, points]
    diagonal = jnp.eye(scores.shape[1], dtype=bool)[None, :, :, None]
    return jnp.where(diagonal, 1.0, below).prod(2).mean(-1)


def lemmas(scores: Float[Array, "T E"], key: PRNGKeyArray) -> dict[str, Scalar]:
    """Tests the lemmas on smoothed routing with scores h and changed scores h'.

    A column is at most 1 if its lemma holds. lemma51: largest |p - p'| / (E^2 |h - h'|), in the maximum norm (Lemma
    5.1). lemma_c3: largest |p_m - p_n| / (E^2 |h_m - h_n|) of two experts, at h and at h' (Lemma C.3). lemma_c4: 1 +
    the largest chance of an expert whose score is at least 1 below the highest (Lemma C.4), and `hopeless`: the share
    of such experts. The key is consumed.
    """
    experts, p = scores.shape[1], chances(scores)
    worst, pairs = [], [_steepest(scores, p)]
    for change, change_key in zip(CHANGES, jax.random.split(key, len(CHANGES)), strict=True):
        moved = scores + change * jax.random.normal(change_key, scores.shape)
        then = chances(moved)
        apart = jnp.abs(then - p).max(1) / (experts**2 * jnp.abs(moved - scores).max(1))
        worst.append(apart.max())
        pairs.append(_steepest(moved, then))
    hopeless = scores <= scores.max(1, keepdims=True) - 1
    return {
        "theory/lemma51": jnp.stack(worst).max(),
        "theory/lemma_c3": jnp.stack(pairs).max(),
        "theory/lemma_c4": 1 + jnp.where(hopeless, p, 0.0).max(),
        "theory/hopeless": hopeless.mean(),
    }


def _steepest(scores: Float[Array, "T E"], p: Float[Array, "T E"]) -> Scalar:
    """Computes the largest |p_m - p_n| / (E^2 |h_m - h_n|) over pairs of experts.

    float32 cannot distinguish score differences below 1e-5 from 0.
    """
    apart, chance = (jnp.abs(of[:, :, None] - of[:, None]) for of in (scores, p))
    return (chance / (scores.shape[1] ** 2 * jnp.maximum(apart, 1e-5))).max()


def _strength(low: float, high: float, of: str) -> dict[str, Setting]:
    """Returns the settings for the bounds of a uniform strength."""
    return {
        "low": Setting(low, f"smallest strength of {of}", at_least(0), traced=True),
        "high": Setting(high, f"largest strength of {of}", traced=True),
    }


def _check(config: ConfigDict) -> None:
    data = config.data
    for name in ("alpha", "beta", "gamma"):
        low, high = data[f"{name}_low"], data[f"{name}_high"]
        if low > high:
            raise UserError(f"config keys data.{name}_low={low}, data.{name}_high={high}: the first must not be larger")
    if 2 * data.clusters > data.dim:
        refuse("data.dim", data.dim, f"2 data.clusters = {2 * data.clusters} orthogonal signals need as many")
    if data.noise_outside and data.dim == 2 * data.clusters:
        refuse("data.noise_outside", True, f"data.dim={data.dim} leaves no room outside of the signals")


TASK = Task(
    tokens="patches",
    targets={"sign": "sign", "class": "class"},
    fixed=fixed,
    draw=draw,
    dims=lambda data: data.patches * data.dim,
    signal=lambda data: data.dim,
    outputs=lambda data: 1 if data.target == "sign" else 2,
    watch=watch,
    columns={
        "router/group_share": Column(
            "share of samples that go to\nthe group of their cluster",
            "Share of the test samples that go to an expert whose filters at initialisation favour their cluster.",
            bounds=SHARE,
            higher_is_better=True,
        ),
        "router/group_gap": Column(
            "difference of loads\nwithin a group (Lemma E.16)",
            "Largest difference between the shares of a cluster's test samples that two experts of its group get;"
            " mean over the groups of at least two experts. 0: equal loads; 1: one expert has all samples.",
            bounds=SHARE,
        ),
        "router/group_hit": Column(
            "share of experts that serve the cluster\ntheir initial filters favour",
            "Share of the experts that mostly serve the cluster that their filters at initialisation favour.",
            bounds=SHARE,
            higher_is_better=True,
        ),
        "signals/expert_feature": Column(
            "largest product of an expert\nwith a feature",
            "Largest inner product of a filter of an expert with a cluster's feature vector.",
            bounds=AT_LEAST_0,
        ),
        "signals/expert_others": Column(
            "second product of an expert with a feature,\nover the largest",
            "Second largest inner product of an expert with feature vectors, over its largest: 0 for one alone.",
            bounds=SHARE,
        ),
        "signals/expert_centre": Column(
            "largest product of an expert\nwith a centre",
            "Largest inner product of a filter of an expert with a cluster's centre vector.",
            bounds=AT_LEAST_0,
        ),
        "signals/router_feature": Column(
            "largest product of a router row\nwith a feature",
            "Largest inner product of a router row with a feature vector.",
            bounds=AT_LEAST_0,
        ),
        "signals/router_centre": Column(
            "largest product of a router row\nwith a centre",
            "Largest inner product of a router row with a cluster's centre vector: what routing by cluster needs.",
            bounds=AT_LEAST_0,
        ),
        "theory/lemma51": Column(
            "change of routing over its bound\n(Lemma 5.1)",
            "Measured change of routing under a change of scores, over the bound of Lemma 5.1: at most 1 where the "
            "lemma holds.",
            bounds=AT_LEAST_0,
        ),
        "theory/lemma_c3": Column(
            "difference of chances over its bound\n(Lemma C.3)",
            "Measured difference of the chances of two experts over the bound of Lemma C.3: at most 1 where it holds.",
            bounds=AT_LEAST_0,
        ),
        "theory/lemma_c4": Column(
            "1 + chance of a hopeless expert\n(Lemma C.4)",
            "1 + the measured chance that an expert whose score is 1 below the highest is chosen; Lemma C.4 says "
            "that it is never.",
            bounds=AT_LEAST_1,
        ),
        "theory/hopeless": Column(
            "share of experts whose score is\n1 below the highest (Lemma C.4)",
            "Share of experts whose score is at least 1 below the highest.",
            bounds=SHARE,
        ),
        "theory/own_error": Column(
            "error of experts on the cluster that\ntheir filters favour (Lemma 5.2)",
            "Error of experts on samples of the cluster that their filters favour.",
            bounds=SHARE,
        ),
        "theory/other_error": Column(
            "smallest error of experts on\nanother cluster (Lemma 5.2)",
            "Smallest error of experts on samples of a cluster that their filters do not favour: a half is chance.",
            bounds=SHARE,
        ),
        "theory/row_sum": Column(
            "|sum of router rows| over\nthe norm of all (Lemma E.1)",
            "Norm of the sum of the router's rows over the norm of all rows: Lemma E.1 says that it stays 0.",
            bounds=AT_LEAST_0,
        ),
    },
    reads=("clusters", "dim"),
    settings={
        "patches": Setting(4, "patches: a feature, a centre, a false feature, and noise", at_least(SIGNALS)),
        **{f"alpha_{end}": bound for end, bound in _strength(0.5, 2.0, "the feature").items()},
        **{f"beta_{end}": bound for end, bound in _strength(1.0, 2.0, "the centre").items()},
        **{f"gamma_{end}": bound for end, bound in _strength(0.5, 3.0, "the false feature").items()},
        "patch_noise": Setting(
            1.0, "sigma: noise patches are N(0, sigma^2 / dim), of norm sigma or so", at_least(0), traced=True
        ),
        "noise_outside": Setting(False, "noise patches are orthogonal to all signals, of norm sigma"),
        "input_scale": Setting(1.0, "times the samples", POSITIVE, traced=True),
    },
    check=_check,
)
