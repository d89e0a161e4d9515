"""The one training program: a pure function of (seed, traced settings, world), in stretches that can be saved.

`start` and `advance` are the functions that the engine compiles and batches over runs and devices. A program trains any
problem, in phases.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PRNGKeyArray
from ml_collections import ConfigDict

from routed.layer.auxiliary import steered, users_losses
from routed.settings.setting import COUNT, Allowed, Component, Setting, When, at_least
from routed.settings.tree import node_of
from routed.training.freezing import has_moved, keep, keep_router, router_of, still_layers, with_router
from routed.training.objective import is_frozen, training_loss
from routed.training.optimiser import optimiser, update
from routed.training.phases import Phase, active_phase, configs_of, phases_of, require_groups, steps_per_epoch
from routed.training.problem import Inputs, Problem

#: Independent random streams of a seed; the config key `shared_streams` names streams that all seeds share.
STREAMS = ("world", "init", "order", "noise")
#: The names of a run's state that a training step changes. `taken` counts the steps, and stays behind `step` in a run
#: that stopped early; `wrong` counts the samples of this epoch that were wrong when they were trained on;
#: `coefficients` are those of auxiliary losses that move.
#: `penalties` are the values of users' auxiliary losses, summed as `total` is.
MOVING = ("params", "state", "opt", "coefficients", "penalties", "taken", "total", "loss", "lowest", "wrong", "stopped")
#: The names of a run's state that an evaluation reads.
EVALUATED = ("params", "state", "router0", "memory", "coefficients", "taken", "stopped")
#: The most phases of a run.
PHASES = 32
#: Folded into the key of a step for the coin that chooses among phases.
COIN = 2**31 - 1

_STOPS = When(lambda config: config.stop.rise > 0, "stop.rise > 0")
_EPOCHS = When(lambda config: config.data.epochs, "data.epochs=true")

#: Settings that the training program itself reads.
SETTINGS = Component(
    {
        "shared_streams": Setting(
            (),
            "random streams that all seeds share, taken from the base seed: world, init, order, noise",
            Allowed(lambda v: set(v) <= set(STREAMS), lambda: f"must name streams: {', '.join(STREAMS)}"),
        ),
        "steps": Setting(4000, "optimiser steps", COUNT),
        "eval_every": Setting(500, "steps between evaluations; divides steps", COUNT),
        "batch_size": Setting(32, "training samples (rows of text) per step", at_least(1)),
        "phases": Setting(
            (),
            'phases of training, in order, as "until=STEP epochs=NUMBER fraction=FRACTION train=GROUP+GROUP'
            ' KEY=VALUE"; empty: one, of everything',
            Allowed(lambda v: len(v) <= PHASES, lambda: f"must be at most {PHASES}, as each is compiled"),
        ),
        "stop.rise": Setting(
            0.0, "a run stops when its training loss is above its minimum by more than this; 0: never", at_least(0)
        ),
        "stop.floor": Setting(
            0.0,
            "a run also stops when its training loss is above its minimum, and at most this",
            at_least(0),
            when=_STOPS,
        ),
        "stop.errors": Setting(
            False, "a run stops after an epoch of the last phase in which no training sample was wrong", when=_EPOCHS
        ),
        "stop.epochs": Setting(
            0, "a run stops after so many epochs of the last phase; 0: never", at_least(0), when=_EPOCHS
        ),
        "stop.min_steps": Setting(0, "steps before which a run goes on", at_least(0), when=_STOPS),
    },
    uses=("data.name", "optimizer.name", "optimizer.schedule"),
    reads=tuple(f"optimizer.{name}" for name in ("weight_decay", "l2", "rate_scale", "warmup", "clip")),
)


class Program(NamedTuple):
    """A run without its arrays: its config, its problem, and the phases of its training with the config of each."""

    config: ConfigDict
    problem: Problem
    phases: tuple[Phase, ...]
    configs: tuple[ConfigDict, ...]
    #: `evaluate` as a program inside the program: traced once, for the shapes of the history and for its rows.
    evaluate: Callable[..., dict[str, Array]]


def make_program(config: ConfigDict, problem: Problem) -> Program:
    """Returns the program that trains a problem under a config."""
    evaluated = jax.jit(partial(evaluate, config, problem), inline=True)
    return Program(config, problem, phases_of(config), tuple(configs_of(config)), evaluated)


def streams(seed, config: ConfigDict) -> dict[str, PRNGKeyArray]:
    """Returns a key for each stream; a stream in `shared_streams` has the base seed's key in every run."""
    seeds = {name: config.seed if name in config.shared_streams else seed for name in STREAMS}
    return {name: jax.random.fold_in(jax.random.key(of), index) for index, (name, of) in enumerate(seeds.items())}


