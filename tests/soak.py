"""Breaks the command for a while and counts what is lost or unclear. Not part of the suite.

    python -m tests.soak --seconds 600 [--only kill_gaussian,settings] [--first NUMBER] [--folder DIR]

Every trial has a number, which decides all that is random in it: `--only CLASS --first NUMBER` repeats one. A trial
fails if a command ends in anything but success or one line of its own, if it takes longer than PATIENCE, or if what it
leaves in the end differs from what an undisturbed command leaves.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import gzip
import json
import multiprocessing
import os
import pathlib
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent

#: Seconds that a command may think before it trains, and that a killed one may take to end.
PATIENCE = 120

#: What the commands of processes run.
GAUSSIAN = ["--config=experiments/gmm_router.py:smoke", "--config.steps=200", "--config.eval_every=20"]
DECODER = [
    "--config=experiments/competition_lm.py:smoke", "--config.seeds=1", "--config.trace.every=1",
    "--config.phases=until=50% train=router,train=router+experts+trunk",
]  # fmt: skip
T5 = ["--config=experiments/t5_mc4.py:smoke", "--config.seeds=1", "--config.steps=40", "--config.eval_every=20"]

#: Bytes of memory that settings may ask for: the soak leaves the rest of the machine alone.
MEMORY = 2 << 30


class Defect(Exception):
    """What a trial found."""


# Commands as processes


def start(line: list[str], folder: pathlib.Path) -> subprocess.Popen:
    """Starts a command: the name of its module, and its arguments."""
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(folder / "programs"), "PYTHONPATH": f"{ROOT / 'src'}"}
    return subprocess.Popen(
        [sys.executable, "-m", *line],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def takes_signals(process: subprocess.Popen) -> bool:
    """Has it come so far that it handles SIGTERM?"""
    with contextlib.suppress(OSError):
        caught = re.search(r"SigCgt:\s*(\w+)", pathlib.Path(f"/proc/{process.pid}/status").read_text("utf-8"))
        return bool(caught and int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


def judge(process: subprocess.Popen, codes: tuple[int, ...], last: str) -> None:
    """Ended with one of these codes, no traceback, and a last line that says so."""
    said = process.stderr.read() if process.stderr else ""
    if process.wait(PATIENCE) not in codes or "Traceback" in said or not re.search(last, said.strip().split("\n")[-1]):
        raise Defect(f"exit {process.returncode}: {said[-1500:]}")


class Command(NamedTuple):
    """A command that is killed: its line for a folder to write, and what tells two such folders apart."""

    name: str
    line: Callable[[pathlib.Path], list[str]]
    compare: Callable[[pathlib.Path, pathlib.Path], None]
    last: str = "finished"


def reference(command: Command, folder: pathlib.Path) -> tuple[pathlib.Path, float]:
    """The folder of a command that nobody disturbs, and the seconds that it takes once everything is compiled."""
    path, kept = folder / command.name, folder / f"{command.name}.seconds"
    if not kept.exists():
        shutil.rmtree(path, ignore_errors=True)
        judge(start(command.line(path), folder), (0,), command.last)
        begun = time.monotonic()
        again = path.with_suffix(".again")
        shutil.rmtree(again, ignore_errors=True)
        judge(start(command.line(again), folder), (0,), command.last)
        command.compare(again, path)
        kept.write_text(str(time.monotonic() - begun), "utf-8")
    return path, float(kept.read_text("utf-8"))


def compare(work: pathlib.Path, expected: pathlib.Path, maps: bool = True) -> None:
    """Bit for bit: the table, the statistics, the verdicts and (if `maps`) the arrays that figures are drawn from."""
    import numpy as np
    import pandas as pd

    from routed.engine import results

    try:
        pd.testing.assert_frame_equal(results.read_table(work), results.read_table(expected), check_exact=True)
        for name in ("summary.csv", "claims.json"):
            assert (work / name).read_bytes() == (expected / name).read_bytes(), name
        assert (work / "report.html").stat().st_size > 1000
        if maps:
            ours, theirs = results.read_heatmaps(work), results.read_heatmaps(expected)
            assert ours.keys() == theirs.keys(), "names in routing.npz"
            for key, values in theirs.items():
                np.testing.assert_array_equal(ours[key], values)
    except (AssertionError, OSError) as error:
        raise Defect(f"differs: {error}") from error


def same_files(ours: pathlib.Path, theirs: pathlib.Path) -> None:
    """Bit for bit: every file, but for logs and the path of the folder."""
    names = [{path.relative_to(top) for path in top.rglob("*") if path.is_file()} for top in (ours, theirs)]
    if names[0] != names[1]:
        raise Defect(f"only in one: {names[0] ^ names[1]}")
    for name in names[0]:
        mine, other = ((top / name).read_bytes().replace(str(top).encode(), b"FOLDER") for top in (ours, theirs))
        if mine != other and name.suffix != ".log":
            raise Defect(f"{name} differs")


def killed(command: Command, rng: random.Random, folder: pathlib.Path) -> int:
    """Kills a command at random times until it comes to its end; the number of kills."""
    expected, seconds = reference(command, folder)
    work, kills = pathlib.Path(tempfile.mkdtemp(dir=folder)), 0
    while True:
        process = start(command.line(work), folder)
        number = rng.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
        while not takes_signals(process) and process.poll() is None:
            time.sleep(0.001)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(rng.uniform(0, seconds if kills < 6 else 3 * seconds))
        if process.poll() is not None:
            judge(process, (0,), command.last)
            break
        process.send_signal(number)
        kills += 1
        if number == signal.SIGKILL:
            process.wait(PATIENCE)
        else:
            again = number == signal.SIGINT and rng.random() < 0.3
            if again:  # at once
                time.sleep(rng.uniform(0, 0.2))
                process.send_signal(number)
            judge(process, (0, 2, 130, 143), f"interrupted|saving after|{command.last}")
    command.compare(work, expected)
    shutil.rmtree(work)
    return kills


def run_of(name: str, arguments: list[str]) -> Command:
    return Command(name, lambda work: ["routed.main", *arguments, f"--workdir={work}"], compare)


def kill_gaussian(rng: random.Random, folder: pathlib.Path) -> int:
    """Kills the headline of the Gaussian bench, small."""
    return killed(run_of("gaussian", GAUSSIAN), rng, folder)


def kill_t5(rng: random.Random, folder: pathlib.Path) -> int:
    """Kills the T5, small."""
    return killed(run_of("t5", [*T5, f"--config.data.cache={folder / 'text'}"]), rng, folder)


def kill_decoder(rng: random.Random, folder: pathlib.Path) -> int:
    """Kills a decoder of two phases that writes traces."""
    return killed(run_of("decoder", [*DECODER, f"--config.data.cache={folder / 'words'}"]), rng, folder)


def kill_suite(rng: random.Random, folder: pathlib.Path) -> int:
    """Kills a quick score card."""
    line = ["routed.suite", "linear", "--quick"]

    def compare_cards(ours: pathlib.Path, theirs: pathlib.Path) -> None:
        cards = [json.loads((folder / "card.json").read_text("utf-8")) for folder in (ours, theirs)]
        for card in cards:  # seconds are measured anew
            card["cost"] = {key: value for key, value in card["cost"].items() if not key.startswith("seconds")}
        if cards[0] != cards[1]:
            raise Defect("card.json differs")

    return killed(Command("card", lambda work: [*line, f"--workdir={work}"], compare_cards, ""), rng, folder)


def kill_trace(rng: random.Random, folder: pathlib.Path) -> int:
    """Kills the page of a decoder's traces."""
    traced, _ = reference(run_of("decoder", [*DECODER, f"--config.data.cache={folder / 'words'}"]), folder)
    one = min(path.parent for path in traced.rglob("trace.json"))
    line = ["routed.trace", "report", str(one)]
    return killed(Command("trace", lambda work: [*line, f"--out={work / 'page.html'}"], same_files, ""), rng, folder)


