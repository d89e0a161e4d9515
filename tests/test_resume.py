"""Nothing finished is lost or changes: killed, interrupted, damaged or extended, a workdir ends with the same rows."""

import errno
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import routed
from routed.analysis import workdirs
from routed.contracts import UserError
from routed.engine import batches, checkpoint, execution, results, tables
from routed.experts import EXPERTS
from routed.plan.config import problem_of
from routed.system import files, signals
from routed.system.progress import Progress
from tests.conftest import without_papers
from tests.test_checkpoint import flipped, halved
from tests.test_command_line import command, refusal, write_experiment

# Processes, or several programs to compile; the tests are about what is run.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled")]


@pytest.fixture
def saves(monkeypatch):
    """The steps of the checkpoints saved, one for each chunk trained; `then` is called after each with their count."""

    class Saves(list):
        then = staticmethod(lambda count: None)

    made, save = Saves(), checkpoint.save

    def counted(root, step, runs, states, **kept):
        save(root, step, runs, states, **kept)
        made.append(step)
        made.then(len(made))

    monkeypatch.setattr(checkpoint, "save", counted)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("resume")


@pytest.fixture
def run(folder):
    """Runs the experiment in a workdir: 2 arms x 2 seeds, 2 runs at a time, so 2 batches of 3 chunks.

    Returns True if runs diverged, which the exit code says.
    """
    always = f"--config={write_experiment(folder)}", "--verbosity=0"  # as the entry point sets it

    def diverged(workdir, *arguments):
        try:
            command(*always, f"--workdir={workdir}", *arguments)
        except SystemExit as ended:
            assert ended.code == signals.DIVERGED
            return True
        return False

    return diverged


@pytest.fixture
def refused(folder):
    """The same, for a command that is refused: what it says."""
    experiment = write_experiment(folder)
    return lambda workdir, *arguments: refusal(f"--config={experiment}", f"--workdir={workdir}", *arguments)


@pytest.fixture
def finished(folder, run, tmp_path):
    """A workdir that was never disturbed; every test has its own copy."""
    if not (folder / "finished").exists():
        run(folder / "finished")
    return shutil.copytree(folder / "finished", tmp_path / "finished")


def table(workdir):
    return pd.read_parquet(workdir / "results.parquet")


def same(first, second):
    """Bit for bit, NaN equal to NaN, in the same order."""
    pd.testing.assert_frame_equal(without_papers(first), without_papers(second), check_exact=True)


def logged(workdir):
    return (workdir / "routed.log").read_text()


def last_batch_undone(workdir):
    """The workdir as it was when the first batch was finished: the two runs of one arm."""
    tables.merge(workdir, results.read_table(workdir).query("arm == 'learned'"))
    return workdir


# Killed


def test_killed_between_any_two_steps_of_saving(finished, run, saves, tmp_path, monkeypatch):
    """The disk is copied before every rename and every removal; from each copy the command must go on and end alike.

    A copy is what a kill at that moment leaves. Chunks that were saved must not be trained again.
    """
    work, copies = tmp_path / "work", []

    def copied_before(function):
        def copy_and_call(path, *args, **options):
            if work in pathlib.Path(path).parents and os.path.exists(path):
                copies.append(shutil.copytree(work, tmp_path / f"copy{len(copies)}"))
            return function(path, *args, **options)

        return copy_and_call

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", copied_before(os.replace))
        patch.setattr(shutil, "rmtree", copied_before(shutil.rmtree))
        run(work)
    same(table(work), table(finished))
    assert saves == [10, 20, 30] * 2
    # Renames: config, 6 chunks, and for each batch timing and its parts, rows and (with the base seed) maps; then,
    # merged, maps, rows and their copy; summary, claims, page. Removals: each batch's third oldest checkpoint and its
    # folder; the parts.
    assert len(copies) >= 24
    for copy in copies:
        done = len(results.read_table(copy)) // 4 // 2  # batches in the table: 4 evaluations, 2 runs
        newest = max(copy.glob("checkpoints/0*"), default=None)
        current = newest and json.loads((newest / "meta.json").read_text())
        if current and current["runs"][0] not in set(results.read_table(copy).get("run", ())):
            saved = 3 * done + current["step"] // 10
        else:
            saved = 3 * done
        saves.clear()
        run(copy)
        same(table(copy), table(finished))
        assert len(saves) == 6 - saved, (copy, saved, saves)
        for name in ("summary.csv", "results.parquet", "routing.npz"):
            assert (copy / name).read_bytes() == (finished / name).read_bytes(), (copy, name)
        assert not (copy / "checkpoints").exists() and not (copy / "results").exists()


