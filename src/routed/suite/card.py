"""The page of a card, which opens offline: what the router can do in words, radar and table beside the reference, what scores mean."""

from __future__ import annotations

import json
import math
from typing import Any

from markupsafe import Markup

from routed.analysis import page as pages
from routed.suite import probes, reference

#: The reference router that a card is first drawn beside.
FIRST = "linear"
#: Radar: size, centre, and radius of score 1, in units of the picture.
WIDTH, HEIGHT, RADIUS = 460.0, 380.0, 160.0


def page(card: dict[str, Any], known: dict[str, Any], spec: str) -> str:
    """The whole page; `spec` is how the command named the router."""
    why_not, others, first = _neighbours(card, known)
    asked = probes.chosen(card["suite"]["quick"])
    away = {name: reference.against(card, other) for name, other in others.items()}
    shapes = {
        name: outline([other["probes"][probe.name]["score"]["mean"] for probe in asked])
        for name, other in others.items()
    }
    rows = [_row(probe, card["probes"][probe.name], others) for probe in asked]
    compared = {
        name: {probe.name: _beside(other["probes"][probe.name]["score"], away[name].get(probe.name)) for probe in asked}
        for name, other in others.items()
    }
    return pages.render(
        "suite/card.html", title=f"Score card of {card['router']['name']}", card=card, spec=spec, rows=rows, first=first, why_not=why_not,
        others=list(others), words=in_words(card, away.get(first or "", {}), first), radar=radar(card, asked), shapes=shapes,
        shapes_json=Markup(_script(shapes)), compared_json=Markup(_script(compared)), compared=compared, size=(WIDTH, HEIGHT),
        learners=_learners(others), card_json=json.dumps(card, indent=1, default=list), left_out=[p.name for p in probes.PROBES if p not in asked],
    )  # fmt: skip


def _neighbours(card: dict[str, Any], known: dict[str, Any]) -> tuple[str, dict[str, Any], str | None]:
    """Why nothing stands beside a card, or the other routers of the reference, and the one that is drawn first."""
    why_not = reference.comparable(card, known)
    # A router of that name with settings or code of its own is another one.
    others = {name: one for name, one in known["routers"].items() if not why_not and one["router"] != card["router"]}
    return why_not, others, FIRST if FIRST in others else next(iter(others), None)


def _script(value: Any) -> str:
    """JSON inside of a script element."""
    return json.dumps(value).replace("<", "\\u003c")


def _learners(others: dict[str, Any]) -> list[str]:
    return [name for name, one in others.items() if one["router"]["learns"]]


