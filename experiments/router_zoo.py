"""Which routers and selections learn a partition of Gaussian mixtures, and does learning help each of them?

Question. Papers compare routers at one learning rate, often their own, and learned routers with frozen routers that
are worse in more than learning. Here every router and selection of `routed` gets the same mixture, the same constant
experts, the same initial experts and the same tuning budget, learned, frozen and with the fair frozen controls.

    routed run --config=router_zoo
    routed run --config=router_zoo:smoke  # five methods of different families

Task: 64 clusters, 64 experts that are a learned vector each, 24 dimensions, separation 1, 16,384 training samples
(Dikkala et al. 2023, 3.1, Fig. 2a). Constant experts make the partition decide: an expert that serves two clusters
must be wrong.

Rules fixed beforehand, none of which looks at learned against frozen.
  evaluation  every method as it is trained (rule and weights), without noise, so that none is punished for a change of
              rule; expert choice and Sinkhorn, which route a sample by its neighbours, as top-k with the same weights.
  tuning      7 multipliers of both rates, .1 to 100, for each method and arm, by final test loss on 2 seeds that are
              never evaluated. No conclusion about a side that lost with a rate at the edge of the grid. Seeds 500 to
              509.
  controls    the fair controls for which a method has what they need: as sharp as learned, rows from examples; and
              k-means and nearest examples, trained and evaluated top-1 whatever the method: of the inputs, but of
              fresh features for MLP and convolution; the sigmoid's bias goes on moving. frozen_top1 is no control:
              every method is evaluated as it trains already.
  base rates  Adam, 3.2e-3 for routers and 3.2e-4 for experts (Fig. 2a), batch 64, 20,000 steps.
  noise       as published where it is: uniform on [0, 1] in the choice only (Chen et al. 2022), learned Gaussian
              (Shazeer et al. 2017), jitter .01 (Fedus et al. 2022).
  order       methods are ranked by excess loss over the Bayes predictor.
  gate        a verdict stands if it also holds for the curves extrapolated to 4 times the steps.

Expected: methods whose weights sum to 1 do best, since one constant cannot be scaled to two targets; a selection that
trains few experts a token leaves more of them dead; balance helps where clusters are equally frequent, as here.

Found (docs/results/ours.md). Every method that can learn beats itself frozen at initialisation, 1.4- to 16-fold. None
that scores by products beats k-means of the inputs (.058): eight have three to five times the loss of k-means, expert
choice (.055) and Sinkhorn (.065) are not told from it. Plain top-2 leaves a third of its experts dead. The first
expectation was wrong: full-softmax weights (.18) beat renormalised weights (.24). One arm of 85, the sharpened MLP,
chose the grid's edge.

Cost on 2 cores: about 40 minutes.
"""

from __future__ import annotations

from ml_collections import ConfigDict

import routed.papers.ours  # noqa: F401 (parts of our questions)
from routed.analysis.claims import FAIREST, FROZEN, LEARNED, Claim, Writer, comparability
from routed.plan import Figure, Point, make_config, value_of
from routed.plan.experiment import Scales

_TOP2 = {"selection.name": "top_k", "selection.k": 2, "selection.renormalise": True}
_TOP1 = _TOP2 | {"selection.k": 1}
_SWITCH = _TOP1 | {"selection.renormalise": False}

#: What is compared: the settings that a method changes.
METHODS: dict[str, Point] = {
    "linear, soft": {"selection.name": "soft"},
    "linear, top-1 (Switch)": _SWITCH,
    "linear, top-1, jitter": _SWITCH | {"router.noise": "jitter", "router.noise_scale": 0.01},
    "linear, top-1, uniform noise": _SWITCH | {"router.noise": "uniform"},
    "linear, top-2": _TOP2,
    "linear, top-2, full softmax": _TOP2 | {"selection.renormalise": False},
    "linear, noisy top-2": _TOP2 | {"router.noise": "learned", "router.noise_in_weights": True},
    "linear, top-2, balance loss": _TOP2 | {"losses.balance": 0.01},
    "linear, sigmoid top-2, bias": _TOP2 | {"selection.name": "sigmoid", "selection.balance_rate": 1e-3},
    "linear, Sinkhorn top-2": _TOP2 | {"selection.name": "sinkhorn"},
    "linear, expert choice": _TOP2 | {"selection.name": "expert_choice", "selection.renormalise": False},
    "MLP, top-2": _TOP2 | {"router.name": "mlp"},
    "convolution, top-2": _TOP2 | {"router.name": "conv", "router.window": 8},
    "cosine, top-2": _TOP2 | {"router.name": "cosine"},
    "hash": _TOP1 | {"router.name": "hash"},
    "random": _TOP1 | {"router.name": "random"},
    "oracle": _TOP1 | {"router.name": "oracle"},
}
#: Those of a smoke run, which spends three seconds of compiling on each.
FEW = ("linear, soft", "linear, noisy top-2", "linear, expert choice", "cosine, top-2", "hash")
#: Methods without anything to learn.
FIXED = ("hash", "random", "oracle")

