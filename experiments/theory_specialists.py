"""Rows from the data: does every cluster get a specialist as often as a coupon collector finds them all? (Theorem 2, Lemma 1)

Question. Dikkala et al. (2023, 4.2 and Section E) start the router's rows at training examples. With O(k log k) experts every one of
k clusters contributes a row with high probability (a coupon collector's argument); a softmax over such rows sends nearly
all of a cluster's weight to its own rows, whose experts then learn its target while the router hardly moves. So, over runs, the
share in which every cluster ends with specialists should be the probability that e uniform draws hit all k clusters.

    python -m routed.main --config=experiments/theory_specialists.py           # Theorem 2
    python -m routed.main --config=experiments/theory_specialists.py:kmeans    # Lemma 1

Lemma 1 (figure kmeans): with experts that are their own router, f(x) = u_j with u_j nearest to x, and the target y = x, gradient
descent on the squared loss takes the steps of gradient descent on the k-means objective; with a step of n / (2 n_j) for a centre
with n_j samples, it is an iteration of Lloyd's algorithm.

From the paper: uniform mixtures of k Gaussians, n = d k ln k samples, d >= k, constant experts, soft routing, rows from examples,
a small router rate. Success: all clusters are covered (metrics.covered: 90 % of its test samples go to experts 90 % of whose
samples are its own).

Rules where the paper is silent, set on seeds from 5000 on.
  sizes       k = 8, 16, 32 clusters in 32 dimensions; 1, 2, 4, 8 experts a cluster; separation 1, 2, 4.
  training    plain SGD, batch 128, 200 steps. The rate of experts is k / 8: an expert sees 1 / k of the samples, so this is a
              step of .25 towards their target. The router's is a tenth of it.
  arms        frozen_data: the rows stay, which is the small rate of the proof in its limit; learned: at a
              tenth of the experts' rate the router moves.
  verdict     frozen rows: success differs by less than .05 (two one-sided tests) from the share of runs whose rows hit every cluster,
              paired by seed, at separations 2 and 4, and from the coupon collector's probability at separation 4; at 1 it falls
              short. Learned: it finds clusters that no row came from, so it succeeds more often than predicted (2 experts a cluster).
  gate        1, so none: success is counted over all runs, and one that missed a cluster keeps that cluster's loss.

What differs from the theorem. On seeds from 5000 on, frozen rows at separation 1 covered every cluster in 5 % of the runs with 8
experts a cluster, though nearly all had a row from every cluster: scores are products without bias, so a row with a large norm wins samples
of others. `c-separated for some constant c` has to mean about 4 here. And a router at a hundredth of the experts' rate already moved
enough to beat the prediction (.68 against .31 at separation 4 with 2 experts a cluster).

Found. Runs whose rows hit every cluster are covered in 99.6 % of the cases at separation 4 with frozen rows, 91 % at 2, 1 % at 1. At
separation 4 success follows the coupon collector, a little above it where it is uncertain: a row that no sample of its own cluster
chooses may serve a cluster without one (4 % of the runs that missed a cluster). A router that learns covers every cluster of 8 with
16 experts in 73 to 79 % of the runs, against 31 % predicted: there the theorem is a lower bound. Lemma 1 holds to rounding.

Cost on 2 cores: 4 minutes, kmeans half a minute; 100 more seeds (--config.seeds=200) 3 minutes.
"""

from __future__ import annotations

import math

from ml_collections import ConfigDict

from routed.claims import Claim
from routed.config import base, variant
from routed.points import Point, product
from routed.stats import coupon_collector

FIGURES = ("", "kmeans")

CLUSTERS = {"smoke": (4, 8), "default": (8, 16, 32), "paper": (8, 16, 32, 64)}
RATIOS = {"smoke": (2, 4), "default": (1, 2, 4, 8), "paper": (1, 2, 4, 8)}
SEPARATIONS = {"smoke": (1.0, 4.0), "default": (1.0, 2.0, 4.0), "paper": (1.0, 2.0, 4.0)}


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of FIGURE[,SCALE]."""
    figure, scale = variant(arg, FIGURES)
    c = base()
    with c.unlocked():
        c.name, c.figure, c.scale = "theory_specialists", figure, scale
        c.optimizer.momentum, c.mesh.runs_per_batch = 0.0, 600
        c.data.dim = max(32, CLUSTERS[scale][-1])
        c.data.clusters, c.data.test_samples, c.data.separation = 16, 320, 4.0
        c.batch_size, c.steps, c.eval_every, c.seeds, c.gate.train_loss = 128, 200, 200, 100, 1.0
        c.experts.name, c.router.from_data = "constant", True
        c.arms = ("frozen_data", "learned")
        if figure == "kmeans":
            c.arms, c.model, c.router.from_data = ("learned",), "kmeans", False
            c.data.target, c.data.target_dim, c.data.samples = "input", c.data.dim, 2048
            c.experts.learning_rate, c.steps, c.eval_every, c.seeds = 1.0, 400, 20, 10
        if scale == "paper":
            c.seeds = 100 if figure else 200
        if scale == "smoke":
            c.data.clusters, c.steps, c.eval_every, c.seeds, c.data.test_samples = 4, 40, 20, 3, 160
    return c.lock()


def _point(clusters: int, experts: int, dim: int) -> Point:
    """The sizes that go with a number of clusters: n = d k ln k samples, and the experts' rate."""
    samples = math.ceil(dim * clusters * math.log(clusters))
    return {
        "data.clusters": clusters, "data.test_samples": 20 * clusters, "data.samples": samples, "experts.count": experts,
        "experts.learning_rate": clusters / 8, "router.learning_rate": clusters / 80,
    }  # fmt: skip