def kill_docs(rng: random.Random, folder: pathlib.Path) -> int:
    """Kills the pages of results while they take another run in the place of an older one."""
    new, _ = reference(run_of("gaussian", GAUSSIAN), folder)
    older, _ = reference(run_of("older/gaussian", [*GAUSSIAN, "--config.seed=7"]), folder)

    def line(docs: pathlib.Path) -> list[str]:
        if not (docs / "data").exists():
            judge(start(["routed.report", f"--docs={docs}", str(older)], folder), (0,), "")
        return ["routed.report", f"--docs={docs}", str(new)]

    return killed(Command("docs", line, same_files, ""), rng, folder)


def full_disk(rng: random.Random, folder: pathlib.Path) -> int:
    """A disk of its own that gets full at a random place, then room, then the same command. Root only."""
    expected, _ = reference(run_of("gaussian", GAUSSIAN), folder)
    size = sum(file.stat().st_size for file in expected.rglob("*") if file.is_file())
    disk = pathlib.Path(tempfile.mkdtemp(dir=folder))
    room = int(size * rng.uniform(0.02, 1.3)) >> 10
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room}k", "soak", disk], check=True)
    try:
        line = run_of("gaussian", GAUSSIAN).line(disk / "work")
        process = start(line, folder)
        said = process.communicate(timeout=20 * PATIENCE)[1]
        full = process.returncode == 2 and re.search(r"error: disk full while writing .*", said.strip().split("\n")[-1])
        if "Traceback" in said or not (full or process.returncode == 0):
            raise Defect(f"{room} KiB: exit {process.returncode}: {said[-1500:]}")
        if list(disk.rglob("*.writing")):
            raise Defect(f"{room} KiB: left {[str(path) for path in disk.rglob('*.writing')]}")
        subprocess.run(["mount", "-o", "remount,size=1g", disk], check=True)
        judge(start(line, folder), (0,), "finished")
        compare(disk / "work", expected)
    finally:
        subprocess.run(["umount", "-l", disk], check=False)
        disk.rmdir()
    return 1


