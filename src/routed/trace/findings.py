"""What the numbers of a trace say, a sentence each, and what cannot be said from it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from routed.metrics import information
from routed.trace.analysis import Analysis

#: A hash, or chance, that reaches so much of a number leaves little that had to be learned.
MOST = 0.8


def findings(found: Analysis) -> list[str]:
    """Sentences on the middle layer (median over layers), with the range over layers."""
    return [*_tables(found), *_labels(found), *_controls(found), *_others(found), *_churn(found)]


def _of(found: Analysis, name: str) -> pd.DataFrame:
    return found.table[found.table.number == name]


def _spread(values: pd.Series, form: str = "{:.2g}") -> str:
    """The median of layers, with the least and the largest."""
    middle, low, high = (form.format(float(f(values))) for f in (np.median, np.min, np.max))
    return middle if low == high else f"{middle} ({low} to {high} over layers)"


def _percent(values: pd.Series) -> str:
    return _spread(100 * values, "{:.0f} %")


def _above(rows: pd.DataFrame) -> tuple[int, int]:
    """On how many layers the interval lies above chance, and of how many."""
    return int((rows.low > rows.chance).sum()), len(rows)


def _sure(rows: pd.DataFrame) -> str:
    if rows.low.isna().all():
        return "without an interval, as the trace does not say which tokens are of one sequence"
    above, count = _above(rows)
    return f"above chance on {above} of {count} layers by the 95 % interval over sequences"


def _tables(found: Analysis) -> Iterator[str]:
    rows = _of(found, "table.token")
    if len(rows):
        more = ((rows.value - rows.chance) / (1 - rows.chance).clip(lower=1e-9)).clip(lower=0)
        yield (
            f"A table by token id, filled from half of the sequences, names {_percent(rows.value)} of the choices in the other half;"
            f" naming the most loaded experts for every token gets {_percent(rows.chance)}. So a hash that was made for it would decide"
            f" {_percent(more)} of what these leave open."
        )


def _labels(found: Analysis) -> Iterator[str]:
    for name in found.trace.labels:
        rows, given = _of(found, f"mi.{name}"), _of(found, f"given.{name}")
        whole = information.entropy(np.bincount(found.tokens.codes[name]))
        beyond = (rows.value - rows.chance).clip(lower=0)
        text = (
            f"Experts tell {_spread(beyond)} nats of {name} beyond shuffled labels, of {whole:.2g} nats that it has;"
            f" {_sure(rows)}."
        )
        if rows.hash.notna().all() and (rows.low.isna().all() or _above(rows)[0]):
            hashed = float(rows.hash.median() - rows.chance.median())
            much = (
                "as much, so this needs no learning"
                if hashed >= MOST * beyond.median()
                else "less, so the choice of experts follows it"
            )
            text += f" A hash of the token id, balanced and untrained, tells {max(hashed, 0):.2g}: {much}."
        if len(given):
            more = (given.value - given.chance).clip(lower=0)
            text += f" Where the token id is known, they tell {_spread(more)} nats more; {_sure(given)}."
        yield text


def _others(found: Analysis) -> Iterator[str]:
    load, dead = _of(found, "load_max"), _of(found, "dead")
    text = f"The most loaded expert gets {_spread(load.value, '{:.2f}')} times its fair share (chance {load.chance.median():.2f})"
    if len(dead):
        experts = found.trace.experts
        text += f"; {round(float(dead.value.sum()) * experts)} of {experts * len(dead)} experts are dead (below 1 % of a fair share)"
    dropped = _of(found, "dropped_1.25")
    yield text + f". Queues of 1.25 times a fair share would drop {_percent(dropped.value)} of the assignments."
    entropy, confidence = _of(found, "entropy_token"), _of(found, "confidence")
    if len(entropy):
        effective = np.exp(entropy.value)
        yield (
            f"A token's probabilities are spread like those of {_spread(effective, '{:.1f}')} equal experts of {found.trace.experts};"
            f" the largest is {_spread(confidence.value)}, of equal scores {confidence.chance.median():.2g}."
        )
    position = _of(found, "mi.position")
    if len(position):
        beyond = (position.value - position.chance).clip(lower=0)
        yield f"Experts tell {_spread(beyond)} nats of the position beyond shuffled positions; {_sure(position)}."
    pairs = _of(found, "pairs")
    if len(pairs):
        beyond = (pairs.value - pairs.chance).clip(lower=0)
        yield (
            f"Experts of one token depend on each other by {_spread(beyond)} nats a pair beyond chance; {_sure(pairs)}."
            + (
                f" Those of a hash, which are fixed for an id, do by {pairs.hash.median():.2g}."
                if pairs.hash.notna().all()
                else ""
            )
        )
    after = _of(found, "next")
    if len(after):
        beyond = (after.value - after.chance).clip(lower=0)
        text = f"A layer's first expert tells {_spread(beyond)} nats of the next layer's, beyond tokens shuffled in their sequences; {_sure(after)}."
        if after.hash.notna().all():
            text += f" Two hashes of the token id tell {after.hash.median():.2g} of each other, through the id alone."
        yield text
    alike = _of(found, "alike")
    if len(alike):
        text = (
            f"If experts are renumbered for it, {_percent(alike.value)} of the tokens have the same first expert in the next layer (independent"
            f" choices: {_percent(alike.chance)}); {_sure(alike)}."
        )
        if alike.hash.notna().all():
            text += f" Two hashes of the token id agree on {100 * alike.hash.median():.0f} %."
        yield text + _read_alike(found)


def _read_alike(found: Analysis) -> str:
    """Do routers of neighbouring layers read the same of the same features?"""
    if found.routers is None:
        return ""
    shares, chance = found.routers
    after = np.diagonal(shares, 1)
    return (
        f" Given a layer's features, the next layer's router agrees with its own on {_percent(pd.Series(after))} of the tokens, one drawn anew on"
        f" {_percent(pd.Series(chance))}."
        if np.isfinite(after).all()
        else ""
    )


def _controls(found: Analysis) -> Iterator[str]:
    for name in ("token", *found.trace.labels) if len(found.controls) else ():
        rows = found.controls[found.controls.number == f"mi.{name}"]
        if not len(rows):
            continue
        trained, shuffled, initial = (
            float((rows[of] - rows.chance).clip(lower=0).median()) for of in ("trained", "shuffled", "initial")
        )
        what = "token id" if name == "token" else name
        if trained > 0:
            yield (
                f"On the features that were kept, a router drawn anew tells {initial:.2g} nats of the {what} beyond chance ({initial / trained:.0%}"
                f" of the trained one's {trained:.2g}), and the trained one with shuffled features {shuffled:.2g}: the features sort tokens"
                " whoever routes."
                if initial > 0.5 * trained
                else f"On the features that were kept, a router drawn anew tells {initial:.2g} nats of the {what} beyond chance, the trained"
                f" one {trained:.2g}, and the trained one with shuffled features {shuffled:.2g}."
            )


def _churn(found: Analysis) -> Iterator[str]:
    if not len(found.churn):
        return
    for (before, after), rows in found.churn.groupby(["before", "after"], sort=False):
        yield (
            f"From {before} to {after}, {_percent(rows.value)} of a token's experts changed; of unrelated tokens' {_percent(rows.chance)} differ."
            + _renumbered(rows)
        )


def _renumbered(rows: pd.DataFrame) -> str:
    """Are the changes a renumbering of experts, and are they the router's own?"""
    text, fewer = "", 1 - rows.alike
    if (rows.value - fewer).median() > 0.05:
        text += f" Experts renumbered for the fewest changes, {_percent(fewer)} did (independent choices: {_percent(1 - rows.alike_chance)}): the partition is more alike than its numbers."
    if rows.router_alone.notna().all():
        text += f" On the later features the earlier router chooses {_percent(rows.router_alone)} otherwise: what the routers' own weights changed, the features apart."
    return text


