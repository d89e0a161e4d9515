"""The writer of claims that experiment files use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from routed.analysis.claims.claim import KINDS, Claim, Setup
from routed.analysis.claims.preconditions import Precondition
from routed.contracts import UserError, nearest


class UnknownKind(UserError, AttributeError):
    """Error for a kind of claim that is not in `KINDS`."""


class Writer(NamedTuple):
    """Factory of claims with a common setup (`Setup`) and a common prefix of their ids.

    There is a method for every kind in `KINDS`: write.KIND(id, statement, paper, *fields, **changes) makes a claim of
    this kind. `fields` are the kind's own fields in their order; `changes` are own fields by name, or other values of
    the setup.
    """

    comparability: str
    metric: str = "test/loss"
    at: Mapping[str, Any] = {}
    unit: str = "ratio"
    prefix: str = ""
    over: tuple[str, ...] = ()
    needs: tuple[Precondition, ...] = ()
    effect: float | None = None

    def __getattr__(self, kind: str) -> Callable[..., Claim]:
        """Returns the method that makes claims of a kind.

        Raises:
          UnknownKind: no such kind.
        """
        if kind.startswith("_"):
            raise AttributeError(kind)
        if kind not in KINDS:
            raise UnknownKind(f"claims: unknown kind {kind!r}{nearest(kind, KINDS)}; known: {', '.join(KINDS)}")
        return partial(self._claim, KINDS[kind])

    def _claim(self, kind: type[Claim], id: str, statement: str, paper: Any, *fields: Any, **changes: Any) -> Claim:
        setup = Setup(self.comparability, self.metric, self.at, self.unit, self.over, self.needs, effect=self.effect)
        of_setup = {name: changes.pop(name) for name in Setup._fields if name in changes}
        return kind(self.prefix + id, statement, paper, setup._replace(**of_setup), *fields, **changes)


def comparability(config: ConfigDict, here: str = "gaps_filled") -> str:
    """Returns how comparable a figure is with the paper: `here`, or "scaled" at the smoke scale."""
    return "scaled" if config.scale == "smoke" else here
