"""TensorBoard event files of long runs, one folder a run, written at every evaluation."""

from __future__ import annotations

import pathlib

import numpy as np

from routed.plan.run import Run
from routed.system import files


class Events:
    """The event files of a batch, which `tensorboard --logdir=WORKDIR/tensorboard` shows while its runs train."""

    def __init__(self, workdir: pathlib.Path, runs: list[Run]):
        self.folders = [workdir / "tensorboard" / f"{run.arm}-seed{run.seed}-{run.key}" for run in runs]

    def write(self, history, row: int, step: int, active: np.ndarray) -> None:
        """Writes row `row` of a history of scalars [R, evaluations], as of `step`, for the active runs."""
        from tensorboardX import SummaryWriter  # lazily: few runs are watched, and it takes half a second to load

        scalars = {name: values[:, row] for name, values in history.items()}
        for i, folder in enumerate(self.folders):
            if not active[i]:
                continue
            # Named by the step: the library's default names are seconds, and a second writer of one would overwrite it.
            with files.explained(folder), SummaryWriter(str(folder), filename_suffix=f".{step}") as writer:
                for name, values in scalars.items():
                    if np.isfinite(values[i]):
                        writer.add_scalar(name, float(values[i]), step)
