"""Does training the router help a T5 whose layers are too narrow to route by themselves?

Question. Dikkala et al. (2023, 3.7 and C.4) pre-train T5 on mC4 with layers 32 wide and find: dense below a mixture with a frozen
router below one with a trained router, in token accuracy; at T5's full width the two mixtures do not differ, "because earlier
layers can route implicitly". Their frozen router cannot balance its load and so overflows its capacity, and combine weights can
grow. Here arms are dropless with weights that sum to 1, the frozen router also runs balanced, and a hash of the token id stands beside
both: what is left is the choice of experts.

    python -m routed.main --config=experiments/t5_mc4.py:smoke
    python -m routed.main --config=experiments/t5_mc4.py --config.data.directory=DIR
    python -m routed.main --config=experiments/t5_mc4.py:widths --config.data.directory=DIR

DIR holds mC4's shards, c4-LANG.tfrecord-NNNNN-of-NNNNN.json.gz and c4-LANG-validation.tfrecord-...; smoke makes its own text. With
--config.data.name=tfds it is TFDS's data_dir with a prepared c4/multilingual.

Figures. fig5 (also without a name): all arms. fig7: expert counts. widths: the trunk's width x whether what the router learns
reaches the trunk. transplant: a trained router, frozen, in a network that starts anew. options: the paper's capacity, its combine
weights, a balance loss and the stopped gradient, one at a time. Scales: smoke (a minute), default (2 CPU cores, hours), gpu (one
accelerator, hours), paper (a TPU pod, days; set mesh.data and mesh.expert).

From the paper: T5 with 12 layers a stack, width 32, FFN 256, 12 heads of 64, 3 sparse layers a stack, top-2, capacity factors
1.25 and 2.0, Adam, 500,000 steps. From flaxformer's public configuration of the same architecture (`paper` only): 64 experts, groups
of 4,096 tokens, capacity per token, priority by score in the encoder, gated GELU, untied logits, initial scale .1, z-loss 1e-4,
vocabulary 32,128; its balance loss is off, as the paper names none.

Rules of the default scale, fixed before its evaluation seeds ran; none looks at learned against frozen.
  shape       d 32, 2 + 2 layers, one sparse in each stack, 4 heads of 16, gated GELU FFN 128, 16 experts, top-2: on two cores
              the paper's shape spends 93 % of its time on attention and ends after 500 steps.
  routing     dropless, weights renormalised over the two, no auxiliary loss: no arm can drop, nor grow its weights.
  steps       1,000 of 64 rows, 10 million tokens: what two hours of two cores give 5 arms x 5 seeds.
  rates       Adam, one rate for router and all else: 100 steps of warm-up, then linearly to 0. The best of 3e-3, 6e-3, 1e-2,
              2e-2 for the *dense* twin on a seed that is never evaluated (validation loss 3.75, 3.64, 3.66, 3.98).
  seeds       100 to 104. A first protocol (rate 1e-2, constant; seeds 0 to 4) had intervals of .04 to .07 nats, as seeds of
              the dense twin ended .026 apart (standard deviation); with the rate falling it is .016 (seeds 900 to 903).
  gate        no verdict unless an arm beats a smoothed bigram model of the targets on the validation rows.
  effect      smallest effect of interest: .01 nats per token.

Cost: smoke a minute; default about 45 minutes for fig5 on two free cores, 2 hours for widths and fig7. Found (BUILD_NOTES.md, section
3): training the router is worth less than .02 nats, a balanced hash of the token id as much; the trunk learns to route through
routers that nobody trains, the more the wider it is; no width and no stopped gradient shows a difference in loss (3 seeds, half-widths of
.02 to .1 nats).

Expected beforehand: learned below frozen_balanced by some hundredths of a nat, more the narrower the trunk, and more again when the trunk
cannot route (router.stop_gradient).
"""

from __future__ import annotations

from ml_collections import ConfigDict

from routed import config as _config
from routed.claims import Claim
from routed.config import base, variant
from routed.points import Point, product

FIGURES = ("", "fig5", "fig7", "widths", "transplant", "options")
SCALES = (*_config.SCALES, "gpu")

ARMS = {
    "fig7": ("learned", "frozen", "frozen_balanced"),
    "widths": ("learned", "frozen_balanced"),
    "transplant": ("learned", "transplant", "frozen_balanced", "hash_token"),
    "options": ("learned", "frozen", "frozen_balanced"),
}
ALL = ("learned", "frozen", "frozen_balanced", "hash_token", "dense_active", "dense_total")

EXPERTS = {"smoke": (2, 4), "default": (4, 16, 64), "gpu": (8, 32, 128), "paper": (8, 16, 32, 64, 128)}
WIDTHS = {"smoke": (8, 16), "default": (16, 32, 64), "gpu": (16, 32, 64, 128), "paper": (16, 32, 64, 128, 768)}