# Commands in this process: a tiny experiment whose programs are compiled once

PROGRAMS: dict = {}


def tiny(workdir: pathlib.Path, folder: pathlib.Path) -> str:
    """Runs the tiny experiment; the line that it is refused with, nothing if it comes to its end."""
    from routed.contracts import UserError
    from tests.test_command_line import command, write_experiment

    remember_programs()
    try:
        command(f"--config={write_experiment(folder)}", f"--workdir={workdir}", "--verbosity=-3")
    except UserError as error:
        if "\n" in str(error):
            raise Defect(f"more than a line: {error}") from error
        return str(error)
    return ""


def remember_programs() -> None:
    from routed.engine import compilation, execution
    from routed.plan.runs import static_key

    def remembered(config, pool, runs, mesh):
        key = (static_key(config), pool, runs, mesh.size)
        if key not in PROGRAMS:
            PROGRAMS[key] = compilation.compile_group(config, pool, runs, mesh)
        return PROGRAMS[key]

    execution.compile_group = remembered


def finished(folder: pathlib.Path) -> pathlib.Path:
    """The workdir of the tiny experiment, and beside it `half`, which was stopped in its second batch."""
    from routed.engine import checkpoint

    if not (folder / "tiny").exists():
        tiny(folder / "tiny", folder)
        save, count = checkpoint.save, []

        def stopping(*args, **kwargs):
            save(*args, **kwargs)
            count.append(1)
            if len(count) == 5:
                raise KeyboardInterrupt

        checkpoint.save = stopping
        with contextlib.suppress(KeyboardInterrupt):
            tiny(folder / "half", folder)
        checkpoint.save = save
    return folder / "tiny"


