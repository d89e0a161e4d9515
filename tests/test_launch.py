"""The launchers run the commands that they print, pass failures and signals on, and say what is missing in one line.

gcloud, Slurm's commands and Python are short scripts here that record what they are asked; what is meant for a remote
shell runs in a folder that stands for the worker.
"""

import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sysconfig
import time

import pytest
import yaml

from routed.system import provenance
from tests.patience import PATIENCE

pytestmark = pytest.mark.slow  # processes, or several programs to compile

ROOT = pathlib.Path(__file__).parent.parent
LAUNCH = ROOT / "launch"
SCRIPTS = ("local_processes.sh", "tpu_vm.sh", "slurm.sbatch")
TASK = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())

#: First lines of every fake: what it is asked goes into $FAKES/record, and it fails where $FAIL says so.
RECORD = """#!/usr/bin/env bash
printf '%s\\0' "${0##*/}" "$@" $'\\x1e' >> "$FAKES/record"  # without a newline it is one write, whoever else writes
[[ ! ${FAIL-} || ! "$*" =~ $FAIL ]] || exit 9
"""

#: States come from a list, of which the last one stays ('-': no such VM; '?': no answer). Worker 0 is lost as often as
#: $FAKES/lost has lines, and what $FAKES/refused says, as often as it says it, is refused.
GCLOUD = """
all=$*
if [[ -s $FAKES/refused && $all == *" $(head -n 1 "$FAKES/refused") "* ]]; then sed -i 1d "$FAKES/refused"; exit 1; fi
case $all in
  *" describe "*)
    state=$(head -n 1 "$FAKES/states")
    [[ $(wc -l < "$FAKES/states") = 1 ]] || sed -i 1d "$FAKES/states"
    [[ $state != - ]] || { echo "NOT_FOUND" >&2; exit 1; }
    [[ $state != '?' ]] || { echo "no network" >&2; exit 1; }
    echo "$state" ;;
  *" ssh "*)
    if [[ $all == *"tail "* && -s $FAKES/lost ]]; then sed -i 1d "$FAKES/lost"; exit 255; fi
    cd "$FAKES/worker" && bash -c "${all##*--command=}" ;;
  *" scp --recurse "*) cp -r "$FAKES/worker/${6#*:}" "$7" ;;
  *" scp "*) cp "$5" "$FAKES/worker/routed.tgz" ;;
  *" rsync "*) echo report > "${!#}/report.html" ;;
esac
"""

#: The worker's system Python: makes the environment, in which `python` is the next one.
PYTHON3 = """
[[ $* != "-m uv venv"* ]] || { mkdir -p .venv/bin && cp "$FAKES/routed" .venv/bin/python; }
"""

#: routed: says how it was started, works for $WORK tenths of a second, and ends with a code of $FAKES/codes (of its
#: process, or the next), or, on a signal, with 2.
ROUTED = """
all=$*
echo "devices ${JAX_NUM_CPU_DEVICES-}"
echo "arguments $*" >&2
signals=0
trap 'echo SIGTERM; signals=1' TERM
trap 'echo SIGINT; signals=1' INT
[[ $all != *--process_id=* ]] || { process=${all##*--process_id=}; touch "$FAKES/started-$process"; }
for ((i = 0; i < ${WORK:-0} && !signals; i++)); do sleep 0.1; done
mkdir -p runs/gmm && echo report > runs/gmm/report.html
((!signals)) || { sleep 0.3; echo saved; exit 2; }
printf 'the end'
line=$(( ${process:-0} + 1 )) code=$(sed -n "${line}p" "$FAKES/codes" 2> /dev/null)
[[ ${process-} ]] || sed -i 1d "$FAKES/codes" 2> /dev/null
exit "${code:-0}"
"""

SRUN = """
while [[ $1 = --* ]]; do shift; done
"$@" &
echo $! > "$FAKES/task"
trap 'kill -KILL $!' TERM  # as srun does
wait $!
"""
SCANCEL = """
kill -TERM "$(cat "$FAKES/task")"
"""


