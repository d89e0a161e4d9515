"""Traces of a workdir's own runs: what the routers of the base seed chose for the validation tokens, at every so many evaluations."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable

from absl import logging as log

from routed.engine import tables
from routed.engine.execution import STRIDE, TRACED
from routed.plan.config import problem_of
from routed.plan.run import Run
from routed.trace.format import DESCRIPTION, Trace, read
from routed.trace.writing import write as write_trace


def write(workdir: pathlib.Path, runs: Iterable[Run]) -> list[Trace]:
    """Writes WORKDIR/traces/ARM-seedSEED-RUN/[STACK/]STEP for every run whose choices were kept (`trace.every`).

    A trace that is there is read. Choices stay as they were kept, whatever `trace.every` is now. Scores are not kept, so a page of
    these says nothing of entropies: results.parquet has them.
    """
    arrays, found, others = tables.read_heatmaps(workdir), list[Trace](), set[int]()
    for run in runs:
        kept = [name for name in arrays if name.startswith(f"{run.key}/{TRACED}/")]
        if not kept or run.seed != run.config.seed or run.tuning:
            continue
        known, stride = problem_of(run.config).traced(run.config), f"{run.key}/{STRIDE}"
        every = int(arrays[stride]) if stride in arrays else run.config.trace.every
        others |= {every} - {run.config.trace.every}
        for name in sorted(kept):
            array = name.removeprefix(f"{run.key}/{TRACED}/")
            stack = array.rpartition("/")[0]
            for moment, choices in enumerate(arrays[name]):
                step = moment * every * run.config.eval_every
                place = workdir / "traces" / f"{run.arm}-seed{run.seed}-{run.key}" / stack / f"step_{step:06d}"
                if (place / DESCRIPTION).exists():
                    found.append(read(place))
                    continue
                layers = choices if choices.ndim == 3 else choices[None]
                found.append(
                    write_trace(
                        place, experts=layers, num_experts=run.config.experts.count, model=f"{run.config.name}, {run.arm} {stack}".strip(),
                        source=f"validation of seed {run.seed}", step=step, **known[array],
                    )
                )  # fmt: skip
    if others:
        kept_with = ", ".join(map(str, sorted(others)))
        log.warning("finished runs kept their choices with trace.every=%s, and their traces are of those", kept_with)
    if found:
        first = found[0].folder.parent
        log.info(
            "%d routing traces under %s; for a page: routed trace report %s/*", len(found), workdir / "traces", first
        )
    return found
