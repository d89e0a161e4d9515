"""A paper's claim is about the paper's settings: what a command or a user's file changes is filed as the user's."""

import logging

import pandas as pd
import pytest

from routed.analysis import changed
from routed.plan import experiment
from routed.publish import published

RECORD = {"id": "dikkala.fig3a.frozen", "kind": "order", "comparability": "gaps_filled", "paper": "far better",
          "verdict": "supported", "text": ".5 [.4, .6] for our mean", "reason": "better"}  # fmt: skip


def changes_of(spec, *overrides, **columns):
    return changed.changes_of(*experiment.configure(spec, list(overrides)), pd.DataFrame(columns))


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ([], []),
        (["seeds=3", "seed=90", "arms=learned,frozen", "tune.multipliers=1,3", "rates=tuned"], []),
        (["gate.horizon=1"], ["gate.horizon=1.0"]),
        (["data.directory=elsewhere", "data.cache=there"], []),
        (["experts.count=8"], ["experts.count=8"]),
        (["router.name=cosine"], ["router.name=cosine"]),
        (["data.clusters=16", "steps=100"], ["data.clusters=16", "steps=100"]),
    ],
)
def test_settings_that_a_figure_fixes(overrides, found):
    assert sorted(changes_of("gmm_router:fig3", *overrides)) == found


@pytest.mark.parametrize(
    ("spec", "override", "found"),
    [
        ("competition_lm", "router.layers=first=1 router.name=hash_id", ["router.layers=first=1 router.name=hash_id"]),
        ("gmm_router", "phases=until=100 train=router", ["phases=until=100 train=router"]),
        ("t5_mc4", "data.languages=de", ["data.languages=de"]),
        ("competition_tuning", "data.table=mine", ["data.table=mine"]),  # the figure names another
        ("competition_tuning", "initial.workdir=mine", []),
        # Points of these figures are made from the config's own value, which is no reason to call it the figure's.
        ("theory_specialists:proof,smoke", "steps=400", ["steps=400"]),
        ("cluster_cnn:techniques", "experts.count=16", ["experts.count=16"]),
        ("cluster_cnn:sizes", "router.learning_rate=0.005", ["router.learning_rate=0.005"]),
        ("competition_lm:fig2", "steps=3000", ["steps=3000"]),
        ("dictionary_router:readings", "data.test_samples=15872", ["data.test_samples=15872"]),
    ],
)
def test_a_setting_that_a_figure_leaves_empty_is_changed_unless_it_names_a_file_to_fill_in(spec, override, found):
    assert changes_of(spec, override) == found


def test_a_sweep_of_other_values_is_a_change_and_a_part_of_the_figures_own_is_none():
    module, config = experiment.configure("gmm_router:fig3", [])
    sizes = [point["data.samples"] for point in experiment.figure_of(module, config).sweep(config)]
    assert changes_of("gmm_router:fig3", **{"data.samples": sizes[:1]}) == []
    assert changes_of("gmm_router:fig3", **{"router.name": ["linear", "cosine"]}) == ["router.name=cosine"]


def test_a_users_file_is_no_figure_of_the_paper(tmp_path):
    """It has the router of a stranger, and the claims of gmm_router."""
    file = tmp_path / "ema.py"
    file.write_text("from routed.plan import experiment\nz = experiment.load('gmm_router')\nFIGURES = z.FIGURES\n"
                    "get_config = z.get_config\n")  # fmt: skip
    assert changes_of(str(file)) == ["experiment=ema.py"]


def test_what_was_changed_is_filed_as_the_users():
    found = changed.filed(RECORD, ["experts.count=8"])
    assert found == RECORD | {
        "id": "yours.dikkala.fig3a.frozen", "comparability": "changed: experts.count=8", "paper": "not asked"
    }  # fmt: skip
    of_paper = {"paper": "2 +- 1 (n = 3)", "text": ".5 [.4, .6] for our mean, against 2 +- 1 (n = 3)",
                "reason": "the paper's 0.6 is inside of the interval"}  # fmt: skip
    found = changed.filed(RECORD | of_paper, ["experts.count=8"])
    assert (found["text"], found["reason"]) == (RECORD["text"], "")
    assert changed.filed(RECORD, []) == RECORD
    assert changed.filed(RECORD | {"id": "mine.x"}, ["experts.count=8"])["id"] == "mine.x"
    for verdict in ("reproduced", "exact"):  # the latter without spread
        number = changed.filed(RECORD | {"kind": "number", "verdict": verdict, "paper": 0.84}, ["steps=100"])
        assert number["verdict"] == "not comparable" and number["paper"] == "not asked"
    assert {*published.SOURCES} - {published.OUR_QUESTIONS} <= {*changed.PAPERS}


def test_a_figure_that_cannot_conclude_says_so_before_it_trains(caplog):
    """Table 4 has an eighth of the steps after which an arm beats the 5-gram."""
    with caplog.at_level(logging.WARNING, logger="absl"):
        changed.warn_of_competence(*experiment.configure("competition_lm:table4", []))
    assert "1,500 steps are too few: arms are not known to be competent before 12,000" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="absl"):
        changed.warn_of_competence(*experiment.configure("competition_lm:table4", ["steps=12000"]))
        changed.warn_of_competence(*experiment.configure("competition_lm:table4,smoke", []))
        changed.warn_of_competence(*experiment.configure("gmm_router", []))
    assert not caplog.text
