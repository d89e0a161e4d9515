"""Does training the router help a T5 whose layers are too narrow to route by themselves?

Question. Dikkala et al. (2023, 3.7 and C.4) pre-train T5 on mC4 with layers 32 wide. In token accuracy they report
dense below a mixture with a frozen router below one with a trained router; at T5's full width the two mixtures do not
differ, "because earlier layers can route implicitly". Their frozen router cannot balance its load and so overflows its
capacity, and combine weights can grow. Here arms are dropless with weights that sum to 1, both routers also run
balanced, and a hash of the token id and an oracle of the language stand beside them: only the choice of experts is
left.

    routed run --config=t5_mc4:smoke
    routed run --config=t5_mc4 --config.data.directory=DIR
    routed run --config=t5_mc4:widths --config.data.directory=DIR

DIR holds mC4's shards, c4-LANG.tfrecord-NNNNN-of-NNNNN.json.gz and c4-LANG-validation.tfrecord-...; smoke makes its
own text. With --config.data.name=tfds it is TFDS's data_dir with a prepared c4/multilingual.

Figures: --list. Scales: smoke (half a minute; one layer a stack, no hash and no dense net), default (2 CPU cores,
hours), gpu (one accelerator, hours), paper (a TPU pod, days; set mesh.data and mesh.expert).

From the paper: T5 with 12 layers a stack, width 32, FFN 256, 12 heads of 64, 3 sparse layers a stack, top-2, capacity
factors 1.25 and 2.0, Adam, 500,000 steps. `paper` takes the rest from flaxformer's public configuration of the same
architecture (docs/decisions/dikkala2023.md).

Rules of the default scale, fixed before its evaluation seeds ran; none compares learned with frozen.
  shape       d 32, 2 + 2 layers, one sparse in each stack, 4 heads of 16, gated GELU FFN 128, 16 experts, top-2.
  routing     dropless, weights renormalised over the two, no auxiliary loss: no arm can drop, nor grow its weights.
  steps       1,000 of 64 rows, 10 million tokens: two hours of two cores for 5 arms x 5 seeds.
  seeds       100 to 104; fig5: 300 to 304, its tuning seed a million later.
  gate        no verdict unless an arm beats a smoothed bigram model of the targets on the validation rows.
  effect      smallest effect of interest: .01 nats per token.

Expected beforehand: learned below frozen_balanced by some hundredths of a nat, more the narrower the trunk, and more
again when the trunk cannot route (router.stop_gradient).

Found (docs/results/dikkala2023.md, ours.md, without_page.md). Nothing about routing shows in the loss, at any rate,
width or number of experts. With the best rate of every arm (1e-2; seeds 300 to 304) the learned router is .015 nats
behind the frozen balanced router [-.046, .076], and .067 [.012, .122] behind a balanced hash of the token id.

Cost: smoke half a minute; default 100 minutes for fig5 on two cores (28 of its 63 runs tune), 2 hours for widths, 2.5
for fig7.
"""

from __future__ import annotations

from ml_collections import ConfigDict

import routed.papers.dikkala2023  # noqa: F401 (parts of the paper)
from routed.analysis.claims import FROZEN, LEARNED, Claim, Writer
from routed.plan import Figure, Point, make_config, product, value_of

#: Of figure 5. `default` runs them without the last.
ARMS = (
    "learned", "frozen", "frozen_balanced", "learned_balanced", "hash_token", "oracle_language", "dense_active",
    "dense_total"
)  # fmt: skip

