"""Does a regularised router forget directions that carry no information? (Theorem 1)

Question. Dikkala et al. (2023, 4.1 and Section D) study any f(x) = g_U(W x + b), trained on the population loss with
an L2 penalty on W and U. They prove that at a minimum every row of W lies in the subspace that the target depends on;
the rest of x must be Gaussian and independent. They report that training alone raises the share of the router's
squared norm in that subspace from .1 to .84, and weight decay to .9. The theorem says 1. Is it 1, for which penalty,
and for which architectures?

    routed run --config=theory_spurious

Sizes: 8 clusters that differ in 8 dimensions, at separation 2, and 24 dimensions more (an untrained share of .25); 16
experts, of width 16 where they are networks. `paper` scale: 64 clusters, 24 and 216 dimensions, 64 experts.

Rules where the paper is silent, set on seeds from 5000 on.
  data        every batch is fresh, so the loss is the population's; targets are constant per cluster.
  penalty     decoupled decay of SGD with momentum .9: p -= rate (m + decay p), where m settles at gradient / (1 - .9).
              So a point stands still where gradient + (1 - .9) decay p = 0, as with an L2 penalty of (1 - .9) decay /
              2: SGD and the theorem have the same stationary points. Adam divides the gradient, but not the decay, by
              a running scale of each weight, and has other stationary points.
  schedule    rates fall linearly to 0, so that a run ends at a minimum and not in the noise of its batches around it.
  bias        the theorem's b is free: the router has a bias (router.bias). Our decay shrinks it as well; the theorem
              does not.
  models      linear router with constant experts; with experts of 2 and 3 layers; a router of 2 layers with constant
              experts. An expert that sees x has rows of its own, which the theorem covers too; the router's rows are
              judged (its first layer).
  limits      a share above .99 counts as 1; decays .01 and .1. Rates are .05, half of those with which one run of
              three diverged with the router of 2 layers.
  collapse    W = 0 is stationary as well, and lies in every subspace. So each decay is also claimed to keep the loss,
              by the trained rule (soft), below .2 of the trivial loss.

Found: every claim is supported. Share .93 without decay, .988 with .01, .9985 with .1 (linear router, constant
experts; .85, .955, .997 with a router of 2 layers). The rest is the noise of the batches: it falls with the schedule
until the last step.

Cost on 2 cores: 2 to 3 minutes.
"""

from __future__ import annotations

from collections.abc import Iterator

from ml_collections import ConfigDict

import routed.papers.dikkala2023  # noqa: F401 (parts of the paper)
from routed.analysis.claims import FROZEN, LEARNED, Claim, Writer, comparability
from routed.plan import Figure, Point, make_config

#: Architecture -> what it changes.
MODELS: dict[str, Point] = {
    "linear-constant": {"router.name": "linear", "experts.name": "constant", "experts.depth": 1},
    "linear-mlp2": {"router.name": "linear", "experts.name": "mlp", "experts.depth": 2},
    "linear-mlp3": {"router.name": "linear", "experts.name": "mlp", "experts.depth": 3},
    "mlp-constant": {"router.name": "mlp", "experts.name": "constant", "experts.depth": 1},
}
DECAYS: tuple[Point, ...] = tuple({"optimizer.weight_decay": decay} for decay in (0.0, 0.01, 0.1))

PROTOCOL = {
    "arms": ("learned",), "seeds": 10,
    "data.clusters": 8, "data.dim": 8, "data.spurious_dims": 24, "data.separation": 2.0,
    "data.fresh": True, "data.samples": 1, "data.test_samples": 1600,
    "router.bias": True, "router.width": 32, "router.learning_rate": 0.05,
    "experts.name": "constant", "experts.count": 16, "experts.width": 16, "experts.depth": 1,
    "experts.learning_rate": 0.05, "optimizer.schedule": "linear",
    "batch_size": 128, "steps": 6000, "eval_every": 1000, "mesh.runs_per_batch": 40,
}  # fmt: skip

SCALES = {
    "smoke": lambda config: {"steps": 40, "eval_every": 20, "seeds": 2, "data.test_samples": 160},
    "default": lambda config: {},
    "paper": lambda config: {
        "steps": 100000, "eval_every": 10000, "seeds": 20, "experts.count": 64, "experts.width": 96,
        "data.clusters": 64, "data.dim": 24, "data.spurious_dims": 216, "data.test_samples": 6400,
    },
}  # fmt: skip

SHARE, OUTSIDE, LOSS = METRICS = ("router/signal_share", "router/spurious_ratio", "test/loss_soft")


def models(config: ConfigDict) -> dict[str, Point]:
    """The architectures of the config's scale."""
    names = ("linear-constant", "mlp-constant") if config.scale == "smoke" else MODELS
    return {name: MODELS[name] for name in names}


def sweep_decays(config: ConfigDict) -> tuple[Point, ...]:
    """Architectures times decays; frozen routers, which no decay reaches, without decay only."""
    none, *decays = DECAYS
    decays = [none | {"arms": ("learned", "frozen")}, *decays]
    return tuple(model | decay for model in models(config).values() for decay in decays)


def claim_theorem1(config: ConfigDict) -> Iterator[Claim]:
    """For each architecture: the share with and without decay, its trend, and that nothing collapsed."""
    limit = {"value": 0.99}
    for name, model in models(config).items():
        none, some, most = (model | decay for decay in DECAYS)
        write = Writer(comparability(config), SHARE, prefix=f"dikkala.theorem1.{name}.")
        yield from (
            write.order("limit", f"{name}: with decay .1 the share is above .99", "1", limit, LEARNED, at=most),
            write.order("without", f"{name}: without decay it stays below", ".84", LEARNED, limit, at=none),
            write.order("learned", f"{name}: without decay it is above the frozen router's", ".1 to .84",
                        FROZEN, LEARNED, at=none),
            write.order("some", f"{name}: decay .01 lowers what is left outside, relative to the rest", "to 0",
                        LEARNED | some, LEARNED | none, metric=OUTSIDE),
            write.order("more", f"{name}: decay .1 lowers it further", "to 0",
                        LEARNED | most, LEARNED | some, metric=OUTSIDE),
            write.order("kept", f"{name}: with decay .1 the loss is below .2", "no loss in performance",
                        LEARNED, {"value": 0.2}, at=most, metric=LOSS),
        )  # fmt: skip
        if name == "linear-constant":
            yield write.beside("paper-without", f"{name}: share with decay 0", 0.84, at=none)
            yield write.beside("paper-with", f"{name}: share with decay 0.1", 0.9, at=most)


def draw_shares(config: ConfigDict) -> tuple[dict, ...]:
    """Share, what is left outside and loss against decay; over training for the linear router with constant experts."""
    decays = {"kind": "curves", "x": "optimizer.weight_decay", "metrics": METRICS}
    return (
        *(decays | {"name": name, "at": model} for name, model in models(config).items()),
        {"kind": "training", "name": "training", "metrics": METRICS, "at": MODELS["linear-constant"] | DECAYS[-1]},
    )


HEADLINE = Figure(
    "Theorem 1: the share of the router's weights in the directions that carry information, against weight decay",
    sweep=sweep_decays,
    claims=lambda config: tuple(claim_theorem1(config)),
    plots=draw_shares,
)

FIGURES = {"": HEADLINE}


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of FIGURE[,SCALE]."""
    return make_config("theory_spurious", arg, FIGURES, PROTOCOL, SCALES)
