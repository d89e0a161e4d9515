"""Rows from data: does every cluster get a specialist as often as a coupon collector finds all? (Theorem 2, Lemma 1)

Question. Dikkala et al. (2023, 4.2 and Section E) start the router's rows at training examples. With O(k log k)
experts every one of k clusters contributes a row with high probability (a coupon collector's argument). A softmax over
such rows sends nearly all of a cluster's weight to its own rows, whose experts then learn its target while the router
hardly moves. So the share of runs in which every cluster ends with specialists should be the probability that e
uniform draws hit all k clusters.

    routed run --config=theory_specialists         # Theorem 2
    routed run --config=theory_specialists:proof   # Theorem 2, (ii) to (iv)
    routed run --config=theory_specialists:kmeans  # Lemma 1

Lemma 1 (figure kmeans): with experts that are their own router, f(x) = u_j with u_j nearest to x, and the target y =
x, gradient descent on the squared loss takes the steps of gradient descent on the k-means objective; with a step of n
/ (2 n_j) for a centre with n_j samples, it is an iteration of Lloyd's algorithm.

From the paper: uniform mixtures of k Gaussians, n = d k ln k samples, d >= k, constant experts, soft routing, rows
from examples, a small router rate. Success: all clusters are covered (metrics.agreement.covered: 90 % of its test
samples go to experts 90 % of whose samples are its own).

Rules where the paper is silent, set on seeds from 5000 on.
  sizes       k = 8, 16, 32 clusters in 32 dimensions; 1, 2, 4, 8 experts a cluster; separation 1, 2, 4.
  training    plain SGD, batch 128, 200 steps. The rate of experts is k / 8: an expert sees 1 / k of the samples, so
              this is a step of .25 towards their target. The router's is a tenth of it.
  arms        frozen_data: the rows stay, which is the small rate of the proof in its limit; learned: at a tenth of the
              experts' rate the router moves.
  verdict     frozen rows: success differs by less than .05 (two one-sided tests) from the share of runs whose rows hit
              every cluster, paired by seed, at separations 2 and 4, and by less than .1 from the coupon collector's
              probability at separation 4; at 1 it falls short. Learned: it finds clusters without a row of their own,
              so it succeeds more often than predicted (2 experts a cluster). With 100 seeds and a margin of .05 none of
              these 36 equality tests could pass after Holm's correction for 51.
  horizon     1: no verdict asks about longer training; success is counted over all runs, and a run that missed a
              cluster keeps that cluster's loss.

Found (docs/results/without_page.md). Runs whose rows hit every cluster are covered in 99.6 % of the cases at separation
4 with frozen rows, 91 % at 2, 1 % at 1. A learned router covers every cluster of 8 with 16 experts in 73 to 79 % of the
runs, against 31 % predicted: there the theorem is a lower bound. Lemma 1 holds to rounding; (ii) holds, (iii) up to its
constant, (iv) for the direction of rows only.

Cost on 2 cores: 4 minutes for 100 seeds, 3 for each 100 more; proof 3, kmeans half a minute.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ml_collections import ConfigDict

import routed.papers.dikkala2023  # noqa: F401 (parts of the paper)
from routed.analysis.claims import LEARNED, Claim, Writer, comparability
from routed.plan import Figure, Point, cross, make_config, product

PROTOCOL = {
    "arms": ("frozen_data", "learned"), "seeds": 400, "gate.horizon": 1.0,
    "data.dim": 32, "data.clusters": 16, "data.test_samples": 320, "data.separation": 4.0,
    "router.init_from_data": True, "experts.name": "constant", "optimizer.momentum": 0.0,
    "batch_size": 128, "steps": 200, "eval_every": 200, "mesh.runs_per_batch": 600,
}  # fmt: skip

SCALES = {
    "smoke": lambda config: {"data.clusters": 4, "data.test_samples": 160, "steps": 40, "eval_every": 20, "seeds": 3},
    "default": lambda config: {},
    "paper": lambda config: (
        {"data.dim": 64} | ({"data.target_dim": 64, "seeds": 100} if config.figure == "kmeans" else {"seeds": 200})
    ),
}

CLUSTERS = {"smoke": (4, 8), "default": (8, 16, 32), "paper": (8, 16, 32, 64)}
RATIOS = {"smoke": (2, 4), "default": (1, 2, 4, 8), "paper": (1, 2, 4, 8)}
SEPARATIONS = {"smoke": (1.0, 4.0), "default": (1.0, 2.0, 4.0), "paper": (1.0, 2.0, 4.0)}


# Theorem 2


def size(clusters: int, ratio: int, dim: int) -> Point:
    """What goes with a number of clusters and of experts for each: n = d k ln k samples, and the rates."""
    return {
        "data.clusters": clusters, "data.test_samples": 20 * clusters,
        "data.samples": math.ceil(dim * clusters * math.log(clusters)), "experts.count": ratio * clusters,
        "experts.learning_rate": clusters / 8, "router.learning_rate": clusters / 80,
    }  # fmt: skip


def sweep_success(config: ConfigDict) -> tuple[Point, ...]:
    """Clusters times experts per cluster times separations."""
    sizes = tuple(size(k, ratio, config.data.dim) for k in CLUSTERS[config.scale] for ratio in RATIOS[config.scale])
    return cross(sizes, product(data__separation=SEPARATIONS[config.scale]))


def coupon_collector(draws: int, kinds: int) -> float:
    """Returns the probability that n uniform draws contain all k kinds: sum_j (-1)^j C(k, j) (1 - j / k)^n.

    The sum is over integers, since its terms are much larger than the sum.
    """
    ways = sum((-1) ** j * math.comb(kinds, j) * (kinds - j) ** draws for j in range(kinds + 1))
    return ways / kinds**draws


def prediction(at: Point) -> float:
    """The probability that rows from examples come from every cluster."""
    return coupon_collector(at["experts.count"], at["data.clusters"])


def claim_success(config: ConfigDict, at: Point) -> Iterator[Claim]:
    """Success against its prediction at a point."""
    clusters, experts, separation = at["data.clusters"], at["experts.count"], at["data.separation"]
    closest, *_, farthest = SEPARATIONS[config.scale]
    ratio, tag = experts // clusters, f"c{separation:g}.k{clusters}.e{experts}"
    rows, hit, predicted = {"arm": "frozen_data"}, {"metric": "router/init_clusters_covered"}, prediction(at)
    write = Writer(
        comparability(config), "router/all_clusters_with_specialists", at, "probability", "dikkala.theorem2."
    )
    if separation > closest:
        statement = "frozen rows cover every cluster when they come from every cluster"
        yield write.null(f"specialists.{tag}", f"{tag}: {statement}", "probability 1 - exp(-O(d))", rows, rows | hit)
    elif ratio >= 4:
        statement = "rows from every cluster are not enough"
        yield write.order(f"close.{tag}", f"{tag}: {statement}", "asks for separation", rows, rows | hit)
    if separation == farthest:
        statement = "frozen rows cover every cluster with the coupon collector's probability"
        yield write.null(
            f"success.{tag}", f"{tag}: {statement}", f"{predicted:.3g}", rows, {"value": predicted}, effect=0.1
        )
    if separation > closest and ratio == 2:
        statement = "a router that moves covers every cluster more often than its rows hit them"
        yield write.order(f"learning.{tag}", f"{tag}: {statement}", "not asked", LEARNED | hit, LEARNED)
    if separation == farthest and ratio == RATIOS[config.scale][-1]:
        yield write.order(
            f"homogeneity.{tag}", f"{tag}: homogeneity of experts is above .99", "routing is by cluster",
            {"value": 0.99}, LEARNED, metric="router/homogeneity", unit="difference",
        )  # fmt: skip


def draw_success(config: ConfigDict) -> tuple[dict, ...]:
    """Success against experts per cluster, with its prediction."""

    def predicted(clusters: int, experts: int) -> float:
        return prediction({"data.clusters": clusters, "experts.count": experts})

    success = {
        "kind": "success",
        "metric": "router/all_clusters_with_specialists",
        "x": "experts.count",
        "predicted": predicted,
    }
    return (success | {"name": "success", "arm": "learned"}, success | {"name": "success_frozen", "arm": "frozen_data"})


HEADLINE = Figure(
    "Theorem 2: how often every cluster gets a specialist, against the coupon collector's probability",
    sweep=sweep_success,
    claims=lambda config: tuple(claim for at in sweep_success(config) for claim in claim_success(config, at)),
    plots=draw_success,
)


# Lemma 1


def sweep_kmeans(config: ConfigDict) -> tuple[Point, ...]:
    """Clusters, with a centre for each, times separations."""
    sizes = tuple({"data.clusters": k, "experts.count": k} for k in CLUSTERS[config.scale])
    return cross(sizes, product(data__separation=SEPARATIONS[config.scale]))


def claim_kmeans(config: ConfigDict) -> tuple[Claim, ...]:
    """Steps of training against those of k-means, at the middle of the sweep."""
    sweep = sweep_kmeans(config)
    middle = sweep[len(sweep) // 2]
    write = Writer(comparability(config), at=middle, prefix="dikkala.lemma1.", over=tuple(middle))
    return tuple(
        write.order(name, f"a step is {step}, up to 1e-5", "identical steps",
                    LEARNED, {"value": 1e-5}, metric=f"theory/{name}_step")
        for name, step in (("gradient", "a descent step on the inertia"), ("lloyd", "an iteration of Lloyd's"))
    )  # fmt: skip


KMEANS = Figure(
    "Lemma 1: how far steps of gradient descent are from those of k-means",
    changes={
        "arms": ("learned",), "model": "kmeans", "router.init_from_data": False, "experts.learning_rate": 1.0,
        "data.target": "input", "data.target_dim": PROTOCOL["data.dim"], "data.samples": 2048,
        "steps": 400, "eval_every": 20, "seeds": 10,
    },
    sweep=sweep_kmeans,
    claims=claim_kmeans,
    plots=lambda config: (
        {"kind": "training", "name": "steps", "metrics": ("theory/gradient_step", "theory/lloyd_step", "train/loss")},
    ),
)  # fmt: skip


# Theorem 2, (ii) to (iv)

#: Dimensions at the fewest clusters, and clusters at 32 dimensions; rates of the router over those of experts.
SHAPES = {"smoke": ((4, 8),), "default": ((8, 16), (8, 32), (8, 64), (16, 32), (32, 32))}
SLOWER = (0.1, 0.01)


def shapes(config: ConfigDict) -> tuple[Point, ...]:
    """What goes with each number of clusters and dimensions."""
    return tuple(size(k, 8, dim) | {"data.dim": dim} for k, dim in SHAPES.get(config.scale, SHAPES["default"]))


def soon(shape: Point) -> Point:
    """About log many steps, in tens."""
    return {"steps": 10 * math.ceil(0.8 * math.log(shape["data.clusters"]))}


def sweep_proof(config: ConfigDict) -> tuple[Point, ...]:
    """Every shape after log many steps, and at the end with each rate of the router."""
    end = product(steps=(config.steps,))
    slower = lambda shape, share: {"router.learning_rate": share * shape["experts.learning_rate"]}  # noqa: E731
    return tuple(
        shape | when | slower(shape, share)
        for shape in shapes(config)
        for when in (soon(shape), *end)
        for share in SLOWER
        if when in end or share == SLOWER[0]
    )


def early(config: ConfigDict) -> dict[str, Point]:
    """Every shape after log many steps, by name."""
    points = (point for point in sweep_proof(config) if point["steps"] != config.steps)
    return {f"{point['data.clusters']} clusters, {point['data.dim']} dimensions": point for point in points}


def claim_proof(config: ConfigDict) -> Iterator[Claim]:
    """The statements at every shape."""
    rows, write = {"arm": "frozen_data"}, Writer(comparability(config), prefix="dikkala.theorem2.", unit="difference")
    least, *_, most = sorted(
        (point for point in sweep_proof(config) if point["data.clusters"] == CLUSTERS[config.scale][0]),
        key=lambda point: point["data.dim"],
    )
    if least["data.dim"] < most["data.dim"]:
        low, high = (rows | {"data.dim": point["data.dim"]} for point in (least, most))
        at = {key: least[key] for key in ("data.clusters", "router.learning_rate")} | soon(least)
        statement = f"the exponent does not fall from {least['data.dim']} to {most['data.dim']} dimensions"
        yield write.order("ii.growth", statement, "exp(-O(d))", low, high, metric="theory/exponent", at=at)
    for point in sweep_proof(config):
        dim, clusters, steps = point["data.dim"], point["data.clusters"], point["steps"]
        at = {key: point[key] for key in ("data.dim", "data.clusters", "steps", "router.learning_rate")}
        tag, share = f"k{clusters}.d{dim}", point["router.learning_rate"] / point["experts.learning_rate"]
        if steps != config.steps:
            label = f"{tag}, {steps} steps"
            for id, statement, paper, sides, metric in (
                ("ii", "weight on others' rows is below exp(-.1 d)", "exp(-O(d))", ({"value": 0.1}, rows), "exponent"),
                ("iii", "an expert is within .1 of every target", "o(1)", (rows, {"value": 0.1}), "expert_error"),
            ):
                yield write.order(
                    f"{id}.{tag}", f"{label}: {statement}", paper, *sides, metric=f"theory/{metric}", at=at
                )
            yield write.order(f"iii.loss.{tag}", f"{label}: the training loss is below .05", "near 0",
                              rows, {"value": 0.05}, metric="train/loss", at=at)  # fmt: skip
            continue
        label, tag = f"{tag}, {steps} steps, router's rate {share:g} of experts'", f"{tag}.{share:g}"
        yield write.order(f"iv.direction.{tag}", f"{label}: rows keep their direction (cosine > .99)", "little change",
                          {"value": 0.99}, LEARNED, metric="theory/row_cosine", at=at)  # fmt: skip
        yield write.order(f"iv.norm.{tag}", f"{label}: rows grow", "growth", {"value": 1.0}, LEARNED,
                          metric="theory/row_growth", at=at)  # fmt: skip


# Figure proof, of the theorem's further statements (metrics.specialists), on seeds from 300 on, 8 experts a cluster,
# separation 4; written before they ran:
# (ii): the softmax weight of a sample on rows from other clusters is at most exp(-O(d)): its exponent over d, of the
#     worst 1 % of the samples, is above .1 with frozen rows in 16, 32 and 64 dimensions, and does not fall from 16 to
#     64.
# (iii): o(1) after about log many steps: after 8 ln k steps (in tens) the expert nearest to a cluster's target is
#     within .1 of it, in the worst cluster, and the training loss is below .05, for k = 8, 16, 32 (frozen rows; every
#     step goes a quarter of the way).
# (iv): after 200 steps of a router that learns at a tenth of the experts' rate, or at a hundredth: the mean cosine of
#     rows and their examples is above .99, their mean norm above 1 of these.
PROOF = Figure(
    "Theorem 2, (ii) to (iv): weight on others' rows, error of experts, direction and norm of rows",
    {"seed": 300, "seeds": 20, "eval_every": 10, "shuffles": 0},
    sweep=sweep_proof,
    computed=("steps",),
    claims=lambda config: tuple(claim_proof(config)),
    plots=lambda config: (
        {"kind": "methods", "name": "proof", "methods": early(config),
         "metrics": ("theory/exponent", "theory/expert_error", "train/loss")},
        {"kind": "training", "name": "experts", "metrics": ("theory/expert_error", "train/loss"),
         "at": sweep_proof(config)[-1]},
    ),
)  # fmt: skip

FIGURES = {"": HEADLINE, "proof": PROOF, "kmeans": KMEANS}


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of FIGURE[,SCALE]."""
    return make_config("theory_specialists", arg, FIGURES, PROTOCOL, SCALES)
