"""Findings about a trace: sentences that name the layers, most important first. Their words stand in findings.j2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from routed.analysis.wording import paragraphs
from routed.trace import information
from routed.trace.analysis import Analysis
from routed.trace.evidence import NAMED, Followed, among, followed, short_names

#: Share of a number above which a hash of the token id counts as good as the router.
AS_GOOD = 0.8


class Finding(NamedTuple):
    """One or two sentences, further ones, and the numbers that the figure beside them shows."""

    text: str
    more: str
    numbers: tuple[str, ...]


class Row(NamedTuple):
    """A row of the overview: the name of a code, its number, and that number over layers."""

    name: str
    number: str
    layers: Followed


def findings(analysis: Analysis) -> list[Finding]:
    """Returns all findings that the trace allows."""
    parts = (_follows, _load, _confidence, _pairs, _next, _controls, _churn)
    return [finding for part in parts for finding in part(analysis)]


def overview(analysis: Analysis) -> list[Row]:
    """Returns what experts can follow: the token id, each label, each label given the token id, and the position.

    The k experts of a token differ, so they leave ln k nats of the experts' entropy open, whatever decides them. With
    numbers of experts that differ, k is their mean: E[k ln k] / E[k] is larger than ln E[k].
    """
    table, tokens = analysis.table, analysis.trace.tokens
    loads = [max(information.entropy(load) - np.log(max(load.sum() / tokens, 1)), 0) for load in analysis.loads]
    codes = [("token id", "token"), *((label, label) for label in analysis.trace.labels), ("position", "position")]
    rows = []
    for name, code in codes:
        if code not in analysis.tokens.codes:
            continue
        entropy = information.entropy(np.bincount(analysis.tokens.codes[code]))
        if layers := followed(table, f"mi.{code}", np.minimum(loads, entropy)):
            rows.append(Row(name, f"mi.{code}", layers))
        left = analysis.left.get(code, 0.0)
        if (given := followed(table, f"given.{code}", np.minimum(loads, left))) and left > NAMED * entropy:
            rows.append(Row(f"{name}, given the token id", f"given.{code}", given))
    return rows


def _said(kind: str, analysis: Analysis, *numbers: str, **values: Any) -> Finding:
    names = short_names(analysis.trace.layers)

    def layers(indices: Any) -> str:
        return among(np.atleast_1d(indices).tolist(), names)

    first, *more = paragraphs("trace/findings.j2", kind=kind, layers=layers, analysis=analysis, **values)
    return Finding(first, " ".join(more), numbers)


def _follows(analysis: Analysis) -> Iterator[Finding]:
    """Yields a finding for each code: the layers that follow it, and those that are not told from chance."""
    rows = {row.number: row for row in overview(analysis)}
    for number, row in rows.items():
        if not number.startswith("mi."):
            continue
        code, layers = number.removeprefix("mi."), row.layers
        given, by_hash = rows.get(f"given.{code}"), layers.hash[layers.top] - layers.chance[layers.top]
        yield _said(
            "follows",
            analysis,
            number,
            name=row.name,
            followed=layers,
            by_sequence=analysis.tokens.by_sequence[code] is not None,
            table=followed(analysis.table, "table.token") if code == "token" else None,
            named=code in analysis.left and given is None and analysis.left[code] == analysis.left[code],
            beyond_ids=_beyond_ids(layers, given.layers) if given else None,
            given=given.layers if given else None,
            hash_is_as_good=bool(by_hash >= AS_GOOD * layers.beyond[layers.top]),
        )


def _beyond_ids(label: Followed, given: Followed) -> dict[str, np.ndarray]:
    """Returns the layers that follow a label beyond the token id, and those that do through the id alone."""
    both = np.intersect1d(label.strong, np.union1d(given.strong, given.weak))
    return {"beyond": both, "alone": np.setdiff1d(label.strong, both)}


def _load(analysis: Analysis) -> Iterator[Finding]:
    load, dropped = followed(analysis.table, "load_max"), followed(analysis.table, "dropped_1.25")
    yield _said(
        "load", analysis, "load_max", load=load, dropped=dropped, dead=followed(analysis.table, "dead")
    )  # fmt: skip


def _confidence(analysis: Analysis) -> Iterator[Finding]:
    entropy, confidence = followed(analysis.table, "entropy_token"), followed(analysis.table, "confidence")
    if confidence and entropy:
        yield _said("confidence", analysis, "confidence", confidence=confidence, equal=np.exp(entropy.value))


def _pairs(analysis: Analysis) -> Iterator[Finding]:
    if pairs := followed(analysis.table, "pairs"):
        yield _said("pairs", analysis, "pairs", followed=pairs)


def _next(analysis: Analysis) -> Iterator[Finding]:
    following, alike = followed(analysis.table, "next"), followed(analysis.table, "alike")
    if not following or not alike:
        return
    neighbours = None
    if analysis.routers is not None:
        shares, chance = analysis.routers
        neighbours = {"value": np.diagonal(shares, 1), "chance": chance[:-1]}
    yield _said("next", analysis, "next", followed=following, alike=alike, neighbours=neighbours)


def _controls(analysis: Analysis) -> Iterator[Finding]:
    names = [*analysis.trace.layers]
    for name in ("token", *analysis.trace.labels) if len(analysis.controls) else ():
        rows = analysis.controls[analysis.controls.number == f"mi.{name}"]
        if not len(rows):
            continue
        beyond = {
            router: (rows[router] - rows.chance).clip(lower=0).to_numpy()
            for router in ("trained", "shuffled", "initial")
        }
        top = int(beyond["trained"].argmax())
        at = {router: float(values[top]) for router, values in beyond.items()}
        if at["trained"] > 0:
            layer = names.index(rows.layer.iloc[top])
            yield _said("control", analysis, name="token id" if name == "token" else name, at=at, layer=layer)


def _churn(analysis: Analysis) -> Iterator[Finding]:
    for (before, after), rows in analysis.churn.groupby(["before", "after"], sort=False) if len(analysis.churn) else ():
        changed, renumbered = rows.value.to_numpy(), 1 - rows.alike.to_numpy()
        top = int(changed.argmax())
        yield _said(
            "churn",
            analysis,
            *(("churn",) if after == analysis.churn.after.iloc[-1] else ()),
            before=before,
            after=after,
            changed=changed,
            top=top,
            chance=float(rows.chance.iloc[top]),
            renumbered=renumbered[top] if changed[top] - renumbered[top] > 0.05 else None,
            renumbered_chance=1 - float(rows.alike_chance.iloc[top]),
            router_alone=float(rows.router_alone.iloc[top]),
        )
