"""Phases of training: until which step, which groups of parameters train, with which losses and which selection.

A run's phases are the setting `phases`, a tuple of texts such as "until=500 train=router loss=squared". Each step
trains the first phase that applies; a phase may take a `fraction` of the steps only, by a coin. Entries of a phase:
`until` (steps, or a fraction of them as 90%; default: the end) or `epochs` (of data.epochs), `fraction` (of the steps
before `until`; default 1), `train` (groups, joined by +, or nothing; default all) and KEY=VALUE for any key of the
nodes `selection` and `losses`, for `loss` and for `dispatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import logging as log
from jaxtyping import Array, Int, PRNGKeyArray
from ml_collections import ConfigDict

from routed.contracts import GROUPS, UserError
from routed.settings.renamed import PHASE_ENTRIES
from routed.settings.setting import refuse
from routed.settings.tree import flatten, node_of, override, parse, value_of

#: The nodes and keys of a config that a phase may change.
NODES, KEYS = ("selection.", "losses."), ("loss", "dispatch")
#: The word for no group.
NOTHING = "nothing"


class Phase(NamedTuple):
    """One phase: steps before `until`, on a `fraction` of them; `groups` train (None: all); `changes` to the config.

    With `epochs` a phase lasts so many epochs of the training samples, however many samples there are.
    """

    until: int
    fraction: float
    groups: tuple[str, ...] | None
    changes: dict[str, Any]
    epochs: int = 0

    def end(self, per_epoch: Any) -> Any:
        """Returns the step before which the phase ends."""
        return self.epochs * per_epoch if self.epochs else self.until


def steps_per_epoch(config: Any) -> Any:
    """Returns the steps in which every training sample comes once (`data.epochs`)."""
    return config.data.samples // config.batch_size


def phases_of(config: ConfigDict) -> tuple[Phase, ...]:
    """Returns the phases of a config, one without changes if it names none.

    Raises:
      UserError: an unknown entry or a wrong value, steps that no phase covers, or a phase for which no step is left.
    """
    phases = tuple(_phase(config, text) for text in config.phases) or (Phase(config.steps, 1.0, None, {}),)
    if phases[-1].until < config.steps or phases[-1].epochs or phases[-1].fraction < 1:
        raise UserError(
            f"config key phases={config.phases!r}: no phase covers all of the last steps; end with one without until"
            " and fraction"
        )
    taken = 0
    for i, phase in enumerate(phases):
        if not phase.epochs and phase.until <= taken:
            raise UserError(
                f"config key phases={config.phases!r}: {config.phases[i]!r} never comes, as one before it takes all"
                f" steps up to {taken}; give that an until= or a fraction="
            )
        if not phase.epochs and phase.fraction == 1:
            taken = phase.until
    return phases


def require_groups(phases: tuple[Phase, ...], params: dict[str, Any]) -> None:
    """Raises if a phase trains no group of this model; only warns if the missing groups are router or experts.

    Raises:
      UserError: names the phase's groups, and those of the model.
    """
    groups = [name for name in GROUPS[:-1] if jax.tree.leaves(params.get(name))]
    for phase in phases:
        if not phase.groups or {*phase.groups} & {*groups}:
            continue
        if {*phase.groups} <= {"router", "experts"}:
            log.warning("phases: this model has no %s: nothing trains in that phase", " or ".join(phase.groups))
        else:
            refuse(
                "phases",
                f"train={'+'.join(phase.groups)}",
                f"nothing would train: the groups of this model are {', '.join(groups)}",
            )


def _phase(config: ConfigDict, text: str) -> Phase:
    until, fraction, groups, changes, epochs = config.steps, 1.0, None, {}, 0
    for word in text.split():
        key, equals, value = word.partition("=")
        try:
            if not equals:
                raise ValueError
            if key == "until":
                part = value.removesuffix("%")
                until = int(part) if part == value else round(float(part) / 100 * config.steps)
            elif key == "epochs":
                epochs = int(value)
            elif key == "fraction":
                fraction = float(value)
            elif key in PHASE_ENTRIES:
                raise UserError(f"config key phases: {text!r}: the new name of {key}= is {PHASE_ENTRIES[key]}=")
            elif key == "train":
                groups = () if value == NOTHING else tuple(value.split("+"))
            elif key.startswith("selection.eval."):
                raise UserError(
                    f"config key phases: {text!r}: {key} is of evaluations, which are the same in all phases; set it"
                    f" outside of phases"
                )
            elif key.startswith(NODES) or key in KEYS:
                changes[key] = parse(config, key, value)
                if key == "selection.balance_rate" and changes[key] and not config.selection.balance_rate:
                    refuse(
                        key, changes[key], "needs a bias from step 0: set it outside of phases, and 0 in other phases"
                    )
            else:
                raise ValueError
        except ValueError:
            raise UserError(
                f"config key phases: {text!r}: {word!r} is not until=STEP, epochs=NUMBER, fraction=FRACTION,"
                f" train=GROUP+GROUP, or KEY=VALUE of {', '.join(f'{node}*' for node in NODES)}, {', '.join(KEYS)}"
            ) from None
    if not 0 < until <= config.steps or not 0 < fraction <= 1:
        raise UserError(f"config key phases: {text!r}: until must be in 1 to steps={config.steps}, fraction in (0, 1]")
    if epochs and not (config.data.epochs and 0 < epochs * steps_per_epoch(config) < config.steps):
        raise UserError(
            f"config key phases: {text!r}: epochs={epochs} of data.samples={config.data.samples} must be"
            f" fewer than steps={config.steps}, with data.epochs=true"
        )
    if groups is not None and (unknown := [name for name in groups if name not in GROUPS[:-1]]):
        raise UserError(f"config key phases: {text!r}: unknown group {unknown[0]!r}; known: {', '.join(GROUPS[:-1])}")
    return Phase(until, fraction, groups, changes, epochs)


def configs_of(config: ConfigDict) -> list[ConfigDict]:
    """Returns the config of each phase."""
    return [override(config, phase.changes) if phase.changes else config for phase in phases_of(config)]


def mean_so_far(phases: tuple[Phase, ...], values: Sequence[Any], step: Any, per_epoch: Any = 0) -> Any:
    """Returns the mean over the steps before `step` of a value that each phase has; at step 0 the first step's value.

    Phases that take a fraction of the steps count by it. `per_epoch` are the steps of an epoch, which may be traced.
    """
    total: Any = 0.0
    start: Any = 0
    for end in jnp.sort(jnp.array([phase.end(per_epoch) for phase in phases])):
        rest, value = jnp.float32(1), jnp.float32(0)
        for phase, phase_value in zip(phases, values, strict=True):
            share = rest * jnp.where(phase.end(per_epoch) >= end, phase.fraction, 0.0)
            value, rest = value + share * phase_value, rest - share
        total += value * (jnp.clip(jnp.maximum(step, 1), start, end) - start)
        start = end
    return total / jnp.maximum(step, 1)


def mean_so_far_of(count: Callable[[Any], Any], config: ConfigDict, traced: Any, step: Any) -> Any:
    """Returns the mean over the steps so far of a count of a training token's experts.

    `traced` is the config of the run with arrays for traced settings.
    """
    phases = phases_of(config)
    if not any(key.startswith("selection.") for phase in phases for key in phase.changes):
        return count(traced)
    given = {key: value_of(traced, key) for key in flatten(config)}
    values = [
        count(node_of(override(config, phase.changes), {k: v for k, v in given.items() if k not in phase.changes}))
        for phase in phases
    ]
    return mean_so_far(phases, values, step, steps_per_epoch(traced) if any(phase.epochs for phase in phases) else 0)


def active_phase(
    phases: tuple[Phase, ...], step: Int[Array, ""], key: PRNGKeyArray, per_epoch: Int[Array, ""] | int = 0
) -> Int[Array, ""]:
    """Returns the number of the first phase that applies at a step. The key, one of the step's own, is consumed."""
    coins = jax.random.uniform(key, (len(phases),))
    applies = jnp.stack(
        [(step < phase.end(per_epoch)) & (coin < phase.fraction) for phase, coin in zip(phases, coins, strict=True)]
    )
    return applies.argmax()
