"""One run: a pure function of (seed, traced settings, world), cut into chunks so that it can be saved and watched.

`program(config, pool)` returns the functions; `routed.layout` batches them over runs and devices.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from routed import losses, metrics, models, observe
from routed.data import TASKS, samples
from routed.routers import FIXED, ROUTERS, initialise
from routed.selection import Rule, capacity, rule_of
from routed.train import optimiser, update
from routed.words import Batch

#: Independent random streams of a seed; any of them can be held fixed over seeds (config key `held`).
STREAMS = ("world", "init", "order", "noise")


class Program(NamedTuple):
    """The two functions of a run. `state` holds parameters, optimiser, step and the whole history of evaluations.

    start(seed, settings, given) -> (world, state), not yet evaluated;
    chunk(active, steps, evaluated, seed, settings, world, state, feed, given) -> state, `steps` later, with a row of history
    if `evaluated`; the same state if not active (a padded place in a batch costs nothing where runs are mapped one after the
    other). `feed` holds the batches of the `checkpoint.every` steps among which these are, and `given` what all runs share, where
    data come from the host; a task that draws its own data has neither.
    """

    start: Callable[..., Any]
    chunk: Callable[..., Any]


#: What a training step changes, of a state; `taken` counts the steps, and falls behind `step` in a run that stopped early.
MOVING = ("params", "layer", "opt", "taken", "total", "loss", "lowest", "stopped")


def stops(stop: ConfigDict, value, lowest, taken):
    """Does a run stop at a training loss of `value`, after `taken` steps none of which was below `lowest`?"""
    return (taken >= stop.after) & (value > lowest) & ((value > lowest + stop.rise) | (value <= stop.floor))


def streams(seed, config: ConfigDict) -> dict[str, Any]:
    """A key for each stream; a held one comes from the base seed, whatever the run's own seed."""
    keys = {}
    for index, name in enumerate(STREAMS):
        source = config.seed if name in config.held else seed
        keys[name] = jax.random.fold_in(jax.random.key(source), index)
    return keys


