"""Makes a score card for a router: its abilities and limits, beside its frozen self and reference routers.

    routed suite my_router.py:shortened             (or python -m routed.suite ...; --quick first)
    routed suite linear
    routed suite --reference[=NAME,...]

A router is a built-in name, or FILE.py:NAME: a key that the file adds to ROUTERS, a Router, or a class of Flax modules
that takes the number of experts alone. --config.router.KEY=VALUE changes its settings. The same command continues an
earlier one. The workdir gets card.html and card.json. docs/suite.md explains the meaning and the limits of each score.
"""

from __future__ import annotations

import functools
import pathlib
import sys
import time

from routed.system import signals

if __name__ == "__main__":
    signals.end_on_signals()  # before the other imports, which take seconds

from absl import flags
from absl import logging as log

from routed.contracts import UserError
from routed.system import commands, files

QUICK = flags.DEFINE_bool(
    "quick", False, "Half of the probes, fewer seeds and steps, no tuning: a first look in a minute. Not comparable."
)
WORKDIR = flags.DEFINE_string(
    "workdir", None, "Where everything is written; default runs/suite-ROUTER.", allow_override=True
)
REFERENCE = flags.DEFINE_string(
    "reference",
    None,
    "NAME,...: make the cards of these built-in routers (all: of every one that fits), below runs/, and put their"
    " scores into the reference of this installation.",
)

_OVERRIDES: list[str] = []


def main(argv: list[str]) -> None:
    """Makes one card, or the cards of the reference."""
    specs = argv[1:]
    if REFERENCE.value is not None:
        if specs or QUICK.value or WORKDIR.value or _OVERRIDES:
            raise UserError("--reference=NAME,... makes whole cards of built-in routers in runs/: drop everything else")
        return _reference(REFERENCE.value)
    if len(specs) != 1:
        raise UserError("name one router: routed suite FILE.py:NAME, or a built-in name; see routed suite --help")
    if _card(specs[0], QUICK.value, WORKDIR.value)["diverged"]:
        sys.exit(signals.DIVERGED)


def _card(spec: str, quick: bool, workdir: str | None = None) -> dict:
    """Writes a router's card as card.json and card.html, prints its table, and returns it."""
    # Here, since --help needs none of it, and JAX and the rest take seconds.
    from routed.engine import devices

    devices.split_host()
    from routed.suite import card, reference, run, subject

    router, start = subject.find(spec, _OVERRIDES, quick), time.monotonic()
    folder = files.folder(workdir or pathlib.Path("runs") / subject.folder_name(spec, _OVERRIDES, quick))
    with files.locked(folder):
        content = run.make(router, quick, folder)
        stored = reference.read()
        files.write(folder / "card.html", card.page(content, stored, spec))
    files.tell(card.as_text(content, stored))
    log.info("finished in %.0f s; open %s", time.monotonic() - start, folder / "card.html")
    return content


def _reference(names: str) -> None:
    from routed.engine import devices

    devices.split_host()
    from routed.suite import reference, subject

    fitting = subject.fitting()
    routers = fitting if names == "all" else names.split(",")
    for name in routers:
        if name not in fitting:
            raise UserError(
                f"--reference={name}: not a built-in router of rows of numbers; known: {', '.join(fitting)}, all"
            )
    for name in routers:
        reference.add(_card(name, quick=False))
        files.tell(f"wrote {reference.FILE}: {name}")


def run() -> None:
    """Entry point."""
    alone = {"reference": "all"}
    parse = functools.partial(commands.parse_flags, module=sys.modules[__name__], overrides=_OVERRIDES, alone=alone)
    commands.start(main, parse)


if __name__ == "__main__":
    run()
