"""Sparse layers whose router or selection is not that of the others: the setting `router.layers`.

The setting is a tuple of texts such as "first=3 router.name=hash_id". Entries of a text: the sparse layers of each
stack that it is about (`first=N`, `last=N`, or `layers=0+2`, counted from 0), and KEY=VALUE. KEY is router.name,
router.frozen, a setting of that router, or one of selection.name, k, renormalise and balance_rate, which then hold in
training and evaluation. Of several texts about a layer the last one that sets a key counts.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from routed.contracts import UserError
from routed.layer.selection import SELECTIONS, LayerRules
from routed.routers import FITS, ROUTERS
from routed.settings.setting import refuse
from routed.settings.tree import node_of, override, parse

#: The key of the setting, and the prefix of the name of a kind of router in the parameters.
KEY, KIND = "router.layers", "routers_"
#: What a text may set of the node `selection`, and the type of each.
SELECTED: dict[str, Any] = {"name": str, "k": int, "renormalise": lambda v: v.lower() == "true", "balance_rate": float}
FORM = (
    "expected first=N, last=N or layers=I+J, then KEY=VALUE of router.name, router.frozen, a setting of that router,"
    f" or {', '.join(f'selection.{name}' for name in SELECTED)}"
)


class Layers(NamedTuple):
    """The sparse layers [S] of a stack: the kind of router of each, what is frozen, and the selections.

    `configs` are those of the kinds of routers; `frozen` is None where `router.frozen` decides.
    """

    configs: tuple[ConfigDict, ...]
    kinds: tuple[int, ...]
    frozen: tuple[bool | None, ...]
    rules: LayerRules | None

    @property
    def learns(self) -> tuple[bool, ...]:
        """True for each kind of router whose parameters a gradient trains."""
        return tuple(ROUTERS[config.router.name].learns for config in self.configs)


class RouterByLayer(nn.Module):
    """The scores of the router of the layer number `layer`: one of several `routers`, `kinds` [S] says which.

    Every layer has parameters for all of them: a scan over layers has equal layers.
    """

    routers: Sequence[nn.Module]
    kinds: tuple[int, ...]

    def __call__(self, x: Float[Array, "T ..."], *, layer: Int[Array, ""], **context) -> Float[Array, "T E"]:
        scores = [router(x, **context) for router in self.routers]
        return jnp.stack(scores)[jnp.asarray(self.kinds)[layer]]


def texts_by_layer(config: Any) -> list[dict[str, str]]:
    """Returns KEY -> VALUE of each sparse layer, as text; refuses other forms, and layers that no stack has."""
    count = config.transformer.sparse_layers
    layers: list[dict[str, str]] = [{} for _ in range(count)]
    for text in config.router.layers:
        words = [word.partition("=") for word in text.split()]
        changes = {key: value for key, _, value in words if "." in key}
        where = [(key, value) for key, _, value in words if key in ("first", "last", "layers")]
        if len(where) != 1 or len(changes) + 1 != len(words) or not changes or not all(word[2] for word in words):
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


def changes_by_layer(config: ConfigDict) -> list[dict[str, Any]]:
    """Returns the settings that each sparse layer has for itself; refuses those that no layer can have."""
    layers = []
    for texts in texts_by_layer(config):
        changes = {key: parse(config, key, text) for key, text in texts.items()}
        part = ROUTERS.get(changes.get("router.name", config.router.name))
        own = ("name", "frozen", *FITS, *part.settings, *part.reads) if part is not None else ("name",)
        for key in changes:
            node, _, name = key.partition(".")
            if name not in (own if node == "router" else SELECTED if node == "selection" else ()):
                raise UserError(f"config key {KEY}: {key} cannot be that of single layers: {FORM}")
        layers.append(changes)
    return layers


def variants(config: ConfigDict) -> list[ConfigDict]:
    """Returns the config, and the one of each kind of sparse layer whose settings are others."""
    changes, _ = _numbered(changes_by_layer(config))
    return [config, *(override(config, change) for change in changes if change)]


def layers_of(config: ConfigDict) -> Layers | None:
    """Returns the sparse layers of a config; None if they are alike."""
    if not config.router.layers:
        return None
    layers = changes_by_layer(config)
    of_router = [{k: v for k, v in c.items() if k.startswith("router.") and k != "router.frozen"} for c in layers]
    changes, kinds = _numbered(of_router)
    frozen = tuple(change.get("router.frozen") for change in layers)
    return Layers(tuple(override(config, c) for c in changes), kinds, frozen, rules_of(config))


def rules_of(config: Any) -> LayerRules | None:
    """Returns the selections of the sparse layers; None if they are alike."""
    texts = texts_by_layer(config)
    own = lambda text: {k: of(text[f"selection.{k}"]) for k, of in SELECTED.items() if f"selection.{k}" in text}  # noqa: E731
    given = list(map(own, texts))
    if not any(given):
        return None
    rates = tuple(of.pop("balance_rate", config.selection.balance_rate) for of in given)
    changes, kinds = _numbered(given)
    return LayerRules(changes, kinds, rates)


def check_layers(config: ConfigDict) -> None:
    """Refuses layers whose choices cannot be held beside those of the others."""
    for change in changes_by_layer(config) if config.router.layers else ():
        if not {"selection.name", "selection.k", "selection.renormalise"} & {*change}:
            continue
        if change.get("selection.k", 0) > config.selection.k:
            refuse(KEY, config.router.layers, "set selection.k to the most of all layers, and less in the others")
        names = (config.selection.name, config.selection.eval.name, change.get("selection.name", config.selection.name))
        for name in names:
            part = SELECTIONS[name]
            if part.forward is not None or part.settings or part.open or part.weighs_inputs or "k" not in part.reads:
                plain = [n for n, p in SELECTIONS.items() if p.biased and not (p.settings or p.forward or p.open)]
                reason = f"selection.name={name} is that of all layers or of none; use one of {', '.join(plain)}"
                refuse(KEY, config.router.layers, reason)


def router_modules(config: ConfigDict, layers: Layers | None) -> list[nn.Module]:
    """Returns a router for each kind of sparse layer."""
    configs = [config] if layers is None else layers.configs
    return [ROUTERS[c.router.name].make(node_of(c).router, c.experts.count) for c in configs]


def needs_of(config: ConfigDict, layers: Layers | None) -> set[str]:
    """Returns the context that some router of the config needs."""
    return {need for c in ([config] if layers is None else layers.configs) for need in ROUTERS[c.router.name].needs}


def _numbered(values: Sequence[Mapping[str, Hashable]]) -> tuple[tuple[dict[str, Any], ...], tuple[int, ...]]:
    """Returns the distinct values in their order, and the number of each value."""
    keys = [tuple(sorted(value.items())) for value in values]
    distinct = list(dict.fromkeys(keys))
    return tuple(dict(key) for key in distinct), tuple(distinct.index(key) for key in keys)