def failed_write(rng: random.Random, folder: pathlib.Path) -> int:
    """The disk fails once, or ever after: files, folders, renames, flushes, checkpoints, events, tables, the report."""
    import errno

    expected, work = finished(folder), pathlib.Path(tempfile.mkdtemp(dir=folder)) / "work"
    code, place, lasting = (
        rng.choice((errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)),
        rng.randrange(90),
        rng.random() < 0.5,
    )
    calls = []

    def failing(function):
        def call(*args, **kwargs):
            if str(work) in str(args[0]) or isinstance(args[0], int):
                calls.append(function)
                if len(calls) == place or (lasting and len(calls) > place):
                    raise OSError(code, os.strerror(code))
            return function(*args, **kwargs)

        return call

    def opening(path, mode="r", *args, **kwargs):
        write = failing(builtins_open) if set(mode) & set("wax+") else builtins_open
        return write(path, mode, *args, **kwargs)

    builtins_open = builtins.open
    patched = [
        (os, "fsync"),
        (os, "replace"),
        (pathlib.Path, "write_bytes"),
        (pathlib.Path, "write_text"),
        (pathlib.Path, "mkdir"),
    ]
    originals = [(where, name, getattr(where, name)) for where, name in patched]
    try:
        builtins.open = opening
        for where, name, function in originals:
            setattr(where, name, failing(function))
        said = tiny(work, folder)
    finally:
        builtins.open = builtins_open
        for where, name, function in originals:
            setattr(where, name, function)
    if said and not re.search("disk full|cannot use", said):
        raise Defect(said)
    if again := tiny(work, folder):
        raise Defect(f"after {said!r}: {again}")
    compare(work, expected)
    shutil.rmtree(work.parent)
    return 1


def spoil(path: pathlib.Path, rng: random.Random) -> str:
    """Damages a file in one of the ways that disks and people know."""
    content = bytearray(path.read_bytes())
    how = rng.choice(("flipped", "flipped", "cut", "empty", "folder", "garbage", "missing", "longer"))
    if how == "flipped" and content:
        for _ in range(rng.choice((1, 1, 3, 40))):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.unlink()
    if how == "folder":
        (path / "inner").mkdir(parents=True)
    elif how != "missing":
        new = {
            "cut": content[: rng.randrange(len(content) + 1)],
            "empty": b"",
            "garbage": rng.randbytes(200),
            "longer": content + b"x",
        }
        path.write_bytes(new.get(how, content))
    return how


def damaged_files(rng: random.Random, folder: pathlib.Path) -> int:
    """Damages one to three files of a workdir, finished or not, and runs its command again."""
    expected = finished(folder)
    work = pathlib.Path(tempfile.mkdtemp(dir=folder)) / "work"
    shutil.copytree(expected if rng.random() < 0.4 else folder / "half", work)
    there = sorted(path for path in work.rglob("*") if path.is_file())
    chosen = rng.sample(there, rng.randint(1, 3))
    what = [f"{path.relative_to(work)}: {spoil(path, rng)}" for path in chosen if path.is_file()]
    said = tiny(work, folder)
    if said and not any(path.name in said for path in chosen):
        raise Defect(f"{what}: {said}")
    if not said:
        compare(work, expected, maps=not any(path.suffix == ".npz" for path in chosen))  # damaged maps are lost
    shutil.rmtree(work.parent)
    return 1


def edit_config(work: pathlib.Path, rng: random.Random) -> str:
    """Changes, removes or adds a value of config.json, with the digest as it was."""
    path = work / "config.json"
    content = json.loads(path.read_text("utf-8"))
    inner = content["config"] if rng.random() < 0.5 else content
    key = rng.choice(sorted(inner))
    value = rng.choice(
        (None, 0, -1, 7, 0.5, float("nan"), 1e300, True, "x", "<script>", "../..", "gmm:smoke", [], {}, [1])
    )
    if rng.random() < 0.15:
        del inner[key]
    else:
        inner[key] = value
    path.write_text(json.dumps(content), "utf-8")
    return f"config.json {key}={value!r}"


