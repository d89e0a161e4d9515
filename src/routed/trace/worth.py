"""What each router is worth: the losses of a surgery as a table, sentences of what they say, and what they cannot say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from routed.trace.numbers import Number, ratio, resampler
from routed.trace.replacements import EVERY, TRAINED
from routed.trace.surgery import ALL, Found, Job
from routed.trace.tokens import GROUPS

#: What knows nothing of a token: what it loses is what the trained router is worth.
IGNORANT = "noise"


def table(found: Found) -> pd.DataFrame:
    """A row a place and router: its loss, and what is lost, `lost` nats a token more than `against`, with its interval over rows.

    `against` is the model as it is; of repaired routers the model whose trained routers at the same place were repaired too, and of
    these the model as it is. `kept` is the share of the router's worth that is not lost: 1 - lost / (what noise loses, against the
    same). Losses of several draws are means, `spread` is the largest minus the least of their means. Of what could not be
    measured `reason` says why.
    """
    rows = len(next(iter(found.losses.values())))
    groups = min(GROUPS, rows)
    at = np.arange(rows) * groups // rows  # neighbours in the text are alike, and of one group
    weights, sizes = resampler(groups), np.bincount(at, minlength=groups)

    def mean(values: np.ndarray) -> Number:
        return ratio(np.bincount(at, values, groups), sizes, weights)

    as_is = found.losses[Job(ALL, "")]
    lines = [
        {"place": ALL, "router": "", "repaired": 0, "draws": 1, "loss": as_is.mean(), "reason": ""}
        | _ends(mean(as_is), "loss")
    ]
    for place, name, repaired in dict.fromkeys(
        (job.place, job.name, job.repaired) for job in [*found.losses, *found.reasons] if job.name
    ):
        line: dict[str, Any] = {"place": place, "router": name, "repaired": repaired, "reason": ""}
        drawn = _of(found, place, name, repaired)
        base = as_is if not repaired or name == TRAINED else _mean(_of(found, place, TRAINED, repaired))
        if not drawn or base is None:
            why = [
                why
                for job, why in found.reasons.items()
                if (job.place, job.name, job.repaired) == (place, name, repaired)
            ]
            lines.append(
                line | {"reason": why[0] if why else "the trained router could not be repaired, so nothing is like it"}
            )
            continue
        losses = _mean(drawn)
        assert losses is not None
        lost, ignorant = losses - base, _mean(_of(found, place, IGNORANT, 0))
        line |= (
            {"draws": len(drawn), "loss": losses.mean(), "against": base.mean()}
            | mean(lost)._asdict()
            | _ends(mean(losses), "loss")
        )
        line |= {"spread": np.ptp([one.mean() for one in drawn]) if len(drawn) > 1 else np.nan}
        if ignorant is not None and name not in (IGNORANT, TRAINED):
            worth = mean(ignorant - base)
            if worth.low > 0:  # else there is nothing to keep a share of
                kept = ratio(
                    np.bincount(at, ignorant - losses, groups), np.bincount(at, ignorant - base, groups), weights
                )
                line |= {"kept": kept.value, "kept_low": kept.low, "kept_high": kept.high}
        lines.append(line)
    columns = [
        "place", "router", "repaired", "draws", "loss", "loss_low", "loss_high", "against", "lost", "low", "high", "spread", "kept", "kept_low",
        "kept_high", "reason",
    ]  # fmt: skip
    return pd.DataFrame(lines).rename(columns={"value": "lost"}).reindex(columns=columns)


def _of(found: Found, place: str, name: str, repaired: int) -> list[np.ndarray]:
    return [
        losses for job, losses in found.losses.items() if (job.place, job.name, job.repaired) == (place, name, repaired)
    ]


def _mean(drawn: list[np.ndarray]) -> np.ndarray | None:
    return np.mean(drawn, axis=0) if drawn else None


def _ends(number: Number, name: str) -> dict[str, float]:
    return {f"{name}_low": number.low, f"{name}_high": number.high}


def nats(row: Any) -> str:
    """What is lost, with its interval."""
    return f"{row.lost:.3g} [{row.low:.3g}, {row.high:.3g}]" if row.low == row.low else f"{row.lost:.3g}"


def kept(row: Any) -> str:
    """The share of the worth that is kept, with its interval; a dash where there is none."""
    if row.kept != row.kept:
        return "–"
    return f"{100 * row.kept:z.0f} % [{100 * row.kept_low:z.0f}, {100 * row.kept_high:z.0f}]"


def findings(found: Found, worth: pd.DataFrame) -> list[str]:
    """Sentences on what was measured."""
    return [*_whole(found, worth), *_kinds(found, worth), *_places(found, worth)]


def _whole(found: Found, worth: pd.DataFrame) -> Iterator[str]:
    first = worth.iloc[0]
    yield (
        f"As it is, the model has a loss of {first.loss:.4g} nats a token"
        + (f" [{first.loss_low:.4g}, {first.loss_high:.4g}]" if first.loss_low == first.loss_low else "")
        + f", on {found.tokens:,} tokens."
    )
    noise = _row(worth, ALL, IGNORANT)
    if noise is not None:
        yield (
            f"With scores that know nothing of the token, as sharp as the trained ones, in every layer it loses {nats(noise)} nats:"
            " what its routers are worth together to these experts."
        )
    repaired = _row(worth, ALL, TRAINED, found.repair_steps)
    if found.repair_steps and repaired is not None:
        yield (
            f"Going on with the trained routers alone for {found.repair_steps} steps changes the loss by {_signed(repaired)} nats: what any"
            " repair gains from this text, so repaired routers are compared with these."
        )


def _kinds(found: Found, worth: pd.DataFrame) -> Iterator[str]:
    for name in [name for name in EVERY if name not in (IGNORANT, TRAINED)]:
        plain, repaired = (_row(worth, ALL, name, steps) for steps in (0, found.repair_steps))
        if plain is None:
            continue
        text = f"{EVERY[name].words[0].upper()}{EVERY[name].words[1:]}, in every layer: loses {nats(plain)} nats"
        if plain.kept == plain.kept:
            text += f" and keeps {kept(plain)} of the routers' worth"
        if name == "table":
            text += f" ({100 * found.unseen:.1f} % of the tokens have an id that the other text lacks, and get the loads of all)"
        if found.repair_steps and repaired is not None:
            text += f"; repaired, {nats(repaired)}" + (
                f" and {kept(repaired)}" if repaired.kept == repaired.kept else ""
            )
        yield text + "."


def _places(found: Found, worth: pd.DataFrame) -> Iterator[str]:
    rows = worth[(worth.router == IGNORANT) & (worth.place != ALL) & (worth.reason == "")]
    together = _row(worth, ALL, IGNORANT)
    if len(rows) < 2 or together is None:
        return
    best, least = rows.loc[rows.lost.idxmax()], rows.loc[rows.lost.idxmin()]
    total = float(rows.lost.sum())
    relation = (
        "as much as"
        if abs(total - together.lost) < 0.1 * abs(together.lost)
        else "less than"
        if total < together.lost
        else "more than"
    )
    yield (
        f"One at a time, routers are worth from {nats(least)} ({least.place}) to {nats(best)} nats ({best.place}); their sum, {total:.3g}, is"
        f" {relation} what all are worth together."
    )
    others = [
        name
        for name in ("table", "random", "shuffled", "layer")
        if len(worth[(worth.router == name) & worth.kept.notna() & (worth.place != ALL)])
    ]
    for name in others[:1]:
        some = worth[(worth.router == name) & (worth.repaired == 0) & (worth.place != ALL) & worth.kept.notna()]
        if len(some) > 1:
            high, low = some.loc[some.kept.idxmax()], some.loc[some.kept.idxmin()]
            yield (
                f"{EVERY[name].words[0].upper()}{EVERY[name].words[1:]}: keeps between {kept(low)} ({low.place}) and {kept(high)} ({high.place}) of a"
                " single router's worth."
            )


def _row(worth: pd.DataFrame, place: str, name: str, repaired: int = 0) -> Any:
    """The row of a router, if it was measured."""
    some = worth[(worth.place == place) & (worth.router == name) & (worth.repaired == repaired) & (worth.reason == "")]
    return some.iloc[0] if len(some) else None


def _signed(row: Any) -> str:
    return f"{row.lost:+.3g} [{row.low:+.3g}, {row.high:+.3g}]" if row.low == row.low else f"{row.lost:+.3g}"


def unsaid(found: Found, worth: pd.DataFrame) -> list[str]:
    """What cannot be said from this surgery, and what it would take."""
    says = [
        "What a model that was trained with such a router would lose: these experts were trained for the trained router, so that is another number,"
        " and likely a smaller one. It takes a training of its own.",
        "What is lost on other text than this, or in tasks: the loss is that of the next token.",
    ]
    if len(next(iter(found.losses.values()))) < 2:
        says.append("How sure any number is: give more than one row of text.")
    if not found.repair_steps:
        says.append("What routers of these kinds would lose if they were trained a little: set --repair_steps.")
    else:
        says.append(
            f"What a longer repair would gain: these took {found.repair_steps} steps, with the loss of the text alone and no loss of balance."
        )
    if found.draws < 2 and any(EVERY[name].drawn for name in worth.router[worth.router != ""]):
        says.append(
            "How much of a loss is the one draw of what was drawn: set --draws above 1. Intervals are over text alone."
        )
    for (name, repaired, why), rows in worth[worth.reason != ""].groupby(["router", "repaired", "reason"], sort=False):
        where = "anywhere" if ALL in set(rows.place) else f"in {', '.join(rows.place)}"
        says.append(
            f"{EVERY[name].words[0].upper()}{EVERY[name].words[1:]}{', repaired' if repaired else ''}, {where}: {why}."
        )
    return says
