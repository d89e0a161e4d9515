"""Freezing of a router: its parameters, and the variables of its own in any collection."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from routed.contracts import KIND


def router_of(params: dict[str, Any], state: dict[str, Any]) -> tuple[Any, list[Array]]:
    """Returns the router's parameters, and its own variables of all collections.

    Variables of the layer, such as a balancing bias, are not the router's.
    """
    return params["router"], [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state) if _is_router(path)]


def still_layers(layers: Any, frozen: Bool[Array, ""]) -> Bool[Array, "*S"]:
    """Returns True for each sparse layer whose router is frozen; one value where layers do not differ."""
    if layers is None:
        return frozen
    return jnp.where(np.array([frozen is not None for frozen in layers.frozen]), np.array(layers.frozen, bool), frozen)


def keep(still: Bool[Array, "*S"], layers: Any, old: Any, new: Any, trained: bool = True) -> Any:
    """Returns the leaves of a router, those of `old` in layers that are `still`.

    Those of a kind of router that is not the layer's stay too, and where they are `trained` by gradients also those of
    routers that do not learn: weight decay would move them.
    """

    return jax.tree_util.tree_map_with_path(
        lambda path, before, after: _kept(still, layers, path, before, after, trained), old, new
    )


def unused_layers(layers: Any, path: tuple[Any, ...]) -> np.ndarray:
    """Returns True for each sparse layer [S] that has a router of another kind than the leaf of this path."""
    kinds, names = np.array(layers.kinds), [str(getattr(key, "key", "")) for key in path]
    return np.any([kinds != int(name.removeprefix(KIND)) for name in names if name.startswith(KIND)] or [[False]], 0)


def _kept(still, layers: Any, path: tuple[Any, ...], before: Array, after: Array, trained: bool) -> Array:
    if layers is None:
        return jnp.where(still, before, after)
    rests = still | unused_layers(layers, path) | (trained & ~np.array(layers.learns)[np.array(layers.kinds)])
    return jnp.where(rests.reshape(-1, *[1] * (before.ndim - 1)), before, after)


def keep_router(still: Bool[Array, "*S"], layers: Any, old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Returns the state `new` with the router's own variables of `old` where it is still."""

    def kept(path, before: Array, after: Array) -> Array:
        return _kept(still, layers, path, before, after, trained=False) if _is_router(path) else after

    return jax.tree_util.tree_map_with_path(kept, old, new)


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
