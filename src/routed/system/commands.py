"""The command `routed`: its commands, and the reading and printing of their flags."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import re
import shutil
import sys
import textwrap
import types
from collections.abc import Callable, Mapping
from typing import NamedTuple

from absl import app, flags
from absl import logging as log

from routed.contracts import UserError
from routed.system import files, signals, supervisor

HELP = {"--help", "-help", "-h"}


#: JAX's own errors of a variable: a platform that is not here, a value that it cannot read.
OF_JAX = re.compile(r"^Unable to initialize backend|for JAX flag |for environment 'JAX_")


class Command(NamedTuple):
    """A word after `routed`: the module whose `run` it calls, its arguments, and a line on its purpose."""

    module: str
    usage: str
    line: str


#: The commands of `routed`; `run` is the default if the first argument is a flag.
COMMANDS = {
    "run": Command("routed.main", "--config=NAME[:FIGURE[,SCALE]]", "runs an experiment and writes its report"),
    "list": Command("routed.main", "[NAME]", "prints the experiments, or the figures, scales and arms of one"),
    "report": Command(
        "routed.report", "DIR... [--out=FILE]", "writes a run's report again, or one report of several runs"
    ),
    "findings": Command("routed.report", "[DIR...]", "prints what runs found, in words, and every verdict"),
    "predict": Command(
        "routed.predict", "[--config.KEY=VALUE]...", "the expected gain of learning to route, by the experiment law"
    ),
    "trace": Command(
        "routed.trace.__main__",
        "report DIR... | import FORMAT PATH --out=DIR | capture | surgery --model=NAME --text=FILE --out=DIR",
        "what the routers of any model decided: a page of its trace, the trace, or its loss with other routers",
    ),
    "suite": Command(
        "routed.suite.__main__", "FILE.py:NAME [--quick]", "a score card for a router, beside its frozen self"
    ),
    "bench": Command("routed.bench.__main__", "NAME [--json=FILE]", "measures how fast this machine is"),
}


def run() -> None:
    """Runs the console command: calls the module of the first word."""
    word, *rest = sys.argv[1:] or ["--help"]
    if word in HELP:
        return files.tell(overview())
    if word.startswith("-"):
        word, rest = "run", sys.argv[1:]
    if word not in COMMANDS:
        print(f"error: unknown command {word!r}; known: {', '.join(COMMANDS)}; see routed --help", file=sys.stderr)
        sys.exit(2)
    if word == "list":
        rest = ["--list", *(text if text.startswith("-") else f"--config={text}" for text in rest)]
    if word == "findings":
        rest = ["--findings", *rest]
    sys.argv = [f"routed {word}", *rest]
    importlib.import_module(COMMANDS[word].module).run()


def overview() -> str:
    """The text of `routed --help`: the purpose of `routed`, its commands, and a first command to try."""
    width = max(len(f"{word} {command.usage}") for word, command in COMMANDS.items())
    lines = [f"  routed {f'{word} {command.usage}':{width}}  {command.line}" for word, command in COMMANDS.items()]
    document = inspect.getdoc(importlib.import_module("routed"))
    more = "Each of them has --help. A first, small run: routed run --config=gmm_router:smoke"
    return "\n".join((document or "", "", *lines, "", more))


def start(main: Callable[[list[str]], None], parse: Callable[[list[str]], list[str]]) -> None:
    """Runs `main` on the arguments that `parse` returns.

    A UserError, or a variable that JAX refuses, ends in one line and exit code 2, an interruption outside of training
    in exit code 130 (`signals`).
    """
    signals.end_on_signals()
    files.accept_any_text()
    log.use_absl_handler()
    log.set_verbosity(log.INFO)
    log.get_absl_handler().setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.get_absl_handler().python_handler.addFilter(_show)  # texts of somebody else's files do not command a terminal
    try:
        app.run(main, flags_parser=parse)
    except Exception as error:
        if not isinstance(error, UserError) and not OF_JAX.search(str(error)):
            if supervisor.MARK not in os.environ:  # which explains the end of its child
                log.error("error: %s: %s", type(error).__name__, str(error).partition("\n")[0])  # above the trace
            raise
        flags.FLAGS.mark_as_parsed()  # else absl adds a line of its own about wrong flags
        log.error("error: %s", " ".join(str(error).split()))
        sys.exit(2)


def _show(record: logging.LogRecord) -> bool:
    """Makes a record printable; JAX's own below warnings, such as that no TPU is here, are not shown."""
    record.msg, record.args = files.shown(record.getMessage()), None
    return record.levelno >= logging.WARNING or not record.name.startswith("jax.")


def parse_flags(
    argv: list[str], module: types.ModuleType, overrides: list[str] | None = None, alone: Mapping[str, str] = {}
) -> list[str]:
    """Sets the flags of `module`, and returns the other arguments; --help prints its docstring and flags, and exits.

    The KEY=VALUE of every --config.KEY=VALUE goes to `overrides`. `alone` has the value of a flag that has none.

    Raises:
      UserError: an unknown flag, or a value of the wrong type.
    """
    if overrides is not None:
        overrides[:], argv = take_overrides(argv)
    for name, value in alone.items():
        argv = [f"--{name}={value}" if text in (f"--{name}", f"-{name}") else text for text in argv]
    if HELP & {*argv}:
        files.tell(help_of(module))
        sys.exit(0)
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        raise UserError(f"{str(error).splitlines()[0]}; see --help") from None


def take_overrides(argv: list[str]) -> tuple[list[str], list[str]]:
    """Separates the KEY=VALUE of every --config.KEY=VALUE (or --config.KEY VALUE) from the other arguments."""
    overrides, rest, position = list[str](), list[str](), 0
    while position < len(argv):
        text = argv[position]
        position += 1
        if not text.startswith(("--config.", "-config.")):
            rest.append(text)
            continue
        setting = text.split("config.", 1)[1]
        if "=" not in setting and position < len(argv) and not argv[position].startswith("--"):
            setting, position = f"{setting}={argv[position]}", position + 1
        overrides.append(setting)
    return overrides, rest


def help_of(module: types.ModuleType) -> str:
    """The help text of a module: its docstring, then its flags with their descriptions, as wide as the terminal."""
    width = min(shutil.get_terminal_size().columns, 100)
    paragraphs = (inspect.getdoc(module) or "").split("\n\n")
    lines = [text if text.startswith(" ") else textwrap.fill(text, width) for text in paragraphs]
    module_flags = flags.FLAGS.get_flags_for_module(module)
    indent = max(len(flag.name) for flag in module_flags) + 6
    texts = [
        textwrap.fill(
            flag.help.partition(";\n")[0],  # after it absl explains flags that may be repeated
            width,
            initial_indent=f"  --{flag.name}".ljust(indent),
            subsequent_indent=" " * indent,
        )
        for flag in module_flags
    ]
    return "\n\n".join([*lines, "\n".join(texts)])
