"""Probes of text: losses by language, costs, and the test rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from routed.contracts import AT_LEAST_0, SHARE, Column, Routing, TextBatch
from routed.metrics import entropies, router
from routed.models.transformer_sizes import experts_of_token, work_of_token
from routed.training.phases import mean_so_far_of
from routed.training.probes import Block, Evaluation, Probe, experts_probe
from routed.training.text_problem import TextProblem, corpus, in_blocks, target_logits

#: Metrics of a language, by column of the sums of a block.
BY_LANGUAGE = ("loss", "accuracy")


def _row_means(problem: TextProblem, logits, batch: TextBatch) -> list[Float[Array, " B"]]:
    """Returns the mean loss in nats and the accuracy of each row; targets that do not count are 0 in the mean."""
    nats = jax.nn.logsumexp(logits, axis=-1) - target_logits(logits, batch.targets)
    right = (logits.argmax(-1) == batch.targets).astype(jnp.float32)
    counted = problem.counted(batch)
    return [(values if counted is None else values * counted).mean(1) for values in (nats, right)]


def _counted_share(problem: TextProblem, rows: TextBatch) -> tuple[Any, Any]:
    """Returns the share of the targets that count, of all rows and by language."""
    if (counted := problem.counted(rows)) is None:
        return 1.0, 1.0
    sums = entropies.cluster_sums(counted.mean(1)[:, None], rows.language, problem.languages)
    return counted.mean(), sums / _rows_of_language(problem, rows)


def _rows_of_language(problem: TextProblem, rows: TextBatch) -> Int[Array, "C 1"]:
    """Counts the rows of each language, at least 1."""
    return jnp.maximum(jnp.bincount(rows.language, length=problem.languages), 1)[:, None]


def _sums_by_language(evaluation: Evaluation, block: Block) -> Float[Array, "C 2"]:
    """Returns the summed loss and accuracy of the rows of each language."""
    problem = evaluation.problem
    means = jnp.stack(_row_means(problem, block.outputs.prediction, block.batch), 1)
    return entropies.cluster_sums(means, block.batch.language, problem.languages)


def _losses(evaluation: Evaluation) -> dict[str, Array]:
    """Returns loss and accuracy on the validation rows, in all and by language, beside the reference losses."""
    problem, rows, sums = evaluation.problem, evaluation.batch, evaluation.blocks
    counted, counted_by_language = _counted_share(problem, rows)
    by_language = sums.sum(0) / _rows_of_language(problem, rows) / counted_by_language
    nats, right = sums.sum((0, 1)) / len(rows.inputs) / counted
    return {
        "eval/loss": nats,
        "eval/accuracy": right,
        **{f"eval/{name}": loss for name, loss in evaluation.inputs.shared["references"].items()},
        **{f"language/{name}": by_language[:, column] for column, name in enumerate(BY_LANGUAGE)},
    }


def _losses_offline(problem: TextProblem, history: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns loss and accuracy as a column for each language."""
    languages = corpus(problem.kind.form, problem.config).languages
    return {
        f"eval/{metric}/{language}": history[f"language/{metric}"][:, i]
        for i, language in enumerate(languages)
        for metric in BY_LANGUAGE
    }


def _flops(evaluation: Evaluation) -> dict[str, Array]:
    """Returns the FLOPs of training until this step."""
    problem, work = evaluation.problem, None
    if problem.model.scores is not None:  # sparse layers
        work = mean_so_far_of(work_of_token, problem.config, evaluation.inputs.config, evaluation.step)
    row = problem.kind.flops(problem.config, work)
    return {"train/flops": jnp.float32(evaluation.step) * problem.config.batch_size * row}


