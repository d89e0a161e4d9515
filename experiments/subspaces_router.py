"""Does learning to route help when clusters are subspaces, which no linear router can tell apart?

Question. Dikkala et al. (2023, 3.3 and Fig. 6) mix 64 random subspaces of rank 8 with a little noise, give each a
linear function, and train 64 depth-3 experts behind a depth-3 router: learned routing beats the frozen router over a
large range of sample sizes. The paper prints the label as w^T eps, a function of the noise; it must mean w^T x with x
the sample within the subspace. Both are options here (data.target = signal, noise), and both are shown.

    routed run --config=subspaces_router        # Fig. 6, the likely label
    routed run --config=subspaces_router:label  # the printed label beside it

From the paper: k = 64, t = 8, MLP router of 3 layers, 64 MLP experts of 3 layers, width 96, Adam with 1e-3 (experts)
and 3.2e-3 (router), soft in training, top-1 with weight 1 at evaluation.

Rules where the paper is silent, fixed on seeds from 5000 on; none compares learned with frozen.
  dimensions  24: the paper writes the width as 4 x 24.
  noise       the largest standard deviation of .05, .1, .2, .3 at which the Bayes predictor's loss is below 1 %
              (.0025, .0098, .040, .12): .1, so the noise has .17 of the norm of the signal. For the printed label the
              Bayes loss is .33 at any noise: the third of the label that lies within the subspace cannot be seen.
  weights     N(0, I), scaled to a label variance of 1.
  batch       32, as for the depth-3 experts of experiments/gmm_router.py.
  samples     8, 32 and 128 per subspace, as there.
  steps       5,000, label 8,000: the first thousand after which learned and frozen both have a training loss below .1
              at the largest size (seeds 5000, 5001: .10 and .10 after 4,000, .07 and .06 after 5,000; printed label
              .10 and .17 after 6,000, .07 and .08 after 8,000).
  seeds       100 to 109.

Smoke (half a minute) has 8 subspaces of rank 3 in 8 dimensions, and no oracle.

Cost on 2 cores: about 12 minutes, label 8.

Found (docs/results/dikkala2023.md; label: docs/results/without_page.md): the paper's order at every size, and yet the
learned router finds no subspace. At top-1 it is worse than predicting the mean and than a frozen router that was
trained top-1, and worse than frozen when both are evaluated as they were trained. With the printed label the order is
the same and nothing is learned: no arm beats the mean, soft or top-1.
"""

from __future__ import annotations

from ml_collections import ConfigDict

import routed.papers.dikkala2023  # noqa: F401 (parts of the paper)
from routed.analysis.claims import FAIREST, FROZEN, LEARNED, Claim, Writer, comparability
from routed.plan import Figure, Point, chain, make_config, product

PAIR = ("learned", "frozen")
CONTROLS = (*PAIR, "frozen_sharp", "frozen_top1", "frozen_data", "frozen_kmeans")
#: No claim needs the oracle, or k-means beside the other controls, a program each: smoke is mostly compiling.
ALL = {"smoke": CONTROLS[:-1], "default": (*CONTROLS, "oracle"), "paper": (*CONTROLS, "oracle")}
SAMPLES = {"smoke": (64, 256), "default": (512, 2048, 8192), "paper": (512, 2048, 8192, 32768, 131072)}

PROTOCOL = {
    "arms": PAIR,
    "data.name": "subspaces", "data.samples": SAMPLES["default"][-1], "data.target": "signal", "data.target_dim": 1,
    "router.name": "mlp", "router.depth": 3, "router.width": 96,
    "optimizer.name": "adam", "router.learning_rate": 3.2e-3, "experts.learning_rate": 1e-3,
    "steps": 5000, "eval_every": 1000, "seed": 100, "seeds": 10,
}  # fmt: skip

SCALES = {
    "smoke": lambda config: {
        "data.clusters": 8, "data.dim": 8, "data.rank": 3,
        "data.samples": SAMPLES["smoke"][-1], "data.test_samples": 1600,
        "router.width": 16, "experts.count": 8, "experts.width": 16,
        "steps": 40, "eval_every": 20, "seeds": 2, "shuffles": 4,
    },
    "default": lambda config: {},
    "paper": lambda config: {"data.samples": SAMPLES["paper"][-1], "steps": 40000, "eval_every": 5000},
}  # fmt: skip

