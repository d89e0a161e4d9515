"""Checks that each control changed the router as it was meant to."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from routed.plan.arms import ARMS, REFERENCE, UNTRAINED, is_control

#: Nats by which the entropy of a gate may miss the entropy that was asked for. In the headline of gmm_router sharpening
#: by 4 nats lowers the log of the loss by 1.4, so the tolerance is worth .004, a 25th of the smallest effect of
#: interest; rounding in float32 misses by less than .001.
ENTROPY_TOLERANCE = 0.01


def failed(rows: pd.DataFrame, loss: str) -> dict[str, str]:
    """Returns the controls that failed, each with its reason, from the last rows at one point.

    `loss` is the column by which arms are compared. The difference between a failed control and another arm is not the
    effect that it stands for.
    """
    good = rows[rows.status == "ok"]
    reasons = _misses_of_entropy(good) if "router/entropy_target" in good else {}
    if loss not in good:
        return reasons
    # In plain Python, since a page checks thousands of points.
    losses: dict[str, dict[int, float]] = {}
    for arm, seed, value in zip(good.arm, good.seed, good[loss], strict=True):
        losses.setdefault(arm, {})[seed] = value
    untrained = losses.pop(UNTRAINED, {})
    for arm, values in losses.items():
        if arm == REFERENCE or (arm in ARMS and is_control(arm)):
            pairs = [(value, untrained[seed]) for seed, value in values.items() if seed in untrained]
            if pairs and all(value == loss_untrained for value, loss_untrained in pairs):
                reasons.setdefault(arm, f"{loss} equals that of {UNTRAINED} to the last bit, so it changed nothing")
    return reasons


def _misses_of_entropy(rows: pd.DataFrame) -> dict[str, str]:
    """Returns the frozen arms that miss the entropy that was asked for, each with its worst run."""
    asked, reached = rows["router/entropy_target"], rows["router/entropy_token_train"]
    misses = (reached - asked).abs()
    misses = misses[misses > ENTROPY_TOLERANCE].sort_values(ascending=False, kind="stable")
    worst = rows.arm[misses.index].drop_duplicates()
    return {
        arm: f"its gate was asked for {asked[run]:.3g} nats of entropy and has {reached[run]:.3g}"
        f" (seed {rows.seed[run]})"
        for run, arm in worst.sort_values().items()
        if arm in ARMS and ARMS[arm].changes.get("router.frozen")
    }


def named(last: pd.DataFrame, swept: list[str], loss: str, left_out: Mapping[str, str]) -> str:
    """Returns a text about all controls that were left out or failed, over all points."""
    groups = [group for _, group in last.groupby(swept, dropna=False)] if swept else [last]
    reasons: dict[str, list[str]] = {}
    for group in groups:
        for arm, reason in failed(group, loss).items():
            reasons.setdefault(arm, []).append(reason)
    texts = [f"{arm} was left out: {reason}" for arm, reason in left_out.items()]
    for arm, of_arm in reasons.items():
        where = f" at {len(of_arm)} of {len(groups)} points" if len(groups) > 1 else ""
        texts.append(f"{arm} is no control{where}: {of_arm[0]}")
    matches = {arm: ARMS[arm].match for arm in last.arm if arm in ARMS}
    if fitted := [arm for arm, match in matches.items() if match and match.setting == "router.fit_entropy"]:
        texts.append(f'{", ".join(fitted)}: entropy as asked at the fit; after training see "Sharpness equal?"')
    return "; ".join(texts) or "every control that was asked for was made, and did what it says"
