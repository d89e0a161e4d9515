"""The kind of claim `share`: the part of the best arm's gain that another arm recovers, shown and not judged."""

from __future__ import annotations

import dataclasses
from typing import Any

from routed.analysis import digits, statistics
from routed.analysis.claims import Side, TwoSides
from routed.analysis.claims.preconditions import common_seeds
from routed.analysis.claims.rules import inconclusive
from routed.analysis.paired_values import Rows


@dataclasses.dataclass(frozen=True)
class RecoveredGap(TwoSides):
    """`lower` gains a share of what `best` gains over `higher`: (higher - lower) / (higher - best)."""

    kind = "share"

    best: Side

    def sides(self) -> tuple[Side, ...]:
        """Returns all three sides."""
        return self.lower, self.higher, self.best

    def judge(self, rows: Rows) -> dict[str, Any]:
        """Returns the share with a bootstrap interval; none if the interval of the whole gain holds 0."""
        lower, higher, best = (side["arm"] for side in self.sides())
        runs = common_seeds(rows, self.setup.at, self.setup.metric, lower=lower, higher=higher, best=best)
        if not len(runs):
            return {}
        part, whole = runs.higher - runs.lower, runs.higher - runs.best
        gain = statistics.estimate(whole)
        numerator, denominator = (digits.with_interval(each[:3]) for each in (statistics.estimate(part), gain))
        text = f"({higher} - {lower}) / ({higher} - {best}) = {numerator} / {denominator}"
        record = {"n": len(runs), "text": text}
        if reason := self.obstacle(rows):
            return inconclusive(record, reason)
        if not gain.low > 0:
            return inconclusive(record, f"{best} may gain nothing over {higher}, and nothing has no shares")
        mean, low, high, n = statistics.bootstrap_ratio(part.to_numpy(), whole.to_numpy())
        text = f"{100 * mean:.0f} % [{100 * low:.0f}, {100 * high:.0f}]: {text}"
        return {"ours": mean, "interval": [low, high], "n": n, "verdict": "measured", "text": text}
