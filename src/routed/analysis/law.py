"""The law: the gap between the learned router and the fairest frozen one, expected from settings, with an interval.

A gap is log(fairest / learned), a mean over the seeds of a point (`paired_values.fair_gap`). A law is a Gaussian process (Rasmussen and
Williams 2006) over the coordinates of AXES, kept as the points that it was fitted to and the parameters of its kernel, so that a
prediction needs no optimisation.
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
from routed.analysis.preregistered import SCORES
from routed.analysis.statistics import LEVEL
from routed.contracts import UserError
from routed.engine.rows import last
from routed.system import files

#: What comes with the package.
FILE = pathlib.Path(__file__).with_name("law.json")

#: A loss below this share of the variance counts as this: what is solved is solved, and a log ratio of 1e-5 and 1e-2 is about neither.
SOLVED = 0.01

#: Folds of the cross-validation that chooses a form, and starts of the search for a kernel's parameters.
FOLDS, STARTS = 10, 3


class Axis(NamedTuple):
    """What the gap is a function of: its words, its size from a flat config, the value of its key that has a size, and its coordinate."""

    words: str
    size: Callable[[Mapping[str, Any]], float]
    value: Callable[[float, Mapping[str, Any]], float]
    place: Callable[[Mapping[str, Any]], float]
    log: bool = True  # how a figure draws it


def _logarithmic(words: str, key: str, by: str = "") -> Axis:
    """The logarithm of what a key says, or of how much that is for each of what another one counts."""

    def size(flat: Mapping[str, Any]) -> float:
        return flat[key] / (flat[by] if by else 1)

    return Axis(words, size, lambda size, flat: size * (flat[by] if by else 1), lambda flat: math.log(size(flat)))


#: The key that moves it -> axis. Separation counts as that of the clusters that matter, c sqrt(1 - s) (`tasks.crossed`).
AXES = {
    "data.separation": Axis(
        "separation",
        lambda flat: flat["data.separation"],
        lambda size, flat: size,
        lambda flat: flat["data.separation"] * math.sqrt(1 - flat["data.share"]),
    ),
    "data.samples": _logarithmic("samples per cluster", "data.samples", "data.clusters"),
    "experts.count": _logarithmic("experts per cluster", "experts.count", "data.clusters"),
    "batch_size": _logarithmic("samples per batch", "batch_size"),
    "data.share": Axis(
        "share of irrelevant structure",
        lambda flat: flat["data.share"],
        lambda size, flat: size,
        lambda flat: flat["data.share"],
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
    """Form -> kernel, noise included: Bayesian linear and quadratic regression, smooth and rougher functions of each axis."""
    size, noise, lengths = ConstantKernel(1.0, (1e-3, 1e3)), WhiteKernel(0.1, (1e-4, 1e1)), np.ones(len(AXES))
    slope = DotProduct(1.0, (1e-2, 1e2))
    return {
        "linear": size * slope + noise,
        "quadratic": size * slope**2 + noise,
        "smooth": size * RBF(lengths, (0.1, 100.0)) + noise,
        "rough": size * Matern(lengths, (0.1, 100.0), nu=1.5) + noise,
    }


class Law(NamedTuple):
    """Points as values of AXES' keys with the config's other numbers that these read, gaps, and the kernel's logarithmic parameters.

    `reach` is the largest deviation with which the law expects one of its points from all others: beyond it lies what is far from
    every point. `scores`: form -> what cross-validation found; `made` says how, for a reader.
    """

    points: tuple[Mapping[str, Any], ...]
    gaps: tuple[float, ...]
    form: str
    theta: tuple[float, ...]
    reach: float
    scores: Mapping[str, Mapping[str, float]]
    made: Mapping[str, Any]


class Expected(NamedTuple):
    """The gap at a point, the ends of its 95 % interval (of the mean over as many seeds as a point of the fit has), and why not to trust it."""

    gap: float
    low: float
    high: float
    beyond: tuple[str, ...]


def gaps_of(
    table: pd.DataFrame, base: Mapping[str, Any], swept: Sequence[str]
) -> tuple[list[dict[str, Any]], list[float]]:
    """The points of some rows and the gap at each, mean over seeds, of losses cut at SOLVED; `base` is the flat config they depart from."""
    points, gaps = [], []
    reads = (*AXES, "data.clusters")
    for values, rows in last(table).groupby(list(swept)):
        if (found := fair_gap(cut(rows))) is not None:
            flat = {**base, **dict(zip(swept, np.array(values, object).tolist(), strict=True))}
            points.append({key: flat[key] for key in reads})
            gaps.append(found.estimate.mean)
    return points, gaps


def cut(rows: pd.DataFrame, floor: float = SOLVED, metric: str = "test/loss") -> pd.DataFrame:
    """Rows whose losses are `floor` at least."""
    return rows.assign(**{metric: rows[metric].clip(lower=floor)})


def fit(points: Sequence[Mapping[str, Any]], gaps: Sequence[float], made: Mapping[str, Any]) -> Law:
    """The law of these points, in the form with the highest mean log density of left-out gaps (`cross_validated`)."""
    places, seen = _places(points, points), np.array(gaps)
    scores = {form: cross_validated(kernel, places, seen) for form, kernel in _kernels().items()}
    form = max(scores, key=lambda name: scores[name]["log_density"])
    theta = tuple(map(float, _fitted(_kernels()[form], places, seen).kernel_.theta))
    law = Law(tuple(points), tuple(map(float, gaps)), form, theta, math.inf, scores, made)
    others = [np.arange(len(seen)) != index for index in range(len(seen))]
    deviations = [_process(law, places[rest], seen[rest]).predict(places[~rest], return_std=True)[1] for rest in others]
    return law._replace(reach=float(np.max(deviations)))


def cross_validated(
    kernel: Kernel, places: Float[np.ndarray, "N A"], gaps: Float[np.ndarray, " N"]
) -> dict[str, float]:
    """What a form says of gaps that it has not seen, its parameters fitted anew in each of 10 folds.

    log_density: mean log N(gap; mean, deviation^2), which chooses; the others are those of `preregistered.SCORES`.
    """
    mean, deviation = np.empty(len(gaps)), np.empty(len(gaps))
    for rest, out in KFold(FOLDS, shuffle=True, random_state=0).split(places):
        mean[out], deviation[out] = _fitted(kernel, places[rest], gaps[rest]).predict(places[out], return_std=True)
    density = float(stats.norm.logpdf(gaps, mean, deviation).mean())
    return {"log_density": density} | {
        name: float(score(gaps, _with_ends(mean, deviation))) for name, score in SCORES.items()
    }


def _with_ends(mean: Float[np.ndarray, " N"], deviation: Float[np.ndarray, " N"]) -> Float[np.ndarray, "N 3"]:
    """Expectations with the ends of their 95 % intervals."""
    half = stats.norm.ppf((1 + LEVEL) / 2) * deviation
    return np.stack([mean, mean - half, mean + half], axis=1)


def expect(law: Law, points: Sequence[Mapping[str, Any]]) -> list[Expected]:
    """What the law expects at points (flat configs), and where it extrapolates: outside of the fit's ranges, or far from its points."""
    process = _process(law, _places(law.points, law.points), np.array(law.gaps))
    mean, deviation = process.predict(_places(law.points, points), return_std=True)
    return [
        Expected(float(mean), float(low), float(high), _beyond(law, point, one))
        for point, (mean, low, high), one in zip(points, _with_ends(mean, deviation), deviation, strict=True)
    ]


