"""The whole path on a tiny experiment: files, figures, page, and merging of workdirs."""

import html.parser
import json
import os
import pathlib
import re
import shutil
import types
import xml.etree.ElementTree

import numpy as np
import pandas as pd
import pytest

import routed
from routed.analysis import page, plots, workdirs
from routed.analysis.claims import FROZEN, LEARNED, Writer
from routed.analysis.plots import frame, interactive, maps
from routed.contracts import UserError
from routed.engine import results, tables
from routed.engine.devices import make_mesh
from routed.engine.execution import execute
from routed.engine.rows import last_evaluations
from routed.plan import Figure
from routed.plan.arms import ARMS
from routed.plan.config import base, problem_of
from routed.plan.runs import plan_runs
from routed.settings.tree import flatten, override
from routed.system.experiments import packaged
from tests.conftest import SMALL
from tests.test_command_line import describe, reported, write_experiment

# Several programs to compile; the tests are about what is run.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled")]

ROOT = pathlib.Path(__file__).parent.parent
AXES = problem_of(base()).columns(base())
#: Tags that Vega draws with.
SVG_TAGS = {"clipPath", "defs", "g", "image", "line", "linearGradient", "path", "rect", "stop", "svg", "text", "tspan"}
#: What the page tells, one after the other.
ORDER = ("The arms", "Figures", "The gap decomposed", "Claims, by source", "Threats to validity", "Everything")
SWEEP = ({"data.samples": 8}, {"data.samples": 32})


def experiment():
    module = types.ModuleType("tiny", "Is the page whole?\n\nA document.")
    claim = Writer("scaled", "test/loss").order(
        "x.order", "learned < frozen", "better", LEARNED, FROZEN, at={"data.samples": 32}
    )
    plots = (
        {"kind": "curves", "name": "loss", "x": "data.samples", "metrics": ("test/loss", "test/loss_soft")},
        {"kind": "training", "name": "training", "metrics": ("train/loss",)},
        {"kind": "gap", "name": "gap", "x": "data.samples"},
        {"kind": "routing", "name": "routing", "arms": ("learned", "frozen")},
        {"kind": "forest", "name": "forest"},
    )
    module.FIGURES = {"": Figure("whole", claims=lambda config: (claim,), plots=lambda config: plots)}
    return module


def trust(monkeypatch, config):
    """Makes the command judge by `experiment`, which is no file."""
    monkeypatch.setattr(workdirs, "trusted", lambda folder, named=(): "tiny.py")
    monkeypatch.setattr(workdirs, "experiment_of", lambda folder, named=(): (experiment(), config))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    config = override(base(), SMALL | {"arms": ("learned", "frozen", "frozen_sharp", "frozen_data")})
    path = tmp_path_factory.mktemp("runs") / "tiny"
    path.mkdir()
    table = results.open_workdir(path, "tiny.py", config, SWEEP)
    table = execute(plan_runs(config, SWEEP), table, path, make_mesh(config))
    text = page.write(path, experiment(), config, table)
    return config, path, table, text


def test_the_page_of_an_unfinished_sweep_has_figures_and_no_verdict(finished, tmp_path):
    config, path, table, _ = finished
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    some = table[table.arm.isin(("learned", "frozen"))]
    page.write_unfinished(tmp_path, experiment(), config, some, "8 of 16 runs are done")
    html = (tmp_path / "report.html").read_text()
    assert "Not finished: 8 of 16 runs are done." in html and 'class="panels"' in html
    assert "x.order" not in html and not (tmp_path / "claims.json").exists()


def test_everything_is_left_behind(finished):
    _, path, table, text = finished
    names = {"config.json", "results.parquet", "timing.csv", "summary.csv", "claims.json", "report.html", "routing.npz"}
    assert names <= {p.name for p in path.iterdir()}
    for name in ("loss", "training", "gap", "routing", "forest"):
        assert (path / "figures" / f"{name}.png").stat().st_size > 5000
    assert "x.order" in text and "The gap decomposed" in text
    assert len(table) == 2 * 4 * 2 * 3  # points x arms x seeds x evaluations
    assert not [c for c in table.columns if "time" in c or "second" in c]  # no clock in the results


