"""The one training program: a pure function of (seed, traced settings, world), cut into stretches that can be saved and watched.

`start` and `advance` are what the engine compiles and batches over runs and devices. A program trains any problem, in phases.
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

from routed.layer.auxiliary import steered
from routed.settings.setting import COUNT, Allowed, Component, Setting, When, at_least
from routed.settings.tree import node_of, override
from routed.training.freezing import has_moved, keep_router, router_of, with_router
from routed.training.objective import is_frozen, training_loss
from routed.training.optimiser import optimiser, update
from routed.training.phases import Phase, active_phase, begins, phases_of, require_groups, steps_per_epoch
from routed.training.problem import Inputs, Problem

#: Independent random streams of a seed; any of them can be held fixed over seeds (config key `held`).
STREAMS = ("world", "init", "order", "noise")
#: What a training step changes, of a run's state; `taken` counts the steps, and falls behind `step` in a run that stopped early;
#: `wrong` counts the samples of this epoch that were wrong when they were trained on; `coefficients` are those of auxiliary losses that move.
MOVING = ("params", "state", "opt", "coefficients", "taken", "total", "loss", "lowest", "wrong", "stopped")
#: What of a run's state an evaluation sees.
SEEN = ("params", "state", "router0", "memory", "coefficients", "taken", "stopped")
#: The most phases of a run.
PHASES = 32
#: Folded into the key of a step for the coin that chooses among phases.
COIN = 2**31 - 1

_STOPS = When(lambda config: config.stop.rise > 0, "stop.rise > 0")
_EPOCHS = When(lambda config: config.data.epochs, "data.epochs=true")

#: What the training program itself reads.
SETTINGS = Component(
    {
        "held": Setting(
            (),
            "random streams that all seeds share, taken from the base seed: world, init, order, noise",
            Allowed(lambda v: set(v) <= set(STREAMS), lambda: f"must name streams: {', '.join(STREAMS)}"),
        ),
        "steps": Setting(4000, "optimiser steps", COUNT),
        "eval_every": Setting(500, "steps between evaluations; divides steps", COUNT),
        "batch_size": Setting(32, "training samples (rows of text) per step", at_least(1)),
        "phases": Setting(
            (),
            'phases of training, in order, as "until=STEP epochs=NUMBER share=FRACTION train=GROUP+GROUP router=initial KEY=VALUE"; empty: one, of everything',
            Allowed(lambda v: len(v) <= PHASES, lambda: f"must be at most {PHASES}, as each is compiled"),
        ),
        "stop.rise": Setting(
            0.0, "a run stops when its training loss is above the lowest so far by more than this; 0: never", at_least(0)
        ),
        "stop.floor": Setting(0.0, "a run also stops when its training loss is above the lowest so far, and at most this", at_least(0), when=_STOPS),
        "stop.errors": Setting(
            False, "a run stops after an epoch of the last phase in which no sample was wrong when it was trained on", when=_EPOCHS
        ),
        "stop.epochs": Setting(0, "a run stops after so many epochs of the last phase; 0: never", at_least(0), when=_EPOCHS),
        "stop.after": Setting(0, "steps before which a run goes on", at_least(0), when=_STOPS),
    },
    uses=("data.name", "optimizer.name", "optimizer.schedule"),
    reads=(
        "optimizer.weight_decay", "optimizer.l2", "optimizer.rate_scale", "optimizer.warmup", "optimizer.clip",
    ),
)  # fmt: skip


class Program(NamedTuple):
    """The static part of a run: its config, its problem, and the phases of its training with the config of each."""

    config: ConfigDict
    problem: Problem
    phases: tuple[Phase, ...]
    configs: tuple[ConfigDict, ...]
    #: `evaluate` as a program inside of the program: traced once, for the shapes of the history and for its rows.
    evaluate: Callable[..., dict[str, Array]]


def make_program(config: ConfigDict, problem: Problem) -> Program:
    """The program that trains a problem under a config."""
    phases = phases_of(config)
    configs = tuple(override(config, phase.changes) for phase in phases)
    return Program(config, problem, phases, configs, jax.jit(partial(evaluate, config, problem), inline=True))


def streams(seed, config: ConfigDict) -> dict[str, PRNGKeyArray]:
    """A key for each stream; a held one comes from the base seed, whatever the run's own seed."""
    keys = {}
    for index, name in enumerate(STREAMS):
        source = config.seed if name in config.held else seed
        keys[name] = jax.random.fold_in(jax.random.key(source), index)
    return keys