#: One choice of the paper or of the layer at a time.
OPTIONS: dict[str, Point] = {
    "the protocol": {},
    "the paper's capacity": {"selection.capacity_factor": 1.25, "selection.eval.capacity_factor": 2.0},
    "full-softmax weights": {"selection.renormalise": False, "selection.eval.renormalise": False},
    "balance loss": {"losses.balance": 0.02},
    "stopped gradient": {"router.stop_gradient": True},
}


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of FIGURE[,SCALE]."""
    figure, scale = variant(arg, FIGURES, SCALES)
    c = base()
    with c.unlocked():
        c.name, c.figure, c.scale = "t5_mc4", figure, scale
        c.arms = ARMS.get(figure, ALL if scale in ("gpu", "paper") else ALL[:-1])
        c.data.name, c.data.vocabulary, c.data.eval_rows = "mc4_jsonl", 2048, 512
        c.experts.name, c.experts.activation, c.experts.count, c.experts.width = "gated_ffn", "gelu", 16, 128
        c.selection.name, c.selection.k, c.selection.renormalise = "top_k", 2, True
        c.selection.eval.name, c.selection.eval.k, c.selection.eval.renormalise = "top_k", 2, True
        c.selection.capacity_rule = "per_token"  # of the figure that has a capacity
        c.dispatch = "auto"
        c.optimizer.name, c.optimizer.schedule, c.optimizer.warmup = "adam", "linear", 100
        c.router.learning_rate = c.experts.learning_rate = 6e-3
        c.batch_size, c.steps, c.eval_every, c.checkpoint.every, c.seed, c.seeds = 64, 1000, 250, 50, 100, 5
        c.mesh.runs_per_batch = 2  # on two cores: one each
        c.checkpoint.final = figure == "transplant"
        if scale == "gpu":
            c.transformer.layers, c.transformer.sparse_layers, c.transformer.heads = 6, 2, 8
            c.transformer.head_dim, c.transformer.dtype = 32, "bfloat16"
            c.data.vocabulary, c.data.input_length, c.batch_size = 8192, 256, 128
            c.steps, c.eval_every, c.checkpoint.every, c.experts.count = 20000, 2000, 500, 32
        if scale == "paper":
            c.transformer.layers, c.transformer.sparse_layers, c.transformer.heads = 12, 3, 12
            c.transformer.head_dim, c.transformer.width, c.experts.width = 64, 256, 256
            c.transformer.init_scale, c.transformer.dtype, c.losses.logits_z = 0.1, "bfloat16", 1e-4
            c.selection.group_size, c.selection.priority, c.selection.min_capacity = 4096, "score", 4
            c.selection.capacity_factor, c.selection.eval.capacity_factor = 1.25, 2.0
            c.data.vocabulary, c.data.input_length, c.batch_size, c.experts.count = 32128, 512, 128, 64
            c.data.temperature = 3.3  # mT5's: probability in proportion to size ** .3
            c.optimizer.schedule, c.optimizer.warmup = "rsqrt", 10000  # T5's: 1 / sqrt(max(step, 10,000))
            c.router.learning_rate = c.experts.learning_rate = 1e-2
            c.steps, c.eval_every, c.checkpoint.every, c.seeds = 500000, 10000, 1000, 3
        if scale == "smoke":
            c.data.name, c.data.tokens, c.data.vocabulary = "generated", "bytes", 320
            c.data.input_length, c.data.eval_rows, c.batch_size = 64, 64, 16
            c.transformer.dim, c.transformer.head_dim, c.experts.count, c.experts.width = 16, 8, 4, 32
            c.transformer.width = 32
            c.steps, c.eval_every, c.checkpoint.every, c.seeds = 40, 20, 20, 2
            c.arms = ARMS.get(figure, ("learned", "frozen", "frozen_balanced", "dense_active"))
        c.router.vocabulary, c.router.choices = c.data.vocabulary, c.selection.k
    return c.lock()


def get_sweep(config: ConfigDict) -> tuple[Point, ...]:
    """The points of the figure."""
    match config.figure:
        case "fig7":
            return product(experts__count=EXPERTS[config.scale])
        case "widths":
            return product(transformer__dim=WIDTHS[config.scale], router__stop_gradient=(False, True))
        case "options":
            plain = {key: _value(config, key) for changes in OPTIONS.values() for key in changes}
            return tuple(plain | changes for changes in OPTIONS.values())
    return ({},)


def _value(config: ConfigDict, key: str):
    for part in key.split("."):
        config = config[part]
    return config


def get_claims(config: ConfigDict) -> tuple[Claim, ...]:
    """What the figure is tested for, at the file's setting."""
    where = {"paper": "gaps_filled"}.get(config.scale, "stand_in")
    at = get_sweep(config)[0] if config.figure == "options" else {}
    if config.figure == "widths":
        at = {"transformer.dim": config.transformer.dim, "router.stop_gradient": False}
    if config.figure == "fig7":
        at = {"experts.count": config.experts.count}

    def accuracy(name, statement, worse, better):
        return Claim(
            "order", name, statement, "yes, significant", where, "eval/accuracy", {"arm": worse}, {"arm": better}, at, "difference"
        )  # fmt: skip

    def loss(name, statement, better, worse, paper="not asked", kind="order"):
        return Claim(
            kind, name, statement, paper, where, "eval/loss", {"arm": better}, {"arm": worse}, at, "difference"
        )

    fair = loss("routed.t5.fair", "learned beats frozen and balanced, in nats", "learned", "frozen_balanced")
    match config.figure:
        case "fig7":
            return (
                accuracy("dikkala.fig7", "trained beats frozen in accuracy, at every count", "frozen", "learned"),
                fair,
            )
        case "transplant":
            return (
                loss("routed.t5.partition", "a trained router helps a network that did not train with it",
                     "transplant", "frozen_balanced"),
                loss("routed.t5.joint", "training router and experts together helps beyond that", "learned", "transplant"),
                loss("routed.t5.hash", "learned beats a balanced hash of the token id", "learned", "hash_token"),
            )  # fmt: skip
        case "widths":
            widest, narrowest = max(WIDTHS[config.scale]), min(WIDTHS[config.scale])
            points = [(dim, stop) for dim in (narrowest, widest) for stop in (False, True)]
            return tuple(
                loss(
                    f"routed.t5.fair-{dim}{'-stopped' if stop else ''}",
                    f"width {dim}, {'gate gradient stopped' if stop else 'gate gradient on'}: learned beats frozen and balanced",
                    "learned",
                    "frozen_balanced",
                )._replace(at={"transformer.dim": dim, "router.stop_gradient": stop})
                for dim, stop in points
            )
        case "options":
            return (fair,)
    claims = (
        accuracy("dikkala.fig5-frozen", "a frozen mixture beats the dense model in accuracy", "dense_active", "frozen"),
        accuracy("dikkala.fig5-trained", "a trained router beats a frozen one in accuracy", "frozen", "learned"),
        fair,
        loss("fan.random", "a frozen random router is as good as a learned one (2402.13089)", "learned", "frozen_balanced",
             "about as good", "null"),
    )  # fmt: skip
    hashed = loss(
        "routed.t5.hash", "learned beats a balanced hash of the token id (2604.14419)", "learned", "hash_token", "yes"
    )
    return (*claims, hashed) if "hash_token" in config.arms else claims


