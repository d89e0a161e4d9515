"""Values per seed of a published result: the rows and columns that verdicts read, and the config to judge them by.

Both stand beside the verdicts, and `config.json` is read as a workdir's. Float32 holds every metric that a device
computed; the few that a host computed are rounded.
"""

from __future__ import annotations

import io
import json
import pathlib
from collections.abc import Collection, Iterable

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from ml_collections import ConfigDict

from routed.analysis.claims import Claim
from routed.analysis.claims.preconditions import COUNT_MODELS
from routed.analysis.shapley import EVALUATIONS
from routed.analysis.workdirs import MACHINE, PATHS
from routed.engine.rows import swept_columns
from routed.settings.tree import flatten
from routed.system import files, stored

TABLE, CONFIG = "seeds.parquet", "config.json"

#: Columns that rules and tables read beside the metrics of claims: losses of the decomposed gap and of models of
#: counts, entropies asked for and reached, tuned rates, experts computed.
OF_RULES = (
    *EVALUATIONS.values(),
    "eval/loss",
    *COUNT_MODELS,
    "router/entropy_target",
    "router/entropy_token_train",
    "train/rate_scale",
    "train/router_rate",
    "train/experts_per_token",
)


def columns_read(claims: Iterable[Claim], losses: Collection[str | None]) -> set[str]:
    """Returns the metrics that a judgement of these claims may read; `losses` are those by which arms are compared."""
    return {*OF_RULES, *filter(None, losses)}.union(*(claim.metrics() for claim in claims))


def reduced(table: pd.DataFrame, columns: Collection[str]) -> pd.DataFrame:
    """Returns the rows and columns that a judgement reads, metrics as float32; runs are numbered.

    These are the second half of training, which is extrapolated, the evaluations at which a column begins, and values
    that forbid a logarithm.
    """
    leading = ["run", *swept_columns(table), "arm", "seed", "step", "status"]
    metrics = [name for name in table if name in columns]
    rows = table.loc[table.status != "tuning", [*leading, *metrics]]
    late = 2 * rows.step >= rows.groupby("run").step.transform("max")
    defined = rows[metrics].notna()
    begins = defined & (defined.groupby(rows.run).cumsum() == 1)
    early = rows.step.isin(rows.step[begins.any(axis=1) | (rows[metrics] <= 0).any(axis=1)])
    rows = rows[late | early].reset_index(drop=True)
    return rows.assign(run=np.unique(rows.run, return_inverse=True)[1]).astype(dict.fromkeys(metrics, np.float32))


def widened(table: pd.DataFrame) -> pd.DataFrame:
    """Returns a table with metrics as float64, as rules compute."""
    return table.astype({name: float for name in table if "/" in name})


def write(folder: pathlib.Path, table: pd.DataFrame, spec: str, config: ConfigDict, swept: list[str]) -> None:
    """Writes a reduced table, and the experiment and config to judge it by, without places on a machine."""
    content, rows = io.BytesIO(), pa.Table.from_pandas(table, preserve_index=False).replace_schema_metadata(None)
    pq.write_table(rows, content, compression="zstd", compression_level=19)
    files.write(folder / TABLE, content.getvalue())
    settings = {key: value for key, value in flatten(config).items() if not key.startswith((*PATHS, *MACHINE))}
    described = {"experiment": spec, "swept": swept, "config": settings}
    files.write(folder / CONFIG, json.dumps(described, indent=1) + "\n")


def read(folder: pathlib.Path) -> pd.DataFrame:
    """Returns the values per seed of a published result.

    Raises:
      UserError: the file is damaged.
    """
    with stored.fitting(str(folder / TABLE), "restore it, or keep its workdir again"):
        return widened(pq.read_table(folder / TABLE).to_pandas())