class Fakes:
    """Fake commands on the PATH, and a checkout that holds the launchers."""

    def __init__(self, folder):
        self.folder = folder
        self.checkout = folder / "checkout"
        shutil.copytree(LAUNCH, self.checkout / "launch")
        for name in ("bin", "worker"):
            (folder / name).mkdir()
        for name, body in {
            "gcloud": GCLOUD, "python3": PYTHON3, "srun": SRUN, "scancel": SCANCEL, "scontrol": "", "sbatch": "",
        }.items():  # fmt: skip
            self.script(f"bin/{name}", body)
        self.python = str(self.script("routed", ROUTED))
        self.environment = {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "FAKES": str(folder), "POLL": "0", "TMPDIR": str(folder),
            "HOME": str(folder),
        }  # fmt: skip

    def script(self, name, body):
        path = self.folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(RECORD + body)
        path.chmod(0o755)
        return path

    def write(self, name, *lines):
        (self.folder / name).write_text("".join(f"{line}\n" for line in lines))

    def start(self, script, *arguments, **environment):
        return subprocess.Popen(
            ["bash", f"launch/{script}", *arguments], cwd=self.checkout, text=True, start_new_session=True,
            env=self.environment | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def run(self, script, *arguments, **environment):
        process = self.start(script, *arguments, **environment)
        out, err = process.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def record(self, *commands):
        """What was asked of `commands` so far, in order."""
        path = self.folder / "record"
        lines = path.read_text().split("\0\x1e\0")[:-1] if path.exists() else []
        return [line.split("\0") for line in lines if line.split("\0")[0] in commands]


@pytest.fixture
def fakes(tmp_path):
    return Fakes(tmp_path)


def until(condition):
    """Waits for something that happens soon."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def words(text):
    """The commands of a dry run."""
    return [shlex.split(line) for line in text.splitlines()]


# All of them.


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_the_header(fakes, script):
    done = fakes.run(script, "--help")
    header = (LAUNCH / script).read_text().split("\n\n")[0].splitlines()[1:]
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [line.removeprefix("#").removeprefix(" ") for line in header]
    assert f"launch/{script} " in done.stdout


def test_shellcheck_and_bash_find_nothing(tmp_path):
    files = [str(LAUNCH / script) for script in SCRIPTS]
    for part in ("setup", "run"):
        (tmp_path / part).write_text("#!/usr/bin/env bash\n" + TASK[part])
    for file in (*files, tmp_path / "setup", tmp_path / "run"):
        subprocess.run(["bash", "-n", file], check=True)
    shellcheck = [pathlib.Path(sysconfig.get_path("scripts"), "shellcheck"), "--severity=style"]
    subprocess.run([*shellcheck, *files, tmp_path / "setup"], check=True)
    subprocess.run([*shellcheck, tmp_path / "run"], check=True)
    assert all(os.access(LAUNCH / script, os.X_OK) for script in SCRIPTS if script.endswith(".sh"))


def test_every_command_of_the_readme_is_understood(fakes):
    text = (LAUNCH / "README.md").read_text()
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    commands = [line for line in lines if re.match(r"(launch/|sbatch )", line)]
    assert len(commands) > 10
    known = set(re.findall(r'DEFINE_\w+\(\s*"(\w+)"', (ROOT / "src/routed/main.py").read_text()))
    used = set(re.findall(r"--(\w+)=\S", TASK["run"] + TASK["envs"]["COMMAND"]))
    for command in commands:
        before, file, after = re.match(r"(.*?)launch/(\S+)(.*)", command).groups()
        array = re.search(r"--array=1-(\d+)", before)
        environment = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_COUNT": array[1]} if array else {}
        done = fakes.run(file, "--dry_run", *shlex.split(after), **environment)
        assert (done.returncode, done.stderr) == (0, ""), command
        assert done.stdout
        used |= set(re.findall(r" --(\w+)", " ".join(re.findall(r"routed\.main(.*)", done.stdout)).replace("'", " ")))
    used.discard("worker")
    assert used <= known, "a flag that routed does not have"
    assert used >= {"config", "workdir", "shard", "coordinator", "num_processes", "process_id"}
    for path in re.findall(r"--config=(\S+?\.py)", text):
        assert (ROOT / path).exists()


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("local_processes.sh", "N='': give the number of processes, e.g. 2"),
        ("local_processes.sh 0 -- --config=x", "N='0': give the number of processes, e.g. 2"),
        ("local_processes.sh two -- --config=x", "N='two': give the number of processes, e.g. 2"),
        ("local_processes.sh 2 3 -- --config=x", "unexpected argument 3: routed's arguments stand after --"),
        ("local_processes.sh 2", "no arguments for routed: end the command with -- --config=FILE"),
        ("local_processes.sh 2 --", "no arguments for routed: end the command with -- --config=FILE"),
        ("local_processes.sh --device=2 2 -- --config=x", "unknown option --device=2"),
        ("local_processes.sh --devices=x 2 -- --config=x",
         "--devices=x: give the number of devices of each process, e.g. 2"),
        ("tpu_vm.sh --name=a", "command '': use up, run, log, fetch, stop, down or all"),
        ("tpu_vm.sh create --name=a", "command 'create': use up, run, log, fetch, stop, down or all"),
        ("tpu_vm.sh up down --name=a", "unexpected argument down: routed's arguments stand after --"),
        ("tpu_vm.sh up --zone=z --type=v4-8", "--name is missing: how the VM is called, e.g. --name=moe"),
        ("tpu_vm.sh down --name=a", "--zone is missing: where the VM is, e.g. --zone=us-central2-b"),
        ("tpu_vm.sh up --name=a --zone=z", "--type='': name a TPU, e.g. --type=v4-8"),
        ("tpu_vm.sh run --name=a --zone=z --type=v4 -- --config=x", "--type='v4': name a TPU, e.g. --type=v4-8"),
        ("tpu_vm.sh run --name=a --zone=z --type=v4-8",
         "no arguments for routed: end the command with -- --config=FILE"),
        ("tpu_vm.sh all --name=a --zone=z --type=v4-8 --",
         "no arguments for routed: end the command with -- --config=FILE"),
        ("tpu_vm.sh up --nmae=a", "unknown option --nmae=a"),
        (
            "tpu_vm.sh run --name=a --zone=z --type=v4-16 -- --config=x --workdir=runs/x",
            "several hosts, or --watch, need a folder that outlives a VM: add --workdir=gs://BUCKET/FOLDER after --",
        ),
        (
            "tpu_vm.sh all --name=a --zone=z --type=v4-8 --watch -- --config=x",
            "several hosts, or --watch, need a folder that outlives a VM: add --workdir=gs://BUCKET/FOLDER after --",
        ),
        ("slurm.sbatch", "no arguments for routed: sbatch launch/slurm.sbatch --config=FILE"),
        ("slurm.sbatch --dry_run", "no arguments for routed: sbatch launch/slurm.sbatch --config=FILE"),
        (
            "slurm.sbatch --config=x",
            "this is no Slurm job: start it with sbatch, or see what it would do with bash launch/slurm.sbatch "
            "--dry_run",
        ),
    ],
)  # fmt: skip
def test_an_error_is_one_line_with_its_fix(fakes, command, error):
    script, *arguments = command.split()
    done = fakes.run(script, *arguments)
    hint = "" if script == "slurm.sbatch" else f"; see launch/{script} --help"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {error}{hint}\n")
    assert not fakes.record("gcloud", "srun", "routed")


# Processes on this machine.


def test_local_dry_run(fakes):
    done = fakes.run(
        "local_processes.sh", "--dry_run", "--devices=4", "2", "--", "--config=x.py:a,b", "--config.y=it's 1"
    )
    assert (done.returncode, done.stderr) == (0, "")
    port = re.search(r"localhost:(\d{5})", done.stdout)[1]
    assert words(done.stdout) == [
        ["JAX_NUM_CPU_DEVICES=4", "python3", "-m", "routed.main", "--config=x.py:a,b", "--config.y=it's 1",
         f"--coordinator=localhost:{port}", "--num_processes=2", f"--process_id={i}"]
        for i in range(2)
    ]  # fmt: skip
    assert not fakes.record("python3")


def test_local_interpreter(fakes):
    own = fakes.script("checkout/.venv/bin/python", ROUTED)

    def run(**environment):
        return fakes.run("local_processes.sh", "--dry_run", "1", "--", "--config=x", **environment).stdout

    assert pathlib.Path(words(run())[0][1]) == pathlib.Path("launch/../.venv/bin/python")
    assert words(run(PYTHON="/my python"))[0][1] == "/my python"
    own.unlink()
    assert words(run())[0][1] == "python3"


def test_local_processes_are_what_the_dry_run_says(fakes):
    fakes.write("codes", 0, 0, 0)
    done = fakes.run("local_processes.sh", "--devices=2", "3", "--", "--config=a b", PYTHON=fakes.python)
    assert (done.returncode, done.stderr) == (0, "")
    port = re.search(r"localhost:(\d+)", done.stdout)[1]
    for i in range(3):
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"[{i}] ")]
        arguments = f"-m routed.main --config=a b --coordinator=localhost:{port} --num_processes=3 --process_id={i}"
        assert sorted(lines) == sorted(f"[{i}] {text}" for text in ("devices 2", f"arguments {arguments}", "the end"))
    assert sorted(fakes.record("routed")) == [
        ["routed", "-m", "routed.main", "--config=a b", f"--coordinator=localhost:{port}", "--num_processes=3",
         f"--process_id={i}"]
        for i in range(3)
    ]  # fmt: skip


@pytest.mark.parametrize(("codes", "expected"), [((0, 0, 4), 4), ((0, 3, 4), 3), ((5, 0, 0), 5)])
def test_local_exit_code_is_the_first_that_failed(fakes, codes, expected):
    fakes.write("codes", *codes)
    done = fakes.run("local_processes.sh", "3", "--", "--config=x", PYTHON=fakes.python, WORK="3")
    assert done.returncode == expected
    assert done.stdout.count("the end") == 3  # it waits for all


def test_local_output_is_complete_when_it_ends(fakes, tmp_path):
    python = fakes.script("python", "seq 10000")
    with open(tmp_path / "out", "w") as out:
        command = ["bash", "launch/local_processes.sh", "2", "--", "--config=x"]
        subprocess.run(
            command, cwd=fakes.checkout, env=fakes.environment | {"PYTHON": str(python)}, stdout=out, check=True
        )
    assert len((tmp_path / "out").read_text().splitlines()) == 20000


@pytest.fixture
def heard():
    """SIGINT is not ignored, as it is for good behind `nohup ... &`: bash cannot trap what it was started to ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_local_signals_reach_every_process_once(fakes, heard, sent):
    process = fakes.start("local_processes.sh", "3", "--", "--config=x", PYTHON=fakes.python, WORK="300")
    until(lambda: all((fakes.folder / f"started-{i}").exists() for i in range(3)))
    process.send_signal(sent)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (2, "")
    for i in range(3):
        assert [line for line in out.splitlines() if line.startswith(f"[{i}] ")][2:] == [
            f"[{i}] {sent.name}",
            f"[{i}] saved",
        ]


def test_local_processes_do_not_hear_the_terminal(fakes, heard):
    process = fakes.start("local_processes.sh", "2", "--", "--config=x", PYTHON=fakes.python, WORK="300")
    until(lambda: all((fakes.folder / f"started-{i}").exists() for i in range(2)))
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
    out, _ = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out.count("SIGINT"), out.count("saved")) == (2, 2, 2)


