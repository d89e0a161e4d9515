"""The gap from frozen to learned decomposed, and the threats to validity, both filled from the rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from ml_collections import ConfigDict

from routed.analysis import controls, statistics
from routed.analysis.paired_values import Rows, at_edge, ends, paired
from routed.engine.rows import shown
from routed.layer.model_losses import LIMITS
from routed.layer.rule import Rule, rule_of
from routed.layer.selection import SELECTIONS
from routed.plan.arms import REFERENCE, UNTRAINED, changes_of, fair_arms
from routed.plan.config import problem_of
from routed.settings.tree import override, value_of
from routed.tasks.text.sources import SOURCES
from routed.training.phases import configs_of

#: Path from frozen to learned: each arm removes a confound from the arm before it. Logarithms of ratios add up to the
#: gap.
PATH = (
    ("sharpness", "frozen_sharp", "the gate made as sharp as the learned one, nothing else"),
    ("initial partition", "frozen_data", "rows from training examples instead of noise"),
    ("learning to route", REFERENCE, "what training the router adds to that"),
)

#: Prefix of the columns of coefficients that change during training.
STEERED = "train/coefficient_"

#: Other comparisons on the same scale, shown beside the path.
BESIDE = (
    ("whole gap, top-1", UNTRAINED, REFERENCE, "test/loss"),
    ("whole gap, soft evaluation", UNTRAINED, REFERENCE, "test/loss_soft"),
    ("training rule", UNTRAINED, "frozen_top1", "test/loss"),
    ("beyond k-means", "frozen_kmeans", REFERENCE, "test/loss"),
    ("left to the oracle", REFERENCE, "oracle", "test/loss"),
)


def gap(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the gap at one point: log ratios and the share of each step, with intervals.

    An arm without finite runs, or a failed control, is left out of the path; the name of the next step then includes
    its confound. All steps are of the seeds that every arm on the path has. Shares are NaN if the interval of the gap
    contains 0. Empty without learned, frozen or any control.
    """
    good = rows[(rows.status == "ok") & ~rows.arm.isin([*controls.failed(rows, "test/loss")])]
    present = {UNTRAINED, REFERENCE} & set(good.arm)
    if len(present) < 2 or "test/loss" not in good:
        return pd.DataFrame()
    path = _path(set(good.arm))
    if len(path) < 2:  # no control: nothing is told apart
        return pd.DataFrame()
    arms = [UNTRAINED, *(arm for _, arm, _ in path)]
    losses = good[good.arm.isin(arms)].pivot_table(index="seed", columns="arm", values="test/loss")[arms].dropna()
    if not len(losses):
        return pd.DataFrame()
    logs = np.log(np.maximum(losses.to_numpy(), statistics.TINY))
    steps, whole = logs[:, :-1] - logs[:, 1:], logs[:, 0] - logs[:, -1]
    certain = len(whole) > 1 and statistics.p_value(whole) < 1 - statistics.LEVEL
    parts = []
    for index, (name, _, note) in enumerate(path):
        share = statistics.bootstrap_ratio(steps[:, index], whole) if certain else statistics.estimate([])
        values = {"part": name, **statistics.estimate(steps[:, index])._asdict(), "note": note}
        values["arms"] = f"{arms[index]} / {arms[index + 1]}"
        parts.append(values | {"share": share.mean, "share_low": share.low, "share_high": share.high})
    for name, worse, better, metric in BESIDE:
        if len(values := paired(rows, worse, better, metric)):
            part = {"part": name, **statistics.estimate(values)._asdict(), "note": f"log({worse} / {better}), {metric}"}
            part["arms"] = f"{worse} / {better}"
            parts.append(part | {"share": np.nan, "share_low": np.nan, "share_high": np.nan})
    return pd.DataFrame(parts)


def _path(arms: set[str]) -> list[tuple[str, str, str]]:
    """Returns the steps of PATH between these arms; a step's name includes the confounds before it without an arm."""
    path, without_arm = [], list[str]()
    for name, arm, note in PATH:
        if arm not in arms:
            without_arm.append(name)
            continue
        if without_arm:
            name, note = " and ".join([*without_arm, name]), f"{note}; no arm tells them apart here"
        path.append((name, arm, note))
        without_arm = []
    return path


