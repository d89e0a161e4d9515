"""What SIGINT and SIGTERM do outside of training: one line and exit code 130, whatever is under way.

By no exception: one that comes in the middle of an import is taken for an error of what is imported, and one that passes through
code that Python has just compiled (every named tuple has some) lets the interpreter end by the signal, whoever caught it.
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


def end_on_signals() -> None:
    """From now on; while runs train, `execute` takes both signals."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


def end(number: int = 0, frame: object = None) -> NoReturn:
    """Ends the process at once. What it leaves is what a kill leaves: every file is whole or absent."""
    del number, frame
    line = f"{time.strftime('%H:%M:%S')} interrupted: the same command goes on from what is saved\n"
    with contextlib.suppress(OSError):
        os.write(2, line.encode())
    os._exit(INTERRUPTED)


@atexit.register  # when this file is loaded, before others, so that it comes after what they do at the end, which may be interrupted
def _ignore_at_the_end() -> None:
    """Where Python takes handlers away, a signal would end a command that is over by the signal, whatever it had to say."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is end:
            signal.signal(number, signal.SIG_IGN)