def unsaid(found: Analysis) -> list[str]:
    """What cannot be said from this trace, and what it would take."""
    trace, says = found.trace, []
    if not trace.has_ids:
        says.append("How much a hash of the token id could do, and what experts know beyond it: give token_ids.")
    if not trace.has_sequences:
        says.append(
            "How sure any number is, as tokens of one text are alike: give sequence."
            + ("" if "position" in found.tokens.codes else " Positions are not known either.")
        )
    if not trace.labels:
        says.append("What experts know of languages, domains or parts of speech: give labels.")
    if "scores" not in trace.held:
        says.append("Entropies, confidence and margins of the router: keep its scores.")
    if found.between is None and len(trace.layers) > 1:
        says.append(
            "What a layer's first expert tells of the next one's: a token's experts are in no order; give weights."
        )
    if "kept" not in trace.held:
        says.append("What was dropped when the model ran: give kept. The drops here are those that queues would cause.")
    if len(found.churn) == 0:
        says.append("What training changed: give traces of several checkpoints on the same text, in order.")
    if trace.tokens < 100 * trace.experts:
        says.append("Which experts are dead: this takes 100 tokens an expert.")
    if not trace.has_features:
        says.append(
            "Whether a shuffled router, or one drawn anew, would do likewise: keep features of some tokens and router weights."
        )
    says.append(
        "What the routing is worth: a trace has no loss of a model with other routers; routed trace surgery measures it."
    )
    return says
