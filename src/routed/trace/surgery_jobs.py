"""The jobs of a surgery: which router replaces which one, for which draw and with how long a repair."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from routed.contracts import UserError
from routed.trace.kinds import EVERY, REPLACEMENTS, SEVERAL, TRAINED

#: The layer of a job that replaces every router.
ALL = "all"


class Job(NamedTuple):
    """One model to measure: a replacement in `layer` (`ALL`: every layer), repaired for `repair_steps` steps.

    An empty replacement is the model as it is.
    """

    layer: str
    replacement: str
    draw: int = 0
    repair_steps: int = 0

    def file(self, out: pathlib.Path) -> pathlib.Path:
        """Returns the file of the job's losses."""
        return out / "jobs" / f"{self.layer}-{self.replacement or 'model'}-{self.draw}-{self.repair_steps}.npz"


class SurgeryResult(NamedTuple):
    """Losses of a surgery: means [R] by job in nats a token, or the reason why a job has none.

    `repair_steps` are those of the longest repair. `unseen` is the share of tokens whose id the other text lacks.
    `regret` has the losses of sampled tokens by layer (`regret.regret_of`), or the reason why a layer has none.
    """

    layers: tuple[str, ...]
    experts: int
    losses: Mapping[Job, np.ndarray]
    reasons: Mapping[Job, str]
    unseen: float
    tokens: int
    repair_steps: int
    draws: int = 1
    model: str = ""
    source: str = ""
    regret: Mapping[str, Mapping[str, np.ndarray] | str] = {}


def replacements_of(requested: Sequence[str], has_checkpoint: bool) -> Sequence[str]:
    """Returns the requested replacements, or all available ones; `subsets` stands for all subsets.

    Raises:
      UserError: a replacement is unknown, or one of another checkpoint and that checkpoint are not given together.
    """
    requested = [name for given in requested for name in SEVERAL.get(given, (given,))]
    if unknown := [name for name in requested if name not in REPLACEMENTS]:
        names = ", ".join((*REPLACEMENTS, *SEVERAL))
        raise UserError(f"--replace={unknown[0]}: no such replacement; known: {names}")
    of_checkpoint = [name for name, replacement in REPLACEMENTS.items() if replacement.needs_checkpoint]
    if requested and has_checkpoint != any(name in requested for name in of_checkpoint):
        given = next((name for name in of_checkpoint if name in requested), of_checkpoint[0])
        needs = f"--replace={given} needs --router_from, and --router_from needs it"
        raise UserError(f"{needs}: give both or neither")
    return requested or [name for name in REPLACEMENTS if has_checkpoint or name not in of_checkpoint]


def repair_steps_of(requested: Iterable[int | str]) -> list[int]:
    """Returns the lengths of repairs in ascending order, without 0.

    Raises:
      UserError: a length is no whole number from 0 on.
    """
    try:
        steps = {int(step) for step in requested}
    except ValueError:
        steps = {-1}
    if min(steps, default=0) < 0:
        text = ",".join(map(str, requested))
        raise UserError(f"--repair_steps={text}: give numbers of steps, 0 for no repair, as in --repair_steps=50,200")
    return sorted(steps - {0})


def jobs_of(layers: Sequence[str], replace: Sequence[str], draws: int, repair_steps: Sequence[int]) -> list[Job]:
    """Returns all jobs: the model as it is, then all routers replaced, then each alone.

    All routers at once have every length of repair, drawn `draws` times (the draw decides the order of the text too).
    A router alone has the longest repair, once.
    """
    jobs = [Job(ALL, "")]
    for layer in (ALL, *layers):
        for name in (TRAINED, *replace):
            kind = EVERY[name]
            if kind.replaces_all and layer != ALL:
                continue
            drawn = range(draws if kind.drawn and name != TRAINED else 1)
            jobs += [Job(layer, name, draw) for draw in drawn if name != TRAINED]
            if kind.learns:
                steps, repairs = (repair_steps, draws) if layer == ALL else (repair_steps[-1:], 1)
                jobs += [Job(layer, name, draw, length) for length in steps for draw in range(repairs)]
    return jobs