def program(config: ConfigDict, pool: int) -> Program:
    """The run that `config` describes, with `pool` training samples in its world (at least every `data.samples`)."""
    task, model = TASKS[config.data.name], models.build(config)
    score, labels = model.scores, task.labels(config.data)
    evaluations = config.steps // config.eval_every + 1
    training, evaluation, soft = rule_of(config.selection), rule_of(config.selection, evaluation=True), Rule("soft")
    coefficients = {
        "balance": config.losses.balance,
        "importance": config.losses.importance,
        "z": config.losses.z,
        "entropy": config.losses.entropy,
    }
    groups = (
        config.batch_size // (training.group_size or config.batch_size) if config.losses.balance_scope == "group" else 1
    )

    loss_of, _ = losses.TASK_LOSSES[config.loss]
    labelled = config.loss != "squared"  # a loss in nats and an accuracy; else losses are over the target's variance

    def sample(keys, settings, world, step) -> Batch:
        key = jax.random.fold_in(keys["order"], step)
        draw = samples.all_batch if config.data.whole else samples.train_batch
        draw = samples.fresh_batch if config.data.fresh else draw
        return draw(task, world, key, config.batch_size, config.data, settings)

    def unit_of(world, settings):
        return 1.0 if labelled else samples.variance(task, world, config.data, settings)

    def train_loss(params, layer, batch, key, frozen):
        """The loss of the task, mean over samples, and auxiliary losses."""
        prediction, routing, layer = model.apply(params, layer, batch, training, config.dispatch, key)
        task_loss = loss_of(prediction, batch.y).mean()
        if routing is None or config.router.name in FIXED or not any(coefficients.values()):
            return task_loss, (task_loss, layer)
        extra, _ = losses.auxiliary(
            routing, coefficients, learned=~frozen, groups=groups, balance_of=config.losses.balance_of
        )
        return task_loss + extra, (task_loss, layer)

    def start(seed, settings, given=()):
        keys = streams(seed, config)
        drawn = samples.world(task, keys["world"], config.data, pool, settings)
        world = drawn._replace(given=given)
        test = samples.test_batch(task, world, config.data, settings)
        params, layer = model.init(keys["init"], test)
        if model.scores is not None:
            examples = samples.examples(task, world, config.experts.count, config.data, settings)
            router = ROUTERS[config.router.name](config.router, config.experts.count)
            params = params | {
                "router": initialise(
                    router, params["router"], examples.tokens[: config.experts.count], test.tokens, settings
                )
            }
        state = {
            "params": params,
            "layer": layer,
            "opt": optimiser(config, settings).init(params),
            "router0": params["router"],
            "step": jnp.int32(0),
            "taken": jnp.int32(0),
            "loss": jnp.float32(0),
            "lowest": jnp.float32(jnp.inf),
            "stopped": jnp.array(False),
        }
        seen = jax.eval_shape(lambda: evaluate(keys, settings, world, state))
        return drawn, state | new_history(seen, evaluations)

    def chunk(active, steps, evaluated, seed, settings, world, state, feed=(), given=()):
        del feed
        keys, world = streams(seed, config), world._replace(given=given)
        transform = optimiser(config, settings)
        frozen = settings["router.frozen"]

        def step(now):
            batch = sample(keys, settings, world, now["taken"])
            noise = jax.random.fold_in(keys["noise"], now["taken"])
            grads, (value, layer) = jax.grad(train_loss, has_aux=True)(
                now["params"], now["layer"], batch, noise, frozen
            )
            params, opt = update(transform, now["params"], grads, now["opt"], frozen)
            new = now | {"params": params, "layer": layer, "opt": opt, "total": now["total"] + value, "loss": value}
            new |= {"taken": now["taken"] + 1}
            if not config.stop.rise:
                return new
            stopped = stops(config.stop, value, now["lowest"], now["taken"])
            new |= {"lowest": jnp.minimum(now["lowest"], value)}
            # The step that stops a run is not taken.
            return jax.tree.map(partial(jnp.where, stopped), now, new) | {"stopped": stopped, "loss": value}

        def advance(state):
            end = state["step"] + steps
            moving = {name: state[name] for name in MOVING}
            moved = jax.lax.while_loop(lambda now: (now["taken"] < end) & ~now["stopped"], step, moving)
            new = state | moved | {"step": end}
            return jax.lax.cond(evaluated, record, lambda new: new, new)

        def record(new):
            # The loss at which a run stopped stands for the steps that it did not take.
            missed = jnp.minimum(new["step"] - new["taken"], config.eval_every)
            new |= {"total": new["total"] + missed * new["loss"]}
            return recorded(new, evaluate(keys, settings, world, new), config.eval_every, unit_of(world, settings))

        return jax.lax.cond(active, advance, lambda state: state, state)

    def evaluate(keys, settings, world, state) -> dict[str, jax.Array]:
        """All metrics of one moment. Test tokens pass in blocks, which keeps the experts' activations in cache."""
        params, test = state["params"], samples.test_batch(task, world, config.data, settings)
        scale = unit_of(world, settings)

        def forward(number, block: Batch):
            # Dense, since the soft mixture needs every expert anyway.
            noise = jax.random.fold_in(keys["noise"], number) if config.router.noise_at_eval else None
            prediction, routing, _ = model.apply(params, state["layer"], block, evaluation, "dense", noise)
            mixture = None if labelled else model.apply(params, state["layer"], block, soft, "dense")[0]
            return prediction, mixture, routing

        prediction, mixture, routing = _in_blocks(forward, test)
        seen = {
            "test/loss": loss_of(prediction, test.y).mean() / scale,
            "train/rate_scale": settings["optimizer.rate_scale"],
            "train/experts": jnp.float32(experts_per_token(config, training)),
        }
        if labelled:
            right = losses.correct(prediction, test.y)
            seen |= {"test/accuracy": right.mean(), "right": right[: observe.PROBE]}
        else:
            seen["test/loss_soft"] = loss_of(mixture, test.y).mean() / scale
        if config.stop.rise:
            seen["train/steps"] = state["taken"].astype(jnp.float32)
        if task.bayes is not None:
            ideal = task.bayes(world, test, config.data, settings)
            seen["test/excess"] = loss_of(prediction, ideal).mean() / scale
            seen["test/bayes"] = loss_of(ideal, test.y).mean() / scale
        moved = [
            (a != b).any()
            for a, b in zip(jax.tree.leaves(params["router"]), jax.tree.leaves(state["router0"]), strict=True)
        ]
        seen["router/moved"] = jnp.float32(jnp.stack(moved).any() if moved else False)
        seen |= model.watch(params, world, test, keys["noise"]) | task.watch(params, world, test, keys["noise"])
        if routing is None or score is None:
            return seen
        if config.data.whole:  # all training samples, routed as in training; XLA leaves out their outputs
            batch = sample(keys, settings, world, state["taken"])
            noise = jax.random.fold_in(keys["noise"], state["taken"])
            _, trained, _ = model.apply(params, state["layer"], batch, training, config.dispatch, noise)
            seen["train/dispatch_entropy"] = metrics.dispatch_entropy(observe.dispatched(trained, batch.label, labels))

        count = config.experts.count
        label = samples.examples(task, world, count, config.data, settings).label[:count]
        hit = jnp.zeros(labels).at[label].set(1.0)
        seen["router/rows_hit"] = hit.min()  # would rows from examples (router.from_data) come from every cluster?
        return seen | observe.columns(
            routing,
            params["router"],
            test,
            score=lambda x: score(params, x, test.label),
            labels=labels,
            groupings=task.groupings(world, config.data),
            signal=config.data.dim,
            key=keys["noise"],
            shuffles=config.shuffles,
        )

    return Program(start, chunk)


