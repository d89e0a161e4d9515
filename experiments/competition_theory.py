"""Are experts under competition estimated at the rate n^(-1/2)? (Theorems 4.1 and 4.2 of Pham et al. 2024)

Question. Pham et al. (2024) prove of k* Gaussian experts weighed by softmax(TopK(|g(x)|, K)) that the maximum likelihood estimate with as many
experts approaches the truth by O(sqrt(log n / n)) in mean Hellinger distance h (Theorem 4.1), that E h >= c D(G, G*) for the Voronoi loss D of any G
(Theorem 4.2), and so that weights and variances have that rate too. Does the maximum, where it is computed, show it? Does a softmax gate of its
own weights, which the paper says is slower in general, differ where both have as many experts as the truth?

    python -m routed.main --config=experiments/competition_theory.py

From the paper: eq. 6, f a Gaussian with *variance* v, scalar g, bounded X, D over the K worst Voronoi cells (metrics.gated).

Rules where the paper is silent, set on seeds from 9000 on.
  truth       k* = 3 experts g = a x + b, K = 2, X uniform on [-1, 1]: a, b = (2, 1), (-1, 1.5), (1.5, -.5), variances .2, .1, .3; all three pairs of
              experts are chosen somewhere. Each g is 0 at one point only, and its derivatives x and 1 are independent, as asked. The softmax gate
              scores 1.5 x + .5, -1.5 x + .5 and 0; its D has the gate's weights too, minus their means.
  data        n = 200, 800, 3,200, 12,800 samples; replicates are seeds, 4100 on; a seed's 200 samples are the first of its 800.
  maximum     full-batch Adam on the mean log likelihood, 1,500 steps from .03 linearly to 0, which stop it; three starts at once, the truth plus
              N(0, .1^2) and two at random, of which the likeliest end is the estimate. Variances stay in [.02, 5] (a compact set is asked).
              Who is chosen has no gradient, so no step sees that the likelihood jumps where a sample changes its experts.
  converged   the estimate is at least as likely as the truth, and root n times the gradient's norm is below .1. Other replicates are left out of h
              and D, and counted (theory/settled).
  distance    h by quadrature over y (121 points within +-8) at 384 midpoints of x.
  ratio       smallest E h / D over 12 random directions at distance .01 to 1 from G*, and over 12 random G, for each seed.
  verdict     a power is supported where the 95 % interval of the slope lies within .1 of -1/2 (sqrt(log n / n) itself has slope -.43 here);
              a steeper one would contradict no bound. The ratio: above .02 everywhere, and not less at .01 than half of what it is at .3.

Expected: -1/2 for both gates and both distances. Slower rates of softmax gates are proved for more experts than the truth has, which is not asked
here.
"""

from __future__ import annotations

from collections.abc import Iterator

from ml_collections import ConfigDict

from routed.analysis.claims import LEARNED, Claim, Writer, comparability
from routed.metrics.gated import GATES, NORMS, SOFTMAX
from routed.models.gated_experts import RADII, ratio_name
from routed.plan import Figure, Point, cross, make_config, product

PROTOCOL = {
    "arms": ("learned",), "seed": 4100, "seeds": 20, "model": "gated_experts", "gate.horizon": 1.0,
    "data.name": "gated_gaussians", "data.whole": True, "data.samples": 200, "data.test_samples": 300, "data.target_dim": 1, "loss": "likelihood", "batch_size": 200,
    "optimizer.name": "adam", "optimizer.schedule": "linear", "router.learning_rate": 0.03, "experts.learning_rate": 0.03,
    "steps": 1500, "eval_every": 1500, "mesh.runs_per_batch": 10,
}  # fmt: skip

SCALES = {
    "smoke": lambda config: {"steps": 40, "eval_every": 40, "seeds": 2},
    "default": lambda config: {},
    "paper": lambda config: {"steps": 6000, "eval_every": 6000, "seeds": 100, "starts": 10},
}

