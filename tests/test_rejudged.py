"""Published results: what is kept of a workdir, and verdicts that anybody can judge again from it."""

import json
import math
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from routed.analysis import answer, findings, verdicts, versions, workdirs
from routed.analysis.claims import Precondition
from routed.contracts import UserError
from routed.engine import results
from routed.plan.config import base
from routed.publish import committed, per_seed, published, rejudged
from routed.settings.tree import override
from tests.patience import PATIENCE
from tests.test_claims import comparison, order, table
from tests.test_command_line import reported

ROOT = pathlib.Path(__file__).parent.parent / "docs" / "results"
FOLDERS = [path.parent for path in sorted(ROOT.glob("data/*/seeds.parquet"))]
#: A result of rules version 1, which has no values per seed.
OLD = "t5_dialects"
EACH = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def test_rows_that_no_verdict_reads_are_left_out():
    """Evaluations 0 to 4 of a run, whose second half is 2 to 4; 0 where x begins, 1 where y does or is not above 0."""
    rows = pd.DataFrame({"run": "b", "data.samples": 8, "arm": "learned", "seed": 0, "step": range(5), "status": "ok",
                         "a/x": 1.0, "a/y": [np.nan, 0.1, 0.2, 0.3, 0.4], "a/z": 0.5})  # fmt: skip
    tuning = rows.assign(run="a", status="tuning")
    small = per_seed.reduced(pd.concat([rows, tuning]), {"a/x", "a/y"})
    assert small.step.tolist() == [0, 1, 2, 3, 4] and set(small.run) == {0} and "a/z" not in small
    assert small["a/y"].dtype == np.float32
    assert per_seed.reduced(rows, {"a/x"}).step.tolist() == [0, 2, 3, 4]
    assert per_seed.reduced(rows.assign(**{"a/x": [1.0, -1.0, 1.0, 1.0, 1.0]}), {"a/x"}).step.tolist() == [*range(5)]


class Noted(pd.DataFrame):
    """A table that notes the columns that are asked for."""

    names: set = set()  # noqa: RUF012 (one for all derived tables)

    @property
    def _constructor(self):
        return Noted

    def __getitem__(self, key):
        self.names.update([key] if isinstance(key, str) else key if isinstance(key, list) else [])
        return super().__getitem__(key)

    def __contains__(self, key):
        self.names.add(key)
        return super().__contains__(key)


#: A grid of rates of the router, beside that of both rates (.3, 1, 3).
CONFIG = override(base(), {"tune.router_multipliers": (0.3, 1.0, 3.0)})


def tuned(rows, both, router):
    """Rows of runs that chose these factors of their rates; `rates` is a swept key."""
    rates = {"train/rate_scale": both, "train/router_rate": router * CONFIG.router.learning_rate}
    return pd.concat([rows.run, rows.assign(rates="tuned").rates, rows.drop(columns="run").assign(**rates)], axis=1)