def new_history(seen: dict[str, Any], evaluations: int) -> dict[str, Any]:
    """The part of a state that remembers: the training loss summed since the last evaluation, and a row for each one."""
    seen = seen | {"train/loss": jnp.float32(0)}
    history = {name: jnp.zeros((evaluations, *one.shape), one.dtype) for name, one in seen.items()}
    return {"history": history, "total": jnp.float32(0)}


def recorded(state, seen: dict[str, Any], every: int, scale=1.0):
    """The state with the row of this moment; its training loss is the mean since the last one, NaN at step 0."""
    steps = jnp.where(state["step"] > 0, every, 0)
    seen = seen | {"train/loss": state["total"] / steps / scale}
    row = state["step"] // every
    history = {name: old.at[row].set(seen[name]) for name, old in state["history"].items()}
    return state | {"history": history, "total": jnp.float32(0)}


def experts_per_token(config: ConfigDict, rule: Rule) -> float:
    """Experts that compute for one training token: the FLOPs of a selection, in units of one expert."""
    if config.model != "moe":
        return 1.0
    if rule.name == "expert_choice":
        size = rule.group_size or config.batch_size
        return config.experts.count * capacity(rule, size, config.experts.count) / size
    return float(config.experts.count if rule.name == "soft" else rule.k)


def _in_blocks(forward: Callable[[Any, Batch], Any], batch: Batch, largest: int = 640) -> Any:
    """`forward` on numbered blocks of samples, one after the other; leaves come back as [blocks * block, ...]."""
    size = len(batch.x)
    block = max(b for b in range(1, min(size, largest) + 1) if size % b == 0)
    blocks = jax.tree.map(lambda a: a.reshape(size // block, block, *a.shape[1:]), batch)
    made = jax.lax.map(lambda item: forward(*item), (jnp.arange(size // block), blocks))
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), made)
