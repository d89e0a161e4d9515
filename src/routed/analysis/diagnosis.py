"""What stands between a gap and a conclusion: the gap decomposed, and the threats to validity, both filled from data."""

from __future__ import annotations

import numpy as np
import pandas as pd
from ml_collections import ConfigDict

from routed.analysis import statistics
from routed.engine.rows import last
from routed.layer.selection import SELECTIONS
from routed.plan.arms import ARMS, REFERENCE, UNTRAINED
from routed.plan.config import problem_of
from routed.tasks.text.sources import SOURCES

#: The path from frozen to learned, one confound a step; the logs of the ratios add up to the whole gap.
PATH = (
    ("sharpness", "frozen", "frozen_sharp", "the gate made as sharp as the learned one, nothing else"),
    ("initial partition", "frozen_sharp", "frozen_data", "rows from training examples instead of noise"),
    ("learning to route", "frozen_data", "learned", "what training the router adds to that"),
)

#: Shown beside the path: other comparisons on the same scale.
BESIDE = (
    ("whole gap, top-1", "frozen", "learned", "test/loss"),
    ("whole gap, soft evaluation", "frozen", "learned", "test/loss_soft"),
    ("training rule", "frozen", "frozen_top1", "test/loss"),
    ("left to the oracle", "learned", "oracle", "test/loss"),
)


def paired(rows: pd.DataFrame, worse: str, better: str, metric: str) -> np.ndarray:
    """log(worse / better) by seed, of runs that did not diverge."""
    if metric not in rows:
        return np.array([])
    good = rows[rows.status == "ok"].pivot_table(index="seed", columns="arm", values=metric)
    if worse not in good or better not in good:
        return np.array([])
    both = good[[worse, better]].dropna()
    return statistics.log_ratio(both[worse].to_numpy(), both[better].to_numpy())


def gap(rows: pd.DataFrame) -> pd.DataFrame:
    """The gap at one point: log ratios with intervals, and each step's share of the whole gap. Empty if arms are missing.

    There are no shares, NaN, of a gap that may be none: its interval contains 0.
    """
    whole = paired(rows, UNTRAINED, REFERENCE, "test/loss")
    parts = [(name, paired(rows, worse, better, "test/loss"), why) for name, worse, better, why in PATH]
    if not len(whole) or any(len(values) != len(whole) for _, values, _ in parts):
        return pd.DataFrame()
    found, size = [], statistics.estimate(whole)
    shared = whole.mean() if size.low > 0 or size.high < 0 else np.nan
    for name, values, why in parts:
        found.append(
            {"part": name, **statistics.estimate(values)._asdict(), "share": values.mean() / shared, "note": why}
        )
    for name, worse, better, metric in BESIDE:
        if len(values := paired(rows, worse, better, metric)):
            found.append(
                {
                    "part": name,
                    **statistics.estimate(values)._asdict(),
                    "share": np.nan,
                    "note": f"log({worse} / {better}), {metric}",
                }
            )
    return pd.DataFrame(found)


def threats(table: pd.DataFrame, config: ConfigDict, swept: list[str]) -> list[tuple[str, str]]:
    """Questions a hostile reviewer asks, answered from the rows."""
    rows = last(table)
    good, lost = rows[rows.status == "ok"], rows[rows.status == "diverged"]
    means = good.groupby("arm").mean(numeric_only=True)
    answers = [
        ("Converged?", _converged(means, config)),
        ("Diverged runs", f"{len(lost)} of {len(rows)}" + (": " + ", ".join(sorted(set(lost.arm))) if len(lost) else "")),
        ("Tuned per arm?", _tuned(table, rows, swept)),
    ]  # fmt: skip
    if "router/entropy_token" in means:
        entropies = means["router/entropy_token"].dropna()
        text = ", ".join(
            f"{a} {entropies[a]:.2g}"
            for a in (REFERENCE, UNTRAINED, *(name for name, arm in ARMS.items() if arm.match is not None))
            if a in entropies
        )
        answers.append(("Sharpness equal?", f"final per-token entropy in nats: {text}"))
        answers.append(("Drops", f"largest dropped share {good['router/dropped'].max():.2g}"))
        dead = good.groupby("arm")["router/dead"].mean().dropna()
        answers.append(
            (
                "Dead experts",
                ", ".join(f"{a} {100 * v:.0f} %" for a, v in dead.items())
                or "undefined: fewer than 100 test tokens an expert",
            )
        )
    answers += [
        ("Weight scale", _weight_scale(config)),
        ("Trunk gradient", _trunk(config, swept)),
        ("Frozen is frozen", _still(good)),
        ("Seeds and power", _power(good, swept)),
        ("Data", problem_of(config).about(config)),
    ]
    return answers


