"""Does learning to route help when a sample is a sequence of tokens, each routed on its own?

Question. Dikkala et al. (2023, 3.5 and C.2) draw sequences of 4, 8 or 16 tokens from a mixture of 32 Gaussians in 32
dimensions. The target adds up a linear function per cluster over the tokens (or its square). A soft mixture of 32
linear experts beats a dense net at length 4, both are equal at 16, and the mixture's router is a little sparser than
its shuffled self (Tables 1 and 2, 18 numbers). Their quadratic target widens the gap. Here the same comparison has the
frozen controls of the Gaussian bench beside it.

    routed run --config=sequence_router              # Tables 1 and 2
    routed run --config=sequence_router:quadratic
    routed run --config=sequence_router:sensitivity  # which setting gives the paper's sparsity?

From the paper: 32 equally likely Gaussians, random centres in 32 dimensions, lengths 4, 8, 16, y = sum_i w_{g_i}^T x_i
or the sum of squares, 32 linear experts, linear router, softmax weights in training and for the outputs; the dense net
has 2 layers. The paper does not state the scale of its MSE: our losses are over the target's variance, numbers stand
side by side, and order and ratios are judged. Sparsity needs no scale.

Rules where the paper is silent, fixed on seeds from 5000 on; none compares learned with frozen.
  separation  c = 1, as in experiments/gmm_router.py: the Bayes loss is .0008.
  weights     w_c ~ N(0, I/32). Samples are fresh in every batch of 64 sequences.
  scale       router weights start at .43 times lecun normal, which gives the untrained router the paper's sparsity of
              28.5.
  rates       Adam with 10 times the paper's rates of Fig. 2 (3.2e-2 router, 3.2e-3 the rest): of 3, 10, 30 the best
              factor for the dense net at length 4 (dense_active, 20,000 steps: .264, .263, .271; the paper's own after
              10,000: .335).
  dense       the net is applied to each token and its outputs are added up, as the experts' are (our reading).
              dense_active has the parameters of router and one expert, dense_total those of the whole layer.
  quadratic   the paper does not name its experts: linear experts, and MLPs of 2 layers (width 32), which can represent
              a square.
  steps       12,000: from 11,000 on no arm's training loss falls by more than 2 % in a thousand steps (seeds 5000 to
              5003; dense 4.6 % before 6,000, 2.4 % before 10,000, .5 and 1.8 % in the last two thousands).
  seeds       100 to 109.

Losses: `soft` is the paper's rule (softmax weights also at evaluation), `top-1` that of its Section 2.

Smoke (half a minute) has tokens of 4 dimensions, lengths 2 and 4, and neither oracle nor dense_active. Cost on 2 free
cores: 5 minutes, quadratic 5, sensitivity 3.5 (quadratic and sensitivity by --dry_run).

Found (docs/results/dikkala2023.md, without_page.md): learned beats dense 8- to 12-fold at every length, frozen 13- to
17-fold, and frozen k-means of the inputs 1.5-fold [1.14, 2.27]. It passes the paper's sparsity early in training.
"""

from __future__ import annotations

from ml_collections import ConfigDict

import routed.papers.dikkala2023  # noqa: F401 (parts of the paper)
from routed.analysis.claims import FAIREST, FROZEN, LEARNED, Claim, Writer, comparability
from routed.plan import Figure, Point, chain, make_config, product, value_of

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
LENGTHS = {"smoke": (2, 4), "default": (4, 8, 16), "paper": (4, 8, 16)}

PAIR = ("learned", "frozen")
CONTROLS = (*PAIR, "frozen_sharp", "frozen_top1", "frozen_data", "frozen_kmeans")
#: At the shortest length. No claim needs oracle, dense_active, or k-means beside the other controls: smoke is mostly
#: compiling.
ALL = {
    "smoke": (*CONTROLS[:-1], "dense_total"),
    "default": (*CONTROLS, "oracle", "dense_active", "dense_total"),
    "paper": (*CONTROLS, "oracle", "dense_active", "dense_total"),
}
#: The dense net that is compared with the mixture: that of equal parameters, the harder opponent.
DENSE = {"arm": "dense_total"}
SHUFFLED = LEARNED | {"metric": "router/sparsity_shuffled"}

