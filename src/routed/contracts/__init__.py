"""The contracts between rooms: the error for users, and the data that flows, which needs JAX (`contracts/data.py`)."""

import difflib
import importlib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from routed.contracts.data import *  # noqa: F403


class UserError(Exception):
    """Something the user can mend: shown as one line, without a traceback, with exit code 2.

    What is longer than anybody reads is cut: a word (a value, a path) of more than 240 characters, a line of more than
    1,500.
    """

    def __init__(self, text: str):
        super().__init__(_cut(re.sub(r"\S{241,}", lambda word: _cut(word[0], 240), text), 1500))


def _cut(text: str, most: int) -> str:
    """Returns both ends of a text that is longer than `most` characters."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}...{text[-most // 4 :]} ({len(text):,} characters)"


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns a hint for a misspelt name; empty if no name is similar."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def __getattr__(name: str) -> Any:
    """Loads a name of `data` at its first use: JAX takes a second to load, and `--help` needs none of it."""
    return getattr(importlib.import_module("routed.contracts.data"), name)