def edit_rows(work: pathlib.Path, rng: random.Random) -> str:
    """Changes the rows of both copies of the table, as another tool writes them."""
    import numpy as np
    import pandas as pd

    edits = {
        "half the loss of an arm": lambda t: t.assign(**{"test/loss": t["test/loss"].where(t.arm != "learned", 0.5)}),
        "a seed's rows twice": lambda t: pd.concat([t, t[t.seed == t.seed.min()]]),
        "a last evaluation is gone": lambda t: t[~((t.seed == t.seed.min()) & (t.step == t.step.max()))],
        "arms change places": lambda t: t.assign(arm=t.arm.replace({"learned": "frozen", "frozen": "learned"})),
        "NaN losses": lambda t: t.assign(**{"test/loss": np.nan}),
        "a column less": lambda t: t.drop(columns=[rng.choice([*t])]),
        "keys of strangers": lambda t: t.assign(run="x" + t.run),
        "no rows": lambda t: t.iloc[:0],
        "texts for numbers": lambda t: t.assign(**{"test/loss": t["test/loss"].astype(str)}),
        "an unknown arm": lambda t: t.assign(arm="<script>alert(1)</script>"),
    }
    name = rng.choice([*edits])
    for path in (work / "results.parquet", work / ".results.copy.parquet"):
        if path.exists():
            edits[name](pd.read_parquet(path)).to_parquet(path, index=False)
    return f"results.parquet: {name}"


def edit_maps(work: pathlib.Path, rng: random.Random) -> str:
    """Changes the arrays of the maps: other values or other shapes."""
    import numpy as np

    arrays, flat = dict(np.load(work / "routing.npz")), rng.random() < 0.5
    np.savez(work / "routing.npz", **{k: np.zeros(3, v.dtype) if flat else np.ones_like(v) for k, v in arrays.items()})
    return "routing.npz"


def replace_path(work: pathlib.Path, rng: random.Random) -> str:
    """Puts a file, a folder, a loop or nothing in the place of a file or a folder of the workdir."""
    names = (*sorted(path.name for path in work.iterdir()), "checkpoints", "results", "traces", ".lock")
    path, how = work / rng.choice(names), rng.choice(("nothing", "file", "folder", "loop", "elsewhere"))
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if how == "file":
        path.write_text("x", "utf-8")
    elif how == "folder":
        (path / "inner").mkdir(parents=True)
    elif how in ("loop", "elsewhere"):
        path.symlink_to(path.name if how == "loop" else work.parent / "elsewhere")
    return f"{path.name}: {how}"


def edited_workdirs(rng: random.Random, folder: pathlib.Path) -> int:
    """Edits a finished workdir as people do; its command and its report refuse that, or give what they gave before."""
    from routed.contracts import UserError
    from tests.test_command_line import reported, write_experiment

    expected = finished(folder)
    work = pathlib.Path(tempfile.mkdtemp(dir=folder)) / "work"
    shutil.copytree(expected, work)
    what = rng.choice((edit_config, edit_config, edit_rows, edit_rows, edit_maps, replace_path, replace_path))(
        work, rng
    )
    said = ""
    if again := rng.random() < 0.5:
        said = tiny(work, folder)
    else:
        try:
            reported(work, f"--experiment={write_experiment(folder)}")
        except UserError as error:
            said = str(error)
    if "\n" in said or len(said) > 2500:
        raise Defect(f"{what}: {said}")
    if not said and (again or (work / "results.parquet").is_file()):
        try:
            compare(work, expected, maps="routing.npz" not in what)
        except Defect as defect:
            raise Defect(f"{what}, {'the command' if again else 'its report'} said nothing: {defect}") from defect
    shutil.rmtree(work.parent)
    return 1