# TPU VMs.

VM = ("--name=moe", "--zone=us-central2-b")
ONE = (*VM, "--type=v4-8", "--", "--config=experiments/gmm_router.py", "--config.x=it's 1")
MANY = (
    *VM,
    "--type=v5litepod-256",
    "--project=p",
    "--spot",
    "--queued",
    "--watch",
    "--",
    "--config=x",
    "--workdir=gs://b/f/phase",
)
TPUS = ["gcloud", "compute", "tpus"]
INSTALL = (
    "mkdir -p routed && tar -xzf routed.tgz -C routed && cd routed && echo  > commit && python3 -m pip install -q uv &&"
    " python3 -m uv venv -q --allow-existing --python 3.11 &&"
    " python3 -m uv pip install -q --python .venv -e '.[tpu,gcs]'"
)
START = (
    "cd routed && if kill -0 $(cat run.pid 2> /dev/null) 2> /dev/null; then echo 'a run goes on here: log follows "
    "it, stop ends it';"
    " else rm -f run.pid run.code; setsid bash -c {} > run.log 2>&1 < /dev/null & until [ -s run.pid ]; do sleep "
    "0.1; done; fi"
)
FOLLOW = (
    "cd routed && [ -e run.pid ] || {{ echo 'error: nothing was run here; start it with run' >&2; exit 102; }};"
    " tail -n +1 -F --pid=$(cat run.pid) run.log; sleep 1; exit $((100 + $(cat run.code || echo 1)))"
).format()


