"""Does a score card on Gaussian mixtures foretell which router is good in a decoder?

Question. `routed suite` gives a router fourteen scores, each from data with a known answer. Twelve routers have a score
card and can route tokens: five that learn, the same five frozen, a hash and random choices. Is their order by score
cards their order by loss in the decoder of token_router.py?

    routed run --config=card_predicts:smoke
    routed run --config=card_predicts --config.data.directory=DIR

Rules, written with the scores (card_predicts.json) before any of these seeds ran. Three of the twelve had been seen in
this decoder, on other seeds and at shared rates (token_choices.py): hash, then learned, then frozen.
  score     the mean over the twelve probes that have a score for learned and frozen routers, all but gradient and cost;
            a frozen router has the scores of the card's frozen self.
  order     cosine .836, linear .811, projected .781, mlp .729, hyper .341, frozen cosine .257, frozen hyper .241, hash
            .241, frozen linear .238, frozen projected .233, frozen mlp .180, random .167.
  decoder   that of token_router.py at half of its steps, as twelve routers of 8,000 steps take five hours. The hash is
            of the token's id; the card's hash is of the input.
  rates     each router has its own best of token_router.py's grid, after a quarter of the steps.
  measure   Spearman's rank correlation of scores with the mean last test loss (the lower, the better), with a 95 %
            bootstrap interval over routers. Supported above .5; 9300 to 9304 are the seeds.
  probes    a probe adds nothing if the correlation without it is as high.

Expected: the learned routers come first in both orders, so the correlation is positive; within the frozen ones the
order is chance, as their scores differ by a tenth. The hash, eighth by score, is the best on tokens.

Cost: about three hours on two quiet cores, by the time of a step.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from ml_collections import ConfigDict

import routed.papers.ours  # noqa: F401 (parts of our own questions)
from routed.analysis import statistics
from routed.analysis.claims import Claim, Side, Writer, comparability
from routed.analysis.plots import PLOTS, Axis, Chart, Data, Panel, Plot, Series
from routed.analysis.plots import Point as Mark
from routed.plan import Figure, Point, experiment, make_config
from routed.plan.arms import REFERENCE

tokens = experiment.load("token_router")
SCALES = tokens.SCALES

#: Router -> probe -> score: the score cards of suite version 1, which came before these runs.
SCORES: dict[str, dict[str, float]] = json.loads(pathlib.Path(__file__).with_suffix(".json").read_text())

#: Routers that learn and have a frozen twin.
ROUTERS = {"smoke": ("linear", "cosine"), "default": ("linear", "cosine", "projected", "mlp", "hyper")}
#: Arms without a router that learns.
FIXED = {"hash_token": "hash", "random": "random"}


def by_name(config: ConfigDict) -> dict[str, Side]:
    """Returns the sides by their names in `SCORES`."""
    first, *_ = names = ROUTERS.get(config.scale, ROUTERS["default"])
    sides: dict[str, Side] = {
        f"{arm} {name}": {"arm": arm, "router.name": name} for name in names for arm in tokens.PAIR
    }
    return sides | {name: {"arm": arm, "router.name": first} for arm, name in FIXED.items()}


def sweep(config: ConfigDict) -> tuple[Point, ...]:
    """Returns a point for each router that learns; the other arms run at the first."""
    first, *later = ROUTERS.get(config.scale, ROUTERS["default"])
    return ({"router.name": first}, *({"router.name": name, "arms": tokens.PAIR} for name in later))


def claims(config: ConfigDict) -> Iterator[Claim]:
    """Returns the claim about the order."""
    write = Writer(comparability(config), "test/loss", prefix="routed.tokens.")
    yield write.ranked("card", "score cards on mixtures foretell the order of routers in a decoder", "not asked",
                       by_name(config), SCORES, tokens.LEAST)  # fmt: skip


def order_and_losses(spec: dict[str, Any], data: Data) -> Chart | None:
    """Returns the loss of each router, with an interval over seeds, in the order of the mean scores."""
    means = {name: float(np.mean([*SCORES[name].values()])) for name in spec["ranked"]}
    names = dict(enumerate(sorted(means, key=lambda name: -means[name])))
    ticks = {i: f"{name}, {means[name]:.2f}" for i, name in names.items()}
    x = Axis("router and its mean score, the best first", (-0.5, len(names) - 0.5), ticks=ticks, all_labels=True,
             angle=-45)  # fmt: skip
    panel = Panel(x, Axis(data.axes["test/loss"].label), width=420)
    for i, name in names.items():
        side = spec["ranked"][name]
        rows = data.at({"router.name": side["router.name"]})
        values = rows[(rows.arm == side["arm"]) & (rows.status == "ok")]["test/loss"]
        if len(values):
            kind, colour, shape = KINDS_OF_ROUTERS[side["arm"] if side["arm"] in tokens.PAIR else ""]
            panel.means(Series(kind, colour, shape), [Mark(float(i), statistics.estimate(values))])
    return Chart([panel]) if panel.rows else None


#: Arm -> label, colour and symbol.
KINDS_OF_ROUTERS = {
    REFERENCE: ("learned", "#0072B2", "circle"), "frozen": ("frozen", "#D55E00", "square"),
    "": ("never learns", "#000000", "diamond"),
}  # fmt: skip

PLOTS["order_and_losses"] = Plot(
    order_and_losses, "A point is a router: means over seeds with 95 % t intervals.", {"ranked": "name -> side"},
    axes=lambda spec, data: data.swept,
)  # fmt: skip

FIGURES = {
    "": Figure(
        "does the order by score cards hold on tokens?",
        {"arms": (*tokens.PAIR, *FIXED), "seed": 9300, "seeds": 5, "steps": 4000, "tune.steps": 1000,
         "eval_every": 1000},
        sweep=sweep, claims=lambda config: tuple(claims(config)),
        plots=lambda config: (
            {"kind": "order_and_losses", "name": "card", "ranked": by_name(config)}, *tokens.TRAINING,
        ),
    )
}  # fmt: skip


def get_config(arg: str | None = None) -> Any:
    """Returns the config of FIGURE[,SCALE]."""
    return make_config("card_predicts", arg, FIGURES, tokens.PROTOCOL, SCALES)
