"""From rows to sentences: statistics, claims and verdicts, the gap decomposed, figures and pages."""

from routed.analysis import registration  # noqa: F401