PROTOCOL = {
    "arms": (*PAIR, "dense_total"),
    "data.name": "sequence", "data.clusters": 32, "data.dim": 32, "data.positions": 4,
    "data.target": "linear", "data.target_dim": 1, "data.fresh": True, "data.test_samples": 3200,
    "experts.count": 32, "experts.name": "mlp", "experts.depth": 1, "experts.width": 32, "router.init_scale": 0.43,
    "optimizer.name": "adam", "router.learning_rate": 3.2e-2, "experts.learning_rate": 3.2e-3,
    "batch_size": 64, "steps": 12000, "eval_every": 1000, "seed": 100, "seeds": 10,
}  # fmt: skip

SCALES = {
    "smoke": lambda config: {
        "data.clusters": 4, "data.dim": 4, "data.positions": 2, "data.test_samples": 320, "experts.count": 4,
        "steps": 40, "eval_every": 20, "seeds": 2, "shuffles": 4,
    },
    "default": lambda config: {},
    "paper": lambda config: {"steps": 120000, "eval_every": 10000, "seeds": 32},
}  # fmt: skip


def plots(x: str) -> tuple[dict, ...]:
    """Losses and sparsity against `x`, then training."""
    training = ("train/loss", "test/loss_soft", "router/sparsity")
    sparsities = ("router/sparsity", "router/sparsity_shuffled")
    return (
        {"kind": "curves", "name": "loss", "x": x, "metrics": ("test/loss_soft", "test/loss")},
        {"kind": "curves", "name": "sparsity", "x": x, "metrics": sparsities, "arms": PAIR},
        {"kind": "gap", "name": "gap", "x": x},
        {"kind": "training", "name": "training", "metrics": training},
        {"kind": "routing", "name": "routing", "arms": PAIR},
    )


# Tables 1 and 2.


def tables_sweep(config: ConfigDict) -> tuple[Point, ...]:
    """The lengths; all arms at the shortest."""
    shortest, *longer = LENGTHS[config.scale]
    return chain(product(data__positions=(shortest,), arms=(ALL[config.scale],)), product(data__positions=longer))


def tables_claims(config: ConfigDict) -> tuple[Claim, ...]:
    """The paper's order at each length, its numbers beside ours, and the fairest control."""
    write = Writer(comparability(config), "test/loss_soft", prefix="dikkala.")
    claims: list[Claim] = []
    for s in LENGTHS[config.scale]:
        claims += length_claims(write._replace(at={"data.positions": s}), s)
    shortest = {"data.positions": LENGTHS[config.scale][0]}
    ours = Writer(comparability(config), at=shortest, prefix="routed.sequence.")
    return (
        *claims,
        ours.order("fair", "learned beats the fairest frozen control, top-1", "not asked", LEARNED, FAIREST),
        ours.order("top1", "learned beats frozen, top-1", "not asked", LEARNED, FROZEN),
    )


def length_claims(write: Writer, s: int) -> list[Claim]:
    """A column of both tables; the paper has no number for a length of the smoke scale."""
    learned, dense, frozen = (TABLE1[name].get(s, "not asked") for name in ("learned", "dense", "frozen"))
    sparse = write._replace(metric="router/sparsity")
    compare, verb = (write.null, "equals") if s == 16 else (write.order, "beats")  # at 16 the paper's two are equal
    shuffled = f"{TABLE2['learned'].get(s)} against {TABLE2['shuffled'].get(s)}"
    notes = {"frozen": " (pinned by our initial scale)"}
    losses = {"dense": DENSE, "learned": LEARNED, "frozen": FROZEN}
    sparsities = {"learned": LEARNED, "shuffled": SHUFFLED, "frozen": FROZEN}
    return [
        compare(f"table1.s{s}.dense", f"length {s}: learned {verb} dense", f"{learned} against {dense}",
                LEARNED, DENSE),
        write.order(f"table1.s{s}.frozen", f"length {s}: learned beats frozen", f"{learned} against {frozen}",
                    LEARNED, FROZEN),
        sparse.order(f"table2.s{s}.shuffled", f"length {s}: sparser than shuffled", shuffled, LEARNED, SHUFFLED),
        *(
            write.beside(f"table1.{name}.s{s}", f"length {s}: loss, {name}", TABLE1[name][s], side)
            for name, side in losses.items()
            if s in TABLE1[name]
        ),
        *(
            sparse.number(f"table2.{name}.s{s}", f"length {s}: sparsity, {name}{notes.get(name, '')}",
                          TABLE2[name][s], side)
            for name, side in sparsities.items()
            if s in TABLE2[name]
        ),
    ]  # fmt: skip


