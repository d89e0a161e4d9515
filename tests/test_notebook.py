"""`routed.run` starts the command that its arguments mean, and says what failed."""

import sys

import pytest

import routed
from routed import notebook
from routed.contracts import UserError


def test_arguments_become_the_options_of_the_command(monkeypatch, tmp_path):
    commands = []
    monkeypatch.setattr(notebook, "_execute", commands.append)
    monkeypatch.setattr(notebook, "load", lambda folder: {"results": folder})
    settings = {"arms": ("learned", "frozen"), "shared_streams": True, "steps": 40}
    tables = routed.run("gmm_router:fig2a,smoke", settings, sweep={"experts.count": [2, 4]}, workdir=tmp_path / "w")
    assert commands == [
        [sys.executable, "-m", "routed.main", "--config=gmm_router:fig2a,smoke", f"--workdir={tmp_path / 'w'}",
         "--config.arms=learned,frozen", "--config.shared_streams=true", "--config.steps=40",
         "--sweep=experts.count=2,4"]
    ]  # fmt: skip
    assert tables == {"results": tmp_path / "w", "workdir": tmp_path / "w"}


def test_mistakes_are_told_before_a_process_starts(monkeypatch):
    monkeypatch.setattr(notebook, "_execute", lambda command: pytest.fail("a process was started"))
    with pytest.raises(UserError, match="did you mean 'gmm_router'"):
        routed.run("gmm_ruter:smoke")
    with pytest.raises(UserError, match=r"experts\.cuont.*did you mean"):
        routed.run("gmm_router:smoke", {"experts.cuont": 3})
    for arguments, told in (
        (
            {"sweep": {"tune.multipliers": [(0.3, 1.0), (3.0, 10.0)]}},
            "sweep of tune.multipliers: its values are tuples",
        ),
        ({"sweep": {"router.name": "linear"}}, "sweep of router.name: give a list of values, not 'linear'"),
        ({"sweep": {"steps": 20}}, "sweep of steps: give a list of values, not 20"),
        ({"sweep": {"steps": []}}, "sweep of steps: give a list of values"),
        ({"settings": ["steps=20"]}, "settings and sweep are dicts"),
        (
            {"settings": {"arms": ("learned,frozen",)}},
            "set texts with commas, quotation marks or brackets in your file",
        ),
    ):
        with pytest.raises(UserError, match=told):
            routed.run("gmm_router:smoke", **arguments)


def test_the_error_of_a_failed_run_is_raised(capfd):
    command = [sys.executable, "-c", "print('12:00:00 error: no space on the disk'); raise SystemExit(2)"]
    with pytest.raises(UserError, match=r"^no space on the disk \(exit code 2 of "):
        notebook._execute(command)
    assert "no space" in capfd.readouterr().out
    notebook._execute([sys.executable, "-c", "raise SystemExit(3)"])  # runs diverged: their tables say which


def test_completion_shows_the_public_names():
    assert {"analyse", "load", "run", "trace", "MoE"} <= {*dir(routed)} == {*routed.__all__}
