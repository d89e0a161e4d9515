"""The regret of a surgery's layers as a table, with its intervals, and as values for the page's sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from routed.trace.numbers import bootstrap_weights, ratio
from routed.trace.regret import SHARPENED
from routed.trace.surgery_jobs import SurgeryResult

#: Column of losses -> label of the router, in the order of the page.
ROUTERS = {
    "as_is": "the trained router",
    "repaired": "the trained router, repaired",
    "sharpened": f"the trained router, scores times {SHARPENED:g}",
    "table": "table by token id, from other text",
    "hash": "hash of the token id",
    "random": "a random choice",
}


def table(result: SurgeryResult) -> pd.DataFrame:
    """Returns a row for each layer and router: its regret in nats, and shares of it, with intervals over rows.

    The regret of a router is the mean of (loss of the token with its choice) - (least loss of all tries). `recovered`
    is the share of the trained router's regret that the router does not have. `best` is the share of tokens for which
    no try was better than the trained choice. `half` is the regret that half of the tries would show.
    """
    lines = list[dict[str, Any]]()
    for layer, losses in result.regret.items():
        if isinstance(losses, str):
            continue
        _, group = np.unique(losses["group"], return_inverse=True)
        weights = bootstrap_weights(int(group.max()) + 1)
        shared = {
            "layer": layer,
            "tokens": len(group),
            "tries": int(losses["tries"].max()),
            "refused": losses["refused"].mean(),
            "best": (losses["as_is"] <= losses["best"]).mean(),
            "half": (losses["as_is"] - losses["half"]).mean(),
            "exact": bool(losses["every"].all()),
            "complete": bool(losses["complete"].all()),
            "deviation": losses["deviation"].mean(),
        }
        for name in ROUTERS:
            finite = np.isfinite(losses[name])
            if not finite.any():
                continue
            trained = np.where(finite, losses["as_is"] - losses["best"], 0)
            more = np.where(finite, losses[name] - losses["best"], 0)
            trained, more, counted = (np.bincount(group, part) for part in (trained, more, finite))
            regret = ratio(more, counted, weights)
            line = shared | {"router": name, "regret": regret.value, "low": regret.low, "high": regret.high}
            if name == "repaired":
                recovered = ratio(trained - more, trained, weights)
                line |= {"recovered": recovered.value} | {
                    f"recovered_{end}": getattr(recovered, end) for end in ("low", "high")
                }
            lines.append(line)
    columns = ("layer", "router", "regret", "low", "high", "recovered", "recovered_low", "recovered_high")
    more_columns = ("tokens", "tries", "exact", "complete", "best", "half", "refused", "deviation")
    return pd.DataFrame(lines).reindex(columns=[*columns, *more_columns])


def summary(regret: pd.DataFrame) -> Mapping[str, Any] | None:
    """Returns values for the sentences: the layers with the least and the largest regret, and each router's row."""
    trained = regret[regret.router == "as_is"]
    if not len(trained):
        return None
    most = trained.loc[trained.regret.idxmax()]
    rows = regret[regret.layer == most.layer].set_index("router")
    return {
        "most": most,
        "least": trained.loc[trained.regret.idxmin()],
        "rows": {name: rows.loc[name] for name in ROUTERS if name in rows.index},
        "labels": ROUTERS,
        "layers": len(trained),
        "repaired": regret[regret.router == "repaired"],
    }
