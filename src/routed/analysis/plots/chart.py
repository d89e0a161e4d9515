"""A chart: panels beside each other with one legend, a title and notes."""

from __future__ import annotations

import dataclasses
from typing import Any

from routed.analysis.plots.panels import Panel, Series


@dataclasses.dataclass
class Chart:
    """Panels beside each other, `columns` to a row (None: all). Title and caption say its notes.

    A chart of a user may have a Vega-Lite `spec` in place of panels.
    """

    panels: list[Panel]
    columns: int | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    title: str = ""
    legend: bool = True
    spec: dict[str, Any] | None = None

    def note(self, text: str) -> None:
        """Adds a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def explain_intervals(self) -> None:
        """Notes why some means have no interval."""
        for estimate in (estimate for panel in self.panels for estimate in panel.estimates):
            if estimate.n == 1:
                self.note("where one seed ran, there is no interval")
            elif estimate.low == estimate.high:
                self.note("where all seeds are alike, an interval has no length")

    @property
    def series(self) -> dict[str, Series]:
        """The entries of the legend by their labels."""
        return {label: series for panel in self.panels for label, series in panel.series.items()}