def start(program: Program, seed, traced: dict[str, Array], shared: Any = ()) -> tuple[Any, dict[str, Any]]:
    """Returns (world, state) of a run at step 0, before its first evaluation; the state holds the whole history."""
    keys, config = streams(seed, program.config), node_of(program.config, traced)
    world = program.problem.draw_world(keys, config)
    inputs = Inputs(keys, config, world, shared)
    params, state = program.problem.init(inputs)
    require_groups(program.phases, params)
    routed = program.configs if program.problem.part.routed else ()  # others have no auxiliary losses
    run = {
        "params": params,
        "state": state,
        "opt": _optimiser(program.problem, config, params).init(params),
        "coefficients": jax.tree.map(jnp.float32, _steered(program.problem, program.configs)),
        "penalties": {name: jnp.float32(0) for config in routed for name in users_losses(config.losses)},
        "router0": router_of(params, state),
        "memory": program.problem.remember(params, state),
        "step": jnp.int32(0),
        "taken": jnp.int32(0),
        "total": jnp.float32(0),  # the training loss, summed since the last evaluation
        "loss": jnp.float32(0),
        "unit": jnp.float32(program.problem.unit(inputs)),
        "wrong": jnp.int32(0),
        "lowest": jnp.float32(jnp.inf),
        "stopped": jnp.bool_(False),
    }
    if teacher := program.problem.teacher(inputs, params, state):
        run["teacher"] = teacher
    metrics = jax.eval_shape(program.evaluate, seed, traced, world, shared, {name: run[name] for name in EVALUATED})
    rows = program.config.steps // program.config.eval_every + 1
    metrics |= {"train/loss": run["total"]} | _penalties(run, 1.0)
    return world, run | {"history": {name: jnp.zeros((rows, *a.shape), a.dtype) for name, a in metrics.items()}}


def advance(
    program: Program,
    steps: Int[Array, ""] | int,
    seed,
    traced: dict[str, Array],
    world: Any,
    run: dict[str, Any],
    feed: Any = (),
    shared: Any = (),
) -> dict[str, Any]:
    """Returns the run `steps` later; `feed` holds the batches of these steps, where the host makes batches."""
    inputs = Inputs(streams(seed, program.config), node_of(program.config, traced), world, shared)
    end = run["step"] + steps
    moving = {name: run[name] for name in MOVING}
    step = partial(training_step, program, inputs, traced, feed)
    if stops_early(program.config):
        moved = jax.lax.while_loop(lambda now: (now["taken"] < end) & ~now["stopped"], step, moving)
    else:  # as many steps for each run of a batch: a condition of each would select all that moves, in each step
        moved = jax.lax.fori_loop(0, steps, lambda _, now: step(now), moving)
    return run | moved | {"step": end}