def vm(where, queued=False, **commands):
    """The gcloud commands of one VM by name, as lists of words."""
    thing = "queued-resources" if queued else "tpu-vm"
    form = "--format=value(state.state)" if queued else "--format=value(state)"
    last = ["--force", "--quiet"] if queued else ["--quiet"]

    def on(worker, command):
        return [*TPUS, "tpu-vm", "ssh", "moe", *where, f"--worker={worker}", f"--command={command}"]

    return {
        "describe": [*TPUS, thing, "describe", "moe", *where, form],
        "delete": [*TPUS, thing, "delete", "moe", *where, *last],
        "install": on("all", INSTALL),
        "stop": on("all", "kill $(cat routed/run.pid) 2> /dev/null || echo 'no run goes on here'"),
        "log": on("0", FOLLOW),
        "get": [*TPUS, "tpu-vm", "scp", "--recurse", "moe:routed/runs", ".", *where, "--worker=0"],
        "rsync": ["gcloud", "storage", "rsync", "--recursive", "--exclude=^compiled/", "gs://b/f/phase", "runs/phase"],
    }


def one(fakes):
    """Commands for ONE."""
    where = ["--zone=us-central2-b"]
    return vm(where) | {
        "create": [
            *TPUS,
            "tpu-vm",
            "create",
            "moe",
            *where,
            "--accelerator-type=v4-8",
            "--version=tpu-ubuntu2204-base",
        ],
        "copy": [*TPUS, "tpu-vm", "scp", f"{fakes.folder}/routed-moe.tgz", "moe:routed.tgz", *where, "--worker=all"],
    }


def many(fakes):
    """Commands for MANY."""
    where = ["--zone=us-central2-b", "--project=p"]
    return vm(where, queued=True) | {
        "create": [*TPUS, "queued-resources", "create", "moe", "--node-id=moe", *where,
                   "--accelerator-type=v5litepod-256", "--runtime-version=v2-alpha-tpuv5-lite", "--spot"],
        "copy": [*TPUS, "tpu-vm", "scp", f"{fakes.folder}/routed-moe.tgz", "moe:routed.tgz", *where, "--worker=all"],
    }  # fmt: skip


def starts(command, *arguments):
    """Is this gcloud command the start of routed with `arguments` on all workers?"""
    text = command[-1].removeprefix("--command=")
    before, after = START.split("{}")
    assert text.startswith(before) and text.endswith(after) and "--worker=all" in command
    (session,) = shlex.split(text[len(before) : -len(after)])
    run, rest = session.split(" & ")
    assert rest == "echo $! > run.pid; wait $!; echo $? > run.code"
    return shlex.split(run) == [".venv/bin/python", "-m", "routed.main", *arguments]


def names(commands, known):
    """Recorded commands by their names in `known`; what starts a run is `start`."""
    table = {tuple(command): name for name, command in known.items()}
    return [table.get(tuple(command), "start" if "setsid" in command[-1] else str(command)) for command in commands]


def test_tpu_dry_run_of_one_host(fakes):
    done = fakes.run("tpu_vm.sh", "all", "--dry_run", *ONE)
    assert (done.returncode, done.stderr) == (0, "")
    lines = words(done.stdout)
    assert names(lines, one(fakes))[1:3] == ["describe", "create"]
    assert lines[0] == [
        "bash", "-o", "pipefail", "-c",
        "cd launch/.. && git ls-files -z --cached --others --exclude-standard |"
        " while IFS= read -rd '' file; do [[ ! -e $file && ! -L $file ]] || printf '%s\\0' \"$file\"; done |"
        f" tar -czf {fakes.folder}/routed-moe.tgz --null -T -",
    ]  # fmt: skip
    assert names(lines, one(fakes))[3:7] == ["copy", "install", "start", "log"]
    assert starts(lines[5], "--config=experiments/gmm_router.py", "--config.x=it's 1")
    assert lines[7] == ["mkdir", "-p", "."]
    assert names(lines, one(fakes))[8:] == ["get", "delete"]
    assert not fakes.record("gcloud")


