"""Freezing of a router: its parameters, and the variables of its own in any collection."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def router_of(params: dict[str, Any], state: dict[str, Any]) -> tuple[Any, list[Array]]:
    """Returns the router's parameters, and its own variables of all collections.

    Variables of the layer, such as a balancing bias, are not the router's.
    """
    return params["router"], [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state) if _is_router(path)]


def keep_router(frozen: Bool[Array, ""], old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Returns the state `new` with the router's own variables of `old` where it is frozen."""

    def keep(path, before, after):
        return jnp.where(frozen, before, after) if _is_router(path) else after

    return jax.tree_util.tree_map_with_path(keep, old, new)


def with_router(state: dict[str, Any], variables: list[Array]) -> dict[str, Any]:
    """Returns the state with the router's variables replaced, in the order of `router_of`."""
    values = iter(variables)
    return jax.tree_util.tree_map_with_path(lambda path, leaf: next(values) if _is_router(path) else leaf, state)


def has_moved(now: Any, before: Any) -> Float[Array, ""]:
    """Returns 1 where any bit differs between two results of `router_of`, else 0."""
    moved = [(a != b).any() for a, b in zip(jax.tree.leaves(now), jax.tree.leaves(before), strict=True)]
    return jnp.float32(jnp.stack(moved).any() if moved else False)


def _is_router(path: tuple[Any, ...]) -> bool:
    return any(getattr(key, "key", None) == "router" for key in path)
