"""Runs started from Python: `routed.run` in a notebook or a script."""

from __future__ import annotations

import pathlib
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from routed.contracts import UserError
from routed.engine.results import load
from routed.plan.experiment import configure, portable_spec
from routed.plan.workdir import default_workdir, texts
from routed.system import files, signals


def run(
    experiment: str | pathlib.Path,
    settings: Mapping[str, Any] | None = None,
    *,
    sweep: Mapping[str, Iterable[Any]] | None = None,
    workdir: str | pathlib.Path | None = None,
) -> dict[str, Any]:
    """Runs an experiment, shows its progress, and returns its tables as `routed.load` does.

    The run has a process of its own, so that an interrupted cell ends it, and the same call continues it.

    Args:
      experiment: NAME[:FIGURE[,SCALE]] or FILE.py[:FIGURE[,SCALE]], as for --config.
      settings: dotted key -> value, as --config.KEY=VALUE.
      sweep: dotted key -> values, as --sweep=KEY=v1,v2,...
      workdir: where everything is written, report.html too; by default runs/NAME..., as the command does.

    Returns:
      The tables of `routed.load`, and `workdir`.

    Raises:
      UserError: no such experiment, an impossible setting or sweep, or a run that failed.
    """
    if not all(isinstance(given, Mapping) for given in (settings or {}, sweep or {})):
        raise UserError("settings and sweep are dicts: {'steps': 20}, and {'steps': [20, 40]}")
    for key, values in (sweep or {}).items():
        if isinstance(values, str) or not isinstance(values, Iterable) or not (values := list(values)):
            raise UserError(f"sweep of {key}: give a list of values, not {values!r}")
        if any(isinstance(value, list | tuple) for value in values):
            raise UserError(f"sweep of {key}: its values are tuples: give them in the sweep of a figure in your file")
    for key, value in [*(settings or {}).items(), *((key, v) for key, of in (sweep or {}).items() for v in of)]:
        if re.search(r"[,'\"()]", "".join(texts(value))):
            raise UserError(f"{key}={value!r}: set texts with commas, quotation marks or brackets in your file")
    spec, overrides = str(experiment), [f"{key}={','.join(texts(value))}" for key, value in (settings or {}).items()]
    sweeps = [f"{key}={','.join(','.join(texts(value)) for value in values)}" for key, values in (sweep or {}).items()]
    _, config = configure(spec, overrides)  # refuses mistakes here, where the caller sees the error
    folder = files.folder(workdir or default_workdir(portable_spec(spec), config, overrides, sweeps, ""))
    options = [f"--config.{text}" for text in overrides] + [f"--sweep={text}" for text in sweeps]
    _execute([sys.executable, "-m", "routed.main", f"--config={spec}", f"--workdir={folder}", *options])
    return load(folder) | {"workdir": folder}


def _execute(command: list[str]) -> None:
    """Runs a command and prints its lines as they come.

    Raises:
      UserError: the command failed; it has the command's last words.
    """
    lines = [""]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8", errors="replace"
    ) as process:
        assert process.stdout
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line.strip() or lines[-1])
        except BaseException:
            process.send_signal(signal.SIGINT)  # the run stores what it has
            raise
    if process.returncode not in (0, signals.DIVERGED):
        text = lines[-1].partition("error: ")[2] or lines[-1]
        raise UserError(f"{text or 'the run failed'} (exit code {process.returncode} of {shlex.join(command)})")
