"""Dispatch: Routing + tokens + experts -> outputs. Every dispatch computes the same function; they differ in cost.

All are called as dispatch(expert, params, x, routing, places), where leaves of `params` carry a leading expert axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from routed.dispatch.direct import combine, dense, gather
from routed.dispatch.parallel import DATA, EXPERT, parallel, parallel_select
from routed.dispatch.ragged import alone, ragged
from routed.dispatch.slots import slots

DISPATCHES: dict[str, Callable[..., Any]] = {"dense": dense, "gather": gather, "slots": slots, "ragged": ragged}


def refuse(name: str, selection: str) -> str | None:
    """Why the dispatch `name` cannot serve the selection, and what can; None when it can."""
    if name not in ("auto", "dense") and selection == "soft":
        return f"dispatch {name!r} needs a sparse selection; with selection 'soft' use 'dense'"
    return None


def choose(selection: str, tokens: int, k: int, experts: int, dropless: bool, platform: str) -> tuple[str, str]:
    """The dispatch for `auto`, and why (see `python -m routed.bench dispatch`)."""
    if selection == "soft":
        return "dense", "soft routing needs every expert on every token"
    if tokens * k <= experts:
        return "gather", f"{tokens * k} assignments are no more than {experts} experts"
    if not dropless or selection == "expert_choice":
        return "slots", "the capacity bounds its slots"
    return "ragged", "dropless: " + ("blocks of sorted rows on CPU" if platform == "cpu" else "grouped products")


__all__ = [
    "DATA",
    "DISPATCHES",
    "EXPERT",
    "alone",
    "choose",
    "combine",
    "dense",
    "gather",
    "parallel",
    "parallel_select",
    "ragged",
    "refuse",
    "slots",
]
