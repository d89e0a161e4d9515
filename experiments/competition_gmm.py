"""Does competition teach a router the clusters, or do its dense steps; and what if the experts cannot compete?

Question. Pham et al. (2024) let all experts run on a share lambda of the steps: the K experts with the largest outputs
win, and the router learns the softmax of their norms. On Gaussian clusters the right expert of a cluster is known:
does competition raise the agreement of experts and clusters, leave fewer experts dead, and lower the loss? A competing
step computes all experts, so the gain may come from compute (SMoE for more steps), from dense steps (all experts
learn, none wins), from noise in the loss (a target of other tokens' norms), or from any winners (norms dealt anew).
Constant experts are the negative control: their norms are the same for every token, so one pair of experts wins
everywhere, and the router learns to ignore its input.

    routed run --config=competition_gmm        # all arms, experts that can and cannot compete
    routed run --config=competition_gmm:share  # against lambda, at equal FLOPs, of both kinds of experts
    routed run --config=competition_gmm:smoke

From the paper: top-2 of 16 experts, weights that sum to 1, no balance loss, no drops, evaluated by the router alone;
target, loss and output of a competing step as its equations say (`selection.distil_*`, all at their defaults), lambda
= .05.

Rules, written before the evaluation seeds (2300 on) ran; none compares competition with the rest.
  data        the bench's: 24 dimensions, separation 1, a constant target for each of 16 clusters, 8,192 samples.
  experts     depth 2, width 32 (the paper's experts have one hidden layer); constant experts as the negative control.
  rates       Adam, 1e-3 for all, times 1, 3, 10 or 30: each arm its best by final test loss on two seeds that are
              never evaluated. (The first study, seeds 2100 on, had .3, 1 and 3, of which every arm chose 3, the edge;
              no verdict was drawn.)
  steps       4,000 of 128 samples. `longer` SMoE takes as many more as competition costs in experts' FLOPs, where
              losers compute forward only: (K + lambda (E - K) / 3) / K. Dense steps, from which all experts learn,
              cost more, and are compared with the same SMoE.
  gate        a verdict stands if it also holds for the curves extrapolated to 4 times the steps.
  effect      smallest effect of interest: a factor 1.1 in excess loss, .01 in agreement.

Expected: competition lowers the excess loss of mlp experts at equal steps and not at equal FLOPs; dense steps do as
well; constant experts lose all agreement where lambda is large (`share`, at its largest; at .05 the first figure only
asks if agreement rises).

Found (docs/results/ours.md; seeds 2300 to 2309, each arm at its best rate): no verdict and no gain. With mlp experts
competition's excess loss is 12 % higher [0, 27] at equal steps, and its agreement .022 higher [.006, .039]. Dense steps
have SMoE's loss. Constant experts lose by competition, 27 % [6, 52]. share: at equal FLOPs competition's excess loss is
SMoE's at lambda = .01 and .05, and 4.7 times as high at 1 [2.7, 8.3].

Cost: 34 minutes of one core, share 42 of two beside other work; smoke under half a minute of processor time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ml_collections import ConfigDict

import routed.papers.pham2024  # noqa: F401 (parts of the paper)
from routed.analysis.claims import LEARNED, Claim, Writer, comparability
from routed.layer.rule import selection_rule
from routed.layer.selection import work
from routed.papers.pham2024.competition import averaged
from routed.plan import Figure, Point, make_config, override, product
from routed.plan.experiment import Scales

COMPETE = {"arm": "compete"}

#: arm -> what a comparison with it takes away from competition.
CONTROLS = {
    "compete_shuffled": "a shuffled target",
    "compete_random": "random winners",
    "compete_dense": "dense steps without winners",
    "compete_distil": "winners that only the router hears of",
}
ARMS = ("learned", "frozen", "compete", *CONTROLS)

PROTOCOL = {
    "arms": ARMS, "seed": 2300, "seeds": 10, "rates": "tuned", "tune.seeds": 2,
    "tune.multipliers": (1.0, 3.0, 10.0, 30.0), "data.clusters": 16, "data.samples": 8192, "experts.count": 16,
    "experts.name": "mlp", "experts.depth": 2, "experts.width": 32,
    "selection.name": "top_k", "selection.k": 2, "selection.eval.name": "top_k", "selection.eval.k": 2,
    "selection.competition_rate": 0.05, "optimizer.name": "adam", "experts.learning_rate": 1e-3,
    "router.learning_rate": 1e-3,
    "dispatch": "auto", "batch_size": 128, "steps": 4000, "eval_every": 1000, "mesh.runs_per_batch": 64,
}  # fmt: skip

SCALES: Scales = {
    "smoke": lambda config: {
        "data.clusters": 8, "data.dim": 8, "data.samples": 256, "data.test_samples": 1600, "experts.count": 8,
        "experts.width": 8, "batch_size": 32, "steps": 40, "eval_every": 20, "seeds": 2, "rates": "paper",
        "arms": ("learned", "compete"),
    },
    "default": lambda config: {},
    "paper": lambda config: {"steps": 40000, "eval_every": 10000, "seeds": 32},
}  # fmt: skip

#: The experts that compete, and those whose norms say nothing of a token.
EXPERTS = ("mlp", "constant")

SHARES = {"smoke": (0.3, 1.0), "default": (0.01, 0.05, 0.3, 1.0), "paper": (0.01, 0.03, 0.05, 0.09, 0.3, 1.0)}
#: Controls of the sweep over shares: those whose cost is competition's.
SWEPT = ("compete", "compete_shuffled", "compete_dense")


def longer(config: ConfigDict, share: float) -> Point:
    """Steps in which SMoE has as many experts' FLOPs as competition in the config's steps, with as many evaluations."""
    competing = override(config, {"selection.name": "compete", "selection.competition_rate": share})
    rule = averaged(selection_rule(competing.selection), config.steps)
    ratio = work(rule, config.batch_size, config.experts.count) / config.selection.k
    every = math.ceil(config.eval_every * ratio)
    return {"steps": config.steps // config.eval_every * every, "eval_every": every}


def writer(config: ConfigDict, at: Point) -> Writer:
    """Writes claims about excess loss."""
    return Writer(comparability(config, "scaled"), "test/excess", at, prefix="routed.competition.")


def claim_arms(config: ConfigDict) -> Iterator[Claim]:
    """Competition against SMoE in three columns, against each control, and that constant experts lose by it."""
    for experts in EXPERTS:
        write = writer(config, {"experts.name": experts})
        yield write.order(
            f"gmm.{experts}.loss",
            f"{experts} experts: competition lowers the excess loss",
            "lower loss",
            COMPETE,
            LEARNED,
        )
        agreement = {"metric": "router/ami", "unit": "difference"}
        yield write.order(f"gmm.{experts}.ami",
                          f"{experts} experts: competition raises the agreement of experts and clusters",
                          "not asked", LEARNED, COMPETE, **agreement)  # fmt: skip
        yield write.order(f"gmm.{experts}.dead", f"{experts} experts: competition leaves fewer experts dead",
                          "less collapse",
                          COMPETE, LEARNED, metric="router/dead", unit="difference")  # fmt: skip
        for arm, control in CONTROLS.items():
            if arm in config.arms:
                yield write.order(f"gmm.{experts}.{arm.removeprefix('compete_')}",
                                  f"{experts} experts: competition has a lower excess loss than {control}", "not asked",
                                  COMPETE, {"arm": arm})  # fmt: skip


METRICS = ("test/excess", "router/ami", "router/dead", "train/experts_per_token")

FIRST = Figure(
    "competition, SMoE and controls: loss, agreement, dead experts; experts that can compete and constant ones",
    sweep=lambda config: product(experts__name=EXPERTS),
    claims=lambda config: tuple(claim_arms(config)),
    plots=lambda config: tuple(
        plot | {"at": {"experts.name": experts}}
        for experts in EXPERTS
        for plot in (
            {"kind": "paired", "name": f"excess-{experts}", "metric": "test/excess"},
            {"kind": "paired", "name": f"ami-{experts}", "metric": "router/ami"},
            {"kind": "training", "name": f"training-{experts}", "metrics": METRICS[:3]},
        )
    ),
)


def shares(config: ConfigDict) -> tuple[Point, ...]:
    """Of both kinds of experts, each share for as many steps, and SMoE for as many FLOPs."""
    same, values = {"steps": config.steps, "eval_every": config.eval_every}, SHARES[config.scale]
    return tuple(
        {"experts.name": experts} | point
        for experts in EXPERTS
        for point in (
            *({"selection.competition_rate": share, **same, "arms": config.arms} for share in values),
            *({"selection.competition_rate": share, **longer(config, share), "arms": ("learned",)} for share in values),
        )
    )


def claim_shares(config: ConfigDict) -> Iterator[Claim]:
    """Returns claims at each share: competition and its controls against SMoE of equal FLOPs; also constant experts."""
    share = SHARES[config.scale][-1]
    write, at = writer(config, {"experts.name": "constant"}), {"selection.competition_rate": share}
    same = {"steps": config.steps, "eval_every": config.eval_every}
    sides = COMPETE | at | same, LEARNED | at | same
    yield write.order("gmm.constant.blind",
                      f"constant experts, lambda = {share:g}: competition loses agreement of experts and clusters",
                      "not asked", *sides, metric="router/ami", unit="difference")  # fmt: skip
    yield write.order("gmm.constant.pair",
                      f"constant experts, lambda = {share:g}: competition gives few experts all tokens",
                      "not asked", *reversed(sides), metric="router/load_max", unit="difference")  # fmt: skip
    write = writer(config, {"experts.name": "mlp"})
    for share in SHARES[config.scale]:
        fair = LEARNED | {"selection.competition_rate": share, **longer(config, share)}
        for arm in (arm for arm in config.arms if arm != "learned"):
            side = {
                "arm": arm,
                "selection.competition_rate": share,
                "steps": config.steps,
                "eval_every": config.eval_every,
            }
            name = arm.replace("compete_", "").replace("compete", "competition")
            statement = f"lambda = {share:g}: {name} has a lower excess loss than SMoE of as many FLOPs as competition"
            yield write.order(f"gmm.flops.{share:g}.{name}", statement, "not asked", side, fair)


SHARE = Figure(
    "competition and controls against lambda, paired with SMoE of as many FLOPs",
    changes={"arms": ("learned", *SWEPT)},
    sweep=shares,
    claims=lambda config: tuple(claim_shares(config)),
    plots=lambda config: tuple(
        {"kind": "equal_cost", "name": f"share-{experts}", "x": "selection.competition_rate",
         "metrics": (*METRICS[:3], "router/load_max"),
         "steps": config.steps, "dear": {share: longer(config, share)["steps"] for share in SHARES[config.scale]},
         "at": {"experts.name": experts}}
        for experts in EXPERTS
    ),
    computed=("steps", "eval_every", "arms"),
)  # fmt: skip

FIGURES = {"": FIRST, "share": SHARE}


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of FIGURE[,SCALE]."""
    return make_config("competition_gmm", arg, FIGURES, PROTOCOL, SCALES)
