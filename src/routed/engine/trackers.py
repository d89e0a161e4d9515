"""Trackers show runs while they train: TensorBoard, Weights & Biases, trackio, or one of your own."""

from __future__ import annotations

import functools
import importlib
import pathlib
import types
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from routed.contracts import UserError, nearest
from routed.plan.run import Run
from routed.settings.tree import flatten
from routed.system import files


class Tracker(Protocol):
    """Gets the scalars of the runs of a batch at every evaluation; a resumed batch makes a new one."""

    def write(self, index: int, scalars: Mapping[str, float], step: int) -> None:
        """Notes the finite scalars of run `index` of the batch after `step` steps."""

    def close(self) -> None:
        """Ends the batch."""


class TensorBoard:
    """Event files, one folder a run: `tensorboard --logdir=WORKDIR/tensorboard`."""

    def __init__(self, workdir: pathlib.Path, runs: list[Run]):
        self.writer = _library("tensorboardX").SummaryWriter
        self.folders = [workdir / "tensorboard" / _name(run) for run in runs]

    def write(self, index: int, scalars: Mapping[str, float], step: int) -> None:
        """Writes a file for the step."""
        folder = self.folders[index]
        # Named by the step: the library's default names are seconds, and a second writer of one would overwrite it.
        with files.explained(folder), self.writer(str(folder), filename_suffix=f".{step}") as writer:
            for name, value in scalars.items():
                writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Has nothing to end: each file is closed at once."""


class Online:
    """Runs of Weights & Biases or trackio: the project is the name of the workdir, and a resumed run goes on.

    Without a network: WANDB_MODE=offline; trackio keeps its runs on this machine.
    """

    def __init__(self, library: str, workdir: pathlib.Path, runs: list[Run]):
        options = OPTIONS[library]
        common = {"project": workdir.name, "resume": "allow"}
        self.runs = [
            _library(library).init(name=_name(run), config=flatten(run.config), **common, **options(workdir, run))
            for run in runs
        ]

    def write(self, index: int, scalars: Mapping[str, float], step: int) -> None:
        """Logs the scalars."""
        self.runs[index].log(dict(scalars), step=step)

    def close(self) -> None:
        """Ends the runs."""
        for run in self.runs:
            run.finish()


#: Library -> what its `init` gets of a run, besides project, name and config. Several runs of a batch are open at once.
OPTIONS: dict[str, Callable[[pathlib.Path, Run], dict[str, Any]]] = {
    "wandb": lambda workdir, run: {"id": run.key, "group": run.arm, "dir": str(workdir), "reinit": "create_new"},
    "trackio": lambda workdir, run: {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False},
}

#: Name -> a tracker of the runs of a batch in a workdir; a file of an experiment may add its own.
TRACKERS: dict[str, Callable[[pathlib.Path, list[Run]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": functools.partial(Online, "wandb"),
    "trackio": functools.partial(Online, "trackio"),
}


def check(name: str) -> None:
    """Refuses an unknown tracker, and one whose library is not installed.

    Raises:
      UserError: names the trackers, or the command that installs the library.
    """
    if name and name not in TRACKERS:
        raise UserError(f"--tracker={name}: unknown{nearest(name, TRACKERS)}; known: {', '.join(TRACKERS)}")
    if name in LIBRARIES:
        _library(LIBRARIES[name])


def write_row(tracker: Tracker, history: Mapping[str, np.ndarray], row: int, step: int, active: np.ndarray) -> None:
    """Writes row `row` of a history of scalars [R, evaluations], as of `step`, of the active runs."""
    for index in np.flatnonzero(active):
        scalars = {name: float(values[index, row]) for name, values in history.items()}
        tracker.write(int(index), {name: value for name, value in scalars.items() if np.isfinite(value)}, step)


def _name(run: Run) -> str:
    return f"{run.arm}-seed{run.seed}-{run.key}"


#: Tracker -> the library that it needs, which is an extra of this package.
LIBRARIES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}


def _library(name: str) -> types.ModuleType:
    """Imports a library at its first use: few runs are tracked.

    Raises:
      UserError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        (extra,) = (tracker for tracker, library in LIBRARIES.items() if library == name)
        raise UserError(f"--tracker={extra} needs {name}: pip install -e '.[{extra}]'") from error