def test_tpu_dry_run_of_many_hosts(fakes):
    done = fakes.run("tpu_vm.sh", "all", "--dry_run", *MANY)
    assert (done.returncode, done.stderr) == (0, "")
    lines = words(done.stdout)
    found = names(lines, many(fakes))
    assert found[1:7] == ["describe", "create", "copy", "install", "start", "log"]
    assert starts(lines[5], "--config=x", "--workdir=gs://b/f/phase", "--coordinator=auto")
    assert lines[7] == ["mkdir", "-p", "runs/phase"]
    assert found[8:] == ["rsync", "delete"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["stop"], ["stop"]),
        (["log"], ["log"]),
        (["down"], ["delete"]),
        (["fetch"], ["['mkdir', '-p', '.']", "get"]),
        (["fetch", "--queued", "--", "--workdir=gs://b/f/phase/"], ["['mkdir', '-p', 'runs/phase']", "rsync/"]),
    ],
)
def test_tpu_dry_run_of_a_part(fakes, arguments, expected):
    done = fakes.run("tpu_vm.sh", "--dry_run", *VM, *arguments)
    known = one(fakes)
    known["rsync/"] = [word + "/" * word.startswith("gs:") for word in known["rsync"]]
    assert (done.returncode, names(words(done.stdout), known)) == (0, expected)


@pytest.mark.parametrize(
    ("workdir", "copied"),
    [("runs/x", [["mkdir", "-p", "runs"], "moe:routed/runs/x"]), ("/data/x", [["mkdir", "-p", "runs"], "moe:/data/x"])],
)
def test_tpu_fetch_from_another_folder(fakes, workdir, copied):
    done = fakes.run("tpu_vm.sh", "fetch", "--dry_run", *VM, "--", f"--workdir={workdir}")
    lines = words(done.stdout)
    assert lines[0] == copied[0]
    assert lines[1] == [*TPUS, "tpu-vm", "scp", "--recurse", copied[1], "runs", "--zone=us-central2-b", "--worker=0"]


@pytest.mark.parametrize(
    ("kind", "software"),
    [("v2-8", "tpu-ubuntu2204-base"), ("v5litepod-4", "v2-alpha-tpuv5-lite"), ("v5p-8", "v2-alpha-tpuv5"),
     ("v6e-8", "v2-alpha-tpuv6e")],
)  # fmt: skip
def test_tpu_software_fits_the_type(fakes, kind, software):
    for option, expected in (("--spot", software), ("--version=mine", "mine")):
        done = fakes.run("tpu_vm.sh", "up", "--dry_run", *VM, f"--type={kind}", option)
        assert f"--version={expected}" in words(done.stdout)[2]
    assert "--spot" not in words(done.stdout)[2]


def checkout(fakes):
    """Makes the launchers' folder a git checkout with a tracked, a new and an ignored file."""
    (fakes.checkout / ".gitignore").write_text("runs/\n")
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=fakes.checkout, check=True)
    (fakes.checkout / "my router.py").write_text("new")
    (fakes.checkout / "runs").mkdir()
    (fakes.checkout / "runs/big").write_text("ignored")


def test_tpu_all_makes_runs_fetches_and_deletes(fakes):
    checkout(fakes)
    fakes.write("states", "-", "CREATING", "READY")
    done = fakes.run("tpu_vm.sh", "all", *ONE)
    assert (done.returncode, done.stderr) == (0, "moe is CREATING\n")
    commands = fakes.record("gcloud")
    assert names(commands, one(fakes)) == [
        "describe", "create", "describe", "describe", "copy", "install", "start", "log", "get", "delete",
    ]  # fmt: skip
    assert starts(commands[6], "--config=experiments/gmm_router.py", "--config.x=it's 1")
    worker = fakes.folder / "worker/routed"
    assert fakes.record("python") == [
        ["python", "-m", "routed.main", "--config=experiments/gmm_router.py", "--config.x=it's 1"]
    ]
    assert fakes.record("python3") == [
        ["python3", *line.split()]
        for line in (
            "-m pip install -q uv",
            "-m uv venv -q --allow-existing --python 3.11",
            "-m uv pip install -q --python .venv -e .[tpu,gcs]",
        )
    ]
    assert (
        "arguments -m routed.main --config=experiments/gmm_router.py --config.x=it's 1" in done.stdout
    )  # worker 0's log
    assert (
        (worker / "my router.py").exists()
        and (worker / "launch/tpu_vm.sh").exists()
        and not (worker / "runs/big").exists()
    )
    assert (fakes.checkout / "runs/gmm/report.html").read_text() == "report\n"


@pytest.mark.parametrize(
    "fails", [r" create ", r" scp ", r"ssh .*uv venv", r"ssh .*setsid", r" scp --recurse ", r" delete "]
)
def test_tpu_failure_of_a_command_ends_it(fakes, fails):
    checkout(fakes)
    fakes.write("states", "-", "READY")
    done = fakes.run("tpu_vm.sh", "all", *ONE, FAIL=fails)
    assert done.returncode == 9
    assert re.search(fails, " ".join(fakes.record("gcloud")[-1]))


def test_a_copy_without_git_knows_its_commit(tmp_path, monkeypatch):
    (folder := tmp_path / "src/routed/system").mkdir(parents=True)
    monkeypatch.setattr(provenance, "__file__", str(folder / "provenance.py"))
    assert provenance.provenance()["commit"] == "unknown"
    (tmp_path / "commit").write_text("0123456789ab-dirty\n")
    assert provenance.provenance()["commit"] == "0123456789ab-dirty"


def test_tpu_without_git_makes_nothing(fakes):
    fakes.write("states", "-")
    done = fakes.run("tpu_vm.sh", "up", *ONE, GIT_CEILING_DIRECTORIES=str(fakes.folder))
    assert done.returncode == 128 and "not a git repository" in done.stderr
    assert not fakes.record("gcloud")