def damaged_cache(rng: random.Random, folder: pathlib.Path) -> int:
    """Damages entries of the token cache; what is loaded must be what was made."""
    import numpy as np

    from routed.plan.config import base
    from routed.settings.tree import override
    from routed.tasks import text

    data = {"data.name": "artificial", "data.languages": ("qaa",), "data.vocabulary": 300, "data.input_length": 32}
    cache = pathlib.Path(tempfile.mkdtemp(dir=folder))
    if not (folder / "cache").exists():
        text.load(override(base(), data | {"data.cache": str(folder / "cache")}).data)
    shutil.copytree(folder / "cache", cache, dirs_exist_ok=True)
    expected = text.load(override(base(), data | {"data.cache": str(folder / "cache")}).data)
    what = [f"{path.suffix}: {spoil(path, rng)}" for path in rng.sample(sorted(cache.iterdir()), rng.randint(1, 4))]
    found = text.load(override(base(), data | {"data.cache": str(cache)}).data)
    for ours, theirs in zip((*found.train, *found.validation), (*expected.train, *expected.validation), strict=True):
        if not np.array_equal(ours, theirs) or found.digest != expected.digest:
            raise Defect(f"{what}: other tokens")
    shutil.rmtree(cache)
    return 1


def shards(rng: random.Random, folder: pathlib.Path) -> int:
    """A folder of mC4 with shards of any kind: loaded, or refused in a line."""
    from routed.contracts import UserError
    from routed.plan.config import base
    from routed.settings.tree import override
    from routed.tasks import text

    place = pathlib.Path(tempfile.mkdtemp(dir=folder))
    good = {"text": "in the beginning was the word and the word was long. " * rng.choice((1, 20))}
    lines = (
        json.dumps(good).encode(),
        b"[" * 200_000,
        b"",
        b"null",
        b'{"text": 3}',
        b"\xff",
        b'{"text": "\\ud800"}',
        b"x" * 2_000_000,
    )
    for stem in ("en", "en-validation", rng.choice(("de", "\N{GREEK SMALL LETTER ALPHA}", "a b", '"><script>'))):
        for index in range(2 if stem == "en" else 1):
            path = place / f"c4-{stem}.tfrecord-{index:05d}-of-{2 if stem == 'en' else 1:05d}.json.gz"
            chosen = rng.choices(lines, weights=(30, 1, 1, 1, 1, 1, 1, 1), k=rng.choice((0, 1, 40)))
            path.write_bytes(gzip.compress(b"\n".join(chosen), 1))
            if rng.random() < 0.3:
                spoil(path, rng)
            elif rng.random() < 0.1:
                path.unlink()
                path.symlink_to(path)
    changes = {
        "data.name": "mc4_jsonl", "data.directory": str(place), "data.cache": str(place / "cache"),
        "data.vocabulary": 300, "data.input_length": 32, "data.tokens": rng.choice(("bytes", "train")),
        "data.damaged": rng.choice(("skip", "refuse")), "data.languages": rng.choice(((), ("en",))),
    }  # fmt: skip
    try:
        text.load(override(base(), changes).data)
    except UserError as error:
        if "\n" in str(error):
            raise Defect(str(error)) from error
    shutil.rmtree(place)
    return 1


# Settings


NUMBERS = (
    0,
    1,
    2,
    3,
    5,
    7,
    8,
    16,
    31,
    64,
    1000,
    4096,
    10**5,
    10**6,
    10**8,
    2**31 - 1,
    2**31,
    2**63,
    10**13,
    10**30,
    -1,
)
REALS = (
    0.0,
    1e-300,
    1e-37,
    1e-10,
    1e-3,
    0.1,
    0.5,
    0.999999,
    1.0,
    1.25,
    3.0,
    100.0,
    1e6,
    1e18,
    1e38,
    1e39,
    1e300,
    -0.5,
    -1e300,
)
FILES = sorted(path.name for path in (ROOT / "experiments").glob("*.py"))