def test_killed_for_real_refused_meanwhile_and_terminated(folder, run, refused, tmp_path):
    """kill -9, a second process before it, SIGTERM, and the end; against the same run left alone in this process."""
    work, seeds = tmp_path / "work", "--config.seeds=4"  # 4 batches
    line = [sys.executable, "-m", "routed.main", f"--config={folder / 'tiny.py'}", f"--workdir={work}", seeds]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

    def start_until(pattern):
        found = subprocess.Popen(
            line, env=os.environ | cache, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        while not any(work.glob(pattern)):
            assert found.poll() is None, found.communicate()
            time.sleep(0.01)
        return found

    killed = start_until("checkpoints/000000010")
    killed.send_signal(signal.SIGSTOP)  # so that it is in the middle of its first batch
    assert f"in use by process {killed.pid}" in refused(work, seeds)
    killed.kill()
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    step = checkpoint.latest(work / "checkpoints")[1]["step"]
    stopped = start_until("results/*.arrow")
    stopped.terminate()
    text = stopped.communicate()[1]
    assert stopped.returncode == 2 and "Traceback" not in text
    assert f"resuming learned/frozen E=4 from step {step}" in text
    assert text.splitlines()[-1].endswith(f"error: interrupted and saved in {work}: the same command goes on from here")
    run(work, seeds)  # in this process: nothing of the state depends on the one that saved it
    run(tmp_path / "alone", seeds)
    same(table(work), table(tmp_path / "alone"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_resume(finished, run, refused, saves, tmp_path, number):
    handler = signal.getsignal(number)
    saves.then = lambda count: os.kill(os.getpid(), number) if count == 5 else None
    assert "interrupted and saved" in refused(tmp_path / "work") and "same command" in logged(tmp_path / "work")
    assert signal.getsignal(number) == handler
    run(tmp_path / "work")
    assert saves == [10, 20, 30, 10, 20, 30]
    same(table(tmp_path / "work"), table(finished))


@pytest.mark.parametrize("at", [0, 1, 14, 30])
def test_a_signal_is_answered_between_two_checkpoints(finished, run, refused, saves, tmp_path, monkeypatch, at):
    """Steps that take longer than anybody waits come one by one, without a checkpoint after each."""
    monkeypatch.setattr(batches, "PATIENCE", 0.0)
    report = Progress.report

    def signalled(self, steps, step, loss):
        report(self, steps, step, loss)
        if step == at:
            os.kill(os.getpid(), signal.SIGTERM)

    work = tmp_path / "work"
    with monkeypatch.context() as patch:
        patch.setattr(Progress, "report", signalled)
        assert "interrupted and saved" in refused(work)
    if at == 14:  # no run has rows yet, which would refuse another config by themselves
        refusal_text = refused(work, "--config.batch_size=4")
        assert "holds 2 unfinished runs of another command, which this one would lose" in refusal_text
    before = [step for step in (10, 20, 30) if step <= at]
    assert saves == sorted({*before, at})
    run(work)
    assert f"from step {at}\n" in logged(work) and saves[len({*before, at}) :] == [
        *[step for step in (10, 20, 30) if step > at], 10, 20, 30,
    ]  # fmt: skip
    same(table(work), table(finished))


def test_a_checkpoint_of_other_data_is_refused_before_there_is_a_row(
    finished, run, refused, saves, tmp_path, monkeypatch
):
    """Stopped in the first batch: no row says what its runs began on, and no key of a run does."""
    saves.then = lambda count: os.kill(os.getpid(), signal.SIGTERM) if count == 2 else None
    refused(work := tmp_path / "work")
    assert checkpoint.latest(work / "checkpoints")[1]["data"] == "generated from the seed"
    with monkeypatch.context() as patch:
        for module in (execution, results):
            edited = lambda config: problem_of(config)._replace(digest=lambda config: "another text")  # noqa: E731
            patch.setattr(module, "problem_of", edited)
        text = refused(work)
    assert "000000020 is of runs on other data (generated from the seed; now another text): choose another" in text
    run(work)  # the data are what they were
    assert saves == [10, 20, 30, 10, 20, 30]
    same(table(work), table(finished))


def test_a_batch_that_more_devices_began_goes_on(finished, run, refused, saves, tmp_path):
    """Four runs at a time, stopped behind step 20; then two at a time: the four go on together."""
    saves.then = lambda count: os.kill(os.getpid(), signal.SIGTERM) if count == 2 else None
    refused(work := tmp_path / "work", "--config.mesh.runs_per_batch=4")
    run(work)
    assert saves == [10, 20, 30] and "from step 20\n" in logged(work)
    same(table(work), table(finished))


def test_progress_knows_all_batches_and_what_was_done_before(run, refused, saves, tmp_path, monkeypatch):
    """6 runs, 2 at a time, of 3 chunks each; the signal comes after the second chunk."""
    followed = []
    monkeypatch.setattr(execution, "Progress", lambda *args: followed.append(Progress(*args)) or followed[-1])
    saves.then = lambda count: os.kill(os.getpid(), signal.SIGTERM) if count == 2 else None
    refused(tmp_path, "--config.seeds=3")
    run(tmp_path, "--config.seeds=3")
    assert [(progress.batch, progress.batches) for progress in followed] == [(1, 3), (3, 3)]
    assert followed[1].steps_done == [work.steps for work in followed[1].works] == [6 * 30]


def test_a_signal_between_groups_stops_before_the_next_compiles(finished, run, refused, compiled, monkeypatch):
    compiled.clear()
    add = tables.add_part
    monkeypatch.setattr(tables, "add_part", lambda *args: [add(*args), os.kill(os.getpid(), signal.SIGTERM)])
    last_batch_undone(finished)
    assert "interrupted and saved" in refused(finished, "--sweep=experts.count=4,8")
    assert len(compiled) == 1 and len(results.read_table(finished)) == 16  # all 4 runs of 4 experts


def test_a_second_signal_stops_at_once(run, saves, tmp_path):
    saves.then = lambda count: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)]
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "work")
    assert saves == [10]