# Rule of the rates of the default scale, fixed before its evaluation seeds ran; it looks at no router.
# rates: Adam, one rate for router and all else: 100 steps of warm-up, then linearly to 0. The best of 3e-3, 6e-3, 1e-2,
#     2e-2 for the *dense* twin on a seed that is never evaluated (validation loss 3.75, 3.64, 3.66, 3.98). fig5: the
#     best of these for each arm by itself (rates=tuned), so that mixtures are not judged at the rate of a dense net.
PROTOCOL = {
    "arms": ARMS[:-1], "seed": 100, "seeds": 5,
    "data.name": "mc4_jsonl", "data.vocabulary": 2048, "data.eval_rows": 512,
    "experts.name": "gated_ffn", "experts.activation": "gelu", "experts.count": 16, "experts.width": 128,
    "selection.name": "top_k", "selection.k": 2, "selection.renormalise": True,
    "selection.eval.name": "top_k", "selection.eval.k": 2, "selection.eval.renormalise": True,
    "selection.capacity_rule": "per_token",  # of the figure that has a capacity
    "router.vocabulary": 2048, "router.experts_per_id": 2, "dispatch": "auto",
    "optimizer.name": "adam", "optimizer.schedule": "linear", "optimizer.warmup": 100,
    "router.learning_rate": 6e-3, "experts.learning_rate": 6e-3, "transformer.learning_rate": 6e-3,
    "batch_size": 64, "steps": 1000, "eval_every": 250, "checkpoint.every": 50,
    "mesh.runs_per_batch": 2,  # on two cores: one each
}  # fmt: skip


#: Every arm at the best rate for itself, on seeds that no figure has seen.
TUNED = {"rates": "tuned", "tune.multipliers": (0.5, 1.0, 5 / 3, 10 / 3), "tune.seeds": 1, "seed": 300}


def fig5_only(config: ConfigDict, changes: Point) -> Point:
    """What a scale changes in figure 5; the other figures compare the same arms, at the same rates, at all scales."""
    return changes if config.figure in ("", "fig5") else {}


SCALES = {
    "smoke": lambda config: {
        "data.name": "artificial", "data.tokens": "bytes", "data.vocabulary": 320, "router.vocabulary": 320,
        "data.input_length": 64, "data.eval_rows": 32, "batch_size": 8, "transformer.layers": 1,
        "transformer.dim": 16, "transformer.head_dim": 8, "transformer.width": 32,
        "experts.count": 4, "experts.width": 32, "steps": 20, "eval_every": 10, "checkpoint.every": 10, "seeds": 2,
        "mesh.runs_per_batch": 4,
    } | fig5_only(config, {"arms": ("learned", "frozen", "frozen_balanced")}),
    "default": lambda config: fig5_only(config, TUNED),
    "paper": lambda config: {
        "transformer.layers": 12, "transformer.sparse_layers": 3, "transformer.heads": 12, "transformer.head_dim": 64,
        "transformer.width": 256, "transformer.init_scale": 0.1, "transformer.dtype": "bfloat16",
        "experts.count": 64, "experts.width": 256, "losses.logits_z": 1e-4,
        "selection.group_size": 4096, "selection.priority": "score", "selection.min_capacity": 4,
        "selection.capacity_factor": 1.25, "selection.eval.capacity_factor": 2.0,
        "data.vocabulary": 32128, "router.vocabulary": 32128, "data.input_length": 512, "batch_size": 128,
        "data.temperature": 3.3,  # mT5's: probability in proportion to size ** .3
        # grows to .01 (Vaswani et al. 2017), which T5 holds; then both 1 / sqrt(step)
        "optimizer.schedule": "rsqrt", "optimizer.warmup": 10000,
        "router.learning_rate": 1e-2, "experts.learning_rate": 1e-2, "transformer.learning_rate": 1e-2,
        "steps": 500000, "eval_every": 10000, "checkpoint.every": 1000, "seeds": 3,
    } | fig5_only(config, {"arms": ARMS}),
    "gpu": lambda config: {
        "transformer.layers": 6, "transformer.sparse_layers": 2, "transformer.heads": 8, "transformer.head_dim": 32,
        "transformer.dtype": "bfloat16", "experts.count": 32,
        "data.vocabulary": 8192, "router.vocabulary": 8192, "data.input_length": 256, "batch_size": 128,
        "steps": 20000, "eval_every": 2000, "checkpoint.every": 500,
    } | fig5_only(config, {"arms": ARMS}),
}  # fmt: skip

BALANCED, HASH, DENSE = {"arm": "frozen_balanced"}, {"arm": "hash_token"}, {"arm": "dense_active"}

