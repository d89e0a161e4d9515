"""Cost of the page of a trace: arrays in memory with scores of every expert, and a long trace on the disk.

Choices are random tables of token id and language with noise; processor time is the time of this process, on one core.
"""

from __future__ import annotations

import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from absl import logging as log

from routed.bench.harness import peak_bytes
from routed.trace import report, writing

LAYERS, EXPERTS, K, VOCABULARY, LANGUAGES, LENGTH = 16, 64, 2, 50_000, 16, 512
#: Tokens of the arrays, and of the trace on the disk; tokens that are written at a time.
TOKENS, MANY, CHUNK = 100_000, 10_000_000, 1_000_000


def bench(rounds: int) -> Iterator[dict[str, Any]]:
    """Yields records {case, tokens, seconds, processor_seconds, peak_bytes}; the peak is of the process so far."""
    del rounds  # minutes each
    log.set_verbosity(log.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder)
        yield measure("arrays with scores", TOKENS, lambda: report.analyse(**_arrays(TOKENS, 0, scores=True), out=out))
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder)
        for begin in range(0, MANY, CHUNK):
            writing.append(out, **_arrays(CHUNK, begin, scores=False), num_experts=EXPERTS)
        written = writing.finish(out)
        yield measure("report of a trace", MANY, lambda: report.report([written], out / "report.html"))


def measure(case: str, tokens: int, run: Callable[[], Any]) -> dict[str, Any]:
    """Times a run once; returns its record."""
    started, used = time.perf_counter(), time.process_time()
    run()
    return {
        "case": case,
        "tokens": tokens,
        "layers": LAYERS,
        "experts": EXPERTS,
        "seconds": time.perf_counter() - started,
        "processor_seconds": time.process_time() - used,
        "peak_bytes": peak_bytes(),
    }


def _arrays(tokens: int, begin: int, scores: bool) -> dict[str, Any]:
    """Draws the arguments of `routed.trace.write`: scores layer by layer, since all together would not fit."""
    random = np.random.default_rng(begin)
    rows = (begin + np.arange(tokens)) // LENGTH
    ids = np.minimum((random.pareto(1.0, tokens) * 20).astype(np.int64), VOCABULARY - 1)
    language = np.random.default_rng(1).integers(0, LANGUAGES, MANY // LENGTH + 1)[rows]
    arguments = {"token_ids": ids, "sequence": rows, "labels": {"language": language}}
    if scores:
        tables = np.random.default_rng(2)
        by_id, by_language = (tables.standard_normal((n, EXPERTS), np.float32) for n in (VOCABULARY, LANGUAGES))
        layers = [
            by_id[ids] + by_language[language] + random.standard_normal((tokens, EXPERTS), np.float32)
            for _ in range(LAYERS)
        ]
        return arguments | {"scores": layers, "k": K}
    shape = (LAYERS, tokens)
    first = np.where(random.random(shape) < 0.5, ids % EXPERTS, random.integers(0, EXPERTS, shape)).astype(np.int16)
    second = (first + 1 + language % (EXPERTS - 1)).astype(np.int16) % EXPERTS
    weights = np.full((LAYERS, tokens, K), 0.5, np.float32)
    return arguments | {"experts": np.stack([first, second], -1), "weights": weights}
