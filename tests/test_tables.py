"""The tables on disk: a batch costs its own size, merging loses and changes nothing; the order of runs."""

import errno
import os
import pathlib

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict

from routed.contracts import UserError
from routed.engine import rows, tables
from routed.engine.schedule import Group, Schedule
from routed.plan.config import problem_of
from routed.plan.run import Run
from routed.plan.runs import plan_runs
from routed.settings.tree import override
from routed.system import files


def batch(number, runs=2, evaluations=3):
    """Rows of some runs, and a map of each; runs of odd batches have a column more, as those with a router have."""
    keys = [f"{number:03d}{i:013d}" for i in range(runs)]
    made = pd.DataFrame(
        {
            "run": np.repeat(keys, evaluations), "data.samples": 8 * (number % 3), "arm": "learned", "seed": number,
            "step": np.tile(np.arange(evaluations), runs), "status": "ok", "test/loss": float(number),
        }
    )  # fmt: skip
    if number % 2:
        made["router/dead"] = np.nan
    return made.to_dict("records"), {key: np.full((evaluations, 2, 2), number, np.float16) for key in keys}


@pytest.fixture
def written(monkeypatch):
    """The names and sizes of all files written."""
    sizes, write = {}, files.write

    def noted(path, content):
        write(path, content)
        sizes[path.relative_to(path.parent.parent)] = path.stat().st_size

    monkeypatch.setattr(files, "write", noted)
    return sizes


def test_a_batch_writes_what_it_holds_whatever_is_there(tmp_path, written):
    sizes = []
    for number in range(20):
        written.clear()
        tables.add_part(tmp_path, *batch(2 * number))
        sizes.append(sorted(written.values()))
        assert all(str(name).startswith("results/") for name in written)
    assert sizes == sizes[:1] * 20 and len(sizes[0]) == 2  # rows and maps


def filled(workdir, numbers, merged_after=()):
    """A workdir with these batches, merged as often as asked, and at the end."""
    workdir.mkdir()
    for number in numbers:
        tables.add_part(workdir, *batch(number))
        if number in merged_after:
            tables.merge(workdir, tables.read_table(workdir))
    tables.merge(workdir, tables.read_table(workdir))
    return {path.name: path.read_bytes() for path in workdir.iterdir()}


def test_no_order_of_batches_and_merges_changes_a_bit(tmp_path):
    alone = filled(tmp_path / "alone", range(6))
    assert alone.keys() == {"results.parquet", ".results.copy.parquet", "routing.npz"}
    assert filled(tmp_path / "other", [4, 1, 5, 0, 2, 3], merged_after=[1, 2]) == alone
    table = tables.read_table(tmp_path / "alone")
    assert len(table) == 6 * 2 * 3 and list(table["data.samples"].unique()) == [0, 8, 16]
    assert list(table.columns) == [*rows.LEADING[:1], "data.samples", *rows.LEADING[1:], "router/dead", "test/loss"]


def test_what_is_not_merged_yet_is_read_too(tmp_path):
    for number in range(3):
        tables.add_part(tmp_path, *batch(number))
    before, settled = tables.gather(tmp_path)
    maps = {key: value.copy() for key, value in tables.read_heatmaps(tmp_path).items()}
    assert not settled and len(before) == 3 * 2 * 3 and len(maps) == 6
    tables.merge(tmp_path, before)
    after, settled = tables.gather(tmp_path)
    assert settled and not (tmp_path / "results").exists()
    pd.testing.assert_frame_equal(after, before, check_exact=True)
    merged = tables.read_heatmaps(tmp_path)
    assert merged.keys() == maps.keys() and all((merged[key] == maps[key]).all() for key in maps)


def test_parts_that_outlive_their_merge_add_nothing(tmp_path, monkeypatch):
    """A kill comes between the table, which has a new column, and the removal of its parts, which have not.

    2 runs of 3 evaluations at 2 points are 12 rows, and stay 12; a part of 2 more runs at one point adds 6.
    """
    made, maps = batch(0)
    tables.add_part(tmp_path, made + [row | {"data.samples": 16} for row in made], maps)
    table = tables.read_table(tmp_path)
    table.insert(1, "data.dim", 3)
    table = rows.ordered(table)
    with monkeypatch.context() as patch:
        patch.setattr(files, "remove", lambda path: None)
        tables.merge(tmp_path, table)
    assert [*(tmp_path / "results").glob("*.arrow")]
    left, settled = tables.gather(tmp_path)
    assert not settled and len(left) == 12  # not settled, so that the parts go
    pd.testing.assert_frame_equal(left, table, check_exact=True)
    tables.add_part(tmp_path, [row | {"data.dim": 3} for row in batch(2)[0]], {})
    more = tables.read_table(tmp_path)
    assert len(more) == 12 + 6 and more["data.dim"].eq(3).all()


def test_a_part_that_another_process_merges_meanwhile_is_in_the_table(tmp_path, monkeypatch):
    """The report of an unfinished workdir: between the list of parts and their content, the run itself may end."""
    tables.add_part(tmp_path, *batch(1))
    good = tables.read_table(tmp_path)

    def read_too_late(part):
        monkeypatch.undo()
        tables.merge(tmp_path, good)
        return part.read_bytes()

    monkeypatch.setattr(pathlib.Path, "read_bytes", read_too_late)
    pd.testing.assert_frame_equal(tables.read_table(tmp_path), good)


