"""The law: an expectation of the gap between the learned and the fairest frozen router from settings, with an interval.

A gap is log(fairest / learned), a mean over the seeds of a point (`paired_values.fair_gap`). A law is a Gaussian
process (Rasmussen and Williams 2006) over the coordinates of AXES. Its file holds the points of the fit and the
parameters of the kernel, so a prediction needs no optimisation.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float

from routed.analysis.paired_values import fair_gap
from routed.engine.rows import last_evaluations
from routed.system import files, stored

#: The law that comes with the package.
FILE = pathlib.Path(__file__).with_name("law.json")

#: Smallest loss, as a share of the variance; lower losses count as this, since log ratios of solved problems say
#: nothing.
SOLVED = 0.01


class Axis(NamedTuple):
    """A variable of the law; `log`: figures draw it on a logarithmic axis."""

    label: str
    size: Callable[[Mapping[str, Any]], float]  # of a flat config
    value: Callable[[float, Mapping[str, Any]], float]  # of the key, from a size and a flat config
    coordinate: Callable[[Mapping[str, Any]], float]  # in the Gaussian process, from a flat config
    log: bool = True


def _logarithmic(label: str, key: str, by: str = "") -> Axis:
    """Returns the axis of the logarithm of a key's value, or of its ratio to the value of another key."""

    def size(flat: Mapping[str, Any]) -> float:
        return flat[key] / (flat[by] if by else 1)

    return Axis(label, size, lambda size, flat: size * (flat[by] if by else 1), lambda flat: math.log(size(flat)))


#: Key -> axis that it moves. The coordinate of separation is that of the relevant clusters, c sqrt(1 - s)
#: (`crossed`).
AXES = {
    "data.separation": Axis(
        "separation",
        lambda flat: flat["data.separation"],
        lambda size, flat: size,
        lambda flat: flat["data.separation"] * math.sqrt(1 - flat["data.irrelevant_fraction"]),
    ),
    "data.samples": _logarithmic("samples per cluster", "data.samples", "data.clusters"),
    "experts.count": _logarithmic("experts per cluster", "experts.count", "data.clusters"),
    "batch_size": _logarithmic("samples per batch", "batch_size"),
    "data.irrelevant_fraction": Axis(
        "share of irrelevant structure",
        lambda flat: flat["data.irrelevant_fraction"],
        lambda size, flat: size,
        lambda flat: flat["data.irrelevant_fraction"],
        log=False,
    ),
    "router.init_scale": Axis(
        "temperature of the fresh gate",
        lambda flat: 1 / flat["router.init_scale"],
        lambda size, flat: 1 / size,
        lambda flat: -math.log(flat["router.init_scale"]),
    ),
}


class Law(NamedTuple):
    """A fitted law."""

    points: tuple[Mapping[str, Any], ...]  # values of the keys of AXES, and of other keys that the axes read
    gaps: tuple[float, ...]  # measured
    form: str  # name of the kernel
    theta: tuple[float, ...]  # logarithms of the kernel's parameters
    reach: float  # largest deviation of the expectation of a point from the others: beyond it no point is near
    scores: Mapping[str, Mapping[str, float]]  # form -> scores of its cross-validation
    made: Mapping[str, Any]  # experiment, seeds and steps of the fit


class Expected(NamedTuple):
    """The expected gap at a point, with a 95 % interval for a mean over as many seeds as in the fit."""

    gap: float
    low: float
    high: float
    beyond: tuple[str, ...]  # reasons why the law extrapolates there


def gaps_of(
    table: pd.DataFrame, base: Mapping[str, Any], swept: Sequence[str]
) -> tuple[list[dict[str, Any]], list[float]]:
    """Returns the points of some rows and the mean gap at each, of losses cut at SOLVED; `base` is the flat config."""
    points, gaps = [], []
    reads = (*AXES, "data.clusters")
    for values, rows in last_evaluations(table).groupby(list(swept)):
        if (gap := fair_gap(cut(rows))) is not None:
            flat = {**base, **dict(zip(swept, np.array(values, object).tolist(), strict=True))}
            points.append({key: flat[key] for key in reads})
            gaps.append(gap.estimate.mean)
    return points, gaps


