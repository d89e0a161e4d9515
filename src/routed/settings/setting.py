"""A setting is declared once, by the part that reads it; what several parts read is declared once and referred to."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, NoReturn, Protocol

from ml_collections import ConfigDict

from routed.contracts import UserError


class Allowed(NamedTuple):
    """The values that a setting may have: a test, and what it asks for, as in "must be at least 1"."""

    holds: Callable[[Any], bool]
    words: Callable[[], str]


class When(NamedTuple):
    """The condition on the rest of a config under which a setting is read, and its words."""

    holds: Callable[[ConfigDict], bool]
    words: str


ANY = Allowed(lambda value: True, lambda: "")


class Setting(NamedTuple):
    """A config key without its node: what it is, which values it may have, and what it costs to change it.

    A `traced` setting may differ between runs of one compiled program; all others are static. A setting without `identity`
    does not change what a run computes. Where `when` does not hold, nothing reads the setting: it counts as its default there. One that came
    `late`, when runs without it were kept, leaves their identity alone: at its default it is no part of it.
    """

    default: Any
    doc: str
    allowed: Allowed = ANY
    traced: bool = False
    identity: bool = True
    when: When | None = None
    late: bool = False


class Part(Protocol):
    """What every part (task, router, expert, selection, model, loss, optimiser, problem, ...) says of its settings.

    `settings` are the part's own, in its node. `reads` names settings that are declared elsewhere: shared ones of its node, or
    others by their whole key. `uses` names choices (keys such as `router.name`) whose parts take part too. `check` refuses what
    only this part knows to be impossible.
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
    """The check of a part that has nothing to refuse."""
    del config


class Component(NamedTuple):
    """A part that is nothing but its settings: the plan, the engine, the training program."""

    settings: Mapping[str, Setting]
    reads: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    check: Callable[[ConfigDict], None] = accept


class Choice(NamedTuple):
    """A key whose value names a part of a visible table, `router.name` say; the parts' own settings are in `node`."""

    node: str
    default: str
    doc: str
    parts: Mapping[str, Any]


def refuse(key: str, value: Any, mend: str) -> NoReturn:
    """Ends the command in one line.

    Raises:
      UserError: always.
    """
    raise UserError(f"config key {key}={value!r}: {mend}")


def at_least(low: float) -> Allowed:
    """Finite numbers from `low` on."""
    return Allowed(lambda v: low <= v < math.inf, lambda: f"must be at least {low}")


def one_of(names: Collection[str]) -> Allowed:
    """These names; of a table, also those that a user's file adds to it."""
    return Allowed(lambda v: v in names, lambda: f"must be one of {', '.join(names)}")


def between(low: float, high: float) -> Allowed:
    """Numbers between two bounds, which are left out."""
    return Allowed(lambda v: low < v < high, lambda: f"must be in ({low}, {high})")


def within(low: float, high: float) -> Allowed:
    """Numbers between two bounds, which are meant too."""
    return Allowed(lambda v: low <= v <= high, lambda: f"must be in [{low}, {high}]")


FRACTION = Allowed(lambda v: 0 <= v < 1, lambda: "must be in [0, 1)")
POSITIVE = Allowed(lambda v: 0 < v < math.inf, lambda: "must be positive")
COUNT = Allowed(lambda v: 1 <= v < 2**31, lambda: "must be in [1, 2^31)")
#: Of a stack whose layers are compiled one by one, each of which takes its time.
LAYERS = within(1, 256)
