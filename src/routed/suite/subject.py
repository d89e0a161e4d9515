"""The router that a card is of: found by what the command names, tried on a few tokens, and the seeds that its code gives it."""

from __future__ import annotations

import hashlib
import json
import pathlib
import re
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from routed.contracts import UserError
from routed.plan import checks, experiment
from routed.plan.code import code_of, texts_of
from routed.plan.config import PACKAGED, base, canonical
from routed.plan.runs import plan_runs
from routed.routers import ROUTERS, Router
from routed.routers.scores import router_context
from routed.settings.tree import flatten, nearest, node_of, override, parse
from routed.suite import probes

#: The tokens that a router is tried on before anything runs, and numbers of experts.
TOKENS, COUNTS = 6, (5, 8)

#: The least and largest base seed of a card. What is below was looked at while the probes were made.
SEEDS = (10_000, 990_000)


class Subject(NamedTuple):
    """A router: its name in ROUTERS, its settings as KEY=VALUE, the config of its runs, and the digests of its code by part and file."""

    name: str
    given: tuple[str, ...]
    config: ConfigDict
    code: dict[str, dict[str, str]]


def find(spec: str, given: list[str], quick: bool) -> Subject:
    """The router that FILE.py:NAME, FILE.py or a built-in NAME names, with its settings `given` as router.KEY=VALUE.

    NAME is what the file puts into ROUTERS, a `Router`, or the class of a Flax module that is made with the number of experts alone.

    Raises:
      UserError: no such file or name, not a router, a setting that it does not have, or scores of a wrong shape.
    """
    path, _, name = (
        spec.rpartition(":") if ".py:" in spec else (spec, "", "") if spec.endswith(".py") else ("", "", spec)
    )
    name = _of_file(path, name) if path else _built_in(name)
    config, keys = override(base(), {"name": "suite", "router.name": name, **probes.settings(quick)}), list[str]()
    for text in given:
        key, equals, value = text.partition("=")
        if (
            not equals
            or not key.startswith("router.")
            or key in ("router.name", "router.frozen", "router.learning_rate")
        ):
            raise UserError(
                f"--config.{text}: a card has settings of its router only: --config.router.KEY=VALUE, but for its name, frozen and"
                " learning_rate"
            )
        config = override(config, {key: parse(config, key, value)})
        keys.append(key)
    arms = (probes.LEARNED, probes.SELF) if ROUTERS[name].learns else (probes.FIXED,)
    config = override(config, {"arms": arms})
    checks.validate(config)
    _try(spec, config)
    # By value and not as they were written, so that one router has one card; what nobody reads is refused.
    plan_runs(override(config, {"rates": "paper"}), ({},), keys)
    plain = flatten(base())
    own = sorted(f"{key}={value}" for key, value in flatten(config).items() if key in keys and value != plain[key])
    seed = base_seed(name, own, texts_of(config))
    return Subject(name, tuple(own), override(config, {"seed": seed}), code_of(config))


def base_seed(name: str, given: list[str] | tuple[str, ...], texts: list[str]) -> int:
    """The first seed of a router's runs: a hash of its name, settings, the texts of its files, and the probes: nobody knows it before they are written.

    Comments and docstrings count, as a router can read them; the names of files do not. Tuning seeds are others, and so derived as well.
    """
    files = {i: hashlib.sha256(text.encode()).hexdigest() for i, text in enumerate(texts)}  # of a built-in none
    text = json.dumps([name, sorted(given), files, probes.digest()], sort_keys=True)
    low, high = SEEDS
    return low + int(hashlib.sha256(text.encode()).hexdigest(), 16) % (high - low)


#: Routers that know which patch of a sample decides, which no probe has.
OF_PATCHES = ("decisive",)


def _built_in(name: str) -> str:
    if name not in ROUTERS:
        raise UserError(
            f"{name}: no built-in router{nearest(name, ROUTERS)}; known: {', '.join(fitting())}; one of your own is FILE.py:NAME"
        )
    return name


def fitting() -> list[str]:
    """The built-in routers that can route rows of numbers without knowing more of them: those of the reference."""
    found = {name: one for name, one in ROUTERS.items() if not one.tokens or "rows" in one.tokens}
    return [name for name, one in found.items() if "token_id" not in one.needs and name not in OF_PATCHES]


