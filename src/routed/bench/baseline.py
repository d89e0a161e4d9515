"""Commands of the user's that are timed in turn with ours."""

from __future__ import annotations

import re
import shlex
import subprocess

from routed.contracts import UserError


def lines(command: str, pattern: str, form: str) -> list[tuple[str, ...]]:
    """The groups of every line of what `command` prints that matches `pattern`; `form` says in words what is expected.

    Raises:
      UserError: it failed, or printed no such line.
    """
    done = subprocess.run(shlex.split(command), capture_output=True, encoding="utf-8")
    found = re.findall(f"(?m)^{pattern}", done.stdout)
    if done.returncode or not found:
        raise UserError(f"--baseline={command}: exit code {done.returncode}, expected lines {form}")
    return found