def test_tpu_failed_run_keeps_the_vm_and_its_code(fakes):
    checkout(fakes)
    fakes.write("states", "READY")  # an existing one is taken
    fakes.write("codes", 2)
    done = fakes.run("tpu_vm.sh", "all", *ONE)
    assert done.returncode == 2
    assert done.stderr == (
        "error: the run ended with code 2, and moe is still there: see it with log, go on with all, delete it with "
        "down\n"
    )
    assert names(fakes.record("gcloud"), one(fakes)) == ["describe", "copy", "install", "start", "log"]


def test_tpu_keep(fakes):
    checkout(fakes)
    fakes.write("states", "READY")
    assert fakes.run("tpu_vm.sh", "all", "--keep", *ONE).returncode == 0
    assert names(fakes.record("gcloud"), one(fakes))[-1] == "get"


@pytest.mark.parametrize("state", ["FAILED", "STOPPED", "UNKNOWN"])
def test_tpu_that_will_not_come_back(fakes, state):
    checkout(fakes)
    fakes.write("states", state)
    done = fakes.run("tpu_vm.sh", "up", *ONE)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: moe is {state}: launch/tpu_vm.sh down --name=moe --zone=us-central2-b --type=v4-8 deletes it;"
        " see launch/tpu_vm.sh --help\n"
    )


def test_tpu_run_outlives_the_connection_and_is_not_started_twice(fakes):
    (fakes.folder / "worker/routed").mkdir()
    fakes.script("worker/routed/.venv/bin/python", ROUTED)
    assert fakes.run("tpu_vm.sh", "log", *VM).returncode == 2
    started = fakes.run("tpu_vm.sh", "run", *ONE, WORK="300")
    assert (started.returncode, started.stdout) == (0, "")
    pid = int((fakes.folder / "worker/routed/run.pid").read_text())
    os.kill(pid, 0)
    again = fakes.run("tpu_vm.sh", "run", *ONE)
    assert again.stdout == "a run goes on here: log follows it, stop ends it\n"
    assert len(fakes.record("python")) == 1
    assert fakes.run("tpu_vm.sh", "stop", *VM).returncode == 0
    log = fakes.run("tpu_vm.sh", "log", *VM)
    assert log.returncode == 2 and log.stdout.endswith("SIGTERM\nsaved\n")
    assert fakes.run("tpu_vm.sh", "stop", *VM).stdout == "no run goes on here\n"
    assert fakes.run("tpu_vm.sh", "run", *ONE).returncode == 0
    assert fakes.run("tpu_vm.sh", "log", *VM).returncode == 0
    (fakes.folder / "worker/routed/run.code").unlink()  # as when the VM has restarted
    assert fakes.run("tpu_vm.sh", "log", *VM).returncode == 1


def test_tpu_log_survives_a_broken_connection(fakes):
    (fakes.folder / "worker/routed").mkdir()
    fakes.script("worker/routed/.venv/bin/python", ROUTED)
    fakes.run("tpu_vm.sh", "run", *ONE)
    fakes.write("states", "READY")
    fakes.write("lost", 1, 2)
    log = fakes.run("tpu_vm.sh", "log", *VM)
    assert log.returncode == 0 and log.stdout.count("arguments") == 1
    assert names(fakes.record("gcloud"), one(fakes))[1:] == ["log", "describe"] * 2 + ["log"]


def test_tpu_watch_waits_for_the_network_here(fakes):
    """This machine has no network while the run goes on, and again while it asks whether the VM was lost."""
    checkout(fakes)
    fakes.write("states", "READY", "?", "?", "READY", "?", "SUSPENDED", "SUSPENDED", "-", "READY")
    fakes.write("lost", 1)
    fakes.write("codes", 1, 0)
    done = fakes.run("tpu_vm.sh", "all", "--watch", *ONE, "--workdir=gs://b/f/phase")
    assert done.returncode == 0 and done.stderr.splitlines() == [
        *["no network"] * 3, "moe was preempted: making it again",
    ]  # fmt: skip
    fakes.write("states", "?")
    asked = fakes.run("tpu_vm.sh", "up", *ONE)
    assert asked.returncode == 1 and asked.stderr == "no network\n"  # it is not made


def test_tpu_up_copies_no_file_that_was_deleted(fakes):
    checkout(fakes)
    fakes.write("states", "READY")
    subprocess.run(["git", "add", "--all"], cwd=fakes.checkout, check=True)
    (fakes.checkout / "my router.py").unlink()
    assert fakes.run("tpu_vm.sh", "up", *ONE).returncode == 0
    copied = fakes.folder / "worker/routed"
    assert (copied / ".gitignore").exists() and not (copied / "my router.py").exists()


def test_tpu_watch_makes_a_preempted_vm_again_and_runs_the_same_command(fakes):
    checkout(fakes)
    fakes.write(
        "states",
        "-",
        "WAITING_FOR_RESOURCES",
        "ACTIVE",
        "ACTIVE",
        "SUSPENDING",
        "SUSPENDED",
        "SUSPENDED",
        "-",
        "ACTIVE",
    )
    fakes.write("lost", 1, 2)
    fakes.write("codes", 1, 0)
    done = fakes.run("tpu_vm.sh", "all", *MANY)
    assert done.returncode == 0
    assert done.stderr.splitlines() == ["moe is WAITING_FOR_RESOURCES", "moe was preempted: making it again"]
    commands = fakes.record("gcloud")
    assert names(commands, many(fakes)) == [
        "describe", "create", "describe", "describe", "copy", "install", "start",
        "log", "describe", "log", "describe",  # the connection breaks; then the VM is lost
        "describe", "describe", "delete", "describe", "create",
        "describe", "copy", "install", "start", "log", "rsync", "delete",
    ]  # fmt: skip
    runs = [command for command in commands if "setsid" in command[-1]]
    assert runs[0] == runs[1] and starts(runs[0], "--config=x", "--workdir=gs://b/f/phase", "--coordinator=auto")
    assert (fakes.checkout / "runs/phase/report.html").exists()