SAMPLES = {"smoke": (50, 100), "default": (200, 800, 3200, 12800), "paper": (200, 800, 3200, 12800, 51200)}

#: Metric -> id, what it is, and words of an axis.
RATES = {
    "theory/hellinger": ("theorem4.1", "mean Hellinger distance"),
    "theory/voronoi": ("theorem4.1.parameters", "Voronoi loss of the parameters"),
}
WORDS = {NORMS: "competition", SOFTMAX: "softmax gate"}


def size(n: int) -> Point:
    """All n samples in each step."""
    return {"data.samples": n, "batch_size": n}


def sweep_sizes(config: ConfigDict) -> tuple[Point, ...]:
    """Both gates times the numbers of samples."""
    return cross(product(data__gate=GATES), tuple(size(n) for n in SAMPLES[config.scale]))


def claim_rates(config: ConfigDict) -> Iterator[Claim]:
    """The powers of n, the ratio of both distances, and that fits converged."""
    sizes = SAMPLES[config.scale]
    slope = tuple((float(n), size(n), {}) for n in sizes)
    for gate in GATES:
        prefix = "pham." if gate == NORMS else "routed.competition.theory.softmax."
        write = Writer(comparability(config), at={"data.gate": gate}, prefix=prefix)
        paper = "n^(-1/2) up to logarithms" if gate == NORMS else "not asked"
        for metric, (id, words) in RATES.items():
            yield write.power(id, f"{WORDS[gate]}: the {words} falls as n^(-1/2)", -0.5, LEARNED, slope, metric=metric)
        least = write._replace(at={"data.gate": gate, **size(sizes[-1])})
        for name in (*map(ratio_name, RADII), "theory/ratio_far"):
            words = f"{WORDS[gate]}: h / D is above .02 ({name.removeprefix('theory/ratio_')})"
            yield least.order(
                f"theorem4.2.{name.removeprefix('theory/ratio_')}",
                words,
                "bounded away from 0",
                {"value": 0.02},
                LEARNED,
                metric=name,
            )
        yield least.order(
            "theorem4.2.near", f"{WORDS[gate]}: h / D does not fall towards G*: at .01 it is above half of that at .3", paper,
            {"value": -0.69}, LEARNED, metric="theory/ratio_fall", unit="difference",
        )  # fmt: skip
        yield least.order("converged", f"{WORDS[gate]}: more than .9 of the fits converge", "not asked", {"value": 0.9}, LEARNED,
                          metric="theory/settled", unit="probability")  # fmt: skip


def draw_rates(config: ConfigDict) -> tuple[dict, ...]:
    """Both distances against n beside -1/2, and the ratio against the distance from the truth."""
    sizes = SAMPLES[config.scale]

    def against_n(metric: str) -> dict:
        return {
            words: {float(n): LEARNED | {"data.gate": gate, "data.samples": n, "metric": metric} for n in sizes}
            for gate, words in WORDS.items()
        }

    ratio = {
        words: {r: LEARNED | {"data.gate": gate, "data.samples": sizes[-1], "metric": ratio_name(r)} for r in RADII}
        for gate, words in WORDS.items()
    }
    rates = {words: against_n(metric) for metric, (_, words) in RATES.items()}
    return (
        {"kind": "powers", "name": "rates", "x": "data.samples", "bound": -0.5, "panels": rates},
        {"kind": "powers", "name": "ratio", "x": "distance from the truth", "panels": {"smallest h / D over random G": ratio}},
        {"kind": "curves", "name": "fits", "x": "data.samples", "at": {"data.gate": NORMS}, "metrics": ("theory/settled", "theory/residual")},
    )  # fmt: skip


HEADLINE = Figure(
    "Theorems 4.1 and 4.2: distances from the truth against the number of samples, and their ratio",
    sweep=sweep_sizes,
    claims=lambda config: tuple(claim_rates(config)),
    plots=draw_rates,
)

FIGURES = {"": HEADLINE}


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of FIGURE[,SCALE]."""
    return make_config("competition_theory", arg, FIGURES, PROTOCOL, SCALES)
