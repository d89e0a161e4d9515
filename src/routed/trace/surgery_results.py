"""Results of a surgery as a table, and as values for the sentences of surgery_findings.j2 and surgery_unsaid.j2."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from routed.trace.numbers import Number, bootstrap_weights, ratio
from routed.trace.replacements import EVERY, TRAINED
from routed.trace.sentences import paragraphs
from routed.trace.surgery import ALL, SurgeryResult
from routed.trace.tokens import GROUPS

#: The replacement that ignores the token: its loss is the worth of the trained router.
NOISE = "noise"
COLUMNS = (
    "place",
    "router",
    "repaired",
    "draws",
    "loss",
    "loss_low",
    "loss_high",
    "against",
    "lost",
    "low",
    "high",
    "spread",
    "kept",
    "kept_low",
    "kept_high",
    "reason",
)

#: Layer, replacement and repair steps of jobs that differ in their draw alone.
Key = tuple[str, str, int]


class _Rows:
    """Means over rows of text with intervals; the bootstrap draws groups of neighbouring rows, which are alike."""

    def __init__(self, rows: int) -> None:
        self.groups = groups_of(rows)
        self.group = np.arange(rows) * self.groups // rows
        self.weights = bootstrap_weights(self.groups)

    def ratio(self, above: np.ndarray, below: np.ndarray | None = None) -> Number:
        """Returns the ratio of two sums over rows; without `below`, the mean."""
        sums = [np.bincount(self.group, values, self.groups) for values in (above, below)]
        return ratio(sums[0], sums[1], self.weights)


def groups_of(rows: int) -> int:
    """Returns the number of groups of neighbouring rows."""
    return min(GROUPS, rows)


def table(result: SurgeryResult) -> pd.DataFrame:
    """Returns a row for each layer (`place`) and replacement (`router`), with its loss and interval over rows of text.

    `lost` is the loss in nats a token above `against`: the loss of the model as it is, or for repaired routers that
    of the model whose trained routers in the same place were repaired too. `kept` is the share of the router's worth
    that is not lost: 1 - lost / (loss of noise above the same). Losses of several draws are means; `spread` is the
    range of their means. `reason` says why a row has no loss.
    """
    rows = _Rows(len(next(iter(result.losses.values()))))
    drawn: dict[Key, list[np.ndarray]] = defaultdict(list)
    for job, losses in result.losses.items():
        drawn[job.layer, job.replacement, job.repair_steps].append(losses)
    reasons: dict[Key, str] = {}
    for job, reason in result.reasons.items():
        reasons.setdefault((job.layer, job.replacement, job.repair_steps), reason)
    means = {key: np.mean(losses, axis=0) for key, losses in drawn.items()}
    as_is = means[ALL, "", 0]
    lines = [{"place": ALL, "router": "", "repaired": 0, "draws": 1, "reason": ""} | _loss(rows, as_is)]
    for layer, name, steps in [key for key in dict.fromkeys([*means, *reasons]) if key[1]]:
        line: dict[str, Any] = {"place": layer, "router": name, "repaired": steps}
        mean = means.get((layer, name, steps))
        base = as_is if not steps or name == TRAINED else means.get((layer, TRAINED, steps))
        if mean is None or base is None:
            unrepaired = "the trained router could not be repaired, so there is nothing to compare with"
            lines.append(line | {"reason": reasons.get((layer, name, steps), unrepaired)})
            continue
        draws = [values.mean() for values in drawn[layer, name, steps]]
        line |= {"draws": len(draws), "against": base.mean(), "reason": ""} | _loss(rows, mean)
        line |= {"spread": np.ptp(draws) if len(draws) > 1 else np.nan}
        line |= _named(rows.ratio(mean - base), "lost", "low", "high")
        noise = means.get((layer, NOISE, 0))
        # Without a worth above 0 there is nothing to keep a share of.
        if noise is not None and name not in (NOISE, TRAINED) and rows.ratio(noise - base).low > 0:
            line |= _named(rows.ratio(noise - mean, noise - base), "kept", "kept_low", "kept_high")
        lines.append(line)
    return pd.DataFrame(lines).reindex(columns=[*COLUMNS])


def _named(number: Number, *names: str) -> dict[str, float]:
    return dict(zip(names, number, strict=False))


def _loss(rows: _Rows, losses: np.ndarray) -> dict[str, Any]:
    return _named(rows.ratio(losses), "loss", "loss_low", "loss_high") | {"loss": losses.mean()}


def nats(row: Any, form: str = "{:.3g}") -> str:
    """Returns the lost nats of a row with their interval."""
    return _with_interval(form, row.lost, row.low, row.high)


def kept_share(row: Any) -> str:
    """Returns the kept share of the worth with its interval; a dash if a row has none."""
    if row.kept != row.kept:
        return "–"
    return f"{100 * row.kept:z.0f} % [{100 * row.kept_low:z.0f}, {100 * row.kept_high:z.0f}]"


def _with_interval(form: str, value: float, low: float, high: float) -> str:
    interval = f" [{form.format(low)}, {form.format(high)}]" if low == low else ""
    return form.format(value) + interval


def findings(result: SurgeryResult, worth: pd.DataFrame) -> list[str]:
    """Returns sentences on the measured losses."""
    first, steps = worth.iloc[0], result.repair_steps
    return paragraphs(
        "surgery_findings.j2",
        result=result,
        loss=_with_interval("{:.4g}", float(first.loss), first.loss_low, first.loss_high),
        noise=measured(worth, ALL, NOISE),
        trained_repaired=measured(worth, ALL, TRAINED, steps) if steps else None,
        replacements=[*_in_every_layer(worth, steps)],
        alone=_noise_alone(worth),
        kept_alone=_kept_alone(worth),
        nats=nats,
        signed=lambda row: nats(row, "{:+.3g}"),
        kept=kept_share,
    )


def _in_every_layer(worth: pd.DataFrame, steps: int) -> Iterator[dict[str, Any]]:
    for name, replacement in EVERY.items():
        plain = measured(worth, ALL, name)
        if name not in (NOISE, TRAINED) and plain is not None:
            repaired = measured(worth, ALL, name, steps) if steps else None
            yield {"name": name, "label": replacement.label, "plain": plain, "repaired": repaired}


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


def _kept_alone(worth: pd.DataFrame) -> dict[str, Any] | None:
    """Returns the layers of the least and the largest kept share, for the first replacement that has shares."""
    single = worth[(worth.place != ALL) & worth.kept.notna()]
    name = next((name for name in ("table", "random", "shuffled", "layer") if name in set(single.router)), None)
    rows = single[(single.router == name) & (single.repaired == 0)]
    if measured(worth, ALL, NOISE) is None or name is None or len(rows) < 2:
        return None
    return {"label": EVERY[name].label, "least": rows.loc[rows.kept.idxmin()], "most": rows.loc[rows.kept.idxmax()]}


def measured(worth: pd.DataFrame, layer: str, name: str, steps: int = 0) -> Any:
    """Returns the row of a replacement; None if it was not measured."""
    some = worth[(worth.place == layer) & (worth.router == name) & (worth.repaired == steps) & (worth.reason == "")]
    return some.iloc[0] if len(some) else None


def unsaid(result: SurgeryResult, worth: pd.DataFrame) -> list[str]:
    """Returns sentences on the questions that this surgery cannot answer, with what would answer them."""
    failures = []
    for (name, steps, reason), rows in worth[worth.reason != ""].groupby(["router", "repaired", "reason"], sort=False):
        layers = "" if ALL in set(rows.place) else ", ".join(rows.place)
        failures.append({"label": EVERY[name].label, "repaired": steps > 0, "layers": layers, "reason": reason})
    return paragraphs(
        "surgery_unsaid.j2",
        result=result,
        rows=len(next(iter(result.losses.values()))),
        has_drawn=any(EVERY[name].drawn for name in worth.router if name),
        failures=failures,
    )