def test_a_second_sigterm_saves_as_the_first(refused, saves, tmp_path):
    """Slurm sends it to every process of a step, and a parent passes it on."""
    saves.then = lambda count: [os.kill(os.getpid(), signal.SIGTERM) for _ in range(2)]
    assert "interrupted and saved" in refused(tmp_path / "work")
    assert saves == [10]


def test_one_process_a_workdir(finished, refused):
    with files.locked(finished):
        assert f"in use by process {os.getpid()}: wait for it" in refused(finished)
    with files.locked(finished):
        pass  # and let go again


# Disk


@pytest.mark.parametrize("name", [".config.json.writing", ".results.parquet.writing", ".summary.csv.writing"])
def test_a_full_disk_in_one_line(finished, run, refused, tmp_path, monkeypatch, name):
    def full(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert "disk full while writing" in refused(tmp_path / "work")
    run(tmp_path / "work")
    same(table(tmp_path / "work"), table(finished))


def test_a_full_disk_under_a_checkpoint(finished, run, refused, tmp_path, monkeypatch):
    """Orbax reports a full disk as a ValueError, after it wrote a part."""

    def half(path, state):
        path.mkdir(parents=True)
        (path / "part").write_text("half")
        raise ValueError("RESOURCE_EXHAUSTED: Error writing local file: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.ocp, "save", half)
        assert "disk full while writing" in refused(tmp_path / "work")
    assert not list((tmp_path / "work" / "checkpoints").iterdir())
    run(tmp_path / "work")
    same(table(tmp_path / "work"), table(finished))


def test_a_log_that_cannot_be_written_stops_nothing(finished, run, tmp_path, capsys):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "routed.log").symlink_to("/dev/full")
    run(tmp_path / "work")
    same(table(tmp_path / "work"), table(finished))
    assert "Traceback" not in capsys.readouterr().err


# Damaged


def test_a_damaged_checkpoint_costs_one_chunk(finished, run, refused, saves, tmp_path):
    saves.then = lambda count: os.kill(os.getpid(), signal.SIGTERM) if count == 2 else None
    refused(work := tmp_path / "work")
    halved(work / "checkpoints" / "000000020" / "meta.json")
    run(work)
    assert saves == [10, 20, 20, 30, 10, 20, 30]
    assert "000000020 is damaged: going back to the one before it" in logged(work) and "from step 10" in logged(work)
    same(table(work), table(finished))


@pytest.mark.parametrize("change", [lambda a: jnp.stack([a, a], -1), lambda a: {"another": a}], ids=["shape", "keys"])
def test_a_checkpoint_of_another_shape_starts_its_batch_again(finished, run, saves, tmp_path, monkeypatch, change):
    """As another version of the code would have saved."""
    work, save = tmp_path / "work", checkpoint.save

    def save_changed(root, step, runs, states, **kept):
        save(root, step, runs, jax.tree.map(change, states))
        raise EOFError

    with monkeypatch.context() as patch, pytest.raises(EOFError):
        patch.setattr(checkpoint, "save", save_changed)
        run(work)
    saves.clear()
    run(work)
    assert saves == [10, 20, 30] * 2 and "does not fit" in logged(work)
    same(table(work), table(finished))


def test_damaged_results_are_read_from_their_copy(finished, run, saves):
    """First results.parquet (nothing is lost), then both files (all is run again)."""
    good, content = table(finished), (finished / "results.parquet").read_bytes()
    for damaged, count in ((["results.parquet"], 0), (["results.parquet", ".results.copy.parquet"], 6)):
        for name in damaged:
            halved(finished / name)
        saves.clear()
        run(finished)
        assert len(saves) == count
        same(table(finished), good)
        assert f"{damaged[-1]} is damaged" in logged(finished)
        assert {(finished / name).read_bytes() for name in (tables.TABLE, tables.COPY)} == {content}


def test_a_damaged_part_costs_its_own_runs(finished, run, refused, saves, tmp_path):
    """Killed after the first of two batches and after the second, of which one is damaged then."""
    work = tmp_path / "work"
    for count in (4, 7):
        saves.then = lambda made, count=count: os.kill(os.getpid(), signal.SIGTERM) if made == count else None
        refused(work, "--config.seeds=4")
    parts = sorted(work.glob("results/*.arrow"))
    assert len(parts) == 1 and len(table(work)) == 8  # the first was merged by the second command
    halved(parts[0])
    saves.then = lambda made: None
    saves.clear()
    run(work, "--config.seeds=4")
    assert f"{parts[0]} is damaged: its runs are run again, and no others" in logged(work)
    assert saves == [20, 30] + [10, 20, 30] * 2  # of 4 batches one is merged, and one goes on from its first checkpoint
    run(tmp_path / "alone", "--config.seeds=4")
    same(table(work), table(tmp_path / "alone"))


def test_no_flipped_bit_of_the_table_gets_through(finished):
    """Parquet's page checksums do not cover names and types: 3 % of the bits would rename a column and pass."""
    target = finished / "results.parquet"
    content, good = target.read_bytes(), table(finished)
    names = [i for name in (b"test/loss", b"seed", b"pandas") for i in (content.index(name), content.rindex(name))]
    outcomes = set()
    for position in (*names, *range(4, len(content), 211)):
        flipped(target, position)
        got, problem = tables._read(target)
        outcomes.add(got is None)
        if got is None:
            assert problem and "\n" not in problem
        else:
            same(got, good)
        target.write_bytes(content)
    assert outcomes == {True, False}  # some bits hold nothing


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "{}", '{"config": {}, "swept": ["seed"]}', b"\xff", '{"config": [], "swept": []}',
        '{"config": {}, "swept": {}}', '{"config": {}, "swept": [[]]}', '{"config": {}, "swept": [], "shard": 1}',
        "[" * 100_000, '{"format": 3, "config": {}, "swept": []}',
        '{"format": 3, "config": {}, "swept": [], "versions": {}, "left_out": {}, "code": {"router.name=mine": []}}',
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_a_damaged_config_is_refused_only_when_rows_depend_on_it(finished, refused, run, tmp_path, monkeypatch, text):
    content, good = text if isinstance(text, bytes) else text.encode(), (finished / "config.json").read_bytes()
    (finished / "config.json").write_bytes(content)
    assert "config.json is damaged" in refused(finished)
    assert "config.json is damaged" in refused(finished, "--shard=1/2")
    with pytest.raises(UserError, match=r"config\.json is damaged"):
        routed.load(finished)
    with pytest.raises(UserError, match=r"config\.json is damaged"):
        workdirs.merged([finished])
    (finished / "config.json").unlink()
    assert "no config.json" in refused(finished)
    work = tmp_path / "work"
    work.mkdir()
    (work / "config.json").write_bytes(content)
    monkeypatch.setattr(execution, "execute", lambda *args: 1 / 0)  # what comes then reads no config.json
    with pytest.raises(ZeroDivisionError):
        run(work)
    assert (work / "config.json").read_bytes() == good


def test_a_folder_in_the_place_of_a_file_is_named(finished, refused, tmp_path):
    (finished / "config.json").unlink()
    (finished / "config.json" / "inner").mkdir(parents=True)
    assert "config.json is damaged" in refused(finished)
    assert "config.json is damaged" in refused(finished, "--shard=1/2")
    (tmp_path / "work" / "config.json" / "inner").mkdir(parents=True)
    assert "config.json (is a directory)" in refused(tmp_path / "work")
    (tmp_path / "other" / "timing.csv" / "inner").mkdir(parents=True)
    assert "timing.csv (is a directory)" in refused(tmp_path / "other")


def test_a_damaged_table_of_the_report_is_named(finished):
    (finished / "claims.json").write_text("[")
    with pytest.raises(UserError, match=r"claims\.json has changed since it was written: .*routed\.report"):
        routed.load(finished)


def test_damaged_heatmaps_cost_only_themselves(finished, run, saves):
    good = table(finished)
    halved(finished / "routing.npz")
    run(last_batch_undone(finished))
    assert saves == [10, 20, 30] and "routing.npz is damaged" in logged(finished)
    same(table(finished), good)
    assert len([name for name in results.read_heatmaps(finished) if not name.endswith("/load")]) == 1


# Extended


def test_a_complete_workdir_prints_its_result_without_compiling(finished, run, compiled, saves, capsys):
    good = table(finished)
    compiled.clear()  # of what `finished` may just have asked for
    run(finished)
    assert compiled == [] and saves == []
    assert "tiny.claim" in capsys.readouterr().out
    same(table(finished), good)


def test_more_seeds_run_only_what_is_missing(finished, run, saves, tmp_path):
    good = table(finished)
    run(finished, "--config.seeds=3")
    assert saves == [10, 20, 30]  # the third seed of both arms
    same(table(finished)[lambda t: t.seed < 2].reset_index(drop=True), good)
    run(tmp_path / "work", "--config.seeds=3")
    same(table(finished), table(tmp_path / "work"))


def test_more_values_run_only_what_is_missing(finished, run, saves, tmp_path):
    sweep = ("--sweep=data.samples=32,16",)  # 32 is the base value, so those rows are there
    run(finished, *sweep)
    assert saves == [10, 20, 30] * 2
    run(tmp_path / "work", *sweep)
    same(table(finished), table(tmp_path / "work"))


@pytest.mark.parametrize(("part", "name"), [(execution, "execute"), (tables, "merge")])
def test_a_key_swept_later_keeps_the_value_that_its_rows_had(finished, run, folder, tmp_path, monkeypatch, part, name):
    """Also when the file's own value changes with the sweep, and the first such command dies before it writes a row."""
    (file := folder / "tiny.py").write_text(file.read_text().replace('"data.samples": 32', '"data.samples": 16'))
    later = ("--sweep=data.samples=32,16",)
    with monkeypatch.context() as patch:
        patch.setattr(part, name, lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(finished, *later)
    run(finished, *later)
    run(tmp_path / "work", *later)
    same(table(finished), table(tmp_path / "work"))


def test_a_sweep_over_tuples_is_a_column_of_text(run, tmp_path):
    run(
        tmp_path / "work",
        "--sweep=tune.multipliers=1,3",
        "--config.rates=tuned",
        "--config.arms=learned",
        "--config.seeds=1",
    )
    assert list(table(tmp_path / "work")["tune.multipliers"].unique()) == ["1.0", "3.0"]


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("--config.steps=40", ["steps=30", "steps=40", "--config.steps=30"]),
        ("--config.shared_streams=world", ["shared_streams=,", "shared_streams=world", "set --config.shared_streams="]),
        ("--config.data.fresh=true", ["data.fresh=False", "--config.data.fresh=False"]),
    ],
)
def test_a_workdir_of_another_config_names_the_key(finished, refused, run, argument, parts):
    text = refused(finished, argument)
    assert all(part in text for part in [*parts, str(finished), "choose another --workdir"]), text
    run(finished, text.rsplit("set ", 1)[1])  # the fix works