def get_plots(config: ConfigDict) -> tuple[dict, ...]:
    """The figure's own, then how all arms trained and what their routers did."""
    own: tuple[dict, ...]
    watched: tuple[dict, ...] = (
        {"kind": "training", "name": "training", "metrics": ("train/loss", "eval/loss", "eval/accuracy")},
        {"kind": "training", "name": "routers", "metrics": ("router/load_max", "router/entropy_token", "router/dead")},
        {
            "kind": "training",
            "name": "information",
            "metrics": ("router/mi_language", "router/mi_language_given_token"),
        },
        {"kind": "training", "name": "churn", "metrics": ("router/churn_router", "router/churn_features")},
        {"kind": "languages", "name": "languages", "arm": "frozen_balanced"},
    )
    match config.figure:
        case "fig7":
            own = (
                {"kind": "curves", "name": "fig7", "x": "experts.count", "metrics": ("eval/accuracy", "eval/loss")},
                {"kind": "paired", "name": "fig7-paired", "x": "experts.count", "metric": "eval/loss"},
            )
        case "widths":
            own = (
                {
                    "kind": "paired",
                    "name": "widths",
                    "x": "transformer.dim",
                    "by": "router.stop_gradient",
                    "words": {False: "gate gradient on", True: "stopped"},
                    "metric": "eval/loss",
                },
            )
        case "options":
            own = ({"kind": "methods", "name": "options", "methods": _options(config), "metrics": ("eval/loss", "router/dropped", "router/load_max")},)  # fmt: skip
        case _:
            own = (
                {
                    "kind": "paired",
                    "name": "fig5" if config.figure != "transplant" else "transplant",
                    "metric": "eval/loss",
                },
            )
    return (*own, *watched)


def _options(config: ConfigDict) -> dict[str, Point]:
    return dict(zip(OPTIONS, get_sweep(config), strict=True))
