"""The law: an expectation of the gap between the learned and the fairest frozen router from settings, with an interval.

A gap is log(fairest / learned), a mean over the seeds of a point (`paired_values.fair_gap`). A law is a Gaussian
process (Rasmussen and Williams 2006) over the coordinates of AXES. Its file holds the points of the fit and the
parameters of the kernel, so a prediction needs no optimisation.
"""

from __future__ import annotations

import json
import math
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy import stats
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct, Kernel, Matern, WhiteKernel
from sklearn.model_selection import KFold

from routed.analysis.paired_values import fair_gap
from routed.analysis.statistics import LEVEL
from routed.contracts import UserError
from routed.engine.rows import last_evaluations
from routed.papers.ours.preregistered import SCORES
from routed.system import files

#: The law that comes with the package.
FILE = pathlib.Path(__file__).with_name("law.json")

#: Smallest loss, as a share of the variance; lower losses count as this, since log ratios of solved problems say
#: nothing.
SOLVED = 0.01

#: Folds of the cross-validation that chooses a form, and starts of the search for a kernel's parameters.
FOLDS, STARTS = 10, 3


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
#: (`tasks.crossed`).
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


def _kernels() -> dict[str, Kernel]:
    """Returns form -> kernel with noise: linear and quadratic regression, smooth and rougher functions of each axis."""
    size, noise, lengths = ConstantKernel(1.0, (1e-3, 1e3)), WhiteKernel(0.1, (1e-4, 1e1)), np.ones(len(AXES))
    slope = DotProduct(1.0, (1e-2, 1e2))
    return {
        "linear": size * slope + noise,
        "quadratic": size * slope**2 + noise,
        "smooth": size * RBF(lengths, (0.1, 100.0)) + noise,
        "rough": size * Matern(lengths, (0.1, 100.0), nu=1.5) + noise,
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
    x, y = _coordinates(points, points), np.array(gaps)
    scores = {form: cross_validated(kernel, x, y) for form, kernel in _kernels().items()}
    form = max(scores, key=lambda name: scores[name]["log_density"])
    theta = tuple(map(float, _fitted(_kernels()[form], x, y).kernel_.theta))
    law = Law(tuple(points), tuple(map(float, gaps)), form, theta, math.inf, scores, made)
    all_but_one = [np.arange(len(y)) != index for index in range(len(y))]
    deviations = [_process(law, x[rest], y[rest]).predict(x[~rest], return_std=True)[1] for rest in all_but_one]
    return law._replace(reach=float(np.max(deviations)))


def cross_validated(kernel: Kernel, x: Float[np.ndarray, "N A"], gaps: Float[np.ndarray, " N"]) -> dict[str, float]:
    """Returns scores of a kernel on gaps of folds that are left out of its fit.

    `log_density`, the mean log N(gap; mean, deviation^2), chooses the form; the other scores are those of
    `preregistered.SCORES`.
    """
    mean, deviation = np.empty(len(gaps)), np.empty(len(gaps))
    for rest, out in KFold(FOLDS, shuffle=True, random_state=0).split(x):
        mean[out], deviation[out] = _fitted(kernel, x[rest], gaps[rest]).predict(x[out], return_std=True)
    density = float(stats.norm.logpdf(gaps, mean, deviation).mean())
    return {"log_density": density} | {
        name: float(score(gaps, _with_ends(mean, deviation))) for name, score in SCORES.items()
    }


def _with_ends(mean: Float[np.ndarray, " N"], deviation: Float[np.ndarray, " N"]) -> Float[np.ndarray, "N 3"]:
    """Returns expectations with the ends of their 95 % intervals."""
    half = stats.norm.ppf((1 + LEVEL) / 2) * deviation
    return np.stack([mean, mean - half, mean + half], axis=1)


def expect(law: Law, points: Sequence[Mapping[str, Any]]) -> list[Expected]:
    """Returns the law's expectations at points (flat configs), with reasons where it extrapolates."""
    process = _process(law, _coordinates(law.points, law.points), np.array(law.gaps))
    mean, deviation = process.predict(_coordinates(law.points, points), return_std=True)
    return [
        Expected(float(mean), float(low), float(high), _extrapolations(law, point, std))
        for point, (mean, low, high), std in zip(points, _with_ends(mean, deviation), deviation, strict=True)
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


def _fitted(kernel: Kernel, x: np.ndarray, gaps: np.ndarray) -> GaussianProcessRegressor:
    """Returns the process whose parameters make these gaps most likely.

    An axis without effect has a length at its bound: the warning about it is suppressed.
    """
    process = GaussianProcessRegressor(kernel, normalize_y=True, n_restarts_optimizer=STARTS, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return process.fit(x, gaps)


def _process(law: Law, x: np.ndarray, gaps: np.ndarray) -> GaussianProcessRegressor:
    """Returns the process with a law's parameters, given these gaps."""
    kernel = _kernels()[law.form].clone_with_theta(np.array(law.theta))
    return GaussianProcessRegressor(kernel, optimizer=None, normalize_y=True).fit(x, gaps)


def read(path: pathlib.Path = FILE) -> Law:
    """Reads the law of a file.

    Raises:
      UserError: no such file, or a file without a law.
    """
    with files.explained(path):
        text = path.read_text("utf-8")
    try:
        return Law(**json.loads(text))
    except (TypeError, ValueError):
        raise UserError(f"{path}: not a law: make one with routed predict --fit=DIR --write={path}") from None


def write(law: Law, path: pathlib.Path) -> None:
    """Writes a law to a file, one point on each line.

    Raises:
      UserError: the disk is full or read-only.
    """
    entries = {**law._asdict(), "points": "POINTS"}
    lines = ",\n  ".join(json.dumps(point) for point in law.points)
    files.write(path, json.dumps(entries, indent=1).replace('"POINTS"', f"[\n  {lines}\n ]") + "\n")
