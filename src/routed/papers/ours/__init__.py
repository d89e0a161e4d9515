"""Questions of this project: arms, and a source of text, that only their experiments use."""

from routed.papers.ours import arms, dialects
from routed.papers.ours.dialect_floors import floors
from routed.plan.arms import ARMS
from routed.tasks.text.sources import SOURCES, TextSource

ARMS.update(arms.ARMS)

DIALECTS = SOURCES["dialects"] = TextSource(
    dialects.dialects,
    dialects.about,
    settings=dialects.SETTINGS,
    check=dialects.check,
    floors=floors,
    reads=("input_length", "noise_density", "mean_span"),
)