def _converged(means: pd.DataFrame, config: ConfigDict) -> str:
    if "eval/bigram" in means:
        loss, bigram = means["eval/loss"], means["eval/bigram"]
        weak = ", ".join(f"{arm} {loss[arm]:.3g}" for arm in means.index[loss >= bigram])
        return (
            f"no arm is: runs end after {config.steps} steps. Competent? "
            + (f"not better than a bigram model ({bigram.mean():.3g} nats a token): {weak}" if weak else
               f"every arm beats a bigram model ({bigram.mean():.3g} nats a token)")
        )  # fmt: skip
    if config.gate.train_loss >= 1:  # which even a constant predictor passes
        return f"not asked: the file has no gate, runs end after {config.steps} steps or by a rule of their own"
    loose = means.index[means["train/loss"] >= config.gate.train_loss]
    if not len(loose):
        return "every arm's mean training loss is below the gate"
    named = ", ".join(f"{arm} {means['train/loss'][arm]:.2g}" for arm in loose)
    return f"training loss above the gate: {named} (mean over points)"


def _trunk(config: ConfigDict, swept: list[str]) -> str:
    if config.data.name not in SOURCES:
        return "none: the router sees the raw input"
    if "router.stop_gradient" in swept:
        return "both: what the router learns reaches the layers below it, or not (router.stop_gradient)"
    return "stopped at the router" if config.router.stop_gradient else "on: the layers below may learn to route instead"


def _tuned(table: pd.DataFrame, rows: pd.DataFrame, swept: list[str]) -> str:
    if "rates" not in swept and not (table.status == "tuning").any():
        return "no: all arms use the file's rates"
    tried = table[table.status == "tuning"].groupby("arm").run.nunique()
    if tried.nunique() != 1:
        return f"unequal: {tried.to_dict()}"
    tuned = rows[rows.rates == "tuned"] if "rates" in rows else rows
    best = tuned.groupby("arm")["train/rate_scale"].max()
    chosen = ", ".join(f"{arm} {scale:g}" for arm, scale in best.items())
    return f"where rates=tuned, {tried.max()} candidates for every arm; chosen multipliers: {chosen}"


def _weight_scale(config: ConfigDict) -> str:
    """Do the combine weights of every rule sum to 1, so that no arm gains by growing them?"""
    rules = {"training": config.selection, "evaluation": config.selection.eval}
    free = [name for name, rule in rules.items() if SELECTIONS[rule.name].sparse and not rule.renormalise]
    if free:
        return f"weights do not sum to 1 in {' and '.join(free)}: a router can gain by growing them"
    return "weights sum to 1 in training and evaluation, in every arm"


def _still(good: pd.DataFrame) -> str:
    """Which arms' routers moved, bit for bit against step 0."""
    moved = good.groupby("arm")["router/moved"].max()
    return "router parameters differ from step 0 in: " + (", ".join(moved.index[moved > 0]) or "no arm")


def _power(good: pd.DataFrame, swept: list[str]) -> str:
    """Seeds, and half-widths of the paired interval of learned against frozen."""
    groups = [g for _, g in good.groupby(swept)] if swept else [good]
    widths = [
        (e.high - e.low) / 2
        for g in groups
        if len(d := paired(g, UNTRAINED, REFERENCE, "eval/loss" if "eval/loss" in good else "test/loss")) > 1
        for e in [statistics.estimate(d)]
    ]
    seeds = good.groupby([*swept, "arm"]).seed.nunique()
    text = f"{seeds.min()} to {seeds.max()}" if seeds.min() < seeds.max() else f"{seeds.min()}"
    half = f"; half-width of log(frozen / learned): {np.median(widths):.2g} (median over points)" if widths else ""
    return f"{text} seeds a point{half}"
