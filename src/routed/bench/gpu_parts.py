"""What `bench gpu` measures, case by case, in a process of its own: `python -m routed.bench.gpu_parts PART [CASE...]` alone.

Every time stands beside its floor, the larger of FLOPs at the chip's peak and bytes at its bandwidth. On a CPU sizes are tiny, so that all
of it can be tried where there is no GPU. When a lowering falls back: `dispatch` and `t5` refuse a program that computes more than twice
the FLOPs of its assignments, and name the dispatch to set; `hopper` also refuses kernels whose gradients are not those of the blocks;
`batching` and `sweep` train every expert on every token, so that there only memory can be short.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from routed.aot.estimate import least_bytes
from routed.bench import dispatch, gmm, hopper, pods, t5
from routed.contracts import UserError
from routed.engine.compilation import batching_of
from routed.engine.devices import make_mesh
from routed.models.transformer_sizes import tokens_of
from routed.plan import experiment
from routed.plan.config import base, canonical
from routed.settings.tree import override
from routed.system.machine import floor, rates
from routed.system.platform import platform


class Part(NamedTuple):
    """Seconds of the budget that it may take, its cases, rounds -> a record, and what to set where memory or a lowering is missing."""

    seconds: float
    cases: dict[str, Callable[[int], dict[str, Any]]]
    memory: str = ""
    lowering: str = ""


#: Sizes on a CPU, where only the way is tried.
TINY = {"tokens": 256, "dim": 32, "hidden": 64, "experts": 4, "k": 2}
TINY_GMM = {"data.samples": 64, "data.test_samples": 640, "batch_size": 32, "experts.width": 8, "shuffles": 0}
TINY_T5 = {"transformer.dim": 64, "transformer.width": 128, "experts.width": 128}
#: Training steps of a timed call on a GPU, of the Gaussian bench and of the T5; and on a CPU.
STEPS, T5_STEPS, FEW = 50, 50, 2
#: Kernels may differ from blocks by this share of the gradients' norm: bfloat16 has 8 bits.
CLOSE = 0.03


def tiny() -> bool:
    """Is there only a CPU?"""
    return platform() == "cpu"


def machine(rounds: int) -> dict[str, Any]:
    """The chip, its rates, and the versions of what is measured."""
    device, found = jax.devices()[0], rates()
    return {
        "chip": device.device_kind, "devices": jax.device_count(), "jax": jax.__version__, "python": sys.version.split()[0],
        "bfloat16_tflops": found.peak["bfloat16"] / 1e12, "float32_tflops": found.peak["float32"] / 1e12,
        "bandwidth_gb_s": found.bandwidth / 1e9, "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"), "rounds": rounds,
        "tiny": tiny(),
    }  # fmt: skip


def layer(name: str, way: str, rounds: int) -> dict[str, Any]:
    """A row of the dispatch table in bfloat16: forward, and a step with the gradients of weights and tokens."""
    changes, _ = dispatch.LARGE_CASES[name]
    case = dispatch.LARGE | changes | (TINY if tiny() else {})
    if way == "hopper":
        check_kernels(case)
    program = dispatch.Program(way, case, jnp.bfloat16)
    for _ in range(rounds):
        program.measure()
    record = program.record()
    work = dispatch.flops_of(case, way), dispatch.bytes_of(case, 2, way)
    return record | against(record["ms_step"], *work, "bfloat16") | memory(program.step)


def check_kernels(case: dict[str, Any]) -> None:
    """Compares the gradients through Hopper's kernels with those of the blocks, on an eighth of the tokens.

    Raises:
      UserError: the device has no such kernels, or they differ.
    """
    if not hopper.is_here():
        raise UserError(f"{jax.devices()[0].device_kind}: no Hopper, for which these kernels are: nothing to do")
    small = case | {"tokens": case["tokens"] // 8}
    made = []
    for way in ("hopper", "ragged"):
        init, apply = dispatch.layer(way, small)
        made.append(jax.jit(dispatch.gradients(apply))(*dispatch.arguments(small, init, jnp.bfloat16)))
    if not (apart := hopper.difference(*made)) < CLOSE:
        raise UserError(
            f"dispatch 'hopper' is wrong on this platform: its gradients are {apart:.3g} away from those of 'ragged'; use 'ragged'"
        )


def batch(experts: str, runs: int, way: str, rounds: int) -> dict[str, Any]:
    """A batch of runs of the Gaussian bench, one after the other (map) or all at once (vmap)."""
    config = override(base(), gmm.COMMON | gmm.CASES[experts][0] | (TINY_GMM if tiny() else {}) | {"mesh.run": 1})
    auto, config = batching_of(config, make_mesh(config)), override(config, {"mesh.batching": way})
    timed = gmm.Timed(canonical(config), 2 if tiny() else runs, FEW if tiny() else STEPS)
    ms = statistics.median(timed() for _ in range(rounds))
    about = {
        "experts": experts,
        "runs": timed.runs,
        "batching": timed.compiled.batching,
        "auto": auto,
        "batch_size": config.batch_size,
    }
    return (
        about
        | {"ms_per_run_step": ms}
        | against(ms, *gaussian_work(config, timed), "float32")
        | memory(timed.compiled.advance)
    )


def gaussian_work(config: ConfigDict, timed: gmm.Timed) -> tuple[float, float]:
    """FLOPs and bytes of a step of one run."""
    return gmm.step_flops(config), least_bytes(timed.states) / timed.runs


def text(changes: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Training of the T5's `gpu` scale on random tokens: tokens/s, share of the peak, memory."""
    _, config = experiment.configure(f"t5_mc4:fig5,{'smoke' if tiny() else 'gpu'}", [])
    config = override(config, (TINY_T5 if tiny() else {}) | changes)
    steps, (inputs, targets) = FEW if tiny() else T5_STEPS, tokens_of(config)
    about = {
        "dispatch": config.dispatch,
        "model": config.model,
        "batch_size": config.batch_size,
        "tokens": inputs + targets,
        "steps": steps,
    }
    program = t5.Program(config, targets // config.batch_size, about, steps)
    share = dispatch.refuse_dense(config.dispatch, program.compiled, program.flops)
    for _ in range(rounds):
        program.measure()
    record = program.record()
    held = {"params": program.state[0], "opt": program.state[2]}
    done = against(1e3 * record["seconds_per_step"], program.flops, least_bytes(held), config.transformer.dtype)
    mfu = 1e9 * record["gflops_per_second"] / rates().peak["bfloat16"]
    return record | {"mfu": mfu, "flops_share": share} | done | memory(program.compiled)


def sweep(changes: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Runs an hour of the headline of the Gaussian bench: the program of its largest group, steps and evaluations.

    `most_runs_per_hour` is the floor's, of training alone.
    """
    spec = "gmm_router:smoke" if tiny() else "gmm_router"
    mesh, group = pods.largest_group(spec, {"mesh.run": 1} | ({} if tiny() else changes), jax.devices()[:1], 0)
    config = override(group.config, {"data.samples": group.pool})
    timed = gmm.Timed(config, group.size, FEW if tiny() else STEPS)
    step = statistics.median(timed() for _ in range(rounds)) * group.size
    timed.evaluation()  # the first one touches its memory
    evaluation = statistics.median(timed.evaluation() for _ in range(rounds))
    whole = config.steps * step + (config.steps // config.eval_every + 1) * evaluation
    done = against(step / group.size, *gaussian_work(config, timed), "float32")
    return {
        "program": group.name, "runs": group.size, "batching": batching_of(config, mesh), "batch_size": config.batch_size,
        "steps": config.steps, "ms_per_run_step": step / group.size, "ms_evaluation": evaluation,
        "runs_per_hour": 3.6e6 * group.size / whole, "most_runs_per_hour": 3.6e6 / (config.steps * done["floor_ms"]),
    } | done | memory(timed.compiled.advance)  # fmt: skip


def against(ms: float, flops: float, moved: float, dtype: str) -> dict[str, Any]:
    """A time beside its floor."""
    least = floor(rates(), flops, moved, dtype)
    return {"floor_ms": 1e3 * least.seconds, "bound": least.bound, "over_floor": ms / (1e3 * least.seconds)}


def memory(program: Any) -> dict[str, Any]:
    """Bytes that a compiled program needs, and the most that the device held since this process began (None on a CPU)."""
    found = program.memory_analysis()
    held = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    most = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return {"program_bytes": held + found.temp_size_in_bytes, "most_bytes_so_far": most}


def _each(function: Callable, *arguments) -> Callable[[int], dict[str, Any]]:
    return lambda rounds: function(*arguments, rounds)


CAPACITY = {"dispatch": "slots", "selection.capacity_factor": 1.25, "selection.capacity_rule": "per_assignment"}
#: In the order in which they are run, with what matters most first.
PARTS: dict[str, Part] = {
    "machine": Part(30, {"here": machine}),
    "dispatch": Part(
        140,
        {
            f"{name}: {way}": _each(layer, name, way)
            for name, way in (("dropless", "ragged"), ("capacity", "slots"), ("dropless", "dense_ffn"), ("collapsed", "ragged"))
        },
        memory="halve LARGE['tokens'] in bench/dispatch.py",
        lowering="set dispatch=slots with selection.capacity_factor=1.25",
    ),
    "t5": Part(
        120,
        {
            "gpu, auto": _each(text, {}),
            "gpu, slots": _each(text, CAPACITY),
            "gpu, dense_active": _each(text, {"model": "dense_active"}),
        },
        memory="halve batch_size, or set transformer.remat=true",
        lowering="set dispatch=slots with selection.capacity_factor=1.25",
    ),
    "sweep": Part(
        80,
        {
            "headline": _each(sweep, {}),
            "headline, 60 seeds": _each(sweep, {"seeds": 60, "mesh.runs_per_batch": 256}),
        },
        memory="lower mesh.runs_per_batch",
        lowering="set selection.eval.name=soft, of which the dispatch is dense",
    ),
    "batching": Part(
        80,
        {
            f"{experts}, {runs} runs: {way}": _each(batch, experts, runs, way)
            for experts, runs in (("mlp", 32), ("constant", 32), ("constant", 256))
            for way in ("vmap", "map")
        },
        memory="lower the number of runs (mesh.runs_per_batch)",
        lowering="set mesh.batching to the other way",
    ),
    "hopper": Part(
        60,
        {f"{name}: hopper": _each(layer, name, "hopper") for name in ("dropless", "collapsed")},
        memory="halve LARGE['tokens'] in bench/dispatch.py",
        lowering="nothing: training does not use these kernels",
    ),
}  # fmt: skip


def records(part: str, cases: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    """A record of each case: what was measured, or in one line why it failed and what to do.

    Ends after an error that nobody foresaw: a device that ran out of memory, or was misused, may fail everything after it.
    """
    for name in cases:
        begun, error = time.perf_counter(), None
        try:
            found = PARTS[part].cases[name](rounds)
        except Exception as raised:  # whatever it is, the other cases go on
            error, found = raised, {"failed": line_of(raised), "do": advice(raised, PARTS[part])}
        yield {"part": part, "case": name} | found | {"seconds": round(time.perf_counter() - begun, 1)}
        if error is not None and not isinstance(error, UserError):
            traceback.print_exception(error)
            return
        gc.collect()  # arrays of a program that refers to itself
        jax.clear_caches()


def line_of(error: BaseException) -> str:
    """An error as one line that is not too long."""
    words = f"{type(error).__name__}: {error}" if not isinstance(error, UserError) else str(error)
    return " ".join(words.split())[:400]


def advice(error: BaseException, part: Part) -> str:
    """What to do about an error."""
    said = str(error)
    if isinstance(error, UserError):
        return "what the line says"
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in said or "out of memory" in said.lower():
        return part.memory
    if isinstance(error, NotImplementedError) or any(
        w in said for w in ("UNIMPLEMENTED", "not implemented", "lowering", "Mosaic")
    ):
        return part.lowering
    return "a fault of the bench or of JAX: run this part alone, and report the traceback"


def run(part: str, cases: list[str], rounds: int) -> None:
    """Prints the records of a part, a line of JSON each."""
    for record in records(part, cases or [*PARTS[part].cases], rounds):
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2:], 3)
