"""Every dispatch beside a dense FFN of the same active FLOPs and beside the classic one-hot einsum.

Forward is router, selection, dispatch and experts; a step is forward and the gradients of weights and tokens, several steps
in one program, as training runs them. All of one case see the same tokens and the same Routing, and are timed in turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from routed.bench import hopper
from routed.contracts import Places, UserError
from routed.engine.compilation import compile_lowered
from routed.experts.ffn import Ffn
from routed.kernels.ragged import ragged
from routed.layer.dispatch.slots import slots
from routed.layer.rule import Rule
from routed.layer.selection import capacity, select
from routed.metrics.load import dropped
from routed.system.machine import memory_bandwidth
from routed.system.platform import platform

SMALL = {"tokens": 4096, "dim": 128, "hidden": 256, "experts": 32, "k": 1, "capacity_factor": 1.25, "load": "random"}
LARGE = SMALL | {"tokens": 65536, "dim": 2048, "hidden": 8192, "experts": 64, "k": 2}

#: name -> (changes to SMALL, dispatches).
CPU_CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "base": ({}, ("slots", "one_hot", "dense_ffn")),
    "balanced": ({"capacity_factor": 0.0, "load": "balanced"}, ("ragged", "dense_ffn")),
    "collapsed": ({"capacity_factor": 0.0, "load": "one"}, ("ragged", "dense_ffn")),
    "8 experts": ({"experts": 8}, ("slots", "ragged")),
    "64 experts": ({"experts": 64}, ("slots", "ragged")),
    "512 experts": ({"experts": 512}, ("slots", "ragged")),
    "top-2": ({"k": 2}, ("slots", "ragged", "dense_ffn")),
    "8192 tokens": ({"tokens": 8192, "experts": 64}, ("slots", "ragged", "one_hot")),
    "16384 tokens": ({"tokens": 16384, "experts": 64}, ("slots", "ragged", "one_hot")),
}
#: On an accelerator, in bfloat16; dropless ragged is what counts.
LARGE_CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "capacity": ({}, ("slots", "dense_ffn")),
    "dropless": ({"capacity_factor": 0.0}, ("ragged", "dense_ffn")),
    "collapsed": ({"capacity_factor": 0.0, "load": "one"}, ("ragged", "dense_ffn")),
}
#: What a dispatch is compared with.
PEERS = ("one_hot", "dense_ffn")
SEEDS = 8


def bench(rounds: int, baseline: str | None) -> list[dict[str, Any]]:
    """A record for each case and dispatch, and for 8 seeds in one program against 8 calls.

    Raises:
      UserError: a baseline was asked for; the peers are in the bench.
    """
    if baseline:
        raise UserError("--baseline: bench dispatch has its peers built in (one_hot, dense_ffn)")
    cpu = platform() == "cpu"
    records = [{"dispatch": "copy", "bandwidth_gb_s": memory_bandwidth() / 1e9}] if cpu else []
    for name, (changes, dispatches) in (CPU_CASES if cpu else LARGE_CASES).items():
        case = (SMALL if cpu else LARGE) | changes
        programs = {d: Program(d, case, jnp.float32 if cpu else jnp.bfloat16) for d in dispatches}
        for _ in range(rounds):
            for program in programs.values():
                program.measure()
        for program in programs.values():
            records.append({"case": name} | program.record())
            _show(records[-1])
    if cpu:
        for changes in ({}, {"capacity_factor": 0.0}):
            records.append(_seeds(SMALL | changes, rounds))
            _show(records[-1])
    return records


def layer(dispatch: str, case: dict[str, Any]) -> tuple[Callable, Callable]:
    """init(key, x) -> params, and apply(params, x, steer) -> (y, dropped share)."""
    rule = Rule(k=case["k"], capacity_factor=case["capacity_factor"])
    places = Places(case["tokens"], capacity(rule, case["tokens"], case["experts"]))
    wide = case["hidden"] * (case["k"] if dispatch == "dense_ffn" else 1)
    expert = Ffn(case["dim"], wide)
    run = lambda p, rows: expert.apply({"params": p}, rows)  # noqa: E731

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
        function = {"slots": slots, "ragged": ragged, "one_hot": one_hot, "hopper": hopper.ragged}[dispatch]
        weights = jax.tree.map(lambda w: w.astype(x.dtype), params["experts"])
        return function(run, weights, x, routing, places), dropped(routing)

    return init, apply


def gradients(apply: Callable) -> Callable:
    """(params, x, steer) -> the gradients of the squared outputs for params and x."""
    loss = lambda params, x, steer: (apply(params, x, steer)[0].astype(jnp.float32) ** 2).sum()  # noqa: E731
    return jax.grad(loss, argnums=(0, 1))


def one_hot(expert, params, x, routing, places):
    """The peer: dispatch and combine tensors [tokens, experts, places] and two einsums (GShard, flaxformer, V-MoE)."""
    experts = routing.scores.shape[1]
    weight = jnp.where(routing.kept, routing.weight, 0.0).astype(x.dtype)
    slot = (
        jax.nn.one_hot(routing.expert, experts, dtype=x.dtype)[:, :, None]
        * jax.nn.one_hot(jnp.where(routing.kept, routing.rank, places.capacity), places.capacity, dtype=x.dtype)[
            :, None
        ]
    )
    by_token = lambda a: a.reshape(len(x), -1, *a.shape[1:]).sum(1)  # noqa: E731
    filled = jnp.einsum("TEC,TD->ECD", by_token(slot), x)
    return jnp.einsum("TEC,ECO->TO", by_token(slot * weight[:, None, None]), jax.vmap(expert)(params, filled))


def flops_of(case: dict[str, Any], dispatch: str = "") -> float:
    """FLOPs that forward and gradients ask for: three times two products of the k experts of each token, and the router's."""
    experts = 2 * case["k"] * case["dim"] * case["hidden"]
    return 3 * 2 * case["tokens"] * (experts + (case["dim"] * case["experts"] if dispatch != "dense_ffn" else 0))


