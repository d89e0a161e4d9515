"""Probe of Theorem 2 (Dikkala et al. 2023, 4.2 and E): routers whose rows were training examples at the start.

Row e came from an example of cluster c(e). Over test samples x of the clusters that have a row of their own (hit),
with p the softmax of the scores, u_e constant experts, v_c the target of cluster c (the mean of y there), and w_e,
w_e' the rows now and at first:

    exponent       1 % quantile over x of -log sum_{e: c(e) != c(x)} p_e(x), over the dimensions of x: above 0, (ii)
    expert_error   max over c of min_e |u_e - v_c| / |v_c|: tends to 0, (iii)
    row_cosine     mean over e of cos(w_e, w_e'): stays near 1, (iv)
    row_growth     mean over e of |w_e| / |w_e'|: grows, (iv)

Where no cluster is hit the first two are infinite and 0. Where every row is of the cluster of x, the exponent is that
of the largest float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Scalar

from routed.contracts import AT_LEAST_0, FROM_MINUS_1_TO_1, Column
from routed.papers.affine import affine_of, is_affine
from routed.routers import EXAMPLES
from routed.tasks import worlds
from routed.training.probes import Evaluation, Probe
from routed.training.sample_problem import SampleProblem

#: Share of the samples with a smaller exponent than the one that is reported.
WORST = 0.01

COLUMNS = {
    "theory/exponent": Column(
        "-log of the weight on others' rows,\nover dimensions (1 % quantile)",
        "1 % quantile over samples of -log of the probability on experts of other clusters, over the"
        " dimensions: above 0 the gate separates exponentially well.",
    ),
    "theory/expert_error": Column(
        "distance of the nearest expert\nfrom a cluster's target (largest)",
        "Largest over clusters of the distance of the nearest expert from the cluster's target.",
        log=True,
        bounds=AT_LEAST_0,
    ),
    "theory/row_cosine": Column(
        "cosine of a row and its example",
        "Mean cosine of a router row and the example that it started from.",
        FROM_MINUS_1_TO_1,
    ),
    "theory/row_growth": Column(
        "norm of a row over that of its example",
        "Mean norm of a router row over its norm at the start.",
        bounds=AT_LEAST_0,
    ),
}


def columns(
    scores: Float[Array, "T E"],
    label: Int[Array, " T"],
    y: Float[Array, "T O"],
    experts: Float[Array, "E O"],
    rows: Float[Array, "E D"],
    examples: Float[Array, "E D"],
    owner: Int[Array, " E"],
    labels: int,
) -> dict[str, Scalar]:
    """Returns the columns above for `rows` that started at `examples` of the clusters `owner`."""
    hit = jnp.zeros(labels, bool).at[owner].set(True)
    foreign = jnp.where(owner[None] == label[:, None], -jnp.inf, scores)
    largest = jnp.finfo(scores.dtype).max
    away = jnp.minimum(jax.nn.logsumexp(scores, 1) - jax.nn.logsumexp(foreign, 1), largest)
    exponent = jnp.nanquantile(jnp.where(hit[label], away, jnp.nan), WORST) / rows.shape[1]

    members = jax.nn.one_hot(label, labels)
    targets = members.T @ y / jnp.maximum(members.sum(0)[:, None], 1)
    apart = jnp.linalg.norm(experts[None] - targets[:, None], axis=-1).min(1)
    error = apart / jnp.maximum(jnp.linalg.norm(targets, axis=1), 1e-9)

    before, now = (jnp.linalg.norm(of, axis=1) for of in (examples, rows))
    cosine = (rows * examples).sum(1) / jnp.maximum(before * now, 1e-9)
    return {
        "theory/exponent": jnp.where(hit.any(), exponent, jnp.inf),
        "theory/expert_error": jnp.where(hit, error, 0.0).max(),
        "theory/row_cosine": cosine.mean(),
        "theory/row_growth": (now / jnp.maximum(before, 1e-9)).mean(),
    }


def _evaluate(evaluation: Evaluation) -> dict[str, Array]:
    """Returns the columns; NaN for routers that did not begin with rows from examples (`router.init_from_data`)."""
    problem, inputs, params = evaluation.problem, evaluation.inputs, evaluation.params
    data, count, gate = inputs.config.data, problem.config.experts.count, evaluation.gate
    assert gate is not None
    examples, kernel = worlds.examples(problem.task, evaluation.world, count, data), params["router"].get("kernel")
    experts = affine_of(evaluation)
    rows_of_inputs = kernel is not None and kernel.shape[0] == examples.tokens.shape[-1]
    if experts is None or experts.slope is not None or not rows_of_inputs:
        return {}
    values = columns(
        gate.routing.scores,
        gate.label,
        evaluation.batch.y,
        experts.offset,
        kernel.T,
        examples.tokens[:count],
        examples.label[:count],
        gate.labels,
    )
    from_data = jnp.asarray(inputs.config.router.init_from_data)
    return {name: jnp.where(from_data, value, jnp.nan) for name, value in values.items()}


def _applies(problem: SampleProblem) -> bool:
    """True for constant experts whose router may begin with rows from examples."""
    return problem.tokens_choose and is_affine(problem) and problem.config.router.init_rows == EXAMPLES


THEOREM2 = Probe(SampleProblem, columns=COLUMNS, applies=_applies, evaluate=_evaluate)
