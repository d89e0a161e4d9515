"""Checks of a config: each value by its declaration, then parts by their properties, then each part by its own check.

No check here knows a part's name. Every point and arm is checked before anything compiles.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from routed.contracts import UserError, nearest
from routed.experts import EXPERTS
from routed.layer.auxiliary import steered
from routed.layer.dispatch import reason_against
from routed.layer.selection import SELECTIONS
from routed.plan.config import (
    CHOICES,
    DATA,
    canonical,
    declared,
    parts_of,
    problem_of,
    problems_for,
    read_keys,
    variants_of,
)
from routed.plan.run_settings import TUNING_OFFSET
from routed.routers import ROUTERS
from routed.routers.noise import NOISES
from routed.settings.renamed import renamed
from routed.settings.setting import Setting, refuse
from routed.settings.tree import flatten
from routed.training import PROBLEMS, ProblemPart
from routed.training.optimiser import NORMALISATIONS

#: Keys of a point that say which runs it has, and are no columns of the results.
PLANNED = ("arms", "seeds")

#: The most evaluations of a run.
EVALUATIONS = 10_000


def validate(config: ConfigDict) -> None:
    """Refuses impossible values, and keys that an experiment file added to the declared settings.

    Raises:
      UserError: names the key, its value and the allowed values.
    """
    settings, flat = declared(), flatten(config)
    for key, value in flat.items():
        if key not in settings:
            hint = renamed(key) or nearest(key, settings)
            raise UserError(f"unknown config key {key!r}{hint}: an experiment may add no key")
        _check_value(key, value, settings[key])
    _check_run(config)
    data, problem = DATA[config.data.name], problem_of(config)
    for variant in (variants := variants_of(config)):
        for key, value in flatten(variant).items():
            _check_value(key, value, settings[key])
    moving = {item for variant in variants for item in steered(variant.losses).items()}
    if len(moving) > len(dict(moving)):
        refuse("phases", config.phases, f"{sorted(moving)}: a coefficient that training moves has one start")
    for variant in variants:
        read = canonical(variant)
        _check_parts(read, data, problem)
        for active in parts_of(variant):
            active.part.check(read)


def _check_value(key: str, value: Any, setting: Setting) -> None:
    """Refuses a value of another type, a value that the setting may not have, and a number that is not of 32 bits."""
    if type(value) is not type(setting.default):
        raise UserError(
            f"config key {key}={value!r}: expected {type(setting.default).__name__}, got {type(value).__name__}"
        )
    if not setting.allowed.holds(value):
        refuse(key, value, setting.allowed.description())
    for number in value if isinstance(value, tuple) else (value,):
        if type(number) in (int, float) and not _fits_32_bits(number):
            refuse(key, value, "programs compute in 32 bits: use numbers below 2^31, or of size 1e-37 to 1e10")


def _fits_32_bits(number: int | float) -> bool:
    """True if int32 or float32 holds a number, and what programs make of it: squares, and products of several."""
    return abs(number) < 2**31 if isinstance(number, int) else number == 0 or 1e-37 <= abs(number) <= 1e10


def _check_run(config: ConfigDict) -> None:
    """Refuses numbers that contradict each other, whatever the parts."""
    if config.seed + config.seeds > TUNING_OFFSET:
        refuse("seeds", config.seeds, f"seed + seeds must be at most {TUNING_OFFSET}, where the tuning seeds start")
    if config.steps % config.eval_every:
        refuse("eval_every", config.eval_every, f"must divide steps={config.steps}")
    tuned = config.tune.steps if config.rates == "tuned" else 0
    if tuned > config.steps or tuned % config.eval_every:
        refuse("tune.steps", tuned, f"must be a multiple of eval_every={config.eval_every}, and at most {config.steps}")
    if config.steps // config.eval_every > EVALUATIONS:
        refuse(
            "eval_every",
            config.eval_every,
            f"makes {config.steps // config.eval_every:,} evaluations, each a row of the tables, and at most"
            f" {EVALUATIONS:,} are kept; set it to {config.steps // EVALUATIONS} or more",
        )
    if config.checkpoint.every and config.eval_every % config.checkpoint.every:
        refuse("checkpoint.every", config.checkpoint.every, f"must divide eval_every={config.eval_every}")
    fitting = [name for problem in problems_for(config.data.name).values() for name in problem.models]
    if config.model not in fitting:
        refuse("model", config.model, f"not for data.name={config.data.name!r}; use one of {', '.join(fitting)}")


def _check_parts(config: ConfigDict, data: Any, problem: ProblemPart) -> None:
    """Refuses parts that do not fit each other, by the declarations of their inputs and needs."""
    model, data_text = problem.models[config.model], f"data.name={config.data.name!r}"
    provided, tokens = data.provides, "hidden" if model.inner is not None else data.tokens
    if missing := [need for need in model.needs if need not in provided]:
        refuse("model", config.model, f"needs {missing[0]}, which {data_text} does not have; use {_having(missing[0])}")
    if model.targets and data.targets.get(config.data.target) not in model.targets:
        targets = " or ".join(name for name, kind in data.targets.items() if kind in model.targets)
        reason = f"does not fit model={config.model!r}; use {targets or 'another task'}"
        refuse("data.target", config.data.target, reason)
    readable = EXPERTS[config.experts.name].tokens if "experts.name" in model.uses else ()
    if readable and tokens not in readable:
        fitting = ", ".join(_reading(EXPERTS, tokens))
        reason = f"computes on {' or '.join(readable)}, the tokens of {data_text} are {tokens}; use one of {fitting}"
        refuse("experts.name", config.experts.name, reason)
    if model.routed:
        _check_router(config, data, problem, tokens)
        _check_selection(config, problem)
        _check_entropy(config, problem)
        return
    has_divisor = "optimizer.normalise" in problem.uses and NORMALISATIONS[config.optimizer.normalise].divides
    if has_divisor and not model.every:
        reason = f"model={config.model!r} has no experts; set 'none'"
        refuse("optimizer.normalise", config.optimizer.normalise, reason)


def _check_router(config: ConfigDict, data: Any, problem: ProblemPart, tokens: str) -> None:
    """Refuses a router that cannot read these tokens, or that needs something that the data lack."""
    router, data_text = ROUTERS[config.router.name], f"data.name={config.data.name!r}"
    fitting = ", ".join(_reading(ROUTERS, tokens, data.provides))
    if router.tokens and tokens not in router.tokens:
        reason = f"routes {' or '.join(router.tokens)}, the tokens of {data_text} are {tokens}; use one of {fitting}"
        refuse("router.name", config.router.name, reason)
    if missing := [need for need in router.needs if need not in data.provides]:
        reason = f"needs {missing[0]}, which {data_text} does not have; use one of {fitting}"
        refuse("router.name", config.router.name, reason)


def _check_entropy(config: ConfigDict, problem: ProblemPart) -> None:
    """Refuses a gate entropy that no distribution over the experts, or over the patches of a sample, has."""
    if "router.initial_entropy" not in problem.models[config.model].reads:
        return
    choices, count = "experts.count", config.experts.count
    if SELECTIONS[config.selection.name].within_samples:
        choices, count = "patches of a sample", problem.positions(config)
    if 0 < config.router.initial_entropy >= math.log(count):
        refuse(
            "router.initial_entropy",
            config.router.initial_entropy,
            f"must be below ln({choices})={math.log(count):.4g}",
        )


def _check_selection(config: ConfigDict, problem: ProblemPart) -> None:
    """Refuses selections of training and evaluation that do not fit the problem, the experts or the dispatch."""
    rule, selection = config.selection, SELECTIONS[config.selection.name]
    for key, node in (("selection", rule), ("selection.eval", rule.eval)):
        if "k" in node and node.k > config.experts.count:
            refuse(f"{key}.k", node.k, f"more than experts.count={config.experts.count}; lower {key}.k")
    alone = [name for name, part in SELECTIONS.items() if not part.sees_others]
    evaluating = alone
    if not problem.causal:
        evaluating = [name for name, part in SELECTIONS.items() if not part.sees_others or part.within_samples]
    if rule.eval.name not in evaluating:
        neighbours = "token by later ones" if problem.causal else "test sample by its neighbours"
        reason = f"would route a {neighbours}; must be one of {', '.join(evaluating)}"
        refuse("selection.eval.name", rule.eval.name, reason)
    if problem.causal:
        _check_causal(config, alone)
    if conflict := reason_against(config.dispatch, rule.name):
        refuse("dispatch", config.dispatch, conflict)
    noisy = [rule.name, *[rule.eval.name] * config.router.get("noise_at_eval", False)]
    if NOISES[config.router.get("noise", "none")].draw and not (
        config.router.noise_in_weights or any(SELECTIONS[name].chooses for name in noisy)
    ):
        reason = f"selection.name={rule.name!r} has no choice to change; set router.noise_in_weights=true"
        refuse("router.noise", config.router.noise, reason)
    if rule.balance_rate and not selection.biased:
        biased = ", ".join(name for name, part in SELECTIONS.items() if part.biased)
        reason = f"selection.name={rule.name!r} takes no bias; use one of {biased} or 0"
        refuse("selection.balance_rate", rule.balance_rate, reason)
    is_constant = "renormalise" in selection.reads and rule.k == 1 and rule.renormalise
    if is_constant and not (config.router.frozen or rule.no_gradient or config.phases):
        refuse(
            "selection.renormalise",
            True,
            "with selection.k=1 the router gets no gradient, an accidental frozen router; set"
            " selection.renormalise=false or router.frozen=true (if it is meant: selection.no_gradient=true)",
        )


def _check_causal(config: ConfigDict, alone: list[str]) -> None:
    """Refuses selections of a decoder that see later tokens or are not sparse; `alone` names those of single tokens."""
    name, data_text = config.selection.name, f"data.name={config.data.name!r}"
    if SELECTIONS[name].sees_others:
        reason = f"it routes a token of the decoder by later ones; use one of {', '.join(alone)}"
        refuse("selection.name", name, f"not for {data_text}: {reason}")
    if not SELECTIONS[name].sparse:
        sparse = ", ".join(name for name in alone if SELECTIONS[name].sparse)
        reason = f"every expert on every token is no sparse model; use one of {sparse}"
        refuse("selection.name", name, f"not for {data_text}: {reason}")


def _reading(parts: Mapping[str, Any], tokens: str, provided: Collection[str] | None = None) -> list[str]:
    """The parts of a table that can read such tokens, and whose needs are `provided` if that is given."""
    return [
        name
        for name, part in parts.items()
        if (not part.tokens or tokens in part.tokens)
        and (provided is None or all(need in provided for need in part.needs))
    ]


def _having(need: str) -> str:
    """The names of the data that provide `need`, as text."""
    return " or ".join(f"data.name={name}" for name, part in DATA.items() if need in part.provides) or "other data"


def refuse_unread(keys: Iterable[str], configs: Iterable[ConfigDict]) -> None:
    """Refuses keys that the user set or swept and that none of the configs reads.

    Raises:
      UserError: names the key, and the parts that read it.
    """
    keys, read = dict.fromkeys(keys), set[str]()
    pending = iter(configs)
    while missing := [key for key in keys if key not in read]:
        config = next(pending, None)
        if config is None:
            raise UserError(
                f"config key {missing[0]}: nothing in this plan reads it, so it would change nothing;"
                f" {readers_of(missing[0])}"
            )
        readers, active = read_keys(config)
        read |= readers.keys() & active


def check_values(configs: Iterable[ConfigDict]) -> None:
    """Refuses a user's task whose samples do not fit its declaration, once for all configs of the same data.

    Raises:
      UserError: names the task, and what it makes.
    """
    for config in {str(config.data): config for config in configs}.values():
        problem_of(config).check_values(config)


def readers_of(key: str) -> str:
    """A text with the parts that read a setting, or the condition under which it is read."""
    when = declared()[key].when
    where = f", where {when.description}" if when else ""
    node, _, name = key.rpartition(".")
    readers = [
        f"{choice}={part}"
        for choice, (choice_node, _, _, parts) in CHOICES.items()
        if choice != "model"  # whose parts depend on the problem
        for part, declaration in parts.items()
        if (choice_node == node and name in (*declaration.settings, *declaration.reads))
        or key in (*declaration.reads, *declaration.uses)
    ]
    readers += [
        f"model={model} ({problem})"
        for problem, part in PROBLEMS.items()
        for model, declaration in part.models.items()
        if key in declaration.reads
    ]
    readers += [
        f"data of the problem {problem}" for problem, part in PROBLEMS.items() if key in (*part.settings, *part.reads)
    ]
    if not readers and when:
        return f"it is read{where.removeprefix(',')}"
    return f"it is read by {', '.join(readers)}{where}" if readers else f"no part reads it{where}"


def validate_sweep(sweep: tuple[dict, ...]) -> None:
    """Refuses to sweep a key without identity: the rows at all its values would be the same.

    Raises:
      UserError: names the key.
    """
    settings = declared()
    for key in sorted({key for point in sweep for key in point} - set(PLANNED)):
        if key in settings and not settings[key].identity:
            raise UserError(
                f"sweep key {key}: cannot be swept, as it does not tell points apart; set it with --config.{key}=VALUE"
            )
