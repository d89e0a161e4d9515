"""Runs an experiment file: `python -m routed.main --config=experiments/gmm_router.py[:FIGURE[,SCALE]]`.

The same command again continues an interrupted run, adds what is missing, or prints a complete one's result. Any setting
is changed by --config.KEY=VALUE; any setting is swept by --sweep=KEY=v1,v2,... on top of the experiment's own sweep.
"""

from __future__ import annotations

import logging
import pathlib
import shlex
import sys
import time

from absl import app, flags
from absl import logging as log

from routed.words import UserError

CONFIG = flags.DEFINE_string("config", None, "Experiment file with figure and scale: FILE[:FIGURE[,SCALE]]. Change a setting with --config.KEY=VALUE.")
SWEEP = flags.DEFINE_multi_string("sweep", [], "KEY=v1,v2,...: sweep any setting; may be repeated (product).")
WORKDIR = flags.DEFINE_string("workdir", None, "Where everything is written; default runs/NAME[-FIGURE][-SCALE][-KEY=VALUE...].")
DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print points, compiled groups, parameters, memory and estimated time, and stop.")

_OVERRIDES: list[str] = []


def main(argv: list[str]) -> None:
    """The path of a number, from the experiment file to the report."""
    if len(argv) > 1:
        raise UserError(f"unexpected argument {argv[1]!r}: settings are changed with --config.KEY=VALUE")
    if not CONFIG.value:
        raise UserError("--config is missing: name an experiment, e.g. --config=experiments/gmm_router.py")
    from routed import experiment, layout

    layout.split_host()  # before anything asks JAX for its devices
    from routed import execute, files, points, report, results, validate

    module, config, overrides = experiment.configure(CONFIG.value, _OVERRIDES)
    sweep = points.cross(module.get_sweep(config), points.from_flag(config, SWEEP.value))
    validate.validate(config)
    runs = points.plan(config, sweep)
    mesh = layout.make_mesh(config)
    if DRY_RUN.value:
        print(execute.describe(runs, mesh))
        return
    workdir = pathlib.Path(WORKDIR.value or default_workdir(config, overrides + SWEEP.value))
    logging.getLogger("jax").setLevel(logging.WARNING)  # it reports each accelerator that is not there
    with files.locked(workdir):
        _log_to(workdir)
        log.info("%s: %d points, %d runs, workdir %s", shlex.join(sys.argv[1:]), len(sweep), len(runs), workdir)
        start = time.monotonic()
        table = results.open_workdir(workdir, CONFIG.value, config, sweep)
        table = execute.execute(runs, table, workdir, mesh)
        print(report.write(workdir, module, config, table))
        log.info("finished in %.0f s; open %s", time.monotonic() - start, workdir / "report.html")


def default_workdir(config, overrides: list[str]) -> str:
    """runs/NAME[-FIGURE][-SCALE][-KEY=VALUE...]."""
    parts = [config.name, config.figure, config.scale if config.scale != "default" else "", *overrides]
    return "runs/" + "-".join(part.replace("/", "_") for part in parts if part)


def _log_to(workdir: pathlib.Path) -> None:
    """Copies the log into the workdir."""
    handler = logging.FileHandler(workdir / "routed.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.get_absl_logger().addHandler(handler)


def parse_flags(argv: list[str]) -> list[str]:
    """Takes --config.KEY=VALUE out of the command line, and leaves the rest to absl.

    Raises:
      UserError: an unknown flag, or a value of the wrong type.
    """
    rest, position = [], 0
    _OVERRIDES.clear()
    while position < len(argv):
        text = argv[position]
        position += 1
        if not text.startswith(("--config.", "-config.")):
            rest.append(text)
            continue
        setting = text.split("config.", 1)[1]
        if "=" not in setting and position < len(argv) and not argv[position].startswith("--"):
            setting, position = f"{setting}={argv[position]}", position + 1
        _OVERRIDES.append(setting)
    try:
        return flags.FLAGS(rest, known_only=False)
    except flags.Error as error:
        raise UserError(f"{str(error).splitlines()[0]}; see --help") from None


def run() -> None:
    """Entry point: what the user caused ends in one line and exit code 2."""
    log.use_absl_handler()
    log.set_verbosity(log.INFO)
    log.get_absl_handler().setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    try:
        app.run(main, flags_parser=parse_flags)
    except UserError as error:
        log.error("error: %s", error)
        sys.exit(2)


if __name__ == "__main__":
    run()
