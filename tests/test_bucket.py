"""A workdir in a bucket, against an emulator of Google Cloud Storage: what a disk gives, several processes included."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request

import pandas as pd
import pytest

from tests.patience import PATIENCE
from tests.test_command_line import command, write_experiment
from tests.test_hosts import SHARED, Processes, same, table, wait_for

# Processes, or several programs to compile; the tests are about what is run.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled")]

SERVER = """
import sys
from gcp_storage_emulator.server import create_server

server = create_server("localhost", int(sys.argv[1]), in_memory=True, default_bucket="lab")
server.run()
"""


@pytest.fixture(scope="module")
def bucket():
    """(names of a prefix, content of an object) in bucket `lab`, which this process's children find."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    address = f"http://localhost:{port}"
    patch = pytest.MonkeyPatch()
    for name, value in {
        "STORAGE_EMULATOR_HOST": address, "TENSORSTORE_GCS_HTTP_URL": address, "GOOGLE_CLOUD_PROJECT": "none",
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none", "GCE_METADATA_HOST": "localhost:1",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }.items():  # fmt: skip
        patch.setenv(name, value)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def get(path):
        with urllib.request.urlopen(f"{address}/storage/v1/b/lab{path}", timeout=10) as answer:
            return answer.read()

    def names(prefix):
        return [item["name"] for item in json.loads(get(f"/o?prefix={prefix}")).get("items", [])]

    def up():
        try:
            return get("")
        except urllib.error.URLError:
            return False

    wait_for(up, 30)
    yield names, lambda name: get(f"/o/{urllib.parse.quote(name, safe='')}?alt=media")
    server.kill()
    server.wait()
    patch.undo()


def test_processes_killed_and_resumed_leave_the_rows_of_a_disk(bucket, tmp_path):
    names, content = bucket
    line = f"--config={write_experiment(tmp_path)}", "--config.steps=60", *SHARED
    command(*line, f"--workdir={tmp_path / 'disk'}")
    line = *line, "--workdir=gs://lab/runs/tiny"
    running = Processes(2, *line)
    wait_for(lambda: "checkpoints/000000020/meta.json" in "".join(names("runs/tiny/checkpoints/0")))
    os.kill(running.child(0), signal.SIGKILL)
    (code, said), (other, heard) = running.ended(60)
    resume = "the same command, started on every host again, goes on from the last checkpoint"
    assert code == other == 1
    assert said.splitlines()[-1] == f"error: process 0 was killed (SIGKILL; out of memory?): {resume}"
    assert heard.splitlines()[-1] == f"error: process 0, which coordinates, died, so process 1 stopped: {resume}"
    assert "Traceback" not in heard and "@ 0x" not in heard.replace("     ", " ")
    (code, said), (other, _) = Processes(2, *line).ended()
    assert code == other == 0, said
    assert "resuming learned/frozen E=4 from step" in said and "damaged" not in said.split("resuming")[1]
    same(pd.read_parquet(io.BytesIO(content("runs/tiny/results.parquet"))), table(tmp_path / "disk"))
    left = {name.removeprefix("runs/tiny/").split("/")[0] for name in names("runs/tiny/")}
    assert {
        "config.json",
        "claims.json",
        "report.html",
        "results.parquet",
        "summary.csv",
        "timing.csv",
        "routed.log",
    } <= left
    assert "checkpoints" not in left and "compiled" not in left  # tests share a cache of programs
    log = content("runs/tiny/routed.log").decode()
    assert "resuming" in log and "finished in" in log
    script = "import routed; print(len(routed.load('gs://lab/runs/tiny')['results']))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert int(found.stdout) == len(table(tmp_path / "disk")), found.stderr


def test_a_bucket_that_is_not_there_ends_in_one_line(bucket, tmp_path):
    line = [sys.executable, "-m", "routed.main", f"--config={write_experiment(tmp_path)}", "--workdir=gs://none/tiny"]
    (own := tmp_path / "temporary").mkdir()
    found = subprocess.run(
        line, capture_output=True, text=True, timeout=PATIENCE, env=os.environ | {"TMPDIR": str(own)}
    )
    assert not [*own.glob("*.log")]  # what the log was copied from
    assert found.returncode == 2
    assert "error: cannot use gs://none/tiny/routed.log" in found.stderr.splitlines()[-1]
    assert "check the bucket's name and your right to it" in found.stderr and "Traceback" not in found.stderr


def test_what_reads_buckets_is_named_when_it_is_missing(tmp_path):
    script = "import sys; sys.modules['gcsfs'] = None; from routed import main; main.run()"
    line = [sys.executable, "-c", script, f"--config={write_experiment(tmp_path)}", "--workdir=gs://lab/x"]
    found = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE)
    assert found.returncode == 2 and "Traceback" not in found.stderr
    assert "install what reads buckets: pip install '.[gcs]'" in found.stderr.splitlines()[-1]
