"""Sparse layers whose router or selection is not that of the others: the setting `router.layers`.

The setting is a tuple of texts such as "first=3 router.name=hash_id". Entries of a text: the sparse layers of each
stack that it is about (`first=N`, `last=N`, or `layers=0+2`, counted from 0), and KEY=VALUE. KEY is router.name,
router.frozen, a setting of that router, or one of selection.name, k, renormalise and balance_rate, which then hold in
training and evaluation. Of several texts about a layer the last one that sets a key counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from routed.contracts import UserError
from routed.layer.layer_rules import FORM, KEY, SELECTED, LayerRules, numbered, rules_of, texts_by_layer
from routed.layer.selection import SELECTIONS
from routed.routers import ROUTERS
from routed.settings.setting import refuse
from routed.settings.tree import node_of, override, parse


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


def changes_by_layer(config: ConfigDict) -> list[dict[str, Any]]:
    """Returns the settings that each sparse layer has for itself; refuses those that no layer can have."""
    layers = []
    for texts in texts_by_layer(config):
        changes = {key: parse(config, key, text) for key, text in texts.items()}
        part = ROUTERS.get(changes.get("router.name", config.router.name))
        settings = ("name", "frozen", "fit", *part.settings, *part.reads) if part is not None else ("name",)
        for key in changes:
            node, _, name = key.partition(".")
            if name not in (settings if node == "router" else SELECTED if node == "selection" else ()):
                raise UserError(f"config key {KEY}: {key} cannot be that of single layers: {FORM}")
        layers.append(changes)
    return layers


def variants(config: ConfigDict) -> list[ConfigDict]:
    """Returns the config, and the one of each kind of sparse layer whose settings are others."""
    changes, _ = numbered(changes_by_layer(config))
    return [config, *(override(config, change) for change in changes if change)]


def layers_of(config: ConfigDict) -> Layers | None:
    """Returns the sparse layers of a config; None if they are alike."""
    if not config.router.layers:
        return None
    layers = changes_by_layer(config)
    of_router = [{k: v for k, v in c.items() if k.startswith("router.") and k != "router.frozen"} for c in layers]
    changes, kinds = numbered(of_router)
    frozen = tuple(change.get("router.frozen") for change in layers)
    return Layers(tuple(override(config, c) for c in changes), kinds, frozen, rules_of(config))


def check_layers(config: ConfigDict) -> None:
    """Refuses layers whose choices cannot be held beside those of the others."""
    for change in changes_by_layer(config) if config.router.layers else ():
        if not {"selection.name", "selection.k", "selection.renormalise"} & {*change}:
            continue
        if change.get("selection.k", 0) > min(config.selection.k, config.selection.eval.k):
            reason = "set selection.k and selection.eval.k to the most of all layers, and less in the others"
            refuse(KEY, config.router.layers, reason)
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
