"""`python -m routed.bench NAME --json FILE [--baseline=CMD]`: runs one bench and writes its records.

Without a NAME it names all benches.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import jax
from absl import flags

from routed.aot.topology import topology_of
from routed.bench import dispatch, gmm, gpu, lm, parts, patches, pods, scaling, t5, trace
from routed.bench.harness import Baseline, as_line
from routed.contracts import UserError
from routed.system import commands, files
from routed.system.machine import rates
from routed.system.provenance import provenance

_MODULES: tuple[Any, ...] = (gmm, dispatch, t5, lm, parts, patches, scaling, pods, gpu, trace)
BENCHES = {module.__name__.rpartition(".")[2]: module for module in _MODULES}
#: Benches that compare with a command of the user's.
COMPARED = {name: bench.LINES for name, bench in BENCHES.items() if hasattr(bench, "LINES")}
#: Benches whose cases --only chooses.
RESTRICTED = ("lm", "parts", "t5")
#: Benches whose own process must not, or need not, ask JAX for a device.
WITHOUT_DEVICE = ("pods", "gpu", "trace")

JSON = flags.DEFINE_string(
    "json", None, "Where the measurements are written: machine, versions, commit, and a list of records."
)
BASELINE = flags.DEFINE_string(
    "baseline",
    None,
    "A command to run in turn with ours; it prints lines of this form: "
    + "; ".join(f"{name}: {lines.form}" for name, lines in COMPARED.items()),
)
ONLY = flags.DEFINE_string(
    "only", "", "Times only the cases `SHAPE KIND` of lm, parts and t5 that match this regular expression."
)
ROUNDS = flags.DEFINE_integer("rounds", 3, "Times everything is measured; medians are reported.", lower_bound=1)
TOPOLOGY = flags.DEFINE_string(
    "topology",
    "",
    "For gpu: compiles its table for a GPU that is not here, such as h100:1, and runs nothing.",
    allow_override=True,
)


def main(argv: list[str]) -> None:
    """Runs one bench; writes after each record, so that a killed bench leaves its measurements."""
    if len(argv) != 2 or argv[1] not in BENCHES:
        raise UserError(f"usage: python -m routed.bench NAME --json FILE; NAME is one of {', '.join(BENCHES)}")
    name, command = argv[1], BASELINE.value
    if command and name not in COMPARED:
        raise UserError(f"--baseline: bench {name} has none; {', '.join(COMPARED)} compare with a command")
    if ONLY.value and name not in RESTRICTED:
        raise UserError(f"--only: bench {name} has no such choice; {', '.join(RESTRICTED)} have")
    arguments: list[Any] = [Baseline(command, COMPARED[name])] if name in COMPARED else []
    arguments += [ONLY.value] if name in RESTRICTED else []
    if TOPOLOGY.value:
        if name != "gpu":
            raise UserError(f"--topology={TOPOLOGY.value}: bench {name} has none; gpu compiles for another machine")
        topology_of(TOPOLOGY.value)  # refuses what is unknown or not installed
        arguments = [TOPOLOGY.value]
    records: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    for record in BENCHES[name].bench(ROUNDS.value, *arguments):
        about = about or describe(name)
        records.append(record)
        print(as_line(record), flush=True)
        if JSON.value:
            text = json.dumps(about | {"records": records}, indent=1)
            files.write(files.folder(JSON.value), text + "\n")
    print(json.dumps(about | {"records": records}, indent=1))
    if hasattr(BENCHES[name], "as_table"):
        print(BENCHES[name].as_table(records))


def describe(name: str) -> dict[str, Any]:
    """Returns the machine, its rates, the versions and the commit of a bench."""
    about = {"bench": name, "rounds": ROUNDS.value} | provenance()
    if name in WITHOUT_DEVICE:
        return about
    return about | {"devices": [str(device) for device in jax.devices()], "rates": rates()._asdict()}


def run() -> None:
    """Entry point."""
    commands.start(main, functools.partial(commands.parse_flags, module=sys.modules[__name__]))


if __name__ == "__main__":
    run()
