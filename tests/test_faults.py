"""Every kind of claim that has verdicts, against every fault of its runs: each planted fault takes the verdict back."""

import numpy as np
import pandas as pd
import pytest

from routed.analysis.claims import FROZEN, KINDS, LEARNED, Along, Writer
from routed.analysis.verdicts import judge
from routed.plan import experiment
from routed.plan.config import base
from routed.settings.tree import override

Preregistered = experiment.load("law").Preregistered
SIZES = (100, 200, 400, 800, 1600)
N = "data.samples"
RNG = np.random.default_rng(0)
#: What seeds add to the logarithm of a loss: rows are arms and sizes, columns are eight seeds.
NOISE = RNG.normal(0, 0.02, (4, len(SIZES), 8))
#: log2 of frozen / learned at each size: of the curve that changes sign, of a law, and of an order.
CURVES = {"crossing": (-1, -0.5, 0.2, 0.6, 1), "prediction": (-1, 1, 2, -2, 0.5)}


def rows(kind):
    """Losses at every size: learned N^-.5, a twin of it, frozen twice that, oracle half; accuracy is 1 - loss."""
    lines = []
    for place, size in enumerate(SIZES):
        ahead = CURVES.get(kind, (1,) * len(SIZES))[place]
        factors = {"learned": 1.0, "frozen": 2.0**ahead, "oracle": 0.5, "twin": 1.0}
        for number, (arm, factor) in enumerate(factors.items()):
            for seed, noise in enumerate(NOISE[number, place]):
                loss = size**-0.5 * factor * np.exp(noise)
                lines += [
                    {"run": f"{arm} {seed} {size}", N: size, "arm": arm, "seed": seed, "step": step, "status": "ok",
                     "rates": "tuned", "train/rate_scale": 1.0, "test/loss": 5.0 if step == 0 else loss,
                     "router/entropy_target": np.nan, "router/entropy_token_train": 2.0}
                    for step in (0, 5, 10)
                ]  # fmt: skip
    return pd.DataFrame(lines)


def foretold():
    gaps = np.log(2) * np.array(CURVES["prediction"])
    return tuple(({N: size}, (gap, gap - 0.1, gap + 0.1)) for size, gap in zip(SIZES, gaps, strict=True))


#: Kind -> its claim, and the verdict of runs without a fault.
WRITE = Writer("same", at={N: SIZES[-1]})
ALONG = Along(N, SIZES)
EXPONENT = ((1.0, {"data.dim": 24}, {"data.dim": 24}), (2.0, {"data.dim": 24}, {"data.dim": 12}))
CLAIMS = {
    "order": (WRITE.order("x", "s", "p", LEARNED, FROZEN), "supported"),
    "null": (WRITE.null("x", "s", "p", LEARNED, {"arm": "twin"}), "supported"),
    "number": (WRITE.number("x", "s", 1600**-0.5, LEARNED, 5.0), "reproduced"),
    "share": (WRITE.share("x", "s", "p", LEARNED, FROZEN, {"arm": "oracle"}), "measured"),
    "crossing": (WRITE.crossing("x", "s", "p", LEARNED, FROZEN, ALONG, at={}), "supported"),
    "prediction": (
        WRITE.prediction("x", "s", "p", LEARNED, FROZEN, Preregistered(foretold(), "coverage", 0.4, 1.0), at={}),
        "supported",
    ),
    "power": (WRITE.power("x", "s", -0.5, LEARNED, tuple((n, {N: n}) for n in SIZES), at={}), "supported"),
    "reach": (
        WRITE.reach("x", "s", "p", LEARNED, FROZEN, ALONG, 0.91, at={}, metric="test/accuracy"), "supported"
    ),
    "exponent": (
        WRITE.exponent("x", "s", 8.0, LEARNED, FROZEN, ALONG, 0.91, EXPONENT, at={}, metric="test/accuracy"),
        "supported",
    ),
}  # fmt: skip