def bytes_of(case: dict[str, Any], itemsize: int, dispatch: str = "") -> float:
    """Bytes that they move at least: weights that tokens meet read in both directions, all gradients written; tokens the same."""
    held = case["k"] if dispatch == "dense_ffn" else case["experts"]
    met = case["k"] if case["load"] == "one" else min(held, case["tokens"] * case["k"])
    return itemsize * (2 * case["dim"] * case["hidden"] * (2 * met + held) + 3 * case["tokens"] * case["dim"])


def refuse_dense(dispatch: str, program: Any, asked: float) -> float:
    """The share of the FLOPs `asked` that a compiled program computes, which must not multiply rows with experts that are not theirs.

    Of a loop XLA counts a turn only, and of a kernel nothing, so that what is counted is at most what is computed.

    Raises:
      UserError: it computes more than twice these FLOPs.
    """
    share = (program.cost_analysis() or {}).get("flops", 0.0) / asked
    if share > 2:
        raise UserError(
            f"dispatch {dispatch!r} is dense on this platform ({platform()}): its step computes {share:.3g} times the FLOPs of its"
            " assignments; use 'slots'"
        )
    return share


class Program:
    """A case compiled for one dispatch, and what was measured of it."""

    def __init__(self, dispatch: str, case: dict[str, Any], dtype):
        self.dispatch, self.case = dispatch, case
        self.times: dict[str, list[float]] = {"forward": [], "step": []}
        init, apply = layer(dispatch, case)
        self.gradients = gradients(apply)
        self.arguments = arguments(case, init, dtype)
        self.old = jax.tree.map(jnp.zeros_like, self.arguments[:2])
        self.forward = compile_lowered(jax.jit(apply).lower(*self.arguments))
        # The old gradients are donated and not read: the new ones take their place.
        step = jax.jit(self.steps, donate_argnums=0, keep_unused=True)
        self.step = compile_lowered(step.lower(self.old, jnp.int32(1), *self.arguments))
        self.flops_share = None if dispatch in PEERS else refuse_dense(dispatch, self.step, flops_of(case))
        self.share = float(self.forward(*self.arguments)[1])
        self.count = 1
        self.count = int(max(1, min(8, 0.2 / self._time("step"))))

    def steps(self, old, count, params, x, steer):
        """`count` steps, one after the other: tokens depend on the gradients of the step before, by nothing visible."""

        def one(_, carry):
            x = carry[1]
            gradients = self.gradients(params, x, steer)
            return gradients, x + (1e-30 * gradients[1]).astype(x.dtype)

        return jax.lax.fori_loop(0, count, one, (old, x))[0]

    def _time(self, name: str) -> float:
        begun = time.perf_counter()
        if name == "forward":
            jax.block_until_ready(self.forward(*self.arguments))
            return time.perf_counter() - begun
        self.old = jax.block_until_ready(self.step(self.old, jnp.int32(self.count), *self.arguments))
        return (time.perf_counter() - begun) / self.count

    def measure(self) -> None:
        for name, values in self.times.items():
            values.extend(self._time(name) for _ in range(3))

    def record(self) -> dict[str, Any]:
        memory: Any = self.step.memory_analysis()
        return {"dispatch": self.dispatch, **self.case, "dropped": self.share, "flops_share": self.flops_share} | {
            f"ms_{name}": 1e3 * statistics.median(values) for name, values in self.times.items()
        } | {"peak_bytes": memory.temp_size_in_bytes + memory.output_size_in_bytes}  # fmt: skip


