"""Weights & Biases and trackio keep runs without a network: pip install wandb trackio."""

import numpy as np
import pytest

from routed.engine import trackers
from routed.plan.config import base
from routed.plan.run import Run


@pytest.fixture
def runs():
    return [Run(f"key{seed}", ({},), "learned", seed, False, base(), (), ({},)) for seed in (3, 4)]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_runs_are_kept_offline_and_go_on_after_a_kill(name, runs, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for row, step in enumerate((0, 10)):  # two processes, the second resumes
        tracker = trackers.TRACKERS[name](tmp_path / "sweep", runs)
        trackers.write_row(tracker, {"test/loss": np.array([[0.5, 0.25]] * 2)}, row, step, np.array([True, True]))
        tracker.close()
    if name == "wandb":
        assert len([*(tmp_path / "sweep").rglob("run-key3.wandb")]) == 2
        return
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs("sweep", "learned-seed3-key3")
    assert [row["test/loss"] for row in rows] == [0.5, 0.25]