def judged(kind, table, config, fault):
    """The record of a kind. Runs at half of the dimensions, for `exponent`, have 1.3 times the errors.

    Incompetent networks reach .4 times the level, and no more than .4 times the accuracy: a coin has .5.
    """
    claim, swept, worse = CLAIMS[kind][0], [N], 0.4 if fault is incompetent else 1.0
    if kind in ("reach", "exponent"):
        errors = table["test/loss"] / (200 if fault is incompetent else 1)
        claim, config = (
            claim.replace(level=claim.level * worse),
            override(config, {"loss": "logistic", "data.target_dim": 1}),
        )
        table = table.assign(**{"test/accuracy": (1 - errors) * worse})
    if kind == "exponent":
        slower = table.assign(**{"data.dim": 12}, run=table.run + " of 12")
        slower["test/accuracy"] = (1 - errors * 1.3) * worse
        slower.loc[slower.arm == "learned", "test/accuracy"] = table["test/accuracy"]
        table, swept = pd.concat([table.assign(**{"data.dim": 24}), slower]), [N, "data.dim"]
    (record,) = judge((claim,), table, config, swept)
    return record


def winner(kind, table):
    """The runs of the side that has to be whole: of a share its best arm, of a crossing learned at the last size."""
    return table.arm == ("oracle" if kind == "share" else "learned")


def diverged(kind, table):
    table.loc[winner(kind, table) & (table[N] == SIZES[-1]) & (table.seed == 3), "status"] = "diverged"
    return "1 of 8 runs of"


def without_value(kind, table):
    """A run ends without the metric, as fits do that settle nowhere."""
    ends = winner(kind, table) & (table[N] == SIZES[-1]) & (table.seed == 3) & (table.step == 10)
    table.loc[ends, "test/loss"] = np.nan
    return "1 of 8 runs of"


def infinite(kind, table):
    """An infinite value is no value."""
    reason = without_value(kind, table)
    table.loc[table["test/loss"].isna(), "test/loss"] = np.inf
    return reason


def missed(kind, table):
    """The learned router equals the untrained one to the last bit; where frozen is no side, it is the same fault."""
    learned, frozen = (table.arm == arm for arm in ("learned", "frozen"))
    table.loc[learned, "test/loss"] = table.loc[frozen, "test/loss"].to_numpy()
    return "is no control: test/loss equals that of frozen"


def at_edge(kind, table):
    table["train/rate_scale"] = 3.0  # the grid of the base config is .3, 1, 3
    return "the edge of what was tried"


def equal(kind, table):
    """Every run has the value of seed 0."""
    first = table[table.seed == 0].set_index(["arm", N, "step"])["test/loss"]
    table["test/loss"] = [first[key] for key in zip(table.arm, table[N], table.step, strict=True)]
    return "equal in every seed"


def incompetent(kind, table):
    """All losses are 200 times as high: 2.5 and more, where a constant has 1."""
    table.loc[table.step > 0, "test/loss"] *= 200
    return "not competent" if kind != "number" else ""


def test_every_kind_with_verdicts_is_here():
    packaged = {name for name, kind in KINDS.items() if kind.__module__.startswith("routed.")}
    assert set(CLAIMS) | {"beside"} == packaged | {"prediction"}  # `beside` judges nothing, law.py has the other


@pytest.mark.parametrize("fault", [None, diverged, without_value, infinite, missed, at_edge, equal, incompetent])
@pytest.mark.parametrize("kind", CLAIMS)
def test_each_fault_takes_the_verdict_of_each_kind(kind, fault):
    table, config = rows(kind), override(base(), {"rates": "tuned", "gate.horizon": 1.0})
    reason = fault(kind, table) if fault else ""
    record = judged(kind, table, config, fault)
    if fault is None:
        assert record["verdict"] == CLAIMS[kind][1], record["reason"]
        assert (record["p"] is not None) == (kind not in ("number", "share"))
        return
    assert record["verdict"] != CLAIMS[kind][1] and reason in record["reason"], (record["verdict"], record["reason"])


def order_on(metric, values, **changes):
    """The record of "learned is below frozen" in a metric, from values by arm."""
    table = rows("order")
    table = table[table[N] == SIZES[-1]].copy()
    table[metric] = [
        values[arm] * np.exp(0.01 * ((seed + len(arm)) % 3)) for arm, seed in zip(table.arm, table.seed, strict=True)
    ]
    config = override(base(), {"gate.horizon": 1.0, **changes})
    (record,) = judge((WRITE.order("x", "s", "p", LEARNED, FROZEN, metric=metric),), table, config, [N])
    return record