def threats(table: pd.DataFrame, config: ConfigDict, swept: list[str]) -> list[tuple[str, str]]:
    """Returns questions of a hostile reviewer with answers from all rows, or from those at the decomposed gap."""
    rows = Rows(table, config, swept)
    good, diverged = rows.last[rows.last.status == "ok"], rows.last[rows.last.status == "diverged"]
    point = rows.at({})
    where = (
        f" (at {', '.join(f'{key} = {shown(point[key].iloc[0])}' for key in swept)})" if swept and len(point) else ""
    )
    answers = [
        ("Converged?", _converged(rows, point) + where),
        ("Diverged runs", f"{len(diverged)} of {len(rows.last)}" + (f": {_counts(diverged)}" if len(diverged) else "")),
        ("Tuned per arm?", _tuned(table, rows.last, config, swept)),
    ]
    if "router/entropy_token" in good:
        column = "router/entropy_token_train" if "router/entropy_token_train" in good else "router/entropy_token"
        entropies = _means(point, column).reindex([REFERENCE, UNTRAINED, *fair_arms()]).dropna()
        text = ", ".join(f"{arm} {value:.2g}" for arm, value in entropies.items())
        inputs = "training inputs" if column.endswith("_train") else "test inputs"
        answers.append(("Sharpness equal?", f"final per-token entropy on {inputs}, nats: {text}{where}"))
        answers.append(("Drops", f"largest dropped share at an evaluation {good['router/dropped'].max():.2g}"))
        dead = ", ".join(f"{arm} {100 * value:.0f} %" for arm, value in _means(point, "router/dead").items())
        answers.append(
            ("Dead experts", f"{dead}{where}" if dead else "undefined: fewer than 100 test tokens an expert")
        )
    steered = [column for column in good if column.startswith(STEERED) and good[column].notna().any()]
    answers += [(f"losses.{column.removeprefix(STEERED)} steered?", _steered(good, column)) for column in steered]
    answers += [
        ("Evaluated as trained?", _as_trained(config, good, swept)),
        ("Weight scale", _weight_scale(config, good, swept)),
        ("Trunk gradient", _trunk(config, swept)),
        ("Frozen is frozen", _still(good)),
        ("Seeds and power", _power(good, swept)),
        ("Data", problem_of(config).about(config)),
    ]
    return answers


def _means(rows: pd.DataFrame, metric: str) -> pd.Series:
    """Returns the mean of a metric by arm, over finite runs."""
    return rows[rows.status == "ok"].groupby("arm")[metric].mean().dropna()


def _counts(rows: pd.DataFrame) -> str:
    """Returns the number of rows of each arm as text."""
    return ", ".join(f"{arm} {count}" for arm, count in rows.arm.value_counts(sort=False).items())


def _converged(rows: Rows, point: pd.DataFrame) -> str:
    """Returns the extrapolated change of each arm's loss, and the arms that are no better than a bigram model."""
    config = rows.config
    loss = problem_of(config).loss
    if config.gate.horizon == 1:
        return f"not asked: the number of steps, {config.steps}, belongs to the protocol"
    changes, unknown = [], []
    for arm in sorted(set(point.arm)):
        history = rows.history({"arm": arm}, {}, loss, arm)
        change = ends(history, config.gate.horizon, logs=True)
        if not len(change) or not np.isfinite(change.to_numpy()).all():
            unknown += [arm]
            continue
        mean = np.expm1((change.later - change.now).mean())
        changes.append(f"{arm} {100 * mean:+.0f} %")
    text = f"{loss} at {config.gate.horizon:g} times the steps, if curves go on as they end: "
    text += ", ".join(changes) or "unknown"
    if unknown:
        text += f"; unknown, as there is one evaluation in the second half of training: {', '.join(unknown)}"
    if "eval/bigram" in point:
        losses, bigram = _means(point, "eval/loss"), point["eval/bigram"].mean()
        weak = ", ".join(f"{arm} {value:.3g}" for arm, value in losses.items() if value >= bigram)
        text += f". Competent? A bigram model has {bigram:.3g} nats a token; "
        text += f"not better: {weak}" if weak else "every arm is better"
    return text


def _trunk(config: ConfigDict, swept: list[str]) -> str:
    """Returns the answer whether the router trains the layers below it."""
    if config.data.name not in SOURCES:
        return "none: the router sees the raw input"
    if "router.stop_gradient" in swept:
        return "both: what the router learns reaches the layers below it, or not (router.stop_gradient)"
    return "stopped at the router" if config.router.stop_gradient else "on: the layers below may learn to route instead"


def _tuned(table: pd.DataFrame, rows: pd.DataFrame, config: ConfigDict, swept: list[str]) -> str:
    """Returns the answer whether every arm's learning rates were tuned over as many candidates."""
    if "rates" not in swept and not (table.status == "tuning").any():
        return "no: all arms use the file's rates"
    tuning = table[table.status == "tuning"]
    tried = tuning.groupby(["arm", *swept])["train/rate_scale"].nunique().groupby("arm").max()
    if tried.nunique() != 1:
        return "unequal numbers of candidates: " + ", ".join(f"{arm} {count}" for arm, count in tried.items())
    tuned = rows[rows.rates == "tuned"] if "rates" in rows else rows
    best = tuned.groupby("arm")["train/rate_scale"].unique()
    chosen = ", ".join(f"{arm} {' or '.join(f'{scale:g}' for scale in sorted(scales))}" for arm, scales in best.items())
    text = f"where rates=tuned, {tried.max()} candidates for every arm; chosen multipliers: {chosen}"
    edge = _counts(tuned[at_edge(tuned, config)])
    return text + (f"; runs at the edge of what was tried: {edge}" if edge else "; none at the edge of what was tried")