def _of_file(path: str, name: str) -> str:
    before = dict(ROUTERS)
    module = experiment.load(path, needs=())
    added = {key: one for key, one in ROUTERS.items() if before.get(key) is not one}
    classes = {key: one for key, one in vars(module).items() if _is_own_module(one, module)}
    if taken := [key for key in (*added, name) if any(before.get(key) is one for one in PACKAGED)]:
        raise UserError(
            f"{path}: {taken[0]} is a built-in router, which scores are measured against: give yours another name"
        )
    if not name:
        if len(known := [*added] or [*classes]) != 1:
            names = f"it has {', '.join(known)}" if known else "it has no router"
            raise UserError(f"{path}: which router? say {path}:NAME; {names}")
        (name,) = known
    if name in added:
        return _blind(path, name)
    value = vars(module).get(name)
    if value is None:
        known = [*added, *classes]
        raise UserError(f"{path}: has no {name}{nearest(name, known)}; its routers: {', '.join(known) or 'none'}")
    if isinstance(value, Router):
        ROUTERS[name] = value
        return _blind(path, name)
    if not (isinstance(value, type) and issubclass(value, nn.Module)):
        raise UserError(
            f"{path}:{name}: is no router but {_kind(value)}: name a key of ROUTERS, a Router, or a Flax module that is made with the"
            " number of experts alone"
        )
    ROUTERS[name] = Router(lambda own, experts: value(experts), tokens=("rows",))
    return name


def _blind(path: str, name: str) -> str:
    """The name of a router, unless it asks for the answer."""
    if "cluster" in ROUTERS[name].needs:
        raise UserError(
            f"{path}:{name}: needs cluster, the answer of nearly all probes: a card is of routers that see tokens only"
        )
    return name


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"of the type {type(value).__name__}"


def _is_own_module(value: Any, module: types.ModuleType) -> bool:
    """Is it a class of Flax modules that the file defines?"""
    return isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == module.__name__


def scores_of(config: ConfigDict, experts: int) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    """(init(key, x), apply(variables, x)) of the config's router, called as the layer calls it; clusters and the step are 0."""
    module = ROUTERS[config.router.name].make(node_of(canonical(config)).router, experts)

    def context(x: Any) -> dict[str, Any]:
        return router_context(config.router, cluster=jnp.zeros(len(x), jnp.int32), step=0)

    def init(key: Any, x: Any) -> Any:
        return module.init({"params": key, "noise": key}, x, **context(x))

    return init, lambda variables, x: module.apply(variables, x, **context(x))


def _try(spec: str, config: ConfigDict) -> None:
    """Refuses a router that cannot be made or called, or whose scores are no [tokens, experts] of floats."""
    dim = config.data.dim
    for experts in COUNTS:
        try:
            init, apply = scores_of(config, experts)
            x = jax.ShapeDtypeStruct((TOKENS, dim), jnp.float32)
            scores = jax.eval_shape(apply, jax.eval_shape(init, jax.random.key(0), x), x)
        except UserError:
            raise
        except Exception as error:  # whatever a user's code raises
            words = (str(error).strip() or "no message").splitlines()[0]
            raise UserError(
                f"{spec}: the router fails with {experts} experts on tokens [{TOKENS}, {dim}]: {type(error).__name__}: {words}"
            ) from error
        shape = getattr(scores, "shape", None)
        if shape != (TOKENS, experts) or not jnp.issubdtype(scores.dtype, jnp.floating):
            found = f"{scores.dtype}{list(shape)}" if shape is not None else type(scores).__name__
            raise UserError(
                f"{spec}: of tokens [{TOKENS}, {dim}] the router with {experts} experts makes {found}; it must return scores"
                f" [tokens, experts], floats [{TOKENS}, {experts}]"
            )


def folder_name(spec: str, given: list[str], quick: bool) -> str:
    """suite-FILE-NAME[-quick][-KEY=VALUE...]: what a card's workdir is called where the command does not say."""
    path, _, name = spec.rpartition(":")
    parts = ["suite", pathlib.Path(path).stem, pathlib.Path(name).stem, *(["quick"] if quick else []), *sorted(given)]
    return "-".join(re.sub(r"[^A-Za-z0-9_.=+-]+", "_", part) for part in parts if part)
