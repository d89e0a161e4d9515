"""Dispatch: Routing + tokens + experts -> outputs. Every dispatch computes the same function; they differ in cost.

All are called as dispatch(expert, params, x, routing, queues), where leaves of `params` carry a leading expert axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxtyping import Array, Float
from ml_collections import ConfigDict

from routed.contracts import ExpertFunction
from routed.kernels.ragged import ragged
from routed.layer.dispatch.direct import dense, gather, slots
from routed.layer.selection import SELECTIONS
from routed.settings.setting import Setting, accept


class Dispatch(NamedTuple):
    """A way to compute the layer; a `sparse` one needs a list of assignments, an `exchanged` one works over a mesh.

    `run(expert, params, x, routing, queues)` returns the outputs [T, O] of the experts that a routing names; `queues`
    (`routed.contracts.Queues`) holds the places in their queues, None for a dispatch without queues. An `exchanged` one
    has a form for each device of a mesh in `parallel.EXCHANGED`.
    """

    run: Callable[[ExpertFunction, Any, Float[Array, "T ..."], Any, Any], Float[Array, "T O"]]
    sparse: bool = True
    exchanged: bool = False
    settings: Mapping[str, Setting] = {}
    reads: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    check: Callable[[ConfigDict], None] = accept


#: Asks for the dispatch that `choose` names.
AUTO = "auto"

#: name -> dispatch.
DISPATCHES: dict[str, Dispatch] = {
    "dense": Dispatch(dense, sparse=False),
    "gather": Dispatch(gather),
    "slots": Dispatch(slots, exchanged=True),
    "ragged": Dispatch(ragged, exchanged=True),
}


def reason_against(name: str, selection: str) -> str | None:
    """Returns the reason why the dispatch `name` cannot serve the selection, and one that can; None if it can."""
    if name in DISPATCHES and DISPATCHES[name].sparse and not SELECTIONS[selection].sparse:
        fits = next(dense for dense, dispatch in DISPATCHES.items() if not dispatch.sparse)
        return f"dispatch {name!r} needs a sparse selection; with selection {selection!r} use {fits!r}"
    return None


#: Products of a number that take as long, on a CPU, as copying it to where its expert computes and back (`python -m
#: routed.bench patches`).
COPY = 16


def choose(
    selection: str,
    tokens: int,
    k: int,
    experts: int,
    dropless: bool,
    platform: str,
    *,
    taken: float = 0.0,
    width: float = 1.0,
    shared: bool = False,
) -> tuple[str, str]:
    """Returns the dispatch for `auto` and the reason (see `python -m routed.bench dispatch`).

    `taken` are the experts that a token has on average where they choose within samples, `width` the parameters of an
    expert for each number of a token; `shared`: an expert's weights are on one of several devices.
    """
    chosen = SELECTIONS[selection]
    if not chosen.sparse:
        return "dense", "soft routing needs every expert on every token"
    assignments = tokens * (experts if chosen.open else k)
    if assignments <= experts and not shared:
        return "gather", f"{assignments} assignments are no more than {experts} experts"
    slow_copies = chosen.within_samples and platform == "cpu" and experts * width <= taken * (width + COPY)
    if slow_copies and not shared:
        return "dense", f"copying tokens takes longer than {experts} experts of {width:.3g} products a number"
    if chosen.bounded or not (dropless or chosen.open):
        return "slots", "the capacity bounds its slots"
    return "ragged", "dropless: rows are sorted by expert"
