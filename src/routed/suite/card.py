"""The page of a card: sentences, a table of scores beside the reference, and definitions of scores."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from markupsafe import Markup

from routed.analysis import wording
from routed.analysis.statistics import Estimate
from routed.suite import probes, reference

#: The router of the reference that stands beside a card first.
FIRST = "linear"
#: The score of a probe that does not apply to a router, in one word for a cell (its spaces break no line).
NOTHING = "does\N{NO-BREAK SPACE}not\N{NO-BREAK SPACE}apply"


class Neighbours(NamedTuple):
    """The routers of the reference beside a card, the name of the first one, and the reason if there are none."""

    why_alone: str
    routers: dict[str, Any]
    first: str | None


def page(card: dict[str, Any], stored: dict[str, Any], spec: str) -> str:
    """Renders the page of a card; `spec` is the router's name in the command."""
    neighbours = neighbours_of(card, stored)
    routers = neighbours.routers
    asked, compared = probes.chosen(card["suite"]["quick"]), {}
    for name, router in routers.items():
        scores = {probe.name: router["probes"][probe.name]["score"] for probe in asked}
        differences = reference.against(card, router)
        compared[name] = {probe: _cell(score, differences.get(probe)) for probe, score in scores.items()}
    return wording.render(
        "suite/card.html",
        title=f"Score card of {card['router']['name']}",
        card=card,
        spec=spec,
        rows=[_row(probe, card["probes"][probe.name], routers) for probe in asked],
        first=neighbours.first,
        why_alone=neighbours.why_alone,
        others=list(routers),
        # Without the reason, which the page has in a box of its own.
        sentences=[*filter(None, [card.get("diverged")]), *sentences(card, neighbours._replace(why_alone=""))],
        compared=compared,
        learners=_learners(routers),
        card_json=json.dumps(card, indent=1, default=list),
        left_out=[probe.name for probe in probes.PROBES if probe not in asked],
    )


def neighbours_of(card: dict[str, Any], stored: dict[str, Any]) -> Neighbours:
    """The routers of the reference that a card is compared with."""
    why_alone = reference.comparable(card, stored)
    # A router with the card's name but other settings or code is another router.
    candidates = {} if why_alone else stored["routers"]
    routers = {name: router for name, router in candidates.items() if router["router"] != card["router"]}
    return Neighbours(why_alone, routers, FIRST if FIRST in routers else next(iter(routers), None))


def _learners(routers: dict[str, Any]) -> list[str]:
    return [name for name, router in routers.items() if router["router"]["learns"]]


def _row(probe: probes.Probe, scores: dict[str, Any], routers: dict[str, Any]) -> dict[str, Any]:
    """A row of the table; `best` is the reference router that learns and has the highest mean."""
    scored = {name: routers[name]["probes"][probe.name]["score"]["mean"] for name in _learners(routers)}
    means = {name: mean for name, mean in scored.items() if mean is not None}
    best = max(means, key=lambda name: means[name], default=None)
    frozen, gain = scores.get("frozen"), scores.get("gain")
    return {
        "probe": probe,
        "score": scores["score"],
        "text": _number(scores["score"]),
        "frozen": _number(frozen) if frozen else "–",
        "frozen_at": frozen["mean"] if frozen else None,
        "gain": _number(gain, sign=True) if gain else "–",
        "best": f"{best} {means[best]:.2f}" if best else "–",
        "seeds": ", ".join(f"{value:.2f}" for value in scores["seeds"]),
        "points": ", ".join(f"{value:.2f}" for value in scores.get("points", [])),
    }


def _number(score: dict[str, Any], sign: bool = False) -> str:
    """A mean with its interval, if it has one."""
    form = "+.2f" if sign else ".2f"
    if score["mean"] is None:
        return NOTHING
    text = f"{score['mean']:{form}}"
    return text if score["low"] is None else f"{text} [{score['low']:{form}}, {score['high']:{form}}]"


def _cell(score: dict[str, Any], difference: Estimate | None) -> dict[str, Any]:
    """The cell of another router: its mean and its place, its interval, and the side of it on which this card is."""
    mean, _, ends = _number(score).partition(" ")
    return {"mean": mean, "at": score["mean"], "ends": ends, "away": _side(difference)}


def _side(difference: Estimate | None) -> str:
    """The sign of a difference by its interval; empty without one."""
    if difference is None or difference.low != difference.low:
        return ""
    return "above" if difference.low > 0 else "below" if difference.high < 0 else "not told apart"


def sentences(card: dict[str, Any], neighbours: Neighbours) -> list[str]:
    """The sentences of sentences.jinja on the scores of a card."""
    first = neighbours.first
    gains = {name: scores["gain"] for name, scores in card["probes"].items() if scores.get("gain")}
    better = [name for name, gain in gains.items() if (gain["low"] or 0) > 0]
    worse = [name for name, gain in gains.items() if (gain["high"] or 0) < 0]
    differences = reference.against(card, neighbours.routers[first]) if first else {}
    sides = {name: _side(difference) for name, difference in differences.items()}
    scored = {name: scores["score"]["mean"] for name, scores in card["probes"].items()}
    means = {name: mean for name, mean in scored.items() if mean is not None}
    text = wording.render(
        "suite/sentences.jinja",
        names=lambda names: ", ".join(names) or "none",
        gains=gains,
        better=better,
        worse=worse,
        undecided=[name for name in gains if name not in better and name not in worse],
        neighbour=first if differences else None,
        above=[name for name, side in sides.items() if side == "above"],
        below=[name for name, side in sides.items() if side == "below"],
        alike=[name for name, side in sides.items() if side == "not told apart"],
        lowest=[f"{name} ({means[name]:.2f})" for name in sorted(means, key=lambda name: means[name])[:3]],
        missing=[name for name in scored if name not in means],
        why_alone=neighbours.why_alone,
    )
    return Markup(text).unescape().splitlines()


def as_text(card: dict[str, Any], stored: dict[str, Any]) -> str:
    """The card for the terminal."""
    neighbours = neighbours_of(card, stored)
    first = neighbours.first
    lines = [card["diverged"]] if card.get("diverged") else []
    lines += [f"{'':12} {'score':20} {'frozen self':20} {'gain':22} {first or ''}".rstrip()]
    for name, scores in card["probes"].items():
        frozen, gain = (_number(scores[key], key == "gain") if scores.get(key) else "–" for key in ("frozen", "gain"))
        neighbour = _number(neighbours.routers[first]["probes"][name]["score"]) if first else ""
        lines.append(f"{name:12} {_number(scores['score']):20} {frozen:20} {gain:22} {neighbour}".rstrip())
    return "\n".join([*lines, "", *sentences(card, neighbours)])
