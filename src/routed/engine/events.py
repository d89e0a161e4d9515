"""TensorBoard event files of long runs, one folder a run, written at every evaluation."""

from __future__ import annotations

import pathlib

import numpy as np

from routed.plan.runs import Run
from routed.system import files


class Events:
    """`tensorboard --logdir=WORKDIR/tensorboard` shows the scalars of the runs of a batch while they train."""

    def __init__(self, workdir: pathlib.Path, batch: list[Run]):
        self.folders = [workdir / "tensorboard" / f"{run.arm}-seed{run.seed}-{run.key}" for run in batch]

    def write(self, history, row: int, step: int, active: np.ndarray) -> None:
        """Row `row` of a history of scalars [R, evaluations], as of `step`, of the runs that are `active`."""
        from tensorboardX import SummaryWriter  # here, as few runs are watched, and it takes half a second to load

        scalars = {name: values[:, row] for name, values in history.items()}
        for i, folder in enumerate(self.folders):
            if not active[i]:
                continue
            # Named by the step: the library's own names are seconds, and a second writer of one would overwrite it.
            with files.explained(folder), SummaryWriter(str(folder), filename_suffix=f".{step}") as writer:
                for name, values in scalars.items():
                    if np.isfinite(values[i]):
                        writer.add_scalar(name, float(values[i]), step)
