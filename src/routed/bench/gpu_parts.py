"""Cases of `bench gpu`, each part in a process of its own: `python -m routed.bench.gpu_parts PART [CASE...]` runs one.

On a CPU sizes are tiny, so that all cases can be tried without a GPU. Lowerings that fall back: `dispatch` and `t5`
refuse a program that computes more than twice the FLOPs of its assignments, and name the dispatch to set; `hopper` also
refuses kernels with other gradients than the blocks; `batching` and `sweep` train every expert on every token, so that
only memory can be short.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from routed.aot.estimate import least_bytes, memory_of
from routed.bench import dispatch, gmm, hopper, pods
from routed.bench.harness import Case, Work, timed
from routed.bench.trainings import Batch, TextTraining
from routed.contracts import UserError
from routed.engine.compilation import batching_of
from routed.engine.devices import make_mesh
from routed.models.transformer_sizes import tokens_of
from routed.plan import experiment
from routed.plan.config import base, canonical
from routed.settings.tree import override
from routed.system.machine import rates
from routed.system.platform import platform
from routed.training import ENCODER_DECODER


class Part(NamedTuple):
    """Cases that share a process.

    Attributes:
      seconds: share of the budget.
      cases: name -> function of the rounds that returns a record.
      memory: advice where memory is short.
      lowering: advice where a lowering is missing.
    """

    seconds: float
    cases: dict[str, Callable[[int], dict[str, Any]]]
    memory: str = ""
    lowering: str = ""


#: Sizes on a CPU.
TINY = {"tokens": 256, "dim": 32, "hidden": 64, "experts": 4, "k": 2}
TINY_GMM = {"data.samples": 64, "data.test_samples": 640, "batch_size": 32, "experts.width": 8, "shuffles": 0}
TINY_T5 = {"transformer.dim": 64, "transformer.width": 128, "experts.width": 128}
#: Training steps of a timed call on a GPU, and on a CPU.
STEPS, FEW = 50, 2
#: Largest distance of kernels and blocks, as a share of the gradients' norm: bfloat16 has 8 bits.
CLOSE = 0.03


def tiny() -> bool:
    """True if there is only a CPU."""
    return platform() == "cpu"


def machine(rounds: int) -> dict[str, Any]:
    """Returns the chip, its rates, and the versions of JAX and Python."""
    device, peaks = jax.devices()[0], rates()
    about = {"chip": device.device_kind, "devices": jax.device_count(), "rounds": rounds, "tiny": tiny()}
    about |= {"jax": jax.__version__, "python": sys.version.split()[0]}
    about |= {f"{dtype}_tflops": peak / 1e12 for dtype, peak in peaks.peak.items()}
    memory = (device.memory_stats() or {}).get("bytes_limit")
    return about | {"bandwidth_gb_s": peaks.bandwidth / 1e9, "memory_bytes": memory}


def measured(case: Case, rounds: int, program: Any) -> dict[str, Any]:
    """Times a case; adds the bytes of its program, and the most that this process has used of a GPU's memory."""
    (record,) = timed([case], rounds)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return record | {"program_bytes": sum(memory_of(program)), "most_bytes_so_far": peak}


def layer(name: str, way: str, rounds: int) -> dict[str, Any]:
    """Times a row of the dispatch table in bfloat16: forward, and a step with the gradients of weights and tokens."""
    changes, _ = dispatch.LARGE_CASES[name]
    case = dispatch.LARGE | changes | (TINY if tiny() else {})
    if way == "hopper":
        check_kernels(case)
    compiled = dispatch.Layer(way, case, jnp.bfloat16)
    return measured(compiled.case_of({}), dispatch.TIMES * rounds, compiled.step)


