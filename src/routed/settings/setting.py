"""Declarations of settings: each is declared once, by the part that reads it, and other parts refer to its name."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, NoReturn, Protocol

from ml_collections import ConfigDict

from routed.contracts import UserError


class Allowed(NamedTuple):
    """The values that a setting may have: a test, and its description, such as "must be at least 1"."""

    holds: Callable[[Any], bool]
    description: Callable[[], str]


class When(NamedTuple):
    """The condition on the rest of a config under which a setting is read, and its description."""

    holds: Callable[[ConfigDict], bool]
    description: str


ANY = Allowed(lambda value: True, lambda: "")


class Setting(NamedTuple):
    """A config key without its node: its default, description and allowed values, and the effect of a change.

    A `traced` setting may differ between runs of one compiled program; all others are static. A setting without
    `identity` does not change the results of a run. Where `when` does not hold, nothing reads the setting, and it
    counts as its default. `omit_default_from_identity` is for a setting that is newer than stored runs: its default is
    no part of their identity.
    """

    default: Any
    doc: str
    allowed: Allowed = ANY
    traced: bool = False
    identity: bool = True
    when: When | None = None
    omit_default_from_identity: bool = False


def check_declaration(key: str, setting: Any) -> None:
    """Refuses what declares no setting that a command could read and a result could store.

    Raises:
      UserError: names the setting, and the form of a declaration.
    """
    default = getattr(setting, "default", None)
    kinds = {*map(type, default)} if isinstance(default, tuple) else {type(default)}
    is_plain = len(kinds) < 2 and kinds <= {bool, int, float, str}
    if not (isinstance(setting, Setting) and is_plain and isinstance(setting.allowed, Allowed)):
        raise UserError(
            f"the declaration of {key}: write Setting(default, 'meaning', allowed). The default is True or False, a"
            " number, a text, or a tuple of one of these; allowed is such as at_least(0)"
        )


class Part(Protocol):
    """The declaration of a part's settings (task, router, expert, selection, model, loss, optimiser, problem, ...).

    `settings` are declared by the part, in its node. `reads` names settings that are declared elsewhere: shared
    settings of its node, or other settings by their whole key. `uses` names choices (keys such as `router.name`) whose
    parts the run uses too. `check` refuses configs that only this part knows to be impossible.
    """

    @property
    def settings(self) -> Mapping[str, Setting]: ...
    @property
    def reads(self) -> tuple[str, ...]: ...
    @property
    def uses(self) -> tuple[str, ...]: ...
    @property
    def check(self) -> Callable[[ConfigDict], None]: ...


def accept(config: ConfigDict) -> None:
    """Accepts every config."""
    del config


class Component(NamedTuple):
    """A part with settings only: the plan, the engine, the training program."""

    settings: Mapping[str, Setting]
    reads: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    check: Callable[[ConfigDict], None] = accept


class Choice(NamedTuple):
    """A key such as `router.name`, whose value names a part of a table; the settings of the parts are in `node`."""

    node: str
    default: str
    doc: str
    parts: Mapping[str, Any]


def refuse(key: str, value: Any, mend: str) -> NoReturn:
    """Refuses the value of a setting, with the change that mends it.

    Raises:
      UserError: always.
    """
    raise UserError(f"config key {key}={value!r}: {mend}")


def at_least(low: float) -> Allowed:
    """Allows finite numbers of at least `low`."""
    return Allowed(lambda v: low <= v < math.inf, lambda: f"must be at least {low}")


def one_of(names: Collection[str]) -> Allowed:
    """Allows these names; of a table, also names that a user's file adds later."""
    return Allowed(lambda v: v in names, lambda: f"must be one of {', '.join(names)}")


def between(low: float, high: float) -> Allowed:
    """Allows numbers between two bounds, without the bounds."""
    return Allowed(lambda v: low < v < high, lambda: f"must be in ({low}, {high})")


def within(low: float, high: float) -> Allowed:
    """Allows numbers between two bounds, and the bounds."""
    return Allowed(lambda v: low <= v <= high, lambda: f"must be in [{low}, {high}]")


FRACTION = Allowed(lambda v: 0 <= v < 1, lambda: "must be in [0, 1)")
#: Learning rates, decays and noise; coefficients of losses: no number of size 1 is left of a step beyond them.
RATE, COEFFICIENT = within(0.0, 1e4), within(0.0, 1e6)
POSITIVE = Allowed(lambda v: 0 < v < math.inf, lambda: "must be positive")
COUNT = Allowed(lambda v: 1 <= v < 2**31, lambda: "must be in [1, 2^31)")
#: The number of layers of a stack, each of which takes time to compile.
LAYERS = within(1, 256)