def start(program: Program, seed, traced: dict[str, Array], shared: Any = ()) -> tuple[Any, dict[str, Any]]:
    """(world, state) of a run at step 0, not yet evaluated. The state holds all that moves, and the whole history."""
    keys, config = streams(seed, program.config), node_of(program.config, traced)
    world = program.problem.draw_world(keys, config)
    inputs = Inputs(keys, config, world, shared)
    params, state = program.problem.init(inputs)
    require_groups(program.phases, params)
    run = {
        "params": params,
        "state": state,
        "opt": _optimiser(program.problem, config, params).init(params),
        "coefficients": {name: jnp.float32(one) for name, one in _steered(program.problem, program.configs).items()},
        "router0": router_of(params, state),
        "memory": program.problem.remember(params, state),
        "step": jnp.int32(0),
        "taken": jnp.int32(0),
        "loss": jnp.float32(0),
        "wrong": jnp.int32(0),
        "lowest": jnp.float32(jnp.inf),
        "stopped": jnp.array(False),
    }
    seen = jax.eval_shape(program.evaluate, seed, traced, world, shared, {name: run[name] for name in SEEN})
    return world, run | _new_history(seen, program.config.steps // program.config.eval_every + 1)


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
    """The run `steps` later; `feed` holds the batches of the steps among which these are, where the host makes them."""
    inputs = Inputs(streams(seed, program.config), node_of(program.config, traced), world, shared)
    end = run["step"] + steps
    moving = {name: run[name] for name in MOVING}
    step = partial(training_step, program, inputs, traced, feed, router0=run["router0"])
    if stops_early(program.config):
        moved = jax.lax.while_loop(lambda now: (now["taken"] < end) & ~now["stopped"], step, moving)
    else:  # as many steps for each run of a batch: a condition of each would select all that moves, in each step
        moved = jax.lax.fori_loop(0, steps, lambda _, now: step(now), moving)
    return run | moved | {"step": end}


def training_step(program: Program, inputs: Inputs, traced, feed, now: dict[str, Any], router0: Any) -> dict[str, Any]:
    """One step under the phase that applies; `router0` is the router of step 0."""
    # What a phase changes stays as it says, also where the setting is traced.
    steps = [
        partial(
            _phase_step,
            program,
            inputs,
            node_of(config, {key: value for key, value in traced.items() if key not in phase.changes}),
            feed,
            phase,
            router0=router0,
        )
        for phase, config in zip(program.phases, program.configs, strict=True)
    ]
    if len(steps) == 1:
        return steps[0](now)
    key = jax.random.fold_in(jax.random.fold_in(inputs.keys["noise"], COIN), now["taken"])
    per_epoch = steps_per_epoch(inputs.config) if any(phase.epochs for phase in program.phases) else 0
    return jax.lax.switch(active_phase(program.phases, now["taken"], key, per_epoch), steps, now)


def _phase_step(program: Program, inputs: Inputs, config: Any, feed, phase: Phase, now: dict[str, Any], router0: Any):
    """One step: batch, gradient, update; a run that stops does not take the step at which it stops."""
    if phase.router:
        now = _put_back(program, inputs, phase, now, router0)
    batch = program.problem.batch(inputs, feed, now["taken"])
    key = jax.random.fold_in(inputs.keys["noise"], now["taken"])
    frozen = is_frozen(program.problem.part, config)
    still = frozen if phase.groups is None or "router" in phase.groups else jnp.array(True)
    loss = partial(training_loss, program.problem, config, batch, key, now["taken"], still=still)
    grads, (value, wrong, state, coefficients) = jax.grad(loss, has_aux=True)(
        now["params"], now["state"], now["coefficients"]
    )
    transform = _optimiser(program.problem, inputs.config, now["params"])
    with jax.named_scope("optimiser"):
        params, opt = update(transform, now["params"], grads, now["opt"], frozen, phase.groups)
    # Where nothing trains, statistics and a balancing bias stay too.
    state = now["state"] if phase.groups == () else keep_router(still, now["state"], state)
    new = now | {"params": params, "state": state, "opt": opt}
    new |= {"coefficients": coefficients}
    new |= {"total": now["total"] + value, "loss": value, "taken": now["taken"] + 1}
    stop = program.config.stop
    if stop.errors or stop.epochs:
        new |= _end_of_epoch(program, inputs, phase, wrong, new)
    if not stop.rise:
        return new
    stopped = stops(stop, value, now["lowest"], now["taken"])
    new |= {"lowest": jnp.minimum(now["lowest"], value)}
    return jax.tree.map(partial(jnp.where, stopped), now, new) | {"stopped": stopped | new["stopped"], "loss": value}


def _put_back(program: Program, inputs: Inputs, phase: Phase, now: dict[str, Any], router0: Any) -> dict[str, Any]:
    """What moves, at the first step of the phase with the router of step 0; what the optimiser knows of it stays."""
    per_epoch = steps_per_epoch(inputs.config) if any(one.epochs for one in program.phases) else 0
    first = now["taken"] == begins(program.phases, phase, per_epoch)
    params, own = jax.tree.map(partial(jnp.where, first), router0, router_of(now["params"], now["state"]))
    return now | {"params": now["params"] | {"router": params}, "state": with_router(now["state"], own)}


def _end_of_epoch(program: Program, inputs: Inputs, phase: Phase, wrong, new: dict[str, Any]) -> dict[str, Any]:
    """Whether a run that has just taken a step stops behind its epoch, and its wrong samples since the epoch began."""
    stop, per_epoch = program.config.stop, steps_per_epoch(inputs.config)
    wrong = new["wrong"] + wrong
    *earlier, last = program.phases
    if phase is not last:  # whose epochs count
        return {"wrong": jnp.ones_like(wrong)}
    over = new["taken"] % per_epoch == 0
    before = functools.reduce(jnp.maximum, [one.end(per_epoch) for one in earlier], jnp.int32(0))
    stopped = over & (wrong == 0) & stop.errors
    if stop.epochs:
        stopped |= new["taken"] >= before + stop.epochs * per_epoch
    return {"wrong": jnp.where(over, 0, wrong), "stopped": stopped}


def stops_early(config: ConfigDict) -> bool:
    """May a run take fewer steps than others?"""
    return bool(config.stop.rise or config.stop.errors or config.stop.epochs)


def stops(stop: Any, value, lowest, taken):
    """Does a run stop at a training loss of `value`, after `taken` steps none of which was below `lowest`?"""
    return (taken >= stop.after) & (value > lowest) & ((value > lowest + stop.rise) | (value <= stop.floor))


def record(
    program: Program, seed, traced: dict[str, Array], world: Any, run: dict[str, Any], shared: Any = ()
) -> dict[str, Any]:
    """The run with the row of this moment; a run that stopped early repeats its last loss for the steps that it did not take.

    The training loss is the mean since the last evaluation, NaN at step 0; all else is what `Program.evaluate` says of the run.
    """
    inputs = Inputs(streams(seed, program.config), node_of(program.config, traced), world, shared)
    every = program.config.eval_every
    missed = jnp.minimum(run["step"] - run["taken"], every)
    total = run["total"] + missed * run["loss"]
    steps = jnp.where(run["step"] > 0, every, 0)
    with jax.named_scope("evaluation"):
        seen = program.evaluate(seed, traced, world, shared, {name: run[name] for name in SEEN})
    seen |= {"train/loss": total / steps / program.problem.unit(inputs)}
    row = run["step"] // every
    history = {name: old.at[row].set(seen[name]) for name, old in run["history"].items()}
    memory = program.problem.remember(run["params"], run["state"])
    return run | {"history": history, "total": jnp.float32(0), "memory": memory}


def evaluate(
    config: ConfigDict, problem: Problem, seed, traced: dict[str, Array], world: Any, shared: Any, run: dict[str, Any]
) -> dict[str, Array]:
    """All metrics of one moment, of what a run holds under the names SEEN: the problem's, and those of any run."""
    inputs = Inputs(streams(seed, config), node_of(config, traced), world, shared)
    params, state = run["params"], run["state"]
    seen = problem.evaluate(inputs, params, state, run["taken"], run["memory"])
    seen |= {
        "train/rate_scale": inputs.config.optimizer.rate_scale,
        "router/moved": has_moved(router_of(params, state), run["router0"]),
    }
    seen |= {f"train/coefficient_{name}": one for name, one in run["coefficients"].items()}
    if stops_early(config):
        seen |= {"train/steps": run["taken"].astype(jnp.float32), "train/stopped": run["stopped"].astype(jnp.float32)}
    return seen


def _optimiser(problem: Problem, config: Any, params: dict[str, Any]) -> optax.GradientTransformation:
    """Returns the optimiser of a problem's parameters."""
    return optimiser(config, params, problem.normalisation, problem.router_learns)


def _steered(problem: Problem, configs: Sequence[ConfigDict]) -> dict[str, float]:
    """Returns the coefficients that move in any phase, as they are at the start of the first phase that has them."""
    if not problem.part.routed:  # which has no auxiliary losses
        return {}
    return functools.reduce(lambda later, config: later | steered(config.losses), reversed(configs), {})


def _new_history(seen: dict[str, Any], evaluations: int) -> dict[str, Any]:
    """The part of a run that remembers: the training loss summed since the last evaluation, and a row for each one."""
    seen = seen | {"train/loss": jnp.float32(0)}
    history = {name: jnp.zeros((evaluations, *one.shape), one.dtype) for name, one in seen.items()}
    return {"history": history, "total": jnp.float32(0)}
