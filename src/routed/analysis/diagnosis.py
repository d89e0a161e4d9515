"""The gap from frozen to learned decomposed, and the threats to validity, both filled from the rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from ml_collections import ConfigDict

from routed.analysis import controls, shapley, statistics
from routed.analysis.paired_values import Rows, at_edge, ends, paired
from routed.analysis.wording import paragraphs
from routed.engine.rows import format_value
from routed.layer.model_losses import LIMITS
from routed.layer.rule import SelectionRule, selection_rule
from routed.layer.selection import SELECTIONS
from routed.plan.arms import REFERENCE, UNTRAINED, changes_of, fair_arms
from routed.plan.config import problem_of
from routed.settings.tree import override, value_of
from routed.tasks import TASKS
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
    parts = []
    for index, (name, _, note) in enumerate(path):
        share = shapley.share_of(steps[:, index], whole)
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
    rows = Rows(table, config, swept, problem_of(config))
    runs = rows.last.drop_duplicates("run")  # a run may stand at several points
    good, point, problem = rows.last[rows.last.status == "ok"], rows.at({}), problem_of(config)
    changes = _changes(rows, point) if config.gate.horizon != 1 else {}
    steered = [column for column in good if column.startswith(STEERED) and good[column].notna().any()]
    settings = ", ".join(f"{key} = {format_value(point[key].iloc[0])}" for key in swept) if len(point) else ""
    facts: dict[str, Any] = {
        "where": f" (at {settings})" if settings else "",
        "steps": config.steps,
        "horizon": config.gate.horizon,
        "loss": problem.loss,
        "changes": {arm: 100 * change for arm, change in changes.items() if np.isfinite(change)},
        "unknown": [arm for arm, change in changes.items() if not np.isfinite(change)],
        "bigram": None,
        "runs": len(runs),
        "diverged": _counts(runs[runs.status == "diverged"]),
        "tuned": _tuned(table, runs, config, swept),
        "routed": {},
        "steered": {column.removeprefix(STEERED): _steered(good, column) for column in steered},
        "has_trunk": config.data.name not in TASKS or problem.models[config.model].inner is not None,
        "stop_gradient": None if "router.stop_gradient" in swept else config.router.stop_gradient,
        "moved": [arm for arm, share in good.groupby("arm")["router/params_changed"].max().items() if share > 0],
        "data": problem.about(config),
    }
    if "eval/bigram" in point:
        bigram, losses = point["eval/bigram"].mean(), _means(point, "eval/loss")
        facts |= {"bigram": bigram, "weak": losses[losses >= bigram].to_dict()}
    if "router/entropy_token" in good:
        trained = "router/entropy_token_train" in good
        entropies = _means(point, "router/entropy_token_train" if trained else "router/entropy_token")
        facts["routed"] = {
            "inputs": "training" if trained else "test",
            "entropies": entropies.reindex([REFERENCE, UNTRAINED, *fair_arms()]).dropna().to_dict(),
            "dropped": good["router/dropped"].max(),
            "dead": (100 * _means(point, "router/dead")).to_dict(),
        }
    answers = paragraphs("analysis/threats.j2", **facts, **_selections(config, good, swept), **_power(good, swept))
    return [(question, answer) for question, _, answer in (text.partition(" | ") for text in answers)]


def _means(rows: pd.DataFrame, metric: str) -> pd.Series:
    """Returns the mean of a metric by arm, over finite runs."""
    return rows[rows.status == "ok"].groupby("arm")[metric].mean().dropna()


def _counts(rows: pd.DataFrame) -> dict[str, int]:
    """Returns the number of rows of each arm."""
    return rows.arm.value_counts(sort=False).to_dict()


def _changes(rows: Rows, point: pd.DataFrame) -> dict[str, float]:
    """Returns the extrapolated relative change of each arm's loss; NaN where it is unknown."""
    config, changes = rows.config, {}
    for arm in sorted(set(point.arm[point.status == "ok"])):
        change = ends(rows.history({"arm": arm}, {}, problem_of(config).loss, arm), config.gate.horizon, logs=True)
        finite = len(change) and np.isfinite(change.to_numpy()).all()
        changes[arm] = np.expm1((change.later - change.now).mean()) if finite else np.nan
    return changes


def _tuned(table: pd.DataFrame, rows: pd.DataFrame, config: ConfigDict, swept: list[str]) -> dict[str, Any] | None:
    """Returns by arm the number of learning rates that were tried, the chosen ones, and the runs at the edge."""
    tuning = table[table.status == "tuning"]
    if "rates" not in swept and not len(tuning):
        return None
    rates = tuning.reindex(columns=["arm", *swept, "train/rate_scale", "train/router_rate"])
    rates = rates.dropna(subset="train/rate_scale").drop_duplicates()  # a row without: the run had diverged
    tried = rates.groupby(["arm", *swept]).size().groupby("arm").max()
    tuned = rows[rows.rates == "tuned"] if "rates" in rows else rows
    return {
        "tried": tried.to_dict(),
        "chosen": {arm: _chosen(runs) for arm, runs in tuned.groupby("arm")},
        "edge": _counts(tuned[at_edge(tuned, config)]),
    }