def test_judging_and_placing_may_change(finished, run, saves):
    run(finished, "--config.gate.horizon=2", "--config.mesh.runs_per_batch=4", "--config.arms=learned")
    assert saves == []


# Diverged


def test_a_diverged_point_is_marked_and_touches_no_other(finished, run, tmp_path):
    """Also under an arm that takes a setting from a run that diverged."""
    arms = "--config.arms=learned,frozen,frozen_sharp"
    assert run(tmp_path / "with", arms, "--sweep=experts.learning_rate=0.01,1e4", "--config.seeds=1")
    assert not run(tmp_path / "without", arms, "--config.seeds=1")
    rows = table(tmp_path / "with")
    lost = rows["experts.learning_rate"] > 1
    assert set(rows[lost].status) == {"diverged"} and set(rows[~lost].status) == {"ok"}
    assert set(rows[lost].arm) == {"learned", "frozen", "frozen_sharp"}
    assert np.isnan(rows[lost & (rows.step == 30)]["test/loss"]).all()
    same(rows[~lost].drop(columns="experts.learning_rate").reset_index(drop=True), table(tmp_path / "without"))
    assert run(tmp_path / "all", "--config.experts.learning_rate=1e4")  # the report survives it, too
    assert set(table(tmp_path / "all").status) == {"diverged"}


