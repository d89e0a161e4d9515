"""The base of every kind of claim, the setup that claims share, and the table of kinds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

from routed.analysis.claims.preconditions import Precondition, obstacle
from routed.analysis.paired_values import Point, Rows, Side

ClaimT = TypeVar("ClaimT", bound="Claim")

LEARNED, FROZEN, FAIREST = {"arm": "learned"}, {"arm": "frozen"}, {"arm": "fairest"}


#: Unit -> smallest effect of interest: losses that approach 0 are compared by their log ratio (a factor 1.1), nats per
#: token and shares by their difference (.01), shares of successful runs by theirs (.05).
EFFECTS = {"ratio": math.log(1.1), "difference": 0.01, "probability": 0.05}

#: A side with a point at which its rows are read.
Reading = tuple[Side, Point]


class Stakes(NamedTuple):
    """Readings of a claim by what they could do to a verdict.

    winners: those whose diverged runs could refute it, since the remaining runs may be the better ones.
    losers: those for which a better learning rate could refute it.
    contenders: groups of readings, in each of which an arm has to beat the best constant predictor.
    """

    winners: tuple[Reading, ...]
    losers: tuple[Reading, ...]
    contenders: tuple[tuple[Reading, ...], ...]


class Along(NamedTuple):
    """A swept key and its values, in order, along which a claim compares its sides."""

    key: str
    values: tuple[float, ...]

    def points(self, at: Point) -> list[Point]:
        """Returns the point `at` with each value of the key."""
        return [{**at, self.key: value} for value in self.values]


#: Distances of a figure from the paper's setting.
COMPARABILITIES = ("same", "gaps_filled", "scaled", "stand_in")


class Setup(NamedTuple):
    """Conditions that the claims of one `Writer` share.

    comparability: distance from the paper's setting, one of `COMPARABILITIES`.
    metric: column that is compared, unless a side names its own.
    at: swept keys that are fixed, with their values.
    unit: scale on which sides are compared, a key of `EFFECTS`.
    over: nuisance keys; an order is also tried at each of their values.
    needs: preconditions; a claim is inconclusive unless all of them are met.
    alpha: level that the adjusted p value of a claim has to reach.
    effect: smallest effect of interest on the scale of `unit`; None: that of the unit.
    """

    comparability: str
    metric: str = "test/loss"
    at: Mapping[str, Any] = {}
    unit: str = "ratio"
    over: tuple[str, ...] = ()
    needs: tuple[Precondition, ...] = ()
    alpha: float = 0.05
    effect: float | None = None

    @property
    def margin(self) -> float:
        """Returns the smallest effect of interest."""
        return EFFECTS[self.unit] if self.effect is None else self.effect


@dataclasses.dataclass(frozen=True)
class Claim:
    """One testable sentence. A kind of claim is a subclass with fields of its own, an entry of `KINDS`.

    `paper` is the value or the words of the paper; `id` begins with the source of the claim.
    """

    #: Name of the kind in claims.json and in `KINDS`.
    kind: ClassVar[str]
    #: True if a side may be "fairest".
    allows_fairest: ClassVar[bool] = False
    #: True if a side may be a constant, {"value": 0.5}.
    allows_value: ClassVar[bool] = False
    #: True if `paper` is a number.
    of_number: ClassVar[bool] = False
    #: True if one control that is ahead refutes the claim, whichever others did not run.
    one_refutes: ClassVar[bool] = False

    id: str
    statement: str
    paper: Any
    setup: Setup

    def sides(self) -> tuple[Side, ...]:
        """Returns the sides of the claim."""
        raise NotImplementedError

    def reads(self) -> list[Reading]:
        """Returns every side with every point at which the claim reads its rows."""
        return [(side, self.setup.at) for side in self.sides()]

    def stakes(self, verdict: str, rows: Rows) -> Stakes:
        """Returns the readings that could refute a verdict: all where no side does better; one must be competent."""
        reads = tuple(self.reads())
        return Stakes(reads, reads, (reads,))

    def metrics(self) -> set[str]:
        """Returns the columns that the claim compares; they are published with its verdict."""
        compared = {side.get("metric", self.setup.metric) for side in self.sides()}
        return compared | {self.setup.metric, *(need.metric for need in self.setup.needs)}

    def judge(self, rows: Rows) -> dict[str, Any]:
        """Returns the entries in which the claim's record differs from that of a claim without runs."""
        raise NotImplementedError

    def obstacle(self, rows: Rows) -> str | None:
        """Returns the reason why these runs cannot decide the claim, or None."""
        return obstacle(self.reads(), self.setup.at, self.setup.needs, rows)

    def replace(self: ClaimT, **changes: Any) -> ClaimT:
        """Returns a copy with other values of some fields, of the claim or of its setup."""
        of_setup = {name: changes.pop(name) for name in Setup._fields if name in changes}
        return dataclasses.replace(self, setup=self.setup._replace(**of_setup), **changes)


@dataclasses.dataclass(frozen=True)
class OneSide(Claim):
    """A claim about one side."""

    side: Side

    def sides(self) -> tuple[Side, ...]:
        """Returns the side."""
        return (self.side,)

    def stakes(self, verdict: str, rows: Rows) -> Stakes:
        """Returns the side, which has to be competent unless the claim fails of it."""
        reads = tuple(self.reads())
        return Stakes(reads, reads, () if verdict == "opposite" else (reads,))


@dataclasses.dataclass(frozen=True)
class TwoSides(Claim):
    """A claim about two sides, of which `lower` has the lower value if the claim is true."""

    lower: Side
    higher: Side

    def sides(self) -> tuple[Side, ...]:
        """Returns the lower and the higher side."""
        return self.lower, self.higher

    def better(self, verdict: str, rows: Rows) -> tuple[Side, Side]:
        """Returns the side that did better by the metric and the other one, under "supported" or another verdict."""
        column = rows.column(self.lower.get("metric", self.setup.metric), self.setup.at)
        upwards = column is not None and column.higher_is_better
        lower_won = (verdict == "supported") != upwards
        return (self.lower, self.higher) if lower_won else (self.higher, self.lower)


#: Name -> kind of claim. `Writer` has a method of each name; a user's file adds its own kinds.
KINDS: dict[str, type[Claim]] = {}
