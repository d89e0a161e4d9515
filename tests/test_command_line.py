"""The command line: what the user can get wrong ends in one line that names it and says what to do."""

import errno
import inspect
import itertools
import json
import logging
import os
import pathlib
import re
import resource
import subprocess
import sys

import jax
import pandas as pd
import pytest
from absl import flags

from routed import main, report
from routed.contracts import UserError
from routed.engine import devices, jax_flags, limits
from routed.experts import EXPERTS
from routed.layer.auxiliary import AUXILIARY
from routed.metrics.router import METRICS
from routed.plan import experiment, runs
from routed.plan.arms import ARMS
from routed.plan.workdir import default_workdir
from routed.settings.tree import override, parse
from routed.system import commands, files, hosts, stored, supervisor
from routed.system.commands import COMMANDS
from routed.system.experiments import packaged
from routed.tasks import TASKS
from routed.training.task_losses import TASK_LOSSES
from tests.patience import PATIENCE

#: 3 chunks of 10 steps; two arms of two seeds make 4 runs. Constant experts compile fastest.
EXPERIMENT = '''"""Is it {name}?"""

from routed.analysis.claims import FROZEN, LEARNED, Writer
from routed.plan import Figure, make_config

PROTOCOL = {{
    "seeds": 2, "steps": 30, "eval_every": 10, "batch_size": 8,
    "data.clusters": 4, "data.dim": 4, "data.target_dim": 2, "data.samples": 32, "data.test_samples": 64,
    "experts.name": "constant", "experts.count": 4, "mesh.run": 1, "mesh.runs_per_batch": 2,
}}
FIGURE = Figure(
    "Learned against frozen",
    claims=lambda config: (Writer("scaled", "test/loss").order("tiny.claim", "s", "", LEARNED, FROZEN),),
)
FIGURES = {{"": FIGURE, "other": FIGURE}}
SCALES = dict.fromkeys(("smoke", "default", "paper"), lambda config: {{}})


def get_config(arg=None):
    return make_config("{name}", arg, FIGURES, PROTOCOL, SCALES)
'''


def write_experiment(folder, name="tiny"):
    """An experiment file in `folder`."""
    path = folder / f"{name}.py"
    path.write_text(EXPERIMENT.format(name=name))
    return path


def command(*arguments):
    """Runs the command in this process, with the flags as they were before."""
    flags.FLAGS.unparse_flags()
    try:
        main.main(main.parse_flags(["routed", *map(str, arguments)]))
    finally:
        flags.FLAGS.unparse_flags()
        main._OVERRIDES.clear()


def reported(*arguments):
    """Runs `routed report` in this process, with the flags as they were before."""
    flags.FLAGS.unparse_flags()
    try:
        report.main(commands.parse_flags(["report", *map(str, arguments)], report))
    finally:
        flags.FLAGS.unparse_flags()


def describe(folder, change):
    """Changes what config.json says, with the digest that a command would have given it."""
    file = folder / "config.json"
    content = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps(stored.sealed(change(content) or content)), "utf-8")


def refusal(*arguments):
    """What the command is refused with."""
    with pytest.raises(UserError) as caught:
        command(*arguments)
    text = str(caught.value)
    assert "\n" not in text
    return text


