"""The probes: each asks a question of a router, by the points that it runs and a score in [0, 1].

All but `gradient` and `cost` are ordinary runs of the engine at points of one sweep around `BASE`: small Gaussian
mixtures whose clusters have constant targets, with a constant expert for each cluster, so that a router can learn the
assignment only. A change of a probe's runs or of its score needs a new `VERSION`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

import routed.papers.ours  # noqa: F401 (the task crossed)
from routed.engine.rows import swept_columns
from routed.plan.points import Point, chain, product
from routed.settings.renamed import with_old_names

#: The version of the probes; `DIGESTS` in tests/test_suite.py has the digest of each version.
VERSION = 1

#: Settings of every run that a point does not change. Adam's rates are tuned for each arm at each point, on seeds that
#: are never evaluated.
BASE: Point = {"data.clusters": 16, "data.dim": 16, "data.separation": 1.0}
BASE |= {"data.samples": 1024, "data.test_samples": 1600, "experts.name": "constant", "experts.count": 16}
BASE |= {"experts.learning_rate": 0.01, "router.learning_rate": 0.01, "optimizer.name": "adam", "batch_size": 64}
BASE |= {"steps": 2000, "eval_every": 250, "rates": "tuned", "tune.multipliers": (0.1, 0.5, 2.5, 12.5), "tune.seeds": 2}
BASE |= {"seeds": 5, "shuffles": 0, "mesh.runs_per_batch": 64}

#: The arms of a card: a router that learns, and its frozen self; a router that cannot learn has one arm only. The
#: frozen self is made as sharp as the learned router became: otherwise it would lose because it is trained soft and
#: evaluated at top-1.
LEARNED, SELF, FIXED = "learned", "frozen_sharp", "frozen"

#: Changes of these settings in a quick card, which also leaves probes out.
QUICK: Point = {"rates": "paper", "seeds": 3, "steps": 1000}

#: One expert a token, weighted by its probability, in training and in evaluation (Switch, Fedus et al. 2021); nothing
#: balances the load.
TOP1: Point = {"selection.name": "top_k", "selection.k": 1}
TOP1 |= {"selection.renormalise": False, "selection.eval.renormalise": False}

#: Fraction of the variance of 32 targets N(0, I_10) that 8 vectors explain, by k-means of the targets (5 starts): mean
#: over 200 draws.
EIGHT_OF_32 = 0.531
#: The same fraction for 32 clusters in 8 groups, by group:
#: (.9 (1 - 1/8) + .1 (1/4 - 1/32)) / (.9 (1 - 1/8) + .1 (1 - 1/32)).
EIGHT_GROUPS = 0.915


class Probe(NamedTuple):
    """A question, the definition of its score, and the meaning of the score with its limits.

    `score(rows)` maps the rows of one arm, at all `points` (their number is the column `point`) and evaluations, to a
    score in [0, 1] for each seed. `measures` has the scores of probes without points.
    """

    name: str
    question: str
    definition: str
    means: str
    means_not: str
    points: tuple[Point, ...] = ()
    score: Callable[[pd.DataFrame], pd.Series] | None = None
    quick: bool = False


def explained(rows: pd.DataFrame) -> pd.Series:
    """E of each run's last evaluation: 1 - E|f - E[y|x]|^2 / E|E[y|x] - E y|^2, cut at 0 and 1; 0 if the run diverged.

    Indexed by seed and point. 0 is the best constant, 1 the Bayes predictor, whose loss is test/bayes in units of the
    target's variance.
    """
    last = rows[rows.step == rows.groupby("run").step.transform("max")].set_index(["seed", "point"])
    value = 1 - last["test/excess"] / (1 - last["test/bayes"])
    return value.where(last.status == "ok").fillna(0.0).clip(0.0, 1.0)


def mean_explained(rows: pd.DataFrame) -> pd.Series:
    """The mean over points of E at the last evaluation."""
    return explained(rows).groupby("seed").mean()


def relative_to_best(*best: float) -> Callable[[pd.DataFrame], pd.Series]:
    """Makes a score: E divided by the best E of any partition, which `best` gives by point; at most 1 each."""

    def score(rows: pd.DataFrame) -> pd.Series:
        values = explained(rows)
        return (values / np.take(best, values.index.get_level_values("point"))).clip(upper=1.0).groupby("seed").mean()

    return score


def experts_used(rows: pd.DataFrame) -> pd.Series:
    """(exp H(load) - 1) / (experts - 1) of the choices at the last evaluation."""
    last = rows[rows.step == rows.step.max()].set_index("seed")
    experts = BASE["experts.count"]
    value = (np.exp(last["router/hard_entropy_load"]) - 1) / (experts - 1)
    return value.where(last.status == "ok").fillna(0.0).clip(0.0, 1.0)


def stability(rows: pd.DataFrame) -> pd.Series:
    """1 - churn, mean over the evaluations of the second half of training."""
    late = rows[rows.step > rows.step.max() / 2]
    value = (1 - late["router/churn"]).where(late.status == "ok").fillna(0.0)
    return value.groupby(late.seed).mean()


_E = (
    "E is the share of the explainable variance that is explained at top-1: 0 is the best constant, 1 the Bayes"
    " predictor."
)
_CROSSED: Point = {"data.name": "crossed", "data.clusters": 8, "data.dim": 8, "experts.count": 8}
_CROSSED |= {"data.samples": 4096, "data.separation": 2.0}


def _many_experts(count: int, test_samples: int) -> Point:
    """A point with as many experts as clusters, and 32 samples a cluster."""
    sizes = {"data.clusters": count, "experts.count": count, "data.samples": 32 * count}
    return sizes | {"data.test_samples": test_samples, "eval_every": 1000}


#: In the order of the page.
PROBES: tuple[Probe, ...] = (
    Probe(
        "separation",
        "How close may clusters be?",
        "Mean of E over five separations, from .5 to 2.",
        "Where the phase boundary lies: how far clusters have to be apart before the router tells them apart.",
        "Nothing about clusters that are no balls, nor about inputs whose clusters the target does not follow.",
        product(data__separation=(0.5, 0.75, 1.0, 1.5, 2.0)),
        mean_explained,
        quick=True,
    ),
    Probe(
        "samples",
        "How few samples are enough?",
        "Mean of E over 4, 16, 64 and 256 training samples a cluster, at the boundary (separation 1).",
        "Sample efficiency: what the router makes of little data before it learns them by heart.",
        "Nothing about few steps: every size trains equally long.",
        product(data__samples=(64, 256, 1024, 4096)),
        mean_explained,
        quick=True,
    ),
    Probe(
        "spurious",
        "Does it ignore what does not matter?",
        "Mean of E with 112 more dimensions of noise, and with a second mixture that the target does not depend on and"
        " in which 70 % of the distances lie.",
        "It finds the directions that matter by the target, where the inputs alone (k-means) would not.",
        "Not that its weights on other directions are 0: they only do no harm.",
        ({"data.spurious_dims": 112, "data.samples": 4096}, {**_CROSSED, "data.irrelevant_fraction": 0.7}),
        mean_explained,
    ),
    Probe(
        "recovery",
        "Does it use all experts after a bad start?",
        "(exp H(load) - 1) / (E - 1) of the choices after training at top-1 on inputs whose common mean is 3 along"
        " every dimension, where their noise has a standard deviation of 1.",
        "No collapse: the mean sends nearly all tokens to a few experts at first, and no loss balances the load.",
        "Not that the load is put to use: a hash of the input that ignores its mean has 1.",
        ({**TOP1, "data.offset": 3.0},),
        experts_used,
        quick=True,
    ),
    Probe(
        "stability",
        "Does it keep its choices?",
        "1 - churn, the share of tokens whose expert is another than 250 steps before; mean over the second half of"
        " training.",
        "Experts see a steady stream of tokens, which they can specialise on.",
        "Not that the choices are good: a router that never learns has 1, as its frozen self has.",
        ({"data.separation": 1.0},),
        stability,
        quick=True,
    ),
    Probe(
        "adaptation",
        "Does it change its choices when data change?",
        "E at the end, where the two mixtures of the inputs change places half way: what decided the target no longer"
        " does.",
        "The router lets go of a partition that it learned.",
        "It starts from a learned partition: compare with `spurious`, as a router that never learned one has none to"
        " let go.",
        ({**_CROSSED, "data.irrelevant_fraction": 0.5, "data.swap_step": 1000},),
        mean_explained,
    ),
    Probe(
        "top1",
        "Does it learn under top-1?",
        "E where training computes one expert a token, weighted by its probability, at separation 1.5; nothing"
        " balances the load.",
        "It learns from the only signal that sparse layers give: the chosen expert's.",
        "Nothing about capacity, noise or balancing losses, which large models add.",
        ({**TOP1, "data.separation": 1.5},),
        mean_explained,
        quick=True,
    ),
    Probe(
        "imbalance",
        "Does it serve rare clusters?",
        "E on clusters that are tested equally often, where training has them by Zipf's law (exponent 1).",
        "Experts are not all spent on what is frequent.",
        "Nothing about a loss on the data as they come, in which rare clusters hardly count.",
        ({"data.imbalance": 1.0, "data.samples": 4096, "data.separation": 1.5},),
        mean_explained,
    ),
    Probe(
        "mismatch",
        "What if experts are too few, or too many?",
        "Mean of E with 8 experts for 32 clusters, over what k-means of the targets would explain (at most 1), and"
        " with 32 experts for 8.",
        "Clusters share an expert where their targets are alike; experts that nobody needs do no harm.",
        "Which of the two fails: E by point says so.",
        (
            {"data.clusters": 32, "experts.count": 8, "data.separation": 1.5, "data.samples": 4096},
            {"data.clusters": 8, "experts.count": 32, "data.separation": 1.5},
        ),
        relative_to_best(EIGHT_OF_32, 1.0),
    ),
    Probe(
        "hierarchy",
        "Does it find the coarse level first?",
        "E with 8 experts for 32 clusters in 8 groups that have 90 % of the target's variance, over what the groups"
        " explain (at most 1).",
        "With an expert for each group it splits between groups, not inside of them.",
        "Nothing about levels below that: there is no expert for them.",
        ({"data.clusters": 32, "data.groups": 8, "experts.count": 8, "data.samples": 4096},),
        relative_to_best(EIGHT_GROUPS),
    ),
    Probe(
        "noise",
        "Does it learn from noisy labels?",
        "E on clean targets after training on targets with noise of twice their standard deviation, 64 samples a"
        " cluster.",
        "It does not sort tokens by their noise.",
        "Nothing about labels that are wrong in a systematic way.",
        ({"data.label_noise": 2.0, "data.separation": 1.5},),
        mean_explained,
    ),
    Probe(
        "scale",
        "Does it work with many experts?",
        "Mean of E over 64 experts on 64 clusters and 512 on 512, 32 samples a cluster.",
        "The router's signal does not drown in the number of experts.",
        "Nothing about cost, nor about language models.",
        (_many_experts(64, test_samples=6400), _many_experts(512, test_samples=5120)),
        mean_explained,
    ),
    Probe(
        "gradient",
        "Is there a signal at the start?",
        "|E g|^2 / E|g|^2 of the router's gradient g on batches of 64 at initialisation, over 64 batches, unbiased,"
        " between 0 and 1.",
        "Batches agree on where to go: 1 if all give the same gradient, 0 if there is none or only noise.",
        "Not the size of the gradient, which Adam divides by, nor what happens later.",
        quick=True,
    ),
    Probe(
        "cost",
        "What does it cost?",
        "FLOPs of the linear router over those of this one, at most 1: 1,024 tokens of 512 dimensions, 64 experts,"
        " forward.",
        "1: no more than a linear router. 0.5: twice as much.",
        "Not time: that is measured beside it, and depends on the machine.",
        quick=True,
    ),
)


#: Names of probes in the digest of version 1, which had verbs for names.
_OLD_NAMES = {"recovery": "starts", "stability": "keeps", "adaptation": "adapts", "imbalance": "unequal"}


def chosen(quick: bool) -> tuple[Probe, ...]:
    """The probes of a card."""
    return tuple(probe for probe in PROBES if probe.quick or not quick)


def settings(quick: bool) -> Point:
    """The settings of a card's runs that its points do not change."""
    return BASE | (QUICK if quick else {})


def sweep(quick: bool) -> tuple[Point, ...]:
    """The points of a card's runs; probes share some of them."""
    return chain(*(probe.points for probe in chosen(quick)))


def digest(quick: bool = False) -> str:
    """A hash of the runs of a card's probes and of their scores' definitions: equal for comparable cards."""
    content: list[Any] = [VERSION, with_old_names(settings(quick)), LEARNED, SELF, FIXED]
    for probe in chosen(quick):
        points = [with_old_names(point) for point in probe.points]
        content.append([_OLD_NAMES.get(probe.name, probe.name), probe.definition, _E, points])
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def rows_at(table: pd.DataFrame, probe: Probe, arm: str, base: dict[str, Any]) -> pd.DataFrame:
    """The evaluated rows of one arm at the points of a probe, by number in `point`; `base` is the flat config."""
    evaluated = table[(table.arm == arm) & (table.status != "tuning")]
    rows = []
    for number, point in enumerate(probe.points):
        is_at_point = np.ones(len(evaluated), bool)
        for key in swept_columns(evaluated):
            is_at_point &= (evaluated[key] == {**base, **point}[key]).to_numpy()
        rows.append(evaluated[is_at_point].assign(point=number))
    return pd.concat(rows, ignore_index=True)
