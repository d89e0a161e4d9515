"""Does learning to route help when a sample is a sequence of tokens, each routed on its own?

Question. Dikkala et al. (2023, 3.5 and C.2) draw sequences of 4, 8 or 16 tokens from a mixture of 32 Gaussians in 32 dimensions. The
target adds up a linear function per cluster over the tokens (or its square). A soft mixture of 32 linear experts beats a dense
net at length 4, both are equal at 16, and the mixture's router is a little sparser than its shuffled self (Tables 1 and 2, 18
numbers). Their quadratic target widens the gap. Here the same, with the frozen controls of the Gaussian bench beside it.

    python -m routed.main --config=experiments/sequence_router.py              # Tables 1 and 2
    python -m routed.main --config=experiments/sequence_router.py:quadratic
    python -m routed.main --config=experiments/sequence_router.py:sensitivity  # which setting gives the paper's sparsity?

From the paper: 32 equally likely Gaussians, random centres in 32 dimensions, lengths 4, 8, 16, y = sum_i w_{g_i}^T x_i or the sum of
squares, 32 linear experts, linear router, softmax weights in training and for the outputs; the dense net has 2 layers. Its MSE is
on a scale that it does not state: our losses are over the target's variance, numbers stand side by side, and order and
ratios are judged. Sparsity needs no scale.

Rules where the paper is silent, fixed on seeds from 5000 on; none looks at learned against frozen.
  separation  c = 1, as in experiments/gmm_router.py: the Bayes loss is .0008.
  weights     w_c ~ N(0, I/32). Samples are fresh in every batch of 64 sequences.
  scale       router weights start at .43 times lecun normal, which gives the untrained router the paper's sparsity of 28.5.
  rates       Adam with 10 times the paper's rates of Fig. 2 (3.2e-2 router, 3.2e-3 the rest): of 3, 10, 30 the best for the dense net
              at length 4 (dense_active, 20,000 steps: .264, .263, .271; the paper's own after 10,000: .335).
  dense       the net is applied to each token and its outputs are added up, as the experts' are; dense_active has the
              parameters of router and one expert, dense_total those of the whole layer.
  quadratic   the paper does not name its experts: linear ones, and MLPs of 2 layers (width 32), which can represent a square.
  steps       12,000: from 11,000 on no arm's training loss falls by more than the gate's 2 % in a thousand steps (seeds 5000 to
              5003; dense 4.6 % before 6,000, 2.4 % before 10,000, .5 and 1.8 % in the last two thousands).
  seeds       100 to 109. A first run of 5,000 steps on seeds 0 to 9 failed the gate: dense and frozen still fell by 3 to 6 %.

Losses: `soft` is the paper's rule (softmax weights also at evaluation), `top-1` the one of its Section 2.

Cost on 2 free cores: 5 minutes, quadratic 5, sensitivity 3.5 (quadratic and sensitivity by --dry_run).

Found (BUILD_NOTES.md, section 3): learned beats dense 8- to 11-fold at every length and frozen 12- to 17-fold, and each cluster ends with one
expert; the paper's sparsity of 13 and its small ratios are what this mixture passes through early in training.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from routed.claims import Claim
from routed.config import base, variant
from routed.points import Point, chain, product

FIGURES = ("", "quadratic", "sensitivity")

CONTROLS = ("learned", "frozen", "frozen_sharp", "frozen_top1", "frozen_data")
ARMS = {
    "": ("learned", "frozen", "dense_total"),
    "quadratic": ("learned", "frozen", "frozen_data", "oracle", "dense_active", "dense_total"),
    "sensitivity": ("learned", "frozen", "dense_total"),
}
LENGTHS = {"smoke": (2, 4), "default": (4, 8, 16), "paper": (4, 8, 16)}

#: At the shortest length.
ALL = (*CONTROLS, "oracle", "dense_active", "dense_total")

#: Table 1: MSE of dense, learned and frozen; Table 2: sparsity learned, learned and shuffled, frozen.
TABLE1 = {
    "dense": {4: 0.0044, 8: 0.0021, 16: 0.0015},
    "learned": {4: 0.0016, 8: 0.0017, 16: 0.0015},
    "frozen": {4: 0.0046, 8: 0.0020, 16: 0.0027},
}
TABLE2 = {
    "learned": {4: 13.0, 8: 14.14, 16: 14.29},
    "shuffled": {4: 14.29, 8: 15.41, 16: 15.6},
    "frozen": {4: 28.52, 8: 28.51, 16: 28.53},
}
#: The dense net that is compared with the mixture: that of equal parameters, the harder opponent.
DENSE = "dense_total"

#: One choice of ours changed at a time, at the shortest length.
CHANGES: dict[str, Point] = {
    "the protocol": {},
    "separation 1/2": {"data.separation": 0.5},
    "separation 1/4": {"data.separation": 0.25},
    "separation 2": {"data.separation": 2.0},
    "rates of Fig. 2": {"optimizer.rate_scale": 0.1},
    "a tenth of the steps": {"steps": 1200, "eval_every": 600},
    "a tenth of both": {"optimizer.rate_scale": 0.1, "steps": 1200, "eval_every": 600},
    "router at lecun normal": {"router.init_scale": 1.0},
    "router's rate as the experts'": {"router.learning_rate": 3.2e-3},
}


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of FIGURE[,SCALE]."""
    figure, scale = variant(arg, FIGURES)
    c = base()
    with c.unlocked():
        c.name, c.figure, c.scale = "sequence_router", figure, scale
        c.arms = ARMS[figure]
        c.data.name, c.data.clusters, c.data.dim, c.data.positions = "sequence", 32, 32, 4
        c.data.target, c.data.target_dim = ("quadratic" if figure == "quadratic" else "linear"), 1
        c.data.fresh, c.data.test_samples = True, 3200
        c.experts.count, c.experts.name, c.experts.depth, c.experts.width = 32, "mlp", 1, 32
        c.router.init_scale = 0.43
        c.optimizer.name, c.router.learning_rate, c.experts.learning_rate = "adam", 3.2e-2, 3.2e-3
        c.batch_size, c.steps, c.eval_every, c.seed, c.seeds = 64, 12000, 1000, 100, 10
        if scale == "paper":
            c.steps, c.eval_every, c.seeds = 120000, 10000, 32
        if scale == "smoke":
            c.data.clusters, c.data.dim, c.data.test_samples, c.experts.count, c.data.positions = 4, 4, 320, 4, 2
            c.steps, c.eval_every, c.seeds = 40, 20, 2
    return c.lock()


