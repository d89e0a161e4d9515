"""The scores of experiments/card_predicts.py are those of its text."""

import numpy as np

from routed.plan import experiment

card = experiment.load("card_predicts")


def test_every_side_has_scores_written_down():
    """All routers of the default scale, with the same twelve probes; the docstring has the order by their means."""
    _, config = experiment.configure("card_predicts", [])
    sides = card.by_name(config)
    assert sides.keys() == card.SCORES.keys() and {len(scores) for scores in card.SCORES.values()} == {12}
    means = {name: np.mean([*scores.values()]) for name, scores in card.SCORES.items()}
    order = sorted(means, key=means.get, reverse=True)
    text = " ".join(card.__doc__.split())
    assert ", ".join(f"{name.removeprefix('learned ')} {f'{means[name]:.3f}'[1:]}" for name in order) in text
