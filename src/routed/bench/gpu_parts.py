"""Cases of `bench gpu`, each part in a process of its own: `python -m routed.bench.gpu_parts PART [CASE...]` runs one.

On a CPU sizes are tiny, so that all cases can be tried without a GPU. A part CHIP:SHAPE, such as h100:1, compiles the
cells of the table for a GPU that is not here. Lowerings that fall back: the table and `t5` refuse a program that
computes more than twice the FLOPs of its assignments; `batching` and `sweep` train every expert on every token, so that
only memory can be short.
"""

from __future__ import annotations

import gc
import json
import math
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax

from routed.aot.estimate import least_bytes, memory_of
from routed.bench import dispatch, gmm, gpu_cells, gpu_layers, gpu_torch, pods
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

#: name -> function of the rounds that returns a record.
Cases = dict[str, Callable[[int], dict[str, Any]]]


class Part(NamedTuple):
    """Cases that share a process, in the order of their importance."""

    seconds: float  # share of the budget
    cases: Cases
    patience: float = math.inf  # seconds of a case: a kernel that hangs must not take the time of others
    memory: str = ""  # advice where memory is short
    lowering: str = ""  # advice where a lowering is missing


#: Sizes on a CPU.
TINY_GMM = {"data.samples": 64, "data.test_samples": 640, "batch_size": 32, "experts.width": 8, "shuffles": 0}
TINY_T5 = {"transformer.dim": 64, "transformer.width": 128, "experts.width": 128}
#: Training steps of a timed call on a GPU, and on a CPU.
STEPS, FEW = 50, 2


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
FEWER_TOKENS = "halve the tokens of SHAPES in bench/gpu_layers.py"
#: Seconds of a cell: XLA compiles JAX's kernels for 128 experts for 29 s on two cores.
PATIENCE = 75
BATCHES, WAYS = (("mlp", 32), ("constant", 256)), ("vmap", "map")
CELLS: Cases = {cell.name: partial(gpu_cells.measure, cell) for cell in gpu_cells.cells_of()}
TORCH: Cases = {cell.name: partial(gpu_torch.measure, cell) for cell in gpu_cells.cells_of((gpu_torch.COLUMN,))}
BATCHING: Cases = {
    f"{gpu_cells.SEEDS} seeds: {name}": partial(gpu_cells.seeds, name) for name in ("ragged", "slots", "mosaic")
}
BATCHING |= {f"{name}, {runs} runs: {way}": partial(batch, name, runs, way) for name, runs in BATCHES for way in WAYS}
#: Parts in the order of their importance; the first also says what the machine is.
PARTS: dict[str, Part] = {
    "table": Part(
        300, {"here": machine} | CELLS, PATIENCE, FEWER_TOKENS, "nothing: training uses none of these kernels"
    ),
    "torch": Part(45, TORCH, PATIENCE, FEWER_TOKENS),
    "batching": Part(
        60, BATCHING, PATIENCE, "lower the number of runs (mesh.runs_per_batch)", "set mesh.batching to the other way"
    ),
    "t5": Part(
        40,
        {
            "gpu, auto": partial(text, {}),
            "gpu, dense_active": partial(text, {"model": "dense_active"}),
            "gpu, slots": partial(text, CAPACITY),
        },
        memory="halve batch_size, or set transformer.remat=true",
        lowering=USE_SLOTS,
    ),
    "sweep": Part(
        30,
        {
            "headline": partial(sweep, {}),
            "headline, 60 seeds": partial(sweep, {"seeds": 60, "mesh.runs_per_batch": 256}),
        },
        memory="lower mesh.runs_per_batch",
        lowering="set selection.eval.name=soft, of which the dispatch is dense",
    ),
}


def part_of(name: str) -> Part:
    """Returns a part by its name, or the cells of the table compiled for CHIP:SHAPE; loads share a program."""
    if ":" not in name:
        return PARTS[name]
    cells = [cell for cell in gpu_cells.cells_of() if cell.load == gpu_layers.LOADS[0]]
    cases: Cases = {cell.name: partial(gpu_cells.plan, cell, name) for cell in cells}
    return Part(math.inf, cases, math.inf, FEWER_TOKENS, "nothing: training uses none of these kernels")


def set_alarm(seconds: float) -> None:
    """Lets this process die after so many seconds, wherever it hangs; infinite: never."""
    signal.setitimer(signal.ITIMER_REAL, 0 if math.isinf(seconds) else max(seconds, 0.01))


def records(part: str, cases: list[str], rounds: int, deadline: float | None = None) -> Iterator[dict[str, Any]]:
    """Yields a record of each case: its measurements, or in one line why it failed and what to do.

    Ends after an unexpected error: a device that ran out of memory, or was misused, may fail everything after it. With
    a deadline (of the monotonic clock) the process dies there, or when a case has taken the part's patience.
    """
    for name in cases:
        started, error = time.perf_counter(), None
        if deadline is not None:
            set_alarm(min(part_of(part).patience, deadline - time.monotonic()))
        try:
            record = part_of(part).cases[name](rounds)
        except Exception as raised:  # any error: the other cases go on
            line = str(raised) if isinstance(raised, UserError) else f"{type(raised).__name__}: {raised}"
            error, record = raised, {"failed": " ".join(line.split())[:400], "do": advice(raised, part_of(part))}
        yield {"part": part, "case": name} | record | {"seconds": round(time.perf_counter() - started, 1)}
        if error is not None and not isinstance(error, UserError):
            traceback.print_exception(error)
            return
        gc.collect()  # arrays of a program that refers to itself
        if part not in ("table", "torch"):  # its cases share programs
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


def run(part: str, cases: list[str], rounds: int, deadline: float | None = None) -> None:
    """Prints the records of a part, a line of JSON each."""
    for record in records(part, cases or [*part_of(part).cases], rounds, deadline):
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2:], 3)
