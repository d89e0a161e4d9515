"""Time of every dispatch, beside a dense FFN of the same active FLOPs and the classic one-hot einsum.

Forward is router, selection, dispatch and experts; a step is forward and the gradients of weights and tokens, several
steps in one program, as training runs them. All dispatches of a case get the same tokens and the same Routing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from routed.bench.harness import Case, Work, seconds_of, timed
from routed.contracts import Queues, UserError
from routed.engine.compilation import compile_lowered
from routed.experts.ffn import Ffn
from routed.kernels.ragged import ragged
from routed.layer.dispatch import slots
from routed.layer.rule import SelectionRule
from routed.layer.selection import capacity, select
from routed.metrics.load import dropped
from routed.system.machine import rates
from routed.system.platform import platform

SMALL = {"tokens": 4096, "dim": 128, "hidden": 256, "experts": 32, "k": 1, "capacity_factor": 1.25, "load": "random"}
DROPLESS: dict[str, Any] = {"capacity_factor": 0.0}
COLLAPSED = DROPLESS | {"load": "one"}

#: name -> changes to SMALL, dispatches.
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "base": ({}, ("slots", "one_hot", "dense_ffn")),
    "balanced": (DROPLESS | {"load": "balanced"}, ("ragged", "dense_ffn")),
    "collapsed": (COLLAPSED, ("ragged", "dense_ffn")),
    "8 experts": ({"experts": 8}, ("slots", "ragged")),
    "64 experts": ({"experts": 64}, ("slots", "ragged")),
    "512 experts": ({"experts": 512}, ("slots", "ragged")),
    "top-2": ({"k": 2}, ("slots", "ragged", "dense_ffn")),
    "8192 tokens": ({"tokens": 8192, "experts": 64}, ("slots", "ragged", "one_hot")),
    "16384 tokens": ({"tokens": 16384, "experts": 64}, ("slots", "ragged", "one_hot")),
}
#: Layers with which dispatches are compared.
PEERS = ("one_hot", "dense_ffn")
#: Seeds in one program; times that a round measures each dispatch, and each way of running seeds.
SEEDS, TIMES, SEED_TIMES = 8, 3, 5


def bench(rounds: int) -> list[dict[str, Any]]:
    """Returns a record of each case and dispatch, and of 8 seeds in one program against 8 calls."""
    if platform() != "cpu":
        raise UserError("bench dispatch is of CPUs; bench gpu has the sizes of accelerators")
    records: list[dict[str, Any]] = [{"dispatch": "copy", "bandwidth_gb_s": rates().bandwidth / 1e9}]
    for name, (changes, dispatches) in CASES.items():
        layers = [Layer(dispatch, SMALL | changes) for dispatch in dispatches]
        cases = [layer.case_of({"case": name}) for layer in layers]
        records += timed(cases, TIMES * rounds)
    return records + [_seeds(SMALL | changes, rounds) for changes in ({}, DROPLESS)]


def layer_functions(dispatch: str, case: dict[str, Any]) -> tuple[Callable, Callable]:
    """Returns init(key, x) -> params, and apply(params, x, steer) -> (y, dropped share)."""
    rule = SelectionRule(k=case["k"], capacity_factor=case["capacity_factor"])
    queues = Queues(case["tokens"], capacity(rule, case["tokens"], case["experts"]))
    expert = Ffn(case["dim"], case["hidden"] * (case["k"] if dispatch == "dense_ffn" else 1))

    def run(params, rows):
        return expert.apply({"params": params}, rows)

    def init(key, x):
        if dispatch == "dense_ffn":
            return expert.init(key, x[:1])["params"]
        keys = jax.random.split(key, case["experts"])
        return {
            "router": jax.random.normal(key, (case["dim"], case["experts"])) / case["dim"] ** 0.5,
            "experts": jax.vmap(lambda k: expert.init(k, x[:1])["params"])(keys),
        }

    def apply(params, x, steer):
        if dispatch == "dense_ffn":
            return run(params, x), jnp.float32(0)
        routing = select(rule, x.astype(jnp.float32) @ params["router"].astype(jnp.float32) + steer)
        function = {"slots": slots, "ragged": ragged, "one_hot": one_hot}[dispatch]
        weights = jax.tree.map(lambda w: w.astype(x.dtype), params["experts"])
        return function(run, weights, x, routing, queues), dropped(routing)

    return init, apply


def gradients(apply: Callable) -> Callable:
    """Returns (params, x, steer) -> gradients of the squared outputs for params and x."""

    def loss(params, x, steer):
        return (apply(params, x, steer)[0].astype(jnp.float32) ** 2).sum()

    return jax.grad(loss, argnums=(0, 1))


def one_hot(expert, params, x, routing, queues):
    """Dispatches by tensors [tokens, experts, places] and two einsums, as GShard, flaxformer and V-MoE do."""
    experts = routing.scores.shape[1]
    weight = jnp.where(routing.kept, routing.weight, 0.0).astype(x.dtype)
    rank = jnp.where(routing.kept, routing.rank, queues.capacity)
    slot = (
        jax.nn.one_hot(routing.expert, experts, dtype=x.dtype)[:, :, None]
        * jax.nn.one_hot(rank, queues.capacity, dtype=x.dtype)[:, None]
    )

    def by_token(a):
        return a.reshape(len(x), -1, *a.shape[1:]).sum(1)

    rows = jnp.einsum("TEC,TD->ECD", by_token(slot), x)
    return jnp.einsum("TEC,ECO->TO", by_token(slot * weight[:, None, None]), jax.vmap(expert)(params, rows))


def flops_of(case: dict[str, Any], dispatch: str = "") -> float:
    """Returns the FLOPs of forward and gradients: three times those of the router and of k experts of two products."""
    experts = 2 * case["k"] * case["dim"] * case["hidden"]
    return 3 * 2 * case["tokens"] * (experts + (case["dim"] * case["experts"] if dispatch != "dense_ffn" else 0))


def bytes_of(case: dict[str, Any], itemsize: int, dispatch: str = "") -> float:
    """Returns the least bytes that forward and gradients move.

    Weights of experts with tokens are read in both directions, all gradients are written; the same of tokens.
    """
    experts = case["k"] if dispatch == "dense_ffn" else case["experts"]
    used = case["k"] if case["load"] == "one" else min(experts, case["tokens"] * case["k"])
    return itemsize * (2 * case["dim"] * case["hidden"] * (2 * used + experts) + 3 * case["tokens"] * case["dim"])


def refuse_dense(dispatch: str, program: Any, asked: float) -> float:
    """Returns the FLOPs of a compiled program over the FLOPs `asked`.

    XLA counts one turn of a loop and nothing of a kernel, so that the program computes at least the counted FLOPs.

    Raises:
      UserError: it computes more than twice as many: it multiplies rows with experts that did not get them.
    """
    share = (program.cost_analysis() or {}).get("flops", 0.0) / asked
    if share > 2:
        raise UserError(
            f"dispatch {dispatch!r} is dense on this platform ({platform()}): its step computes {share:.3g} times the"
            " FLOPs of its assignments; use 'slots'"
        )
    return share


class Layer:
    """A layer of a case, compiled for one dispatch."""

    def __init__(self, dispatch: str, case: dict[str, Any]):
        self.dispatch, self.case = dispatch, case
        init, apply = layer_functions(dispatch, case)
        self.gradients = gradients(apply)
        self.arguments = arguments(case, init)
        self.old = jax.tree.map(jnp.zeros_like, self.arguments[:2])
        self.forward = compile_lowered(jax.jit(apply).lower(*self.arguments))
        # The old gradients are donated and not read: the new gradients take their memory.
        step = jax.jit(self.steps, donate_argnums=0, keep_unused=True)
        self.step = compile_lowered(step.lower(self.old, jnp.int32(1), *self.arguments))
        self.flops_share = None if dispatch in PEERS else refuse_dense(dispatch, self.step, flops_of(case))
        self.dropped = float(self.forward(*self.arguments)[1])
        self.count = 1
        self.count = int(max(1, min(8, 0.2 / self.step_seconds())))

    def steps(self, old, count, params, x, steer):
        """Runs `count` steps, each with the tokens and a negligible part of the gradients of the step before."""

        def step(_, carry):
            x = carry[1]
            gradients = self.gradients(params, x, steer)
            return gradients, x + (1e-30 * gradients[1]).astype(x.dtype)

        return jax.lax.fori_loop(0, count, step, (old, x))[0]

    def forward_seconds(self) -> float:
        """Runs forward; returns its seconds."""
        return seconds_of(lambda: self.forward(*self.arguments))[1]

    def step_seconds(self) -> float:
        """Runs steps; returns the seconds of one."""
        self.old, seconds = seconds_of(lambda: self.step(self.old, jnp.int32(self.count), *self.arguments))
        return seconds / self.count

    def case_of(self, about: dict[str, Any]) -> Case:
        """Returns the case of this layer, forward and a step."""
        memory: Any = self.step.memory_analysis()
        peak = memory.temp_size_in_bytes + memory.output_size_in_bytes
        about = about | {"dispatch": self.dispatch, **self.case, "dropped": self.dropped}
        about |= {"flops_share": self.flops_share, "peak_bytes": peak}
        work = Work(flops_of(self.case, self.dispatch), bytes_of(self.case, 4, self.dispatch), "float32")
        return Case(about, {"ms_forward": self.forward_seconds, "ms_step": self.step_seconds}, work)


def arguments(case: dict[str, Any], init: Callable) -> tuple[Any, Any, Any]:
    """Returns parameters, tokens, and the summand of the scores that gives the load of the case."""
    x = jax.random.normal(jax.random.key(0), (case["tokens"], case["dim"]))
    params = init(jax.random.key(1), x)
    aim = {"balanced": jnp.arange(case["tokens"]) % case["experts"], "one": jnp.zeros(case["tokens"], jnp.int32)}
    steer = jnp.zeros((case["tokens"], case["experts"]))
    if case["load"] in aim:
        steer = 100.0 * jax.nn.one_hot(aim[case["load"]], case["experts"])
    return params, x, steer


def _seeds(case: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Compares 8 seeds in one program, mapped or under vmap, with 8 calls of the program of one seed."""
    single = Layer("slots" if case["capacity_factor"] else "ragged", case)
    many = tuple(jax.tree.map(lambda a: jnp.stack([a] * SEEDS), a) for a in single.arguments)
    ways = {
        "map": (lambda old, *a: jax.lax.map(lambda seed: single.gradients(*seed), a), many, 1),
        "vmap": (lambda old, *a: jax.vmap(single.gradients)(*a), many, 1),
        "single": (lambda old, *a: single.gradients(*a), single.arguments, SEEDS),
    }
    records = timed([Case({}, {"seconds": _caller(*way)}) for way in ways.values()], SEED_TIMES * rounds)
    seconds = {way: record["seconds"] for way, record in zip(ways, records, strict=True)}
    about = {"case": f"{SEEDS} seeds", "dispatch": single.dispatch, **case}
    return about | {f"{way}_over_single": seconds[way] / seconds["single"] for way in ("map", "vmap")}


def _caller(function: Callable, arguments: tuple[Any, ...], calls: int) -> Callable[[], float]:
    """Compiles a function of old gradients and arguments; returns a call that times `calls` calls of it."""
    old = jax.tree.map(jnp.zeros_like, arguments[:2])
    program = compile_lowered(jax.jit(function, donate_argnums=0, keep_unused=True).lower(old, *arguments))

    def run() -> None:
        nonlocal old
        for _ in range(calls):
            old = jax.block_until_ready(program(old, *arguments))

    return lambda: seconds_of(run)[1]