def _chosen(runs: pd.DataFrame) -> str:
    """Returns the multipliers that tuning chose for an arm, with the router's rate where it was chosen too."""
    pairs = (
        runs.reindex(columns=["train/rate_scale", "train/router_rate"])
        .dropna(subset="train/rate_scale")
        .drop_duplicates()
        .sort_values("train/rate_scale")
    )
    texts = [f"{scale:g}" + (f" (router {rate:g})" if rate == rate else "") for scale, rate in pairs.to_numpy()]
    return " or ".join(texts)


def _steered(good: pd.DataFrame, column: str) -> dict[str, Any]:
    """Returns the range of a moving coefficient's final values, and the number of runs in which it ended at a limit."""
    final = good.drop_duplicates("run")[column].dropna()
    at_limit = int(((final <= 1.001 * LIMITS[0]) | (final >= 0.999 * LIMITS[1])).sum())
    return {"least": final.min(), "most": final.max(), "at_limit": at_limit, "runs": len(final)}


def _selections(config: ConfigDict, good: pd.DataFrame, swept: list[str]) -> dict[str, Any]:
    """Returns the arms that are evaluated with another selection than that of training, and the arms whose combine
    weights need not sum to 1: their routers can gain by growing them.
    """
    differing: dict[str, list[str]] = {}
    free: dict[str, list[str]] = {}
    for arm, rules_of in _rules(config, good, swept):
        training, evaluation = (" then ".join(dict.fromkeys(map(_rule_text, rules))) for rules in rules_of.values())
        if training != evaluation:
            differing.setdefault(f"trained by {training}, evaluated by {evaluation}", []).append(arm)
        if stages := [name for name, rules in rules_of.items() if not all(map(_sums_to_1, rules))]:
            free.setdefault(" and ".join(stages), []).append(arm)

    def named(groups: dict[str, list[str]]) -> dict[str, str]:
        texts = {key: ", ".join(dict.fromkeys(arms)) for key, arms in groups.items()}
        return {key: "every arm" if {*groups[key]} == {*good.arm} else text for key, text in texts.items()}

    return {"differing": named(differing), "free": named(free)}


def _rules(
    config: ConfigDict, good: pd.DataFrame, swept: list[str]
) -> Iterator[tuple[str, dict[str, list[SelectionRule]]]]:
    """Yields the arms with routers at all points, with their selections of training and of evaluation."""
    keys = [key for key in swept if key.startswith("selection.")]
    for *values, arm in good[[*keys, "arm"]].drop_duplicates().sort_values("arm").itertuples(index=False):
        point = {key: type(value_of(config, key))(value) for key, value in zip(keys, values, strict=True)}
        arm_config = override(override(config, point), changes_of(arm, config))
        if problem_of(arm_config).models[arm_config.model].routed:
            training = [selection_rule(phase.selection) for phase in configs_of(arm_config)]
            yield arm, {"training": training, "evaluation": [selection_rule(arm_config.selection, evaluation=True)]}


def _rule_text(rule: SelectionRule) -> str:
    """Returns the name of a selection, with its K and capacity factor if it reads them."""
    reads = SELECTIONS[rule.name].reads
    capacity = (
        f" and capacity factor {rule.capacity_factor:g}" if "capacity_factor" in reads and rule.capacity_factor else ""
    )
    return rule.name + (f" of {rule.k}" if "k" in reads else "") + capacity


def _sums_to_1(rule: SelectionRule) -> bool:
    """True if the weights of a token sum to 1; within samples, if those of an expert's patches do, or are constants."""
    selection = SELECTIONS[rule.name]
    if selection.within_samples:
        return rule.patch_weights != "all"
    return not selection.sparse or (rule.renormalise and "renormalise" in selection.reads)


def _power(good: pd.DataFrame, swept: list[str]) -> dict[str, Any]:
    """Returns the numbers of seeds, and the median half-width of the paired interval of learned against frozen."""
    groups = [group for _, group in good.groupby(swept)] if swept else [good]
    loss = "eval/loss" if "eval/loss" in good else "test/loss"
    gaps = [statistics.estimate(paired(group, UNTRAINED, REFERENCE, loss)) for group in groups]
    widths = [(gap.high - gap.low) / 2 for gap in gaps if gap.n > 1]
    seeds = sorted(good.groupby([*swept, "arm"]).seed.nunique())
    return {"seeds": seeds, "half_width": np.median(widths) if widths else None}