@pytest.mark.parametrize("kind", ["arrow", "npz"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "renamed"])
def test_a_damaged_part_is_named_and_costs_itself(tmp_path, caplog, kind, damage):
    for number in (0, 1):
        tables.add_part(tmp_path, *batch(number))
    part = max((tmp_path / "results").glob(f"*.{kind}"))
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "renamed":
        part.rename(part := part.with_stem("0" * 32))
    else:
        part.write_bytes({"flipped": content, "cut": content[:-1], "empty": b""}[damage])
    table, maps = tables.read_table(tmp_path), tables.read_heatmaps(tmp_path)
    assert f"{part} is damaged: its runs are run again, and no others" in caplog.text
    assert (table.run.nunique(), len(maps)) == ((2, 4) if kind == "arrow" else (4, 2))


def test_a_missing_table_is_not_taken_from_its_copy(tmp_path):
    """Whoever removes results.parquet wants its runs again."""
    filled(tmp_path / "work", range(2))
    (tmp_path / "work" / "results.parquet").unlink()
    assert not len(tables.read_table(tmp_path / "work"))


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    for kind in ("npz", "arrow"):

        def full(descriptor, kind=kind):
            if os.readlink(f"/proc/self/fd/{descriptor}").endswith(f".{kind}.writing"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"disk full while writing .*results"):
            tables.add_part(tmp_path, *batch(1))
        assert not len(tables.read_table(tmp_path))


def test_rows_of_a_run_stand_at_every_point_that_asks_for_it(small):
    """A dense net has no router: one run, rows at both points, also when the second is asked for later."""
    sweep = tuple({"router.init_scale": scale} for scale in (1.0, 2.0))
    config = override(small, {"arms": ("learned", "dense_active")})
    first, both = ([run for run in plan_runs(config, points) if run.arm != "learned"] for points in (sweep[:1], sweep))
    assert [run.key for run in first] == [run.key for run in both] and len(both[0].flat_configs) == 2
    history = {name: np.zeros(3) for name in ("test/loss", "train/loss", "router/params_changed")}
    one, two = (
        rows.ordered(
            pd.DataFrame(
                [
                    row
                    for run in runs
                    for row in rows.rows_of(run, history, ["router.init_scale"], problem_of(run.config))
                ]
            )
        )
        for runs in (first, both)
    )
    assert len(two) == 2 * len(one) == 2 * 2 * 3  # points, seeds, evaluations
    pd.testing.assert_frame_equal(rows.fill_points(one, both), two)
    assert rows.fill_points(two, both) is two


def run_of(key, needs=()):
    return Run(str(key), (), "learned", 0, False, ConfigDict(), tuple(map(str, needs)), ())


plans = st.lists(
    st.tuples(st.integers(0, 2), st.sets(st.integers(0, 20), max_size=2), st.booleans()), min_size=1, max_size=20
)


@settings(max_examples=100, deadline=None)
@given(plans, st.integers(1, 3))
def test_runs_come_group_by_group_after_those_that_they_need(plan, size):
    """Against the plain rule, asked for every batch: of the first ready group the needed runs, then the first."""
    made = [[], [], []]
    for key, (group, needs, _) in enumerate(plan):
        made[group].append(run_of(key, [need for need in needs if need < key]))
    done = {str(key) for key, (_, _, finished) in enumerate(plan) if finished}
    groups = [Group("", runs, 0, size, None) for runs in made if runs]
    schedule, expected = Schedule(groups, done), set(done)
    pending = [run for group in groups for run in group.runs if run.key not in done]
    awaited = {need for run in pending for need in run.needs}
    while pending:
        ready = [[run for run in group.runs if run in pending and expected.issuperset(run.needs)] for group in groups]
        wanted = sorted(next(runs for runs in ready if runs), key=lambda run: run.key not in awaited)[:size]
        assert schedule
        group, batch = schedule.take()
        assert batch == wanted and all(run in group.runs for run in batch)
        schedule.finish(batch)
        expected |= {run.key for run in batch}
        pending = [run for run in pending if run.key not in expected]
    assert not schedule


def test_runs_that_others_wait_for_come_first():
    """Two of six wait for the fourth and the third: not batches 0 1, 2 3, 4 5 by place, but 2 3, 0 1, 4 5."""
    group = Group("", [*(run_of(i) for i in range(4)), run_of(4, [3]), run_of(5, [2])], 0, 2, None)
    schedule, taken = Schedule([group], ()), []
    while schedule:
        batch = schedule.take()[1]
        taken.append([run.key for run in batch])
        schedule.finish(batch)
    assert taken == [["2", "3"], ["0", "1"], ["4", "5"]]


def test_the_batch_of_a_checkpoint_is_taken_only_whole():
    first, second = (
        Group("", [run_of(i) for i in range(4)], 0, 2, None),
        Group("", [run_of(4), run_of(5, [0])], 0, 2, None),
    )
    schedule = Schedule([first, second], {"3"})
    for keys in (["0", "4"], ["9"], ["3"], ["4", "5"]):  # two groups, unknown, done, not ready
        assert schedule.take_again(keys) is None
    assert schedule.take_again(["1", "2"]) == (first, first.runs[1:3])
    assert schedule.take()[1] == first.runs[:1]