#: Learned, frozen, and the controls of gmm_router that have a meaning for any selection.
ARMS = ("learned", "frozen", "frozen_sharp", "frozen_data", "frozen_kmeans", "frozen_nearest")

PROTOCOL = {
    "arms": ARMS, "rates": "tuned", "tune.seeds": 2, "tune.multipliers": (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0),
    "data.samples": 16384, "experts.name": "constant", "optimizer.name": "adam",
    "experts.learning_rate": 3.2e-4, "router.learning_rate": 3.2e-3,
    "batch_size": 64, "steps": 20000, "eval_every": 4000, "seed": 500, "seeds": 10, "mesh.runs_per_batch": 64,
}  # fmt: skip

SCALES: Scales = {
    "smoke": lambda config: {
        "data.clusters": 8, "data.dim": 8, "data.samples": 256, "data.test_samples": 1600, "experts.count": 8,
        "steps": 40, "eval_every": 20, "seeds": 2, "tune.seeds": 1, "tune.multipliers": (0.3, 1.0, 3.0),
        "arms": ARMS[:-2],
    },
    "default": lambda config: {},
    "paper": lambda config: {"steps": 200000, "eval_every": 20000, "seeds": 32},
}  # fmt: skip


def point(method: Point) -> Point:
    """The point of a method: what it changes, and an evaluation by the same rule."""
    name = method["selection.name"]
    return method | {
        "selection.eval.name": "top_k" if name in ("expert_choice", "sinkhorn") else name,
        "selection.eval.k": method.get("selection.k", 1),
        "selection.eval.renormalise": method.get("selection.renormalise", True),
    }


def points(config: ConfigDict) -> dict[str, Point]:
    """The points of a scale's methods, by name."""
    names = FEW if config.scale == "smoke" else METHODS
    return {name: point(METHODS[name]) for name in names}


def sweep(config: ConfigDict) -> tuple[Point, ...]:
    """A point a method; what cannot learn runs frozen only."""
    return tuple(point | ({"arms": ("frozen",)} if name in FIXED else {}) for name, point in points(config).items())


def claims(config: ConfigDict) -> tuple[Claim, ...]:
    """For each method that can learn: learning beats not learning, and the fairest control."""
    write = Writer(comparability(config), prefix="routed.zoo.")
    # A claim's point also names what other methods change, so that it is this method's alone.
    plain = {key: value_of(config, key) for point in points(config).values() for key in point}
    learning = {name: point for name, point in points(config).items() if name not in FIXED}
    ids = {name: name.replace(",", "").replace(" ", "-").lower() for name in learning}
    return (
        *(
            write.order(ids[name], f"{name}: learned beats frozen", "not asked", LEARNED, FROZEN, at=plain | point)
            for name, point in learning.items()
        ),
        *(
            write.order(f"{ids[name]}.fair", f"{name}: learned beats the fairest frozen control", "not asked", LEARNED,
                        FAIREST,
                        at=plain | point)
            for name, point in learning.items()
        ),
    )  # fmt: skip


#: What a reader asks first.
METRICS = ("test/excess", "router/homogeneity", "router/dead", "router/churn", "train/experts_per_token")

FIGURES = {
    "": Figure(
        "every router and selection, learned, frozen and fairly controlled, at tuned rates",
        sweep=sweep,
        claims=claims,
        plots=lambda config: ({"kind": "methods", "name": "methods", "methods": points(config), "metrics": METRICS},),
    )
}


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of FIGURE[,SCALE]."""
    return make_config("router_zoo", arg, FIGURES, PROTOCOL, SCALES)
