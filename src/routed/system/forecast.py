"""How long a command still takes: what its groups of runs took so far, and what a model says of those that have not begun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls


class Stretch(NamedTuple):
    """Some work of a group, in steps and evaluations of single runs, and the seconds that it took."""

    steps: int
    evaluations: int
    seconds: float


class Course(NamedTuple):
    """A group of runs that share a program: all its steps and evaluations, those that are done, and what was seen of them.

    `cost` is a model's of all the work, in a unit that all groups share. `compiling` took so many seconds; None is not yet.
    A step of a run has `tokens` tokens and so many model `flops`; None where its speed is told in steps alone.
    """

    name: str
    steps: int
    evaluations: int
    cost: float
    steps_done: int = 0
    evaluations_done: int = 0
    stretches: tuple[Stretch, ...] = ()
    compiling: float | None = None
    tokens: int = 0
    flops: float | None = None


def seconds_left(courses: Sequence[Course]) -> float | None:
    """Seconds until all courses are at their end; None while no steps of any were seen.

    One that was seen goes on at its pace, if more was seen than the first stretch, which is slow. The steps of another cost what
    the model says, in seconds as they were where it can be compared; its evaluations take as long as the others', and so does
    its program, if it is not compiled.
    """
    paces = {
        i: pace(one.stretches) for i, one in enumerate(courses) if sum(part.steps > 0 for part in one.stretches) > 1
    }
    if not paces:
        return None
    seen = sum(step * courses[i].steps for i, (step, _) in paces.items())
    unit = seen / sum(courses[i].cost for i in paces)
    evaluation = sum(one for _, one in paces.values()) / len(paces)
    compiled = [one.compiling for one in courses if one.compiling is not None]
    total = 0.0
    for i, one in enumerate(courses):
        steps, evaluations = one.steps - one.steps_done, one.evaluations - one.evaluations_done
        each = paces.get(i, (unit * one.cost / max(one.steps, 1), evaluation))
        total += each[0] * steps + each[1] * evaluations
        if one.compiling is None and steps:
            total += sum(compiled) / max(len(compiled), 1)
    return total


def share_done(courses: Sequence[Course]) -> float:
    """How much of all the work is done, by its cost; 1 at the end."""
    left = sum(one.cost * (one.steps - one.steps_done) / max(one.steps, 1) for one in courses)
    return 1 - left / sum(one.cost for one in courses)


def pace(stretches: Sequence[Stretch]) -> tuple[float, float]:
    """Seconds of a step and of an evaluation: least squares over stretches, neither below 0."""
    work = np.array([(one.steps, one.evaluations) for one in stretches], float)
    (step, evaluation), _ = nnls(work, np.array([one.seconds for one in stretches]))
    return float(step), float(evaluation)
