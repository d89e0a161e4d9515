"""No measure of style is worse than what has been reached; the measures count what they say."""

import pathlib

import pytest

from tests import faults, style
from tests.conftest import pytest_report_header


@pytest.mark.parametrize("name", style.LIMITS)
def test_no_measure_of_style_rises(name):
    value, limit = style.measure()[name], style.LIMITS[name]
    assert value <= limit, f"{name}: {value}, limit {limit}; `python tests/style.py` prints all of them"


def counts(tmp_path, monkeypatch, name, text):
    """Returns the counts of a file with this name and text in an empty repository."""
    monkeypatch.setattr(style, "ROOT", tmp_path)
    path: pathlib.Path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return +(style.count_code(path) if name.endswith(".py") else style.count_text(path))


def test_code_is_counted(tmp_path, monkeypatch):
    long = "f(" + ", ".join(f"a{i}" for i in range(9)) + ")"
    text = f'''"""What is it?"""
def {long}:
    """Is it so?"""
    found = [one for one in "key" in config]
    return "key" in {{}}
def f(*, {long[2:-1]}):
    """Adds numbers."""
def _{long.replace("a0", "self")}:
    {"pass; " * 30}
def _f(*, {long[2:-1]}):
    {"pass" + chr(10) + "    " + (chr(10) + "    ").join(["pass"] * 60)}
'''
    assert counts(tmp_path, monkeypatch, "src/routed/suite/x.py", text) == {
        "lines: tools": len(text.splitlines()),
        "code: lines over 120 characters": 1,
        "code: docstrings that begin with a question word": 2,
        "code: names that are pronouns": 2,
        'code: tests `"key" in config`': 1,
        "code: functions over 60 lines": 1,
        "code: functions with more than 8 parameters": 2,
    }
    rooms = {"src/routed/papers/x.py": "papers", "src/routed/bench.py": "tools", "src/routed/main.py": "core"}
    for name, where in (rooms | {"tests/x.py": "tests"}).items():
        assert counts(tmp_path, monkeypatch, name, "found = 1\n")[f"lines: {where}"] == 1


def test_docstrings_of_experiments_are_counted(tmp_path, monkeypatch):
    text = '"""' + "a\n" * 41 + '"""\n'
    assert counts(tmp_path, monkeypatch, "experiments/x.py", text)["experiments: docstrings over 40 lines"] == 1


def test_documents_are_counted(tmp_path, monkeypatch):
    free = ["| " + "a" * 120, "# " + "a" * 120, "    " + "a" * 120, "```", "a" * 120, "```", f"[a]({'b' * 120})"]
    text = "\n".join([*free, "a" * 101, "a " * 20 + "a.", "a " * 29])
    assert counts(tmp_path, monkeypatch, "docs/x.md", text) == {
        "documents: lines over 100 characters": 1,
        "documents: sentences over 28 words": 1,
        "documents: words": len(text.split()),
    }


def test_pytest_prints_the_table_before_the_whole_suite(pytestconfig, monkeypatch):
    monkeypatch.setattr(pytestconfig.option, "file_or_dir", [])
    assert pytest_report_header(pytestconfig) == style.table().splitlines()
    monkeypatch.setattr(pytestconfig.option, "file_or_dir", ["tests/test_style.py"])
    assert pytest_report_header(pytestconfig) is None


def test_each_fault_can_be_planted():
    """Each line of golden/faults.txt holds a text that its file has once, and names test files."""
    for fault in faults.faults():
        assert fault.new != fault.old and all(pathlib.Path(faults.ROOT, name).exists() for name in fault.tests), fault