def get_sweep(config: ConfigDict) -> tuple[Point, ...]:
    """Clusters times experts per cluster times separations; k-means: clusters times separations."""
    scale, dim = config.scale, config.data.dim
    if config.figure == "kmeans":
        return tuple(
            {"data.clusters": k, "experts.count": k} | at
            for k in CLUSTERS[scale]
            for at in product(data__separation=SEPARATIONS[scale])
        )
    sizes = [_point(k, k * ratio, dim) for k in CLUSTERS[scale] for ratio in RATIOS[scale]]
    return tuple(one | at for one in sizes for at in product(data__separation=SEPARATIONS[scale]))


def get_claims(config: ConfigDict) -> tuple[Claim, ...]:
    """Success against its prediction at every point; steps against those of k-means."""
    return _of_kmeans(config) if config.figure == "kmeans" else _of_success(config)


def _of_kmeans(config: ConfigDict) -> tuple[Claim, ...]:
    comparability = "gaps_filled" if config.scale != "smoke" else "scaled"
    sweep = get_sweep(config)
    return tuple(
        Claim(
            "order", f"dikkala.lemma1.{name}", f"a step is {what}, up to 1e-5", "identical steps", comparability,
            f"theory/{name}_step", {"arm": "learned"}, {"value": 1e-5}, sweep[len(sweep) // 2],
        )
        for name, what in (("gradient", "a descent step on the inertia"), ("lloyd", "an iteration of Lloyd's"))
    )  # fmt: skip


def _of_success(config: ConfigDict) -> tuple[Claim, ...]:
    comparability = "gaps_filled" if config.scale != "smoke" else "scaled"
    rows, learned, found = {"arm": "frozen_data"}, {"arm": "learned"}, []
    closest, farthest = SEPARATIONS[config.scale][0], SEPARATIONS[config.scale][-1]
    metric, hit = "router/all_covered", {"metric": "router/rows_hit"}
    for at in get_sweep(config):
        ratio, c = at["experts.count"] // at["data.clusters"], at["data.separation"]
        predicted = coupon_collector(at["experts.count"], at["data.clusters"])

        def claim(kind, id, statement, paper, lower, higher, at=at, metric=metric, unit="probability"):
            tag = f"{id}.{_tag(at)}"
            return Claim(kind, tag, f"{_tag(at)}: {statement}", paper, comparability, metric, lower, higher, at, unit)

        if c > closest:
            words = "frozen rows cover every cluster when they come from every cluster"
            found.append(
                claim("null", "dikkala.theorem2.specialists", words, "probability 1 - exp(-O(d))", rows, rows | hit)
            )
        elif ratio >= 4:
            words = "rows from every cluster are not enough"
            found.append(claim("order", "dikkala.theorem2.close", words, "asks for separation", rows, rows | hit))
        if c == farthest:
            words = "frozen rows cover every cluster with the coupon collector's probability"
            found.append(
                claim("null", "dikkala.theorem2.success", words, f"{predicted:.3g}", rows, {"value": predicted})
            )
        if c > closest and ratio == 2:
            words = "a router that moves covers every cluster more often than its rows hit them"
            found.append(claim("order", "dikkala.theorem2.learning", words, "not asked", learned | hit, learned))
        if c == farthest and ratio == RATIOS[config.scale][-1]:
            words, limit = "homogeneity of experts is above .99", {"value": 0.99}
            found.append(
                claim(
                    "order", "dikkala.theorem2.homogeneity", words, "routing is by cluster", limit, learned,
                    metric="router/homogeneity", unit="difference",
                )
            )  # fmt: skip
    return tuple(found)


def _tag(at: Point) -> str:
    return f"c{at['data.separation']:g}.k{at['data.clusters']}.e{at['experts.count']}"


def get_plots(config: ConfigDict) -> tuple[dict, ...]:
    """Success against experts per cluster with its prediction; steps of k-means over training."""
    if config.figure == "kmeans":
        steps = ("theory/gradient_step", "theory/lloyd_step", "train/loss")
        return ({"kind": "training", "name": "steps", "metrics": steps},)
    predicted = {
        (at["data.clusters"], at["experts.count"]): coupon_collector(at["experts.count"], at["data.clusters"])
        for at in get_sweep(config)
    }
    success = {"kind": "success", "metric": "router/all_covered", "x": "experts.count", "predicted": predicted}
    return (
        success | {"name": "success", "arm": "learned"},
        success | {"name": "success_frozen", "arm": "frozen_data"},
    )
