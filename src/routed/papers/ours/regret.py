"""Parts of the squared error of a mixture: its partition, the estimates of its experts, and the weights of its gate.

Token x goes to expert j(x), the first choice of its gate. Experts are affine, f_j(x) = phi(x)^T w_j, where phi is 1
(constant experts) or (x, 1) (linear experts). Over T test samples, E being their mean and sums over the samples that
go to j:

    G_j = sum phi phi^T,   b_j solves G_j (b_j - w_j) = sum phi (y - phi^T w_j)^T    (constants: b_j = m_j = E[y | j])

The residuals of b_j are orthogonal to phi, so the squared error of the hard choice splits without a cross term. With
the measured prediction f, which may weigh an expert, mix several or drop a token, E|y - f|^2 is the sum of

    partition  = E|y - phi^T b_j|^2                           least error of such experts on these cells
    estimation = sum_j tr (w_j - b_j)^T G_j (w_j - b_j) / T   distance of the experts from the best ones
    gate       = E|y - f|^2 - E|y - phi^T w_j|^2              error that the gate's weights add, or save

The first two are at least 0. The third has any sign, and is 0 for one expert with weight 1. Training a softer mixture
than the evaluated one shows in the estimation: such experts learn values for the mixture, not for their cells.

Where y = v_c, the partition is E Var(v_c | j) = sum_cj P(c, j) |v_c - m_j|^2, from counts [C, E] alone (`cells_of`).

Sample and population: b_j is fitted on the samples that judge it. The sum is exact. In the split, E F numbers (F of
phi) are fitted to T samples, so the partition is too low, and the estimation too high, by a share E F / T of the
partition (if all cells are alike): 1 % for 64 constants on 6,400 samples, 25 % for 64 linear maps of 24 inputs.
Predictions correct their cells for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln
from jaxtyping import Array, Float, Int, Scalar

from routed.contracts import AT_LEAST_0, Column
from routed.experts.expert import Affine
from routed.papers.affine import affine_of, is_affine
from routed.training.probes import Block, Evaluation, Probe
from routed.training.sample_problem import SampleProblem

#: The share of a feature's square that must be left by the features before it. Below, float32 cannot separate the
#: feature, and b_j keeps the value of w_j.
RANK = 1e-3

#: E|u|^2 of an untrained constant expert, N(0, 1/O) in O dimensions.
UNTRAINED = 1.0

#: The expected samples of a cell up to which a sum over their number is exact, and the terms of that sum; above, a
#: series is.
FEW, TERMS = 20.0, 64

#: Linear experts: the least expected training samples of a cell for each feature, and the share of tokens in cells with
#: fewer above which nothing is predicted: least squares diverges in such cells, and gradients stop before it does.
ENOUGH, OUTSIDE = 2.0, 0.05

COLUMNS = {
    "regret/partition": Column(
        "partition: best experts for the cells",
        "Loss of the best experts of this kind for the cells that the router makes: what the partition costs.",
        bounds=AT_LEAST_0,
    ),
    "regret/estimation": Column(
        "estimation: experts off the best",
        "Loss of the experts there are beyond that of the best ones for the same cells.",
        bounds=AT_LEAST_0,
    ),
    "regret/gate": Column(
        "gate: its weights",
        "What the weights that experts are combined with add to the loss of each token's first expert.",
    ),
    "regret/predicted": Column(
        "loss predicted from the partition (1 = trivial)",
        "Loss of experts trained on a frozen copy of the partition, foretold from its cells and the number of samples.",
        log=True,
        bounds=AT_LEAST_0,
    ),
}


class Cells(NamedTuple):
    """The cells of a partition: number of samples, mean of y, and E|y - mean|^2, of each expert."""

    size: Float[Array, " E"]
    mean: Float[Array, "E O"]
    variance: Float[Array, " E"]


class Fits(NamedTuple):
    """The cells of a partition with linear experts.

    Number of samples, E|y - phi^T b_j|^2, and tr(E[phi phi^T]^-1 E[phi phi^T |y - phi^T b_j|^2]), of each expert.
    """

    size: Float[Array, " E"]
    variance: Float[Array, " E"]
    spread: Float[Array, " E"]


class Regret(NamedTuple):
    """The three parts of a squared error, in its units, and the cells of the partition."""

    partition: Scalar
    estimation: Scalar
    gate: Scalar
    cells: Cells | Fits


def parts(
    experts: Affine,
    x: Float[Array, "T D"] | None,
    y: Float[Array, "T O"],
    choice: Int[Array, " T"],
    prediction: Float[Array, "T O"],
) -> Regret:
    """Returns the parts of E|y - prediction|^2, for the expert `choice` of each token; x may be None for constants."""
    count, (phi, weights) = len(experts.offset), _features(experts, x, len(y))
    member = jax.nn.one_hot(choice, count)
    with jax.default_matmul_precision("highest"):  # products in lower precision would not cancel
        error = y - jnp.einsum("tf,tfo->to", phi, weights[choice])
        gram = jax.lax.map(lambda weight: (phi * weight[:, None]).T @ phi, member.T)  # [E, F, F], an expert at a time
        moment = jnp.einsum("te,tf,to->efo", member, phi, error)
        inverse = _inverse(gram)
        shift = inverse @ moment  # b_j - w_j
        shift += inverse @ (moment - gram @ shift)  # the remaining moments would be a cross term of the parts
        left = error - jnp.einsum("tf,tfo->to", phi, shift[choice])
        squares = (left**2).sum(1)
        estimation = (shift * (gram @ shift)).sum() / len(y)
        gate = ((y - prediction) ** 2).sum(1).mean() - (error**2).sum(1).mean()
        sizes = member.sum(0)
        cells: Cells | Fits = Cells(sizes, (weights + shift)[:, 0], squares @ member / jnp.maximum(sizes, 1))
        if experts.slope is not None:
            cells = _fits(phi, squares, member, inverse, choice)
    return Regret(squares.mean(), estimation, gate, cells)


def _fits(
    phi: Float[Array, "T F"],
    squares: Float[Array, " T"],
    member: Float[Array, "T E"],
    inverse: Float[Array, "E F F"],
    choice: Int[Array, " T"],
) -> Fits:
    """Returns the cells of linear experts from the squared errors of their best maps.

    Squares by 1 - leverage are on average the squares around the best map of the whole cell (MacKinnon & White 1985,
    HC2).
    """
    leverage = (phi * jnp.einsum("tf,tfg->tg", phi, inverse[choice])).sum(1)
    honest = jnp.where(leverage < 1 - 1e-3, squares / jnp.maximum(1 - leverage, 1e-3), 0.0)
    sizes = member.sum(0)
    return Fits(sizes, honest @ member / jnp.maximum(sizes, 1), (honest * leverage) @ member)


def cells_of(counts: Float[Array, "C E"], targets: Float[Array, "C O"]) -> Cells:
    """Returns the cells of a partition from its counts, for targets that are constant in each cluster."""
    sizes = counts.sum(0)
    share = counts / jnp.maximum(sizes, 1)[None]
    mean = share.T @ targets
    apart = ((targets[:, None] - mean[None]) ** 2).sum(-1)
    return Cells(sizes, mean, (share * apart).sum(0))


def predicted(cells: Cells, samples: Scalar | float) -> Scalar:
    """Returns E|y - u_j|^2 of constants u_j, the means of `samples` training samples, given a frozen partition's cells.

    With q_j the share of cell j, V_j its variance and n_j ~ Poisson(samples q_j) the training samples in the cell, an
    expert without samples keeps its first value u: sum_j q_j (V_j + V_j E[1 / n_j; n_j > 0] + P(n_j = 0) (|m_j|^2 +
    E|u|^2)). V_j is size / (size - 1) times the variance of the cells, which is unbiased. Cells are taken to hold
    training samples as they hold test samples. A router that was fitted to the targets of the same samples has other
    cells for these samples, and experts on a copy of it do worse than predicted.
    """
    share = cells.size / cells.size.sum()
    variance = cells.variance * cells.size / jnp.maximum(cells.size - 1, 1)
    expected = samples * share
    untrained = jnp.exp(-expected) * ((cells.mean**2).sum(1) + UNTRAINED)
    return (share * (variance * (1 + mean_inverse(expected)) + untrained)).sum()


def predicted_fits(cells: Fits, inputs: int, samples: Scalar | float) -> Scalar:
    """Returns E|y - phi^T u_j|^2 of least squares u_j of `samples` training samples, given a frozen partition's cells.

    n samples of a cell with Gaussian inputs in D dimensions leave its expert off the best one by S / F (1/n + (1 +
    1/n) D / (n - D - 2)), S being `spread` and F = D + 1 the features; the result is the mean over n ~
    Poisson(samples q_j) to second order. NaN where cells with too few expected samples (`ENOUGH`), or with at most F
    test samples, hold a share of more than `OUTSIDE`.
    """
    share = cells.size / cells.size.sum()
    features = inputs + 1
    least = ENOUGH * features
    expected = jnp.maximum(samples * share, least)
    inverse, beyond = ((1 + expected / (expected - off) ** 2) / (expected - off) for off in (0, features + 1))
    excess = cells.spread / features * (inverse + (1 + inverse) * inputs * beyond)
    outside = jnp.where((samples * share < least) | (cells.size <= features), share, 0.0).sum()
    return jnp.where(outside > OUTSIDE, jnp.nan, (share * (cells.variance + excess)).sum())


def mean_inverse(expected: Float[Array, " E"]) -> Float[Array, " E"]:
    """Returns E[1 / n; n > 0] of n ~ Poisson(expected).

    A sum over n, or 1/m + 1/m^2 + 2/m^3 + 6/m^4 where n is large.
    """
    n, few = jnp.arange(1.0, TERMS)[None], jnp.clip(expected, 1e-9, FEW)[:, None]
    summed = (jnp.exp(n * jnp.log(few) - few - gammaln(n + 1)) / n).sum(1)
    inverse = 1 / jnp.maximum(expected, FEW)
    return jnp.where(expected < FEW, summed, inverse * (1 + inverse * (1 + inverse * (2 + inverse * 6))))


def columns(regret: Regret, experts: Affine, unit: Scalar | float, samples: Scalar | float) -> dict[str, Scalar]:
    """Returns the columns `regret/` over `unit`, the divisor of losses; a run has trained on `samples`."""
    values = {name: getattr(regret, name) / unit for name in ("partition", "estimation", "gate")}
    if isinstance(regret.cells, Cells):
        values["predicted"] = predicted(regret.cells, samples) / unit
    elif experts.slope is not None:
        values["predicted"] = predicted_fits(regret.cells, experts.slope.shape[1], samples) / unit
    return {f"regret/{name}": value for name, value in values.items()}


def _features(experts: Affine, x, tokens: int) -> tuple[Float[Array, "T F"], Float[Array, "E F O"]]:
    """Returns phi(x) of every token, and the weights w_j of every expert on it."""
    ones, offset = jnp.ones((tokens, 1)), experts.offset[:, None]
    if experts.slope is None:
        return ones, offset
    return jnp.concatenate([x, ones], 1), jnp.concatenate([experts.slope, offset], 1)


def _inverse(gram: Float[Array, "E F F"]) -> Float[Array, "E F F"]:
    """Returns inverses that are 0 in features which the other features determine up to `RANK`.

    An expert without samples has only such features. Any such inverse gives the same outputs, estimation and
    leverages. By sweeps, not by LAPACK: XLA:CPU shares a batch of LAPACK calls out to the threads that wait for them,
    so that as many devices as cores deadlock (jaxlib 0.10.2).
    """
    size = jnp.sqrt(jnp.diagonal(gram, axis1=1, axis2=2))
    unit = jnp.where(size > 0, 1 / jnp.maximum(size, jnp.finfo(size.dtype).tiny), 0.0)
    scale = unit[:, :, None] * unit[:, None]

    def sweep(i, now):
        matrix, separate = now
        k = gram.shape[1] - 1 - i  # the constant first, so that other features are taken around their means
        pivot, here = matrix[:, k, k], jnp.arange(gram.shape[1]) == k
        alive = pivot > RANK
        row, column = matrix[:, k] / jnp.where(alive, pivot, 1.0)[:, None], matrix[:, :, k]
        swept = matrix - column[:, :, None] * row[:, None]
        swept = jnp.where(here[None, :, None], row[:, None], swept)
        below = jnp.where(here[None], 1.0, -column) / jnp.where(alive, pivot, 1.0)[:, None]
        swept = jnp.where(here[None, None], below[:, :, None], swept)
        return jnp.where(alive[:, None, None], swept, matrix), separate | (alive[:, None] & here[None])

    start = gram * scale, jnp.zeros(size.shape, bool)
    matrix, separate = jax.lax.fori_loop(0, gram.shape[1], sweep, start)
    return jnp.where(separate[:, :, None] & separate[:, None], matrix * scale, 0.0)


def _inputs_of_experts(evaluation: Evaluation, block: Block) -> Any:
    """Returns the tokens that linear experts got; None for constants."""
    experts = affine_of(evaluation)
    (site,) = block.outputs.sites.values()
    return site.features if experts is not None and experts.slope is not None else None


def _evaluate(evaluation: Evaluation) -> dict[str, Array]:
    """Returns the columns `regret/`."""
    if (experts := affine_of(evaluation)) is None:
        return {}
    problem, inputs, gate = evaluation.problem, evaluation.inputs, evaluation.gate
    assert gate is not None
    split = parts(experts, evaluation.blocks, evaluation.batch.y, gate.choices[:, 0], evaluation.prediction)
    data = inputs.config.data
    trained_on = evaluation.step * problem.config.batch_size if data.fresh else data.samples
    return columns(split, experts, evaluation.unit, trained_on)


REGRET = Probe(
    SampleProblem,
    columns=COLUMNS,
    applies=lambda problem: problem.tokens_choose and is_affine(problem),
    in_block=_inputs_of_experts,
    evaluate=_evaluate,
)