def _test_rows(evaluation: Evaluation) -> dict[str, Array]:
    """Returns loss and accuracy on the test rows, and the mean and deviation of the entropy of gates by layer."""
    problem, rows = evaluation.problem, evaluation.inputs.shared["test"]
    rule, dispatch = problem.evaluation_rule()

    def forward(block: TextBatch):
        outputs = problem.model.apply(evaluation.params, evaluation.state, block, rule, dispatch, step=evaluation.step)
        gates = {stack: entropies.entropy(jax.nn.softmax(site.routing.scores)) for stack, site in outputs.sites.items()}
        # Less the entropy of a uniform gate: near it the squares of entropies differ in digits that float32 lacks.
        less = {stack: entropy - jnp.log(problem.config.experts.count) for stack, entropy in gates.items()}
        real = problem.real(block)
        weight = 1.0 if real is None else real[None]
        moments = {
            stack: ((values * weight).mean(1), (jnp.square(values) * weight).mean(1)) for stack, values in less.items()
        }
        means = _row_means(problem, outputs.prediction, block)
        return jnp.stack([values.mean() for values in means]), moments

    blocks = jax.lax.map(forward, in_blocks(problem.config, rows, "test"))
    means, moments = jax.tree.map(lambda a: a.mean(0), blocks)
    nats, right = means / _counted_share(problem, rows)[0]
    metrics = {"test/loss": nats, "test/accuracy": right}
    real = problem.real(rows)
    share = 1.0 if real is None else real.mean()
    for stack, sums in moments.items():
        mean, square = (values / share for values in sums)
        deviation = jnp.sqrt(jnp.maximum(square - mean**2, 0))
        mean += jnp.log(problem.config.experts.count)
        metrics |= {f"{stack}/entropy_test": mean, f"{stack}/entropy_test_std": deviation}
    return metrics


def _users_metrics(evaluation: Evaluation) -> dict[str, Array]:
    """Returns each metric of each stack, [layers]: the routers on all validation tokens."""
    problem, batch = evaluation.problem, evaluation.batch
    metrics: dict[str, Array] = {}
    for stack, blocks in evaluation.blocks.items():
        routing = _joined(blocks)
        label = jnp.repeat(batch.language, routing.scores.shape[1] // len(batch.language))
        real = problem.real(batch)

        def of_layer(routing, params, label=label, real=real):
            gate = router.gate_of(routing, label, problem.languages, batch, params, real)
            return router.own_columns(gate)

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


LOSSES = Probe(
    TextProblem,
    in_block=_sums_by_language,
    evaluate=_losses,
    offline=_losses_offline,
    columns={
        "train/loss": Column(
            "training loss (nats per token)",
            "Mean cross-entropy of the training batches since the last evaluation, in nats for each target token.",
            AT_LEAST_0,
        ),
        "eval/loss": Column(
            "validation loss (nats per token)",
            "Cross-entropy on held-out rows, in nats for each target token; all arms are asked about the same tokens.",
            AT_LEAST_0,
        ),
        "eval/accuracy": Column(
            "validation token accuracy", "Share of held-out tokens ranked first.", SHARE, higher_is_better=True
        ),
    },
)

EXPERTS = experts_probe(
    TextProblem,
    experts_of_token,
    "Experts that are computed for a training token on average: k, and all of them on steps on which they compete.",
    applies=lambda problem: problem.model.scores is not None,
)

FLOPS = Probe(
    TextProblem,
    evaluate=_flops,
    columns={
        "train/flops": Column(
            "training FLOPs so far",
            "FLOPs of the model's products until the evaluation, forward and backward, by their sizes.",
            AT_LEAST_0,
            log=True,
        )
    },
)

TEST_ROWS = Probe(
    TextProblem,
    applies=lambda problem: problem.kind.form.tested,
    evaluate=_test_rows,
    columns={
        "router/entropy_test": Column(
            "entropy of a test token's gate (nats)",
            "Mean entropy of the softmax of scores over test tokens: 0 is a sharp gate, log E a uniform one.",
            AT_LEAST_0,
        ),
        "router/entropy_test_std": Column(
            "deviation of that entropy over test tokens",
            "Standard deviation over the tokens of the test rows of the entropy of the softmax of the scores.",
            AT_LEAST_0,
        ),
    },
)

#: The table METRICS, which users' files fill, for each layer.
METRICS = Probe(
    TextProblem,
    applies=lambda problem: problem.model.scores is not None and bool(router.METRICS),
    in_block=lambda evaluation, block: {stack: site.routing for stack, site in block.outputs.sites.items()},
    evaluate=_users_metrics,
)
