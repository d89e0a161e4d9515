"""What a config may say: each value by its declaration, then parts by their properties, then each part by its own check.

Nothing here knows a part's name. Every point and arm is checked before anything compiles.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from routed.contracts import UserError
from routed.experts import EXPERTS
from routed.layer.dispatch import misfit
from routed.layer.selection import SELECTIONS
from routed.plan.config import CHOICES, DATA, canonical, declared, parts_of, problem_of, problems_for, read_keys
from routed.plan.run_settings import TUNING_OFFSET
from routed.routers import ROUTERS
from routed.settings.setting import Setting, refuse
from routed.settings.tree import flatten, nearest
from routed.training import PROBLEMS, ProblemPart
from routed.training.optimiser import NORMALISATIONS
from routed.training.phases import configs_of

#: What a point may say of how it is run: which arms, and how many seeds. No column of the results.
PLANNED = ("arms", "seeds")


#: The most evaluations of a run.
EVALUATIONS = 10_000


def validate(config: ConfigDict) -> None:
    """Refuses impossible values, and what an experiment file added to the declared settings.

    Raises:
      UserError: names the key, its value and what it must be.
    """
    known, flat = declared(), flatten(config)
    for key, value in flat.items():
        if key not in known:
            raise UserError(f"unknown config key {key!r}{nearest(key, known)}: an experiment may add no key")
        _check_value(key, value, known[key])
    _check_run(config)
    for phase in configs_of(config):
        for key, value in flatten(phase).items():
            _check_value(key, value, known[key])
        read = canonical(phase)
        _check_parts(read, DATA[config.data.name], problem_of(config))
        for one in parts_of(phase):
            one.part.check(read)


def _check_value(key: str, value: Any, known: Setting) -> None:
    """Refuses a value of another type, or that the setting may not have, or that no program holds."""
    if type(value) is not type(known.default):
        raise UserError(
            f"config key {key}={value!r}: expected {type(known.default).__name__}, got {type(value).__name__}"
        )
    if not known.allowed.holds(value):
        refuse(key, value, known.allowed.words())
    for one in value if isinstance(value, tuple) else (value,):
        if type(one) in (int, float) and not _in_32_bits(one):
            refuse(
                key, value, "programs count and compute in 32 bits: use numbers below 2^31, or of size 1e-37 to 1e38"
            )


def _in_32_bits(number: int | float) -> bool:
    """Is it the same in a program, whose integers are int32 and whose other numbers float32: neither infinite nor 0?"""
    return abs(number) < 2**31 if isinstance(number, int) else number == 0 or 1e-37 <= abs(number) <= 1e38


def _check_run(config: ConfigDict) -> None:
    """Numbers that have to fit each other, whatever the parts."""
    if config.seed + config.seeds > TUNING_OFFSET:
        refuse("seeds", config.seeds, f"seed + seeds must be at most {TUNING_OFFSET}, where the tuning seeds start")
    if config.steps % config.eval_every:
        refuse("eval_every", config.eval_every, f"must divide steps={config.steps}")
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
    """Parts by what they say of themselves: what they read, need, fit and see."""
    model, where = problem.models[config.model], f"data.name={config.data.name!r}"
    provided, kind = data.provides, "hidden" if model.inner is not None else data.tokens
    if missing := [need for need in model.needs if need not in provided]:
        refuse("model", config.model, f"needs {missing[0]}, which {where} does not have; use {_having(missing[0])}")
    if model.targets and data.targets[config.data.target] not in model.targets:
        fits = [name for name, kind in data.targets.items() if kind in model.targets]
        refuse(
            "data.target",
            config.data.target,
            f"does not fit model={config.model!r}; use {' or '.join(fits) or 'another task'}",
        )
    tokens = EXPERTS[config.experts.name].tokens if "experts" in config and "name" in config.experts else ()
    if tokens and kind not in tokens:
        fits = _reading(EXPERTS, kind)
        refuse(
            "experts.name",
            config.experts.name,
            f"computes on {' or '.join(tokens)}, the tokens of {where} are {kind}; use one of {', '.join(fits)}",
        )
    if not model.routed:
        if not model.every and "normalise" in config.optimizer and NORMALISATIONS[config.optimizer.normalise].divides:
            refuse(
                "optimizer.normalise", config.optimizer.normalise, f"model={config.model!r} has no experts; set 'none'"
            )
        return
    router = ROUTERS[config.router.name]
    if router.tokens and kind not in router.tokens:
        fits = _reading(ROUTERS, kind, provided)
        refuse(
            "router.name",
            config.router.name,
            f"routes {' or '.join(router.tokens)}, the tokens of {where} are {kind}; use one of {', '.join(fits)}",
        )
    if missing := [need for need in router.needs if need not in provided]:
        fits = _reading(ROUTERS, kind, provided)
        refuse(
            "router.name",
            config.router.name,
            f"needs {missing[0]}, which {where} does not have; use one of {', '.join(fits)}",
        )
    _check_selection(config, problem)
    shared = ("experts.count", config.experts.count)
    if SELECTIONS[config.selection.name].within_samples:
        shared = "patches of a sample", problem.positions(config)
    if "entropy" in config.router and 0 < config.router.entropy >= math.log(shared[1]):
        refuse("router.entropy", config.router.entropy, f"must be below ln({shared[0]})={math.log(shared[1]):.4g}")


def _check_selection(config: ConfigDict, problem: ProblemPart) -> None:
    """The selections of training and evaluation, by what they see and give."""
    rule, chosen, where = config.selection, SELECTIONS[config.selection.name], f"data.name={config.data.name!r}"
    for key, node in (("selection", rule), ("selection.eval", rule.eval)):
        if "k" in node and node.k > config.experts.count:
            refuse(f"{key}.k", node.k, f"more than experts.count={config.experts.count}; lower {key}.k")
    alone = [name for name, one in SELECTIONS.items() if not one.sees_others]
    apart = [
        name for name, one in SELECTIONS.items() if not one.sees_others or (one.within_samples and not problem.causal)
    ]
    if rule.eval.name not in apart:
        refuse(
            "selection.eval.name",
            rule.eval.name,
            f"would route a {'token by later ones' if problem.causal else 'test sample by its neighbours'}; must be one of {', '.join(apart)}",
        )
    if problem.causal and chosen.sees_others:
        refuse(
            "selection.name",
            rule.name,
            f"not for {where}: it routes a token of the decoder by later ones; use one of {', '.join(alone)}",
        )
    if problem.causal and not chosen.sparse:
        sparse = [name for name in alone if SELECTIONS[name].sparse]
        refuse(
            "selection.name",
            rule.name,
            f"not for {where}: every expert on every token is no sparse model; use one of {', '.join(sparse)}",
        )
    if reason := misfit(config.dispatch, rule.name):
        refuse("dispatch", config.dispatch, reason)
    if rule.balance_rate and not chosen.biased:
        fits = [name for name, one in SELECTIONS.items() if one.biased]
        refuse(
            "selection.balance_rate",
            rule.balance_rate,
            f"selection.name={rule.name!r} takes no bias; use one of {', '.join(fits)} or 0",
        )
    constant = "renormalise" in chosen.reads and rule.k == 1 and rule.renormalise
    if constant and not (config.router.frozen or rule.no_gradient or config.phases):
        refuse(
            "selection.renormalise",
            True,
            "with selection.k=1 the router gets no gradient, an accidental frozen router; set selection.renormalise=false or"
            " router.frozen=true (if it is meant: selection.no_gradient=true)",
        )


def _reading(parts: Mapping[str, Any], tokens: str, provided: Collection[str] | None = None) -> list[str]:
    """The parts of a table that can read such tokens, with what is provided."""
    return [
        name
        for name, part in parts.items()
        if (not part.tokens or tokens in part.tokens)
        and (provided is None or all(need in provided for need in part.needs))
    ]


def _having(need: str) -> str:
    """The data that provide something, as words."""
    return " or ".join(f"data.name={name}" for name, part in DATA.items() if need in part.provides) or "other data"


def refuse_unread(keys: Iterable[str], configs: Iterable[ConfigDict]) -> None:
    """Refuses keys that somebody set or swept and that none of the configs reads.

    Raises:
      UserError: names the key, and who reads it.
    """
    keys, read = dict.fromkeys(keys), set[str]()
    waiting = iter(configs)
    while missing := [key for key in keys if key not in read]:
        config = next(waiting, None)
        if config is None:
            raise UserError(
                f"config key {missing[0]}: nothing in this plan reads it, so it would change nothing; {readers_of(missing[0])}"
            )
        found, active = read_keys(config)
        read |= found.keys() & active


def readers_of(key: str) -> str:
    """Who reads a setting, and when, in words."""
    setting = declared()[key]
    if setting.when is not None:
        return f"it is read where {setting.when.words}"
    node, _, name = key.rpartition(".")
    readers = [
        f"{choice}={part}"
        for choice, (where, _, _, parts) in CHOICES.items()
        if choice != "model"  # whose parts depend on the problem
        for part, one in parts.items()
        if (where == node and (name in one.settings or name in one.reads)) or key in one.reads or key in one.uses
    ]
    readers += [
        f"model={name} ({of})"
        for of, one in PROBLEMS.items()
        for name, model in one.models.items()
        if key in model.reads
    ]
    readers += [
        f"data of the problem {name}" for name, one in PROBLEMS.items() if key in one.settings or key in one.reads
    ]
    return f"it is read by {', '.join(readers)}" if readers else "no part reads it"


def validate_sweep(sweep: tuple[dict, ...]) -> None:
    """Refuses to sweep what does not tell runs apart: their rows would be the same.

    Raises:
      UserError: names the key.
    """
    known = declared()
    for key in sorted({key for point in sweep for key in point} - set(PLANNED)):
        if key in known and not known[key].identity:
            raise UserError(
                f"sweep key {key}: cannot be swept, as it does not tell points apart; set it with --config.{key}=VALUE"
            )