def test_who_wins_by_accuracy_is_who_has_more_of_it():
    """Frozen is ahead: .9 of right samples against .7; its lost run, not that of learned, takes the verdict back."""
    values = {"learned": 0.7, "frozen": 0.9, "oracle": 1.0, "twin": 0.7}
    changes = {"loss": "logistic", "data.target_dim": 1}
    assert order_on("test/accuracy", values, **changes)["verdict"] == "supported"
    chance = {"learned": 0.3, "frozen": 0.45, "oracle": 1.0, "twin": 0.7}
    found = order_on("test/accuracy", chance, **changes)
    assert found["verdict"] == "inconclusive" and found["reason"].startswith("not competent: frozen has 0.45")


def test_a_task_declares_its_best_constant_or_that_it_has_none():
    """Cross-entropy of two classes: ln 2 = .693; a relative loss: 1; a density has none."""
    below, above = {"learned": 0.65, "frozen": 0.8, "oracle": 1.0, "twin": 1.0}, {"learned": 0.72, "frozen": 0.8}
    above |= {"oracle": 1.0, "twin": 1.0}
    sentences = {"loss": "cross_entropy", "data.target_dim": 2}
    assert order_on("test/loss", below, **sentences)["verdict"] == "supported"
    found = order_on("test/loss", above, **sentences)
    assert found["verdict"] == "inconclusive" and found["reason"].endswith("the best constant 0.693")
    assert order_on("test/loss", above)["verdict"] == "supported"  # below 1
    many = {arm: 3 * value for arm, value in above.items()}
    assert order_on("test/loss", many)["reason"].startswith("not competent: learned has 2.18")
    assert order_on("test/loss", many, **{"data.name": "gated_gaussians"})["verdict"] == "supported"


def test_the_fairest_control_is_that_of_all_controls_that_the_figure_asks_for():
    """Frozen k-means cannot be made at this point: what beats the rest is not said to beat the fairest."""
    named = {"oracle": "learned", "frozen": "frozen_sharp", "learned": "rest", "twin": "rest"}  # a quarter of the loss
    table = rows("order").replace({"arm": named})
    claim = WRITE.order("x", "s", "p", LEARNED, {"arm": "fairest"})
    asked = {"gate.horizon": 1.0, "arms": ("learned", "frozen_sharp")}
    (whole,) = judge((claim,), table, override(base(), asked), [N])
    assert whole["verdict"] == "supported" and whole["text"].endswith("(fairest of frozen_sharp)")
    asked["arms"] += ("frozen_kmeans",)
    (part,) = judge((claim,), table, override(base(), asked), [N])
    assert (part["verdict"], part["reason"]) == (
        "inconclusive", "supported against the rest, but no frozen_kmeans here"
    )  # fmt: skip
    (behind,) = judge((claim,), table.replace({"arm": {"learned": "frozen_sharp", "frozen_sharp": "learned"}}),
                      override(base(), asked), [N])  # fmt: skip
    assert behind["verdict"] == "opposite"  # one control that is ahead is enough
    lost = table.assign(run=table.run + "k", arm=table.arm.replace("frozen_sharp", "frozen_kmeans"), status="diverged")
    (none,) = judge((claim,), pd.concat([table, lost]), override(base(), asked), [N])
    assert none["verdict"] == "inconclusive" and "no frozen_kmeans here" in none["reason"]


def test_a_prediction_about_the_fairest_control_needs_them_all():
    """Frozen k-means did not run, so the gap to it is not known: also the opposite could turn."""
    table = rows("prediction").replace({"arm": {"frozen": "frozen_sharp"}})
    wrong = tuple((at, (-gap, -gap, -gap)) for at, (gap, *_) in foretold())
    claim = WRITE.prediction("x", "s", "p", LEARNED, {"arm": "fairest"}, Preregistered(wrong, "signs", 0.9, 1.0), at={})
    asked = {"gate.horizon": 1.0, "arms": ("learned", "frozen_sharp")}
    assert judge((claim,), table, override(base(), asked), [N])[0]["verdict"] == "opposite"
    asked["arms"] += ("frozen_kmeans",)
    assert judge((claim,), table, override(base(), asked), [N])[0]["verdict"] == "inconclusive"
