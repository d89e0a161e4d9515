"""Runs an experiment: `routed run` or `python -m routed.main`, with --config=NAME[:FIGURE[,SCALE]].

NAME is one of `routed`'s own experiments (--list prints them), or the path of a Python file. The same command again
continues an interrupted run, adds missing runs, or prints the result of a complete one. --config.KEY=VALUE changes any
setting, at every point; --sweep=KEY=v1,v2,... sweeps any setting on top of the figure's own sweep. Many machines share
a sweep with --shard=I/N, or one run with --coordinator (launch/README.md). Exit code 2: a mistake, 3: diverged runs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import shlex
import sys
import time
import types
from typing import TYPE_CHECKING, NamedTuple

from routed.system import signals

if __name__ == "__main__":
    signals.end_on_signals()  # before the other imports, which take a moment

from absl import flags
from absl import logging as log

from routed.contracts import UserError
from routed.system import commands, experiments, files, log_file, supervisor

if TYPE_CHECKING:  # --help needs none of them
    import pandas as pd
    from ml_collections import ConfigDict

    from routed.plan.run import Point, Run

CONFIG = flags.DEFINE_string(
    "config", None, "NAME[:FIGURE[,SCALE]] or FILE.py[:FIGURE[,SCALE]]. Change settings with --config.KEY=VALUE."
)
SWEEP = flags.DEFINE_multi_string("sweep", [], "KEY=v1,v2,...: sweep any setting, tuples as (a,b); may be repeated.")
WORKDIR = flags.DEFINE_string(
    "workdir", None, "Where everything is written; default runs/NAME[-FIGURE][-SCALE][-KEY=VALUE...]."
)
DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Print points, compiled groups, parameters, memory and estimated time, and stop."
)
TOPOLOGY = flags.DEFINE_string(
    "topology",
    "",
    "CHIP:SHAPE, such as v5e:8x8 or h100:8: with --dry_run, compile every program for these chips, which this machine"
    " may lack, and print its memory, FLOPs, cycles, collectives, time and price. Needs their compiler"
    " (launch/README.md).",
)
TRACKER = flags.DEFINE_string(
    "tracker", "", "Shows runs while they train: tensorboard (in WORKDIR/tensorboard), wandb or trackio."
)
PROFILE = flags.DEFINE_integer("profile", 0, "Records N steps in WORKDIR/profile (Perfetto, xprof).", lower_bound=0)
LIST = flags.DEFINE_enum(
    "list",
    None,
    ("figures", "settings"),
    "Prints the experiments, or the figures, scales, arms and points of one experiment (--config); =settings: every"
    " setting that it reads. Runs nothing.",
)
SHARD = flags.DEFINE_string(
    "shard", "", "I/N: part I (from 1) of N of the sweep, balanced by cost; `routed report DIR...` joins the parts."
)
COORDINATOR = flags.DEFINE_string(
    "coordinator",
    None,
    "Several processes share this run: HOST:PORT of process 0, or auto (TPU, Slurm, SkyPilot, Open MPI, Kubernetes).",
)
NUM_PROCESSES = flags.DEFINE_integer("num_processes", 0, "Processes that share this run; with --coordinator=HOST:PORT.")
PROCESS_ID = flags.DEFINE_integer("process_id", -1, "The number of this process, from 0; with --coordinator=HOST:PORT.")
JOIN_SECONDS = flags.DEFINE_integer("join_seconds", 300, "Seconds to wait for all at the start; 300.", lower_bound=1)

_OVERRIDES: list[str] = []
parse_flags = functools.partial(
    commands.parse_flags, module=sys.modules[__name__], overrides=_OVERRIDES, alone={"list": "figures"}
)


class Command(NamedTuple):
    """The experiment of a command: its name, module, config with overrides, points, and runs."""

    spec: str
    module: types.ModuleType
    config: ConfigDict
    sweep: tuple[Point, ...]
    runs: list[Run]


def main(argv: list[str]) -> None:
    """Runs the experiment of the command line, or prints a list or a dry run of it."""
    _check_flags(argv)
    if not (spec := CONFIG.value):
        return files.tell(experiments.list_experiments())
    if COORDINATOR.value and not os.environ.get(supervisor.MARK):
        child = [sys.executable, "-m", "routed.main", *sys.argv[1:]]
        sys.exit(supervisor.supervise(child, COORDINATOR.value))
    # Imports stand inside of functions: --help and the parent of a process need no JAX, which takes seconds to load.
    from routed.engine import devices
    from routed.plan import shards

    devices.split_host()  # before anything asks JAX for its devices
    if SHARD.value:
        shards.parse(SHARD.value)
    if LIST.value == "figures":
        return _list_figures(spec)
    command = _plan(spec)
    devices.allow_collectives([run.config for run in command.runs])
    if LIST.value == "settings":
        from routed.plan import listing

        return files.tell(listing.list_settings(command.config, command.runs))
    if SHARD.value:
        command = command._replace(runs=shards.part(command.runs, SHARD.value))
    if COORDINATOR.value:
        _join(command, COORDINATOR.value)
    if TOPOLOGY.value:
        return _describe_topology(command)
    if DRY_RUN.value:
        return _dry_run(command)
    _run(command)


def _check_flags(argv: list[str]) -> None:
    """Refuses arguments that are no flags, a missing --config, and flags without effect.

    Raises:
      UserError: names the flag to add or drop.
    """
    if len(argv) > 1:
        advice = "an experiment is named with --config=NAME, a setting is changed with --config.KEY=VALUE"
        raise UserError(f"unexpected argument {argv[1]!r}: {advice}")
    if not CONFIG.value and LIST.value != "figures":
        raise UserError("--config is missing: name an experiment, e.g. --config=gmm_router; --list prints them all")
    if LIST.value:
        unread = ["workdir", "dry_run", "topology", "tracker", "profile", "shard", "coordinator"]
        unread += ["sweep"] if LIST.value == "figures" else []
        if text := " ".join(flags.FLAGS[name].serialize() for name in unread if flags.FLAGS[name].present):
            raise UserError(f"{text}: without effect, as --list={LIST.value} runs nothing: drop one of the two")
    if DRY_RUN.value and (unread := [name for name in ("workdir", "tracker", "profile") if flags.FLAGS[name].present]):
        log.info("--dry_run estimates all runs, and does not read --%s", ", --".join(unread))
    if TOPOLOGY.value and not DRY_RUN.value:
        raise UserError(f"--topology={TOPOLOGY.value}: programs are compiled, not run: add --dry_run")
    idle = [NUM_PROCESSES, PROCESS_ID, *[JOIN_SECONDS] * (not COORDINATOR.value)]
    text = " ".join(f"--{flag.name}={flag.value}" for flag in idle if flag.present)
    if CONFIG.value and text and COORDINATOR.value in (None, "", "auto"):
        raise UserError(f"{text}: without effect: add --coordinator=HOST:PORT, or drop what has none")


def _list_figures(spec: str) -> None:
    """Prints the figures of the experiment, even if some of its settings still lack a value."""
    from routed.plan import experiment, listing

    module, config = experiment.configure(spec, _OVERRIDES)
    files.tell(listing.list_figures(module, experiment.split(spec)[0], config))


def _plan(spec: str) -> Command:
    """Checks the config, and plans its runs.

    Raises:
      UserError: an impossible config, figure or sweep.
    """
    from routed.analysis import changed, page
    from routed.plan import arms, checks, experiment, points
    from routed.plan.runs import plan_runs
    from routed.settings.tree import override

    module, config = experiment.configure(spec, _OVERRIDES)
    if LIST.value == "settings" and not config.data.directory:
        config = override(config, {"data.directory": "DIR"})  # which need not exist to be listed
    checks.validate(config)
    figure = experiment.figure_of(module, config)
    page.check(figure, config)
    given = [text.partition("=")[0] for text in _OVERRIDES]
    sweep = points.points_of_command(config, figure.sweep, given, SWEEP.value, figure.computed)
    checks.validate_sweep(sweep)
    page.warn_of_claims(figure, config, sweep)
    changed.warn_of_competence(module, config)
    runs = plan_runs(config, sweep, [*given, *(text.partition("=")[0] for text in SWEEP.value)])
    if idle := [arm for arm in config.arms if arm in arms.OWN - {run.arm for run in runs}]:
        log.warning("no point of this figure runs the arms %s: its sweep names other arms", ", ".join(idle))
    return Command(spec, module, config, sweep, runs)


def _join(command: Command, coordinator: str) -> None:
    """Joins the other processes of the run.

    Raises:
      UserError: no other processes, or one with another command or other code.
    """
    from routed.plan.workdir import ELSEWHERE
    from routed.settings.tree import flatten
    from routed.system import hosts

    hosts.join(coordinator, NUM_PROCESSES.value, PROCESS_ID.value, JOIN_SECONDS.value)
    # Run keys ignore checkpoint settings, but all processes must agree on them.
    settings = {key: value for key, value in flatten(command.config).items() if key not in ELSEWHERE}
    hosts.require_equal(
        "command",
        ([run.key for run in command.runs], settings, TRACKER.value, PROFILE.value),
        "give every process the same command and the same code",
    )


def _describe_topology(command: Command) -> None:
    """Prints memory, time and price of the runs on the chips of --topology.

    Raises:
      UserError: no such topology.
    """
    from routed.aot import dry_run
    from routed.aot.topology import topology_of
    from routed.engine import devices

    target = topology_of(TOPOLOGY.value)
    mesh = devices.make_mesh(command.config, target.devices)
    files.tell(dry_run.describe(command.runs, mesh, target))


def _dry_run(command: Command) -> None:
    """Prints points, groups, memory and estimated time of the runs on this machine."""
    from routed.aot import this_machine
    from routed.engine import sharing
    from routed.system import hosts

    text = this_machine.describe(command.runs, sharing.mesh_of(command.config, command.runs))
    hosts.once(lambda: files.tell(text))


def _run(command: Command) -> None:
    """Runs everything that the workdir lacks, and writes its report.

    Raises:
      UserError: the workdir has results of another command, or cannot be written; the user interrupted.
    """
    from routed.analysis import page
    from routed.engine import batches, devices, execution, results, sharing, trackers
    from routed.plan import experiment
    from routed.plan.workdir import default_workdir
    from routed.system import hosts
    from routed.trace import from_runs

    trackers.check(TRACKER.value)
    runs, config = command.runs, command.config
    mesh = sharing.mesh_of(config, runs)
    source = experiment.portable_spec(command.spec)
    workdir = files.folder(WORKDIR.value or default_workdir(source, config, _OVERRIDES, SWEEP.value, SHARD.value))
    with contextlib.ExitStack() as stack:
        hosts.once(lambda: stack.enter_context(files.locked(workdir)))
        hosts.once(lambda: stack.enter_context(log_file.copied_log(workdir)))
        devices.keep_programs(workdir)
        text, sweep = shlex.join(sys.argv[1:]), command.sweep
        log.info("%s: %d points, %d runs, workdir %s", text, len(sweep), len(runs), workdir)
        sharing.log_shared(config, mesh)
        start = time.monotonic()
        table = hosts.first_process_first(lambda: results.open_workdir(workdir, source, config, sweep, SHARD.value))
        advice = "several hosts need one folder that all see, on the network or in a bucket"
        hosts.require_equal("workdir", results.described(workdir), advice)
        early = functools.partial(page.write_unfinished, workdir, command.module, config)
        watching = batches.Watching(TRACKER.value, PROFILE.value)
        table = execution.execute(runs, table, workdir, mesh, None if SHARD.value else early, watching)
        if config.trace.every:
            hosts.once(lambda: from_runs.write(workdir, runs))
        if SHARD.value:
            form = "part %s is done in %.0f s; python -m routed.report DIR... joins all parts"
            log.info(form, SHARD.value, time.monotonic() - start)
        else:
            _write_report(command, workdir, table)
            log.info("finished in %.0f s; open %s", time.monotonic() - start, workdir / "report.html")
    if len(table) and (table.status == "diverged").any():
        sys.exit(signals.DIVERGED)


def _write_report(command: Command, workdir: pathlib.Path, table: pd.DataFrame) -> None:
    """Writes the report of a finished run, and prints its summary."""
    from routed.analysis import page
    from routed.system import hosts

    summaries: list[str] = []
    with files.explained(workdir / "report.html"):
        hosts.once(lambda: summaries.append(page.write(workdir, command.module, command.config, table)))
    hosts.once(lambda: files.tell(*summaries))


def run() -> None:
    """Entry point."""
    commands.start(main, parse_flags)


if __name__ == "__main__":
    run()
