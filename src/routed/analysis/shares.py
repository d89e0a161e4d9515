"""What each confound explains of the gap from frozen to learned, averaged over every order in which they can be removed."""

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

#: Confounds that are removed -> the arm that has them removed, or one in its place: frozen_data is as sharp as its rows make it. What a
#: router learned comes last in every order: no arm has it without the sharpness that it learned, nor beside rows from examples, of
#: which it takes the place.
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
    """The parts of log(frozen / learned) at one point, of both evaluations, over the orders that have all arms (Shapley 1953).

    A confound's part is the mean over orders of what its removal lowers the log of the loss by, so that parts sum to the whole. Last,
    of the whole gap at top-1: what is gone if both arms are evaluated soft. Columns as in `diagnosis.gap`, with `evaluation` and
    `orders`. Intervals of shares are bootstraps over seeds; there are no shares, NaN, of a gap that may be 0. Empty where no order
    has all arms.
    """
    good = rows[(rows.status == "ok") & ~rows.arm.isin([*controls.missed(rows, "test/loss")])]
    present, parts, wholes = set(good.arm), list[dict[str, Any]](), list[np.ndarray]()
    there = {removed: next((arm for arm in arms if arm in present), "") for removed, arms in ARMS_OF.items()}
    there = {removed: arm for removed, arm in there.items() if arm}
    orders = orders_of(there)
    for evaluation, column in EVALUATIONS.items():
        if not orders or column not in good:
            continue
        losses = good.pivot_table(index="seed", columns="arm", values=column)[[*there.values()]].dropna()
        logs = {removed: np.log(np.maximum(losses[arm].to_numpy(), statistics.TINY)) for removed, arm in there.items()}
        whole = logs[frozenset()] - logs[frozenset(orders[0])]
        wholes.append(whole)
        parts += [_record(evaluation, name, part, whole, len(orders)) for name, part in parts_of(logs, orders).items()]
    if len(wholes) == 2:
        hard, soft = wholes
        parts.append(_record("top-1", "gone if both are evaluated soft", hard - soft, hard, 1))
    return pd.DataFrame(parts)


def orders_of(subsets: Mapping[frozenset[str], object]) -> list[tuple[str, ...]]:
    """The orders of all confounds along which every subset on the way is there."""
    factors = [SHARPNESS, PARTITION, LEARNING]
    return [
        order
        for order in itertools.permutations(factors)
        if all(frozenset(order[:count]) in subsets for count in range(len(factors) + 1))
    ]


def parts_of(
    logs: Mapping[frozenset[str], Float[np.ndarray, " N"]], orders: list[tuple[str, ...]]
) -> dict[str, Float[np.ndarray, " N"]]:
    """Confound -> by seed, the mean over orders of log(loss before / loss after) its removal."""
    steps: dict[str, list[np.ndarray]] = {name: [] for name in orders[0]}
    for order in orders:
        for place, name in enumerate(order):
            steps[name].append(logs[frozenset(order[:place])] - logs[frozenset(order[: place + 1])])
    return {name: np.mean(some, axis=0) for name, some in steps.items()}


def _record(evaluation: str, name: str, part: np.ndarray, whole: np.ndarray, orders: int) -> dict[str, Any]:
    """A part by seed as a line of the table."""
    certain = len(whole) > 1 and statistics.p_value(whole) < 1 - statistics.LEVEL
    share = statistics.share(part, whole) if certain else statistics.estimate([])
    line = {"evaluation": evaluation, "part": name, "orders": orders, **statistics.estimate(part)._asdict()}
    return line | {"share": share.mean, "share_low": share.low, "share_high": share.high}
