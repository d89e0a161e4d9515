"""gcloud's own parser against every command that launch/tpu_vm.sh prints.

Needs gcloud on the PATH and no account. gcloud parses a command before it asks who calls: a wrong one ends with 2, a
right one with 1, as nobody is logged in here. It runs without the user's configuration, and cannot reach Google Cloud.

    python tests/external/gcloud.py
"""

import os
import pathlib
import shlex
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).parent.parent.parent
VM = ["--name=moe", "--zone=us-central2-b", "--project=p"]
CALLS = [
    ["all", *VM, "--type=v4-8", "--", "--config=x"],
    ["all", *VM, "--type=v4-8", "--spot", "--version=tpu-ubuntu2204-base", "--", "--config=x"],
    ["all", *VM, "--type=v5litepod-256", "--queued", "--spot", "--watch", "--", "--config=x", "--workdir=gs://b/x"],
    ["stop", *VM],
]


def ends(command, home):
    """The exit code and the errors of gcloud, which knows nobody and nothing."""
    environment = {
        "PATH": os.environ["PATH"], "HOME": home, "CLOUDSDK_CONFIG": home, "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
        "CLOUDSDK_CORE_CHECK_GCE_METADATA": "0", "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "1",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": "http://localhost:1/",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE": "http://localhost:1/",
    }  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr


def main():
    commands = {}
    for call in CALLS:
        printed = subprocess.run(
            [ROOT / "launch/tpu_vm.sh", "--dry_run", *call], capture_output=True, text=True, check=True
        )
        commands |= {line: shlex.split(line) for line in printed.stdout.splitlines() if line.startswith("gcloud ")}
    with tempfile.TemporaryDirectory() as home:
        for line, command in commands.items():
            code, error = ends(command, home)
            assert code == 1 and "active account" in error, f"{line}\n{error}"
            code, error = ends([*command, "--no-such-flag"], home)
            assert code == 2 and "unrecognized arguments" in error, f"{line}\n{error}"
            print("understood:", line[:120])


if __name__ == "__main__":
    main()
