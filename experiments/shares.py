"""How much of the published gap is sharpness, whatever the order in which its confounds are removed?

Question. In gmm_router.py 54 % of log(frozen / learned) goes when the frozen gate is made as sharp as the learned
gate, 14 % more when its rows are training examples, and the rest is learning. Another order, or soft evaluation of
both arms, may give other shares. Here every arm that an order needs runs, and shares are averaged over all orders
(Shapley values; routed.analysis.shapley).

    routed run --config=shares           # depth-3 experts, 8,192 samples: the published gap
    routed run --config=shares:constant  # the same with constant experts
    routed run --config=shares:table     # shares at 9 points; also shares:table_constant

Orders. Sharpness and initial partition can go in either order: frozen_sharp, frozen_data_fresh (rows are examples, the
gate as soft as a fresh gate) and frozen_data_sharp (as sharp as the learned gate) are all subsets of the two. Learning
comes last in each: a learned partition comes with its sharpness and replaces the initial rows, so no arm has learning
alone. frozen_data of the headline, whose sharpness follows from its rows, is beside them; it is on no path.

Setting: that of gmm_router's headline and fig2a at one size, tests and steps as there; seeds 1200 to 1204 (depth-3)
and 1210 to 1219 (constant), never used before. The only claim is the published claim, that there is a gap; shares are
shown with bootstrap intervals over seeds (2,000 draws, percentiles).

Found. Depth-3: at top-1 sharpness has 75 % [70, 78] of the gap averaged over both orders (54 % if it goes first), rows
from data -5 %, learning 31 % [27, 34]. 67 % [60, 70] are gone if both arms are evaluated soft; of the rest learning
then has 98 % [88, 108]: a sharper frozen gate only costs there. Constant experts: sharpness 38 % [35, 40],
rows 4 % [3, 5], learning 59 % [56, 61]; 29 % [27, 32] gone if evaluated soft, of which learning then has 92 %
[90, 94].

Tables. Is the share the same with other initial scales and separations? 3 x 3 points, k-means among the arms, seeds
1320 to 1329 and 1330 to 1339. No range is expected, and none is judged: docs/decisions/ours.md has the rules.

Cost on 2 cores beside other runs: 18 minutes, constant 2. By --dry_run (not run yet): table 299 minutes,
table_constant 23.
"""

from __future__ import annotations

from ml_collections import ConfigDict

import routed.papers.ours  # noqa: F401 (parts of our questions)
from routed.analysis.claims import Claim, Writer, comparability
from routed.plan import Figure, Point, experiment, make_config, product

gmm = experiment.load("gmm_router")

ARMS = ("learned", "frozen", "frozen_sharp", "frozen_data_fresh", "frozen_data_sharp", "frozen_data")

PROTOCOL = gmm.PROTOCOL | {"arms": ARMS, "seed": 1200, "seeds": 5}

SEPARATION, SCALE = "data.separation", "router.init_scale"
#: Arms on a path, and k-means beside them.
TABLE = {"arms": (*ARMS[:5], "frozen_kmeans"), "seeds": 10}


def claims(config: ConfigDict) -> tuple[Claim, ...]:
    """The gap that is shared out."""
    return (gmm.frozen_claim(Writer(comparability(config), prefix="routed.shares.")),)


def table_claims(config: ConfigDict) -> tuple[Claim, ...]:
    """The gap at the base point, tried at all points."""
    prefix = f"routed.shares.table.{config.experts.name}."
    return (gmm.frozen_claim(Writer(comparability(config), prefix=prefix, over=(SEPARATION, SCALE))),)


def table_sweep(config: ConfigDict) -> tuple[Point, ...]:
    """The base point, and what could change its shares: how far clusters are apart, how large a fresh router is."""
    if config.scale == "smoke":
        return product(data__separation=(1.0, 1.5), router__init_scale=(1.0, 3.0))
    return product(data__separation=(0.75, 1.0, 1.5), router__init_scale=(0.3, 1.0, 3.0))


SHARES = {"kind": "shares", "name": "shares", "x": SCALE, "y": SEPARATION}
TRAINING = {"kind": "training", "name": "training", "metrics": ("test/loss", "test/loss_soft")}

FIGURES = {
    "": Figure("the shares of the gap with depth-3 experts", claims=claims, plots=lambda config: (TRAINING,)),
    "constant": Figure(
        "the shares of the gap with constant experts",
        gmm.CONSTANT | {"seed": 1210, "seeds": 10},
        claims=claims,
        plots=lambda config: (TRAINING,),
    ),
    "table": Figure(
        "the share of sharpness at other separations and initial scales, depth-3 experts",
        TABLE | {"seed": 1320},
        sweep=table_sweep,
        claims=table_claims,
        plots=lambda config: (SHARES, TRAINING),
    ),
    "table_constant": Figure(
        "the same with constant experts",
        gmm.CONSTANT | TABLE | {"seed": 1330},
        sweep=table_sweep,
        claims=table_claims,
        plots=lambda config: (SHARES, TRAINING),
    ),
}


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of FIGURE[,SCALE]."""
    return make_config("shares", arg, FIGURES, PROTOCOL, gmm.SCALES)