def _row(probe: probes.Probe, scores: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """A row of the table; `best` is the reference router that learns and has the highest mean."""
    ranked = {name: others[name]["probes"][probe.name]["score"]["mean"] for name in _learners(others)}
    best = max(ranked, key=lambda name: ranked[name], default=None)
    return {
        "probe": probe,
        "score": scores["score"],
        "text": _number(scores["score"]),
        "frozen": _number(scores["frozen"]) if scores.get("frozen") else "–",
        "frozen_at": scores["frozen"]["mean"] if scores.get("frozen") else None,
        "gain": _number(scores["gain"], sign=True) if scores.get("gain") else "–",
        "best": f"{best} {ranked[best]:.2f}" if best else "–",
        "seeds": ", ".join(f"{value:.2f}" for value in scores["seeds"]),
        "points": ", ".join(f"{value:.2f}" for value in scores.get("points", [])),
    }


def _number(one: dict[str, Any], sign: bool = False) -> str:
    """A mean with its interval, where it has one."""
    form = "+.2f" if sign else ".2f"
    text = f"{one['mean']:{form}}"
    return text if one["low"] is None else f"{text} [{one['low']:{form}}, {one['high']:{form}}]"


def _beside(score: dict[str, Any], away: Any) -> dict[str, str]:
    """What a cell says of another router: its mean, its interval, and where this card is."""
    mean, _, ends = _number(score).partition(" ")
    return {"mean": mean, "ends": ends, "away": _away(away)}


def _away(one: Any) -> str:
    if one is None or one.low != one.low:
        return ""
    return "above" if one.low > 0 else "below" if one.high < 0 else "not told apart"


def in_words(card: dict[str, Any], away: dict[str, Any], first: str | None) -> list[str]:
    """What the scores say, one sentence a line."""
    gains = {name: one["gain"] for name, one in card["probes"].items() if one.get("gain")}
    lines = []
    if gains:
        better = [name for name, one in gains.items() if one["low"] is not None and one["low"] > 0]
        worse = [name for name, one in gains.items() if one["high"] is not None and one["high"] < 0]
        rest = [name for name in gains if name not in better and name not in worse]
        lines.append(f"Learning helps in {len(better)} of {len(gains)} probes: {_list(better)}.")
        lines += [f"Its frozen self scores higher in {_list(worse)}."] if worse else []
        lines += [f"Learned and frozen are not told apart in {_list(rest)}."] if rest else []
    else:
        lines.append("This router does not learn: it is its own frozen self.")
    if away and first:
        sides = {side: [name for name, one in away.items() if _away(one) == side] for side in ("above", "below")}
        lines.append(
            f"Beside the {first} router it scores higher in {_list(sides['above'])}, lower in {_list(sides['below'])}; in the others the"
            " two are not told apart."
        )
    means = {name: one["score"]["mean"] for name, one in card["probes"].items()}
    lowest = [f"{name} ({means[name]:.2f})" for name in sorted(means, key=lambda name: means[name])[:3]]
    lines.append(f"Its lowest scores: {_list(lowest)}.")
    return lines


def _list(names: list[str]) -> str:
    return ", ".join(names) if names else "none"


def point(index: int, count: int, value: float) -> tuple[float, float]:
    """Where a score lies on an axis of the radar; the first axis points up, others follow clockwise."""
    angle = 2 * math.pi * index / count
    return WIDTH / 2 + RADIUS * value * math.sin(angle), HEIGHT / 2 - RADIUS * value * math.cos(angle)


def outline(values: list[float | None]) -> str:
    """The corners of a router's polygon, as SVG writes them; what is missing is at 0."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in (point(i, len(values), v or 0.0) for i, v in enumerate(values)))


def radar(card: dict[str, Any], asked: tuple[probes.Probe, ...]) -> dict[str, Any]:
    """What the template draws: axes with labels, rings, the polygons of the learned and the frozen router, intervals."""
    count, scores = len(asked), [card["probes"][probe.name] for probe in asked]
    axes = []
    for index, probe in enumerate(asked):
        x, y = point(index, count, 1.09)
        side = "middle" if abs(x - WIDTH / 2) < 12 else "start" if x > WIDTH / 2 else "end"
        axes.append({"name": probe.name, "end": point(index, count, 1.0), "x": x, "y": y + 4, "anchor": side})
    spans = [
        (*point(i, count, one["score"]["low"]), *point(i, count, one["score"]["high"]))
        for i, one in enumerate(scores)
        if one["score"]["low"] is not None
    ]
    frozen = [one["frozen"]["mean"] if one.get("frozen") else None for one in scores]
    return {
        "axes": axes,
        "rings": [(level, outline([level] * count), point(0, count, level)[1]) for level in (0.25, 0.5, 0.75, 1.0)],
        "learned": outline([one["score"]["mean"] for one in scores]),
        "dots": [point(i, count, one["score"]["mean"]) for i, one in enumerate(scores)],
        # A measure without a frozen self has no corner: the line goes past its axis.
        "frozen": " ".join(
            f"{x:.1f},{y:.1f}"
            for x, y in (point(i, count, value) for i, value in enumerate(frozen) if value is not None)
        ),
        "spans": spans,
        "centre": (WIDTH / 2, HEIGHT / 2),
    }


def as_text(card: dict[str, Any], known: dict[str, Any]) -> str:
    """The card for the terminal."""
    why_not, others, first = _neighbours(card, known)
    lines = [f"{'':12} {'score':20} {'frozen self':20} {'gain':22} {first or ''}".rstrip()]
    for name, one in card["probes"].items():
        cells = [
            _number(one["score"]),
            *(_number(one[key], key == "gain") if one.get(key) else "–" for key in ("frozen", "gain")),
        ]
        beside = _number(others[first]["probes"][name]["score"]) if first else ""
        lines.append(f"{name:12} {cells[0]:20} {cells[1]:20} {cells[2]:22} {beside}".rstrip())
    away = reference.against(card, others[first]) if first else {}
    return "\n".join([*lines, "", *in_words(card, away, first), *([why_not] if why_not else [])])
