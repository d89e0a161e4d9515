"""Our own questions: arms, kinds of claims and a source of text that their experiments alone use."""

from routed.analysis.claims import KINDS
from routed.papers.ours import arms, dialects
from routed.papers.ours.crossing import Crossing
from routed.papers.ours.dialect_floors import floors
from routed.papers.ours.preregistered import Prediction
from routed.papers.ours.recovered_gap import RecoveredGap
from routed.plan.arms import ARMS
from routed.tasks.text.sources import SOURCES, TextSource

ARMS.update(arms.ARMS)
KINDS[Crossing.kind] = Crossing
KINDS[RecoveredGap.kind] = RecoveredGap
KINDS[Prediction.kind] = Prediction

DIALECTS = SOURCES["dialects"] = TextSource(
    dialects.dialects,
    dialects.about,
    settings=dialects.SETTINGS,
    check=dialects.check,
    floors=floors,
    reads=("input_length", "noise_density", "mean_span"),
)
