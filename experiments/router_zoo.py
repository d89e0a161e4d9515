"""Which routers and selections learn a partition of Gaussian mixtures, and does learning help each of them?

Question. Papers compare routers at one learning rate, often their own. Here every router and selection of `routed` gets
the same mixture, the same constant experts, the same initial experts and the same tuning budget, learned and frozen.

    python -m routed.main --config=experiments/router_zoo.py
    python -m routed.main --config=experiments/router_zoo.py:smoke

Task: 64 clusters, 64 experts that are a learned vector each, 24 dimensions, separation 1, 16,384 training samples (Dikkala et
al. 2023, 3.1, Fig. 2a). Constant experts make the partition decide: an expert that serves two clusters must be wrong.

Rules fixed beforehand, none of which looks at learned against frozen.
  evaluation  every method as it is trained (rule and weights), without noise, so that none is punished for a change of rule;
              expert choice and Sinkhorn, which route a sample by its neighbours, as top-k with the same weights.
  tuning      3 multipliers of both rates for each method and arm, by final test loss on 2 seeds that are never evaluated.
  base rates  Adam, 3.2e-3 for routers and 3.2e-4 for experts (Fig. 2a), batch 64, 20,000 steps.
  noise       as published where it is: uniform on [0, 1] in the choice only (Chen et al. 2022), learned Gaussian (Shazeer et al.
              2017), jitter .01 (Fedus et al. 2022).
  order       methods are ranked by excess loss over the Bayes predictor.
  gate        as in gmm_router: training loss below .1, or moved by under 2 % in the last chunk.

Expected: methods whose weights sum to 1 do best, since one constant cannot be scaled to two targets; a selection that
trains few experts a token leaves more of them dead; balance helps where clusters are equally frequent, as here.

Found (BUILD_NOTES.md, section 4): learning helps every method that can learn, 1.4- to 12-fold; Sinkhorn and expert choice do best,
plain top-2 leaves a third of its experts dead. The first expectation was wrong: full-softmax weights beat renormalised ones.

Cost on 2 cores: about 15 minutes, 3 of them compiling.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from routed.claims import Claim
from routed.config import base, variant
from routed.points import Point

FIGURES = ("",)

_TOP2 = {"selection.name": "top_k", "selection.k": 2, "selection.renormalise": True}

#: What is compared: the settings that a method changes.
METHODS: dict[str, dict] = {
    "linear, soft": {"selection.name": "soft"},
    "linear, top-1 (Switch)": _TOP2 | {"selection.k": 1, "selection.renormalise": False},
    "linear, top-1, jitter": _TOP2
    | {"selection.k": 1, "selection.renormalise": False, "router.noise": "jitter", "router.noise_scale": 0.01},
    "linear, top-1, uniform noise": _TOP2
    | {"selection.k": 1, "selection.renormalise": False, "router.noise": "uniform"},
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
    "hash": _TOP2 | {"selection.k": 1, "router.name": "hash"},
    "random": _TOP2 | {"selection.k": 1, "router.name": "random"},
    "oracle": _TOP2 | {"selection.k": 1, "router.name": "oracle"},
}
#: Methods without anything to learn.
FIXED = ("hash", "random", "oracle")


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of FIGURE[,SCALE]."""
    figure, scale = variant(arg, FIGURES)
    c = base()
    with c.unlocked():
        c.name, c.figure, c.scale = "router_zoo", figure, scale
        c.arms, c.rates, c.tune.seeds = ("learned", "frozen"), "tuned", 2
        c.experts.name, c.optimizer.name = "constant", "adam"
        c.router.learning_rate, c.experts.learning_rate = 3.2e-3, 3.2e-4
        c.batch_size, c.steps, c.eval_every, c.seeds = 64, 20000, 4000, 10
        c.mesh.runs_per_batch = 64
        c.data.samples = 16384
        if scale == "paper":
            c.steps, c.eval_every, c.seeds = 200000, 20000, 32
        if scale == "smoke":
            c.data.clusters, c.data.dim, c.data.samples, c.data.test_samples, c.experts.count = 8, 8, 256, 1600, 8
            c.steps, c.eval_every, c.seeds, c.tune.seeds = 40, 20, 2, 1
    return c.lock()


def point(method: dict) -> Point:
    """The point of a method: what it changes, and an evaluation by the same rule."""
    name = method["selection.name"]
    evaluated = {
        "selection.eval.name": "top_k" if name in ("expert_choice", "sinkhorn") else name,
        "selection.eval.k": method.get("selection.k", 1),
        "selection.eval.renormalise": method.get("selection.renormalise", True),
    }
    return method | evaluated


def get_sweep(config: ConfigDict) -> tuple[Point, ...]:
    """A point a method; what cannot learn runs frozen only."""
    return tuple(point(method) | ({"arms": ("frozen",)} if name in FIXED else {}) for name, method in METHODS.items())


def get_claims(config: ConfigDict) -> tuple[Claim, ...]:
    """For each method that can learn: learning beats not learning."""
    comparability = "gaps_filled" if config.scale != "smoke" else "scaled"
    return tuple(
        Claim(
            "order",
            f"routed.zoo.{name.replace(',', '').replace(' ', '-').lower()}",
            f"{name}: learned beats frozen",
            "not asked",
            comparability,
            "test/loss",
            {"arm": "learned"},
            {"arm": "frozen"},
            _filled(point(method)),
        )
        for name, method in METHODS.items()
        if name not in FIXED
    )


def _filled(one: Point) -> Point:
    """The point with the base value of every key that another method changes."""
    flat = {key: value for method in METHODS.values() for key, value in point(method).items()}
    plain = get_config()
    return {key: one.get(key, _value(plain, key)) for key in flat}


def _value(config: ConfigDict, key: str):
    for part in key.split("."):
        config = config[part]
    return config


def get_plots(config: ConfigDict) -> tuple[dict, ...]:
    """One figure: every method, learned and frozen, on what a reader asks first."""
    return (
        {
            "kind": "methods",
            "name": "methods",
            "methods": {name: point(method) for name, method in METHODS.items()},
            "metrics": ("test/excess", "router/homogeneity", "router/dead", "router/churn", "train/experts"),
        },
    )
