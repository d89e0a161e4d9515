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
    good = rows[(rows.status == "ok") & ~rows.arm.isin([*controls.failed(rows, "test/loss")])]
    present, parts, gaps = set(good.arm), list[dict[str, Any]](), list[np.ndarray]()
    arms = {removed: arm for removed, names in ARMS_OF.items() if (arm := next((a for a in names if a in present), ""))}
    orders = orders_of(arms)
    for evaluation, column in EVALUATIONS.items():
        if not orders or column not in good:
            continue
        losses = good.pivot_table(index="seed", columns="arm", values=column)[[*arms.values()]].dropna()
        logs = {removed: np.log(np.maximum(losses[arm].to_numpy(), statistics.TINY)) for removed, arm in arms.items()}
        gap = logs[frozenset()] - logs[frozenset(orders[0])]
        gaps.append(gap)
        parts += [_record(evaluation, name, part, gap, len(orders)) for name, part in parts_of(logs, orders).items()]
    if len(gaps) == 2:
        hard, soft = gaps
        parts.append(_record("top-1", "gone if both are evaluated soft", hard - soft, hard, 1))
    return pd.DataFrame(parts)


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


def _record(evaluation: str, name: str, part: np.ndarray, whole: np.ndarray, orders: int) -> dict[str, Any]:
    """Returns a line of the table from a part and the whole gap by seed."""
    certain = len(whole) > 1 and statistics.p_value(whole) < 1 - statistics.LEVEL
    share = statistics.bootstrap_ratio(part, whole) if certain else statistics.estimate([])
    line = {"evaluation": evaluation, "part": name, "orders": orders, **statistics.estimate(part)._asdict()}
    return line | {"share": share.mean, "share_low": share.low, "share_high": share.high}
