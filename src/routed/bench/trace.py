"""A page of a trace, and what it takes: arrays in memory with scores of every expert, and a trace on the disk that does not fit in it.

Choices are random tables of token id and language with noise; processor time is that of this process, on one core.
"""

from __future__ import annotations

import pathlib
import resource
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from absl import logging as log

from routed.trace import report, writing

LAYERS, EXPERTS, K, VOCABULARY, LANGUAGES, LENGTH = 16, 64, 2, 50_000, 16, 512
#: Tokens of the arrays, and of the trace on the disk; tokens that are written at a time.
TOKENS, MANY, CHUNK = 100_000, 10_000_000, 1_000_000


def bench(rounds: int, baseline: str | None) -> Iterator[dict[str, Any]]:
    """Records {case, tokens, layers, seconds, processor_seconds, peak_bytes}; the peak is of the process so far."""
    del rounds, baseline  # minutes each
    log.set_verbosity(log.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        yield measure(
            "arrays with scores",
            TOKENS,
            lambda out: report.analyse(**_arrays(TOKENS, 0, scores=True), out=out),
            pathlib.Path(folder),
        )
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder)
        for begin in range(0, MANY, CHUNK):
            writing.append(out, **_arrays(CHUNK, begin, scores=False), num_experts=EXPERTS)
        written = writing.finish(out)
        yield measure("report of a trace", MANY, lambda out: report.report([written], out / "report.html"), out)


def measure(case: str, tokens: int, run, out: pathlib.Path) -> dict[str, Any]:
    """One record, and a line that says it."""
    begun, used = time.perf_counter(), time.process_time()
    run(out)
    record: dict[str, Any] = {
        "case": case, "tokens": tokens, "layers": LAYERS, "seconds": time.perf_counter() - begun,
        "processor_seconds": time.process_time() - used,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }  # fmt: skip
    print(
        f"{case}, {LAYERS} x {tokens:,} x {EXPERTS}: {record['seconds']:.0f} s, {record['processor_seconds']:.0f} of the processor,"
        f" peak {record['peak_bytes'] / 2**30:.2f} GiB",
        flush=True,
    )
    return record


def _arrays(tokens: int, begin: int, scores: bool) -> dict[str, Any]:
    """The arguments of `routed.trace.write`: layer by layer, as all of them would not fit."""
    random = np.random.default_rng(begin)
    rows = (begin + np.arange(tokens)) // LENGTH
    ids = np.minimum((random.pareto(1.0, tokens) * 20).astype(np.int64), VOCABULARY - 1)
    language = np.random.default_rng(1).integers(0, LANGUAGES, MANY // LENGTH + 1)[rows]
    given = {"token_ids": ids, "sequence": rows, "labels": {"language": language}}
    if scores:
        by_id, by_language = (
            np.random.default_rng(2).standard_normal((size, EXPERTS), np.float32) for size in (VOCABULARY, LANGUAGES)
        )
        return given | {
            "scores": [
                by_id[ids] + by_language[language] + random.standard_normal((tokens, EXPERTS), np.float32)
                for _ in range(LAYERS)
            ],
            "k": K,
        }
    first = np.where(
        random.random((LAYERS, tokens)) < 0.5, ids % EXPERTS, random.integers(0, EXPERTS, (LAYERS, tokens))
    ).astype(np.int16)
    second = (first + 1 + language % (EXPERTS - 1)).astype(np.int16) % EXPERTS
    return given | {"experts": np.stack([first, second], -1), "weights": np.full((LAYERS, tokens, K), 0.5, np.float32)}
