"""Runs an experiment: `routed run` or `python -m routed.main`, with --config=NAME[:FIGURE[,SCALE]].

NAME is one of `routed`'s own experiments (--list prints them), or the path of a Python file. The same command again continues
an interrupted run, adds what is missing, or prints a complete one's result. Any setting is changed by --config.KEY=VALUE, at every
point; any setting is swept by --sweep=KEY=v1,v2,... on top of the figure's own sweep.
Many machines share a sweep with --shard=I/N, or one run with --coordinator (launch/README.md).
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator

from routed.system import signals

if __name__ == "__main__":
    signals.end_on_signals()  # before the other imports, which take a moment

from absl import flags
from absl import logging as log

from routed.contracts import UserError
from routed.system import commands, experiments, files, supervisor

CONFIG = flags.DEFINE_string(
    "config",
    None,
    "The experiment with figure and scale: NAME[:FIGURE[,SCALE]] or FILE.py[:FIGURE[,SCALE]]. Change a setting with"
    " --config.KEY=VALUE.",
)
SWEEP = flags.DEFINE_multi_string("sweep", [], "KEY=v1,v2,...: sweep any setting; may be repeated (product).")
WORKDIR = flags.DEFINE_string(
    "workdir", None, "Where everything is written; default runs/NAME[-FIGURE][-SCALE][-KEY=VALUE...]."
)
DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Print points, compiled groups, parameters, memory and estimated time, and stop."
)
TOPOLOGY = flags.DEFINE_string(
    "topology",
    "",
    "CHIP:SHAPE, such as v5e:8x8 or h100:8: with --dry_run, compile every program for these chips, which need not be here, and"
    " print its memory, FLOPs, cycles, collectives, time and price. Needs their compiler (launch/README.md).",
)
LIST = flags.DEFINE_enum(
    "list",
    None,
    ("figures", "settings"),
    "Print the experiments, or with --config the figures of one with their scales, arms and points; with =settings every"
    " setting that they read. Stop then.",
)
SHARD = flags.DEFINE_string(
    "shard",
    "",
    "I/N: only part I (from 1) of N of the sweep, balanced by cost; `routed report DIR...` joins the parts.",
)
COORDINATOR = flags.DEFINE_string(
    "coordinator",
    None,
    "Several processes share this run: HOST:PORT of process 0, or auto (TPU, Slurm, SkyPilot, Open MPI, Kubernetes).",
)
NUM_PROCESSES = flags.DEFINE_integer("num_processes", 0, "Processes that share this run; with --coordinator=HOST:PORT.")
PROCESS_ID = flags.DEFINE_integer("process_id", -1, "Which of them this is, from 0; with --coordinator=HOST:PORT.")
JOIN_SECONDS = flags.DEFINE_integer("join_seconds", 300, "How long processes wait for each other at the start; 300.")

_OVERRIDES: list[str] = []


def main(argv: list[str]) -> None:
    """The path of a number, from the experiment file to the report."""
    if len(argv) > 1:
        raise UserError(
            f"unexpected argument {argv[1]!r}: an experiment is named with --config=NAME, and settings are changed with"
            " --config.KEY=VALUE"
        )
    if not (spec := CONFIG.value):
        if LIST.value == "figures":
            return files.tell(experiments.list_experiments())
        raise UserError("--config is missing: name an experiment, e.g. --config=gmm_router; --list prints them all")
    if not COORDINATOR.value and (idle := [flag for flag in (NUM_PROCESSES, PROCESS_ID) if flag.present]):
        idle_flags = " ".join(f"--{flag.name}={flag.value}" for flag in idle)
        raise UserError(
            f"{idle_flags}: without effect, as every process would run everything: add --coordinator=HOST:PORT"
        )
    if COORDINATOR.value and not os.environ.get(supervisor.MARK):
        command = [sys.executable, "-m", "routed.main", *sys.argv[1:]]
        sys.exit(supervisor.supervise(command, COORDINATOR.value))
    # Here, since --help and the parent of a process need none of it, and JAX and the rest take seconds.
    from routed.analysis import page
    from routed.engine import devices, dry_run, execution, results
    from routed.plan import checks, experiment, listing, points, shards
    from routed.plan.runs import plan_runs
    from routed.plan.workdir import ELSEWHERE, default_workdir
    from routed.settings.tree import flatten, override
    from routed.system import hosts
    from routed.trace import own

    devices.split_host()  # before anything asks JAX for its devices
    module, config = experiment.configure(spec, _OVERRIDES)
    if LIST.value == "figures":  # whatever is still to be set
        return files.tell(listing.list_figures(module, experiment.split(spec)[0], config))
    if LIST.value == "settings" and not config.data.directory:
        config = override(config, {"data.directory": "DIR"})  # which need not be there to be listed
    checks.validate(config)
    figure = experiment.figure_of(module, config)
    page.check(figure, config)
    given = [text.partition("=")[0] for text in _OVERRIDES]
    sweep = points.of_command(config, figure.sweep, given, SWEEP.value, figure.computed)
    checks.validate_sweep(sweep)
    page.warn_of_claims(figure, config, sweep)
    runs = plan_runs(config, sweep, [*given, *(text.partition("=")[0] for text in SWEEP.value)])
    devices.allow_collectives([run.config for run in runs])
    if LIST.value == "settings":
        return files.tell(listing.list_settings(config, runs))
    if SHARD.value:
        runs = shards.part(runs, SHARD.value)
    if COORDINATOR.value:
        hosts.join(COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value, JOIN_SECONDS.value)
        # Keys of runs leave out what changes no result, such as when to save, which processes have to do together.
        settings = {key: value for key, value in flatten(config).items() if key not in ELSEWHERE}
        hosts.require_equal(
            "command", ([run.key for run in runs], settings), "give every process the same command and the same code"
        )
    if TOPOLOGY.value:
        if not DRY_RUN.value:
            raise UserError(f"--topology={TOPOLOGY.value}: programs are compiled for it and not run: add --dry_run")
        from routed.aot import dry_run as priced
        from routed.aot.topology import topology_of

        topology = topology_of(TOPOLOGY.value)
        return files.tell(priced.describe(runs, devices.make_mesh(config, topology.devices), topology))
    mesh = devices.make_mesh(config)
    if DRY_RUN.value:
        described = dry_run.describe(runs, mesh)
        hosts.once(lambda: files.tell(described))
        return
    source = experiment.lasting(spec)
    workdir = files.folder(WORKDIR.value or default_workdir(source, config, _OVERRIDES, SWEEP.value, SHARD.value))
    with contextlib.ExitStack() as held:
        hosts.once(lambda: held.enter_context(files.locked(workdir)))
        hosts.once(lambda: held.enter_context(_log_in(workdir)))
        devices.keep_programs(workdir)
        log.info("%s: %d points, %d runs, workdir %s", shlex.join(sys.argv[1:]), len(sweep), len(runs), workdir)
        start = time.monotonic()
        table = hosts.first_process_first(lambda: results.open_workdir(workdir, source, config, sweep, SHARD.value))
        hosts.require_equal(
            "workdir",
            results.described(workdir),
            "several hosts need one folder that all see, on the network or in a bucket",
        )
        table = execution.execute(runs, table, workdir, mesh)
        if config.trace.every:
            hosts.once(lambda: own.write(workdir, runs))
        if SHARD.value:
            log.info(
                "part %s is done in %.0f s; python -m routed.report DIR... joins all parts",
                SHARD.value,
                time.monotonic() - start,
            )
            return
        told: list[str] = []
        with files.explained(workdir / "report.html"):
            hosts.once(lambda: told.append(page.write(workdir, module, config, table)))
        hosts.once(lambda: files.tell(*told))
        log.info("finished in %.0f s; open %s", time.monotonic() - start, workdir / "report.html")


@contextlib.contextmanager
def _log_in(workdir: pathlib.Path) -> Iterator[None]:
    """Copies the log into the workdir, into a bucket at the end; a full disk loses lines of it, nothing else."""
    log_file = workdir / "routed.log"
    with files.explained(log_file):
        here = log_file
        if files.remote(workdir):
            with tempfile.NamedTemporaryFile(suffix=".log", delete=False) as file:
                here = pathlib.Path(file.name)
        handler = logging.FileHandler(here, encoding="utf-8", errors="backslashreplace")
    handler.handleError = lambda record: None  # type: ignore[method-assign]
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.get_absl_logger().addHandler(handler)
    try:
        yield
    except UserError as error:  # `run` tells the user, when this file is closed
        handler.handle(logging.LogRecord("routed", logging.ERROR, __file__, 0, "error: %s", (error,), None))
        raise
    finally:
        log.get_absl_logger().removeHandler(handler)
        with contextlib.suppress(OSError):
            handler.close()
        if here != log_file:
            try:
                with files.explained(log_file):
                    before = log_file.read_bytes() if log_file.exists() else b""
                    files.write(log_file, before + here.read_bytes())
            finally:
                here.unlink()


def parse_flags(argv: list[str]) -> list[str]:
    """Takes --config.KEY=VALUE out of the command line, and leaves the rest to absl.

    Raises:
      UserError: an unknown flag, or a value of the wrong type.
    """
    _OVERRIDES[:], rest = commands.take_overrides(argv)
    rest = ["--list=figures" if text in ("--list", "-list") else text for text in rest]
    return commands.parse_flags(rest, sys.modules[__name__])


def run() -> None:
    """Entry point."""
    commands.start(main, parse_flags)


if __name__ == "__main__":
    run()
