"""Layers of a stack whose selections differ: the texts of the setting `router.layers`, and routing by them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from routed.contracts import Routing, UserError
from routed.layer.rule import SelectionRule

#: The key of the setting.
KEY = "router.layers"
#: What a text may set of the node `selection`, and the type of each.
SELECTED: dict[str, Any] = {"name": str, "k": int, "renormalise": lambda v: v.lower() == "true", "balance_rate": float}
FORM = (
    "expected first=N, last=N or layers=I+J, then KEY=VALUE of router.name, router.frozen, a setting of that router,"
    f" or {', '.join(f'selection.{name}' for name in SELECTED)}"
)


class LayerRules(NamedTuple):
    """Selections of the layers [S] of a stack: kinds, as changes of the stack's rule, and the kind of each layer.

    `rates` are those of the balancing bias [S]; None: the rate of the stack.
    """

    changes: tuple[Mapping[str, Any], ...]
    kinds: tuple[int, ...]
    rates: tuple[float | None, ...]


def select_in_layer(
    rules: LayerRules, rule: SelectionRule, layer: Int[Array, ""], pick: Callable[[SelectionRule], Any]
) -> Routing:
    """Routes by the rule of a layer; `pick` routes by any rule.

    Tokens with fewer experts than `rule.k` have assignments that are not `chosen` behind the others.
    """
    by_kind = [rule._replace(**changes) for changes in rules.changes]
    routings = [pick(changed) for changed in by_kind]
    if any(changed.k != rule.k for changed in by_kind):
        routings = [_widened(routing, changed.k, rule.k) for routing, changed in zip(routings, by_kind, strict=True)]
    if len(routings) == 1:
        return routings[0]
    return jax.tree.map(lambda *kinds: jnp.stack(kinds)[jnp.asarray(rules.kinds)[layer]], *routings)


def _widened(routing: Routing, k: int, most: int) -> Routing:
    def widen(values: Array) -> Array:
        return jnp.pad(values.reshape(-1, k), ((0, 0), (0, most - k))).reshape(-1)

    parts = {name: widen(getattr(routing, name)) for name in ("expert", "weight", "kept", "rank")}
    token = jnp.repeat(routing.token.reshape(-1, k)[:, 0], most)
    return routing._replace(**parts, token=token, chosen=widen(jnp.ones_like(routing.kept)))


def texts_by_layer(config: Any) -> list[dict[str, str]]:
    """Returns KEY -> VALUE of each sparse layer, as text; refuses other forms, and layers that no stack has."""
    count = config.transformer.sparse_layers
    layers: list[dict[str, str]] = [{} for _ in range(count)]
    for text in config.router.layers:
        entries = [word.partition("=") for word in text.split()]
        changes = {key: value for key, _, value in entries if "." in key}
        where = [(key, value) for key, _, value in entries if key in ("first", "last", "layers")]
        if len(where) != 1 or len(changes) + 1 != len(entries) or not changes or not all(entry[2] for entry in entries):
            raise UserError(f"config key {KEY}: {text!r}: {FORM}")
        for number in _numbers(text, *where[0], count):
            layers[number] |= changes
    return layers


def _numbers(text: str, key: str, value: str, count: int) -> Sequence[int]:
    """Returns the sparse layers that a text is about."""
    parts = value.split("+") if key == "layers" else [value]
    most = count - 1 if key == "layers" else count
    if not all(part.isdecimal() and int(part) <= most for part in parts):
        raise UserError(
            f"config key {KEY}: {text!r}: {key}={value}, and a stack has transformer.sparse_layers={count}; use"
            f" {'numbers' if key == 'layers' else 'a number'} from 0 to {most}"
        )
    numbers = [int(part) for part in parts]
    if key == "layers":
        return numbers
    return range(numbers[0]) if key == "first" else range(count - numbers[0], count)


def rules_of(config: Any) -> LayerRules | None:
    """Returns the selections of the sparse layers; None if they are alike."""
    given = []
    for texts in texts_by_layer(config):
        named = {name: texts.get(f"selection.{name}") for name in SELECTED}
        given.append({name: SELECTED[name](text) for name, text in named.items() if text is not None})
    if not any(given):
        return None
    rates = tuple(of.pop("balance_rate", None) for of in given)
    changes, kinds = numbered(given)
    return LayerRules(changes, kinds, rates)


def numbered(values: Sequence[Mapping[str, Hashable]]) -> tuple[tuple[dict[str, Any], ...], tuple[int, ...]]:
    """Returns the distinct values in their order, and the number of each value."""
    keys = [tuple(sorted(value.items())) for value in values]
    distinct = list(dict.fromkeys(keys))
    return tuple(dict(key) for key in distinct), tuple(distinct.index(key) for key in keys)