def test_no_program_is_compiled_after_one_without_a_finite_loss(folder, tmp_path, monkeypatch, capsys, caplog):
    """The command and its page begin with that; the same command again runs the rest."""
    text = write_experiment(folder, "nan").read_text()
    nan = 'EXPERTS["nan"] = EXPERTS["constant"]._replace(make=lambda own, outputs: Nan(outputs))'
    parts = "from routed.experts import EXPERTS\nfrom routed.experts.constant import Constant\n"
    parts += "class Nan(Constant):\n    def __call__(self, x):\n        return super().__call__(x) * float('nan')\n"
    (folder / "nan.py").write_text(text.replace("PROTOCOL =", f"{parts}{nan}\nPROTOCOL =", 1))
    line = f"--config={folder / 'nan.py'}", f"--workdir={tmp_path}", "--config.experts.name=nan", "--verbosity=0"
    line += ("--config.arms=learned,frozen,dense_expert",)
    monkeypatch.setitem(EXPERTS, "nan", EXPERTS["constant"])  # and removed afterwards
    for arms, count in ((["frozen", "learned"], 4), (["dense_expert", "frozen", "learned"], 6)):
        with pytest.raises(SystemExit) as ended:
            command(*line)
        assert ended.value.code == 3
        assert sorted(set(table(tmp_path).arm)) == arms
        first, *others = capsys.readouterr().out.splitlines()
        assert first.startswith(f"{count} of {count} runs diverged by step 0 (") and "frozen 2" in first
        assert "NOT JUDGED" in others[0] and others[1].endswith("no finite value")
        assert "(all 2 runs of learned diverged)" in first
        assert f"<strong>{first[:30]}" in (tmp_path / "report.html").read_text("utf-8")
    assert "train loss" not in caplog.text and caplog.text.count("diverged") < 8  # a line a batch, not one a run
    with pytest.raises(SystemExit) as ended:  # a part of a sweep, which has no page
        command(*line[:1], f"--workdir={tmp_path / 'part'}", *line[2:], "--shard=1/1")
    assert ended.value.code == 3


