"""Several processes share a run: the same rows as one, and one clear line when one of them is lost."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest

from routed.contracts import UserError
from routed.system import hosts, supervisor
from tests.conftest import without_papers
from tests.language_case import DECODER
from tests.patience import PATIENCE
from tests.test_command_line import command, refusal, write_experiment

# Processes, or several programs to compile; the tests are about what is run.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled")]

#: 2 arms of 2 seeds: 4 runs, in one batch that 3 devices pad to 6.
SHARED = ("--config.mesh.run=0", "--config.mesh.runs_per_batch=8", "--config.seeds=2")


class Processes(list):
    """`routed.main` N times on this machine, as if each were a host; what each said on stderr is read to its end."""

    def __init__(self, count, *arguments, devices=(1, 1, 1), own=lambda i: ()):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            self.port = free.getsockname()[1]
        for i in range(count):
            where = f"--coordinator=localhost:{self.port}", f"--num_processes={count}", f"--process_id={i}"
            environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices[i])}
            environment["XLA_FLAGS"] = " ".join(f for f in environment["XLA_FLAGS"].split() if "device_count" not in f)
            line = [sys.executable, "-m", "routed.main", *map(str, arguments), *where, *own(i)]
            self.append(
                subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
            )

    def ended(self, seconds=PATIENCE):
        """(exit code, what it said) of each."""
        try:
            said = [process.communicate(timeout=seconds)[1] for process in self]
        finally:
            for process in self:
                process.kill()
        return [(process.returncode, text) for process, text in zip(self, said, strict=True)]

    def child(self, i):
        """The process id of the one that runs JAX."""
        return int(pathlib.Path(f"/proc/{self[i].pid}/task/{self[i].pid}/children").read_text().split()[0])


def wait_for(condition, seconds=PATIENCE):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def table(workdir):
    return pd.read_parquet(workdir / "results.parquet")


def same(found, expected, rtol=0.0):
    found, expected = without_papers(found), without_papers(expected)
    pd.testing.assert_frame_equal(found, expected, check_exact=not rtol, **({"rtol": rtol} if rtol else {}))


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    return write_experiment(tmp_path_factory.mktemp("hosts"))


@pytest.fixture(scope="module")
def alone(experiment, tmp_path_factory):
    """The rows of one process."""
    workdir = tmp_path_factory.mktemp("alone")
    command(f"--config={experiment}", f"--workdir={workdir}", *SHARED)
    return table(workdir)


def test_processes_leave_the_rows_of_one(experiment, alone, tmp_path):
    for code, said in Processes(3, f"--config={experiment}", f"--workdir={tmp_path}", *SHARED).ended():
        assert code == 0, said
    same(table(tmp_path), alone)
    left = {"claims.json", "config.json", "report.html", "results.parquet", "routing.npz", "summary.csv", "timing.csv"}
    assert left <= {path.name for path in tmp_path.iterdir()}
    assert not (tmp_path / "checkpoints").exists()
    assert len((tmp_path / "timing.csv").read_text().splitlines()) == 2  # one of them wrote


def test_processes_share_one_language_model(tmp_path):
    """Two processes of four devices: each feeds its rows and holds its experts; they save together and go on."""
    path = tmp_path / "tiny.py"
    path.write_text(
        "from routed.plan import Figure, base, override\n"
        'FIGURES = {"": Figure("two arms")}\n'
        f"get_config = lambda arg=None: override(base(), {DECODER!r})\n"
    )
    always = (
        f"--config={path}",
        f"--config.data.cache={tmp_path / 'cache'}",
        "--config.arms=learned,transplant",
        "--config.checkpoint.final=true",
    )
    command(*always, f"--workdir={tmp_path / 'alone'}")
    spread = (*always, f"--workdir={tmp_path / 'two'}", "--config.mesh.data=2", "--config.mesh.expert=4")
    spread += ("--tracker=tensorboard",)
    for code, said in Processes(2, *spread, devices=(4, 4)).ended():
        assert code == 0, said
    # Adam divides by the square root of tiny gradients, so rounding grows; as on one process of eight devices.
    same(table(tmp_path / "two"), table(tmp_path / "alone"), rtol=2e-4)
    assert [*(tmp_path / "two" / "models").iterdir()] and [*(tmp_path / "two" / "tensorboard").iterdir()]


def test_a_signal_to_one_saves_once_and_the_loss_of_another_is_told_within_a_minute(experiment, tmp_path):
    """SIGTERM to process 1; the same command goes on; kill -9 of process 1. (test_bucket kills process 0.)"""
    line = f"--config={experiment}", f"--workdir={tmp_path}", *SHARED, "--config.steps=3000"
    saved = lambda: [*(tmp_path / "checkpoints").glob("[0-9]*")]  # noqa: E731

    first = Processes(2, *line)
    wait_for(saved)
    first[1].send_signal(signal.SIGTERM)
    for code, said in first.ended():
        assert code == 2
        assert said.splitlines()[-1].endswith(
            f"error: interrupted and saved in {tmp_path}: the same command goes on from here"
        )
    assert not (tmp_path / "results.parquet").exists()
    at = max(int(path.name) for path in saved())

    second = Processes(2, *line)
    wait_for(lambda: max(int(path.name) for path in saved()) > at)
    os.kill(second.child(1), signal.SIGKILL)
    begun = time.monotonic()
    (code, said), (other, _) = second.ended()
    assert time.monotonic() - begun < 60
    assert "resuming" in said and code == other == 1
    assert said.splitlines()[-1].startswith("error: process 1 died, so process 0 stopped: the same")
    assert "Traceback" not in said


@pytest.mark.parametrize("text", ["ä" * 5000, ""])
def test_what_process_0_tells_has_any_length(monkeypatch, text):
    """The keys of a batch over 256 devices are longer than any fixed message. Processes must broadcast equal shapes."""
    raw = np.frombuffer(text.encode(), np.uint8)
    sent = iter([np.array(raw.size), raw])

    def broadcast(own):
        of_process_0 = next(sent)
        assert own.shape == of_process_0.shape
        return of_process_0

    monkeypatch.setattr(hosts.jax, "process_count", lambda: 2)
    monkeypatch.setattr(hosts, "is_first", lambda: False)
    monkeypatch.setattr(hosts.multihost_utils, "broadcast_one_to_all", broadcast)
    assert hosts.broadcast_from_first("what this process would say") == text


def test_processes_that_differ_are_refused(experiment, tmp_path):
    always = f"--config={experiment}", *SHARED
    other = "process 1 has another command than process 0: give every process the same"
    cases = (
        ("every process needs the same number of devices: process 0 has 2, process 1 has 1", {"devices": (2, 1)}),
        (other, {"own": lambda i: (f"--config.steps={30 + 10 * i}",)}),
        (
            "process 1 has another workdir than process 0: several hosts need one folder that all see",
            {"own": lambda i: (f"--workdir={tmp_path / str(i)}",)},
        ),
    )
    running = [(text, Processes(2, *always, f"--workdir={tmp_path / 'all'}", **options)) for text, options in cases]
    for text, processes in running:
        for code, said in processes.ended():
            assert code == 2
            assert text in said.splitlines()[-1]
            assert "Traceback" not in said


def test_a_coordinator_that_nobody_answers_at_ends_in_one_line(experiment, tmp_path):
    (said,) = Processes(
        1,
        f"--config={experiment}",
        f"--workdir={tmp_path}",
        own=lambda i: ("--num_processes=2", "--process_id=1", "--join_seconds=2"),
    ).ended()
    assert said[0] == 1
    assert re.search(
        r"^error: process 1 met nobody, or not all, at localhost:\d+: start all processes", said[1].splitlines()[-1]
    )
    assert "***" not in said[1]


def test_wrong_flags_are_refused_before_anything_waits(experiment, monkeypatch):
    monkeypatch.setenv(supervisor.MARK, "1")
    for flags in (
        ("--coordinator=host",),
        ("--coordinator=h:1", "--num_processes=2", "--process_id=2"),
        ("--coordinator=:1",),
    ):
        assert "expected HOST:PORT, the number of processes, and this one's number" in refusal(
            f"--config={experiment}", *flags
        )
    text = refusal(f"--config={experiment}", "--coordinator=nowhere.invalid:1", "--num_processes=2", "--process_id=0")
    assert "host 'nowhere.invalid' is not known here" in text
    for name in ("SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.delenv(name, raising=False)
    assert "--coordinator=auto: neither TPU, Slurm, SkyPilot" in refusal(f"--config={experiment}", "--coordinator=auto")


def test_skypilot_names_the_processes():
    found = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3", "SKYPILOT_NODE_RANK": "2"}
    assert hosts.from_environment(found) == {
        "coordinator_address": "10.0.0.1:8476", "num_processes": 3, "process_id": 2,
    }  # fmt: skip
    assert hosts.from_environment({"SLURM_JOB_ID": "1"}) == {}  # JAX itself knows


def test_one_process_agrees_with_itself():
    assert hosts.is_first() and hosts.any_process(True) and not hosts.any_process(False)
    assert (
        hosts.broadcast_from_first("x") == "x"
        and hosts.min_over_processes(3) == 3
        and hosts.first_process_first(lambda: 5) == 5
    )
    np.testing.assert_array_equal(hosts.fetch({"a": np.ones(2)})["a"], np.ones(2))
    hosts.require_equal("command", ["a"], "")
    with pytest.raises(UserError, match="full"):
        hosts.once(lambda: (_ for _ in ()).throw(UserError("full")))


@pytest.mark.parametrize(
    ("code", "me", "ending", "text"),
    [
        (-6, 0, "F1121 x\n# of tasks that reached the barrier: 1/2.\nThe first task at the barrier: 1. Some timed "
                "out task names:\n0\n",
         "process 1 ended with an error of its own (see its last line), so process 0 stopped: "),
        (-6, 0, "E1121 UNAVAILABLE: Task 3 heartbeat timeout. This indicates",
         "process 3 died, so process 0 stopped: "),
        (-6, 2, "unhealthy (stopped sending heartbeats):\n1\nThe tasks have crashed.",
         "process 1 died, so process 2 stopped: "),
        # A connection broke, so the living left first: whoever is missing died.
        (-6, 0, "JaxRuntimeError: Gloo AllGather failed\nThe first task at the barrier: 2. Some timed out task "
                "names:\n1\n",
         "process 1 died, so process 0 stopped: "),
        (-6, 1, "F1121 x absl::Status: UNAVAILABLE: Socket closed",
         "process 0, which coordinates, died, so process 1 stopped: "),
        (-11, 1, "", "process 1 was killed (SIGSEGV): "),
        (-6, -1, "DEADLINE_EXCEEDED\nRPC: /xla.coordination.CoordinationService/RegisterTask",
         "this process met nobody, or not all, at h:1: "),
        (1, 0, "Traceback (most recent call last)\nValueError: a bug", ""),  # its own words are the best
    ],
)  # fmt: skip
def test_what_the_coordination_service_says_becomes_one_line(code, me, ending, text):
    said = supervisor.diagnosis(code, ending, me, "h:1")
    assert said.startswith(text) and bool(said) == bool(text) and "\n" not in said
