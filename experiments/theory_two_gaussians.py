"""Two truncated Gaussians and two opposite experts: does the router find the direction between them? (Theorem 4)

Question. Dikkala et al. (2023, Section F) study gradient descent on the population loss, from initial weights that
tend to 0 and with experts that learn much faster than the router. They prove that it ends with the router w along +-z,
|w| growing without bound, and the experts at +-v. The proof goes through three claims and a lemma. Do they hold, and
does the end come at finite rates?

    routed run --config=theory_two_gaussians

From the paper: means +z and -z with |z| = 1, covariance sigma^2 I, truncated at a radius r < 1 around the mean;
targets +v and -v; f(x) = (2 p - 1) u with p = sigmoid(w^T x); squared loss; eta_u much larger than eta_w.

Rules where the paper is silent, set on seeds from 5000 on.
  sizes       dimensions 2, 8, 32 times sigma .1, .3, 1; r = .9 (at sigma 1 almost every sample of 32 dimensions lies
              near it).
  weights     w and u start with norm .01 in random directions; v ~ N(0, I / 10) in 10 dimensions.
  gradient    plain SGD on fresh batches of 64: rates are small enough that the path averages over many batches.
  rates       .5 for u, half of the rate at which its curvature (at most 2) makes it unstable; .1 for w.
  steps       16,000: until the slowest point (sigma .1, where |w| grows in proportion to sigma^2) has |u - v| < .1
              |v|.
  claims 1-3  by quadrature over the plane of z and w: Claims 1 and 2 at the run's own w and for |w| = .3, 1, 3, 10, 30
              times cos(w, z) = .01, .1, .5, .9, 1; Claim 3 at w = z times the same norms. Lemma 2 on 256 random
              distributions of 8 points, another set for each seed. The smallest margin of each, relative to a scale of
              its own (papers.dikkala2023.two_experts), is claimed to be above 0.

Differences from the theorem. At finite rates u does not stand at its optimum u*(w) while w is small: u*(w) grows as 1
/ |w|, and u is as small as w. Both leave 0 together, along the direction in which the loss falls fastest, which is w =
+-z already. |w| grows as the logarithm of time (the gradient falls as exp(-|w|)), so a run shows its growth, not its
end.

Found: direction (|cos| > .9999), growth, the claims and the lemma at every point; u is within .1 of v except at sigma
.1, where seeds with a small v are still on their way (mean .09).

Cost on 2 cores: 1 to 2 minutes.
"""

from __future__ import annotations

from ml_collections import ConfigDict

import routed.papers.dikkala2023  # noqa: F401 (parts of the paper)
from routed.analysis.claims import LEARNED, Claim, Writer, comparability
from routed.plan import Figure, Point, make_config, product

STATE = ("theory/cosine", "theory/norm", "theory/target_error")
#: Margin of the proof -> id and what it says.
MARGINS = {
    "theory/claim1": ("claim1", "E q > 0 for the Gaussian that w points to"),
    "theory/claim2": ("claim2", "E[q' q] E[q] < E[q^2] E[q']"),
    "theory/claim3": ("claim3", "E[x1 q' q] E[q] < E[q^2] E[x1 q'] for w = alpha z"),
    "theory/lemma2_parabola": ("lemma2.parabola", "E[y^2] E[f] > E[y] E[y f] for f = (1 - y^2) / 2"),
    "theory/lemma2_logarithm":
        ("lemma2.logarithm", "E[y^2] E[f] > E[y] E[y f] for f = ln((1 + y) / (1 - y)) (1 - y^2)"),
}  # fmt: skip

PROTOCOL = {
    "arms": ("learned",), "seeds": 10, "model": "two_experts",
    "data.name": "two_gaussians", "data.clusters": 2, "data.dim": 8, "data.noise": 0.3, "data.test_samples": 1024,
    "data.fresh": True, "data.samples": 1,  # every batch is fresh
    "router.learning_rate": 0.1, "experts.learning_rate": 0.5, "optimizer.momentum": 0.0,
    "batch_size": 64, "steps": 16000, "eval_every": 2000, "mesh.runs_per_batch": 64,
}  # fmt: skip

SCALES = {
    "smoke": lambda config: {"data.dim": 4, "steps": 400, "eval_every": 100, "seeds": 2},
    "default": lambda config: {},
    "paper": lambda config: {"steps": 160000, "eval_every": 10000, "seeds": 50},
}

DIMS = {"smoke": (2, 4), "default": (2, 8, 32), "paper": (2, 8, 32, 128)}
SIGMAS = {"smoke": (0.3,), "default": (0.1, 0.3, 1.0), "paper": (0.1, 0.3, 1.0, 3.0)}


def sweep_shapes(config: ConfigDict) -> tuple[Point, ...]:
    """Dimensions times sigmas."""
    return product(data__dim=DIMS[config.scale], data__noise=SIGMAS[config.scale])


def claim_theorem4(config: ConfigDict) -> tuple[Claim, ...]:
    """The theorem's end and the margins of its proof, at the middle of the sweep; all points test robustness."""
    sweep = sweep_shapes(config)
    middle = sweep[len(sweep) // 2]
    order = Writer(comparability(config), at=middle, prefix="dikkala.", over=tuple(middle)).order
    cosine, norm, error = STATE
    return (
        order("theorem4.direction", "|cos(w, z)| > .99", "w / |w| = +-z", {"value": 0.99}, LEARNED, metric=cosine),
        order("theorem4.growth", "|w| > 2, from .01", "grows without bound", {"value": 2.0}, LEARNED, metric=norm),
        order("theorem4.target", "|u -+ v| < .1 |v|", "u = +-v", LEARNED, {"value": 0.1}, metric=error),
        *(
            order(id, statement, "> 0", {"value": 0.0}, LEARNED, metric=metric, unit="difference")
            for metric, (id, statement) in MARGINS.items()
        ),
    )  # fmt: skip


HEADLINE = Figure(
    "Theorem 4: direction and norm of the router, what the experts hold, and the margins of the proof",
    sweep=sweep_shapes,
    claims=claim_theorem4,
    plots=lambda config: (
        {"kind": "training", "name": "training", "metrics": STATE},
        {"kind": "curves", "name": "end", "x": "data.noise", "metrics": STATE[1:]},
        {"kind": "curves", "name": "margins", "x": "data.noise", "metrics": tuple(MARGINS)},
    ),
)

FIGURES = {"": HEADLINE}


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of FIGURE[,SCALE]."""
    return make_config("theory_two_gaussians", arg, FIGURES, PROTOCOL, SCALES)