def test_tpu_watch_tries_until_the_vm_is_up(fakes):
    checkout(fakes)
    fakes.write("states", "READY", *["PREEMPTED"] * 3, *["-"] * 3, "READY")
    fakes.write("lost", 1)
    fakes.write("refused", "create", "create", "scp")
    done = fakes.run("tpu_vm.sh", "all", "--watch", *ONE, "--workdir=gs://b/f/phase")
    assert done.returncode == 0
    assert names(fakes.record("gcloud"), one(fakes))[4:] == [
        "log", "describe", "describe",
        "describe", "delete", "describe", "create", "describe", "create", "describe", "create", "describe", "copy",
        "describe", "copy", "install", "start", "log", "rsync", "delete",
    ]  # fmt: skip


def test_tpu_watch_ends_with_a_request_that_failed(fakes):
    checkout(fakes)
    fakes.write("states", "ACTIVE", "SUSPENDED", "SUSPENDED", "FAILED")
    fakes.write("lost", 1)
    done = fakes.run("tpu_vm.sh", "all", *MANY)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(
        "error: moe is FAILED: launch/tpu_vm.sh down"
    )
    assert names(fakes.record("gcloud"), many(fakes))[4:] == ["log", "describe", "describe", "describe"]


def test_tpu_watch_ends_with_a_run_that_fails_by_itself(fakes):
    checkout(fakes)
    fakes.write("states", "ACTIVE")
    fakes.write("codes", 2)
    done = fakes.run("tpu_vm.sh", "all", *MANY)
    assert done.returncode == 2 and "the run ended with code 2" in done.stderr
    assert names(fakes.record("gcloud"), many(fakes)) == [
        "describe", "copy", "install", "start", "log", *["describe"] * 4,
    ]  # fmt: skip


def test_tpu_without_watch_ends_with_the_vm(fakes):
    checkout(fakes)
    fakes.write("states", "READY", "PREEMPTED")
    fakes.write("lost", 1)
    done = fakes.run("tpu_vm.sh", "all", *ONE)
    assert done.returncode == 1 and "moe is still there" in done.stderr
    assert names(fakes.record("gcloud"), one(fakes)) == ["describe", "copy", "install", "start", "log", "describe"]


def test_tpu_up_replaces_a_preempted_vm(fakes):
    checkout(fakes)
    fakes.write("states", "PREEMPTED", "-", "READY")
    assert fakes.run("tpu_vm.sh", "up", *ONE).returncode == 0
    assert names(fakes.record("gcloud"), one(fakes)) == [
        "describe", "delete", "describe", "create", "describe", "copy", "install",
    ]  # fmt: skip


def test_tpu_without_gcloud(fakes):
    (fakes.folder / "empty").mkdir()
    for tool in ("bash", "env"):
        (fakes.folder / "empty" / tool).symlink_to(shutil.which(tool))
    done = fakes.run("tpu_vm.sh", "down", *VM, PATH=str(fakes.folder / "empty"))
    assert done.returncode == 2
    assert done.stderr == (
        "error: gcloud is not installed: https://cloud.google.com/sdk/docs/install, then gcloud auth login;"
        " see launch/tpu_vm.sh --help\n"
    )


# Slurm.

