"""What a page says, as text for the terminal."""

from __future__ import annotations

import collections
from typing import Any

from routed.analysis import answer
from routed.engine import rows


def as_text(part: dict[str, Any]) -> str:
    """Verdicts and the gap for the terminal."""
    lines = [
        f"{c['verdict'].upper():14} {c['id']}: {c['statement']}\n{'':14} {c['text'] or 'no rows'}"
        + (f" ({c['reason']})" if c["reason"] else "")
        + _at_points(c)
        for c in part["claims"]
    ]
    if part["gap"]:
        lines.append(f"\nThe gap decomposed, at {part['gap_at']} (log ratios of loss, 95 % intervals):")
        lines += [
            f"  {g['part']:28} {g['mean']:+.3f} [{g['low']:+.3f}, {g['high']:+.3f}]"
            + (f"  {shown_share(g)} of the gap" if g["share"] == g["share"] else "")
            for g in part["gap"]
        ]
    if part["shares"]:
        lines.append("Averaged over every order in which its confounds can be removed, and for soft evaluation:")
        lines += [
            f"  {g['evaluation'] + ', ' + g['part']:38} {g['mean']:+.3f} [{g['low']:+.3f}, {g['high']:+.3f}]"
            + (f"  {shown_share(g)} of the gap" if g["share"] == g["share"] else "")
            for g in part["shares"]
        ]
    return "\n".join(lines)


def _at_points(claim: dict[str, Any]) -> str:
    """How a claim was judged at every point at which it is tried, and which of them its line is of."""
    if not claim["points"]:
        return ""
    counts = collections.Counter(line["verdict"] for line in claim["points"])
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in answer.in_order(counts))
    same = (line["point"] for line in claim["points"] if line["text"] == claim["text"])
    own: dict[str, Any] = next((point for point in same if {**point, **claim["at"]} == {**claim["at"], **point}), {})
    at = ", ".join(f"{key} = {rows.shown(value)}" for key, value in own.items())
    return f"\n{'':14} " + (f"this is {at}; " if at else "") + f"at each of {len(claim['points'])} points: {told}"


def shown_share(part: dict[str, Any]) -> str:
    """A part's share of the whole gap, with its interval where there are seeds enough for one."""
    text = f"{100 * part['share']:z.0f} %"
    if part["share_low"] != part["share_low"]:
        return text
    return f"{text} [{100 * part['share_low']:z.0f}, {100 * part['share_high']:z.0f}]"
