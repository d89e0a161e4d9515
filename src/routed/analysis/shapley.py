"""Shares of each confound in the gap from frozen to learned, averaged over orders of removal (Shapley 1953)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from routed.analysis import controls, statistics
from routed.plan.arms import REFERENCE, UNTRAINED

SHARPNESS, PARTITION, LEARNING = "sharpness", "initial partition", "learning to route"

#: Confounds that are removed -> arms without them, in order of preference: `frozen_data` is as sharp as its examples
#: make it. Learning is the last in every order: no arm has learned rows without their sharpness, or beside rows from
#: examples, which they replace.
ARMS_OF: dict[frozenset[str], tuple[str, ...]] = {
    frozenset(): (UNTRAINED,),
    frozenset({SHARPNESS}): ("frozen_sharp",),
    frozenset({PARTITION}): ("frozen_data_fresh",),
    frozenset({SHARPNESS, PARTITION}): ("frozen_data_sharp", "frozen_data"),
    frozenset({SHARPNESS, PARTITION, LEARNING}): (REFERENCE,),
}

#: Evaluation -> its column.
EVALUATIONS = {"top-1": "test/loss", "soft": "test/loss_soft"}


def shares(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the parts of log(frozen / learned) at one point, for both evaluations, over all complete orders.

    The part of a confound is the mean over orders of the fall in log(loss) at its removal, so parts sum to the whole.
    The last part, of the whole gap at top-1, vanishes if both arms are evaluated soft. Columns as in `diagnosis.gap`,
    with `evaluation` and `orders`. Intervals of shares are bootstraps over seeds; shares of a gap that may be 0 are
    NaN. Empty without a complete order.
    """
    parts, gaps = list[dict[str, Any]](), list[np.ndarray]()
    for evaluation, column in EVALUATIONS.items():
        logs = logs_of(rows, column)
        if orders := orders_of(logs):
            gap = logs[frozenset()] - logs[frozenset(orders[0])]
            gaps.append(gap)
            falls = parts_of(logs, orders)
            parts += [_record(evaluation, name, part, gap, len(orders)) for name, part in falls.items()]
    if len(gaps) == 2:
        hard, soft = gaps
        parts.append(_record("top-1", "gone if both are evaluated soft", hard - soft, hard, 1))
    return pd.DataFrame(parts)


def logs_of(rows: pd.DataFrame, column: str) -> dict[frozenset[str], Float[np.ndarray, " N"]]:
    """Returns by removed confounds the logs of a loss at one point, by seed, of seeds that all their arms have.

    Failed controls are left out. Empty without the column, or without a complete order.
    """
    good = rows[(rows.status == "ok") & ~rows.arm.isin([*controls.failed(rows, "test/loss")])]
    present = set(good.arm)
    arms = {removed: arm for removed, names in ARMS_OF.items() if (arm := next((a for a in names if a in present), ""))}
    if column not in good or not orders_of(arms):
        return {}
    losses = good.pivot_table(index="seed", columns="arm", values=column)[[*arms.values()]].dropna()
    return {removed: np.log(np.maximum(losses[arm].to_numpy(), statistics.TINY)) for removed, arm in arms.items()}


def orders_of(subsets: Mapping[frozenset[str], object]) -> list[tuple[str, ...]]:
    """Returns the orders of all confounds of which every initial part is one of the subsets."""
    factors = [SHARPNESS, PARTITION, LEARNING]
    return [
        order
        for order in itertools.permutations(factors)
        if all(frozenset(order[:count]) in subsets for count in range(len(factors) + 1))
    ]


def parts_of(
    logs: Mapping[frozenset[str], Float[np.ndarray, " N"]], orders: list[tuple[str, ...]]
) -> dict[str, Float[np.ndarray, " N"]]:
    """Returns by confound and seed the mean over orders of log(loss before / loss after) its removal."""
    steps: dict[str, list[np.ndarray]] = {name: [] for name in orders[0]}
    for order in orders:
        for index, name in enumerate(order):
            steps[name].append(logs[frozenset(order[:index])] - logs[frozenset(order[: index + 1])])
    return {name: np.mean(falls, axis=0) for name, falls in steps.items()}


def share_of(part: Float[np.ndarray, " N"], whole: Float[np.ndarray, " N"]) -> statistics.Estimate:
    """Returns mean(part) / mean(whole) of logs by seed with its 95 % interval; NaN where the whole may be 0."""
    certain = len(whole) > 1 and statistics.p_value(whole) < 1 - statistics.LEVEL
    return statistics.bootstrap_ratio(part, whole) if certain else statistics.estimate([])


def _record(evaluation: str, name: str, part: np.ndarray, whole: np.ndarray, orders: int) -> dict[str, Any]:
    """Returns a line of the table from a part and the whole gap by seed."""
    share = share_of(part, whole)
    line = {"evaluation": evaluation, "part": name, "orders": orders, **statistics.estimate(part)._asdict()}
    return line | {"share": share.mean, "share_low": share.low, "share_high": share.high}