def drawn(key: str, value: object, rng: random.Random) -> str:
    """A random text for a setting, of its type."""
    from routed.plan.config import CHOICES

    if isinstance(value, bool):
        return rng.choice(("true", "false"))
    if isinstance(value, int):
        return str(rng.choice(NUMBERS) if rng.random() < 0.6 else max(0, value + rng.randint(-3, 3)))
    if isinstance(value, float):
        return repr(rng.choice(REALS) if rng.random() < 0.7 else value * rng.choice((0.5, 2.0)))
    if isinstance(value, tuple):
        return ",".join(drawn(key, value[0] if value else "x", rng) for _ in range(rng.choice((0, 1, 2, 3))))
    return rng.choice(
        [*CHOICES[key].parts] if key in CHOICES else ["", "x", "y" * 3000, "train", "bytes", "linear", "class"]
    )


def settings(rng: random.Random, folder: pathlib.Path) -> int:
    """One to three random settings of a random figure, at some points: refused, or planned, compiled and stepped."""
    from routed.contracts import UserError
    from routed.engine import devices, limits
    from routed.engine.execution import make_groups
    from routed.plan import checks, experiment
    from routed.plan.runs import plan_runs
    from routed.settings.tree import flatten

    file, base = rng.choice(FILES), ["seeds=1", "mesh.run=1"]
    module = experiment.load(str(ROOT / "experiments" / file))
    spec = f"{ROOT / 'experiments' / file}:{rng.choice([*module.FIGURES])},smoke"
    limits.memory = lambda mesh: MEMORY
    base += [f"data.cache={folder / 'text'}"] if file.startswith("t5") else []

    def planned(changes: list[str]) -> tuple:
        _, config = experiment.configure(spec, base + changes)
        checks.validate(config)
        sweep = experiment.figure_of(module, config).sweep(config)
        sweep = tuple(rng.sample(sweep, min(2, len(sweep))))
        checks.validate_sweep(sweep)
        return config, plan_runs(config, sweep, [text.partition("=")[0] for text in changes])

    try:
        config, runs = planned([])
        flat = flatten(config)
        keys = {key for run in runs for key in flatten(run.config)} & flat.keys() - {
            "data.cache",
            "name",
            "scale",
            "figure",
        }
        chosen = rng.sample(sorted(keys), rng.choice((1, 1, 2, 3)))
        changes = [f"{key}={drawn(key, flat[key], rng)}" for key in chosen]
        told(f"{spec} {changes}")
        config, runs = planned(changes)
        mesh = devices.make_mesh(config)
        step(rng.choice(make_groups(runs, mesh)), mesh)
    except UserError as error:
        if "\n" in str(error) or len(str(error)) > 2500:
            raise Defect(str(error)) from error
    return 1


def step(group, mesh) -> None:
    """Compiles a group and takes a step and an evaluation."""
    import jax
    import numpy as np

    from routed.engine.compilation import compile_group, stack_traced
    from routed.engine.limits import steps_fed
    from routed.plan.config import problem_of, traced

    compiled, config, count = compile_group(group.config, group.pool, group.size, mesh), group.config, group.size
    problem = problem_of(config)
    seeds = compiled.place(np.zeros(count, np.uint32))
    values = compiled.place(stack_traced([traced(run.config) for run in (group.runs * count)[:count]]))
    shared = compiled.place_shared(problem.shared_arrays(config))
    worlds, states = compiled.start(seeds, values, shared)
    mine, rows = compiled.local
    fed = problem.feed(config, 0, rows)(0, steps_fed(config))
    feed = compiled.place_feed(jax.tree.map(lambda a: np.stack([a] * (mine.stop - mine.start)), fed))
    told("stepping")
    active, one = compiled.place(np.ones(count, bool)), compiled.place_shared(np.int32(1))
    states = compiled.advance(active, one, seeds, values, worlds, states, feed, shared)
    jax.block_until_ready(compiled.record(active, seeds, values, worlds, states, shared))


def told(what: str) -> None:
    """For the parent, should this process die."""
    print(f"SOAK {what}", file=sys.stderr, flush=True)


# Trials, each in a process that may die