JOB = {"SLURM_JOB_ID": "71"}
ARRAY = {"SLURM_JOB_ID": "73", "SLURM_ARRAY_JOB_ID": "71", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8"}


def test_slurm_asks_for_a_signal_and_a_requeue():
    lines = (LAUNCH / "slurm.sbatch").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert [line for line in lines if line.startswith("#SBATCH")] == [
        "#SBATCH --job-name=routed", "#SBATCH --ntasks-per-node=1", "#SBATCH --open-mode=append", "#SBATCH --requeue",
        "#SBATCH --signal=B:TERM@60",
    ]  # fmt: skip
    assert all(i < first for i, line in enumerate(lines) if line.startswith("#SBATCH"))  # sbatch reads no further


@pytest.mark.parametrize(
    ("environment", "before", "options", "after"),
    [
        ({}, [], [], []),
        ({"SLURM_NTASKS": "1", "SLURM_CPUS_PER_TASK": "8"}, [], ["--cpus-per-task=8"], []),
        ({"SLURM_NTASKS": "4"}, [], [], ["--coordinator=auto"]),
        ({"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_GPUS_ON_NODE": "4"},
         ["env", "JAX_LOCAL_DEVICE_IDS=0,1,2,3"], [], ["--coordinator=auto"]),
        ({"SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4", "SLURM_GPUS_ON_NODE": "4"}, [], [],
         ["--coordinator=auto"]),
        (ARRAY, [], [], ["--shard=3/8"]),
        (ARRAY | {"SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_MAX": "8", "SLURM_NTASKS": "2"}, [], [],
         ["--shard=3/8", "--coordinator=auto"]),
    ],
)  # fmt: skip
def test_slurm_dry_run(fakes, environment, before, options, after):
    done = fakes.run("slurm.sbatch", "--dry_run", "--config=x", "--sweep=a=1, 2", **environment)
    assert (done.returncode, done.stderr) == (0, "")
    python = ["python3", "-m", "routed.main", "--config=x", "--sweep=a=1, 2"]
    assert words(done.stdout) == [[*before, "srun", "--kill-on-bad-exit=0", *options, *python, *after]]
    assert not fakes.record("srun")


@pytest.mark.parametrize("wrong", [{"SLURM_ARRAY_TASK_MIN": "0"}, {"SLURM_ARRAY_TASK_MAX": "9"}])
def test_slurm_array_that_is_no_partition(fakes, wrong):
    done = fakes.run("slurm.sbatch", "--config=x", **ARRAY, **wrong)
    assert done.returncode == 2
    assert done.stderr == (
        "error: shards are numbered from 1 without gaps: use --array=1-N; shards that are complete end at once\n"
    )


@pytest.mark.parametrize("code", [0, 2, 5])
def test_slurm_passes_the_exit_code_on(fakes, code):
    fakes.write("codes", code)
    fakes.script("checkout/.venv/bin/python", ROUTED)
    done = fakes.run("slurm.sbatch", "--config=a b", **JOB)
    assert done.returncode == code
    assert fakes.record("srun", "scancel", "scontrol", "python") == [
        ["srun", "--kill-on-bad-exit=0", ".venv/bin/python", "-m", "routed.main", "--config=a b"],
        ["python", "-m", "routed.main", "--config=a b"],
    ]


@pytest.mark.parametrize(("job", "name"), [(JOB, "71"), (ARRAY, "71_3")])
def test_slurm_saves_and_queues_again_before_the_time_limit(fakes, job, name):
    process = fakes.start("slurm.sbatch", "--config=x", **job, PYTHON=fakes.python, WORK="300")
    until(lambda: (fakes.folder / "task").exists() and fakes.record("routed"))
    time.sleep(0.3)  # until routed has set its traps
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2 and out.endswith("SIGTERM\nsaved\n")
    assert fakes.record("scancel", "scontrol") == [
        ["scancel", "--signal=TERM", name],
        ["scontrol", "requeue", "incomplete", name],
    ]


def test_slurm_does_not_queue_again_what_just_ended(fakes):
    process = fakes.start("slurm.sbatch", "--config=x", **JOB, PYTHON=fakes.python, WORK="10", FAIL="signal=TERM")
    until(lambda: (fakes.folder / "task").exists())
    process.send_signal(signal.SIGTERM)  # which scancel, failing, does not pass on
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert fakes.record("scancel", "scontrol") == [["scancel", "--signal=TERM", "71"]]


# SkyPilot.


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ["--config=experiments/gmm_router.py"]),
        ({"COMMAND": "--config=x --sweep=a=(1,2),(3,4)"}, ["--config=x", "--sweep=a=(1,2),(3,4)"]),
        (
            {"COMMAND": "--config=x '--config.phases=until=5 train=router,train=experts'"},
            ["--config=x", "--config.phases=until=5 train=router,train=experts"],
        ),
        ({"WORKDIR": "gs://b/f"}, ["--config=experiments/gmm_router.py", "--workdir=gs://b/f"]),
        ({"SHARD": "3/8"}, ["--config=experiments/gmm_router.py", "--shard=3/8"]),
        (
            {"SHARD": "3/8", "WORKDIR": "gs://b/f"},
            ["--config=experiments/gmm_router.py", "--workdir=gs://b/f-shard3of8", "--shard=3/8"],
        ),
        (
            {"SKYPILOT_NUM_NODES": "4", "WORKDIR": "gs://b/f"},
            ["--config=experiments/gmm_router.py", "--workdir=gs://b/f", "--coordinator=auto"],
        ),
    ],
)
@pytest.mark.parametrize("code", [0, 7])
def test_skypilot_runs(fakes, environment, expected, code):
    fakes.script("checkout/.venv/bin/python", ROUTED)
    fakes.write("codes", code)
    environment = fakes.environment | TASK["envs"] | {"SKYPILOT_NUM_NODES": "1"} | environment
    done = subprocess.run(
        ["bash", "-c", TASK["run"]], cwd=fakes.checkout, env=environment, capture_output=True, timeout=PATIENCE
    )
    assert done.returncode == code
    assert fakes.record("python") == [["python", "-m", "routed.main", *expected]]


@pytest.mark.parametrize(("device", "extra"), [("", ".[gcs]"), ("nvidia-smi", ".[cuda,gcs]"), ("ls", ".[tpu,gcs]")])
def test_skypilot_installs_what_the_machine_has(fakes, device, extra):
    for name in ("nvidia-smi", "ls"):
        fakes.script(f"bin/{name}", "echo /dev/accel0" if name == device else "exit 1")
    done = subprocess.run(
        ["bash", "-c", TASK["setup"]], cwd=fakes.checkout, env=fakes.environment, capture_output=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert fakes.record("python3")[-1] == ["python3", "-m", "uv", *f"pip install -q --python .venv -e {extra}".split()]
    failed = subprocess.run(
        ["bash", "-c", TASK["setup"]],
        cwd=fakes.checkout,
        env=fakes.environment | {"FAIL": "pip install -q uv"},
        timeout=PATIENCE,
    )
    assert failed.returncode == 9
