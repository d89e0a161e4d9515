"""`python -m routed.bench NAME --json FILE [--baseline=CMD]`; NAME is gmm, dispatch, t5, lm, cluster,
patches, images, scaling, tables, pods, gpu or trace."""

from __future__ import annotations

import functools
import json
import pathlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

from absl import flags

from routed.bench import cluster, dispatch, gmm, gpu, images, lm, patches, pods, scaling, t5, tables, trace
from routed.contracts import UserError
from routed.system import commands, files

JSON = flags.DEFINE_string("json", None, "Where the measurements are written, as a list of records.")
BASELINE = flags.DEFINE_string(
    "baseline",
    None,
    "A command to run in turn with ours. gmm: it prints `constant ... MS` and `depth-3 ... MS`; t5: lines"
    " `NAME s per step: SECONDS parameters: COUNT`; lm: lines `SHAPE KIND s per step: SECONDS tokens per s: COUNT`; cluster: lines `seed I: SECONDS s, N steps, ...`;"
    " patches: lines `joint ms per step: MS` and `cnn ms per step: MS`; images: a line `resnet18 ms per step: MS`.",
)
ROUNDS = flags.DEFINE_integer("rounds", 3, "Times everything is measured; medians are reported.", lower_bound=1)

BENCHES: dict[str, Callable[..., Iterable[dict[str, Any]]]] = {
    "gmm": gmm.bench, "dispatch": dispatch.bench, "t5": t5.bench, "lm": lm.bench, "cluster": cluster.bench, "patches": patches.bench, "images": images.bench,
    "scaling": scaling.bench, "tables": tables.bench, "pods": pods.bench, "gpu": gpu.bench, "trace": trace.bench,
}  # fmt: skip


def main(argv: list[str]) -> None:
    """Runs one bench and writes its records, each as soon as it is there: what is killed leaves what it measured."""
    if len(argv) != 2 or argv[1] not in BENCHES:
        raise UserError(f"usage: python -m routed.bench NAME --json FILE; NAME is one of {', '.join(BENCHES)}")
    records = []
    for record in BENCHES[argv[1]](rounds=ROUNDS.value, baseline=BASELINE.value):
        records.append(record)
        if JSON.value:
            files.write(pathlib.Path(JSON.value), json.dumps(records, indent=1) + "\n")
    print(json.dumps(records, indent=1))


def run() -> None:
    """Entry point."""
    commands.start(main, functools.partial(commands.parse_flags, module=sys.modules[__name__]))


if __name__ == "__main__":
    run()
