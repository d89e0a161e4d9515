"""Cost of the page of a trace: arrays in memory with scores of every expert, a deep trace and a long one on the disk.

Choices are random tables of token id and language with noise; processor time is the time of this process, on one core.
"""

from __future__ import annotations

import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from absl import logging as log

from routed.bench.harness import peak_bytes
from routed.trace import report, writing

VOCABULARY, LANGUAGES, LENGTH = 50_000, 16, 512
#: Tokens of the arrays, and of the trace on the disk; tokens that are written at a time.
TOKENS, MANY, CHUNK = 100_000, 10_000_000, 1_000_000


class Shape(NamedTuple):
    """Sizes of a model's routers."""

    layers: int
    experts: int
    k: int


#: The shape of OLMoE with two experts a token, and that of Qwen3-30B-A3B, as its traces come from vLLM.
SHALLOW, DEEP = Shape(16, 64, 2), Shape(48, 128, 8)


def bench(rounds: int) -> Iterator[dict[str, Any]]:
    """Yields records {case, tokens, seconds, processor_seconds, peak_bytes}; the peak is of the process so far."""
    del rounds  # minutes each
    log.set_verbosity(log.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder)
        shape = SHALLOW
        yield measure(
            "arrays with scores", TOKENS, shape, lambda: report.analyse(**_arrays(TOKENS, 0, shape, True), out=out)
        )
    yield of_trace("report of a deep trace", DEEP, CHUNK, CHUNK // 10)
    yield of_trace("report of a trace", SHALLOW, MANY, CHUNK)


def of_trace(case: str, shape: Shape, tokens: int, chunk: int) -> dict[str, Any]:
    """Writes a trace of some tokens, a chunk at a time, and measures its page."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder)
        for begin in range(0, tokens, chunk):
            writing.append(out, **_arrays(chunk, begin, shape, scores=False), num_experts=shape.experts)
        writing.finish(out)
        return measure(case, tokens, shape, lambda: report.report([out], out / "report.html"))


def measure(case: str, tokens: int, shape: Shape, run: Callable[[], Any]) -> dict[str, Any]:
    """Times a run once; returns its record."""
    started, used = time.perf_counter(), time.process_time()
    run()
    return {
        "case": case,
        "tokens": tokens,
        **shape._asdict(),
        "seconds": time.perf_counter() - started,
        "processor_seconds": time.process_time() - used,
        "peak_bytes": peak_bytes(),
    }


def _arrays(tokens: int, begin: int, shape: Shape, scores: bool) -> dict[str, Any]:
    """Draws the arguments of `routed.trace.write`: scores layer by layer, since all together would not fit."""
    random = np.random.default_rng(begin)
    rows = (begin + np.arange(tokens)) // LENGTH
    ids = np.minimum((random.pareto(1.0, tokens) * 20).astype(np.int64), VOCABULARY - 1)
    language = np.random.default_rng(1).integers(0, LANGUAGES, MANY // LENGTH + 1)[rows]
    arguments = {"token_ids": ids, "sequence": rows, "labels": {"language": language}}
    if scores:
        tables = np.random.default_rng(2)
        by_id, by_language = (tables.standard_normal((n, shape.experts), np.float32) for n in (VOCABULARY, LANGUAGES))
        layers = [
            by_id[ids] + by_language[language] + random.standard_normal((tokens, shape.experts), np.float32)
            for _ in range(shape.layers)
        ]
        return arguments | {"scores": layers, "k": shape.k}
    size, experts = (shape.layers, tokens), shape.experts
    first = np.where(random.random(size) < 0.5, ids % experts, random.integers(0, experts, size)).astype(np.int16)
    step = (1 + language % ((experts - 1) // (shape.k - 1))).astype(np.int16)
    chosen = np.stack([(first + i * step) % experts for i in range(shape.k)], -1)
    return arguments | {"experts": chosen, "weights": np.full((*size, shape.k), 1 / shape.k, np.float32)}
