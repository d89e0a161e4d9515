"""Names that settings and columns had before: refused with the new name, and read in results of before."""

import json

import pandas as pd
import pytest

from routed.contracts import UserError
from routed.engine import results, tables
from routed.plan.config import base, declared
from routed.plan.experiment import configure
from routed.plan.runs import decisive
from routed.settings import renamed
from routed.settings.tree import override
from routed.suite.subject import base_seed
from routed.system.provenance import provenance
from routed.training.phases import phases_of


@pytest.mark.parametrize(("old", "new"), renamed.SETTINGS.items())
def test_an_old_setting_is_refused_with_the_new_name(old, new):
    assert new in declared() and old not in declared()
    with pytest.raises(UserError, match=f"unknown config key '{old}': the new name is '{new}'"):
        override(base(), {old: 1})


def test_a_setting_of_evaluations_is_renamed_with_that_of_training():
    with pytest.raises(UserError, match=r"the new name is 'selection\.eval\.patch_weights'"):
        override(base(), {"selection.eval.gate": "one"})


def test_results_of_before_are_read_by_the_new_names(tmp_path):
    table = pd.DataFrame({"run": ["a"], "router.rows": ["clusters"], "step": [0], "router/moved/decoder_0": [1.0]})
    tables.merge(tmp_path, table)
    assert [*tables.read_table(tmp_path)] == ["run", "router.init_rows", "step", "router/params_changed/decoder_0"]
    stored = {"config": {"held": ["world"], "router.rows": "clusters"}, "swept": ["router.rows"], "experiment": "x"}
    (tmp_path / "config.json").write_text(json.dumps({**provenance(), "devices": [], "data": "", "format": 0} | stored))
    read = results.stored_config(tmp_path)
    assert read["config"] == {"shared_streams": ["world"], "router.init_rows": "clusters"}
    assert read["swept"] == ["router.init_rows"]


def test_keys_of_runs_are_made_of_the_first_names():
    settings = json.loads(decisive(base()))[0]
    assert {"data.whole", "router.from_data"} <= settings.keys() and not {*renamed.SETTINGS.values()} & settings.keys()


def test_a_part_may_not_declare_an_old_name(monkeypatch):
    from routed.layer.selection import SELECTIONS
    from routed.settings.setting import Setting

    rule = SELECTIONS["top_k"]
    monkeypatch.setitem(SELECTIONS, "mine", rule._replace(settings={**rule.settings, "gate": Setting(1.0, "of mine")}))
    with pytest.raises(UserError, match=r"'selection\.gate', an old name: the new name is"):
        declared()


def test_a_part_that_reads_an_old_name_is_told_the_new_one(monkeypatch):
    from routed.plan.config import read_keys
    from routed.routers import ROUTERS

    monkeypatch.setitem(ROUTERS, "linear", ROUTERS["linear"]._replace(reads=("measure",)))
    with pytest.raises(UserError, match=r"reads the setting 'router\.measure', which no part declares: the new name"):
        read_keys(base())


def test_an_old_entry_of_a_phase_is_refused_and_read_in_results_of_before():
    old, new = "until=7 share=0.5 losses.balance=1", "until=7 fraction=0.5 losses.balance=1"
    with pytest.raises(UserError, match="the new name of share= is fraction="):
        phases_of(override(base(), {"phases": (old, "")}))
    assert renamed.with_new_names({"phases": [old, ""]}) == {"phases": [new, ""]}
    assert json.loads(decisive(override(base(), {"phases": (new, "")})))[0]["phases"] == [old, ""]
    gates = ("selection.gate=one", "selection.patch_weights=one")
    assert renamed.with_new_names({"phases": (gates[0],)}) == {"phases": (gates[1],)}
    assert renamed.with_old_names({"phases": (gates[1],)}) == {"phases": (gates[0],)}


def test_an_old_attribute_in_an_experiment_is_named(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from routed.plan.config import base\nFIGURES = {}\ndef get_config(arg):\n    base().router.rows\n")
    with pytest.raises(UserError, match=r"router\.rows has the new name router\.init_rows"):
        configure(str(file), [])


def test_tables_of_before_are_loaded_by_the_new_names(tmp_path):
    stored = {"config": {"router.rows": "clusters"}, "swept": ["router.rows"], "experiment": "x", "format": 0}
    (tmp_path / "config.json").write_text(json.dumps({**provenance(), "devices": [], "data": ""} | stored))
    (tmp_path / "summary.csv").write_text("router.rows,arm,metric,mean\nclusters,learned,router/covered,1\n")
    claim = {"id": "x", "metric": "train/experts", "at": {"router.rows": "clusters"}}
    (tmp_path / "claims.json").write_text(json.dumps([claim]))
    loaded = results.load(tmp_path)
    assert [*loaded["summary"]] == ["router.init_rows", "arm", "metric", "mean"]
    assert loaded["summary"].metric[0] == "router/clusters_with_specialists"
    assert loaded["claims"] == [
        {"id": "x", "metric": "train/experts_per_token", "at": {"router.init_rows": "clusters"}}
    ]


def test_the_seeds_of_a_card_do_not_depend_on_new_names():
    assert base_seed("mlp", ["router.measure=distance"], []) == base_seed("mlp", ["router.score=distance"], [])
