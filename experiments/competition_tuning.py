r"""Is a language model that competition trained the better one to fine-tune, and is it its router or its experts?

Question. Pham et al. (2024, Table 3) fine-tune the models of `competition_lm` on four sets of texts with classes, the
router frozen: CompeteSMoE has 79.8, 38.3, 84.8 and 72.9 % right, SMoE 77.1, 35.1, 84.4 and 69.2 (one run each; their
code tests on validation texts).

First train, and keep the models; then fine-tune the same arms and seeds:

    routed run --config=competition_lm:table2 --config.checkpoint.final=true --config.data.directory=TEXT --workdir=W
    routed run --config=competition_tuning --config.initial.workdir=W --config.data.directory=DIR \
        --config.data.table=sst2 --config.seeds=4
    routed run --config=competition_tuning:smoke  # a table of its own, no model trained before

DIR holds NAME-train.tsv and NAME-test.tsv (and NAME-valid.tsv, or a tenth of the training texts is held out) with the
columns text and label; other classes than negative and positive: --config.data.labels. Scales: smoke, default (takes
the models of default), gpu and paper (the models of gpu and medium).

From the paper: the last layer replaced by two new layers, router frozen, Adam. From its released code: the head reads
the last token, texts stand behind pads, competition is fine-tuned as SMoE is. `printed`: experts and head train;
`released`: everything does.

Rules, written before any evaluation seed ran; none compares competition with SMoE.
  begins      each arm and seed with the model of the same arm and seed; StableMoE with its table, which no longer
              learns.
  rate        of 1e-4 (theirs), 1e-3 and 1e-2 the rate with the lowest validation loss of SMoE, seed 9000, at the
              default scale: 1e-3, for either method (movie reviews, after 12,000 steps of table 9: .691 nats, 1e-4
              .692, 1e-2 .693 and .695; a model that knows nothing has .693).
  steps       1,000 of 16 texts (theirs: 5,000, or 5 epochs); tests: at the best validation, on 1,024 texts spread over
              the table.
  control     `untrained`: SMoE without any training before. Where SMoE's test loss is no lower, the table says nothing
              about the first training, and no order is judged.
  effect      smallest effect of interest: one point of accuracy. seeds: those of the models, 3100 on.

Deviations: characters or bytes in place of words, as these models read; no dropout; the head takes the last state
itself and not a logarithm of its softmax (theirs).

Expected: no difference between competition and SMoE; `untrained` clearly worse.

Found (docs/results, docs/decisions/pham2024.md; movie reviews): .51 to .58 right in every arm, where chance has .5.
Nothing tells competition from SMoE: models this small hardly learn the task.
"""

from __future__ import annotations

from collections.abc import Iterator

from ml_collections import ConfigDict

import routed.papers.pham2024  # noqa: F401 (parts of the paper)
from routed.analysis.claims import LEARNED, Claim, Precondition, Writer
from routed.plan import Figure, Point, experiment, make_config
from routed.plan.arms import ARMS, Arm
from routed.plan.experiment import Scales

lm = experiment.load("competition_lm")

ARMS["untrained"] = Arm({"initial.workdir": ""}, "learned router, not trained before", "#000000")
#: Its table has learned what it will.
ARMS["stable_kept"] = Arm(
    {**ARMS["stable"].changes, "router.teach_steps": 0, "initial.arm": "stable"}, "StableMoE", ARMS["stable"].colour
)

#: What trains, by who says so.
METHODS: dict[str, Point] = {"printed": {"phases": ("train=experts+head",)}, "released": {"phases": ()}}
#: What pictures call them.
NAMES = {"printed": "printed: experts and head train", "released": "released: everything trains"}

#: Accuracy in %, by table and arm.
TABLE3 = {
    "sst2": {"compete": 79.8, "learned": 77.1, "frozen": 78.6, "xmoe": 76.7, "stable_kept": 77.7},
    "sst5": {"compete": 38.3, "learned": 35.1, "frozen": 34.4, "xmoe": 35.3, "stable_kept": 34.3},
    "imdb": {"compete": 84.8, "learned": 84.4, "frozen": 83.5, "xmoe": 83.3, "stable_kept": 83.9},
    "banking77": {"compete": 72.9, "learned": 69.2, "frozen": 66.7, "xmoe": 67.4, "stable_kept": 60.8},
}