def arguments(case: dict[str, Any], init: Callable, dtype) -> tuple[Any, Any, Any]:
    """Parameters, tokens, and what is added to the scores to get the load that the case asks for."""
    x = jax.random.normal(jax.random.key(0), (case["tokens"], case["dim"]))
    params = init(jax.random.key(1), x)
    aim = {"balanced": jnp.arange(case["tokens"]) % case["experts"], "one": jnp.zeros(case["tokens"], jnp.int32)}
    steer = jnp.zeros((case["tokens"], case["experts"]))
    if case["load"] in aim:
        steer = 100.0 * jax.nn.one_hot(aim[case["load"]], case["experts"])
    return jax.tree.map(lambda a: a.astype(dtype), params), x.astype(dtype), steer


def _seeds(case: dict[str, Any], rounds: int) -> dict[str, Any]:
    """8 seeds in one program, mapped one after the other or under vmap, against 8 calls of the single one."""
    single = Program("slots" if case["capacity_factor"] else "ragged", case, jnp.float32)
    many = tuple(jax.tree.map(lambda a: jnp.stack([a] * SEEDS), a) for a in single.arguments)
    ways = {
        "map": lambda old, *a: jax.lax.map(lambda one: single.gradients(*one), a),
        "vmap": lambda old, *a: jax.vmap(single.gradients)(*a),
        "single": lambda old, *a: single.gradients(*a),
    }
    calls = {"map": (1, many), "vmap": (1, many), "single": (SEEDS, single.arguments)}
    old = {n: jax.tree.map(jnp.zeros_like, a[:2]) for n, (_, a) in calls.items()}
    programs = {
        n: compile_lowered(jax.jit(f, donate_argnums=0, keep_unused=True).lower(old[n], *calls[n][1]))
        for n, f in ways.items()
    }
    times: dict[str, list[float]] = {n: [] for n in ways}
    for _ in range(5 * rounds):
        for name, program in programs.items():
            begun = time.perf_counter()
            for _ in range(calls[name][0]):
                old[name] = jax.block_until_ready(program(old[name], *calls[name][1]))
            times[name].append(time.perf_counter() - begun)
    medians = {n: statistics.median(v) for n, v in times.items()}
    return {"case": f"{SEEDS} seeds", "dispatch": single.dispatch, **case} | {
        f"{way}_over_single": medians[way] / medians["single"] for way in ("map", "vmap")
    }


def _show(record: dict[str, Any]) -> None:
    print(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in record.items()), flush=True)
