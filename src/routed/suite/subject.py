"""The router of a card: found by its name in the command, tried on a few tokens, with seeds derived from its code."""

from __future__ import annotations

import hashlib
import json
import pathlib
import re
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from routed.contracts import UserError, nearest
from routed.plan import checks, experiment_files
from routed.plan.code import code_of, texts_of
from routed.plan.config import PACKAGED, base, canonical
from routed.plan.runs import plan_runs
from routed.routers import ROUTERS, Router, router_context
from routed.routers.scores import check_scores
from routed.settings.renamed import old_name
from routed.settings.tree import flatten, node_of, override, parse
from routed.suite import probes, torch_router

#: The number of tokens that a router is tried on before anything runs, and numbers of experts.
TOKENS, COUNTS = 6, (5, 8)

#: The smallest and largest base seed of a card. Smaller seeds served the development of the probes.
SEEDS = (10_000, 990_000)


class Subject(NamedTuple):
    """A router: its name in ROUTERS, its settings as KEY=VALUE, the config of its runs, and digests of its code."""

    name: str
    given: tuple[str, ...]
    config: ConfigDict
    code: dict[str, dict[str, str]]


def find(spec: str, given: list[str], quick: bool) -> Subject:
    """Finds the router of FILE.py:NAME, FILE.py or a built-in NAME, with its settings `given` as router.KEY=VALUE.

    NAME is a key that the file adds to ROUTERS, a `Router`, a class of Flax modules that takes the number of experts
    alone, or a class of PyTorch modules (`torch_router`).

    Raises:
      UserError: no such file or name, not a router, a setting that it does not have, or scores of a wrong shape.
    """
    if spec.endswith(".py"):
        path, name = spec, ""
    else:
        path, _, name = spec.rpartition(":") if ".py:" in spec else ("", "", spec)
    if path:
        name = _of_file(path, name)
    elif name not in ROUTERS:
        raise UserError(
            f"{name}: no built-in router{nearest(name, ROUTERS)}; known: {', '.join(fitting())}; one of your own is"
            " FILE.py:NAME"
        )
    config = override(base(), {"name": "suite", "router.name": name, **probes.settings(quick)})
    config, keys = _with_settings(config, given)
    arms = (probes.LEARNED, probes.SELF) if ROUTERS[name].learns else (probes.FIXED,)
    config = override(config, {"arms": arms})
    checks.validate(config)
    _try(spec, config)
    plan_runs(override(config, {"rates": "paper"}), ({},), keys)  # refuses settings that nobody reads
    # Settings count by value and not by their text, so that a router has one card.
    defaults = flatten(base())
    settings = sorted(
        f"{key}={value}" for key, value in flatten(config).items() if key in keys and value != defaults[key]
    )
    seed = base_seed(name, settings, texts_of(config))
    return Subject(name, tuple(settings), override(config, {"seed": seed}), code_of(config))


def _with_settings(config: ConfigDict, given: list[str]) -> tuple[ConfigDict, list[str]]:
    """The config with the router's settings, and their keys."""
    fixed, keys = ("router.name", "router.frozen", "router.learning_rate"), list[str]()
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.startswith("router.") or key in fixed:
            raise UserError(
                f"--config.{text}: a card has settings of its router only: --config.router.KEY=VALUE, but for its name,"
                " frozen and learning_rate"
            )
        config = override(config, {key: parse(config, key, value)})
        keys.append(key)
    return config, keys


def base_seed(name: str, settings: Sequence[str], texts: list[str]) -> int:
    """The first seed of a router's runs: a hash of its name, settings, files and the probes.

    Comments and docstrings count, as a router can read them; the names of files do not. Tuning seeds derive from it
    too.
    """
    files = {i: hashlib.sha256(text.encode()).hexdigest() for i, text in enumerate(texts)}  # none of a built-in router
    given = (text.partition("=") for text in settings)
    named = sorted(f"{old_name(key)}={value}" for key, _, value in given)
    text = json.dumps([name, named, files, probes.digest()], sort_keys=True)
    low, high = SEEDS
    return low + int(hashlib.sha256(text.encode()).hexdigest(), 16) % (high - low)


def fitting() -> list[str]:
    """The built-in routers of the reference: those that route rows of numbers without further knowledge of them."""
    routers = {name: part for name, part in ROUTERS.items() if not part.tokens or "rows" in part.tokens}
    return [name for name, part in routers.items() if "token_id" not in part.needs]


