"""Are experts under competition estimated at the rate n^(-1/2)? (Theorems 4.1 and 4.2 of Pham et al. 2024)

Question. Pham et al. (2024) study k* Gaussian experts weighed by softmax(TopK(|g(x)|, K)). They prove that the maximum
likelihood estimate with as many experts approaches the truth by O(sqrt(log n / n)) in mean Hellinger distance h
(Theorem 4.1), that E h >= c D(G, G*) for the Voronoi loss D of any G (Theorem 4.2), and so that weights and variances
have that rate too. Does the computed maximum show this rate? The paper says that a softmax gate with weights of its
own is slower in general: does it differ where both have as many experts as the truth?

    routed run --config=competition_theory

From the paper: eq. 6, f a Gaussian with *variance* v, scalar g, bounded X, D over the K worst Voronoi cells
(routed.papers.pham2024.gated).

Rules where the paper is silent, set on seeds from 9000 on.
  truth       k* = 3 experts g = a x + b, X uniform on [-1, 1]: a, b = (2, 1), (-1, 1.5), (1.5, -.5), variances .2, .1,
              .3. Each g is 0 at one point only, and its derivatives x and 1 are independent, as required. The softmax
              gate scores 1.5 x + .5, -1.5 x + .5 and 0; its D has the gate's weights too, minus their means.
  chosen      K = 3: all experts, weighed by the softmax of their norms. There the likelihood is smooth and gradients
              find its maximum. With K = 2 (all three pairs are chosen somewhere) it jumps wherever a sample changes
              its experts, by more than estimates may differ. So for K = 2 the end of the gradients is shown, which
              solves an unbiased equation but is not the estimate of the theorem, and no claim `pham.*` uses it
              (docs/decisions/pham2024.md).
  data        n = 100, 400, 1,600, 6,400 samples; replicates are seeds, 4100 on; a seed's 100 samples are the first of
              its 400.
  maximum     full-batch Adam on the mean log likelihood, 1,000 steps from .03 linearly to 0; two starts, the truth
              plus N(0, .1^2) and a random start; the likelier end is the estimate. Variances stay in [.02, 5] (the
              theorem asks for a compact set).
  converged   root n times the gradient's norm is below .1 and, with K = 3, the estimate is at least as likely as the
              truth. Other replicates are left out of h and D, and counted (theory/converged).
  distance    h by quadrature over y (121 points within +-8) at 384 midpoints of x.
  verdict     a power is supported where the 95 % interval of the slope lies within .1 of -1/2 (sqrt(log n / n) itself
              has slope -.42 here); a steeper slope would contradict no bound. The ratio: above .02 everywhere, and at
              .01 at least half of its value at .3.

Expected: -1/2 for both gates and both distances. Slower rates of softmax gates are proved for more experts than the
truth has, which is not tested here.

Found (docs/results/pham2024.md, ours.md; seeds 4100 to 4115): slopes of h are -.55 [-.61, -.49] under competition and
-.53 [-.57, -.48] with a softmax gate. h / D does not fall towards the truth. Cost on 2 cores: 8 minutes.
"""

from __future__ import annotations

from collections.abc import Iterator

from ml_collections import ConfigDict

import routed.papers.pham2024  # noqa: F401 (parts of the paper)
from routed.analysis.claims import LEARNED, Claim, Writer, comparability
from routed.papers.pham2024.gated import NORMS, SOFTMAX
from routed.papers.pham2024.gated_experts import RADII, ratio_name
from routed.plan import Figure, Point, make_config

# Rule of the ratio, set on seeds from 9000 on.
# ratio: smallest E h / D over 12 random directions at distance .01 to 1 from G*, and over 12 random G, for each seed.
PROTOCOL = {
    "arms": ("learned",), "seed": 4100, "seeds": 16, "model": "gated_experts", "gate.horizon": 1.0, "starts": 2,
    "data.name": "gated_gaussians", "data.full_batch": True, "data.samples": 100, "data.test_samples": 300,
    "data.target_dim": 1, "batch_size": 100, "loss": "likelihood", "optimizer.name": "adam",
    "optimizer.schedule": "linear", "router.learning_rate": 0.03, "experts.learning_rate": 0.03,
    "steps": 1000, "eval_every": 1000, "mesh.runs_per_batch": 16,
}  # fmt: skip

