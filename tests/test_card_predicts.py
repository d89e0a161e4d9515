"""The claim of experiments/card_predicts.py by hand."""

import types

import numpy as np
import pandas as pd
import pytest

from routed.analysis.claims import Writer
from routed.plan import experiment

card = experiment.load("card_predicts")


def test_rank_correlation_by_hand():
    """Ranks 1, 2, 3, 4 against 1, 3, 2, 4: 1 - 6 (0 + 1 + 1 + 0) / (4 (16 - 1)) = .8; ties have their mean rank."""
    assert card.correlation(np.array([1.0, 2, 3, 4]), np.array([5.0, 7, 6, 9])) == pytest.approx(0.8)
    # 1.5, 1.5, 3 against 1, 2, 3, less their means: (-.5, -.5, 1) (-1, 0, 1) = 1.5, by sqrt(1.5 * 2).
    assert card.correlation(np.array([0.0, 0, 1]), np.array([1.0, 2, 3])) == pytest.approx(1.5 / np.sqrt(3))
    assert np.isnan(card.correlation(np.zeros(3), np.arange(3.0)))


def judged(losses):
    """The record of five routers with scores .1 to .5 by the probe `good`, and the reverse of a tenth by `bad`."""
    scores = {str(i): {"good": 0.1 * i, "bad": -0.01 * i} for i in range(5)}
    rows = types.SimpleNamespace(final_values=lambda side, at, metric: pd.Series(losses[side["arm"]], dtype=float))
    write = Writer("same", "test/loss", prefix="my.")
    claim = write.ranked("card", "in order", "not asked", {name: {"arm": name} for name in scores}, scores, 0.5)
    return claim.judge(rows)


def test_an_order_that_was_foretold():
    """The lower the loss, the better. Without `bad` the order is the same, without `good` it is the reverse."""
    record = judged({str(i): [5.0 - i, 5.5 - i] for i in range(5)})
    assert (record["ours"], record["n"], record["verdict"]) == (pytest.approx(1.0), 5, "supported")
    assert record["text"].endswith("as high without any one of bad")
    assert judged({str(i): [float(i)] for i in range(5)})["verdict"] == "opposite"
    assert judged({str(i): [5.0 - i] if i else [] for i in range(5)})["reason"] == "4 of 5 routers have run"


def test_every_side_has_scores_written_down():
    """All routers of the default scale, with the same twelve probes; the docstring has the order by their means."""
    _, config = experiment.configure("card_predicts", [])
    sides = card.by_name(config)
    assert sides.keys() == card.SCORES.keys() and {len(scores) for scores in card.SCORES.values()} == {12}
    means = {name: np.mean([*scores.values()]) for name, scores in card.SCORES.items()}
    order = sorted(means, key=means.get, reverse=True)
    text = " ".join(card.__doc__.split())
    assert ", ".join(f"{name.removeprefix('learned ')} {f'{means[name]:.3f}'[1:]}" for name in order) in text