def cut(rows: pd.DataFrame, floor: float = SOLVED, metric: str = "test/loss") -> pd.DataFrame:
    """Returns the rows with losses of at least `floor`."""
    return rows.assign(**{metric: rows[metric].clip(lower=floor)})


def fit(points: Sequence[Mapping[str, Any]], gaps: Sequence[float], made: Mapping[str, Any]) -> Law:
    """Returns the law of these points, in the form with the highest log density of left-out gaps."""
    from routed.papers.ours import law_process

    x, y = _coordinates(points, points), np.array(gaps)
    scores, form, theta = law_process.chosen(x, y)
    law = Law(tuple(points), tuple(map(float, gaps)), form, theta, math.inf, scores, made)
    all_but_one = [np.arange(len(y)) != index for index in range(len(y))]
    deviations = [law_process.predictions(form, theta, x[rest], y[rest], x[~rest])[1] for rest in all_but_one]
    return law._replace(reach=float(np.max(deviations)))


def expect(law: Law, points: Sequence[Mapping[str, Any]]) -> list[Expected]:
    """Returns the law's expectations at points (flat configs), with reasons where it extrapolates."""
    from routed.papers.ours import law_process  # here, as scikit-learn takes two seconds to load

    fit, new = _coordinates(law.points, law.points), _coordinates(law.points, points)
    mean, deviation = law_process.predictions(law.form, law.theta, fit, np.array(law.gaps), new)
    return [
        Expected(float(mean), float(low), float(high), _extrapolations(law, point, std))
        for point, (mean, low, high), std in zip(points, law_process.with_ends(mean, deviation), deviation, strict=True)
    ]


def _extrapolations(law: Law, point: Mapping[str, Any], deviation: float) -> tuple[str, ...]:
    """Returns a text for each axis on which a point is outside of the fit's range, or that it is far from the fit."""
    reasons = []
    for axis in AXES.values():
        sizes, size = [axis.size(fitted) for fitted in law.points], axis.size(point)
        if not min(sizes) * (1 - 1e-6) <= size <= max(sizes) * (1 + 1e-6):
            reasons.append(f"{axis.label} {size:.3g} is outside of [{min(sizes):.3g}, {max(sizes):.3g}]")
    if not reasons and deviation > law.reach * (1 + 1e-6):
        reasons.append("no point of the fit is near")
    return tuple(reasons)


def _coordinates(fit: Sequence[Mapping[str, Any]], points: Sequence[Mapping[str, Any]]) -> Float[np.ndarray, "N A"]:
    """Returns coordinates of points, on a scale on which the points of the fit go from -1 to 1."""
    of_fit, of_points = (
        np.array([[axis.coordinate(flat) for axis in AXES.values()] for flat in configs]) for configs in (fit, points)
    )
    low, high = of_fit.min(0), of_fit.max(0)
    return 2 * (of_points - low) / np.where(high > low, high - low, 1.0) - 1


def read(path: pathlib.Path = FILE) -> Law:
    """Reads the law of a file.

    Raises:
      UserError: no such file, or a file without a law.
    """
    number, mend = stored.number, f"make a law with routed predict --fit=DIR --write={path}"
    form = {"points": [{str: number}], "gaps": [number], "form": str, "theta": [number], "reach": number}
    form |= {"scores": {str: {str: number}}, "made": {"experiment": str, "seeds": int}}
    content = stored.read(path, form, mend)
    with stored.fitting(str(path), mend):
        law = Law(**content)
        expect(law, law.points[:1])
    return law


def write(law: Law, path: pathlib.Path) -> None:
    """Writes a law to a file, one point on each line.

    Raises:
      UserError: the disk is full or read-only.
    """
    entries = {**law._asdict(), "points": "POINTS"}
    lines = ",\n  ".join(json.dumps(point) for point in law.points)
    files.write(path, json.dumps(entries, indent=1).replace('"POINTS"', f"[\n  {lines}\n ]") + "\n")
