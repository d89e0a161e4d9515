"""Results of a surgery and of regret as tables, and as values for surgery_findings.j2 and surgery_unsaid.j2."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pandas as pd

from routed.analysis.wording import paragraphs
from routed.trace.kinds import CHOICES, EVERY, SHARES, SUBSETS, TRAINED, name_of
from routed.trace.numbers import bootstrap_weights, ratio
from routed.trace.regret import SHARPENED
from routed.trace.surgery_jobs import ALL, SurgeryResult
from routed.trace.tokens import groups_of

#: The replacement that ignores the token: its loss is the worth of the trained router.
NOISE = "noise"
COLUMNS = (
    *("place", "router", "repaired", "draws", "loss", "loss_low", "loss_high", "against"),
    *("lost", "low", "high", "spread", "kept", "kept_low", "kept_high", "reason"),
)
#: Column of losses -> label of the router, in the order of the page.
REGRET_ROUTERS = {
    "as_is": "the trained router",
    "repaired": "the trained router, repaired",
    "sharpened": f"the trained router, scores times {SHARPENED:g}",
    "table": "table by token id, from other text",
    "hash": "hash of the token id",
    "random": "a random choice",
}


def table(result: SurgeryResult) -> pd.DataFrame:
    """Returns a row for each layer (`place`) and replacement (`router`), with its loss and interval over rows of text.

    `lost` is the loss in nats a token above `against`: the loss of the model as it is, or for repaired routers that
    of the model whose trained routers in the same place were repaired too. `kept` is the share of the router's worth
    that is not lost: 1 - lost / (loss of noise above the same). Losses of several draws are means; `spread` is the
    range of their means. `reason` says why a row has no loss.
    """
    rows = len(next(iter(result.losses.values())))
    groups = groups_of(rows)
    group, weights = np.arange(rows) * groups // rows, bootstrap_weights(groups)

    def interval(names: str, above: np.ndarray, below: np.ndarray | None = None) -> dict[str, float]:
        """Returns the ratio of two sums over rows and its ends; without `below`, the mean."""
        sums = [np.bincount(group, values, groups) for values in (above, below)]
        return dict(zip(names.split(), ratio(sums[0], sums[1], weights), strict=False))

    drawn: dict[tuple[str, str, int], list[np.ndarray]] = defaultdict(list)  # draws of a layer, replacement and repair
    for job, losses in result.losses.items():
        drawn[job.layer, job.replacement, job.repair_steps].append(losses)
    reasons: dict[tuple[str, str, int], str] = {}
    for job, reason in result.reasons.items():
        reasons.setdefault((job.layer, job.replacement, job.repair_steps), reason)
    means = {key: np.mean(losses, axis=0) for key, losses in drawn.items()}
    as_is, lines = means[ALL, "", 0], list[dict[str, Any]]()
    for layer, name, steps in dict.fromkeys([(ALL, "", 0), *means, *reasons]):
        key, noise = (layer, name, steps), means.get((layer, NOISE, 0))
        line: dict[str, Any] = {"place": layer, "router": name, "repaired": steps}
        base = as_is if not steps or name == TRAINED else means.get((layer, TRAINED, steps))
        if key not in means or base is None:
            unrepaired = "the trained router could not be repaired, so there is nothing to compare with"
            lines.append(line | {"reason": reasons.get(key, unrepaired)})
            continue
        mean, draws = means[key], [losses.mean() for losses in drawn[key]]
        line |= {"draws": len(draws), "reason": ""} | interval("loss loss_low loss_high", mean) | {"loss": mean.mean()}
        if name:
            line |= {"against": base.mean(), "spread": np.ptp(draws) if len(draws) > 1 else np.nan}
            line |= interval("lost low high", mean - base)
            # Without a worth above 0 there is nothing to keep a share of.
            if noise is not None and name not in (NOISE, TRAINED) and interval("_ low", noise - base)["low"] > 0:
                line |= interval("kept kept_low kept_high", noise - mean, noise - base)
        lines.append(line)
    return pd.DataFrame(lines).reindex(columns=[*COLUMNS])


def nats(row: Any, form: str = "{:.3g}") -> str:
    """Returns the lost nats of a row with their interval."""
    return _with_interval(form, row.lost, row.low, row.high)


def kept_share(row: Any) -> str:
    """Returns the kept share of the worth with its interval; a dash if a row has none."""
    if row.kept != row.kept:
        return "–"
    return f"{100 * row.kept:z.0f} % [{100 * row.kept_low:z.0f}, {100 * row.kept_high:z.0f}]"


def _with_interval(form: str, value: float, low: float, high: float) -> str:
    return form.format(value) + (f" [{form.format(low)}, {form.format(high)}]" if low == low else "")


def findings(result: SurgeryResult, worth: pd.DataFrame, regret: pd.DataFrame) -> list[str]:
    """Returns sentences on the measured losses."""
    first, steps = worth.iloc[0], result.repair_steps

    def repaired(name: str) -> Any:
        return measured(worth, ALL, name, steps) if steps else None

    replacements = [
        {"name": name, "label": replacement.label, "plain": plain, "repaired": repaired(name)}
        for name, replacement in EVERY.items()
        if name not in (NOISE, TRAINED, *SUBSETS) and (plain := measured(worth, ALL, name)) is not None
    ]
    replacements.sort(key=lambda replacement: replacement["plain"].lost)
    mended = [replacement for replacement in replacements if replacement["repaired"] is not None]
    return paragraphs(
        "trace/surgery_findings.j2",
        result=result,
        mended=min(mended, key=lambda replacement: replacement["repaired"].lost) if mended else None,
        has_table="table" in {replacement["name"] for replacement in replacements},
        loss=_with_interval("{:.4g}", float(first.loss), first.loss_low, first.loss_high),
        noise=measured(worth, ALL, NOISE),
        trained_repaired=repaired(TRAINED),
        replacements=replacements,
        alone=_noise_alone(worth),
        subsets=_subsets(worth),
        regret=regret_summary(regret),
        interval=_with_interval,
        nats=nats,
        signed=lambda row: nats(row, "{:+.3g}"),
        kept=kept_share,
    )


def _subsets(worth: pd.DataFrame) -> list[dict[str, Any]]:
    """Returns the measured rows of each share of kept experts, by how the experts were chosen, the largest first."""
    by_share = []
    for share in sorted(SHARES, reverse=True):
        rows = {choice: measured(worth, ALL, name_of(choice, share)) for choice in CHOICES}
        if rows["most"] is not None:
            by_share.append({"share": f"{share:g}"} | rows)
    return by_share


def _noise_alone(worth: pd.DataFrame) -> dict[str, Any] | None:
    """Returns the layers of least and largest worth, and the sum of all, beside the worth of all routers together."""
    rows = worth[(worth.router == NOISE) & (worth.place != ALL) & (worth.reason == "")]
    together = measured(worth, ALL, NOISE)
    if len(rows) < 2 or together is None:
        return None
    total = float(rows.lost.sum())
    equal = abs(total - together.lost) < 0.1 * abs(together.lost)
    relation = "as much as" if equal else "less than" if total < together.lost else "more than"
    least, most = rows.loc[rows.lost.idxmin()], rows.loc[rows.lost.idxmax()]
    return {"least": least, "most": most, "sum": total, "relation": relation}


def measured(worth: pd.DataFrame, layer: str, name: str, steps: int = 0) -> Any:
    """Returns the row of a replacement; None if it was not measured."""
    some = worth[(worth.place == layer) & (worth.router == name) & (worth.repaired == steps) & (worth.reason == "")]
    return some.iloc[0] if len(some) else None


def unsaid(result: SurgeryResult, worth: pd.DataFrame, regret: pd.DataFrame) -> list[str]:
    """Returns sentences on the questions that this surgery cannot answer, with what would answer them."""
    failures = []
    for (name, steps, reason), rows in worth[worth.reason != ""].groupby(["router", "repaired", "reason"], sort=False):
        layers = "" if ALL in set(rows.place) else ", ".join(rows.place)
        failures.append({"label": EVERY[name].label, "repaired": steps > 0, "layers": layers, "reason": reason})
    return paragraphs(
        "trace/surgery_unsaid.j2",
        result=result,
        rows=len(next(iter(result.losses.values()))),
        has_drawn=any(EVERY[name].drawn for name in worth.router if name),
        failures=failures,
        regret=regret_summary(regret),
        without_regret={layer: text for layer, text in result.regret.items() if isinstance(text, str)},
    )


def regret_table(result: SurgeryResult) -> pd.DataFrame:
    """Returns a row for each layer and router: its regret in nats, and shares of it, with intervals over rows.

    The regret of a router is the mean of (loss of the token with its choice) - (least loss of all tries). `recovered`
    is the share of the trained router's regret that the router does not have. `best` is the share of tokens for which
    no try was better than the trained choice. `half` is the regret that half of the tries would show.
    """
    lines = list[dict[str, Any]]()
    for layer, losses in result.regret.items():
        if isinstance(losses, str):
            continue
        _, group = np.unique(losses["group"], return_inverse=True)
        weights = bootstrap_weights(int(group.max()) + 1)
        shared = {
            "layer": layer,
            "tokens": len(group),
            "tries": int(losses["tries"].max()),
            "refused": losses["refused"].mean(),
            "best": (losses["as_is"] <= losses["best"]).mean(),
            "half": (losses["as_is"] - losses["half"]).mean(),
            "exact": bool(losses["every"].all()),
            "complete": bool(losses["complete"].all()),
            "deviation": losses["deviation"].mean(),
        }
        for name in REGRET_ROUTERS:
            finite = np.isfinite(losses[name])
            if not finite.any():
                continue
            trained = np.where(finite, losses["as_is"] - losses["best"], 0)
            more = np.where(finite, losses[name] - losses["best"], 0)
            trained, more, counted = (np.bincount(group, part) for part in (trained, more, finite))
            regret = ratio(more, counted, weights)
            line = shared | {"router": name, "regret": regret.value, "low": regret.low, "high": regret.high}
            if name == "repaired":
                recovered = ratio(trained - more, trained, weights)
                line |= {"recovered": recovered.value} | {
                    f"recovered_{end}": getattr(recovered, end) for end in ("low", "high")
                }
            lines.append(line)
    columns = ("layer", "router", "regret", "low", "high", "recovered", "recovered_low", "recovered_high")
    more_columns = ("tokens", "tries", "exact", "complete", "best", "half", "refused", "deviation")
    return pd.DataFrame(lines).reindex(columns=[*columns, *more_columns])


def regret_summary(regret: pd.DataFrame) -> dict[str, Any] | None:
    """Returns values for the sentences: the layer with the largest regret, and the row of each router there."""
    trained = regret[regret.router == "as_is"]
    if not len(trained):
        return None
    most = trained.loc[trained.regret.idxmax()]
    rows = regret[regret.layer == most.layer].set_index("router")
    return {"most": most, "rows": {name: rows.loc[name] for name in REGRET_ROUTERS if name in rows.index}}
