"""Controls that control nothing: left out of the plan, short of what they were asked for, or equal to what they are compared with."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from routed.plan.arms import ARMS, REFERENCE, UNTRAINED, is_control

#: Nats by which a gate may miss the entropy that it was asked for. In the headline of gmm_router sharpening by 4 nats lowers the log of
#: the loss by 1.4, so this is worth .004, a 25th of the smallest effect of interest; rounding in float32 misses by less than .001.
ENTROPY_TOLERANCE = 0.01


def missed(rows: pd.DataFrame, loss: str) -> dict[str, str]:
    """arm -> what it failed to do, from the last rows at one point; `loss` is the column that arms are compared by.

    Such an arm is no control: its difference from another arm is not the effect that it stands for.
    """
    good = rows[rows.status == "ok"]
    reasons = _misses_of_entropy(good) if "router/entropy_asked" in good else {}
    if loss not in good:
        return reasons
    # In plain Python, as a page asks this of thousands of points.
    losses: dict[str, dict[int, float]] = {}
    for arm, seed, value in zip(good.arm, good.seed, good[loss], strict=True):
        losses.setdefault(arm, {})[seed] = value
    untrained = losses.pop(UNTRAINED, {})
    for arm, values in losses.items():
        if arm == REFERENCE or (arm in ARMS and is_control(arm)):
            pairs = [(value, untrained[seed]) for seed, value in values.items() if seed in untrained]
            if pairs and all(value == other for value, other in pairs):
                reasons.setdefault(arm, f"{loss} equals that of {UNTRAINED} to the last bit, so it changed nothing")
    return reasons


def _misses_of_entropy(rows: pd.DataFrame) -> dict[str, str]:
    """frozen arm -> how far its worst run is from the entropy it was asked for; none within the tolerance."""
    asked, reached = rows["router/entropy_asked"], rows["router/entropy_token_train"]
    misses = (reached - asked).abs()
    misses = misses[misses > ENTROPY_TOLERANCE].sort_values(ascending=False, kind="stable")
    worst = rows.arm[misses.index].drop_duplicates()
    return {
        arm: f"its gate was asked for {asked[run]:.3g} nats of entropy and has {reached[run]:.3g} (seed {rows.seed[run]})"
        for run, arm in worst.sort_values().items()
        if arm in ARMS and ARMS[arm].changes.get("router.frozen")
    }


def named(last: pd.DataFrame, swept: list[str], loss: str, left_out: Mapping[str, str]) -> str:
    """All controls that control nothing, over all points, in words."""
    groups = [group for _, group in last.groupby(swept, dropna=False)] if swept else [last]
    at: dict[str, list[str]] = {}
    for group in groups:
        for arm, why in missed(group, loss).items():
            at.setdefault(arm, []).append(why)
    words = [f"{arm} was left out: {why}" for arm, why in left_out.items()]
    words += [
        f"{arm} is no control" + (f" at {len(why)} of {len(groups)} points" if len(groups) > 1 else "") + f": {why[0]}"
        for arm, why in at.items()
    ]
    return "; ".join(words) or "every control that was asked for was made, and did what it says"
