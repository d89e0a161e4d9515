"""Probes of samples: losses, accuracy, and the routing of training samples."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from routed.contracts import AT_LEAST_0, SHARE, Column
from routed.layer.rule import SelectionRule
from routed.metrics import entropies, router
from routed.models.single_layer import SITE
from routed.settings.setting import refuse
from routed.tasks import worlds
from routed.training.objective import rule_and_dispatch
from routed.training.probes import Block, Evaluation, Probe
from routed.training.sample_problem import EVALUATION_DISPATCH, SampleProblem, calibration_scores


def _loss(evaluation: Evaluation, prediction: Any = None, target: Any = None) -> Array:
    """Returns the mean loss over the unit of losses; by default of the predictions, against the targets."""
    target = evaluation.batch.y if target is None else target
    prediction = evaluation.prediction if prediction is None else prediction
    values = evaluation.problem.loss.value(prediction, target)
    if values.ndim != 1:
        refuse("loss", evaluation.problem.config.loss, f"it makes {list(values.shape)}; must be [B], a loss a sample")
    return values.mean() / evaluation.unit


def _accuracy(evaluation: Evaluation) -> dict[str, Array]:
    """Returns the accuracy, and the array of right samples that a page shows."""
    right = evaluation.problem.right(evaluation.inputs, evaluation.prediction, evaluation.batch)
    return {"test/accuracy": right.mean(), "right": right[: router.PROBE]}


def _mixture(evaluation: Evaluation, block: Block) -> Array:
    """Returns the predictions of the soft mixture, without noise."""
    model, params, state, step = evaluation.problem.model, evaluation.params, evaluation.state, evaluation.step
    return model.apply(params, state, block.batch, SelectionRule("soft"), EVALUATION_DISPATCH, step=step).prediction


def _bayes(evaluation: Evaluation) -> dict[str, Array]:
    """Returns the loss of E[y|x], and the loss of the predictions against E[y|x]."""
    data = evaluation.inputs.config.data
    ideal = evaluation.problem.task.bayes(evaluation.world, evaluation.batch, data)
    return {"test/excess": _loss(evaluation, target=ideal), "test/bayes": _loss(evaluation, ideal)}


def _declared(evaluation: Evaluation) -> dict[str, Array]:
    """Returns the columns that the model and the task compute themselves (`watch`)."""
    arguments = evaluation.params, evaluation.world, evaluation.batch, evaluation.inputs.keys["noise"]
    return evaluation.problem.model.watch(*arguments) | evaluation.problem.task.watch(*arguments)


def _training_gates(evaluation: Evaluation) -> dict[str, Array]:
    """Returns the mean entropy of gates on calibration samples, and the entropy to which they were sharpened."""
    problem, inputs = evaluation.problem, evaluation.inputs
    scores = calibration_scores(problem, inputs, evaluation.world, evaluation.params, evaluation.state, evaluation.step)
    target = inputs.config.router.initial_entropy
    return {
        "router/entropy_token_train": entropies.entropy(jax.nn.softmax(scores)).mean(),
        "router/entropy_target": jnp.where(target > 0, target, jnp.nan),
    }


def _training_dispatch(evaluation: Evaluation) -> dict[str, Array]:
    """Returns the dispatch entropy of all training samples, routed as in training; XLA skips unused outputs."""
    problem, inputs, step = evaluation.problem, evaluation.inputs, evaluation.step
    rule, dispatch = rule_and_dispatch(problem.part, inputs.config)
    batch = problem.batch(inputs, (), step)
    key = jax.random.fold_in(inputs.keys["noise"], step)
    outputs = problem.model.apply(evaluation.params, evaluation.state, batch, rule, dispatch, key, step)
    labels = problem.task.labels(inputs.config.data)
    counts = router.dispatched(outputs.sites[SITE].routing, batch.label, labels)
    return {"train/dispatch_entropy": entropies.dispatch_entropy(counts)}


def _initial_clusters(evaluation: Evaluation) -> dict[str, Array]:
    """Returns 1 if router rows from examples (router.init_from_data) would come from every cluster."""
    problem, data = evaluation.problem, evaluation.inputs.config.data
    examples = worlds.examples(problem.task, evaluation.world, problem.config.experts.count, data)
    hit = jnp.zeros(problem.task.labels(data)).at[examples.label[: problem.config.experts.count]].set(1.0)
    return {"router/init_clusters_covered": hit.min()}


LOSS = Probe(
    SampleProblem,
    evaluate=lambda evaluation: {"test/loss": _loss(evaluation)},
    columns={
        "test/loss": Column(
            "top-1 test loss (1 = trivial)",
            "Squared error on test samples as the arm is evaluated (top-1 unless the config says otherwise:"
            " one expert a token, weight 1), over the variance of the targets: 1 is what a constant prediction reaches,"
            " 0 is perfect.",
            AT_LEAST_0,
            log=True,
        ),
        "train/loss": Column(
            "training loss, as trained\n(1 = trivial)",
            "Mean training loss since the last evaluation, by the rule that trains, over the variance of targets.",
            AT_LEAST_0,
            log=True,
        ),
    },
)

ACCURACY = Probe(
    SampleProblem,
    applies=lambda problem: problem.loss.labelled,
    evaluate=_accuracy,
    columns={
        "test/accuracy": Column(
            "test accuracy", "Share of test samples whose class is the predicted one.", SHARE, higher_is_better=True
        )
    },
)

MIXTURE = Probe(
    SampleProblem,
    applies=lambda problem: not problem.loss.labelled,
    in_block=_mixture,
    evaluate=lambda evaluation: {"test/loss_soft": _loss(evaluation, evaluation.blocks)},
    columns={
        "test/loss_soft": Column(
            "soft test loss (1 = trivial)",
            "The same error when every expert answers and the router's probabilities weigh the answers: no"
            " penalty for the change from soft training to one expert.",
            AT_LEAST_0,
            log=True,
        )
    },
)

BAYES = Probe(
    SampleProblem,
    applies=lambda problem: problem.task.bayes is not None,
    evaluate=_bayes,
    columns={
        "test/excess": Column(
            "excess over Bayes (1 = trivial)",
            "Mean squared distance to the Bayes predictor's output, over the variance of the targets: what a"
            " better model could still gain.",
            log=True,
        ),
        "test/bayes": Column(
            "loss of the Bayes predictor (1 = trivial)",
            "Loss of E[y | x], which the generator of the data knows: no model does better on average.",
            AT_LEAST_0,
            log=True,
        ),
    },
)

DECLARED = Probe(SampleProblem, evaluate=_declared)

TRAINING_GATES = Probe(
    SampleProblem,
    applies=lambda problem: problem.model.scores is not None,
    evaluate=_training_gates,
    columns={
        "router/entropy_token_train": Column(
            "entropy of a gate,\ntraining samples (nats)",
            "Mean over training samples of the entropy of a token's probabilities over experts (of patches:"
            " of an expert's over the patches of a sample): 0 is a sharp gate, the log of their number a uniform one.",
            AT_LEAST_0,
        ),
        "router/entropy_target": Column(
            "entropy that a gate was asked for,\ntraining samples (nats)",
            "The per-token entropy that a matched gate was sharpened to: the source arm's final one.",
            AT_LEAST_0,
        ),
    },
)

TRAINING_DISPATCH = Probe(
    SampleProblem,
    applies=lambda problem: problem.tokens_choose and problem.config.data.full_batch,
    evaluate=_training_dispatch,
    columns={
        "train/dispatch_entropy": Column(
            "dispatch entropy H(cluster | expert),\ntraining samples (nats)",
            "H(cluster | expert) over training samples: 0 where every expert serves one cluster, log of the"
            " number of clusters where experts are blind to them.",
            AT_LEAST_0,
        )
    },
)

INITIAL_CLUSTERS = Probe(SampleProblem, applies=lambda problem: problem.tokens_choose, evaluate=_initial_clusters)

#: The table METRICS, which users' files fill.
METRICS = Probe(
    SampleProblem,
    applies=lambda problem: problem.tokens_choose,
    evaluate=lambda evaluation: router.own_columns(evaluation.gate),
)
