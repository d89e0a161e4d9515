"""Claims and their verdicts: what an experiment file promises to test, and what the rows say about it.

Kinds: `order` (one side is lower than the other), `number` (the paper's value lies in our prediction interval for one
run; a value with standard deviation and number of runs, `Measured`, is compared by Welch's test), `null` (two sides are
equivalent), `beside` (a number on a scale that the paper does not state: both are shown, nothing is judged), `crossing` (along a
swept key one side is lower first, the other last, and where they change places), `share` (how much of what one arm gains another
does: shown, not judged), `reach` (one side needs fewer samples to reach a level), `exponent` (how that ratio grows with a setting), `power` (by which power of a number a metric goes), `prediction` (gaps at points of a sweep are as they were foretold). A side is a dict: `arm` (or "fairest": each fair control in turn), swept keys, `metric` to replace the
claim's, or `value` for a constant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from routed.settings.tree import flatten


class Measured(NamedTuple):
    """A number of a paper with its standard deviation over n runs."""

    mean: float
    std: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.4g} +- {self.std:.2g} (n = {self.n})"


class Along(NamedTuple):
    """A swept key and its values, in order, at which the sides of a crossing are compared."""

    key: str
    values: tuple[float, ...]


class Need(NamedTuple):
    """What has to be seen before a claim means anything: an arm gains more than `gain` of a metric over another, with its interval.

    An experiment in which not even an oracle gains says nothing of arms that might (assay sensitivity), in neither direction.
    """

    better: str
    worse: str
    gain: float
    metric: str


class Foretold(NamedTuple):
    """Gaps log(higher / lower) that were written down before they were measured, and what is asked of them.

    `points` are swept keys with their values, and the expected gap with the ends of its interval. `score` (`foretold.SCORES`) has to be
    within [least, most]. Losses below `floor` count as that.
    """

    points: tuple[tuple[Mapping[str, Any], tuple[float, float, float]], ...]
    score: str
    least: float
    most: float
    floor: float = 0.0


class Claim(NamedTuple):
    """One testable sentence. `lower` is claimed to be below `higher` (number, beside: `lower` is the side, `paper` the value).

    `at` fixes swept keys. An order claim is also tried at every value of the nuisance keys `over`; its robustness is the share
    of those points on which it is supported. `uninformed` is what a number would be without what the paper reports (chance);
    None stands for the untrained network's. comparability: same | gaps_filled | scaled | stand_in. unit: a key of EFFECTS. `alpha`
    is the level that the adjusted p value of an order, a null or a crossing has to reach; `along` is a crossing's. A claim whose
    `needs` are not all met is inconclusive. `best` is the side below `higher` that a share is a share of. `foretold` is a prediction's.
    `level` is what the metric has to reach of a `reach` or an `exponent`; `slope` of the latter are its points: a number, and what the two
    sides change there (of a `power` the first alone).
    """

    kind: str
    id: str
    statement: str
    paper: Any
    comparability: str
    metric: str
    lower: dict[str, Any]
    higher: dict[str, Any]
    at: dict[str, Any]
    unit: str = "ratio"
    over: tuple[str, ...] = ()
    uninformed: float | None = None
    alpha: float = 0.05
    along: Along | None = None
    needs: tuple[Need, ...] = ()
    best: Mapping[str, Any] = {}
    foretold: Foretold | None = None
    level: float = 0.0
    slope: tuple[tuple[float, Mapping[str, Any], Mapping[str, Any]], ...] = ()


#: Why a number of the paper is only shown beside ours, by comparability.
UNLIKE = {"scaled": "ours is scaled down", "stand_in": "ours is of other data"}

LEARNED, FROZEN, FAIREST = {"arm": "learned"}, {"arm": "frozen"}, {"arm": "fairest"}


def comparability(config: ConfigDict, here: str = "gaps_filled") -> str:
    """How comparable a figure is with the paper: `here`, or scaled where it is the smoke scale."""
    return "scaled" if config.scale == "smoke" else here


def unasked(claims: Iterable[Claim], config: ConfigDict, points: Iterable[Mapping[str, Any]]) -> list[Claim]:
    """The claims of which a side is at no point of a plan, whatever its arms; they stay unanswered."""
    flat, points = flatten(config), [*points] or [{}]
    known: dict[tuple[str, ...], set[tuple]] = {}

    def is_there(place: Mapping[str, Any]) -> bool:
        keys = tuple(sorted(place.keys() & flat.keys()))
        if keys not in known:
            known[keys] = {tuple(point.get(key, flat[key]) for key in keys) for point in points}
        return tuple(place[key] for key in keys) in known[keys]

    return [
        claim for claim in claims if not all(is_there({**claim.at, **side}) for side in (claim.lower, claim.higher))
    ]


class Writer(NamedTuple):
    """Writes claims with what they share; each may say otherwise by keyword. `prefix` comes before every id."""

    comparability: str
    metric: str = "test/loss"
    at: Mapping[str, Any] = {}
    unit: str = "ratio"
    prefix: str = ""
    over: tuple[str, ...] = ()
    needs: tuple[Need, ...] = ()

    def order(self, id: str, statement: str, paper: Any, lower: dict, higher: dict, **changes: Any) -> Claim:
        """`lower` is below `higher`; also tried over the values of `over`."""
        return self._claim("order", id, statement, paper, lower, higher, changes)

    def null(self, id: str, statement: str, paper: Any, lower: dict, higher: dict, **changes: Any) -> Claim:
        """Both sides are equivalent."""
        return self._claim("null", id, statement, paper, lower, higher, changes)

    def crossing(
        self, id: str, statement: str, paper: Any, lower: dict, higher: dict, along: Along, **changes: Any
    ) -> Claim:
        """`higher` is below `lower` at the first value along the key, and `lower` below `higher` at the last."""
        return self._claim("crossing", id, statement, paper, lower, higher, changes | {"along": along})

    def number(self, id: str, statement: str, paper: Any, side: dict = LEARNED, **changes: Any) -> Claim:
        """The paper's value lies in our prediction interval (or, with deviation and n, Welch's test does not reject it)."""
        return self._claim("number", id, statement, paper, side, {}, changes)

    def beside(self, id: str, statement: str, paper: Any, side: dict = LEARNED, **changes: Any) -> Claim:
        """A number of the paper on a scale that it does not state, beside ours."""
        return self._claim("beside", id, statement, paper, side, {}, changes)

    def share(
        self, id: str, statement: str, paper: Any, lower: dict, higher: dict, best: dict, **changes: Any
    ) -> Claim:
        """How much of what `best` gains on `higher` does `lower` gain: (higher - lower) / (higher - best)."""
        return self._claim("share", id, statement, paper, lower, higher, {"best": best} | changes)

    def reach(
        self, id: str, statement: str, paper: Any, lower: dict, higher: dict, along: Along, level: float, **changes: Any
    ) -> Claim:
        """`lower` needs a smaller value of the key than `higher` until its metric is at the level."""
        return self._claim("reach", id, statement, paper, lower, higher, changes | {"along": along, "level": level})

    def exponent(
        self,
        id: str,
        statement: str,
        paper: float,
        lower: dict,
        higher: dict,
        along: Along,
        level: float,
        slope: tuple,
        **changes: Any,
    ) -> Claim:
        """What `higher` needs over what `lower` needs grows with the numbers of `slope`; the paper's is the exponent of its bound."""
        own = {"along": along, "level": level, "slope": slope}
        return self._claim("exponent", id, statement, paper, lower, higher, changes | own)

    def power(self, id: str, statement: str, paper: float, side: dict, slope: tuple, **changes: Any) -> Claim:
        """The metric of the side goes by this power of the numbers of `slope`, whose points come first in each; the others are not read."""
        return self._claim("power", id, statement, paper, side, {}, changes | {"slope": slope})

    def prediction(
        self, id: str, statement: str, paper: Any, lower: dict, higher: dict, foretold: Foretold, **changes: Any
    ) -> Claim:
        """The gaps between two sides at points of a sweep are as foretold; `higher` may be the fairest control at each."""
        return self._claim("prediction", id, statement, paper, lower, higher, changes | {"foretold": foretold})

    def _claim(self, kind, id, statement, paper, lower, higher, changes) -> Claim:
        shared = {name: getattr(self, name) for name in ("metric", "at", "unit", "over", "needs")} | changes
        return Claim(kind, self.prefix + id, statement, paper, self.comparability, lower=lower, higher=higher, **shared)