#: How all arms trained and what their routers did: the end of every figure.
TRAINING: tuple[dict, ...] = (
    {"kind": "training", "name": "training", "metrics": ("train/loss", "eval/loss", "eval/accuracy")},
    {"kind": "training", "name": "routers", "metrics": ("router/load_max", "router/entropy_token", "router/dead")},
    {"kind": "training", "name": "information", "metrics": ("router/mi_language", "router/mi_language_given_token")},
    {"kind": "training", "name": "churn", "metrics": ("router/churn_router", "router/churn_features")},
    {"kind": "languages", "name": "languages", "arm": "frozen_balanced"},
)


def writer(config: ConfigDict, at: Point) -> Writer:
    """Writes claims about nats per token."""
    return Writer("gaps_filled" if config.scale == "paper" else "stand_in", "eval/loss", at, "difference")


def claim_fair(write: Writer) -> Claim:
    """The comparison that the question asks for."""
    return write.order("routed.t5.fair", "learned beats frozen and balanced, in nats", "not asked", LEARNED, BALANCED)


# Figure 5


def claim_fig5(config: ConfigDict) -> tuple[Claim, ...]:
    """Returns the orders of the paper, the fair orders, the gain of the mixture, and orders of two later papers."""
    write = writer(config, {})
    dense = (
        write.order("dikkala.fig5-frozen", "a frozen mixture beats the dense model in accuracy", "yes, significant",
                    DENSE, FROZEN, metric="eval/accuracy"),
        write.order("routed.t5.mixture", "a frozen and balanced mixture beats the dense model, in nats", "not asked",
                    BALANCED, DENSE),
    )  # fmt: skip
    statement = "learned and balanced beats frozen and balanced, in nats"
    both = write.order("routed.t5.fair-balanced", statement, "not asked", {"arm": "learned_balanced"}, BALANCED)
    claims = (
        write.order("dikkala.fig5-trained", "a trained router beats a frozen one in accuracy", "yes, significant",
                    FROZEN, LEARNED, metric="eval/accuracy"),
        claim_fair(write),
        write.null("fan.random", "a frozen random router is as good as a learned one (2402.13089)", "about as good",
                   LEARNED, BALANCED),
    )  # fmt: skip
    statement = "learned beats a balanced hash of the token id (2604.14419)"
    hashed = write.order("routed.t5.hash", statement, "yes", LEARNED, HASH)
    asked = (*dense, *claims, hashed, both)
    return tuple(claim for claim in asked if {side["arm"] for side in claim.sides()} <= set(config.arms))


FIG5 = Figure(
    "Fig. 5: trained, frozen, hashed and dense layers, paired by seed",
    claims=claim_fig5,
    plots=lambda config: ({"kind": "paired", "name": "fig5", "metric": "eval/loss"}, *TRAINING),
)


# Figure 7

COUNTS = {"smoke": (2, 4), "default": (4, 16, 64), "gpu": (8, 32, 128), "paper": (8, 16, 32, 64, 128)}


def claim_fig7(config: ConfigDict) -> tuple[Claim, ...]:
    """The order of the paper and the fair one, at the file's number of experts."""
    write = writer(config, {"experts.count": config.experts.count})
    statement = f"trained beats frozen in accuracy, with {config.experts.count} experts"
    trained = write.order("dikkala.fig7", statement, "yes, significant", FROZEN, LEARNED, metric="eval/accuracy")
    return trained, claim_fair(write)


FIG7 = Figure(
    "Fig. 7: trained and frozen routers against the number of experts",
    changes={"arms": ("learned", "frozen", "frozen_balanced")},
    sweep=lambda config: product(experts__count=COUNTS[config.scale]),
    claims=claim_fig7,
    plots=lambda config: (
        {"kind": "curves", "name": "fig7", "x": "experts.count", "metrics": ("eval/accuracy", "eval/loss")},
        {"kind": "paired", "name": "fig7-paired", "x": "experts.count", "metric": "eval/loss"},
        *TRAINING,
    ),
)


# Does the trunk route?

TRUNKS = {"smoke": (8, 16), "default": (16, 32, 64), "gpu": (16, 32, 64, 128), "paper": (16, 32, 64, 128, 768)}
GRADIENTS = {False: "gate gradient on", True: "stopped"}