#: Fault of the runs -> a change of their table that takes a verdict back.
FAULTS = {
    "none": lambda rows: rows,
    "diverged": lambda rows: rows.assign(status=rows.status.where(rows.run != "learned0n64", "diverged")),
    "edge": lambda rows: tuned(rows, 0.3, 1.0),
    "edge of the router's rate": lambda rows: tuned(rows, 1.0, 0.3),
    "control": lambda rows: rows.assign(**{"router/entropy_target": 1.0, "router/entropy_token_train": 2.0}),
    "competence": lambda rows: rows.assign(**{"eval/loss": 2.0, "eval/bigram": 1.0}),
    "horizon": lambda rows: rows.assign(**{"test/loss": rows["test/loss"].where(rows.step != 5, 1e-3)}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_kept_gives_the_verdicts_of_all_rows(fault):
    rows = FAULTS[fault](table())
    needs = (Precondition("learned", "frozen", 0.1, "router/norm_ratio"),)
    claims = (order(), order(higher="fairest", id="f"), order(needs=needs, id="z"))
    claims += (comparison("null", higher="frozen_data", id="n"),)
    columns = per_seed.columns_read(claims, ("test/loss",))
    small = per_seed.widened(per_seed.reduced(rows, columns))
    Noted.names.clear()
    verdicts.judge(claims, Noted(rows), CONFIG, ["data.samples"])
    assert {name for name in Noted.names if "/" in name} <= columns
    records, again = (verdicts.judge(claims, each, CONFIG, ["data.samples"]) for each in (rows, small))
    for record, again_judged in zip(records, again, strict=True):
        texts = ("id", "verdict", "reason", "text", "n")
        assert {name: record[name] for name in texts} == {name: again_judged[name] for name in texts}
    assert records[0]["verdict"] == "supported" or fault != "none"


@pytest.mark.slow
def test_the_committed_verdicts_are_those_of_the_values_per_seed():
    """Else `routed report --rejudge=docs/results --store`; a changed rule is a new version in `versions.CHANGES`."""
    command = [sys.executable, "-m", "routed.report", f"--rejudge={ROOT}"]  # without the checks of types of a test
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0 and f"{len(FOLDERS)} agree, 0 differ," in done.stdout, done.stdout + done.stderr
    assert FOLDERS and max((folder / per_seed.TABLE).stat().st_size for folder in FOLDERS) < 200_000


@EACH
def test_means_beside_a_ratio_divide(folder):
    """Geometric means give the ratio ("a 2 against b 6; ratio 3": 6 / 2), arithmetic means the difference."""
    assert json.loads((folder / "about.json").read_text())["rules"] == versions.RULES, "judge it again: --store"
    for claim in json.loads((folder / "claims.json").read_text()):
        if claim["kind"] in ("order", "null") and claim["n"]:
            sides, kind, unit = re.fullmatch(
                r"(.*) \((geometric )?means\); (ratio|difference) .*", claim["text"]
            ).groups()
            lower, higher = (float(side.split()[-1]) for side in sides.split(" against "))
            assert bool(kind) == (unit == "ratio")
            if kind:
                assert math.log(higher / lower) == pytest.approx(math.log(claim["ours"]), abs=0.0101), claim["text"]
            else:
                assert higher - lower == pytest.approx(claim["ours"], abs=1.01e-4), claim["text"]


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """A folder with one result that has values per seed, and one that has none; the first is judged as committed."""
    monkeypatch.setattr(
        committed,
        "judged",
        lambda folder, named=(): {
            name: (ROOT / "data" / folder.name / name).read_text() for name in ("about.json", "claims.json", "arms.csv")
        },
    )
    for name in (FOLDERS[0].name, OLD):
        shutil.copytree(ROOT / "data" / name, tmp_path / "data" / name)
    published.write_pages(tmp_path)
    return tmp_path


def test_a_verdict_that_is_not_that_of_the_values_is_named_and_mended(pages, capsys):
    assert rejudged.rejudge(pages, is_written=False)
    out = capsys.readouterr().out
    assert f"{FOLDERS[0].name}: agrees\n" in out and f"{OLD}: no values per seed\n" in out
    file = pages / "data" / FOLDERS[0].name / "claims.json"
    claims = json.loads(file.read_text())
    true, claims[0]["verdict"] = claims[0]["verdict"], "reproduced"
    file.write_text(json.dumps(claims))
    assert not rejudged.rejudge(pages, is_written=False)
    assert f"{claims[0]['id']}: verdict was 'reproduced', is '{true}'" in capsys.readouterr().out
    rejudged.rejudge(pages, is_written=True)
    assert json.loads(file.read_text())[0]["verdict"] == true and rejudged.rejudge(pages, is_written=False)


def test_the_command_ends_with_1_where_a_verdict_differs(pages):
    reported(f"--rejudge={pages}")
    (pages / "ours.md").write_text("edited by hand")
    with pytest.raises(SystemExit, match="1"):
        reported(f"--rejudge={pages}")
    with pytest.raises(UserError, match="--store stores what --rejudge"):
        reported("--docs=docs", "--store")
    with pytest.raises(UserError, match="--rejudge reads the tables of its folder alone: leave out workdirs"):
        reported(f"--rejudge={pages}", "runs/x")


def test_a_result_of_earlier_rules_is_marked_on_its_page_and_where_it_is_linked(pages):
    text = "see [map](ours.md#geometry-map), [that](ours.md#geometry), [here](#geometry)† and [x](#other)†."
    assert published.marked(text, {"geometry"}) == (
        "see [map](ours.md#geometry-map), [that](ours.md#geometry)†, [here](#geometry)† and [x](#other)."
    )
    (pages / "README.md").write_text(f"[it](ours.md#{OLD}) is so")
    published.write_pages(pages)
    assert (pages / "README.md").read_text() == f"[it](ours.md#{OLD})† is so"
    (line,) = re.findall("^† Rules version 1 .*$", (pages / "ours.md").read_text(), re.MULTILINE)
    assert line == f"† Rules version 1 (now {versions.RULES}); not judged again: no values per seed."
    assert versions.CHANGES[versions.RULES] in (pages / "ours.md").read_text()
    text = answer.findings([ROOT / "data" / name for name in (FOLDERS[0].name, OLD)])
    assert re.findall("^judged by rules .*$", text, re.MULTILINE) == [
        f"judged by rules 1, and not by those of today ({versions.RULES})"
    ]


def test_runs_of_uncommitted_code_are_not_published(tmp_path, monkeypatch):
    described = {"experiment": "gmm_router", "config": {}, "swept": [], "commit": "0123456789ab-dirty"}
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match=r"uncommitted changes \(0123456789ab-dirty\).*: commit them, and run it again"):
        committed.keep({"name": "x"}, [tmp_path], None, base(), pd.DataFrame(), tmp_path / "docs")
    assert not (tmp_path / "docs").exists()


def test_a_rule_that_reads_more_than_is_kept_is_refused(tmp_path, monkeypatch):
    """Before anything is written."""
    shutil.copy(FOLDERS[0] / "config.json", tmp_path / "config.json")
    described = json.loads((tmp_path / "config.json").read_text()) | {"commit": "0123456789ab"}
    (tmp_path / "config.json").write_text(json.dumps(described))
    part = {"name": "x", "claims": [{"id": "a", "verdict": "supported"}]}
    monkeypatch.setattr(findings, "of_table", lambda *given: {"claims": [{"verdict": "inconclusive"}]})
    with pytest.raises(UserError, match="a is supported by all rows, inconclusive by those that a page keeps: name"):
        committed.keep(
            part, [tmp_path], *workdirs.experiment_of(tmp_path), per_seed.read(FOLDERS[0]), tmp_path / "docs"
        )
    assert not (tmp_path / "docs").exists()


def test_settings_that_have_left_are_left_out_of_an_older_config(tmp_path):
    (tmp_path / "config.json").write_text('{"config": {"data.gone": 1, "arms": ["learned"], "steps": 7}, "swept": []}')
    config = results.config_of(tmp_path, base())
    assert config.steps == 7 and config.arms == ("learned",) and "gone" not in config.data