# Rule of what trains, written before any evaluation seed ran.
# trunk: the paper says that only experts are trained, so attention and embeddings stay in `printed`.
PROTOCOL = lm.PROTOCOL | {
    "arms": ("learned", "compete", "frozen", "xmoe", "stable_kept", "untrained"), "seeds": 5, "model": "classifier",
    "data.name": "labelled", "data.table": "sst2", "data.eval_rows": 1024,
    "selection.competition_rate": 0.0,  # competition is fine-tuned as SMoE
    "optimizer.schedule": "constant", "optimizer.warmup": 0, "batch_size": 16, "steps": 1000, "eval_every": 100,
    "checkpoint.every": 100,
    **dict.fromkeys(("router.learning_rate", "experts.learning_rate", "transformer.learning_rate"), 1e-3),
}  # fmt: skip

_THEIRS: Point = {
    **dict.fromkeys(("router.learning_rate", "experts.learning_rate", "transformer.learning_rate"), 1e-4),
    "optimizer.schedule": "constant", "optimizer.warmup": 0, "batch_size": 16, "steps": 5000, "eval_every": 500,
    "checkpoint.every": 500,
}  # fmt: skip

SCALES: Scales = {
    "smoke": lambda config: {
        **lm.SCALES["smoke"](config), "data.name": "labelled", "data.table": "artificial",
        "arms": ("learned", "compete", "frozen"), "steps": 20, "eval_every": 10, "selection.competition_rate": 0.0,
    },
    "default": lambda config: {},
    "gpu": lambda config: {**lm.SCALES["gpu"](config), **_THEIRS},
    "paper": lambda config: {**lm.SCALES["medium"](config), **_THEIRS},
}  # fmt: skip


def claims(config: ConfigDict) -> Iterator[Claim]:
    """Returns claims about competition against every other arm, the paper's numbers, and the gain of pretraining."""
    assay = (Precondition("learned", "untrained", 0.0, "test/loss"),) if "untrained" in config.arms else ()
    for method, at in METHODS.items():
        write = Writer("scaled" if config.scale == "smoke" else "stand_in", "test/accuracy", at, "difference")
        asked = TABLE3.get(config.data.table, {})
        for arm in (arm for arm in config.arms if arm in TABLE3["sst2"]):
            name = arm.removesuffix("_kept")
            if method == "printed" and asked:
                statement = f"{config.data.table}: accuracy of {name}"
                yield write.beside(f"pham.table3.{config.data.table}.{name}", statement, asked[arm] / 100, {"arm": arm})
            if arm != "compete" and "compete" in config.arms:
                statement = f"{method}: competition has more right than {name}"
                paper = (
                    f"{asked['compete']} against {asked[arm]} %" if asked else "best on all four sets (not this one)"
                )
                yield write.order(
                    f"pham.table3.order.{name}" + (".released" if method == "released" else ""), statement, paper,
                    {"arm": arm}, lm.COMPETE, needs=assay
                )  # fmt: skip
        if "untrained" in config.arms:
            statement = f"{method}: SMoE has more right than one that nothing trained before"
            yield write.order(
                f"routed.tuning.{method}.untrained", statement, "not asked", {"arm": "untrained"}, LEARNED
            )


FIGURES = {
    "": Figure(
        "Table 3: fine-tuned on texts with classes",
        sweep=lambda config: tuple(METHODS.values()),
        claims=lambda config: tuple(claims(config)),
        plots=lambda config: (
            {"kind": "methods", "name": "table3", "methods": {NAMES[name]: at for name, at in METHODS.items()},
             "metrics": ("test/accuracy", "test/loss")},
            {"kind": "training", "name": "training", "metrics": ("train/loss", "eval/loss", "eval/accuracy"),
             "title": NAMES["printed"], "at": METHODS["printed"]},
        ),
    )
}  # fmt: skip


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of FIGURE[,SCALE]."""
    return make_config("competition_tuning", arg, FIGURES, PROTOCOL, SCALES)
