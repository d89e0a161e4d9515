"""Pages of the runs that are finished, while others train."""

from __future__ import annotations

import math
import pathlib
import time
from collections.abc import Callable

import pandas as pd
from absl import logging as log

from routed.engine.rows import fill_points
from routed.engine.tables import read_table
from routed.plan.run import Run

#: Writes a page from a table of finished runs and the progress in words.
Report = Callable[[pd.DataFrame, str], None]
#: Seconds of training before the first page, and the least ratio of training to writing pages.
FIRST, SPARING = 30.0, 20.0


class EarlyPages:
    """Calls `report` after a batch of runs, as often as its cost allows."""

    def __init__(self, report: Report):
        self.report, self.next = report, time.monotonic() + FIRST

    def write_again(self, workdir: pathlib.Path, runs: list[Run]) -> None:
        """Writes the page of the finished `runs` if enough time has passed.

        Whatever goes wrong here must not end hours of training: the log says it, and the last page will raise it.
        """
        start = time.monotonic()
        if start < self.next:
            return
        try:
            table = fill_points(read_table(workdir), runs)
            if (table.status == "tuning").all():  # no page draws these runs
                return
            progress = f"{table.run.nunique()} of {len(runs)} runs are done"
            self.report(table, progress)
        except Exception:
            self.next = math.inf
            log.warning("report.html waits for the last run, as it cannot be drawn from those done", exc_info=True)
            return
        self.next = (end := time.monotonic()) + SPARING * (end - start)
        log.info("%s: their figures are in %s", progress, workdir / "report.html")
