"""Handlers of SIGINT and SIGTERM outside of training: they print one line and exit with code 130 at any moment.

They exit directly: an exception raised during an import would be reported as an import error, and one that passes
through freshly compiled code (every named tuple has some) makes the interpreter end by the signal, even if it was
caught.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import time
from typing import NoReturn

#: The exit code of a command that was interrupted: 128 + SIGINT.
INTERRUPTED = 130
#: The exit code of a command that finished, and some of whose runs diverged.
DIVERGED = 3


def end_on_signals() -> None:
    """Installs the handlers; while runs train, `execute` replaces them."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


def end(number: int = 0, frame: object = None) -> NoReturn:
    """Ends the process at once. As after a kill, every file is whole or absent."""
    del number, frame
    line = f"{time.strftime('%H:%M:%S')} interrupted: the same command goes on from what is saved\n"
    with contextlib.suppress(OSError):
        os.write(2, line.encode())
    os._exit(INTERRUPTED)


@atexit.register  # this file is loaded first, so that this comes after other exit functions, which may be interrupted
def _ignore_at_the_end() -> None:
    """Ignores both signals while Python ends: a signal would replace the exit code of a finished command."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is end:
            signal.signal(number, signal.SIG_IGN)
