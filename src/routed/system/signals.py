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


class Interruptions:
    """A context in which SIGINT and SIGTERM set a flag, which runs check regularly; a second SIGINT stops at once.

    A second SIGTERM does not: schedulers send it to every process of a group, and a parent passes it on.
    """

    def __enter__(self):
        self.caught = False
        self.original = {s: signal.signal(s, self._catch) for s in (signal.SIGINT, signal.SIGTERM)}
        return lambda: self.caught

    def __exit__(self, *error):
        for number, handler in self.original.items():
            signal.signal(number, handler)

    def _catch(self, number, frame):
        if self.caught and number == signal.SIGINT:
            if callable(handler := self.original[number]):
                handler(number, frame)
            raise KeyboardInterrupt  # a process in the background begins with SIGINT ignored
        self.caught = True
        # Not the log: a handler may interrupt the log's own writing, which must not be entered twice.
        start = "\n" if os.isatty(2) else ""  # below the progress bar
        os.write(2, f"{start}{signal.Signals(number).name}: saving after the steps under way\n".encode())