def _of_file(path: str, name: str) -> str:
    """Loads a file, registers its router if the file does not, and returns the router's name."""
    before = dict(ROUTERS)
    module = experiment_files.load(path, needs=())
    added = {key: part for key, part in ROUTERS.items() if before.get(key) is not part}
    classes = [key for key, value in vars(module).items() if _is_class(value) and value.__module__ == module.__name__]
    if taken := [key for key in (*added, name) if any(before.get(key) is part for part in PACKAGED)]:
        raise UserError(
            f"{path}: {taken[0]} is a built-in router, which scores are measured against: give yours another name"
        )
    if not name:
        candidates = [*added] or classes
        if len(candidates) != 1:
            text = f"it has {', '.join(candidates)}" if candidates else "it has no router"
            raise UserError(f"{path}: which router? say {path}:NAME; {text}")
        (name,) = candidates
    if name not in added:
        ROUTERS[name] = _router_from(module, path, name, [*added, *classes])
    if "cluster" in ROUTERS[name].needs:
        raise UserError(
            f"{path}:{name}: needs cluster, the answer of nearly all probes: a card is of routers that see tokens only"
        )
    return name


def _router_from(module: types.ModuleType, path: str, name: str, candidates: list[str]) -> Router:
    """The router of this name in a module: a `Router`, or a class of Flax or PyTorch modules."""
    value = vars(module).get(name)
    if value is None:
        names = ", ".join(candidates) or "none"
        raise UserError(f"{path}: has no {name}{nearest(name, candidates)}; its routers: {names}")
    if isinstance(value, Router):
        return value
    if torch_router.is_class(value):
        return torch_router.router_of(value)
    if not _is_class(value):
        kind = f"the class {value.__name__}" if isinstance(value, type) else f"of the type {type(value).__name__}"
        raise UserError(
            f"{path}:{name}: is no router but {kind}: name a key of ROUTERS, a Router, a Flax module that is made"
            " with the number of experts alone, or a PyTorch module that is made with (dimensions, experts)"
        )
    return Router(lambda config, experts: value(experts), tokens=("rows",))


def _is_class(value: Any) -> bool:
    """Returns True for a class of Flax or of PyTorch modules."""
    return (isinstance(value, type) and issubclass(value, nn.Module)) or torch_router.is_class(value)


def scores_of(config: ConfigDict, experts: int) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    """(init(key, x), apply(variables, x)) of the config's router, called as in a layer; clusters and the step are 0."""
    module = ROUTERS[config.router.name].make(node_of(canonical(config)).router, experts)

    def context(x: Any) -> dict[str, Any]:
        needs = ROUTERS[config.router.name].needs
        return router_context(needs, cluster=jnp.zeros(len(x), jnp.int32), step=0, steps=config.steps)

    def init(key: Any, x: Any) -> Any:
        return module.init({"params": key, "noise": key}, x, **context(x))

    return init, lambda variables, x: module.apply(variables, x, **context(x))


def has_gradient(config: ConfigDict) -> bool:
    """True if the scores of the config's router have a gradient with respect to its parameters."""
    init, apply = scores_of(config, COUNTS[0])
    x, weight = (jax.random.normal(jax.random.key(1), (TOKENS, size)) for size in (config.data.dim, COUNTS[0]))
    variables = dict(init(jax.random.key(0), x))
    params = variables.pop("params", {})
    gradient = jax.grad(lambda params: (weight * apply({**variables, "params": params}, x)).sum())(params)
    return any(bool(leaf.any()) for leaf in jax.tree.leaves(gradient))


def _try(spec: str, config: ConfigDict) -> None:
    """Refuses a router that cannot be built or called, or whose scores are no [tokens, experts] of floats."""
    dim = config.data.dim
    for experts in COUNTS:
        try:
            init, apply = scores_of(config, experts)
            x = jax.ShapeDtypeStruct((TOKENS, dim), jnp.float32)
            scores = jax.eval_shape(apply, jax.eval_shape(init, jax.random.key(0), x), x)
        except UserError:
            raise
        except Exception as error:  # whatever a user's code raises
            message = (str(error).strip() or "no message").splitlines()[0]
            raise UserError(
                f"{spec}: the router fails with {experts} experts on tokens [{TOKENS}, {dim}]: {type(error).__name__}:"
                f" {message}"
            ) from error
        check_scores(scores, x.shape, experts, spec)


def folder_name(spec: str, given: list[str], quick: bool) -> str:
    """The default name of a card's workdir: suite-FILE-NAME[-quick][-KEY=VALUE...]."""
    path, _, name = spec.rpartition(":")
    parts = ["suite", pathlib.Path(path).stem, pathlib.Path(name).stem, *(["quick"] if quick else []), *sorted(given)]
    return "-".join(re.sub(r"[^A-Za-z0-9_.=+-]+", "_", part) for part in parts if part)