def process(*arguments, **options):
    """The command as a process of its own, finished."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=PATIENCE, **options
    )


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """The path of an experiment; nothing may be written outside of `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    return write_experiment(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--config.experts.cout=8"], ["'experts.cout'", "did you mean 'experts.count'"]),
        (["--config.experts=8"], ["unknown config key 'experts'"]),
        (["--config.steps"], ["--config.steps", "expected --config.KEY=VALUE"]),
        (["--config.steps=true"], ["steps=true", "expected int"]),
        (["--config.steps=2.5"], ["steps=2.5", "expected int"]),
        (["--config.steps", "many"], ["steps=many", "expected int"]),
        (["--config.router.frozen=1"], ["router.frozen=1", "true or false"]),
        (["--config.router.learning_rate=inf"], ["router.learning_rate=inf", "finite"]),
        (["--config.router.learning_rate=-1"], ["router.learning_rate=-1.0", "must be in [0.0, 10000.0]"]),
        (["--config.router.learning_rate=1e5"], ["router.learning_rate=100000.0", "must be in [0.0, 10000.0]"]),
        (["--config.optimizer.weight_decay=1e8"], ["optimizer.weight_decay=100000000.0", "must be in [0.0, 10000.0]"]),
        (["--config.losses.balance=1e20"], ["losses.balance=1e+20", "must be in [0.0, 1000000.0]"]),
        (["--config.phases=,,,"], ["phases=,,,", "a value is missing before a comma"]),
        (["--shard=0/2"], ["--shard=0/2", "I from 1 to N"]),
        (["--topology=1e38", "--list"], ["--topology=1e38: without effect, as --list=figures runs nothing"]),
        (["--list", "--config=gmm_router", "--sweep=steps=1,2"], ["--sweep=steps=1,2: without effect"]),
        (["--list=settings", "--config=gmm_router", "--dry_run"], ["--dry_run: without effect", "--list=settings"]),
        (["--join_seconds=-1", "--list"], ["join_seconds", "-1"]),
        (["--config.optimizer.momentum=1"], ["optimizer.momentum=1.0", "[0, 1)"]),
        (["--config.experts.count=0"], ["experts.count=0", "at least 1"]),
        (["--config.selection.eval.k=5"], ["selection.eval.k=5", "experts.count=4", "lower selection.eval.k"]),
        (["--config.steps=3000000000", "--config.eval_every=3000000000"], ["eval_every=3000000000", "2^31"]),
        (["--config.eval_every=7"], ["eval_every=7", "divide steps=30"]),
        (["--config.rates=tuned", "--config.tune.steps=15"], ["tune.steps=15", "multiple of eval_every=10"]),
        (["--config.rates=tuned", "--config.tune.steps=40"], ["tune.steps=40", "at most 30"]),
        (["--topology=v5e:2x4"], ["--topology=v5e:2x4", "add --dry_run"]),
        (["--topology=v5e", "--dry_run"], ["--topology=v5e", "a shape, such as v5e:2x4"]),
        (["--config.data.test_samples=66"], ["data.test_samples=66", "multiple of 4, the number of clusters"]),
        (["--config.data.target=linear"], ["data.target_dim=2", "set data.target_dim=1"]),
        (["--config.router.initial_entropy=2"], ["router.initial_entropy=2.0", "ln(experts.count)=1.386"]),
        (["--config.selection.name=top_k"], ["selection.renormalise=True", "router.frozen=true"]),
        (["--config.dispatch=gather"], ["dispatch='gather'", "sparse selection", "use 'dense'"]),
        (["--config.experts.name=mlb"], ["experts.name='mlb'", "mlp"]),
        (["--config.seeds=10001"], ["seeds=10001", "[1, 10000]"]),
        (["--config.rates=tuned", "--config.tune.seeds=1000000000"], ["tune.seeds=1000000000", "[1, 10000]"]),
        (
            ["--config.rates=tuned", f"--config.tune.multipliers={','.join('1' * 101)}"],
            ["tune.multipliers=", "at most 100"],
        ),
        (
            ["--config.rates=tuned", "--config.tune.router_multipliers=0.3,3"],
            ["tune.router_multipliers=", "one of them 1"],
        ),
        (
            ["--config.seeds=10000", f"--sweep=data.samples={','.join(map(str, range(8, 100)))}"],
            ["92 points", "seeds=10000"],
        ),
        (
            [f"--sweep=data.samples={','.join('8' * 1000)}", f"--sweep=steps={','.join('9' * 1001)}"],
            ["--sweep=steps=9,9", "1,001,000"],
        ),
        (["--config.data.dim=2147483648"], ["data.dim=2147483648", "below 2^31"]),
        (["--config.experts.count=2147483648"], ["experts.count=2147483648", "below 2^31"]),
        ([f"--config.data.dim={10**30}"], [f"data.dim={10**30}", "below 2^31"]),
        (["--config.stop.min_steps=2147483648", "--config.stop.rise=1"], ["stop.min_steps=2147483648", "below 2^31"]),
        (["--config.optimizer.warmup=2147483648"], ["optimizer.warmup=2147483648", "below 2^31"]),
        (["--config.batch_size=10000000000000"], ["batch_size=10000000000000", "below 2^31"]),
        (["--config.data.test_samples=9223372036854775808"], ["data.test_samples=9223372036854775808", "below 2^31"]),
        (["--config.data.separation=1e300"], ["data.separation=1e+300", "1e10"]),
        (["--config.router.init_scale=1e37"], ["router.init_scale=1e+37", "1e10"]),  # 1e38 and more come of it
        (["--config.data.separation=1e-300"], ["data.separation=1e-300", "1e-37"]),
        (["--config.data.test_samples=2147483644"], ["data.test_samples=2147483644", "GiB", "lower data.test_samples"]),
        (["--config.data.dim=100000000"], ["data.dim=100000000", "GiB", "lower data.dim"]),
        (["--config.experts.count=2000000000"], ["experts.count=2000000000", "GiB", "lower experts.count"]),
        (["--config.batch_size=2000000000"], ["batch_size=2000000000", "GiB", "lower batch_size"]),
        (
            ["--config.steps=2147483647", "--config.eval_every=1"],
            ["eval_every=1", "2,147,483,647 evaluations", "214748"],
        ),
        (["--config.experts.name=mlp", "--config.experts.depth=100000"], ["experts.depth=100000", "[1, 256]"]),
        ([f"--config.phases={','.join(['until=9'] * 33)}"], ["phases=", "at most 32"]),
        (["--config.mesh.run=2147483647"], ["mesh.run=2147483647", "65536"]),
        ([f"--config.data.target={'x' * 5000}"], ["data.target='xxx", "xxx...xxx", " characters)"]),
        ([f"--config.{'x' * 5000}=1"], ["unknown config key", "characters)"]),
        ([f"--config.arms={'x' * 5000}"], ["unknown arm 'xxx", "characters)"]),
        ([f"--workdir={'x' * 5000}"], ["file name too long", "characters)", "choose another --workdir"]),
        (["--config.seeds=2", "--config.seed=999999"], ["seeds=2", "tuning seeds"]),
        (["--config.arms=learned,frozn"], ["'frozn'", "did you mean 'frozen'"]),
        (["--config.arms="], ["arms=()", "at least one"]),
        (["--config.shared_streams=wolrd"], ["shared_streams=('wolrd',)", "world"]),
        (["--config.figure=other"], ["figure=other", ":FIGURE,SCALE"]),
        (["--config.mesh.run=9"], ["mesh.run=9", "8 devices"]),
        (["--config.data.samples=60000000"], ["data.samples=60000000", "1.12 GiB", "lower data.samples"]),
        (["--sweep=data.samples"], ["--sweep=data.samples", "KEY=v1,v2"]),
        (["--sweep=data.sample=8"], ["'data.sample'", "did you mean 'data.samples'"]),
        (["--sweep=data.samples=8,x"], ["data.samples=x", "expected int"]),
        (["--sweep=experts.count=4,0"], ["experts.count=0", "at least 1"]),
        (["--sweep=seed=0,1"], ["sweep key seed", "--config.seed"]),
        (["--sweep=steps=10,20", "--config.steps=30"], ["--config.steps and --sweep=steps", "drop one"]),
        (["--workdri=x"], ["'workdri'", "workdir"]),
        (["--dry_run=maybe"], ["dry_run", "maybe"]),
        (["steps=3"], ["'steps=3'", "--config=NAME", "--config.KEY=VALUE"]),
        (["--list=arms"], ["--list=arms", "figures|settings"]),
        (["--num_processes=2"], ["--num_processes=2: without effect", "add --coordinator=HOST:PORT"]),
        (["--join_seconds=2"], ["--join_seconds=2: without effect"]),
        (
            ["--coordinator=auto", "--process_id=0", "--join_seconds=2"],
            ["--process_id=0: without effect: add --coordinator=HOST:PORT"],
        ),
        (["--num_processes=2", "--process_id=0"], ["--num_processes=2 --process_id=0: without effect"]),
    ],
    ids=lambda value: " ".join(value)[:60] if value[0].startswith(("-", "s")) else "",
)
def test_a_mistake_is_named_with_its_fix(tiny, monkeypatch, arguments, parts):
    monkeypatch.setattr(
        limits, "memory", lambda mesh: 2**30
    )  # 60 million samples of 20 bytes take more than a third of it
    monkeypatch.setattr(runs, "RUNS", 1000)
    text = refusal(f"--config={tiny}", *arguments)
    assert all(part in text for part in parts), text
    assert len(text) < 2000


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("x" * 5000, ["no such file", " characters)"]),
        ("", ["--config is missing"]),
        ("tine.py", ["--config=tine.py: no such file", "did you mean 'tiny.py'"]),
        ("gmm_ruter", ["--config=gmm_ruter: no such file, nor", "t5_mc4", "did you mean 'gmm_router'"]),
        ("there/t5_mc4.py:smoke", ["there/t5_mc4.py: no such file (did you mean 't5_mc4'?)"]),
        ("loads.py", ["--config=loads.py: there.py: no such file"]),
        ("nowhere/tiny.py", ["nowhere/tiny.py: no such file"]),
        (".", ["no such file"]),
        ("tiny.py:othr", ["'othr'", "did you mean 'other'"]),
        ("tiny.py:smok", ["'smok'", "did you mean 'smoke'"]),
        ("tiny.py:other,papr", ["'papr'", "did you mean 'paper'"]),
        ("tiny.py:other,smoke,3", ["FILE[:FIGURE[,SCALE]]"]),
        ("notes.txt", ["notes.txt: not a Python file"]),
        ("empty.py", ["lacks FIGURES, get_config"]),
        ("broken.py", ["does not import", "SyntaxError"]),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_a_wrong_experiment_is_named_with_its_fix(tiny, spec, parts):
    loads = "from routed.plan import experiment; experiment.load('there.py')"
    for name, text in {"notes.txt": "hello", "empty.py": "", "broken.py": "def", "loads.py": loads}.items():
        tiny.with_name(name).write_text(text)
    text = refusal(f"--config={spec}")
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("c.stepz = 3", ["stepz"]),
        ("c.unlock().data.sampels = 3", ["'data.sampels'", "did you mean 'data.samples'"]),
        ("c.steps = True", ["steps=True", "expected int, got bool"]),
        ("c.steps = '3'", ["steps", "int"]),
        ("c.router.learning_rate = float('inf')", ["router.learning_rate=inf", "[0.0, 10000.0]"]),
    ],
)
def test_an_experiment_file_cannot_bend_the_config(tiny, line, parts):
    """ConfigDict itself takes a bool for an int, and new keys while it is unlocked."""
    text = tiny.read_text().replace("return make_config(", "c = make_config(")
    tiny.write_text(f"{text}    {line}\n    return c\n")
    text = refusal(f"--config={tiny}")
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        (
            '.order("tiny.claim", "s", "", LEARNED, FROZEN)',
            '.oder("tiny.claim", "s", "", LEARNED, FROZEN)',
            ["claims: unknown kind 'oder' (did you mean 'order'?)"],
        ),
        ("FIGURES = ", 'FIGURE = FIGURE._replace(plots=lambda config: ({"kind": "curvs", "name": "f"},))\nFIGURES = ',
         ["figure f: unknown kind 'curvs' (did you mean 'curves'?)"]),
    ],
)  # fmt: skip
def test_what_the_page_cannot_say_is_refused_before_anything_trains(tiny, old, new, parts):
    text = tiny.read_text()
    assert old in text
    tiny.write_text(text.replace(old, new))
    told = refusal(f"--config={tiny}", "--workdir=out")
    assert all(part in told for part in parts), told
    assert not (tiny.parent / "out").exists()


#: part -> lines of a file that fill in its table, a setting that asks for it, and the refusal.
SHAPES = {
    "expert": (
        'EXPERTS["own"] = EXPERTS["constant"]._replace(make=lambda own, outputs: Constant(1))',
        "experts.name=own",
        "experts.name='own': it makes [T, 1]; must be outputs [T, 2]",
    ),
    "task": (
        'TASKS["own"] = TASKS["gmm"]._replace(draw=lambda *a: TASKS["gmm"].draw(*a),'
        ' batch=lambda *a: (b := TASKS["gmm"].batch(*a))._replace(y=b.y[:, :1]))',
        "data.name=own",
        "data.name='own': its test samples have y [64, 1]: must be [64, 2], as `outputs` says",
    ),
    "task loss": (
        'TASK_LOSSES["own"] = TASK_LOSSES["squared"]._replace(value=lambda prediction, y: (prediction - y) ** 2)',
        "loss=own",
        "loss='own': it makes [64, 2]; must be [B], a loss a sample",
    ),
    "auxiliary loss": (
        'AUXILIARY["own"] = AUXILIARY["z"]._replace(value=lambda inputs: inputs.probs.max(1))',
        "losses.own=1",
        "auxiliary loss 'own' returns [8]; it must return one number, such as a mean",
    ),
    "metric": (
        'METRICS["router/own"] = Metric(lambda gate: gate.probs.mean(0), Column("own"))',
        "steps=30",
        "metric 'router/own' returns [4]; it must return one number, such as a mean",
    ),
}
TABLES = {"expert": EXPERTS, "task": TASKS, "task loss": TASK_LOSSES, "auxiliary loss": AUXILIARY, "metric": METRICS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "flags"),
    [*((part, ["--dry_run"]) for part in SHAPES), ("expert", ["--workdir=w"]), ("metric", ["--workdir=w"])],
)
def test_a_part_that_returns_another_shape_is_named(tiny, monkeypatch, part, flags):
    code, setting, text = SHAPES[part]
    name = "router/own" if part == "metric" else "own"
    monkeypatch.setitem(TABLES[part], name, next(iter(TABLES[part].values()), None))  # and removed afterwards
    monkeypatch.delitem(TABLES[part], name)
    imports = (
        "from routed.contracts import Column",
        "from routed.experts import EXPERTS",
        "from routed.experts.constant import Constant",
        "from routed.layer.auxiliary import AUXILIARY",
        "from routed.metrics.router import METRICS, Metric",
        "from routed.tasks import TASKS",
        "from routed.training.task_losses import TASK_LOSSES",
    )
    tiny.write_text(tiny.read_text().replace("PROTOCOL =", "\n".join((*imports, code, "PROTOCOL =")), 1))
    assert text in refusal(f"--config={tiny}", f"--config.{setting}", *flags)


@pytest.mark.slow
def test_an_error_of_a_users_code_is_the_first_line_and_its_trace_comes_behind(tiny):
    tiny.write_text(tiny.read_text() + '\nFIGURES[""] = FIGURES[""]._replace(sweep=lambda config: 1 / 0)\n')
    done = process("-m", "routed.main", f"--config={tiny}", "--dry_run")
    first, *rest = done.stderr.splitlines()
    assert done.returncode == 1 and first.endswith("error: ZeroDivisionError: division by zero")
    assert any(str(tiny) in line for line in rest)


def test_a_workdir_that_cannot_be_one(tiny):
    """A file in the way, a file above it."""
    assert "file exists, and a folder is needed" in refusal(f"--config={tiny}", f"--workdir={tiny}")
    assert "not a directory" in refusal(f"--config={tiny}", f"--workdir={tiny}/w")


@pytest.mark.parametrize(
    ("code", "part"),
    [
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission"),
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "free some"),
        (errno.EFBIG, "see ulimit -f"),
    ],
)
def test_errors_of_the_disk_say_what_to_do(tmp_path, monkeypatch, code, part):
    """Also wrapped, as Orbax wraps those of TensorStore."""

    def fail(*args):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match=part):
        files.write(tmp_path / "a", "text")
    assert not list(tmp_path.iterdir())  # half a file would keep a full disk full
    with pytest.raises(UserError, match=part), files.explained(tmp_path):
        try:
            fail()
        except OSError as error:
            raise ValueError("wrapped") from error
    with pytest.raises(KeyError), files.explained(tmp_path):
        raise KeyError("no error of the disk")


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    """As Lustre and NFS are mounted in places."""

    def fail(*about):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(files.fcntl, "flock", fail)
    said = r"workdir .* cannot be locked \(no locks available\), .* another --workdir, on a file system with locks"
    with pytest.raises(UserError, match=said), files.locked(tmp_path):
        pass


def test_processes_compare_every_setting_but_where_data_are(tiny, tmp_path, monkeypatch):
    """One that saves every 5 steps waits there for one that does not; caches are where each host has room."""
    (tmp_path / "other").mkdir()
    elsewhere, told = write_experiment(tmp_path / "other"), []
    elsewhere.write_text(tiny.read_text().replace('"seeds": 2', '"data.cache": "here", "seeds": 2'))
    monkeypatch.setenv(supervisor.MARK, "1")
    monkeypatch.setattr(hosts, "join", lambda *where: None)
    monkeypatch.setattr(hosts, "require_equal", lambda what, value, remedy: told.append(value))
    monkeypatch.setattr("routed.aot.this_machine.describe", lambda runs, mesh: "")
    line = "--coordinator=h:1", "--num_processes=2", "--process_id=0", "--dry_run"
    for file, changed in ((tiny, ()), (elsewhere, ()), (tiny, ("--config.checkpoint.every=5",))):
        command(f"--config={file}", *line, *changed)
    assert told[0] == told[1] != told[2]


def test_a_part_of_a_sweep_has_its_traces_too(tiny, monkeypatch):
    """2 arms of 2 seeds, all in the one part: 4 runs, whose traces no page follows."""
    asked = []
    monkeypatch.setattr("routed.engine.execution.execute", lambda *about: pd.DataFrame())
    monkeypatch.setattr("routed.trace.from_runs.write", lambda workdir, runs: asked.append(len(runs)))
    command(f"--config={tiny}", "--shard=1/1", "--config.trace.every=1", "--workdir=w")
    assert asked == [4]


def named(experiment, config, overrides=(), sweeps=(), shard=""):
    """The default workdir of a command."""
    for text in overrides:
        key, _, value = text.partition("=")
        config = override(config, {key: parse(config, key, value)})
    return default_workdir(experiment, config, [*overrides], [*sweeps], shard)


def test_default_workdir_names_what_was_changed(small):
    config = override(small, {"name": "n", "figure": "f", "scale": "smoke"})
    assert named("gmm_router", small) == "runs/gmm_router"
    assert named("gmm_router:f", config, ["seeds=1", "data.directory=/far/away"]) == "runs/gmm_router-f-smoke-seeds=1"
    asked = ["router.frozen=true", "arms=('learned', \"frozen\")", "data.separation=-.50"]
    wanted = "runs/gmm_router-arms=learned+frozen-data.separation=-0.5-router.frozen=true"
    assert named("gmm_router", small, asked) == named("gmm_router", small, asked[::-1]) == wanted
    swept = ["experts.count=4,8", "steps=100"]
    assert named("gmm_router", small, [], swept, "2/8") == "runs/gmm_router-experts.count=4,8-steps=100,-shard2of8"


def test_awkward_workdirs_are_cleaned_and_end_with_a_hash(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    phases = ["phases=until=500 train=router,train=router+experts"]
    found = named("gmm_router", small, phases)
    assert re.fullmatch(r"runs/gmm_router-phases=until=500_train=router\+train=router\+experts~[0-9a-f]{8}", found)
    assert len(named("gmm_router", small, [f"arms={','.join(ARMS)}"])) < 100
    # A user's file beside the command and below it; one like `routed`'s own, one elsewhere, one with an awkward name.
    assert named(f"{tmp_path}/mine.py", small) == "runs/mine"
    assert named(f"{tmp_path}/more/mine.py:f", small) == "runs/more.mine"
    for file in (f"{tmp_path}/gmm_router.py", "/elsewhere/mine.py", f"{tmp_path}/my mine.py"):
        assert re.fullmatch(r"runs/\w+~[0-9a-f]{8}-shard1of2", named(file, small, shard="1/2"))


def test_two_commands_never_share_a_workdir(small):
    """Every word of at most two letters: as figure, value, both values of a tuple, and two points of a sweep."""
    words = ["", *map("".join, itertools.chain("a1-+", itertools.product("a1-+", repeat=2)))]
    found = [named("gmm_router", small, ["steps=7"]), named("gmm_router", small, [], ["steps=7"])]
    for first, second in itertools.product(words, words):
        config = override(small, {"figure": first, "name": second, "shared_streams": (first, second)})
        found.append(default_workdir("gmm_router", config, ["name"], [], ""))
        found.append(default_workdir("gmm_router", override(config, {"figure": ""}), ["shared_streams"], [], ""))
        found.append(default_workdir("gmm_router", small, [], [f"name={first},{second}"], ""))
    assert len({*found}) == len(found) == 2 + 3 * 21**2
    assert all(re.fullmatch(r"runs/[\w.,=+~-]+", name, re.ASCII) for name in found)


def test_experiments_are_found_by_name_from_anywhere(tmp_path, monkeypatch):
    """A path as before, then `routed`'s own; one that loads another finds it beside itself."""
    (tmp_path / "a").mkdir()
    write_experiment(tmp_path / "a")
    loads = "from routed.plan import experiment\n\n"
    loads += "FIGURES = (tiny := experiment.load('tiny.py')).FIGURES\nget_config = tiny.get_config\n"
    (tmp_path / "a" / "more.py").write_text(loads)
    monkeypatch.chdir(tmp_path)
    assert experiment.configure("a/more.py:other,smoke", ["seeds=9"])[1].seeds == 9
    assert experiment.portable_spec("a/more.py:other") == f"{tmp_path}/a/more.py:other"
    own = packaged()
    assert experiment.find("gmm_router") == own["gmm_router"] and len(own) == len({*own.values()}) >= 11
    assert (
        experiment.portable_spec(f"{own['t5_mc4']}:fig5,smoke")
        == experiment.portable_spec("t5_mc4:fig5,smoke")
        == "t5_mc4:fig5,smoke"
    )
    write_experiment(tmp_path, "gmm_router")
    assert experiment.find("gmm_router.py").absolute() == tmp_path / "gmm_router.py"
    assert experiment.split("/a:b/c.py") == ("/a:b/c.py", "") and experiment.split("/a:b/c.py:d,e") == (
        "/a:b/c.py",
        "d,e",
    )


def test_lists_want_nothing_set(capsys, tmp_path, monkeypatch):
    """All experiments; the settings of one whose data are somewhere."""
    monkeypatch.chdir(tmp_path)
    command("--list")
    found = capsys.readouterr().out
    assert all(re.search(rf"^  {name} +\S", found, re.MULTILINE) for name in packaged())
    command("--config=t5_mc4", "--list=settings")
    assert "\ndata.directory = " in capsys.readouterr().out
    assert [*tmp_path.iterdir()] == []


def test_dry_run_writes_nothing(tiny, capsys, monkeypatch):
    text = lambda runs, mesh: f"{len(runs)} runs on {mesh.size} device"  # noqa: E731
    monkeypatch.setattr("routed.aot.this_machine.describe", text)
    command(f"--config={tiny}", "--dry_run", "--config.seeds=5", "--sweep=data.samples=8,16")
    assert capsys.readouterr().out == "20 runs on 1 device\n"  # 2 samples x 2 arms x 5 seeds
    assert {p.name for p in tiny.parent.iterdir()} <= {"tiny.py", "__pycache__"}


@pytest.mark.slow
def test_a_command_wins_over_the_sweep_of_a_figure(tiny, capsys, monkeypatch):
    """A claim at a point that is no longer there was not run."""
    tiny.write_text(tiny.read_text().replace("FROZEN),)", 'FROZEN, at={"data.samples": 16}),)').replace(
        '"Learned against frozen",',
        '"Learned against frozen", sweep=lambda config: ({"data.samples": 8}, {"data.samples": 16, "arms": '
        '("learned", "oracle")}),',
    ))  # fmt: skip
    text = lambda runs, mesh: str(sorted({(run.arm, run.config.data.samples) for run in runs}))  # noqa: E731
    monkeypatch.setattr("routed.aot.this_machine.describe", text)
    command(f"--config={tiny}", "--dry_run")
    assert capsys.readouterr().out == "[('frozen', 8), ('learned', 8), ('learned', 16), ('oracle', 16)]\n"
    command(f"--config={tiny}", "--dry_run", "--config.data.samples=32", "--config.arms=learned,frozen")
    assert capsys.readouterr().out == "[('frozen', 32), ('learned', 32)]\n"
    command(f"--config={tiny}", "--config.data.samples=32", "--config.steps=10", "--config.seeds=1")
    assert "NOT RUN" in capsys.readouterr().out
    (claim,) = json.loads(next((tiny.parent / "runs").glob("*/claims.json")).read_text())
    assert claim["verdict"] == "not run" and claim["ours"] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first_line", "argument", "part", "variables"),
    [
        ("raise ValueError('two\\nlines')", "--config.seeds=1", "does not import: ValueError: two lines", {}),
        ("", "--workdri=x", "workdir", {}),
        ("", "--dry_run", "Unable to initialize backend 'abacus'", {"JAX_PLATFORMS": "abacus"}),
        (
            "",
            "--dry_run",
            "invalid truth value 'perhaps' for environment 'JAX_ENABLE_X64'",
            {"JAX_ENABLE_X64": "perhaps"},
        ),
    ],
)
def test_the_process_ends_in_one_line(tiny, first_line, argument, part, variables):
    """Absl refuses the flags before it has set up the log; we refuse some, and JAX refuses its variables."""
    tiny.write_text(f"{first_line}\n{tiny.read_text()}")
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    found = process("-m", "routed.main", f"--config={tiny}", argument, env=os.environ | variables)
    assert found.returncode == 2
    assert re.fullmatch(r"\d\d:\d\d:\d\d error: .*\n", found.stderr) and part in found.stderr, found.stderr
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 10  # of the CPU, not of a busy clock


#: Runs a command that a signal meets: in the import of a module, in code that Python compiles on the spot, or anywhere.
KILLED = """
import os, runpy, signal, sys

class Meet:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.{signal})

sys.meta_path.insert(0, Meet())
sys.argv = ["main", {argument!r}]
if {module!r}:
    runpy.run_module("routed.{command}", run_name="__main__", alter_sys=False)
else:
    from routed import {command} as command
    command.main = lambda argv: exec("os.kill(os.getpid(), signal.{signal})", globals())
    command.run()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "number", "module"),
    [
        ("main", "SIGTERM", ""),
        ("main", "SIGINT", ""),
        ("main", "SIGINT", "absl.flags"),
        ("main", "SIGINT", "numpy"),
        ("main", "SIGTERM", "jax._src.core"),
        ("main", "SIGINT", "jax._src.core"),
        ("report", "SIGTERM", ""),
        ("report", "SIGINT", "absl.flags"),
    ],
)
def test_an_interruption_outside_of_training_ends_in_one_line(tiny, command, number, module):
    argument = {"main": "--config=tiny.py", "report": "."}[command]
    script = KILLED.format(module=module, signal=number, command=command, argument=argument)
    found = process("-c", script, cwd=tiny.parent)
    assert found.returncode == 130
    assert re.fullmatch(r"\d\d:\d\d:\d\d interrupted: the same command goes on .*\n", found.stderr), found.stderr


@pytest.mark.parametrize(
    ("name", "level", "shown"),
    [
        ("jax._src.xla_bridge", logging.INFO, False),
        ("jax._src.xla_bridge", logging.WARNING, True),
        ("absl", logging.INFO, True),
    ],
)
def test_of_jax_s_lines_only_warnings_are_shown(name, level, shown):
    assert commands._show(logging.LogRecord(name, level, "", 0, "no %s", ("TPU",), None)) == shown


def test_a_signal_when_python_has_put_its_handlers_away_changes_nothing():
    """What globals do when they are deleted comes after that: by default the process would end by the signal."""
    lines = """
import os, signal, sys
from routed.system import signals
class Last:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
last = Last()
signals.end_on_signals()
sys.exit(2)
"""
    assert subprocess.run([sys.executable, "-c", lines], timeout=PATIENCE).returncode == 2


@pytest.mark.slow
def test_a_full_standard_output_is_named(tiny):
    with open("/dev/full", "w") as full:
        found = subprocess.run(
            [sys.executable, "-m", "routed.main", f"--config={tiny}", "--list"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert found.returncode == 2
    assert re.fullmatch(
        r"\S+ error: the standard output takes nothing more \(No space left on device\).*\n", found.stderr
    )


@pytest.mark.slow
def test_any_locale_will_do(tiny):
    """A C locale, in which Python would read and write ASCII, and a document that has more."""
    tiny.write_text(tiny.read_text().replace("Is it tiny?", "Is it kleiner als üblich?"), "utf-8")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = process("-m", "routed.main", f"--config={tiny}", "--config.seeds=1", "--workdir=w", env=os.environ | plain)
    assert done.returncode == 0, done.stderr
    assert "kleiner als üblich?" in (tiny.parent / "w" / "report.html").read_text("utf-8")
    with pytest.raises(UserError, match="not UTF-8 in this locale: set PYTHONUTF8=1"):
        files.folder("w\udcc3\udcbc")  # as such a locale reads the name wü
    assert files.folder("~/w") == pathlib.Path.home() / "w"


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("jax_enable_x64", True),
        ("jax_random_seed_offset", 5),
        ("jax_default_prng_impl", "rbg"),
        ("jax_threefry_partitionable", False),
    ],
)
def test_what_would_change_every_number_is_refused(tiny, flag, value):
    """Also in a user's file, which is loaded after the first look."""
    before = jax.config.values[flag]
    tiny.write_text(f"import jax\njax.config.update({flag!r}, {value!r})\n{tiny.read_text()}")
    try:
        text = refusal(f"--config={tiny}", "--dry_run")
        assert text.startswith(f"{flag.upper()}={value} is set, which may change numbers, and no run records it"), text
        with pytest.raises(UserError):
            devices.split_host()
    finally:
        jax.config.update(flag, before)


def test_flags_of_modules_that_load_later_are_nobodys_setting(monkeypatch):
    """JAX's kernels for GPUs load JAX's own test tools, which register flags."""
    monkeypatch.setattr(jax_flags, "values", lambda: jax_flags.FIRST | {"test_targets": "", "jax_test_num_threads": 0})
    jax_flags.refuse_changed()


def test_flags_that_xla_cannot_read_are_named():
    """XLA would end the process."""
    with pytest.raises(UserError, match="XLA_FLAGS=--xla_nonsense=1: Unknown flag"):
        jax_flags.refuse_xla_flags(" --xla_nonsense=1")
    with pytest.raises(UserError, match="XLA_FLAGS=--xla_cpu_enable_fast_math=true may change numbers"):
        jax_flags.refuse_xla_flags("--xla_dump_to=x --xla_cpu_enable_fast_math=true")
    jax_flags.refuse_xla_flags(os.environ["XLA_FLAGS"])


@pytest.mark.slow
@pytest.mark.parametrize("module", ["routed.main", "routed.report", "routed.predict"])
def test_help_ends_well_shows_our_flags_only_and_loads_little(tmp_path, module):
    code = f"import sys, {module} as m\ntry: m.run()\nfinally: print({{'jax', 'numpy', 'pandas'}} & {{*sys.modules}})"
    found = process("-c", code, "--help", cwd=tmp_path, env=os.environ | {"COLUMNS": "80"})
    assert (found.returncode, found.stderr) == (0, "")
    *text, loaded = found.stdout.splitlines()
    flags_of = {
        "routed.main": {*re.findall(r'DEFINE_\w+\(\s*"(\w+)"', inspect.getsource(main))},
        "routed.report": {"accept_edits", "docs", "experiment", "findings", "out", "rejudge", "store"},
        "routed.predict": {"law", "points", "fit", "write"},
    }
    assert {line.split()[0][2:] for line in text if line.startswith("  --")} == flags_of[module]
    assert loaded == "set()" and max(map(len, text)) <= 80


@pytest.mark.slow
def test_the_command_has_commands(tmp_path):
    """Alone it says what there is; a flag means `run`; a word that is none is named."""
    script = "from routed.system.commands import run; run()"
    found = [process("-c", script, *words, cwd=tmp_path) for words in ([], ["-h"], ["rnu"], ["--workdri=x"], ["list"])]
    assert [one.returncode for one in found] == [0, 0, 2, 2, 0]
    assert found[0].stdout == found[1].stdout and all(f"  routed {word} " in found[0].stdout for word in COMMANDS)
    assert (
        found[2].stderr
        == "error: unknown command 'rnu'; known: run, list, report, findings, predict, trace, suite, bench; see "
        "routed --help\n"
    )
    assert "'workdri'" in found[3].stderr and "gmm_router  " in found[4].stdout
    closed = subprocess.run(f"{sys.executable} -c '{script}' | true", shell=True, capture_output=True, cwd=tmp_path)
    assert closed.stderr == b""


@pytest.mark.slow
def test_a_second_start_compiles_nothing_and_loads_nothing_of_text(tiny, tmp_path):
    """It gets every program from the workdir, or from a shared folder; no start loads what only text needs."""
    script = (
        "import json, sys, jax.monitoring as m\n"
        "seen = []\n"
        "m.register_event_listener(lambda name, **_: seen.append(name))\n"
        "from routed import main\n"
        "other = {'tensorflow_datasets', 'array_record', 'grain', 'tensorboardX'}\n"
        "try: main.run()\n"
        "finally: print(json.dumps({n: seen.count(f'/jax/compilation_cache/cache_{n}') for n in ('misses', 'hits')}\n"
        "    | {'other': [*other & {*sys.modules}]}), file=sys.stderr)\n"
    )
    settings_of_tests = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    own = {key: value for key, value in os.environ.items() if key not in settings_of_tests}
    shared = {"JAX_COMPILATION_CACHE_DIR": f"{tmp_path}/first/compiled"}
    counts = []
    for workdir, more in (("first", {}), ("first", {}), ("second", shared)):
        line = ("-c", script, f"--config={tiny}", "--config.arms=learned", f"--workdir={tmp_path / workdir}")
        done = process(*line, env=own | more)
        assert done.returncode == 0, done.stderr
        counts.append(json.loads(done.stderr.splitlines()[-1]))
        (tmp_path / workdir / "results.parquet").unlink()
    first, *later = counts
    assert first["other"] == [] and first["misses"] > 2
    for count in later:
        assert count["other"] == [] and count["misses"] == 0 and count["hits"] >= first["misses"] - 2
