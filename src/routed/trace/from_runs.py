"""Traces of a workdir's runs: choices of the base seed's routers for validation tokens, at every n-th evaluation."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable

from absl import logging as log

from routed.engine import tables
from routed.engine.execution import STRIDE, TRACED
from routed.plan.config import problem_of
from routed.plan.runs import Run
from routed.trace.format import DESCRIPTION, Trace, read
from routed.trace.writing import write as write_trace


def write(workdir: pathlib.Path, runs: Iterable[Run]) -> list[Trace]:
    """Writes WORKDIR/traces/ARM-seedSEED-RUN/[STACK/]STEP for every run whose choices were kept (`trace.every`).

    An existing trace is read. Choices stay as they were kept, whatever `trace.every` is now. Scores are not kept, so
    pages of these traces have no entropies; results.parquet has them.
    """
    arrays, traces, strides, missing = tables.read_heatmaps(workdir), list[Trace](), set[int](), False
    for run in runs:
        config, prefix = run.config, f"{run.key}/{TRACED}/"
        names = sorted(name for name in arrays if name.startswith(prefix))
        if not names or run.seed != config.seed or run.tuning:
            missing |= not names and config.trace.every > 0
            continue
        token_arrays, stride = problem_of(config).traced(config), f"{run.key}/{STRIDE}"
        every = int(arrays[stride]) if stride in arrays else config.trace.every
        strides |= {every} - {config.trace.every}
        for name in names:
            array = name.removeprefix(prefix)
            stack = array.rpartition("/")[0]
            folder = workdir / "traces" / f"{run.arm}-seed{run.seed}-{run.key}" / stack
            for evaluation, choices in enumerate(arrays[name]):
                step = evaluation * every * config.eval_every
                path = folder / f"step_{step:06d}"
                if (path / DESCRIPTION).exists():
                    traces.append(read(path))
                    continue
                trace = write_trace(
                    path,
                    experts=choices if choices.ndim == 3 else choices[None],
                    num_experts=config.experts.count,
                    model=f"{config.name}, {run.arm} {stack}".strip(),
                    source=f"validation of seed {run.seed}",
                    step=step,
                    **token_arrays[array],
                )
                traces.append(trace)
    if missing and not traces:
        log.warning("finished runs kept no choices: for traces, run with trace.every in another --workdir")
    if strides:
        kept_with = ", ".join(map(str, sorted(strides)))
        log.warning("finished runs kept their choices with trace.every=%s, and their traces are of those", kept_with)
    if traces:
        advice = f"for a page: routed trace report {traces[0].folder.parent}/*"
        log.info("%d routing traces under %s; %s", len(traces), workdir / "traces", advice)
    return traces
