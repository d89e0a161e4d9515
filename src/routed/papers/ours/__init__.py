"""Questions of this project: arms, probes, charts, kinds of claims and a source of text of their experiments."""

from routed.analysis.claims import KINDS
from routed.analysis.plots import PLOTS
from routed.papers.ours import arms, dialects
from routed.papers.ours.crossing import Crossing
from routed.papers.ours.dialect_floors import floors
from routed.papers.ours.law_charts import AXES_PLOT, FORETOLD_PLOT
from routed.papers.ours.preregistered import Prediction
from routed.papers.ours.recovered_gap import RecoveredGap
from routed.papers.ours.regret_chart import PARTS_PLOT
from routed.papers.ours.regret_probe import REGRET
from routed.plan.arms import ARMS
from routed.tasks.text.sources import SOURCES, TextSource
from routed.training.probes import PROBES

ARMS.update(arms.ARMS)
PROBES["regret"] = REGRET
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
PLOTS["axes"] = AXES_PLOT
PLOTS["foretold"] = FORETOLD_PLOT
PLOTS["parts"] = PARTS_PLOT
