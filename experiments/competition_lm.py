"""Do competing experts make a better language model than experts chosen by a score, and do they at equal compute?

Question. Pham et al. (2024, CompeteSMoE) report .014 bits per character less than plain SMoE at their tiny size, where
seeds spread by .005 to .009. Their competing steps run all experts, which their comparison does not count. Here SMoE
trains for as many more steps as competition costs, and controls remove one thing at a time: the target's meaning
(norms of other tokens), the winners' merit (norms dealt anew, and taught as dealt), the winners (all experts run and
learn, none wins), the winners' part in the output (only the router learns of them).

    routed run --config=competition_lm:smoke
    routed run --config=competition_lm --config.data.directory=DIR           # table 9
    routed run --config=competition_lm:decisive --config.data.directory=DIR  # at equal FLOPs, with controls

DIR holds train.txt, valid.txt and test.txt, as text8 and enwik8 are laid out (for enwik8 and its like
--config.data.tokens=bytes --config.data.vocabulary=260, for table2 but its smoke also --config.router.vocabulary=260);
smoke makes its own text.

Figures: --list; released has all differences of paper and released code together (PRESETS). Scales: smoke (half a
minute; a figure's first two arms), default (2 CPU cores), gpu (the paper's tiny size), paper (its small), medium.
Table 3 is competition_tuning.py, Theorems 4.1 and 4.2 competition_theory.py.

From the paper: decoder, 16 experts, top-2, weights that sum to 1, experts with one hidden layer as wide as the model,
no balance loss, lambda = .05, evaluated by the router alone; test at the best validation. Its equations: the router
learns softmax(TopK(norms)) with softmax(TopK(scores)), with no gradient to the experts or the layers below; the
winners are the layer's output (section 3.1).

Rules of the default scale, fixed before its evaluation seeds ran; none compares competition with SMoE. Methods of
table2 and details of flops, fig3 and options: docs/decisions/pham2024.md.
  loss        of flops and decisive: the last test loss, in nats (all else at the best validation, as the paper).
  lambda      .05, weight 1 of the router's loss: not cross-validated, where the paper chooses lambda, then alpha.
  gate        no verdict on a claim unless both of its arms beat an interpolated 5-gram of the training text on the
              validation rows.
  effect      smallest effect of interest: .01 bits per character. seeds: 3100 on.

Expected: a difference of .01 bits or less at equal steps, and SMoE ahead at equal FLOPs; no jump as lambda tends to 0
(share 0 is SMoE bit for bit), so the paper's 1.733 at lambda = .01 is not visible. Tables 4 and 5: behind at every
lambda and alpha (GLaM's half was added after Switch's was known).

Found on books and newsgroup letters in text8's alphabet (25 MB): docs/results, docs/decisions/pham2024.md. At equal
steps competition is .054 bits behind [.044, .064]; at equal FLOPs .035 nats [.025, .045] (lambda = .05). The short
figures have it behind at every lambda, alpha, K, rate and kind of block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

import routed.papers.pham2024  # noqa: F401 (parts of the paper)
from routed.analysis.claims import FROZEN, LEARNED, Claim, Writer
from routed.contracts import UserError
from routed.models import flops_of_decoder_row
from routed.plan import Figure, Point, make_config, override, product, value_of
from routed.plan.arms import ARMS, Arm
from routed.plan.experiment import Scales

COMPETE = {"arm": "compete"}
COMPETING = {"selection.name": "compete"}
CONTROLS = ("compete_shuffled", "compete_dense", "compete_random", "compete_distil")


def both(**values: Any) -> Point:
    """Settings of a selection, in training and at evaluation."""
    return {f"selection.{node}{key}": value for node in ("", "eval.") for key, value in values.items()}


#: What large models do today, of two experts a token as SMoE has; and what most of them did before, a loss of uneven
#: load.
_BIAS = {"selection.balance_rate": 1e-3}
_GROUPS = both(name="group_limited", expert_groups=4, groups_kept=2)
_SHARED = {"transformer.shared_expert": True} | both(k=1, renormalise=False)
ARMS["sigmoid_balanced"] = Arm(both(name="sigmoid") | _BIAS, "sigmoid, balancing bias", "#7B3FF2")
ARMS["group_limited"] = Arm(_GROUPS | _BIAS, "within 2 of 4 groups, balancing bias", "#117733")
ARMS["shared_expert"] = Arm(_SHARED, "a shared expert and one chosen", "#4477AA")
ARMS["balance_loss"] = Arm({"losses.balance": 0.01}, "learned, balance loss .01", "#A6761D")

# Rules of the default scale, fixed before its evaluation seeds ran; none compares competition with SMoE.
# shape: 3 layers of width 64, all sparse, 4 heads of 16, T5's relative buckets, pre-norm, rows of 128 characters, 8 a
#     step: many small steps, as large batches leave a 5-gram unbeaten in this time. No dropout, no cached states.
# steps: 12,000 (12 million characters): 60 minutes of two cores for 2 arms x 10 seeds.
# rates: Adam, 200 steps of warm-up, then linearly to 0. 9e-3 is the best for *SMoE*: validation loss after 1,000 steps,
#     seed 9000, of 1e-3, 3e-3, 9e-3 and (as that was the edge) 2.7e-2: 2.287, 1.919, 1.762, 1.794 nats. In table2 every
#     arm has its best of a third, once and three times that rate, by the validation loss of a seed that is not
#     evaluated (rates=tuned), in each kind of block. Elsewhere all arms have 9e-3; at paper scale, the paper's 7e-4.
# light: every other figure: 1,500 steps, an eighth, with four seeds. No arm beats the 5-gram so soon, so these have
#     estimates with intervals and no verdict. --config.steps=12000 --config.eval_every=1000 is table 9's length.
# decisive: two controls separate the target from the dense steps; seeds 3100 to 3103. Expected: competition and
#     shuffled targets behind by .03 to .05 nats, dense steps by less than .01; at lambda = .01 behind by .01 to .025;
#     winners that only teach (--config.arms=learned,compete_distil) by 0 to .015.
# cost: `longer` SMoE: steps times the ratio of model FLOPs, with as many evaluations (within 4 steps; with checkpoints,
#     rounded up to them). Losers of a contest compute forward only: 2.23 trained experts a token at lambda = .05, where
#     2.7 compute. Dense steps cost 2.7 and are compared with the same SMoE: in their favour.
PROTOCOL = {
    "arms": ("learned", "compete"), "seed": 3100, "seeds": 10, "model": "decoder",
    "data.name": "files", "data.tokens": "characters", "data.vocabulary": 30, "data.input_length": 128,
    "data.eval_rows": 1024, "router.vocabulary": 30, "router.experts_per_id": 2, "router.dim": 16,
    "transformer.layers": 3, "transformer.sparse_layers": 3, "transformer.dim": 64, "transformer.heads": 4,
    "transformer.head_dim": 16, "transformer.ffn": "ffn", "transformer.width": 64,
    "experts.name": "mlp", "experts.depth": 2, "experts.width": 64, "experts.count": 16, "dispatch": "auto",
    "selection.name": "top_k", "selection.k": 2, "selection.eval.name": "top_k", "selection.eval.k": 2,
    "selection.competition_rate": 0.05, "optimizer.name": "adam", "optimizer.schedule": "linear",
    "optimizer.warmup": 200,
    "router.learning_rate": 9e-3, "experts.learning_rate": 9e-3, "transformer.learning_rate": 9e-3,
    "batch_size": 8, "steps": 12000, "eval_every": 1000, "checkpoint.every": 500,
    "mesh.runs_per_batch": 2,  # on two cores: one each
}  # fmt: skip

#: Scale -> the fewest steps at which arms are known to beat the 5-gram, and the page that says so.
COMPETENT = {"default": (12000, "competition_lm")}

#: Of every figure but table 9, of whose steps it has an eighth: what two cores have time for.
LIGHT = {"steps": 1500, "eval_every": 375, "checkpoint.every": 0, "data.eval_rows": 512, "seeds": 4}

#: Where methods are compared: each at the best rate for itself, on a seed that no figure evaluates.
TUNED = {"rates": "tuned", "tune.multipliers": (1 / 3, 1.0, 3.0), "tune.seeds": 1}

#: The paper's tiny (its size: inferred from logs of the released code).
_TINY = {
    "transformer.dim": 264, "transformer.heads": 8, "transformer.head_dim": 33, "transformer.width": 264,
    "transformer.norm": "post", "experts.width": 264, "data.input_length": 512, "batch_size": 48,
    "router.learning_rate": 7e-4, "experts.learning_rate": 7e-4,
    "transformer.learning_rate": 7e-4, "optimizer.schedule": "constant", "optimizer.warmup": 3000,
    "transformer.dtype": "bfloat16",
}  # fmt: skip


def _small(config: ConfigDict) -> dict[str, Any]:
    """The paper's small, of twice tiny's layers."""
    return {
        **_TINY, "transformer.layers": 2 * config.transformer.layers,
        "transformer.sparse_layers": 2 * config.transformer.sparse_layers,
        # None where a figure has none: what SMoE trains longer by is no whole number of checkpoints.
        "steps": 60000, "eval_every": 1000, "checkpoint.every": 1000 if config.checkpoint.every else 0, "seeds": 5,
        "rates": "paper",  # its own, one for all methods
    }  # fmt: skip


#: What the paper's medium has otherwise than its small.
_MEDIUM = {
    "transformer.layers": 8, "transformer.sparse_layers": 8, "transformer.dim": 352, "transformer.head_dim": 44,
    "transformer.width": 352, "experts.width": 352, "steps": 80000,
}  # fmt: skip

SCALES: Scales = {
    "smoke": lambda config: {
        "data.name": "artificial", "data.languages": ("qaa",), "data.input_length": 16, "data.eval_rows": 16,
        "batch_size": 4, "transformer.layers": 2, "transformer.sparse_layers": 1, "transformer.dim": 8,
        "transformer.head_dim": 4, "transformer.heads": 2, "transformer.width": 8, "experts.count": 4,
        "experts.width": 8, "selection.competition_rate": 0.3, "steps": 20, "eval_every": 10,
        "checkpoint.every": 10 if config.checkpoint.every else 0, "seeds": 2, "arms": config.arms[:2],
        "mesh.runs_per_batch": 4,
    },
    "default": lambda config: {},
    "gpu": lambda config: {**_TINY, "steps": 20000, "eval_every": 1000},
    "paper": _small,
    "medium": lambda config: _small(config) | _MEDIUM,
}  # fmt: skip

BITS = "test/bits"
#: The paper's texts of such tokens, of which it has bits per character; beside bits of a piece these say nothing, and
#: are left out.
TEXTS = {"characters": "text8", "bytes": "enwik8"}


def writer(config: ConfigDict, at: Point, metric: str = BITS) -> Writer:
    """Returns a writer of claims about bits per character at the best validation; the text is a stand-in."""
    return Writer("scaled" if config.scale == "smoke" else "stand_in", metric, at, "difference")


def longer(config: ConfigDict, share: float) -> Point:
    """Returns the steps in which SMoE has the FLOPs of competition in the config's steps, with as many evaluations."""
    cost = flops_of_decoder_row(override(config, COMPETING | {"selection.competition_rate": share}))
    ratio, unit = (
        cost / flops_of_decoder_row(override(config, {"selection.name": "top_k"})),
        config.checkpoint.every or 1,
    )
    every = unit * math.ceil(config.eval_every * ratio / unit)
    if every > 1.01 * math.ceil(config.eval_every * ratio):
        raise UserError(
            f"config key checkpoint.every={unit}: rounds the {config.eval_every * ratio:,.0f} steps between "
            f"evaluations of SMoE of as many FLOPs"
            f" up to {every:,}; use 0 or a divisor of that"
        )
    return {"steps": config.steps // config.eval_every * every, "eval_every": every}


# Table 9

TRAINING: tuple[dict, ...] = (
    {"kind": "training", "name": "training", "metrics": ("train/loss", "eval/loss", BITS)},
    {"kind": "training", "name": "routers", "metrics": ("router/load_max", "router/entropy_token", "router/alike")},
)
PAIRED = {"kind": "paired", "name": "bits", "metric": BITS}


def claim_table9(config: ConfigDict) -> tuple[Claim, ...]:
    """The paper's order, its two averages beside ours, and its motive: less collapse."""
    write = writer(config, {})
    beside = (
        write.beside("pham.table9.competesmoe", "bits per character of CompeteSMoE, tiny, enwik8", 1.3064, COMPETE),
        write.beside("pham.table9.smoe", "bits per character of SMoE, tiny, enwik8", 1.32),
    )
    return (
        write.order("pham.table9", "competition has fewer bits per character than SMoE",
                    "1.306 against 1.320 (p = .016)", COMPETE, LEARNED),
        *(beside if config.data.tokens in TEXTS else ()),
        write.order("routed.competition.lm.alike", "competition makes the experts' outputs less alike",
                    "less collapse", COMPETE, LEARNED,
                    metric="router/alike"),
        write.order("routed.competition.lm.load", "competition loads the most loaded expert less", "less collapse",
                    COMPETE, LEARNED,
                    metric="router/load_max"),
    )  # fmt: skip


TABLE9 = Figure(
    "Table 9: competition and SMoE, paired by seed", claims=claim_table9, plots=lambda config: (PAIRED, *TRAINING)
)

# At equal FLOPs

SHARES = {"smoke": (0.3,), "default": (0.01, 0.03, 0.05, 0.09, 0.3, 1.0)}
#: Controls by the share at which they run: at the paper's own all of them do. Two cores have no time for two of them at
#: small shares.
CONTROLLED = {0.05: CONTROLS}
UNCONTROLLED = {"default": (0.01, 0.03, 0.09)}


def shares_of(config: ConfigDict) -> tuple[float, ...]:
    """The values of lambda of a scale; for `decisive`, the config's."""
    if config.figure == "decisive":
        return (config.selection.competition_rate,)
    return SHARES.get(config.scale, SHARES["default"])


def arms_at(config: ConfigDict, share: float) -> tuple[str, ...]:
    """Those of the config's arms that run with this share; of `decisive` all."""
    if config.figure == "decisive":
        return tuple(config.arms)
    few = () if share in UNCONTROLLED.get(config.scale, ()) else CONTROLS[:2]
    return tuple(arm for arm in config.arms if arm not in CONTROLS or arm in CONTROLLED.get(share, few))


def flops(config: ConfigDict) -> tuple[Point, ...]:
    """Each share for as many steps, and SMoE for as many FLOPs."""
    same = {"steps": config.steps, "eval_every": config.eval_every}
    return tuple(
        {"selection.competition_rate": share, **schedule, "arms": arms}
        for share in shares_of(config)
        for schedule, arms in ((same, arms_at(config, share)), (longer(config, share), ("learned",)))
    )


def decisive(config: ConfigDict) -> tuple[Point, ...]:
    """As `flops`, without SMoE of as many steps, which table 9 has."""
    same, longest = flops(config)
    return same | {"arms": tuple(arm for arm in same["arms"] if arm != "learned")}, longest


def claim_flops(config: ConfigDict) -> Iterator[Claim]:
    """At each share: competition and each of its controls against SMoE of as many FLOPs."""
    write = writer(config, {}, "test/loss")
    for share in shares_of(config):
        at = {"selection.competition_rate": share}
        for arm in (arm for arm in arms_at(config, share) if arm != "learned"):
            side = {"arm": arm, **at, "steps": config.steps, "eval_every": config.eval_every}
            name = arm.replace("compete_", "").replace("compete", "competition")
            statement = f"lambda = {share:g}: {name} has a lower loss than SMoE of as many FLOPs as competition"
            fair = LEARNED | at | longer(config, share)
            yield write.order(
                f"routed.competition.lm.{config.figure}.{share:g}.{name}", statement, "not asked", side, fair
            )


FLOPS = Figure(
    "competition and controls against lambda, paired with SMoE of as many FLOPs",
    LIGHT | {"arms": ("learned", "compete", *CONTROLS)},
    sweep=flops,
    claims=lambda config: tuple(claim_flops(config)),
    plots=lambda config: (
        {"kind": "equal_cost", "name": "flops", "x": "selection.competition_rate", "steps": config.steps,
         "dear": {share: longer(config, share)["steps"] for share in shares_of(config)},
         "metrics": ("test/loss", "router/mi_token", "router/dead", "router/load_max", "router/alike")},
    ),
    computed=("steps", "eval_every", "arms"),
)  # fmt: skip

DECISIVE = FLOPS._replace(
    line=(
        "competition and controls at one lambda and equal FLOPs after all of table 9's steps, where arms beat the "
        "5-gram"
    ),
    changes={"arms": ("learned", "compete", *CONTROLS[:2]), "seeds": 4, "checkpoint.every": 0},
    sweep=decisive,
)

# Table 2

#: Sparse layers of as many layers: all of them (Switch), or every second (GLaM, of twice as many layers).
BLOCKS = {"switch": 1, "glam": 2}
#: What pictures call them.
NAMES = {"switch": "Switch's blocks (every layer is sparse)", "glam": "GLaM's blocks (every second layer is sparse)"}


def blocks(config: ConfigDict) -> dict[str, Point]:
    """The points of both kinds of block, with the same number of sparse layers."""
    sparse = config.transformer.sparse_layers
    return {
        name: {"transformer.layers": every * sparse, "transformer.sparse_layers": sparse}
        for name, every in BLOCKS.items()
    }


def by_block(config: ConfigDict, prefix: str = "", **asked: Any) -> tuple[dict, ...]:
    """A picture of differences from SMoE for each kind of block."""
    return tuple(
        PAIRED | {"name": prefix + block, "title": NAMES[block], "at": at, **asked}
        for block, at in blocks(config).items()
    )


#: Bits per character of the paper, of wikitext103 perplexities, by block and method.
COLUMNS = ("enwik8-small", "enwik8-medium", "text8-small", "text8-medium", "wikitext103-small", "wikitext103-medium")
TABLE_A = {
    ("switch", "compete"): (1.177, 1.115, 1.289, 1.220, 83.750, 31.299),
    ("switch", "learned"): (1.191, 1.130, 1.291, 1.231, 85.061, 34.145),
    ("switch", "frozen"): (1.202, 1.138, 1.308, 1.237, 86.656, 35.392),
    ("switch", "xmoe"): (1.198, 1.126, 1.291, 1.244, 84.686, 34.322),
    ("switch", "stable"): (1.194, 1.124, 1.300, 1.238, 85.267, 34.179),
    ("glam", "compete"): (1.175, 1.081, 1.281, 1.211, 54.380, 34.233),
    ("glam", "learned"): (1.186, 1.139, 1.286, 1.235, 54.856, 34.672),
    ("glam", "frozen"): (1.191, 1.123, 1.308, 1.238, 57.284, 35.640),
    ("glam", "xmoe"): (1.187, 1.111, 1.289, 1.219, 55.618, 34.613),
    ("glam", "stable"): (1.189, 1.109, 1.291, 1.217, 54.730, 35.320),
}


def column(config: ConfigDict) -> str:
    """The column of the paper's table that a config is nearest to; of pieces of words it is that of words."""
    return f"{TEXTS.get(config.data.tokens, 'wikitext103')}-{'medium' if config.scale == 'medium' else 'small'}"


#: Methods of which the paper has no number here.
UNASKED = (
    "stable_coded", "xmoe_coded", "smoe_dropout", "hyper", "learned_balanced", "frozen_balanced", "balance_loss",
    "hash_token", "sigmoid_balanced", "group_limited", "shared_expert", "decoder_active",
)  # fmt: skip


def methods(config: ConfigDict, block: str) -> tuple[str, ...]:
    """Returns the arms of a block: all with Switch's block, the paper's with GLaM's block at default scale."""
    return tuple(
        arm for arm in config.arms if block == "switch" or config.scale != "default" or (block, arm) in TABLE_A
    )


def claim_table2(config: ConfigDict) -> Iterator[Claim]:
    """Returns claims that competition is best with each block, and the paper's bits (its perplexities are of words)."""
    name = column(config)
    paper = {key: numbers[COLUMNS.index(name)] for key, numbers in TABLE_A.items()}
    for (block, arm), number in paper.items():
        if arm not in config.arms:
            continue
        write = writer(config, blocks(config)[block])
        if config.data.tokens in TEXTS:
            statement = f"{block}, {arm}: bits per character, {name}"
            yield write.beside(f"pham.table2.{block}.{name}.{arm}", statement, number, {"arm": arm})
        if arm != "compete":
            statement = f"{block}: competition has fewer bits than {arm}"
            both_numbers = f"{paper[block, 'compete']:.5g} against {number:.5g} ({name})"
            yield write.order(f"pham.table2.{block}.{arm}", statement, both_numbers, COMPETE, {"arm": arm})
    for block, at in blocks(config).items():
        for arm in (arm for arm in UNASKED if arm in methods(config, block)):
            statement = f"{block}: competition has fewer bits than {arm}"
            yield writer(config, at).order(
                f"routed.competition.lm.{block}.{arm}", statement, "not asked", COMPETE, {"arm": arm}
            )


TABLE2 = Figure(
    "Table 2: Switch and GLaM blocks x methods",
    {"arms": ("learned", "compete", "frozen", "xmoe", "stable", *UNASKED)} | LIGHT | TUNED,
    sweep=lambda config: tuple(point | {"arms": methods(config, block)} for block, point in blocks(config).items()),
    claims=lambda config: tuple(claim_table2(config)),
    plots=by_block,
)  # fmt: skip

# Figures 2 and 3


def claim_fig2(config: ConfigDict) -> Iterator[Claim]:
    """Faster convergence: competition is below SMoE after each number of steps."""
    for at in early(config):
        statement = f"after {at['steps']:,} steps competition has a lower validation loss than SMoE"
        yield writer(config, at, "eval/loss").order(
            f"pham.fig2.{at['steps']}", statement, "converges faster", COMPETE, LEARNED
        )


def early(config: ConfigDict) -> tuple[Point, ...]:
    """A quarter, a half and all of the steps, in whole evaluations; each with a schedule of its own."""
    whole = config.steps // config.eval_every
    return product(steps=tuple(sorted({config.eval_every * max(1, whole // part) for part in (4, 2, 1)})))


FIG2 = Figure(
    "Fig. 2: competition and SMoE after fewer steps",
    LIGHT | {"gate.horizon": 1.0},  # its claims are of these steps, and of no more
    sweep=early,
    claims=lambda config: tuple(claim_fig2(config)),
    plots=lambda config: ({"kind": "paired", "name": "fig2", "x": "steps", "metric": "eval/loss"},),
    computed=("steps",),
)

ACTIVE = {"smoke": (2, 4), "default": (1, 2, 4, 8, 16)}


def active(config: ConfigDict) -> tuple[Point, ...]:
    """K from 1 to all experts.

    Of K = 1 the renormalised weight is 1, and SMoE would learn nothing: it weighs by its probability.
    """
    return tuple(both(k=k, renormalise=k > 1) for k in ACTIVE.get(config.scale, ACTIVE["default"]))


def claim_fig3(config: ConfigDict) -> Iterator[Claim]:
    """At each K competition is below SMoE, and SMoE below the frozen router."""
    for at in active(config):
        write, k = writer(config, at), at["selection.k"]
        yield write.order(
            f"pham.fig3.{k}.compete", f"K = {k}: competition has fewer bits than SMoE", "yes", COMPETE, LEARNED
        )
        if "frozen" in config.arms:
            statement = f"K = {k}: %s has fewer bits than SMoE-Fixed"
            yield write.order(f"pham.fig3.{k}.fixed", statement % "SMoE", "yes", LEARNED, FROZEN)
            yield write.order(f"pham.fig3.{k}.worst", statement % "competition", "yes", COMPETE, FROZEN)


FIG3 = Figure(
    "Fig. 3: experts per token",
    LIGHT | {"arms": ("learned", "compete", "frozen")},
    sweep=active,
    claims=lambda config: tuple(claim_fig3(config)),
    plots=lambda config: (
        {"kind": "paired", "name": "fig3", "x": "selection.k", "metric": BITS},
        {"kind": "curves", "name": "bits", "x": "selection.k", "metrics": (BITS, "router/load_max")},
    ),
)

# Tables 4, 5, 10

#: SMoE's bits, tiny Switch, enwik8 (Table 9). Of tiny GLaM the paper has none, and the text says that competition is
#: better but at the least lambda.
SMOE = 1.32
#: lambda -> bits of the paper's tiny, enwik8, by block.
TABLE_C = {
    "switch": {0.01: 1.733, 0.03: 1.330, 0.05: 1.303, 0.07: 1.310, 0.09: 1.309},
    "glam": {0.01: 1.587, 0.03: 1.366, 0.05: 1.298, 0.07: 1.300, 0.09: 1.294},
}

NAMED = {"learned": "SMoE", "compete": "competition"}
#: In the ids of orders, of which Switch's came first.
ORDER = {"switch": "", "glam": "glam."}


def cells(config: ConfigDict, table: dict[str, dict[float, float]], few: tuple[float, ...]) -> list[tuple[str, float]]:
    """Block and value of each cell of one of the paper's tables; of a smoke run, of a few values."""
    return [(block, value) for block, row in table.items() for value in (few if config.scale == "smoke" else row)]


def against(block: str, bits: float) -> str:
    """What the paper says of a cell beside SMoE."""
    return f"{bits} against {SMOE:.3f}" if block == "switch" else f"so says the text ({bits}; SMoE not told)"


def claim_levels(
    config: ConfigDict,
    prefix: str,
    name: str,
    points: dict[tuple[str, float], Point],
    table: dict[str, dict[float, float]],
    best: float,
    level: tuple[float, ...],
) -> Iterator[Claim]:
    """Competition is as good at the values `level` as at the best: so saturated, or so robust, as the text says."""
    for (block, value), at in points.items():
        if value in level and (block, best) in points:
            statement = f"{block}: competition has as many bits with {name} = {value:g} as with {best:g}"
            reported = f"{table[block][value]} and {table[block][best]}"
            sides = COMPETE | at, COMPETE | points[block, best]
            yield writer(config, blocks(config)[block]).null(
                f"{prefix}.{ORDER[block]}{value:g}.level", statement, reported, *sides
            )


def lambdas(config: ConfigDict) -> dict[tuple[str, float], Point]:
    """The paper's lambdas with each block."""
    pairs = cells(config, TABLE_C, (0.01, 0.09))
    return {(block, share): blocks(config)[block] | {"selection.competition_rate": share} for block, share in pairs}


def claim_table4(config: ConfigDict) -> Iterator[Claim]:
    """Each lambda against SMoE, at equal steps, as the paper has it; and its bits beside ours."""
    for (block, share), at in lambdas(config).items():
        bits, write = TABLE_C[block][share], writer(config, at)
        if config.data.tokens in TEXTS:
            statement = f"{block}, lambda = {share:g}: bits per character, tiny, enwik8"
            yield write.beside(f"pham.table4.{block}.{share:g}", statement, bits, COMPETE)
        is_better = bits < SMOE if block == "switch" else share > 0.01
        better, worse = (COMPETE, LEARNED) if is_better else (LEARNED, COMPETE)
        statement = f"{block}, lambda = {share:g}: {NAMED[better['arm']]} has fewer bits than {NAMED[worse['arm']]}"
        yield write.order(f"pham.table4.{ORDER[block]}{share:g}.order", statement, against(block, bits), better, worse)
    yield from claim_levels(config, "pham.table4", "lambda", lambdas(config), TABLE_C, 0.05, (0.07, 0.09))


TABLE4 = Figure(
    "Table 4: lambda at equal steps, with either block; is it continuous as lambda tends to 0?",
    LIGHT,
    sweep=lambda config: tuple(lambdas(config).values()),
    claims=lambda config: tuple(claim_table4(config)),
    plots=lambda config: by_block(config, "table4-", x="selection.competition_rate"),
)

#: The loss of the released code at the time of its last version (2024-03-24): full softmax of the router, nothing
#: detached, errors averaged over experts too, and alpha multiplies the router's loss, .01 alpha for each layer.
RELEASED: Point = {
    "selection.distillation_softmax": "all", "selection.distillation_detached": False,
    "selection.distillation_trunk": True,
    "selection.distillation_mean": "entries", "selection.distillation_coefficient": 0.05,
}  # fmt: skip
#: How its experts start and that its routers have a bias, SMoE's too; and that most of its scripts compete at every
#: step.
_STARTS: Point = {"experts.init": "stacked", "router.bias": True}
_ALWAYS: Point = {"selection.competition_rate": 1.0}
#: alpha -> bits of the paper's tiny, enwik8, by block.
TABLE_D = {
    "switch": {0.1: 1.306, 1.0: 1.307, 5.0: 1.303, 25.0: 1.321, 250.0: 1.328},
    "glam": {0.1: 1.280, 1.0: 1.285, 5.0: 1.298, 25.0: 1.304, 250.0: 1.319},
}
#: Pictures count in alpha, as the paper does.
ALPHA = ("alpha (the coefficient, selection.distillation_coefficient, is .01 alpha)", 100.0)


def alphas(config: ConfigDict) -> dict[tuple[str, float], Point]:
    """The released code with each block, at each alpha."""
    return {
        (block, alpha): blocks(config)[block] | RELEASED | {"selection.distillation_coefficient": 0.01 * alpha}
        for block, alpha in cells(config, TABLE_D, (5.0, 250.0))
    }


def claim_table5(config: ConfigDict) -> Iterator[Claim]:
    """Returns claims about each alpha against SMoE (the paper's text and Table 9 disagree), and the paper's bits."""
    for (block, alpha), at in alphas(config).items():
        bits, write = TABLE_D[block][alpha], writer(config, at)
        if config.data.tokens in TEXTS:
            statement = f"{block}, alpha = {alpha:g}: bits per character, tiny, enwik8"
            yield write.beside(f"pham.table5.{block}.{alpha:g}", statement, bits, COMPETE)
        statement = f"{block}, alpha = {alpha:g}: competition has fewer bits than SMoE"
        yield write.order(
            f"pham.table5.{ORDER[block]}{alpha:g}.order", statement, against(block, bits), COMPETE, LEARNED
        )
    yield from claim_levels(config, "pham.table5", "alpha", alphas(config), TABLE_D, 5.0, (0.1, 1.0))


TABLE5 = Figure(
    "Table 5: alpha, which multiplies the router's loss as in the released code, with either block",
    LIGHT,
    sweep=lambda config: tuple(alphas(config).values()),
    claims=lambda config: tuple(claim_table5(config)),
    plots=lambda config: by_block(config, "table5-", x="selection.distillation_coefficient", axis=ALPHA),
)


#: Entropies of the paper's six routers on enwik8's test set (small), and their mean deviation over tokens; natural
#: logarithms are assumed. Of SMoE-Fixed the six average 2.3475, where 2.3942 is printed. XMoE and StableMoE are as
#: coded: once its authors' StableMoE has frozen its table, a score is a choice, without entropy.
TABLE_F = {
    "compete": ((0.3441, 0.4015, 0.5946, 0.6810, 0.6081, 1.3636), 0.36),
    "learned": ((0.1158, 0.6411, 0.4247, 0.8331, 0.9701, 1.3681), 0.41),
    "frozen": ((2.2473, 2.5103, 2.2579, 2.3565, 2.3181, 2.3947), 0.22),
    "xmoe_coded": ((0.7618, 0.6792, 1.1808, 0.9822, 0.8439, 1.4097), 0.43),
    "stable_coded": ((0.7657, 1.2659, 1.1378, 1.2000, 1.4161, 1.8161), 0.54),
}


def claim_routers(config: ConfigDict) -> Iterator[Claim]:
    """Returns the paper's order of SMoE and competition for each of its six routers ("lower in four out of six")."""
    routers = (*zip(TABLE_F["compete"][0], TABLE_F["learned"][0], strict=True),)
    for layer, (ours, theirs) in enumerate(routers if config.transformer.sparse_layers == len(routers) else ()):
        surer, other = (COMPETE, LEARNED) if ours < theirs else (LEARNED, COMPETE)
        statement = f"router {layer + 1}: {NAMED[surer['arm']]} is surer than {NAMED[other['arm']]}"
        yield writer(config, {}, f"router/entropy_test/decoder_{layer}").order(
            f"pham.table10.routers.{layer + 1}", statement, f"{ours} against {theirs}", surer, other
        )


def claim_table10(config: ConfigDict) -> Iterator[Claim]:
    """Returns claims about the entropies of routers on the test set, with the paper's values."""
    write, spread = writer(config, {}, "router/entropy_test"), writer(config, {}, "router/entropy_test_std")
    means = {arm: round(sum(routers) / len(routers), 4) for arm, (routers, _) in TABLE_F.items()}
    for arm, (routers, deviation) in TABLE_F.items():
        if arm not in config.arms:
            continue
        name, side, entropy = f"pham.table10.{arm}", {"arm": arm}, means[arm]
        yield write.beside(name, f"{arm}: mean entropy of the routers, small, enwik8", entropy, side)
        yield spread.beside(f"{name}.std", f"{arm}: its deviation over tokens", deviation, side)
        if arm != "compete":
            statement = f"competition makes routers surer than {arm} does"
            yield write.order(f"{name}.order", statement, f"{means['compete']} against {entropy}", COMPETE, side)
        if arm == "learned":
            yield from claim_routers(config)
        for layer, reported in enumerate(routers if config.transformer.sparse_layers == len(routers) else ()):
            statement = f"{arm}: entropy of router {layer + 1}, small, enwik8"
            yield write.beside(
                f"{name}.{layer + 1}", statement, reported, side, metric=f"router/entropy_test/decoder_{layer}"
            )
    statement = "on validation rows, of which the picture shows one, competition makes routers surer than SMoE does"
    yield write.order("pham.fig4", statement, "in most cases", COMPETE, LEARNED, metric="router/entropy_token")


TABLE10 = Figure(
    "Table 10 and Figs. 4 to 6: entropy of the routers, and what they make of one row",
    LIGHT | {"arms": ("learned", "compete", "frozen", "xmoe_coded", "stable_coded")},
    claims=lambda config: tuple(claim_table10(config)),
    plots=lambda config: (
        {"kind": "paired", "name": "table10", "metric": "router/entropy_test"},
        {"kind": "sample", "name": "fig4", "stack": "decoder"},
        *TRAINING,
    ),
)

# One difference of paper and code at a time

EQUATIONS, BY_ROUTER = "the paper's equations", "output by the router (code of 2023)"
OPTIONS: dict[str, Point] = {
    EQUATIONS: {},
    BY_ROUTER: {"selection.output_of_winners": False},
    "softmax over all experts": {"selection.distillation_softmax": "all"},
    "target not detached": {"selection.distillation_detached": False},
    "its loss reaches the trunk": {"selection.distillation_trunk": True},
    "weight .05, mean over experts too": {"selection.distillation_coefficient": 0.05,
                                          "selection.distillation_mean": "entries"},
    "all of the released loss": RELEASED,
    "competes at every step": _ALWAYS,
    "competes at evaluation": {"selection.eval.name": "compete"},
    "experts start as in the code, routers have a bias": _STARTS,
    "share falls by the root of time": {"selection.schedule": "root"},
    "as released": RELEASED | _STARTS | _ALWAYS,
}  # fmt: skip

#: What the paper prints, and what its released code does.
PRESETS: dict[str, Point] = {"paper": {}, "released": OPTIONS["as released"]}


def options(config: ConfigDict) -> dict[str, Point]:
    """Every option by name, with the config's values of what the others change."""
    plain = {key: value_of(config, key) for changes in OPTIONS.values() for key in changes}
    names = list(OPTIONS)[:: 1 if config.scale != "smoke" else 4]
    points = {name: plain | OPTIONS[name] for name in names}
    if plain != {key: value_of(get_config("options," + config.scale), key) for key in plain}:
        return {"as this command has it" if name == EQUATIONS else name: at for name, at in points.items()}
    return points


def sweep_options(config: ConfigDict) -> tuple[Point, ...]:
    """Returns the arms: competition alone where norms decide at evaluation, as SMoE's experts never trained for it."""
    alone = {"arms": ("compete",)}
    return tuple(
        at | (alone if at["selection.eval.name"] in COMPETING.values() else {}) for at in options(config).values()
    )


def claim_options(config: ConfigDict) -> Iterator[Claim]:
    """With each option competition is below SMoE, which is evaluated as ever."""
    for number, (name, at) in enumerate(options(config).items()):
        fair = at | {"selection.eval.name": config.selection.eval.name}
        yield writer(config, {}).order(
            f"routed.competition.lm.option.{number}",
            f"{name}: competition has fewer bits than SMoE",
            "not asked",
            COMPETE | at,
            LEARNED | fair,
        )
    if {EQUATIONS, BY_ROUTER} <= options(config).keys():
        statement = "competition has fewer bits with outputs by the router than by the paper's equations"
        sides = (COMPETE | options(config)[name] for name in (BY_ROUTER, EQUATIONS))
        yield writer(config, {}).order("routed.competition.lm.option.output", statement, "not asked", *sides)


METHODS = Figure(
    "what paper and released code do differently, one at a time",
    LIGHT,
    sweep=sweep_options,
    claims=lambda config: tuple(claim_options(config)),
    plots=lambda config: (
        {"kind": "methods", "name": "options", "methods": options(config),
         "metrics": (BITS, "router/load_max", "router/alike")},
    ),
    computed=("arms", *dict.fromkeys(key for changes in OPTIONS.values() for key in changes)),
)  # fmt: skip

# The paper's future work: competition and the balancing loss


def claim_balanced(config: ConfigDict) -> tuple[Claim, ...]:
    """Returns the orders of a balance loss beside competition: in bits, and in what it is to mend."""
    competing, balanced, name = {"arm": "compete_balanced"}, {"arm": "balance_loss"}, "competition with a balance loss"
    load, alike = {"metric": "router/load_max"}, {"metric": "router/alike"}
    asked: tuple[tuple[str, str, dict[str, str], dict[str, str], dict[str, str]], ...] = (
        ("gain", f"{name} has fewer bits than without", competing, COMPETE, {}),
        ("smoe", f"{name} has fewer bits than SMoE without", competing, LEARNED, {}),
        ("fair", f"{name} has fewer bits than SMoE with one", competing, balanced, {}),
        ("load", f"{name} loads the most loaded expert less than without", competing, COMPETE, load),
        ("alike", f"{name} makes the experts' outputs less alike than SMoE with one", competing, balanced, alike),
    )
    write = writer(config, {})
    return tuple(
        write.order(f"routed.competition.lm.balanced.{id}", statement, "future work", lower, higher, **metric)
        for id, statement, lower, higher, metric in asked
        if higher["arm"] in config.arms
    )


BALANCED = Figure(
    "competition and SMoE, with and without a balance loss, after all of table 9's steps",
    {"arms": ("learned", "compete_balanced", "compete", "balance_loss"), "seeds": 4, "checkpoint.every": 0},
    claims=claim_balanced,
    plots=lambda config: (PAIRED, *TRAINING),
)

AS_RELEASED = TABLE9._replace(
    line="Table 9 as released: loss, start, and competition at every step",
    changes=LIGHT | PRESETS["released"],
    claims=lambda config: (
        writer(config, {}).order("routed.competition.lm.released", "as released, competition has fewer bits than SMoE",
                                 "not asked", COMPETE, LEARNED),
    ),
)  # fmt: skip

FIGURES = {
    "": TABLE9, "table9": TABLE9, "flops": FLOPS, "decisive": DECISIVE, "table2": TABLE2, "fig2": FIG2, "fig3": FIG3,
    "table4": TABLE4, "table5": TABLE5, "table10": TABLE10, "options": METHODS, "released": AS_RELEASED,
    "balanced": BALANCED,
}  # fmt: skip


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of FIGURE[,SCALE]."""
    return make_config("competition_lm", arg, FIGURES, PROTOCOL, SCALES)
