"""The problem of samples: a task that draws its own data, a layer on it, and a target for each sample."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from routed.contracts import Batch
from routed.experts import EXPERTS
from routed.layer.moe import CONTROL
from routed.layer.rule import Rule, rule_of
from routed.layer.selection import SELECTIONS, gate_rows, group_of, in_samples, mean_rule, work
from routed.metrics import entropies, patches, regret, router, specialists
from routed.models import SAMPLE_MODELS
from routed.models.model import Model
from routed.models.single_layer import SITE, sharpness
from routed.routers import CLUSTERS, EXAMPLES, ROUTERS, initial_parameters, sharpness_of
from routed.routers.features import IMAGES
from routed.settings.setting import Setting, at_least
from routed.settings.tree import node_of
from routed.tasks import TASKS, worlds
from routed.tasks.task import Task
from routed.training.objective import rule_and_dispatch
from routed.training.phases import mean_so_far_of
from routed.training.problem import Cost, Inputs, Problem, ProblemPart
from routed.training.sample_checks import check, positions_of
from routed.training.sample_columns import columns_of
from routed.training.sample_history import ALONE, alone, offline, traced
from routed.training.task_losses import TASK_LOSSES, apart, correct, squared

#: FLOPs that take as long as the update of a parameter: of the headline's soft and hard arms, which differ in FLOPs 57-fold and
#: in time 3-fold (2.35 and .72 ms a step on 2 CPU cores).
UPDATE = 80.0


def build(config: ConfigDict, pool: int, mesh: Mesh | None = None) -> Problem:
    """The problem of a config, with `pool` training samples in its world (at least every `data.samples`)."""
    task, model = TASKS[config.data.name], SAMPLE_MODELS[config.model].build(config, mesh)
    labelled = TASK_LOSSES[config.loss].labelled

    def batch_of(inputs: Inputs, feed: Any, step) -> Batch:
        del feed
        order, data = inputs.keys["order"], inputs.config.data
        return worlds.train_batch(task, _world(inputs), order, config.batch_size, data, step)

    def task_loss(phase: Any, outputs, batch):
        loss, prediction = TASK_LOSSES[phase.loss], outputs.prediction
        if loss.of_scores:
            prediction = apart(outputs.sites[SITE].routing.scores, len(batch.y))
        members = len(prediction) // len(batch.y)  # more than one where every expert answers for itself
        value = loss.value(prediction, jnp.tile(batch.y, (members, 1)) if members > 1 else batch.y).mean()
        return value, value

    def wrong(phase: Any, outputs, batch):
        return (~correct(outputs.prediction, batch.y, phase.losses.threshold)).sum() if config.stop.errors else 0

    def unit(inputs: Inputs):
        return 1.0 if labelled else worlds.variance(task, _world(inputs), inputs.config.data)

    def evaluate(inputs: Inputs, params, state, step, memory):
        del memory
        return _evaluate(config, task, model, unit(inputs), batch_of, inputs, params, state, step)

    return Problem(
        model=model,
        draw_world=lambda keys, run: worlds.draw_world(task, keys["world"], run.data, pool),
        init=lambda inputs: _init(config, task, model, inputs, pool),
        batch=batch_of,
        task_loss=task_loss,
        evaluate=evaluate,
        unit=unit,
        wrong=wrong,
    )


def _world(inputs: Inputs):
    return inputs.world._replace(shared=inputs.shared)


#: Training samples that k-means looks at, at most, for which there is memory also where they are images; and what is folded into
#: the key of the initial weights for it.
CLUSTERED, CLUSTERING = 16384, 1

#: Training samples on which the entropy of gates is measured, and by which they are made as sharp as asked.
GAUGED = 1024


def _init(config: ConfigDict, task: Task, model: Model, inputs: Inputs, pool: int):
    """Fresh parameters, then what a comparison does to a router: scale it, fill it from data, make it as sharp as asked."""
    data, world = inputs.config.data, _world(inputs)
    params, state = model.init(inputs.keys["init"], worlds.test_batch(task, world, data))
    if model.scores is None:
        return params, state
    count, part = config.experts.count, ROUTERS[config.router.name]
    examples = worlds.examples(task, world, count, data)
    module = part.make(node_of(config).router, count)
    clustered = _samples(task, inputs, pool) if config.router.rows == CLUSTERS else None
    own = initial_parameters(part, module, params["router"], examples.tokens[:count], inputs.config.router, clustered)
    params = params | {"router": own}
    # At the last step, where arms are compared: scores may depend on the step.
    scores = _gauged(config, task, model, world, params, state, data, config.steps)
    return params, state | {CONTROL: {"sharpness": sharpness_of(scores, inputs.config.router.entropy)}}


def _gauged(config, task: Task, model: Model, world, params, state, data, step):
    """Scores of training samples in rows, of which each is a gate's: of fewer samples where each has several gates."""
    rule, positions = rule_of(config.selection), task.positions(data)
    count = max(1, GAUGED // positions) if SELECTIONS[rule.name].within_samples else GAUGED
    gauge = worlds.examples(task, world, count, data)
    assert model.scores is not None
    return gate_rows(rule, model.scores(params, state, SITE, gauge.tokens[None], gauge, step)[0], positions)


def _samples(task: Task, inputs: Inputs, pool: int):
    """The tokens of the training samples, 1 for each, 0 for those of the pool that are none; and a key for clusters of them."""
    data, count = inputs.config.data, min(pool, CLUSTERED)
    tokens = worlds.examples(task, _world(inputs), count, data).tokens
    weight = (jnp.arange(len(tokens)) < data.samples * (len(tokens) // count)).astype(jnp.float32)
    return tokens, weight, jax.random.fold_in(inputs.keys["init"], CLUSTERING)


def _evaluate(config, task: Task, model: Model, unit, batch_of, inputs: Inputs, params, state, step):
    """All metrics of one moment. Test tokens pass in blocks, which keeps the experts' activations in cache."""
    data, noise_key = inputs.config.data, inputs.keys["noise"]
    world = task.at(_world(inputs), step, data)
    loss, test = TASK_LOSSES[config.loss], worlds.test_batch(task, world, data)
    training, evaluation = rule_and_dispatch(inputs.config)[0], _evaluation_rule(inputs.config)
    experts = _affine(config, model, test, params)
    noisy = "router" in config and "noise_at_eval" in config.router and config.router.noise_at_eval

    def forward(number, block: Batch):
        # Dense, since the soft mixture needs every expert anyway.
        key = jax.random.fold_in(noise_key, number) if noisy else None
        rule = evaluation._replace(group_size=group_of(evaluation.group_size, len(block.tokens)))
        outputs = model.apply(params, state, block, rule, "dense", key, step)
        everything = None
        if experts_take and model.scores is not None:
            all_patches = rule._replace(patches=block.cluster.shape[1])
            everything = model.apply(params, state, block, all_patches, "dense", key, step).prediction
        soft = None if loss.labelled else model.apply(params, state, block, Rule("soft"), "dense", step=step)
        site = outputs.sites[SITE] if outputs.sites else None
        features = site.features if site and experts and experts.slope is not None else None
        return outputs.prediction, soft and soft.prediction, site and site.routing, features, everything

    experts_take = SELECTIONS[evaluation.name].within_samples
    # Fewer images at once where experts are networks on them: all experts' windows are in memory.
    networks = "experts" in config and "name" in config.experts and EXPERTS[config.experts.name].flops is not None
    blocks = _in_blocks(forward, test, IMAGES) if networks else _in_blocks(forward, test)
    prediction, mixture, routing, features, everything = blocks
    seen = {
        "test/loss": loss.value(prediction, test.y).mean() / unit,
        "train/experts": jnp.asarray(mean_so_far_of(experts_per_token, config, inputs.config, step), jnp.float32),
    }
    if loss.labelled:
        threshold = inputs.config.losses.threshold if "threshold" in loss.settings else 0.0
        right = correct(prediction, test.y, threshold)
        if task.decisive:
            seen["test/success"] = (right.mean() >= patches.SUCCESS).astype(jnp.float32)
        if everything is not None:
            seen["test/accuracy_all"] = correct(everything, test.y, threshold).mean()
        seen |= {"test/accuracy": right.mean(), "right": right[: router.PROBE]}
        if ALONE in task.columns and model.responses is not None:
            seen["alone"] = alone(task, model.responses, params, jax.tree.map(lambda a: a[: router.PROBE], test), data)
    else:
        seen["test/loss_soft"] = loss.value(mixture, test.y).mean() / unit
    if task.bayes is not None:
        ideal = task.bayes(world, test, data)
        seen["test/excess"] = loss.value(prediction, ideal).mean() / unit
        seen["test/bayes"] = loss.value(ideal, test.y).mean() / unit
    seen |= model.watch(params, world, test, noise_key) | task.watch(params, world, test, noise_key)
    if task.decisive:
        seen |= patches.columns(routing, experts_take, test.cluster, task.decisive, params)
    if routing is None or model.scores is None:
        return seen
    probs = jax.nn.softmax(_gauged(config, task, model, world, params, state, data, step))
    asked = inputs.config.router.entropy
    seen["router/entropy_token_train"] = entropies.entropy(probs).mean()
    seen["router/entropy_asked"] = jnp.where(asked > 0, asked, jnp.nan)
    if experts_take:
        return seen  # what follows is about tokens that choose their experts
    labels, count = task.labels(data), config.experts.count
    if experts is not None:
        parts = regret.parts(experts, features, test.y, router.chosen(routing)[:, 0], prediction)
        trained_on = step * config.batch_size if data.fresh else data.samples
        seen |= regret.columns(parts, experts, unit, trained_on)
    if config.data.whole:  # all training samples, routed as in training; XLA leaves out their outputs
        batch = batch_of(inputs, (), step)
        key = jax.random.fold_in(noise_key, step)
        outputs = model.apply(params, state, batch, training, config.dispatch, key, step)
        trained = router.dispatched(outputs.sites[SITE].routing, batch.label, labels)
        seen["train/dispatch_entropy"] = entropies.dispatch_entropy(trained)
    rows = worlds.examples(task, world, count, data)
    hit = jnp.zeros(labels).at[owner := rows.label[:count]].set(1.0)
    seen["router/rows_hit"] = hit.min()  # would rows from examples (router.from_data) come from every cluster?
    if _started_at_rows(config, params, rows) and experts is not None and experts.slope is None:
        own = params["router"]["kernel"].T
        told = (routing.scores, test.label, test.y, experts.offset, own, rows.tokens[:count], owner, labels)
        from_data = jnp.asarray(inputs.config.router.from_data)
        found = specialists.columns(*told)
        seen |= {name: jnp.where(from_data, value, jnp.nan) for name, value in found.items()}
    scores = model.scores
    return seen | router.columns(
        routing,
        params["router"],
        test,
        score=lambda x: scores(params, state, SITE, x[None], test, step)[0],
        labels=labels,
        groupings=task.groupings(world, data),
        signal=task.signal(data) if task.signal is not None else None,
        key=noise_key,
        shuffles=config.shuffles,
        sharpness=sharpness(state),
    )


def _started_at_rows(config: ConfigDict, params, rows: Batch) -> bool:
    """May the router's rows have been these examples, if it took any?"""
    kernel = params["router"].get("kernel")
    return config.router.rows == EXAMPLES and kernel is not None and kernel.shape[0] == rows.tokens.shape[-1]


def _affine(config: ConfigDict, model: Model, test: Batch, params) -> regret.Affine | None:
    """The experts as affine maps; None where they are none, or where the loss is not the squared error of single tokens."""
    if model.scores is None or TASK_LOSSES[config.loss].value is not squared or test.cluster.ndim > 1:
        return None
    read = EXPERTS[config.experts.name].affine
    return None if read is None else read(params["experts"])


def _evaluation_rule(config: Any) -> Rule:
    return rule_of(config.selection, evaluation=True) if "dispatch" in config else Rule()


def experts_per_token(config: Any) -> Any:
    """Experts that compute for one training token, in a phase with this config."""
    return _of_token(config, lambda rule, *sizes: SELECTIONS[rule.name].experts_per_token(rule, *sizes))


def _of_token(config: Any, count: Callable[..., Any]) -> Any:
    rule = mean_rule(rule_and_dispatch(config)[0], config.steps)
    if not SAMPLE_MODELS[config.model].routed:
        return float(config.experts.count) if SAMPLE_MODELS[config.model].every else 1.0
    return count(in_samples(rule, positions_of(config)), config.batch_size, config.experts.count)


def _in_blocks(forward: Callable[[Any, Batch], Any], batch: Batch, largest: int = 640) -> Any:
    """`forward` on numbered blocks of samples, one after the other; leaves come back as [blocks * block, ...]."""
    size = len(batch.x)
    block = max(b for b in range(1, min(size, largest) + 1) if size % b == 0)
    blocks = jax.tree.map(lambda a: a.reshape(size // block, block, *a.shape[1:]), batch)
    made = jax.lax.map(lambda item: forward(*item), (jnp.arange(size // block), blocks))
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), made)


def cost(config: ConfigDict) -> Cost:
    """6 FLOPs for each token and parameter that serves it (of experts on images: 3 times those that they say), and UPDATE for each parameter.

    Of phases that select in other ways the mean over the steps.
    """
    problem, test, sizes = _sizes(config)
    learning = float(mean_so_far_of(lambda own: _of_token(own, work), config, config, config.steps))
    share = learning / config.experts.count if problem.model.scores is not None else 1.0
    tokens = config.batch_size * math.prod(test.cluster.shape[1:])
    served = sizes["router"] + sizes["experts"] * share * _passes(config, test)
    counted, each = SAMPLE_MODELS[config.model].flops, flops_of_expert(config, test)
    flops = 6.0 * tokens * served if counted is None else 3.0 * tokens * counted(config)
    if each is not None:
        flops = tokens * (6.0 * sizes["router"] + 3.0 * each * learning)
    total = sum(size for name, size in sizes.items() if name != "fixed")
    return Cost(tokens, flops, UPDATE * total, lambda: total)


def _passes(config: ConfigDict, batch: Batch) -> int:
    """How often a token passes an expert's weights: once, but filters see each of its patches, unless they are linear (`experts.cnn`)."""
    filters = "experts" in config and "name" in config.experts and "patches" in EXPERTS[config.experts.name].tokens
    return batch.x.shape[1] if filters and config.experts.activation != "linear" else 1


def flops_of_expert(config: ConfigDict, batch: Batch) -> float | None:
    """FLOPs of an expert on an image of the batch, forward; None where its parameters tell them."""
    counted = EXPERTS[config.experts.name].flops if "experts" in config and "name" in config.experts else None
    if counted is None:
        return None
    _, _, side, channels = batch.x.shape
    return counted(config.experts.width, side, channels, TASKS[config.data.name].outputs(config.data))


def _sizes(config: ConfigDict) -> tuple[Problem, Batch, dict[str, int]]:
    """The problem, the shapes of its test batch, and how many parameters each group has."""
    problem, key = build(config, config.data.samples), jax.random.key(0)
    task = TASKS[config.data.name]

    def init():
        run, keys = node_of(config), dict.fromkeys(("world", "init", "noise", "order"), key)
        world = problem.draw_world(keys, run)._replace(shared=task.shared(config.data))
        test = worlds.test_batch(task, world, run.data)
        return test, problem.model.init(key, test)[0]

    test, params = jax.eval_shape(init)
    return problem, test, {name: sum(a.size for a in jax.tree.leaves(tree)) for name, tree in params.items()}


SAMPLES = ProblemPart(
    build=build,
    data=TASKS,
    models=SAMPLE_MODELS,
    loss="test/loss",
    columns=columns_of,
    shared_arrays=lambda config: TASKS[config.data.name].shared(config.data),
    feed=lambda config, seed, rows=slice(None): lambda first, steps: (),
    feed_shape=lambda config, steps: (),
    offline=offline,
    traced=traced,
    positions=positions_of,
    digest=lambda config: TASKS[config.data.name].digest(config.data),
    about=lambda config: TASKS[config.data.name].about(config.data),
    cost=cost,
    fuse="LIBRARY_FUSION_TYPE_REDUCE",
    settings={"shuffles": Setting(32, "draws of the shuffled-router baseline at an evaluation; 0: none", at_least(0))},
    uses=("model", "loss", "optimizer.normalise"),
    reads=(
        "data.samples", "data.fresh", "data.whole", "data.epochs", "data.test_samples", "data.target", "data.target_dim",
    ),
    check=check,
)  # fmt: skip