SCALES = {
    "smoke": lambda config: {"steps": 300, "eval_every": 300, "seeds": 3},
    "default": lambda config: {},
    "paper": lambda config: {"steps": 6000, "eval_every": 6000, "seeds": 100, "starts": 10},
}

SAMPLES = {"smoke": (50, 200), "default": (100, 400, 1600, 6400), "paper": (100, 400, 1600, 6400, 25600, 102400)}

#: Metric -> id, what it is.
RATES = {
    "theory/hellinger": ("theorem4.1", "mean Hellinger distance"),
    "theory/voronoi": ("theorem4.2.rate", "Voronoi loss of the parameters"),
}
#: Prefix of ids -> what is estimated, in words, and its point. The paper's is the first.
GATED: dict[str, tuple[str, Point]] = {
    "pham.": ("competition, all chosen", {"data.gate": NORMS, "data.chosen": 3}),
    "routed.competition.softmax.": ("softmax gate, all chosen", {"data.gate": SOFTMAX, "data.chosen": 3}),
    "routed.competition.top2.": ("competition, 2 of 3 (not the maximum)", {"data.gate": NORMS, "data.chosen": 2}),
}


def gated(config: ConfigDict) -> dict[str, tuple[str, Point]]:
    """What a scale estimates: smoke the paper's gate alone."""
    return GATED if config.scale != "smoke" else dict(list(GATED.items())[:1])


def size(n: int) -> Point:
    """All n samples in each step."""
    return {"data.samples": n, "batch_size": n}


def sweep_sizes(config: ConfigDict) -> tuple[Point, ...]:
    """Gates times the numbers of samples."""
    return tuple(at | size(n) for _, at in gated(config).values() for n in SAMPLES[config.scale])


def claim_rates(config: ConfigDict) -> Iterator[Claim]:
    """The powers of n, the ratio of both distances, and that fits converged."""
    sizes = SAMPLES[config.scale]
    slope: tuple[tuple[float, Point, Point], ...] = tuple((float(n), size(n), {}) for n in sizes)
    for prefix, (label, at) in gated(config).items():
        write = Writer(comparability(config), at=at, prefix=prefix)
        for metric, (id, name) in RATES.items():
            yield write.power(id, f"{label}: the {name} falls as n^(-1/2)", -0.5, LEARNED, slope, metric=metric)
        least = write._replace(at=at | size(sizes[-1]))
        for column in (*map(ratio_name, RADII), "theory/ratio_far"):
            where = column.removeprefix("theory/ratio_")
            statement = f"{label}: h / D is above .02 ({where if where == 'far' else f'at {where}'})"
            yield least.order(
                f"theorem4.2.{where}", statement, "bounded away from 0", {"value": 0.02}, LEARNED, metric=column
            )
        statement = f"{label}: h / D does not fall towards G*: at .01 it is above half of that at .3"
        yield least.order(
            "theorem4.2.near",
            statement,
            "bounded away from 0",
            {"value": -0.69},
            LEARNED,
            metric="theory/ratio_fall",
            unit="difference",
        )
        statement = f"{label}: more than .9 of the fits converge"
        ours = least._replace(prefix=prefix.replace("pham.", "routed.competition."))
        yield ours.order(
            "theory.converged",
            statement,
            "not asked",
            {"value": 0.9},
            LEARNED,
            metric="theory/converged",
            unit="probability",
        )


def draw_rates(config: ConfigDict) -> tuple[dict, ...]:
    """Both distances against n beside -1/2, the ratio against the distance from the truth, and what converged."""
    sizes = SAMPLES[config.scale]

    def lines(numbers: dict[float, tuple[int, str]]) -> dict:
        return {
            label: {x: LEARNED | at | {"data.samples": n, "metric": metric} for x, (n, metric) in numbers.items()}
            for label, at in gated(config).values()
        }

    rates = {name: lines({float(n): (n, metric) for n in sizes}) for metric, (_, name) in RATES.items()}
    ratio = {"smallest h / D over random G": lines({r: (sizes[-1], ratio_name(r)) for r in RADII})}
    fits = {"kind": "curves", "x": "data.samples", "metrics": ("theory/converged", "theory/residual", "theory/gain")}
    return (
        {"kind": "powers", "name": "rates", "words": "data.samples", "bound": -0.5, "panels": rates},
        {"kind": "powers", "name": "ratio", "words": "distance from the truth", "panels": ratio},
        *(
            fits | {"name": f"fits{i}", "title": label, "at": at}
            for i, (label, at) in enumerate(gated(config).values())
        ),
    )


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