def training_step(program: Program, inputs: Inputs, traced, feed, now: dict[str, Any]) -> dict[str, Any]:
    """Takes one step under the phase that applies."""
    steps = []
    for phase, config in zip(program.phases, program.configs, strict=True):
        # The changes of a phase hold for traced settings too.
        given = {key: value for key, value in traced.items() if key not in phase.changes}
        steps.append(partial(_phase_step, program, inputs, node_of(config, given), feed, phase))
    if len(steps) == 1:
        return steps[0](now)
    key = jax.random.fold_in(jax.random.fold_in(inputs.keys["noise"], COIN), now["taken"])
    per_epoch = steps_per_epoch(inputs.config) if any(phase.epochs for phase in program.phases) else 0
    return jax.lax.switch(active_phase(program.phases, now["taken"], key, per_epoch), steps, now)


def _phase_step(program: Program, inputs: Inputs, config: Any, feed, phase: Phase, now: dict[str, Any]):
    """Takes one step: batch, gradient, update. A run that stops does not take the step at which it stops."""
    batch = program.problem.batch(inputs, feed, now["taken"])
    key = jax.random.fold_in(inputs.keys["noise"], now["taken"])
    layers = program.problem.model.layers
    frozen = still_layers(layers, is_frozen(program.problem.part, config, now["taken"]))
    still = frozen if phase.groups is None or "router" in phase.groups else jnp.array(True)
    loss = partial(training_loss, program.problem, config, batch, key, now["taken"], still=still)
    grads, (value, wrong, state, coefficients, own_values) = jax.grad(loss, has_aux=True)(
        now["params"], now["state"], now["coefficients"]
    )
    transform = _optimiser(program.problem, inputs.config, now["params"])
    with jax.named_scope("optimiser"):
        params, opt = update(
            transform, now["params"], grads, now["opt"], frozen, phase.groups, partial(keep, frozen, layers)
        )
    # Where nothing trains, statistics and a balancing bias stay too.
    state = now["state"] if phase.groups == () else keep_router(still, layers, now["state"], state)
    new = now | {"params": params, "state": state, "opt": opt, "coefficients": coefficients}
    new |= {"penalties": {name: total + own_values.get(name, 0.0) for name, total in now["penalties"].items()}}
    new |= {"total": now["total"] + value, "loss": value, "taken": now["taken"] + 1}
    stop = program.config.stop
    if stop.errors or stop.epochs:
        new |= _end_of_epoch(program, inputs, phase, wrong, new)
    if not stop.rise:
        return new
    stopped = stops(stop, value, now["lowest"], now["taken"])
    new |= {"lowest": jnp.minimum(now["lowest"], value)}
    return jax.tree.map(partial(jnp.where, stopped), now, new) | {"stopped": stopped | new["stopped"], "loss": value}


def _end_of_epoch(program: Program, inputs: Inputs, phase: Phase, wrong, new: dict[str, Any]) -> dict[str, Any]:
    """Returns `stopped` for a run that stops behind this epoch, and its wrong samples of the epoch so far."""
    stop, per_epoch = program.config.stop, steps_per_epoch(inputs.config)
    over, wrong = new["taken"] % per_epoch == 0, new["wrong"] + wrong
    *earlier, last = program.phases
    if phase is not last:  # whose whole epochs count
        return {"wrong": jnp.where(over, 0, jnp.ones_like(wrong))}
    before = functools.reduce(jnp.maximum, [phase.end(per_epoch) for phase in earlier], jnp.int32(0))
    stopped = over & (wrong == 0) & stop.errors
    if stop.epochs:
        stopped |= new["taken"] >= before + stop.epochs * per_epoch
    return {"wrong": jnp.where(over, 0, wrong), "stopped": stopped}


def stops_early(config: ConfigDict) -> bool:
    """True if a run may take fewer steps than planned."""
    return bool(config.stop.rise or config.stop.errors or config.stop.epochs)


def stops(stop: Any, value, lowest, taken):
    """True if a run stops at a training loss of `value`, after `taken` steps with losses of at least `lowest`."""
    return (taken >= stop.min_steps) & (value > lowest) & ((value > lowest + stop.rise) | (value <= stop.floor))