def check_kernels(case: dict[str, Any]) -> None:
    """Compares the gradients of Hopper's kernels and of the blocks, on an eighth of the tokens.

    Raises:
      UserError: the device has no such kernels, or the gradients differ.
    """
    if not hopper.available():
        raise UserError(f"{jax.devices()[0].device_kind}: no Hopper, for which these kernels are: nothing to do")
    small = case | {"tokens": case["tokens"] // 8}
    gradients = []
    for way in ("hopper", "ragged"):
        init, apply = dispatch.layer_functions(way, small)
        gradients.append(jax.jit(dispatch.gradients(apply))(*dispatch.arguments(small, init, jnp.bfloat16)))
    if not (distance := hopper.distance(*gradients)) < CLOSE:
        raise UserError(
            f"dispatch 'hopper' is wrong on this platform: its gradients are {distance:.3g} away from those of"
            " 'ragged'; use 'ragged'"
        )


def batch(experts: str, runs: int, way: str, rounds: int) -> dict[str, Any]:
    """Times a batch of runs of the Gaussian bench, one after the other (map) or all at once (vmap)."""
    changes = gmm.CASES[experts][0] | (TINY_GMM if tiny() else {})
    config = override(base(), gmm.COMMON | changes | {"mesh.run": 1})
    auto, config = batching_of(config, make_mesh(config)), override(config, {"mesh.batching": way})
    compiled = Batch(canonical(config), 2 if tiny() else runs, FEW if tiny() else STEPS)
    compiled.train()  # the first call touches the memory
    about = {"experts": experts, "runs": compiled.runs, "batching": compiled.compiled.batching, "auto": auto}
    case = step_case(about | {"batch_size": config.batch_size}, config, compiled)
    return measured(case, rounds, compiled.compiled.advance)


def step_case(about: dict[str, Any], config: Any, compiled: Batch, **before: Callable[[], float]) -> Case:
    """Returns the case of a step of one run, behind the times `before`."""
    work = Work(gmm.step_flops(config), least_bytes(compiled.states) / compiled.runs)
    return Case(about, before | {"ms_per_run_step": compiled.step}, work)


def text(changes: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Times the training of the T5's `gpu` scale on random tokens."""
    _, config = experiment.configure(f"t5_mc4:fig5,{'smoke' if tiny() else 'gpu'}", [])
    config = override(config, (TINY_T5 if tiny() else {}) | changes)
    steps, (inputs, targets) = FEW if tiny() else STEPS, tokens_of(config)
    training = TextTraining(config, ENCODER_DECODER, targets // config.batch_size, steps)
    share = dispatch.refuse_dense(config.dispatch, training.compiled, training.flops)
    about = {"dispatch": config.dispatch, "model": config.model, "batch_size": config.batch_size}
    about |= {"tokens": inputs + targets, "steps": steps, "flops_share": share}
    moved = least_bytes({"params": training.state[0], "opt": training.state[2]})
    work = Work(training.flops, moved, config.transformer.dtype)
    case = Case(about | training.about, {"seconds_per_step": training.step}, work)
    record = measured(case, rounds, training.compiled)
    record |= training.rates(record["seconds_per_step"], inputs + targets)
    return record | {"mfu": 1e9 * record["gflops_per_second"] / rates().peak["bfloat16"]}


def sweep(changes: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Times the headline of the Gaussian bench: runs an hour of its largest group, steps and evaluations.

    `most_runs_per_hour` belongs to the floor, of training alone.
    """
    spec = "gmm_router:smoke" if tiny() else "gmm_router"
    mesh, group = pods.largest_group(spec, {"mesh.run": 1} | ({} if tiny() else changes), jax.devices()[:1], 0)
    config = override(group.config, {"data.samples": group.pool})
    compiled = Batch(config, group.size, FEW if tiny() else STEPS)
    compiled.train(), compiled.evaluation()  # the first calls touch the memory
    about = {"program": group.name, "runs": group.size, "batching": batching_of(config, mesh)}
    about |= {"batch_size": config.batch_size, "steps": config.steps}
    case = step_case(about, config, compiled, ms_evaluation=compiled.evaluation)
    record = measured(case, rounds, compiled.compiled.advance)
    step, evaluations = record["ms_per_run_step"] * group.size, config.steps // config.eval_every + 1
    return record | {
        "runs_per_hour": 3.6e6 * group.size / (config.steps * step + evaluations * record["ms_evaluation"]),
        "most_runs_per_hour": 3.6e6 / (config.steps * record["floor_ms"]),
    }


CAPACITY = {"dispatch": "slots", "selection.capacity_factor": 1.25, "selection.capacity_rule": "per_assignment"}
USE_SLOTS = "set dispatch=slots with selection.capacity_factor=1.25"
FEWER_TOKENS = "halve LARGE['tokens'] in bench/dispatch.py"
ROWS = (("dropless", "ragged"), ("capacity", "slots"), ("dropless", "dense_ffn"), ("collapsed", "ragged"))
BATCHES, WAYS = (("mlp", 32), ("constant", 32), ("constant", 256)), ("vmap", "map")
#: Parts in the order of their importance.
PARTS: dict[str, Part] = {
    "machine": Part(30, {"here": machine}),
    "dispatch": Part(140, {f"{name}: {way}": partial(layer, name, way) for name, way in ROWS}, FEWER_TOKENS, USE_SLOTS),
    "t5": Part(
        120,
        {
            "gpu, auto": partial(text, {}),
            "gpu, slots": partial(text, CAPACITY),
            "gpu, dense_active": partial(text, {"model": "dense_active"}),
        },
        "halve batch_size, or set transformer.remat=true",
        USE_SLOTS,
    ),
    "sweep": Part(
        80,
        {
            "headline": partial(sweep, {}),
            "headline, 60 seeds": partial(sweep, {"seeds": 60, "mesh.runs_per_batch": 256}),
        },
        "lower mesh.runs_per_batch",
        "set selection.eval.name=soft, of which the dispatch is dense",
    ),
    "batching": Part(
        80,
        {f"{name}, {runs} runs: {way}": partial(batch, name, runs, way) for name, runs in BATCHES for way in WAYS},
        "lower the number of runs (mesh.runs_per_batch)",
        "set mesh.batching to the other way",
    ),
    "hopper": Part(
        60,
        {f"{name}: hopper": partial(layer, name, "hopper") for name in ("dropless", "collapsed")},
        FEWER_TOKENS,
        "nothing: training does not use these kernels",
    ),
}


def records(part: str, cases: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    """Yields a record of each case: its measurements, or in one line why it failed and what to do.

    Ends after an unexpected error: a device that ran out of memory, or was misused, may fail everything after it.
    """
    for name in cases:
        started, error = time.perf_counter(), None
        try:
            record = PARTS[part].cases[name](rounds)
        except Exception as raised:  # any error: the other cases go on
            line = str(raised) if isinstance(raised, UserError) else f"{type(raised).__name__}: {raised}"
            error, record = raised, {"failed": " ".join(line.split())[:400], "do": advice(raised, PARTS[part])}
        yield {"part": part, "case": name} | record | {"seconds": round(time.perf_counter() - started, 1)}
        if error is not None and not isinstance(error, UserError):
            traceback.print_exception(error)
            return
        gc.collect()  # arrays of a program that refers to itself
        jax.clear_caches()


def advice(error: BaseException, part: Part) -> str:
    """Returns what to do about an error."""
    text = str(error)
    if isinstance(error, UserError):
        return "what the line says"
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return part.memory
    missing = ("UNIMPLEMENTED", "not implemented", "lowering", "Mosaic")
    if isinstance(error, NotImplementedError) or any(word in text for word in missing):
        return part.lowering
    return "a fault of the bench or of JAX: run this part alone, and report the traceback"


def run(part: str, cases: list[str], rounds: int) -> None:
    """Prints the records of a part, a line of JSON each."""
    for record in records(part, cases or [*PARTS[part].cases], rounds):
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2:], 3)
