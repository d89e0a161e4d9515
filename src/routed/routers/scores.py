"""The scores of a layer, for any router and any model, and the context that a router reads.

A change of all scores (a temperature that falls with the step, say) is made here: `router_context` knows the settings
and the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float

from routed.routers import ROUTERS


def router_context(node: Any, **context: Any) -> dict[str, Any]:
    """Returns the context that a router reads: the step, and what it needs; `node` is the config node `router`.

    Labels reach only routers that ask for them by name (`Router.needs`).
    """
    needs = ROUTERS[node.name].needs
    return {name: value for name, value in context.items() if name == "step" or name in needs}


def layer_scores(
    router: Callable[..., Array], x: Float[Array, "T ..."], context: dict[str, Any], sharpness: Any = None
) -> Float[Array, "T E"]:
    """Returns a layer's scores [T, E] without noise: the router's scores times the `sharpness`, if any.

    `router` is a bound module, or the `apply` of a module with its variables.
    """
    scores = router(x, **context)
    return scores if sharpness is None else scores * sharpness