def claim_widths(config: ConfigDict) -> tuple[Claim, ...]:
    """The fair order at the least and the largest width, with and without the gate's gradient."""
    narrowest, *_, widest = TRUNKS[config.scale]
    return tuple(
        writer(config, {"transformer.dim": dim, "router.stop_gradient": stopped}).order(
            f"routed.t5.fair-{dim}{'-stopped' if stopped else ''}",
            f"width {dim}, gate gradient {'stopped' if stopped else 'on'}: learned beats frozen and balanced",
            "not asked", LEARNED, BALANCED,
        )
        for dim in (narrowest, widest)
        for stopped in (False, True)
    )  # fmt: skip


WIDTHS = Figure(
    "what training the router is worth against the trunk's width, with and without the gate's gradient",
    changes={"arms": ("learned", "frozen_balanced")},
    sweep=lambda config: product(transformer__dim=TRUNKS[config.scale], router__stop_gradient=(False, True)),
    claims=claim_widths,
    plots=lambda config: (
        {"kind": "paired", "name": "widths", "x": "transformer.dim", "metric": "eval/loss",
         "by": "router.stop_gradient", "words": GRADIENTS},
        *TRAINING,
    ),
)  # fmt: skip


# Whose partition is it?


def claim_transplant(config: ConfigDict) -> tuple[Claim, ...]:
    """What a trained router is worth by itself, what training it together with the experts adds, and a hash."""
    order, transplant = writer(config, {}).order, {"arm": "transplant"}
    return (
        order("routed.t5.partition", "a trained router helps a network that did not train with it", "not asked",
              transplant, BALANCED),
        order("routed.t5.joint", "training router and experts together helps beyond that", "not asked",
              LEARNED, transplant),
        order("routed.t5.hash", "learned beats a balanced hash of the token id", "not asked", LEARNED, HASH),
    )  # fmt: skip


TRANSPLANT = Figure(
    "a trained router, frozen, in a network that starts anew",
    changes={"arms": ("learned", "transplant", "frozen_balanced", "hash_token"), "checkpoint.final": True},
    claims=claim_transplant,
    plots=lambda config: ({"kind": "paired", "name": "transplant", "metric": "eval/loss"}, *TRAINING),
)


# One choice of the paper or of the layer at a time

CHOICES: dict[str, Point] = {
    "the protocol": {},
    "the paper's capacity": {"selection.capacity_factor": 1.25, "selection.eval.capacity_factor": 2.0},
    "full-softmax weights": {"selection.renormalise": False, "selection.eval.renormalise": False},
    "balance loss": {"losses.balance": 0.02},
    "stopped gradient": {"router.stop_gradient": True},
}


def choices(config: ConfigDict) -> dict[str, Point]:
    """Every choice by name, with the config's values of what the others change."""
    protocol = {key: value_of(config, key) for changes in CHOICES.values() for key in changes}
    return {name: protocol | changes for name, changes in CHOICES.items()}


def claim_options(config: ConfigDict) -> tuple[Claim, ...]:
    """The fair order at the protocol, tried with every choice."""
    protocol = choices(config)["the protocol"]
    return (claim_fair(writer(config, protocol)._replace(over=tuple(protocol))),)


OPTIONS = Figure(
    "the paper's capacity, its combine weights, a balance loss and the stopped gradient, one at a time",
    changes={"arms": ("learned", "frozen", "frozen_balanced")},
    sweep=lambda config: tuple(choices(config).values()),
    claims=claim_options,
    plots=lambda config: (
        {"kind": "methods", "name": "options", "methods": choices(config),
         "metrics": ("eval/loss", "router/dropped", "router/load_max")},
        *TRAINING,
    ),
)  # fmt: skip

FIGURES = {"": FIG5, "fig5": FIG5, "fig7": FIG7, "widths": WIDTHS, "transplant": TRANSPLANT, "options": OPTIONS}


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of FIGURE[,SCALE]."""
    return make_config("t5_mc4", arg, FIGURES, PROTOCOL, SCALES)
