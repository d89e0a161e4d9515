"""Folders of a stranger: no code of theirs runs, edits are named, and texts stay texts."""

import contextlib
import contextvars
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from absl import logging as log
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import routed
from routed.analysis import answer, page
from routed.contracts import UserError
from routed.engine import results, tables
from routed.publish import committed, published
from routed.system import files, stored
from tests import damage
from tests.patience import PATIENCE
from tests.test_command_line import command, describe, reported
from tests.test_rejudged import FOLDERS

#: A result with values per seed whose judgement is quick.
KEPT = next(folder for folder in FOLDERS if folder.name == "cluster_causes")
SETTINGS = ("--config=gmm_router:smoke", "--config.seeds=2", "--config.steps=4", "--config.eval_every=2")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A workdir of one of our experiments."""
    folder = tmp_path_factory.mktemp("stored") / "whole"
    command(*SETTINGS, "--config.arms=learned,frozen", f"--workdir={folder}")
    return folder


@pytest.fixture
def work(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "work")


def rewrite(file, change):
    """Edits a JSON file as a person does."""
    content = json.loads(file.read_text())
    file.write_text(json.dumps(change(content) or content, indent=2))


def test_code_that_a_folder_names_is_not_run(tmp_path, capsys, caplog):
    evil = tmp_path / "work" / "evil.py"
    evil.parent.mkdir()
    evil.write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    described = {"experiment": str(evil), "config": {}, "swept": []}
    (evil.parent / "config.json").write_text(json.dumps(described))
    shutil.copy(KEPT / "claims.json", evil.parent)
    log.use_python_logging(quiet=True)
    for options in ([], [f"--docs={tmp_path / 'docs'}"], ["--findings"]):
        try:
            reported(evil.parent, *options)
        except UserError as error:
            assert options and f"to run it, add --experiment={evil}" in str(error)
    assert "work" in capsys.readouterr().out
    text = f"stored, as the code that it names is not run unasked; to run it, add --experiment={evil}"
    assert text in caplog.text
    shutil.copytree(KEPT, tmp_path / "docs" / "data" / "kept")
    (tmp_path / "docs" / "data" / "kept" / "config.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match="kept is not judged, as the code that it names is not run"):
        reported(f"--rejudge={tmp_path / 'docs'}")
    assert not (tmp_path / "ran").exists()
    with pytest.raises(UserError, match=r"work: --experiment=.*evil\.py: not an experiment, it lacks FIGURES"):
        reported(evil.parent, f"--experiment={evil}")
    assert (tmp_path / "ran").exists()


def edit_table(folder):
    table = results.read_table(folder)
    table["test/loss"] *= 2
    for name in (tables.TABLE, tables.COPY):
        table.to_parquet(folder / name, index=False)


def edit_maps(folder):
    maps = dict(np.load(folder / tables.MAPS))
    with (folder / tables.MAPS).open("r+b") as file:
        comment = re.search(rb"[0-9a-f]{32}$", file.read())[0]
    np.savez(folder / tables.MAPS, **{name: array + 1 for name, array in maps.items()})
    content = (folder / tables.MAPS).read_bytes()
    (folder / tables.MAPS).write_bytes(content[:-2] + len(comment).to_bytes(2, "little") + comment)


@pytest.mark.slow
def test_maps_without_experts_are_lost_and_the_tables_are_not(work, caplog):
    log.use_python_logging(quiet=True)
    maps = dict(np.load(work / tables.MAPS))
    np.savez(work / tables.MAPS, **{name: np.zeros(3, array.dtype) for name, array in maps.items()})
    reported(work)
    assert "routing.npz is damaged (its arrays have no experts)" in caplog.text


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("config.json", lambda work: rewrite(work / "config.json", lambda c: c["config"].update({"gate.horizon": 1}))),
        ("results.parquet", edit_table),
        ("routing.npz", edit_maps),
        ("claims.json", lambda folder: rewrite(folder / "claims.json", lambda c: c[0].update(verdict="supported"))),
        ("summary.csv", lambda folder: (folder / "summary.csv").write_text("metric,arm\n")),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_an_edit_is_named_and_believed_only_where_that_is_asked_for(work, monkeypatch, caplog, name, edit):
    log.use_python_logging(quiet=True)
    before = routed.load(work)
    edit(work)
    changed = f"{work / name} has changed since it was written"
    try:
        after = routed.load(work)
    except UserError as error:
        assert changed in str(error) and "--accept_edits" in str(error)
    else:
        assert changed in caplog.text and name in ("results.parquet", "routing.npz")
        assert not len(after["results" if name == "results.parquet" else "heatmaps"])
    caplog.clear()
    monkeypatch.setattr(stored, "ACCEPTS_EDITS", contextvars.ContextVar("accepts", default=True))
    after = routed.load(work)
    assert f"{changed}, and is read as it is" in caplog.text
    key = {"config.json": "config", "results.parquet": "results", "routing.npz": "heatmaps"}.get(
        name, name.partition(".")[0]
    )
    if isinstance(before[key], pd.DataFrame):
        assert len(after[key]) and not after[key].equals(before[key]) if name != "summary.csv" else not len(after[key])
    elif key == "heatmaps":
        assert all((after[key][each] == before[key][each] + 1).all() for each in before[key])
    else:
        assert after[key] != before[key]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("figure", "gone", "figure='gone' is unknown to .*gmm_router.* of today; known: .*fig2a"),
        ("model", "dense", "model='dense' is unknown .*known: moe"),
        ("arms", ["learned", "mine"], "arms='mine' is unknown .*known: .*learned"),
    ],
)
def test_what_the_experiment_of_today_does_not_know_is_named(work, key, value, message):
    """An older program wrote it, so its digest is right."""
    describe(work, lambda content: content["config"].update({key: value}))
    with pytest.raises(UserError, match=message):
        reported(work)


def test_an_older_workdir_is_read_and_says_so_once(work, caplog):
    log.use_python_logging(quiet=True)
    stored._warn.cache_clear()
    rewrite(work / "config.json", lambda content: content.pop("digest") and None)
    (work / stored.DIGESTS).unlink()
    reported(work)
    assert caplog.text.count("work has no digests, since an older program wrote it") == 1
    assert json.loads((work / stored.DIGESTS).read_text()).keys() == {"summary.csv", "claims.json"}


@pytest.mark.parametrize("age", ["new", "old"])
def test_a_kill_between_two_files_leaves_tables_that_are_read(tmp_path, monkeypatch, age):
    """After any number of writes each table is that of before or the new one, whole, and no edit."""
    stored.write_tables(tmp_path, {"a": "1", "b": "1"})
    if age == "old":
        (tmp_path / stored.DIGESTS).unlink()
    real, left = files.write, 0

    def write(path, content):
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        real(path, content)

    monkeypatch.setattr(files, "write", write)
    for writes in (0, 1, 2, 0, 1, 2, 3):
        left = writes
        with contextlib.suppress(KeyboardInterrupt):
            stored.write_tables(tmp_path, {"a": "2", "b": "2"})
        assert {stored.read_table(tmp_path / name, "mend it") for name in "ab"} <= {b"1", b"2"}
    (tmp_path / "a").write_text("1 ")
    with pytest.raises(UserError, match="a has changed since it was written: mend it"):
        stored.read_table(tmp_path / "a", "mend it")


HOSTILE = (
    '<script>alert(1)</script>\n# "><img src=x onerror=alert(2)>|[x](javascript:alert(3)) ![y](//z) \x1b]0;t\x07\x85'
)


def test_texts_of_results_stay_texts_in_markdown(tmp_path):
    folder = tmp_path / "data" / "kept"
    shutil.copytree(KEPT, folder)
    rewrite(folder / "claims.json", lambda claims: [
        claim | {name: HOSTILE for name, value in claim.items() if isinstance(value, str)} for claim in claims
    ])  # fmt: skip
    texts = {"question": "[x]: javascript:alert(4)", "line": HOSTILE, "machine": HOSTILE, "commit": HOSTILE}
    texts |= {"command": HOSTILE, "gap_at": HOSTILE, "figures": [{"name": HOSTILE, "caption": HOSTILE}]}
    rewrite(folder / "about.json", lambda about: about | texts | {"experts": {HOSTILE: [1.0, 2.0]}})
    pd.DataFrame({HOSTILE: [HOSTILE] * 2}).to_csv(folder / "arms.csv", index=False)
    (page,) = published.write_pages(tmp_path)
    text = page.read_text()
    assert text.count("alert(1)") > 20
    assert not re.search(r"<(?!/?picture>|source media=|img src=\"data/|/?details>|/?summary>)[A-Za-z/!?]", text)
    assert not re.search(r"\]\((?!#|[\w/-]+\.md|\.\./method\.md|data/)", text) and "[x]:" not in text
    assert text.count("\n# ") == 0 and not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text, re.MULTILINE)
    assert not re.search(r'(src|srcset|alt)="[^"]*<', text)


def test_texts_of_a_stranger_do_not_command_a_terminal(tmp_path, capsys):
    claims = json.loads((KEPT / "claims.json").read_text())
    forged = claims[0] | {"statement": "x\n  SUPPORTED  forged: y\x1b[2J\x9b\u202e", "verdict": "supported"}
    (tmp_path / "claims.json").write_text(json.dumps([forged]))
    reported("--findings", tmp_path)
    out = capsys.readouterr().out
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]|^\s+SUPPORTED  forged", out, re.MULTILINE)
    assert r"x SUPPORTED forged: y\x1b[2J\x9b\x202e" in out


@pytest.mark.slow
def test_a_line_of_the_log_does_not_command_a_terminal():
    command = [sys.executable, "-m", "routed.report", "x\x1b[2J"]
    text = subprocess.run(command, capture_output=True, timeout=PATIENCE).stderr
    assert rb"error: x\x1b[2J is no workdir" in text and b"\x1b" not in text


def test_a_cell_that_a_spreadsheet_would_compute_is_a_text():
    cells = [
        "=1+1",
        "+x",
        "-2+3+cmd|' /C calc'!A0",
        "@SUM(1)",
        "\t=1",
        "-0.5",
        "-0.1 [-0.2, +0.3]",
        "-",
        "a=b",
        None,
        -1.5,
    ]
    text = files.csv_text(pd.DataFrame({"=a": cells, "n": [-1.0] * len(cells)}))
    lines = text.splitlines()
    assert (
        lines[0] == "'=a,n" and [line[0] == "'" or line[:2] == "\"'" for line in lines[1:]] == [True] * 5 + [False] * 6
    )
    assert all(line.endswith(",-1.0") for line in lines[1:])


@pytest.mark.slow
def test_a_kill_of_docs_leaves_a_result_whole_or_absent(tmp_path, monkeypatch, whole):
    described = results.stored_config(whole) | {"commit": "0123456789ab"}
    (work := tmp_path / "work").mkdir()
    shutil.copytree(whole, work, dirs_exist_ok=True)
    (work / "config.json").write_text(json.dumps(stored.sealed(described)))
    draw = page.draw_all
    monkeypatch.setattr(page, "draw_all", lambda specs, data: draw(specs[:1], data))  # which takes long
    reported(work, f"--docs={tmp_path / 'docs'}")
    folder, real = tmp_path / "docs" / "data" / "work", files.write
    texts = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for last in ("learned.svg", "seeds.parquet", "claims.json", committed.LAST):

        def write(path, content, last=last):
            if path.name.endswith(last) or (last == "learned.svg" and path.parent.name == "figures"):
                raise KeyboardInterrupt
            real(path, content)

        monkeypatch.setattr(files, "write", write)
        with pytest.raises(KeyboardInterrupt):
            reported(work, f"--docs={tmp_path / 'docs'}")
        monkeypatch.setattr(files, "write", real)
        with pytest.raises(UserError, match="holds no results"):
            published.pages(tmp_path / "docs")
    reported(work, f"--docs={tmp_path / 'docs'}")
    assert texts == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    shutil.rmtree(folder / "figures")
    (mine := tmp_path / "mine").mkdir()
    (mine / "a.svg").write_text("mine")
    (folder / "figures").symlink_to(mine)
    with pytest.raises(UserError, match="figures is a symbolic link: nothing is written behind one"):
        reported(work, f"--docs={tmp_path / 'docs'}")
    assert [path.name for path in mine.iterdir()] == ["a.svg"]


def test_results_that_are_judged_again_are_not_written_behind_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "kept").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="kept is a symbolic link"):
        committed.store(tmp_path / "kept", {"about.json": "{}"})
    assert not [*(tmp_path / "elsewhere").iterdir()]


def test_a_link_in_the_place_of_a_temporary_file_is_not_followed(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / ".page.writing").symlink_to(tmp_path / "mine")
    files.write(tmp_path / "page", "new")
    assert (tmp_path / "mine").read_text() == "mine" and (tmp_path / "page").read_text() == "new"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("claims.json", "null", r"claims\.json is damaged \(the file cannot be null\)"),
        ("claims.json", "[1]", r"claims\.json is damaged \(\[0\] cannot be 1\)"),
        ("claims.json", "[{}]", r"claims\.json is damaged \(\[0\] has no 'id'\)"),
        ("claims.json", "[" * 100_000, r"claims\.json is damaged \(RecursionError"),
        ("claims.json", '["\ud800"]', r"claims\.json is damaged \(Unicode"),
        ("about.json", '{"rules": "x"}', r"about\.json is damaged \(has no 'question'|the file has no 'question'"),
        ("arms.csv", "", r"arms\.csv cannot be used \(ValueError: it is cut"),
        ("arms.csv", "null", "it is cut"),
        ("arms.csv", "arm,loss\nlearned,1.2", "it is cut"),  # within the last number: no end of a line
        ("../causes.json", "[1]", r"causes\.json is damaged \(the file cannot be \[1\]\)"),
        ("../contradictions.json", '{"chen": "x"}', r"contradictions\.json is damaged \(\['chen'\] cannot be .x.\)"),
        ("../../coverage.json", '{"ids": {}}', r"coverage\.json is damaged \(the file has no 'theorems'\)"),
    ],
    ids=lambda value: value[:30],
)  # fmt: skip
def test_a_field_of_a_published_result_is_named(tmp_path, name, content, message):
    shutil.copytree(KEPT, tmp_path / "data" / "kept")
    (tmp_path / "README.md").write_text(f"{published.coverage.BEGIN}\n{published.coverage.END}\n")
    (tmp_path / "data" / "kept" / name).write_text(content, "utf-8", errors="surrogatepass")
    with pytest.raises(UserError, match=message) as error:
        published.write_pages(tmp_path)
    assert "\n" not in str(error.value)


PUBLISHED = ("about.json", "claims.json", "arms.csv", "config.json", "seeds.parquet", "../causes.json")
STORED = ("config.json", "results.parquet", "routing.npz", "claims.json", "summary.csv", "timing.csv", stored.DIGESTS)


@settings(max_examples=15, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.slow
def test_no_damage_ends_in_a_traceback(whole, tmp_path, monkeypatch, data):
    """report, findings and load read a workdir, --docs and --rejudge a published result; pictures take long."""
    monkeypatch.setattr(page, "draw_all", lambda specs, data: ([], []))
    work, root = tmp_path / "work", tmp_path / "docs"
    for folder, source in ((work, whole), (root / "data" / "kept", KEPT)):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
    (root / "data" / "causes.json").write_text(json.dumps({"dikkala.x": "y"}) if data.draw(st.booleans()) else "{}")
    names = [*(work / name for name in STORED), *(root / "data" / "kept" / name for name in PUBLISHED)]
    (work / tables.COPY).unlink()
    file = data.draw(st.sampled_from(names))
    kind = data.draw(st.sampled_from([*damage.BYTES, *["field"] * (6 if file.suffix == ".json" else 0)]))
    if kind == "field":
        damage.damage_field(data, file)
        if file == work / "config.json" and isinstance(content := json.loads(file.read_text()), dict):
            content.pop("digest", None)  # as an older program wrote it
            file.write_text(json.dumps(content))
    else:
        damage.damage_bytes(data, file, kind)
    if file.parent == work:
        asks = [lambda: answer.findings([work]), lambda: routed.load(work), lambda: reported(work)]
    else:
        asks = [lambda: published.write_pages(root), lambda: reported(f"--rejudge={root}")]
    for ask in asks:
        try:
            ask()
        except UserError as error:
            assert "\n" not in str(error)
        except SystemExit as error:
            assert error.code == 1  # verdicts differ


@pytest.mark.slow
def test_claims_do_not_depend_on_the_hash_seed():
    """A set of settings gave the labels of a claim's sides another order in each process."""
    code = "from routed.plan import experiment as e; from routed.system.experiments import packaged\n"
    code += "for name in packaged():\n  m, _ = e.configure(name, [])\n  for f in m.FIGURES:\n"
    code += "    c = e.configure(f'{name}:{f}', [])[1]; g = m.FIGURES[f]; print(name, f, g.claims(c), g.sweep(c))\n"
    outs = []
    for seed in "01":
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, timeout=PATIENCE)
        assert not done.returncode, done.stderr
        outs.append(re.sub(rb" at 0x[0-9a-f]+", b"", done.stdout).splitlines())
    assert outs[0] == outs[1] and len(outs[0]) > 100
