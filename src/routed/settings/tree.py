"""Trees of settings by dotted keys: flatten, parse, override, and a tree for compiled programs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from ml_collections import ConfigDict, FieldReference

from routed.contracts import UserError, nearest
from routed.settings.renamed import renamed, renamed_attributes


class Node(SimpleNamespace):
    """A node of a config inside of a program: attributes as in the config, with arrays for traced settings."""

    def __getattr__(self, name: str) -> Any:
        # Python calls this for missing names only: a run's config has exactly the settings that its parts declare.
        if name.startswith("__"):
            raise AttributeError(name)
        raise UserError(
            f"config key {name!r} is read, but no part of this run declares it: add it to `settings` or `reads` of the"
            f" part that reads it; declared here: {', '.join(sorted(vars(self)))}{renamed_attributes(repr(name))}"
        )

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    def __contains__(self, name: str) -> bool:
        return name in vars(self)


def node_of(config: ConfigDict, values: Mapping[str, Any] | None = None) -> Node:
    """The tree of a config; `values`, by dotted key, replace values of the config."""
    return from_flat(flatten(config) | dict(values or {}))


def from_flat(flat: Mapping[str, Any]) -> Node:
    """The tree of dotted keys and values."""
    return _nested(flat, Node)


def flatten(config: ConfigDict) -> dict[str, Any]:
    """Dotted keys and values, in declared order."""
    flat: dict[str, Any] = {}
    # Resolving each value anew would take most of the time of planning.
    for key, value in config.items(preserve_field_references=True):
        if isinstance(value, FieldReference):
            value = value.get()
        if isinstance(value, ConfigDict):
            flat |= {f"{key}.{inner}": leaf for inner, leaf in flatten(value).items()}
        else:
            flat[key] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> ConfigDict:
    """The locked config of dotted keys and values."""
    return _nested(flat, ConfigDict).lock()


def _nested(flat: Mapping[str, Any], make: Callable[[], Any]) -> Any:
    root = make()
    for key, value in flat.items():
        *path, last = key.split(".")
        node = root
        for name in path:
            if name not in node:
                node[name] = make()
            node = node[name]
        node[last] = value
    return root


def value_of(config: ConfigDict | Node, key: str) -> Any:
    """The value of a dotted key."""
    for part in key.split("."):
        config = config[part]
    return config


def split_values(text: str) -> list[str]:
    """Splits `v1,v2,...` at the commas outside of brackets: a tuple is written (a,b)."""
    return re.split(r",(?![^()]*\))", text)


def parse(config: ConfigDict, key: str, text: str) -> Any:
    """Converts `text` to the type of the current value of `key`.

    Raises:
      UserError: unknown key or wrong type.
    """
    current = _declared(config, key)
    if not isinstance(current, tuple):
        return _convert(key, current, text)
    first = current[0] if current else ""
    *parts, last = [part.strip(" '\"()") for part in text.split(",")]
    if "" in parts:
        raise UserError(f"config key {key}={text}: a value is missing before a comma; name it, or drop the comma")
    return tuple(_convert(key, first, part) for part in (*parts, last) if part)


def override(config: ConfigDict, changes: Mapping[str, Any]) -> ConfigDict:
    """Returns a locked copy of `config` with dotted `changes`; types must match (an int may stand for a float).

    Raises:
      UserError: unknown key or wrong type; a bool is no int.
    """
    config = config.copy_and_resolve_references()  # deep: nested nodes are not shared
    for key, value in changes.items():
        current = _declared(config, key)
        if isinstance(current, float) and type(value) is int:
            value = float(value)
        if isinstance(current, tuple) and isinstance(value, list):
            value = tuple(value)
        if type(value) is not type(current):
            expected = type(current).__name__
            raise UserError(f"config key {key}={value!r}: expected {expected}, got {type(value).__name__}")
        *path, last = key.split(".")
        node = config
        for part in path:
            node = node[part]
        node[last] = value
    return config.lock()


def _declared(config: ConfigDict, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value[part] if isinstance(value, ConfigDict) and part in value else None
    if value is None or isinstance(value, ConfigDict):
        raise UserError(f"unknown config key {key!r}{renamed(key) or nearest(key, flatten(config))}")
    return value


def _convert(key: str, current: Any, text: str) -> Any:
    """Converts `text` to the type of `current`."""
    if isinstance(current, bool):
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise UserError(f"config key {key}={text}: expected bool (true or false)")
    try:
        value = type(current)(text)
    except ValueError:
        raise UserError(f"config key {key}={text}: expected {type(current).__name__}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"config key {key}={text}: expected a finite number")
    return value
