"""The verdicts and the gap of a page as text for the terminal."""

from __future__ import annotations

import collections
from typing import Any

from routed.analysis import answer
from routed.engine import rows


def as_text(part: dict[str, Any]) -> str:
    """Returns the verdicts and the decomposed gap of a workdir as text."""
    lines = [
        f"{claim['verdict'].upper():14} {claim['id']}: {claim['statement']}\n{'':14} {claim['text'] or 'no rows'}"
        + (f" ({claim['reason']})" if claim["reason"] else "")
        + _at_points(claim)
        for claim in part["claims"]
    ]
    if part["gap"]:
        lines.append(f"\nThe gap decomposed, at {part['gap_at']} (log ratios of loss, 95 % intervals):")
        lines += [_gap_line(line, f"{line['part']:28}") for line in part["gap"]]
    if part["shares"]:
        lines.append("Averaged over every order in which its confounds can be removed, and for soft evaluation:")
        lines += [_gap_line(line, f"{line['evaluation'] + ', ' + line['part']:38}") for line in part["shares"]]
    return "\n".join(lines)


def _gap_line(part: dict[str, Any], label: str) -> str:
    """Returns a part of the gap with its interval, and its share of the whole gap unless that is NaN."""
    share = "" if part["share"] != part["share"] else f"  {shown_share(part)} of the gap"
    return f"  {label} {part['mean']:+.3f} [{part['low']:+.3f}, {part['high']:+.3f}]{share}"


def _at_points(claim: dict[str, Any]) -> str:
    """Returns how often a claim got each verdict over its points, and the point of its own line."""
    if not claim["points"]:
        return ""
    counts = collections.Counter(line["verdict"] for line in claim["points"])
    verdicts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in answer.in_order(counts))
    at, points = claim["at"], (line["point"] for line in claim["points"] if line["text"] == claim["text"])
    point: dict[str, Any] = next((point for point in points if {**point, **at} == {**at, **point}), {})
    settings = ", ".join(f"{key} = {rows.shown(value)}" for key, value in point.items())
    point_text = f"this is {settings}; " if settings else ""
    return f"\n{'':14} {point_text}at each of {len(claim['points'])} points: {verdicts}"


def shown_share(part: dict[str, Any]) -> str:
    """Returns a part's share of the whole gap in percent, with its interval unless that is NaN."""
    text = f"{100 * part['share']:z.0f} %"
    if part["share_low"] != part["share_low"]:
        return text
    return f"{text} [{100 * part['share_low']:z.0f}, {100 * part['share_high']:z.0f}]"
