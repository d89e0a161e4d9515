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
    good, found = rows[rows.status == "ok"], dict[str, str]()
    for arm, mine in good.groupby("arm"):
        if arm in ARMS and ARMS[str(arm)].changes.get("router.frozen") and (why := _misses_entropy(mine)):
            found[str(arm)] = why
    if loss not in good:
        return found
    untrained = good[good.arm == UNTRAINED].set_index("seed")[loss]
    for arm, mine in good.groupby("arm"):
        if arm == REFERENCE or (arm in ARMS and is_control(str(arm)) and arm != UNTRAINED):
            both = mine.set_index("seed")[[loss]].join(untrained.rename("untrained"), how="inner")
            if len(both) and (both[loss] == both.untrained).all():
                found.setdefault(str(arm), f"{loss} equals that of {UNTRAINED} to the last bit, so it changed nothing")
    return found


def _misses_entropy(rows: pd.DataFrame) -> str:
    """How far the worst run of an arm is from the entropy it was asked for, empty within the tolerance or if none was."""
    if "router/entropy_asked" not in rows:
        return ""
    misses = (rows["router/entropy_token_train"] - rows["router/entropy_asked"]).abs().dropna()
    if not len(misses) or misses.max() <= ENTROPY_TOLERANCE:
        return ""
    worst = rows.loc[misses.idxmax()]
    asked, reached = worst["router/entropy_asked"], worst["router/entropy_token_train"]
    return f"its gate was asked for {asked:.3g} nats of entropy and has {reached:.3g} (seed {worst.seed})"


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
