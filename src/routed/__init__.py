"""Experiments on Mixture-of-Experts routers: does learning to route help, and what did the router learn?"""

from typing import Any

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    """`load`, when somebody asks for it: JAX and pandas take seconds to load, and `--help` needs neither."""
    if name in __all__:
        from routed.engine import results

        return getattr(results, name)
    raise AttributeError(f"module 'routed' has no attribute {name!r}")
