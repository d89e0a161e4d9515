"""The Gaussian process of the law: its kernels, the choice among them, and its predictions (scikit-learn)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float
from scipy import stats
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct, Kernel, Matern, WhiteKernel
from sklearn.model_selection import KFold

from routed.analysis import statistics
from routed.analysis.statistics import LEVEL

#: Function of measured gaps [..., N] and of expected gaps with the ends of their intervals [..., N, 3] to a score
#: [...].
Score = Callable[[np.ndarray, np.ndarray], np.ndarray]


def r2(gaps: Float[np.ndarray, "*B N"], expected: Float[np.ndarray, "*B N 3"]) -> Float[np.ndarray, "*B"]:
    """Returns the explained variance, 1 - sum (gap - expected)^2 / sum (gap - average gap)^2."""
    spread = ((gaps - gaps.mean(-1, keepdims=True)) ** 2).sum(-1)
    return np.asarray(1 - ((gaps - expected[..., 0]) ** 2).sum(-1) / np.maximum(spread, statistics.TINY))


def signs(gaps: Float[np.ndarray, "*B N"], expected: Float[np.ndarray, "*B N 3"]) -> Float[np.ndarray, "*B"]:
    """Returns the share of points at which both gaps are above 0, or neither is."""
    return np.asarray(((gaps > 0) == (expected[..., 0] > 0)).mean(-1))


def coverage(gaps: Float[np.ndarray, "*B N"], expected: Float[np.ndarray, "*B N 3"]) -> Float[np.ndarray, "*B"]:
    """Returns the share of gaps inside of their intervals, ends included."""
    return np.asarray(((expected[..., 1] <= gaps) & (gaps <= expected[..., 2])).mean(-1))


SCORES: dict[str, Score] = {"r2": r2, "signs": signs, "coverage": coverage}

#: Scores that are shares of points: their intervals are Wilson's, which have a width where all points agree.
SHARES = ("signs", "coverage")

#: Folds of the cross-validation that chooses a form, and starts of the search for a kernel's parameters.
FOLDS, STARTS = 10, 3


def chosen(
    x: Float[np.ndarray, "N A"], gaps: Float[np.ndarray, " N"]
) -> tuple[dict[str, dict[str, float]], str, tuple[float, ...]]:
    """Returns form -> scores, the form with the highest log density of left-out gaps, and its parameters."""
    kernels = _kernels(x.shape[1])
    scores = {form: _cross_validated(kernel, x, gaps) for form, kernel in kernels.items()}
    form = max(scores, key=lambda name: scores[name]["log_density"])
    return scores, form, tuple(map(float, _fitted(kernels[form], x, gaps).kernel_.theta))


def predictions(
    form: str, theta: Sequence[float], x: Float[np.ndarray, "N A"], gaps: Float[np.ndarray, " N"], new: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns means and deviations at `new` coordinates of the process with these parameters, given some gaps."""
    kernel = _kernels(x.shape[1])[form].clone_with_theta(np.array(theta))
    process = GaussianProcessRegressor(kernel, optimizer=None, normalize_y=True).fit(x, gaps)
    return process.predict(new, return_std=True)


def _kernels(axes: int) -> dict[str, Kernel]:
    """Returns form -> kernel of so many axes, with noise: linear, quadratic, smooth and rougher functions."""
    size, noise, lengths = ConstantKernel(1.0, (1e-3, 1e3)), WhiteKernel(0.1, (1e-4, 1e1)), np.ones(axes)
    slope = DotProduct(1.0, (1e-2, 1e2))
    return {
        "linear": size * slope + noise,
        "quadratic": size * slope**2 + noise,
        "smooth": size * RBF(lengths, (0.1, 100.0)) + noise,
        "rough": size * Matern(lengths, (0.1, 100.0), nu=1.5) + noise,
    }


def _cross_validated(kernel: Kernel, x: Float[np.ndarray, "N A"], gaps: Float[np.ndarray, " N"]) -> dict[str, float]:
    """Returns scores of a kernel on gaps of folds that are left out of its fit.

    `log_density`, the mean log N(gap; mean, deviation^2), chooses the form; the other scores are those of `SCORES`.
    """
    mean, deviation = np.empty(len(gaps)), np.empty(len(gaps))
    for rest, out in KFold(FOLDS, shuffle=True, random_state=0).split(x):
        mean[out], deviation[out] = _fitted(kernel, x[rest], gaps[rest]).predict(x[out], return_std=True)
    density = float(stats.norm.logpdf(gaps, mean, deviation).mean())
    return {"log_density": density} | {
        name: float(score(gaps, with_ends(mean, deviation))) for name, score in SCORES.items()
    }


def with_ends(mean: Float[np.ndarray, " N"], deviation: Float[np.ndarray, " N"]) -> Float[np.ndarray, "N 3"]:
    """Returns expectations with the ends of their 95 % intervals."""
    half = stats.norm.ppf((1 + LEVEL) / 2) * deviation
    return np.stack([mean, mean - half, mean + half], axis=1)


def _fitted(kernel: Kernel, x: np.ndarray, gaps: np.ndarray) -> GaussianProcessRegressor:
    """Returns the process whose parameters make these gaps most likely.

    An axis without effect has a length at its bound: the warning about it is suppressed.
    """
    process = GaussianProcessRegressor(kernel, normalize_y=True, n_restarts_optimizer=STARTS, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return process.fit(x, gaps)
