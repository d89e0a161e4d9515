"""Plants one fault after another in a copy of the package, and says which tests notice: `python tests/faults.py`.

A line of golden/faults.txt is `FILE: OLD --> NEW [TESTS]`: a text that FILE holds once, the text in its place, and the
test files that should fail. Their fast tests run first, their slow ones where no fast one failed. Arguments choose
lines: texts that they hold, or ranges of numbers, as in `1-40`. `control` runs the test files without a fault.
"""

import dis
import gc
import importlib
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import types
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).parent.parent
LIST = ROOT / "tests" / "golden" / "faults.txt"
#: What tests read of a checkout.
PARTS = ("src", "tests", "experiments", "docs", "launch", "README.md", "BUILD_NOTES.md", "pyproject.toml", ".ci")
#: Seconds after which tests count as failed: the fault has no end.
PATIENCE = 400


class Fault(NamedTuple):
    """An edit of a file of the package, and the tests that should notice."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def faults():
    """Returns all faults of the list; a ValueError names a line of another form, or a text that its file lacks."""
    planned = []
    for line in LIST.read_text().splitlines():
        match = re.fullmatch(r"(\S+): (.+) --> (.*) \[([\w ]+)\]", line)
        if match is None and not line.startswith("#"):
            raise ValueError(f"no fault: {line}")
        if match is not None:
            fault = Fault(*match.groups()[:3], tuple(f"tests/test_{name}.py" for name in match[4].split()))
            if (ROOT / "src" / "routed" / fault.file).read_text().count(fault.old) != 1:
                raise ValueError(f"{fault.file} does not hold this text once: {fault.old}")
            planned.append(fault)
    return planned


def chosen(arguments):
    """Returns (number, fault) of the faults that the arguments name; of all without arguments."""
    spans = [span for argument in arguments if (span := re.fullmatch(r"(\d+)-(\d+)", argument))]
    numbers = {number for span in spans for number in range(int(span[1]), int(span[2]) + 1)}
    listed = [*enumerate(faults(), 1)]
    return [
        (n, fault) for n, fault in listed if not arguments or n in numbers or any(a in str(fault) for a in arguments)
    ]


def swap(file, source):
    """Gives the functions of an imported file the code of a source with equal lines; True if any code changed."""
    codes, waiting, changed = {}, [compile(source, file, "exec")], False
    while waiting:
        code = waiting.pop()
        codes[key_of(code)] = code
        waiting += [part for part in code.co_consts if isinstance(part, types.CodeType)]
    for function in [each for each in gc.get_objects() if isinstance(each, types.FunctionType)]:
        old, new = function.__code__, codes.get(key_of(function.__code__))
        if old.co_filename == file and new is not None and new.co_freevars == old.co_freevars:
            changed |= text_of(old) != text_of(new)
            function.__code__ = new
    return changed


def key_of(code):
    """Returns the name of a code in its file; lambdas have their line too."""
    return code.co_qualname, code.co_firstlineno * ("<lambda>" in code.co_qualname)


def text_of(code):
    """Returns the instructions of a code and of all codes in it."""
    inner = [text_of(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    return inner + [(i.opname, i.argrepr) for i in dis.get_instructions(code) if not hasattr(i.argval, "co_code")]


def fails(tree, tests, marker, path=None):
    """True if a test of the files with this marker fails, in a fork that has imported the package without the fault.

    A fault at `path` outside of functions needs a process of its own.
    """
    line = ["-x", "-q", "-n", "0", "--assert=plain", "-p", "no:cacheprovider", "-m", marker, *tests]
    child = os.fork()
    if not child:
        signal.alarm(PATIENCE)
        with open(tree / "log", "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        try:
            if path is not None and not swap(str(path), path.read_text()):
                os.execv(sys.executable, [sys.executable, "-m", "pytest", *line])
            os._exit(pytest.main(line))
        finally:  # never beyond this fork, whose parent would lose its folder
            traceback.print_exc()
            os._exit(pytest.ExitCode.INTERNAL_ERROR)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
        raise RuntimeError((tree / "log").read_text())
    return status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


def verdict(tree, fault):
    """Returns fast or slow, by the tests that notice a fault, or missed."""
    path = tree / "src" / "routed" / fault.file
    text = path.read_text()
    path.write_text(text.replace(fault.old, fault.new))
    try:
        if fails(tree, fault.tests, "not slow", path):
            return "fast"
        return "slow" if fails(tree, fault.tests, "slow", path) else "missed"
    finally:
        path.write_text(text)


def main(arguments):
    """Prints a line for each fault, and the totals."""
    totals = {"fast": 0, "slow": 0, "missed": 0}
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder)
        for name in PARTS:
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tree / name)
        (cache := ROOT / ".pytest_cache" / "jax").mkdir(parents=True, exist_ok=True)
        (tree / ".pytest_cache").mkdir()
        (tree / ".pytest_cache" / "jax").symlink_to(cache)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree / "src")
        sys.path[:1] = [str(tree), str(tree / "src")]  # in place of this folder
        importlib.import_module("tests.conftest")  # which imports most of the package
        if arguments[:1] == ["control"]:
            for name in arguments[1:] or sorted({name for fault in faults() for name in fault.tests}):
                print(name, "fails" if fails(tree, [name], "not slow") else "passes", flush=True)
            return
        for number, fault in chosen(arguments):
            begun, name = time.monotonic(), verdict(tree, fault)
            totals[name] += 1
            print(f"{number:3d} {name:6} {time.monotonic() - begun:4.0f} s  {fault}", flush=True)
    print(", ".join(f"{count} {name}" for name, count in totals.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