def get_sweep(config: ConfigDict) -> tuple[Point, ...]:
    """The points of the figure."""
    match config.figure:
        case "quadratic":
            return chain(
                product(experts__depth=(1,)),
                product(experts__depth=(2,), arms=(("learned", "frozen", "oracle", "dense_total"),)),
            )
        case "sensitivity":
            plain = {key: _value(config, key) for change in CHANGES.values() for key in change}
            small = {"steps": config.steps, "eval_every": config.eval_every} if config.scale == "smoke" else {}
            return tuple(plain | change | small for change in CHANGES.values())
    shortest, *longer = LENGTHS[config.scale]
    return chain(product(data__positions=(shortest,), arms=(ALL,)), product(data__positions=tuple(longer)))


def _value(config: ConfigDict, key: str):
    for part in key.split("."):
        config = config[part]
    return config


def get_claims(config: ConfigDict) -> tuple[Claim, ...]:
    """The paper's order at each length, its numbers beside ours, and the fairest control."""
    where = "gaps_filled" if config.scale != "smoke" else "scaled"
    lengths = LENGTHS[config.scale]
    learned, frozen, dense = {"arm": "learned"}, {"arm": "frozen"}, {"arm": DENSE}

    def order(id, statement, paper, lower, higher, at, metric="test/loss_soft", kind="order"):
        return Claim(kind, id, statement, paper, where, metric, lower, higher, at)

    def beside(id, statement, value, side, at, metric="test/loss_soft"):
        return Claim("beside", id, statement, value, where, metric, side, {}, at)

    shuffled = learned | {"metric": "router/sparsity_shuffled"}
    sparser = {"metric": "router/sparsity", "lower": learned, "higher": shuffled}
    if config.figure == "sensitivity":
        return (
            order("routed.sequence.protocol", "learned beats dense at length 4", ".0016 against .0044", learned, dense, get_sweep(config)[0]),
        )  # fmt: skip
    if config.figure == "quadratic":
        claims = []
        for depth, name in ((1, "linear"), (2, "mlp")):
            at = {"experts.depth": depth}
            claims += [
                order(f"dikkala.tokens-quadratic.{name}", f"{name} experts: learned beats dense", ".0075 against .018", learned, dense, at),
                order(f"dikkala.tokens-quadratic.{name}.sparsity", f"{name} experts: sparser than shuffled", "8.8 against 11.5", at=at, **sparser),
                beside(f"dikkala.tokens-quadratic.{name}.mse", f"{name} experts: loss of the mixture", 0.0075, learned, at),
                beside(f"dikkala.tokens-quadratic.{name}.dense-mse", f"{name} experts: loss of the dense net", 0.018, dense, at),
            ]  # fmt: skip
        return tuple(claims)

    claims = []
    for s in lengths:
        at = {"data.positions": s}
        said = lambda name, s=s: TABLE1[name].get(s, "not asked")  # noqa: E731
        ratio = f"{said('learned')} against {said('dense')}"
        # At 16 tokens the paper's two are equal.
        kind = "null" if s == 16 else "order"
        claims += [
            order(f"dikkala.table1.s{s}.dense", f"length {s}: learned {'equals' if kind == 'null' else 'beats'} dense", ratio, learned, dense, at, kind=kind),
            order(f"dikkala.table1.s{s}.frozen", f"length {s}: learned beats frozen", f"{said('learned')} against {said('frozen')}", learned, frozen, at),
            order(f"dikkala.table2.s{s}.shuffled", f"length {s}: sparser than shuffled", f"{TABLE2['learned'].get(s)} against {TABLE2['shuffled'].get(s)}", at=at, **sparser),
        ]  # fmt: skip
        sides = {"dense": dense, "learned": learned, "frozen": frozen}
        claims += [
            beside(f"dikkala.table1.{name}.s{s}", f"length {s}: loss, {name}", TABLE1[name][s], side, at)
            for name, side in sides.items()
            if s in TABLE1[name]
        ]
        tabled = {"learned": learned, "shuffled": shuffled, "frozen": frozen}
        claims += [
            Claim("number", f"dikkala.table2.{name}.s{s}", f"length {s}: sparsity, {name}"
                  + (" (pinned by our initial scale)" if name == "frozen" else ""),
                  TABLE2[name][s], where, "router/sparsity", side, {}, at)
            for name, side in tabled.items()
            if s in TABLE2[name]
        ]  # fmt: skip
    at = {"data.positions": lengths[0]}
    claims += [
        order("routed.sequence.fair", "learned beats the fairest frozen control, top-1", "not asked", learned, {"arm": "fairest"}, at, "test/loss"),
        order("routed.sequence.top1", "learned beats frozen, top-1", "not asked", learned, frozen, at, "test/loss"),
    ]  # fmt: skip
    return tuple(claims)


def get_plots(config: ConfigDict) -> tuple[dict, ...]:
    """Losses and sparsity, then training."""
    training = {"kind": "training", "name": "training", "metrics": ("train/loss", "test/loss_soft", "router/sparsity")}
    metrics = ("test/loss_soft", "test/loss", "router/sparsity", "router/sparsity_shuffled")
    if config.figure == "sensitivity":
        methods = dict(zip(CHANGES, get_sweep(config), strict=True))
        return (
            {
                "kind": "methods",
                "name": "sensitivity",
                "methods": methods,
                "metrics": ("test/loss_soft", "router/sparsity", "router/sparsity_shuffled"),
            },
        )
    x = "experts.depth" if config.figure == "quadratic" else "data.positions"
    return (
        {"kind": "curves", "name": "loss", "x": x, "metrics": metrics[:2]},
        {"kind": "curves", "name": "sparsity", "x": x, "metrics": metrics[2:], "arms": ("learned", "frozen")},
        {"kind": "gap", "name": "gap", "x": x},
        training,
        {"kind": "routing", "name": "routing", "arms": ("learned", "frozen")},
    )