@pytest.mark.parametrize("patience", [0.0, 1e9])
def test_rows_of_a_diverged_run_depend_on_no_clock_and_no_kill(run, refused, saves, tmp_path, monkeypatch, patience):
    """A run ends at the last evaluation before it diverged, whoever noticed; resumed, it stays where it is."""
    line = "--sweep=experts.learning_rate=0.01,1e4", "--config.seeds=1", "--config.arms=learned"
    run(tmp_path / "alone", *line)
    saves.clear()
    monkeypatch.setattr(batches, "PATIENCE", patience)
    saves.then = lambda count: os.kill(os.getpid(), signal.SIGTERM) if count in (1, 2) else None
    refused(tmp_path / "work", *line)
    refused(tmp_path / "work", *line)
    run(tmp_path / "work", *line)
    assert saves == [10, 20, 30]
    same(table(tmp_path / "work"), table(tmp_path / "alone"))
    lost = table(tmp_path / "alone")[lambda rows: rows["experts.learning_rate"] > 1]
    assert lost[lost.step > 0][["test/loss", "train/loss", "router/sparsity"]].isna().all(axis=None) and len(lost) == 4


def test_what_threads_of_a_failed_save_report_too_late_is_left_out(capsys):
    """Python hands it to this hook; any other error is shown."""
    sys.excepthook(RuntimeError, RuntimeError("Event loop is closed"), None)
    assert not capsys.readouterr().err
    sys.excepthook(RuntimeError, RuntimeError("something else"), None)
    assert "something else" in capsys.readouterr().err
    shown = []
    hook = checkpoint.without_late_threads(shown.append, lambda error: error)  # as for sys.unraisablehook
    for error in (RuntimeError("Event loop is closed"), KeyError("Event loop is closed")):
        hook(error)
    assert shown == [error]