def record(
    program: Program, seed, traced: dict[str, Array], world: Any, run: dict[str, Any], shared: Any = ()
) -> dict[str, Any]:
    """Returns the run with a new row of its history; after an early stop, the last loss counts for the remaining steps.

    The training loss is the mean since the last evaluation, NaN at step 0; `Program.evaluate` returns the other
    metrics.
    """
    inputs = Inputs(streams(seed, program.config), node_of(program.config, traced), world, shared)
    if (at := program.problem.fit_step) is not None:
        run = jax.lax.cond(run["step"] == at, partial(_fit, program.problem, inputs), lambda run: run, run)
    every = program.config.eval_every
    missed = jnp.minimum(run["step"] - run["taken"], every)
    total = run["total"] + missed * run["loss"]
    steps = jnp.where(run["step"] > 0, every, 0)
    with jax.named_scope("evaluation"):
        metrics = program.evaluate(seed, traced, world, shared, {name: run[name] for name in EVALUATED})
    metrics |= {"train/loss": total / steps / run["unit"]} | _penalties(run, steps - missed)
    row = run["step"] // every
    history = {name: old.at[row].set(metrics[name]) for name, old in run["history"].items()}
    memory = program.problem.remember(run["params"], run["state"])
    sums = {"total": jnp.float32(0), "penalties": jax.tree.map(jnp.zeros_like, run["penalties"])}
    return run | sums | {"history": history, "memory": memory}


def _penalties(run: dict[str, Any], steps) -> dict[str, Array]:
    """Returns the columns of users' auxiliary losses: means over the steps since the last evaluation."""
    return {f"train/loss_{name}": total / steps for name, total in run["penalties"].items()}


def _fit(problem: Problem, inputs: Inputs, run: dict[str, Any]) -> dict[str, Any]:
    """Returns the run with a fitted router, from which on a frozen one stays."""
    params = problem.fit(inputs, run["params"], run["state"], run["taken"], run.get("teacher"))
    return run | {"params": params, "router0": router_of(params, run["state"])}


def evaluate(
    config: ConfigDict, problem: Problem, seed, traced: dict[str, Array], world: Any, shared: Any, run: dict[str, Any]
) -> dict[str, Array]:
    """Returns all metrics of a run at one moment. `run` holds the names EVALUATED."""
    inputs = Inputs(streams(seed, config), node_of(config, traced), world, shared)
    params, state = run["params"], run["state"]
    metrics = problem.evaluate(inputs, params, state, run["taken"], run["memory"])
    metrics |= {
        "train/rate_scale": inputs.config.optimizer.rate_scale,
        "router/params_changed": has_moved(router_of(params, state), run["router0"]),
    }
    if (layers := problem.model.layers) is not None:
        still, (router0, state0) = still_layers(layers, inputs.config.router.frozen), run["router0"]
        rested = keep(still, layers, router0, params["router"])
        before = router_of({"router": rested}, keep_router(still, layers, with_router(state, state0), state))
        metrics |= {"router/frozen_changed": has_moved(before, router_of(params, state))}
    metrics |= {f"train/coefficient_{name}": value for name, value in run["coefficients"].items()}
    if stops_early(config):
        metrics |= {
            "train/steps": run["taken"].astype(jnp.float32),
            "train/stopped": run["stopped"].astype(jnp.float32),
        }
    return metrics


def _optimiser(problem: Problem, config: Any, params: dict[str, Any]) -> optax.GradientTransformation:
    """Returns the optimiser of a problem's parameters."""
    return optimiser(config, params, problem.normalisation, problem.router_learns)


def _steered(problem: Problem, configs: Sequence[ConfigDict]) -> dict[str, float]:
    """Returns the coefficients that move in any phase, as they are at the start of the first phase that has them."""
    if not problem.part.routed:  # which has no auxiliary losses
        return {}
    return functools.reduce(lambda later, config: later | steered(config.losses), reversed(configs), {})
