"""Trackers get the finite scalars of the runs that still train, and say how to install what they lack."""

import sys
import types

import numpy as np
import pytest

from routed.contracts import UserError
from routed.engine import trackers
from routed.plan.config import base
from routed.plan.run import Run


class Fake(types.ModuleType):
    """A library of runs that keeps its calls."""

    def __init__(self, name):
        super().__init__(name)
        self.calls = []

    def init(self, **options):
        self.calls.append(options)
        row = len(self.calls)
        return types.SimpleNamespace(
            log=lambda scalars, step: self.calls.append((row, scalars, step)), finish=lambda: self.calls.append(row)
        )


@pytest.fixture
def runs():
    return [Run(f"key{seed}", ({},), "learned", seed, False, base(), (), ({},)) for seed in (3, 4)]


@pytest.mark.parametrize(("name", "own"), [("wandb", "id"), ("trackio", "embed")])
def test_a_library_gets_a_run_for_each_run_and_finite_scalars_of_the_active(name, own, runs, tmp_path, monkeypatch):
    library = Fake(name)
    monkeypatch.setitem(sys.modules, name, library)
    tracker = trackers.TRACKERS[name](tmp_path / "sweep", runs)
    history = {"test/loss": np.array([[0.5, 0.25], [0.5, 0.125]]), "router/ami": np.array([[0, np.nan], [0, 1.0]])}
    trackers.write_row(tracker, history, 1, 20, np.array([True, False]))
    tracker.close()
    first, second, *rest = library.calls
    assert (first["project"], first["name"], second["name"]) == ("sweep", "learned-seed3-key3", "learned-seed4-key4")
    assert own in first and first["config"]["steps"] == base().steps
    assert rest == [(1, {"test/loss": 0.25}, 20), 1, 2]  # NaN is left out, and so is the run that diverged


def test_what_is_missing_is_named(monkeypatch):
    with pytest.raises(UserError, match=r"--tracker=wandbe: unknown \(did you mean 'wandb'\?\); known: tensorboard"):
        trackers.check("wandbe")
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import fails
    with pytest.raises(UserError, match=r"--tracker=wandb needs wandb: pip install -e '.\[wandb\]'"):
        trackers.check("wandb")
    trackers.check("")
