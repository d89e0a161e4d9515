"""The rooms of the house, in reading order: imports go one way, so that the package can be read from top to bottom."""

import ast
import pathlib
import re

import jax.numpy as jnp
import jaxtyping
import pytest

from routed.layer.auxiliary import z
from tests.conftest import CHECKED

ROOT = pathlib.Path(__file__).parent.parent / "src" / "routed"
PAGE = pathlib.Path(__file__).parent.parent / "docs" / "architecture.md"

#: A module may import from its own room and from those before it.
ROOMS = (
    "contracts",
    "system",
    "settings",
    "metrics",
    "tasks",
    "kernels",
    "routers",
    "experts",
    "layer",
    "models",
    "training",
    "plan",
    "engine",
    "analysis",
    "papers",
    "trace",
    "suite",
)
#: What a user starts: each may import any room, and none another of them.
COMMANDS = ("main", "report", "predict", "bench")


def room_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_rooms(path):
    """The rooms that a module imports from anywhere in it, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "routed":
            parts = (node.module or "").split(".")
            yield from parts[1:2] or [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("routed."))


MODULES = [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]


def test_every_module_is_in_a_room():
    assert {room_of(path) for path in MODULES} == {*ROOMS, *COMMANDS}


@pytest.mark.parametrize("room", [*ROOMS, *COMMANDS])
def test_a_room_imports_only_rooms_before_it(room):
    allowed = {*ROOMS[: ROOMS.index(room)], room} if room in ROOMS else {*ROOMS, room}
    for path in MODULES:
        if room_of(path) == room:
            assert {*imported_rooms(path)} <= allowed, path


def test_a_paper_is_imported_by_experiments_and_tools_alone():
    """The core knows no paper, and a paper knows no other one."""
    for path in MODULES:
        if room_of(path) != "papers":
            assert room_of(path) in COMMANDS or "papers" not in {*imported_rooms(path)}, path
        else:
            own = path.relative_to(ROOT / "papers").parts[0]
            other = [name for name in re.findall(r"routed\.papers\.(\w+)", path.read_text()) if name != own]
            assert other == [], path


def test_the_page_names_the_rooms_in_this_order():
    lines = [line.split("`")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert [
        name.rstrip("/").removesuffix(".py") for name in lines if name.rstrip("/").removesuffix(".py") in ROOMS
    ] == [*ROOMS]


def test_files_say_what_they_are_for():
    for path in MODULES:
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_only_one_module_asks_for_the_platform_of_the_host():
    asking = [path.name for path in ROOT.rglob("*.py") if "default_backend" in path.read_text(encoding="utf-8")]
    assert asking == ["platform.py"]


def test_shapes_are_checked_in_every_room_that_has_arrays():
    assert {room_of(path) for path in MODULES if "jaxtyping" in path.read_text()} == set(CHECKED)
    with pytest.raises(jaxtyping.TypeCheckError, match="Type-check error"):
        z(jnp.ones(3), None)
