"""Questions of this project: arms, probes, charts, kinds of claims, a task and a source of text of experiments."""

from routed.analysis.claims import KINDS
from routed.analysis.plots import PLOTS
from routed.papers.ours import crossed, dialects
from routed.papers.ours.crossing import Crossing, RecoveredGap
from routed.papers.ours.dialect_floors import floors
from routed.papers.ours.law_charts import AXES_PLOT, FORETOLD_PLOT
from routed.papers.ours.regret import REGRET
from routed.papers.ours.regret_chart import PARTS_PLOT
from routed.papers.ours.shares_chart import SHARES_PLOT
from routed.plan.arms import ARMS, BY_DISTANCE, TOP1, Arm, Match
from routed.tasks import TASKS
from routed.tasks.text.sources import SOURCES, TextSource
from routed.training.probes import PROBES

ARMS |= {
    # Rows from data change both the partition and the sharpness of the gate. Two arms separate the effects: a gate as
    # sharp as the learned gate, and a gate as soft as the initial gate.
    "frozen_data_sharp": Arm(
        {"router.frozen": True, "router.init_from_data": True},
        "frozen, rows are examples, as sharp as learned",
        "#661100",
        match=Match("router.initial_entropy", "learned", "router/entropy_token_train"),
    ),
    "frozen_data_fresh": Arm(
        {"router.frozen": True, "router.init_from_data": True},
        "frozen, rows are examples, as soft as fresh",
        "#9999FF",
        match=Match("router.initial_entropy", "frozen", "router/entropy_token_train"),
    ),
    # The irrelevant label of a cell (tasks of crossed clusters): as certain as the oracle, but useless.
    "oracle_irrelevant": Arm(
        {"router.frozen": True, "router.name": "oracle", "router.label_digit": 1, **TOP1},
        "oracle of what does not matter",
        "#A6761D",
    ),
    # Learned from the centres of k-means on, scored by distances: what a gradient adds to the partition of k-means.
    "learned_kmeans": Arm(
        {"router.score": "distance", "router.init_from_data": True, "router.init_rows": "clusters"},
        "learned from k-means",
        "#D81B60",
    ),
    # The best of five k-means, by the distances alone.
    "frozen_kmeans_5": Arm(
        BY_DISTANCE | {"router.init_rows": "clusters", "router.init_starts": 5},
        "frozen k-means, best of 5 starts",
        "#8B5A2B",
        fair=True,
    ),
    # The true dialect of the row.
    "oracle_dialect": Arm({"router.frozen": True, "router.name": "oracle"}, "oracle (true dialect)", "#000000"),
}
PROBES["regret"] = REGRET
TASKS["crossed"] = crossed.TASK
KINDS[Crossing.kind] = Crossing
KINDS[RecoveredGap.kind] = RecoveredGap

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
PLOTS["shares"] = SHARES_PLOT
