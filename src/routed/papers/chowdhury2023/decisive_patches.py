"""Probes of tasks with a decisive patch (Chowdhury et al. 2023): its experts, costs, and the success of runs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Scalar

from routed.contracts import AT_LEAST_0, SHARE, Column, Routing, SoftRouting
from routed.training.phases import phases_of, steps_per_epoch
from routed.training.probes import Block, Evaluation, Probe
from routed.training.sample_problem import EVALUATION_DISPATCH, SampleProblem

#: The least test accuracy of a successful run; the paper does not define the success of its Fig. 5.
SUCCESS = 0.95

ALL_PATCHES = {
    "test/accuracy_all": Column(
        "test accuracy where experts\ntake all patches",
        "Share of test samples whose class is the predicted one when every expert is given all patches of a"
        " sample, not those that the router picks.",
        bounds=SHARE,
        higher_is_better=True,
    )
}
COLUMNS: dict[str, Column] = {
    "patches/expert_steps": Column(
        "steps of the experts\nuntil the run stopped", "Training steps without those of the router alone.", AT_LEAST_0
    ),
    "test/success": Column(
        f"share of runs with a test\naccuracy of at least {SUCCESS:g}",
        "Share of runs that have at least .95 of the test samples right: the success that Chowdhury et"
        " al. (2023) map in their Fig. 5.",
        bounds=SHARE,
        higher_is_better=True,
    ),
    "patches/hit": Column(
        "share of samples whose decisive patch\nits class's best expert takes",
        "Share of test samples whose decisive patch is among those that the best expert of its class selects.",
        bounds=SHARE,
        higher_is_better=True,
    ),
    "patches/hit_any": Column(
        "share of samples whose decisive patch\nany expert takes",
        "Share of test samples whose decisive patch is selected by some expert.",
        bounds=SHARE,
        higher_is_better=True,
    ),
    "patches/router_alone": Column(
        "accuracy of the router as a classifier",
        "Share of test samples whose class the router tells by itself: the largest score of its first"
        " row minus that of its second, by their sign.",
        bounds=SHARE,
        higher_is_better=True,
    ),
    "patches/largest_first": Column(
        "share of samples of the first class whose decisive\npatch has the largest gate at one expert",
        "Share of samples of the first class for which some expert weighs the decisive patch most.",
        bounds=SHARE,
        higher_is_better=True,
    ),
    "patches/largest_second": Column(
        "share of samples of the second class whose decisive\npatch has the largest gate at one expert",
        "Share of samples of the second class for which some expert weighs the decisive patch most.",
        bounds=SHARE,
        higher_is_better=True,
    ),
    "patches/computed": Column(
        "patches computed a sample, once for each expert",
        "Patches that experts compute for a sample, counted once for each expert that does.",
        log=True,
        bounds=AT_LEAST_0,
    ),
    "patches/flops": Column(
        "FLOPs a sample, forward",
        "Floating-point operations of a forward pass for one sample.",
        log=True,
        bounds=AT_LEAST_0,
    ),
}


def columns(
    routing: Routing | SoftRouting | None, experts_take: bool, cluster: Int[Array, "B n"], decisive: int, params: Any
) -> dict[str, Scalar]:
    """Returns the cost of a sample, and, where experts take patches, the shares of decisive patches that they take.

    The label of a decisive patch is below `decisive`. computed: pairs of a patch and an expert, so E l; without a
    router (None) n, and E n where every expert gets every patch. flops = 2 (computed x weights of an expert + n x
    weights of the router): a product and a sum for each weight.

    For each class and expert there is a share of the samples whose decisive patch the expert takes, and a share of
    the samples where the expert takes that patch first, with the largest gate. hit is the former share of the best
    expert, mean over classes (Fig. 8: o1 and o2 each have their expert); hit_any: some expert takes the patch.
    largest_first and largest_second are the latter share of the best expert (Fig. 9). A router that picks at random
    has l/n of hit and 1/n of largest; the best of E shares is above their mean. NaN: no sample of a class.

    router_alone, with two experts: the share of samples whose class has the sign of max_j s_1j - max_j s_2j, s the
    scores: the accuracy of the router before any expert computes.
    """
    samples, patches = cluster.shape
    experts = 1 if routing is None else routing.scores.shape[-1]
    pairs = len(routing.token) / samples if isinstance(routing, Routing) else float(patches * experts)
    sizes = {name: sum(a.size for a in jax.tree.leaves(tree)) for name, tree in params.items()}
    weights = (sizes["experts"] + sizes.get("fixed", 0)) / experts
    metrics = {
        "patches/computed": jnp.float32(pairs),
        "patches/flops": jnp.float32(2 * (pairs * weights + patches * sizes["router"])),
    }
    if not (experts_take and isinstance(routing, Routing)):
        return metrics
    taken = (routing.token % patches).reshape(samples, experts, -1)  # the preferred one first
    right = taken == cluster.argmin(1)[:, None, None]
    of_class = jax.nn.one_hot(cluster.min(1), decisive)
    hit, first = (
        (of_class.T @ takes.astype(jnp.float32) / of_class.sum(0)[:, None]).max(1)
        for takes in (right.any(2), right[:, :, 0])
    )
    if experts == 2:
        best = routing.scores.reshape(samples, patches, 2).max(1)
        metrics["patches/router_alone"] = ((best[:, 0] > best[:, 1]) == (cluster.min(1) == 0)).mean()
    return metrics | {
        "patches/hit": hit.mean(),
        "patches/hit_any": right.any((1, 2)).mean(),
        "patches/largest_first": first[0],
        "patches/largest_second": first[1],
    }


def _everything(evaluation: Evaluation, block: Block) -> Any:
    """Returns the predictions of experts that get all patches of each sample."""
    rule = block.rule._replace(patches=block.batch.cluster.shape[1])
    model, params, state, step = evaluation.problem.model, evaluation.params, evaluation.state, evaluation.step
    return model.apply(params, state, block.batch, rule, EVALUATION_DISPATCH, block.key, step).prediction


def _accuracy_all(evaluation: Evaluation) -> dict[str, Array]:
    """Returns the accuracy of experts that get all patches."""
    right = evaluation.problem.right(evaluation.inputs, evaluation.blocks, evaluation.batch)
    return {"test/accuracy_all": right.mean()}


def _success(evaluation: Evaluation) -> dict[str, Array]:
    """Returns 1 for a run with a test accuracy of at least SUCCESS."""
    right = evaluation.problem.right(evaluation.inputs, evaluation.prediction, evaluation.batch)
    return {"test/success": (right.mean() >= SUCCESS).astype(jnp.float32)}


def _patches(evaluation: Evaluation) -> dict[str, Array]:
    """Returns the columns `patches/`. Earlier phases than the last train the router alone."""
    problem = evaluation.problem
    *earlier, _ = phases_of(problem.config)
    ends = [phase.end(steps_per_epoch(evaluation.inputs.config)) for phase in earlier]
    before = functools.reduce(jnp.maximum, ends, jnp.int32(0))
    steps = {"patches/expert_steps": jnp.maximum(evaluation.step - before, 0).astype(jnp.float32)}
    decisive, takes = problem.task.decisive, problem.experts_choose
    return steps | columns(evaluation.routing, takes, evaluation.batch.cluster, decisive, evaluation.params)


SUCCESS_SHARE = Probe(
    SampleProblem,
    columns={"test/success": COLUMNS["test/success"]},
    applies=lambda problem: problem.task.decisive > 0 and problem.loss.labelled,
    evaluate=_success,
)
ALL_PATCHES_ACCURACY = Probe(
    SampleProblem,
    columns=ALL_PATCHES,
    applies=lambda problem: problem.experts_choose and problem.model.scores is not None and problem.loss.labelled,
    in_block=_everything,
    evaluate=_accuracy_all,
)
DECISIVE_PATCHES = Probe(
    SampleProblem, columns=COLUMNS, applies=lambda problem: problem.task.decisive > 0, evaluate=_patches
)