def test_load_gives_the_tables(finished):
    _, path, table, _ = finished
    loaded = routed.load(path)
    pd.testing.assert_frame_equal(loaded["results"], table)
    assert loaded["config"]["data.clusters"] == 4 and loaded["claims"][0]["id"] == "x.order"
    assert {a.shape for a in loaded["heatmaps"].values()} == {(3, 4, 4), (3, 4)}
    summary = loaded["summary"]
    one = summary[(summary.metric == "test/loss") & (summary.arm == "learned") & (summary["data.samples"] == 32)].iloc[
        0
    ]
    rows = last_evaluations(table)
    rows = rows[(rows.arm == "learned") & (rows["data.samples"] == 32)]
    assert one["mean"] == pytest.approx(rows["test/loss"].mean()) and one.n == 2
    with pytest.raises(UserError, match=r"no config\.json"):
        routed.load(path / "figures")


def test_the_page_opens_offline_and_is_whole(finished):
    _, path, _, _ = finished
    page = (path / "report.html").read_text()
    assert [page.index(f"<h2>{name}") for name in ORDER] == sorted(page.index(f"<h2>{name}") for name in ORDER)
    assert (
        page.partition("<script>")[0].count("<svg") == 5
        and "Threats to validity" in page
        and "Is the page whole?" in page
    )
    assert not re.search(r"(src|href)=\"https?://", page)
    assert not re.search(
        r"<(script|link|img|iframe)[^>]*(src|href)=|@import|url\(http", page.replace(interactive.library(), "")
    )
    # The arms and the gap at both points, of which the one that claims use is shown; a menu shows the other.
    hidden = re.findall(r'class="at-point" data-point="(1-\d)"( hidden)?', page)
    assert hidden == [("1-0", " hidden"), ("1-1", "")] * 2 and page.count('<option value="1-0">data.samples = 8<') == 4
    assert page.count("window.vegaEmbed=") == 1 and len(page.encode()) < 4_000_000
    specs = [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', page, re.S)]
    assert len(specs) == 2 + 1 + 2 + 4 + 1 + 1 and [entry["label"] for entry in specs[-1]["entries"]][:2] == [
        "learned router",
        "frozen at initialisation",
    ]
    ids = re.findall(r"\bid=\"([^\"]+)\"", page)
    assert len(ids) == len(set(ids))  # figures do not steal each other's markers


def test_figures_do_not_change_when_drawn_again(finished):
    config, path, table, _ = finished
    before = (path / "figures" / "loss.svg").read_bytes()
    page.write(path, experiment(), config, table)
    assert (path / "figures" / "loss.svg").read_bytes() == before


def test_shards_of_one_config_are_merged_and_others_stand_beside(finished, tmp_path):
    _, path, _, _ = finished
    for name, changes in (("shard", {"seed": 5}), ("other", {"steps": 99})):
        (tmp_path / name).mkdir()
        shutil.copy(path / "config.json", tmp_path / name)
        describe(tmp_path / name, lambda content, changes=changes: content["config"].update(changes))
    groups = workdirs.merged([path, tmp_path / "shard", tmp_path / "other"])
    assert groups == [[path, tmp_path / "shard"], [tmp_path / "other"]]


def test_overview_of_several_workdirs(finished, tmp_path, monkeypatch):
    """`report runs/*` meets workdirs, two without finished runs, a refused command's, and the page of last time."""
    config, path, _, _ = finished
    runs = tmp_path / "runs"
    for name in ("b", "a"):
        shutil.copytree(path, runs / name)
    for name in ("begun", "tuning", "refused"):
        (runs / name).mkdir()
    (runs / "refused" / "routed.log").write_text("of a command that was refused")
    tables.merge(runs / "tuning", results.read_table(path).assign(status="tuning"))
    other = {"b": {"batch_size": 9}, "begun": {"steps": 999}, "tuning": {"steps": 998}}  # no shards of each other
    for name, changes in other.items():
        shutil.copy(path / "config.json", runs / name)
        describe(runs / name, lambda content, changes=changes: content["config"].update(changes))
    (runs / "report.html").write_text("the last one")
    trust(monkeypatch, config)
    reported(*sorted(runs.iterdir()))
    text = (runs / "report.html").read_text()
    overview = text.split("Every claim")[1].split("<h1 id=")[0]
    assert re.findall('href="#(.*?)"', overview) == ["a", "b"] and overview.count("<code>x.order</code>") == 2
    assert '<h1 id="a">' in text and '<h1 id="b">' in text and "begun" not in text
    for name in ("begun", "tuning"):
        with pytest.raises(UserError, match="none of these folders has finished runs"):
            reported(runs / name)
    with pytest.raises(UserError, match="--findings writes nothing: leave out --out"):
        reported(runs / "a", "--findings", f"--out={tmp_path}/x.html")
    with pytest.raises(UserError, match="--docs writes result pages, --out one page"):
        reported(runs / "a", "--docs=docs", f"--out={tmp_path}/x.html")


def test_a_report_of_one_workdir_makes_its_files_again(finished, tmp_path, monkeypatch):
    """The page told of the code of today, and summary.csv, claims.json and the pictures beside it of that of before."""
    config, path, _, _ = finished
    shutil.copytree(path, tmp_path / "one")
    names = ("summary.csv", "claims.json", "figures/loss.png", "figures/loss.svg")
    for name in names:
        (tmp_path / "one" / name).write_text("of before")
    listed = tmp_path / "one" / "figures" / ".drawn"
    listed.write_bytes(f"{listed.read_text()}\nold\n../outside\n".encode() + b"\xff")
    for name in ("old.png", "yours.png", "../outside.png"):
        (listed.parent / name).write_text("of before")
    trust(monkeypatch, config)
    page = tmp_path / "new" / "page.html"  # whose folder is made
    for options, again in (([f"--out={page}"], 0), ([], len(names))):
        reported(tmp_path / "one", *options)
        assert sum((tmp_path / "one" / name).read_bytes() != b"of before" for name in names) == again
    assert (listed.parent / "yours.png").exists() and (listed.parent / "../outside.png").exists()
    assert not (listed.parent / "old.png").exists()
    with pytest.raises(UserError, match="choose another --out"):
        reported(tmp_path / "one", f"--out={page / 'page.html'}")


def diverged(table):
    """The rows of runs whose numbers were none from the start."""
    metrics = [name for name in table if "/" in name and name != "router/params_changed"]
    return table.assign(status="diverged", **dict.fromkeys(metrics, np.nan))


@pytest.mark.parametrize("arms", [("learned",), ("learned", "frozen", "frozen_sharp", "frozen_data")])
def test_runs_that_diverged_at_once_do_not_break_the_page(finished, tmp_path, arms):
    config, path, table, _ = finished
    work = shutil.copytree(path, tmp_path / "work")
    shutil.rmtree(work / "figures")
    lost = table.arm.isin(arms)
    table = pd.concat([diverged(table[lost]), table[~lost]], ignore_index=True)
    maps = dict(results.read_heatmaps(work))
    gone = set(table[table.arm.isin(arms)].run)
    nothing = {run: np.full_like(one, np.nan) for run, one in maps.items() if run in gone}
    tables._pack(work / tables.MAPS, maps | nothing)
    text = page.write(work, experiment(), config, table)
    assert "x.order" in text
    assert "x.order" in (work / "report.html").read_text("utf-8")
    assert (work / "figures" / "routing.svg").exists() == (len(arms) == 1)  # of the arms that have maps


def test_every_figure_can_do_without_a_finished_run(finished):
    config, _, table, _ = finished
    rows = diverged(table).assign(**{"data.separation": 1.0, "data.clusters": 4})
    swept = ["data.samples", "data.separation", "data.clusters"]
    nothing = {run: np.full((3, 4, 4), np.nan) for run in rows.run}
    data = frame.Data(rows, swept, flatten(config), nothing, AXES)
    specs = {
        "phase": {"x": "data.samples", "y": "data.separation"},
        "shares": {"x": "data.samples", "y": "data.separation"},
        "methods": {"methods": {"one": {"data.samples": 8}}, "metrics": ("test/loss",)},
        "success": {
            "arm": "learned",
            "metric": "test/loss",
            "x": "data.samples",
            "predicted": lambda clusters, experts: 0.5,
        },
        "paired": {"metric": "test/loss"},
        "languages": {"arm": "frozen"},
        "foretold": {"points": [({"data.samples": 8}, (0.5, 0.0, 1.0))]},
        "routing": {"arms": ("learned", "frozen")},
        "sample": {"stack": "decoder"},
        "equal_cost": {"steps": 1, "dear": {8: 2, 32: 2}, "metrics": ("test/loss",)},
        "reached": {"metric": "test/loss", "level": 0.5, "families": {"one": {"a": {"arm": "learned"}}}},
        "ratios": {
            "metric": "test/loss",
            "level": 0.5,
            "bound": 8.0,
            "words": "n / l",
            "base": {"arm": "frozen"},
            "lines": {"one": {2: {"arm": "learned"}}},
        },
        "latent": {"panels": {"one": ({"data.samples": 8}, 0, ("a", "b"))}},
        "powers": {
            "words": "data.samples",
            "panels": {"loss": {"one": {8.0: {"arm": "learned", "metric": "test/loss"}}}},
        },
        "multiples": {
            "of": {"kind": "curves", "x": "data.samples", "metrics": ("test/loss",)},
            "over": "data.clusters",
            "values": [4],
        },
    } | {
        kind: {"lines": {"one": {"data.samples": 8}}}
        for kind in ("series", "dispatch", "products", "embedding", "examples")
    }
    packaged = [kind for kind, plot in plots.PLOTS.items() if plot.draw.__module__.startswith("routed.")]
    for kind in packaged:
        spec = {"x": "data.samples", "metrics": ("test/loss", "train/loss")} | specs.get(kind, {})
        spec = {key: value for key, value in spec.items() if key in plots.PLOTS[kind].keys}
        if (figure := plots.draw(spec | {"kind": kind, "name": kind}, data)) is not None:
            assert plots.svg(figure).startswith("<svg")


HOSTILE = """"><script>$x^{ü$'%20&amp;{{7*7}}-->]]>"""


class Tags(html.parser.HTMLParser):
    """Tags, their attributes' names, and ids of a page."""

    def __init__(self):
        super().__init__()
        self.seen, self.ids = set(), []

    def handle_starttag(self, tag, attributes):
        self.seen |= {tag, *(f"{tag} {name}" for name, _ in attributes)}
        self.ids += [value for name, value in attributes if name == "id"]


def tags_of(path):
    found = Tags()
    found.feed(path.read_text("utf-8"))
    assert len(found.ids) == len(set(found.ids))
    return found


def test_names_are_text_wherever_they_come_from(finished, tmp_path, monkeypatch):
    """A workdir, an arm and its label, a language, a swept value, a claim, a document, what config.json says."""
    config, path, table, _ = finished
    overview = {
        "div role",
        "div aria-label",
        "details class",
        "h1 id",
        "td class",
        "tr class",
        "em",
        "br",
        "a",
        "a href",
        "small",
    }
    allowed = tags_of(path / "report.html").seen | overview
    work = shutil.copytree(path, tmp_path / HOSTILE.replace("/", ""))
    arm = f"frozen {HOSTILE}"
    monkeypatch.setitem(ARMS, arm, ARMS["frozen_data"]._replace(label=HOSTILE))
    table = table.assign(
        **{
            "data.target": HOSTILE,
            "arm": table.arm.replace("frozen_data", arm),
            f"eval/loss/{HOSTILE}": table["test/loss"],
        }
    )
    changes = {"swept": ["data.samples", "data.target"], "commit": HOSTILE, "data": HOSTILE}
    describe(work, lambda content: content | changes)
    module = experiment()
    module.__doc__ = f"{HOSTILE}\n\n{HOSTILE}"
    claim = Writer("scaled", "test/loss").order(
        f"x.{HOSTILE}", HOSTILE, HOSTILE, LEARNED, {"arm": arm}, at={"data.samples": 32}
    )
    drawn = (
        {"kind": "methods", "name": "methods", "methods": {HOSTILE: {"data.samples": 8, "data.target": HOSTILE}},
         "metrics": ("test/loss",)},
        {"kind": "languages", "name": "languages", "arm": arm},
        {"kind": "curves", "name": "curves", "x": "data.target", "metrics": ("test/loss",)},
    )  # fmt: skip
    module.FIGURES = {"": Figure("whole", claims=lambda config: (claim,), plots=lambda config: drawn)}
    page.write(work, module, config, table)
    assert tags_of(work / "report.html").seen <= allowed
    assert (work / "report.html").read_text("utf-8").count("&lt;script&gt;") >= 8
    for figure in (work / "figures").glob("*.svg"):
        assert {one.tag.rsplit("}")[-1] for one in xml.etree.ElementTree.parse(figure).iter()} <= SVG_TAGS
    parts = [page.make_part([folder], module, config, table) | {"figures": []} for folder in (work, path)]
    page.write_page(tmp_path / "all.html", parts)
    assert tags_of(tmp_path / "all.html").seen <= allowed


def test_the_report_runs_the_code_of_our_own_experiments_and_of_named_files(tmp_path):
    """Ours by name, or by a path that ends in the package; a user's by its path on the command line."""
    file, work = write_experiment(tmp_path), tmp_path / "work"
    work.mkdir()
    ours, ends = str(packaged()["gmm_router"]), "/gone/tiny.py"
    round_about = f"{tmp_path}/work/../../{os.path.relpath(ours, tmp_path.parent)}"
    for spec, named, question in (
        ("gmm_router:fig3", [], "Does"),
        (f"{round_about}:fig3", [], "Does"),
        (f"{file}:other", [str(file)], "Is it"),
        (ends, [str(file)], "Is it"),
    ):
        (work / "config.json").write_text(json.dumps({"experiment": spec, "config": {"steps": 60}, "swept": []}))
        module, config = workdirs.experiment_of(work, named)
        assert module.__doc__.startswith(question) and config.steps == 60
        assert config.figure == (spec.rpartition(":")[2] if ":" in spec else "")
    with pytest.raises(UserError, match=r"work is not judged, as .*; to run it, add --experiment=/gone/tiny\.py"):
        workdirs.experiment_of(work, [str(tmp_path / "other.py")])
    (work / "config.json").write_text('{"config": {}, "swept": []}')
    with pytest.raises(UserError, match="work does not say which experiment it is of"):
        workdirs.experiment_of(work)


def test_panels_that_share_an_axis_show_all_of_it(finished):
    """A loss far above those of the first panel (a frozen router at top-1) was once cut off in the second."""
    config, _, table, _ = finished
    rows = table.assign(**{"test/loss_soft": 1e-4, "test/loss": 50.0})
    spec = {"kind": "curves", "name": "x", "x": "data.samples", "metrics": ("test/loss_soft", "test/loss")}
    low, high = plots.draw(spec, frame.Data(rows, ["data.samples"], flatten(config), {}, AXES)).panels[1].y.domain
    assert low == pytest.approx(1e-4, rel=0.3) and high > 50


def test_a_key_that_goes_with_the_axis_hides_no_point(finished):
    """128 atoms had their own number of test samples, so the figure over atoms showed 32 only."""
    config, _, table, _ = finished
    rows = table.assign(**{"data.test_samples": table["data.samples"] + 1})
    data = frame.Data(rows, ["data.samples", "data.test_samples"], flatten(config), {}, AXES)
    spec = {"kind": "curves", "name": "x", "x": "data.samples", "metrics": ("test/loss",)}
    assert len(plots.draw(spec, data).panels[0].x.ticks) == table["data.samples"].nunique() == 2
    crossed = pd.concat([table.assign(**{"data.test_samples": n}) for n in (config.data.test_samples, 7)])
    data = frame.Data(crossed, data.swept, flatten(config), {}, AXES)
    assert set(data.at_point(data.table, spec)["data.test_samples"]) == {config.data.test_samples}


def test_a_specialised_router_is_shown_as_a_diagonal():
    shuffled = np.eye(5)[[3, 1, 4, 0, 2]]
    rows, columns = maps.diagonal(shuffled)
    np.testing.assert_array_equal(shuffled[np.ix_(rows, columns)], np.eye(5))


def test_ci_calls_the_command_of_the_readme():
    readme, script = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    command = next(line.strip() for line in readme.splitlines() if line.strip().endswith(".venv/bin/pytest"))
    assert command in script