TABLES = Figure(
    "Tables 1 and 2: loss and sparsity against the length of the sequence",
    sweep=tables_sweep,
    claims=tables_claims,
    plots=lambda config: plots("data.positions"),
)

# The quadratic target.


def quadratic_sweep(config: ConfigDict) -> tuple[Point, ...]:
    """Linear experts, and MLPs of 2 layers with fewer arms."""
    return chain(product(experts__depth=(1,)), product(experts__depth=(2,), arms=((*PAIR, "oracle", "dense_total"),)))


def quadratic_claims(config: ConfigDict) -> tuple[Claim, ...]:
    """The paper's orders for either kind of experts, and its numbers beside ours."""
    claims: list[Claim] = []
    for depth, name in ((1, "linear"), (2, "mlp")):
        at, experts = {"experts.depth": depth}, f"{name} experts"
        write = Writer(comparability(config), "test/loss_soft", at, prefix="dikkala.tokens-quadratic.")
        claims += [
            write.order(name, f"{experts}: learned beats dense", ".0075 against .018", LEARNED, DENSE),
            write.order(f"{name}.sparsity", f"{experts}: sparser than shuffled", "8.8 against 11.5",
                        LEARNED, SHUFFLED, metric="router/sparsity"),
            write.beside(f"{name}.mse", f"{experts}: loss of the mixture", 0.0075),
            write.beside(f"{name}.dense-mse", f"{experts}: loss of the dense net", 0.018, DENSE),
        ]  # fmt: skip
    return tuple(claims)


QUADRATIC = Figure(
    "the sum of squares as the target, with linear experts and with MLPs",
    {"arms": (*PAIR, "frozen_data", "oracle", "dense_active", "dense_total"), "data.target": "quadratic"},
    sweep=quadratic_sweep,
    claims=quadratic_claims,
    plots=lambda config: plots("experts.depth"),
)

# Which setting gives the paper's sparsity?

#: One choice of ours changed at a time, at the shortest length.
CHANGES: dict[str, Point] = {
    "the protocol": {},
    "separation 1/2": {"data.separation": 0.5},
    "separation 1/4": {"data.separation": 0.25},
    "separation 2": {"data.separation": 2.0},
    "rates of Fig. 2": {"optimizer.rate_scale": 0.1},
    "a tenth of the steps": {},
    "a tenth of both": {"optimizer.rate_scale": 0.1},
    "router at lecun normal": {"router.init_scale": 1.0},
    "router's rate as the experts'": {"router.learning_rate": 3.2e-3},
}


def sensitivity_sweep(config: ConfigDict) -> tuple[Point, ...]:
    """One change a point; the first point is the protocol itself."""
    plain = {key: value_of(config, key) for change in CHANGES.values() for key in change}
    whole = {"steps": config.steps, "eval_every": config.eval_every}
    tenth = {"steps": config.steps // 10, "eval_every": config.steps // 20}
    brief = () if config.scale == "smoke" else ("a tenth of the steps", "a tenth of both")
    return tuple(plain | change | (tenth if name in brief else whole) for name, change in CHANGES.items())


def sensitivity_claims(config: ConfigDict) -> tuple[Claim, ...]:
    """The paper's order at the protocol, and the share of changes under which it stands."""
    protocol = sensitivity_sweep(config)[0]
    write = Writer(comparability(config), "test/loss_soft", at=protocol, over=tuple(protocol))
    statement = f"learned beats dense at length {config.data.positions}"
    return (write.order("routed.sequence.protocol", statement, ".0016 against .0044", LEARNED, DENSE),)


def sensitivity_plots(config: ConfigDict) -> tuple[dict, ...]:
    """Every change, on loss and sparsity."""
    methods = dict(zip(CHANGES, sensitivity_sweep(config), strict=True))
    metrics = ("test/loss_soft", "router/sparsity", "router/sparsity_shuffled")
    return ({"kind": "methods", "name": "sensitivity", "methods": methods, "metrics": metrics},)


SENSITIVITY = Figure(
    "loss and sparsity with one choice of ours changed at a time",
    sweep=sensitivity_sweep,
    claims=sensitivity_claims,
    plots=sensitivity_plots,
    computed=("steps", "eval_every"),
)

FIGURES = {"": TABLES, "quadratic": QUADRATIC, "sensitivity": SENSITIVITY}


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of FIGURE[,SCALE]."""
    return make_config("sequence_router", arg, FIGURES, PROTOCOL, SCALES)
