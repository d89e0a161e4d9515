"""Experiments on Mixture-of-Experts routers: does learning to route help, and what did the router learn?"""

import importlib
from typing import Any

#: Name -> its module.
_LAZY = {
    "run": "routed.notebook",
    "load": "routed.engine.results",
    "analyse": "routed.trace.report",
    "MoE": "routed.layer.moe",
    "SelectionRule": "routed.layer.rule",
    "auxiliary": "routed.layer.auxiliary",
    "Flat": "routed.routers",
    "ProductRouter": "routed.routers",
    "Ffn": "routed.experts",
    "Mlp": "routed.experts",
}
__all__ = [*sorted(_LAZY), "trace"]


def __getattr__(name: str) -> Any:
    """Imports the names in `__all__` on first use: JAX and pandas take seconds to load, and `--help` needs neither."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name == "trace":
        return importlib.import_module("routed.trace")
    raise AttributeError(f"module 'routed' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns the public names, for `dir`, `help` and the completion of names in notebooks."""
    return __all__
