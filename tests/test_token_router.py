"""The testbed of experiments/token_router.py: parts of a variance by hand."""

import numpy as np
import pandas as pd

from routed.analysis.plots import draw
from routed.analysis.plots.frame import Data
from routed.contracts import Column
from routed.plan import experiment
from tests import charts

tokens = experiment.load("token_router")


def test_parts_of_a_variance_by_hand():
    """Values 2 +- 1 +- .5: variances 1 and .25 of 1.25, so .8 and .2; a cell that is .4 higher brings both together."""
    values = {("a", 0): 0.5, ("a", 1): 1.5, ("b", 0): 2.5, ("b", 1): 3.5}
    rows = [
        {"run": f"{seed}{at}", "arm": "learned", "seed": seed, "status": "ok", "step": 1, "m": at[0], "c": at[1],
         "test/loss": value + seed}
        for seed in (0, 1) for at, value in values.items()
    ]  # fmt: skip
    base = {"m": "a", "c": 0, "seed": 0}
    factors = {"method": {"a": {"m": "a"}, "b": {"m": "b"}}, "capacity": {"0": {"c": 0}, "1": {"c": 1}}}
    spec = {"kind": "variance", "name": "variance", "metrics": ("test/loss",), "factors": factors}

    def shares(rows):
        data = Data(pd.DataFrame(rows), ["m", "c"], base, {}, {"test/loss": Column("loss")})
        (panel,) = draw(spec, data).panels
        return charts.values(panel, "share of the variance")

    np.testing.assert_allclose(shares(rows), [0.8, 0.2, 0.0], atol=1e-6)
    # .4 in one of four cells: .1 more for the mean; means of methods and of capacities are .2 further apart, 1.1 and .6
    # from the mean; .1 is left: 1.21, .36 and .01 of 1.58.
    odd = [row | {"test/loss": row["test/loss"] + 0.4 * (row["m"] == "b" and row["c"] == 1)} for row in rows]
    np.testing.assert_allclose(shares(odd), np.array([1.21, 0.36, 0.01]) / 1.58, rtol=1e-4)
