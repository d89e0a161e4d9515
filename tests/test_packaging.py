"""A wheel holds all that the command needs, wherever it runs, and building one leaves nothing in the source tree."""

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.patience import PATIENCE

ROOT = pathlib.Path(__file__).parent.parent
#: What a build reads, of a checkout that may hold runs and environments.
SOURCES = ("pyproject.toml", "README.md", "LICENSE", ".gitignore", "src", "experiments")


def tree(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The content of a wheel, built without a network from a copy that ends as it was."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    before = tree(source)
    line = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-q", "-w", str(built)]
    done = subprocess.run(line, cwd=source, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert tree(source) == before
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(built / "site")
    return built / "site"


@pytest.mark.slow
def test_a_wheel_brings_the_experiments_the_page_and_the_command(site):
    held = tree(site)
    assert {f"routed/experiments/{path.name}" for path in (ROOT / "experiments").glob("*.py")} < held
    assert {"routed/analysis/report.html", "routed/py.typed"} < held and not any("__pycache__" in name for name in held)
    (entry,) = site.glob("*.dist-info/entry_points.txt")
    assert "routed = routed.system.commands:run" in entry.read_text()


@pytest.mark.slow
def test_the_command_of_a_wheel_finds_its_experiments_from_any_folder(site, tmp_path):
    def run(code, *words):
        return subprocess.run(
            [sys.executable, "-c", code, *words],
            cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(site)}, capture_output=True, text=True, timeout=PATIENCE,
        )  # fmt: skip

    command = "from routed.system.commands import run; run()"
    found = run("from routed.plan import experiment; print(experiment.find('t5_mc4'))")
    assert found.stdout.strip() == str(site / "routed" / "experiments" / "t5_mc4.py"), found.stderr
    shown = run(command, "list", "gmm_router")
    assert shown.returncode == 0 and "\n  fig3 " in shown.stdout, shown.stderr
    wrong = run(command, "--config=gmm_ruter")
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1 and "did you mean 'gmm_router'?" in wrong.stderr
    assert [*tmp_path.iterdir()] == []