def _steered(good: pd.DataFrame, column: str) -> str:
    """Returns the final values of a coefficient that changes, and the number of runs in which it ended at a limit."""
    final = good[column].dropna()
    at_limit = int(((final <= 1.001 * LIMITS[0]) | (final >= 0.999 * LIMITS[1])).sum())
    text = f"coefficients at the end: {final.min():.2g} to {final.max():.2g}"
    if at_limit:
        text += f"; in {at_limit} of {len(final)} runs at the end of its range: it did not reach what it is steered to"
    return text


def _weight_scale(config: ConfigDict, good: pd.DataFrame, swept: list[str]) -> str:
    """Returns the arms whose combine weights need not sum to 1: their routers can gain by growing them."""
    free: dict[str, list[str]] = {}
    for arm, rules_of in _rules(config, good, swept):
        if stages := [name for name, rules in rules_of.items() if not all(map(_sums_to_1, rules))]:
            free.setdefault(" and ".join(stages), []).append(arm)
    if free:
        where = "; ".join(f"in {stages} of {_arms_text(arms, good)}" for stages, arms in free.items())
        return f"weights do not sum to 1 {where}: a router can gain by growing them"
    return "weights sum to 1 in training and evaluation, in every arm"


def _as_trained(config: ConfigDict, good: pd.DataFrame, swept: list[str]) -> str:
    """Returns the arms that are evaluated with another selection than that of training, at any point."""
    differing: dict[str, list[str]] = {}
    for arm, rules_of in _rules(config, good, swept):
        training, evaluation = (" then ".join(dict.fromkeys(map(_rule_text, rules))) for rules in rules_of.values())
        if training != evaluation:
            differing.setdefault(f"trained by {training}, evaluated by {evaluation}", []).append(arm)
    return "; ".join(f"{text}: {_arms_text(arms, good)}" for text, arms in differing.items()) or "yes, in every arm"


def _rules(config: ConfigDict, good: pd.DataFrame, swept: list[str]) -> Iterator[tuple[str, dict[str, list[Rule]]]]:
    """Yields the arms with routers at all points, with their selections of training and of evaluation."""
    keys = [key for key in swept if key.startswith("selection.")]
    for *values, arm in good[[*keys, "arm"]].drop_duplicates().sort_values("arm").itertuples(index=False):
        point = {key: type(value_of(config, key))(value) for key, value in zip(keys, values, strict=True)}
        arm_config = override(override(config, point), changes_of(arm, config))
        if problem_of(arm_config).models[arm_config.model].routed:
            training = [rule_of(phase.selection) for phase in configs_of(arm_config)]
            yield arm, {"training": training, "evaluation": [rule_of(arm_config.selection, evaluation=True)]}


def _arms_text(arms: list[str], good: pd.DataFrame) -> str:
    """Returns the name of each arm once, or "every arm"."""
    return "every arm" if {*arms} == {*good.arm} else ", ".join(dict.fromkeys(arms))


def _rule_text(rule: Rule) -> str:
    """Returns the name of a selection, with its K and capacity factor if it reads them."""
    reads = SELECTIONS[rule.name].reads
    capacity = (
        f" and capacity factor {rule.capacity_factor:g}" if "capacity_factor" in reads and rule.capacity_factor else ""
    )
    return rule.name + (f" of {rule.k}" if "k" in reads else "") + capacity


def _sums_to_1(rule: Rule) -> bool:
    """True if the weights of a token sum to 1; within samples, if those of an expert's patches do, or are constants."""
    selection = SELECTIONS[rule.name]
    if selection.within_samples:
        return rule.patch_weights != "all"
    return not selection.sparse or (rule.renormalise and "renormalise" in selection.reads)


def _still(good: pd.DataFrame) -> str:
    """Returns the arms whose router parameters differ from those of step 0 in any bit."""
    moved = good.groupby("arm")["router/params_changed"].max()
    return "router parameters differ from step 0 in: " + (", ".join(moved.index[moved > 0]) or "no arm")


def _power(good: pd.DataFrame, swept: list[str]) -> str:
    """Returns the number of seeds, and the half-width of the paired interval of learned against frozen."""
    groups = [group for _, group in good.groupby(swept)] if swept else [good]
    loss = "eval/loss" if "eval/loss" in good else "test/loss"
    gaps = [statistics.estimate(paired(group, UNTRAINED, REFERENCE, loss)) for group in groups]
    widths = [(gap.high - gap.low) / 2 for gap in gaps if gap.n > 1]
    seeds = good.groupby([*swept, "arm"]).seed.nunique()
    text = f"{seeds.min()} to {seeds.max()}" if seeds.min() < seeds.max() else f"{seeds.min()}"
    half = f"; half-width of log(frozen / learned): {np.median(widths):.2g} (median over points)" if widths else ""
    return f"{text} seeds a point{half}"
