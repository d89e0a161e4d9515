"""Probes that compute the table METRICS, which users' files fill: on samples, and by layer on text."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from routed.contracts import Routing
from routed.metrics.router import METRICS, gate_of
from routed.training.probes import Block, Evaluation, Probe
from routed.training.sample_problem import SampleProblem
from routed.training.text_problem import TextProblem


def _on_samples(evaluation: Evaluation) -> dict[str, Array]:
    """Returns each metric of the router on all test tokens."""
    assert evaluation.gate is not None
    return {name: metric.value(evaluation.gate) for name, metric in METRICS.items()}


def _routings(evaluation: Evaluation, block: Block) -> dict[str, Any]:
    """Returns the routing of each stack on a block of rows."""
    del evaluation
    return {stack: site.routing for stack, site in block.outputs.sites.items()}


def _on_text(evaluation: Evaluation) -> dict[str, Array]:
    """Returns each metric of each stack, [layers]: the routers on all validation tokens."""
    problem, batch = evaluation.problem, evaluation.batch
    metrics: dict[str, Array] = {}
    for stack, blocks in evaluation.blocks.items():
        routing = _joined(blocks)
        label = jnp.repeat(batch.language, routing.scores.shape[1] // len(batch.language))
        real = problem.real(batch)

        def of_layer(routing, params, label=label, real=real):
            gate = gate_of(routing, label, problem.languages, batch, params, real)
            return {name: metric.value(gate) for name, metric in METRICS.items()}

        values = jax.vmap(of_layer)(routing, evaluation.params["router"][stack].get("router", {}))
        metrics |= {f"{stack}/{name}": value for name, value in values.items()}
    return metrics


def _joined(blocks: Any) -> Any:
    """Returns the routing of all rows, [layers, tokens, ...], from that of blocks, [blocks, layers, ...]."""
    tokens = blocks.scores.shape[2]
    if isinstance(blocks, Routing):
        first = tokens * jnp.arange(len(blocks.token), dtype=blocks.token.dtype)
        blocks = blocks._replace(token=blocks.token + first[:, None, None])
    return jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1).reshape(a.shape[1], -1, *a.shape[3:]), blocks)


ON_SAMPLES = Probe(SampleProblem, applies=lambda problem: problem.tokens_choose, evaluate=_on_samples)
ON_TEXT = Probe(
    TextProblem,
    applies=lambda problem: problem.model.scores is not None and bool(METRICS),
    in_block=_routings,
    evaluate=_on_text,
)