TRIALS = {
    function.__name__: function
    for function in (
        kill_gaussian, kill_t5, kill_decoder, kill_suite, kill_trace, kill_docs,
        full_disk, failed_write, damaged_files, edited_workdirs, damaged_cache, shards, settings,
    )
}  # fmt: skip


def worker(name: str, first: int, until: float, folder: str, answers) -> None:
    """Trials of one class, from number `first` on: sends (number, None) before each, and (tried, defect) after it."""
    os.chdir(ROOT)
    sys.stderr = open(pathlib.Path(folder) / f"{name}.log", "w", encoding="utf-8")  # noqa: SIM115
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"  # compile faster
    import jax
    from absl import logging

    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_compilation_cache_dir", f"{folder}/programs")
    logging.set_verbosity(-3)
    number, parent = first, os.getppid()
    while time.time() < until and os.getppid() == parent:  # whoever counts may be killed
        answers.put((number, None))
        try:
            answers.put((TRIALS[name](random.Random(f"{name} {number}"), pathlib.Path(folder)), ""))
        except Defect as defect:
            answers.put((1, str(defect)))
        except BaseException:
            answers.put((1, traceback.format_exc()[-2500:]))
        jax.clear_caches()
        number += 1


def soak(name: str, first: int, seconds: float, folder: pathlib.Path) -> None:
    """Trials of one class for so many seconds; each is kept as a line of trials.jsonl as soon as it is over."""
    context, until, number = multiprocessing.get_context("spawn"), time.time() + seconds, first
    patience = (10 if name.startswith(("kill", "full")) else 2) * PATIENCE

    def keep(tried: int, defect: str) -> None:
        with open(folder / "trials.jsonl", "a", encoding="utf-8") as file:
            print(json.dumps({"class": name, "number": number, "tried": tried, "defect": defect}), file=file)

    while time.time() < until:
        answers = context.Queue()
        process = context.Process(target=worker, args=(name, number, until, str(folder), answers))
        process.start()
        begun = time.time()
        while process.is_alive() or not answers.empty():
            try:
                first_word, defect = answers.get(timeout=1)
            except queue.Empty:
                if time.time() > begun + patience:
                    process.kill()
                continue
            begun = time.time()
            if defect is None:
                number = first_word
            else:
                keep(first_word, defect)
                number += 1
        process.join()
        if process.exitcode:
            last = (folder / f"{name}.log").read_text("utf-8")[-600:]
            slow = process.exitcode == -signal.SIGKILL and last.endswith("SOAK stepping\n")  # a step may take its time
            keep(1, "" if slow else f"died ({process.exitcode}) at {last}")
            number += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--only", default=",".join(TRIALS), help="classes, separated by commas")
    parser.add_argument(
        "--first", type=int, help="number of the first trial; default: behind the last one in the folder"
    )
    parser.add_argument("--folder", default="", help="keeps what is compiled, and the trials so far, for the next time")
    chosen = parser.parse_args()
    folder = pathlib.Path(chosen.folder or tempfile.mkdtemp(prefix="soak")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trials.jsonl").touch()
    names = chosen.only.split(",")
    for name in names:
        first = (
            1 + max((one["number"] for one in trials(folder, name)), default=-1)
            if chosen.first is None
            else chosen.first
        )
        soak(name, first, chosen.seconds / len(names), folder)
    print(f"{'class':16} {'tried':>6} {'defects':>8}")
    found = {name: trials(folder, name) for name in TRIALS}
    for name, done in found.items():
        for one in done:
            if one["defect"]:
                print(f"DEFECT --only {name} --first {one['number']}: {one['defect']}\n", file=sys.stderr)
        print(f"{name:16} {sum(one['tried'] for one in done):6} {sum(bool(one['defect']) for one in done):8}")
    sys.exit(any(one["defect"] for done in found.values() for one in done))


def trials(folder: pathlib.Path, name: str) -> list[dict]:
    lines = (folder / "trials.jsonl").read_text("utf-8").splitlines()
    return [one for one in map(json.loads, lines) if one["class"] == name]


if __name__ == "__main__":
    main()