LOSSES = ("test/loss", "test/loss_soft")
TRAINING = {"kind": "training", "name": "training", "metrics": ("train/loss", *LOSSES)}

# Fig. 6.


def fig6_sweep(config: ConfigDict) -> tuple[Point, ...]:
    """Loss against samples; controls run at the largest size only."""
    *smaller, largest = SAMPLES[config.scale]
    return chain(product(data__samples=smaller), product(data__samples=(largest,), arms=(ALL[config.scale],)))


def fig6_claims(config: ConfigDict) -> tuple[Claim, ...]:
    """The paper's order at every size, soft and top-1; the fairest control; does the router find the subspaces?"""
    write = Writer(comparability(config), prefix="dikkala.fig6.")
    most = {"data.samples": config.data.samples}
    ours = write._replace(at=most, prefix="routed.subspaces.", over=("data.samples",))
    sparsity, shuffled = (LEARNED | {"metric": f"router/{name}"} for name in ("sparsity", "sparsity_shuffled"))
    return (
        *(
            write.order(f"n{n}", f"{n} samples: learned beats frozen, top-1", "better over a large range",
                        LEARNED, FROZEN, at={"data.samples": n})
            for n in SAMPLES[config.scale]
        ),
        ours.order("soft", "learned beats frozen when both are evaluated as trained", "not asked",
                   LEARNED, FROZEN, metric="test/loss_soft"),
        ours.order("fair", "learned beats the fairest frozen control, top-1", "not asked", LEARNED, FAIREST),
        ours.order("sparse", "subspaces go to fewer experts than with a shuffled router", "not asked",
                   sparsity, shuffled),
        ours.order("one-expert", "a subspace uses fewer than 1.5 experts", "not asked",
                   LEARNED, {"value": 1.5}, metric="router/sparsity"),
    )  # fmt: skip


def fig6_plots(config: ConfigDict) -> tuple[dict, ...]:
    """Losses, the gap, sparsity, training."""
    x, sparsities = "data.samples", ("router/sparsity", "router/sparsity_shuffled")
    return (
        {"kind": "curves", "name": "loss", "x": x, "metrics": LOSSES},
        {"kind": "gap", "name": "gap", "x": x},
        {"kind": "curves", "name": "sparsity", "x": x, "metrics": sparsities, "arms": PAIR},
        {"kind": "routing", "name": "routing", "arms": PAIR},
        TRAINING,
    )


FIG6 = Figure(
    "Fig. 6: loss and sparsity against samples, with the likely label w^T x",
    sweep=fig6_sweep,
    claims=fig6_claims,
    plots=fig6_plots,
)

# The printed label beside the likely one.


def label_sweep(config: ConfigDict) -> tuple[Point, ...]:
    """Both labels at the largest size."""
    return product(data__target=("signal", "noise"), data__samples=SAMPLES[config.scale][-1:])


def label_claims(config: ConfigDict) -> tuple[Claim, ...]:
    """The paper's order for either label, and whether anything is learned."""
    claims: list[Claim] = []
    for target, label in (("signal", "label w^T s"), ("noise", "label w^T eps, as printed")):
        at = {"data.target": target, "data.samples": config.data.samples}
        write = Writer(comparability(config), at=at, prefix="dikkala.fig6.")
        trivial = f"{label}: learned beats the constant predictor"
        claims += [
            write.order(target, f"{label}: learned beats frozen, top-1", "better", LEARNED, FROZEN),
            write.order(f"{target}.trivial", trivial, "implied", LEARNED, {"value": 1.0}),
        ]
    return tuple(claims)


def label_plots(config: ConfigDict) -> tuple[dict, ...]:
    """Both labels side by side."""
    methods = dict(zip(("w^T s", "w^T eps (printed)"), label_sweep(config), strict=True))
    return ({"kind": "methods", "name": "label", "methods": methods, "metrics": LOSSES}, TRAINING)


LABEL = Figure(
    "the label as printed, w^T eps, beside the likely one",
    {"steps": 8000},
    sweep=label_sweep,
    claims=label_claims,
    plots=label_plots,
)

FIGURES = {"": FIG6, "label": LABEL}


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of FIGURE[,SCALE]."""
    return make_config("subspaces_router", arg, FIGURES, PROTOCOL, SCALES)