def _beyond(law: Law, point: Mapping[str, Any], deviation: float) -> tuple[str, ...]:
    """The axes on which a point lies outside of the fit's, each with its range; or that it is far from every point of the fit."""
    found = []
    for axis in AXES.values():
        sizes, size = [axis.size(one) for one in law.points], axis.size(point)
        if not min(sizes) * (1 - 1e-6) <= size <= max(sizes) * (1 + 1e-6):
            found.append(f"{axis.words} {size:.3g} is outside of [{min(sizes):.3g}, {max(sizes):.3g}]")
    if not found and deviation > law.reach * (1 + 1e-6):
        found.append("no point of the fit is near")
    return tuple(found)


def _places(of: Sequence[Mapping[str, Any]], points: Sequence[Mapping[str, Any]]) -> Float[np.ndarray, "N A"]:
    """Coordinates of points, on a scale on which those of the fit go from -1 to 1."""
    own, asked = (np.array([[axis.place(one) for axis in AXES.values()] for one in some]) for some in (of, points))
    low, high = own.min(0), own.max(0)
    return 2 * (asked - low) / np.where(high > low, high - low, 1.0) - 1


def _fitted(kernel: Kernel, places: np.ndarray, gaps: np.ndarray) -> GaussianProcessRegressor:
    """The process whose parameters make these gaps most likely; an axis without effect has a length at its bound, which is no fault."""
    process = GaussianProcessRegressor(kernel, normalize_y=True, n_restarts_optimizer=STARTS, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return process.fit(places, gaps)


def _process(law: Law, places: np.ndarray, gaps: np.ndarray) -> GaussianProcessRegressor:
    """The process of a law's own parameters, given these gaps."""
    kernel = _kernels()[law.form].clone_with_theta(np.array(law.theta))
    return GaussianProcessRegressor(kernel, optimizer=None, normalize_y=True).fit(places, gaps)


def read(path: pathlib.Path = FILE) -> Law:
    """The law in a file.

    Raises:
      UserError: no such file, or it holds no law.
    """
    with files.explained(path):
        text = path.read_text("utf-8")
    try:
        return Law(**json.loads(text))
    except (TypeError, ValueError):
        raise UserError(f"{path}: not a law: make one with routed predict --fit=DIR --write={path}") from None


def write(law: Law, path: pathlib.Path) -> None:
    """Writes a law, a point a line.

    Raises:
      UserError: the disk is full or read-only.
    """
    entries = {**law._asdict(), "points": "POINTS"}
    lines = ",\n  ".join(json.dumps(point) for point in law.points)
    files.write(path, json.dumps(entries, indent=1).replace('"POINTS"', f"[\n  {lines}\n ]") + "\n")
