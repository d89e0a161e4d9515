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

#: Rooms of the core: a module may import from its own room and from those before it, never from a tool.
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
)
#: Tools: each may import the rooms of the core, and these tools.
TOOLS = {"trace": (), "suite": (), "aot": (), "bench": ("aot", "trace")}
#: Commands of a user: each may import any room and tool, and none another of them.
COMMANDS = ("main", "report", "predict")


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
    assert {room_of(path) for path in MODULES} == {*ROOMS, *TOOLS, *COMMANDS}


@pytest.mark.parametrize("room", [*ROOMS, *TOOLS, *COMMANDS])
def test_a_room_imports_only_rooms_before_it_and_the_core_no_tool(room):
    allowed = {room, *(ROOMS[: ROOMS.index(room)] if room in ROOMS else ROOMS)}
    allowed |= {*(TOOLS if room in COMMANDS else TOOLS.get(room, ()))}
    for path in MODULES:
        if room_of(path) == room:
            assert {*imported_rooms(path)} <= allowed, path


def test_a_paper_is_imported_by_experiments_and_tools_alone():
    """The core knows no paper, and a paper knows no other one."""
    for path in MODULES:
        if room_of(path) != "papers":
            assert room_of(path) in (*COMMANDS, *TOOLS) or "papers" not in {*imported_rooms(path)}, path
        else:
            own = path.relative_to(ROOT / "papers").parts[0]
            other = [name for name in re.findall(r"routed\.papers\.(\w+)", path.read_text()) if name != own]
            assert other == [], path


def test_the_page_names_the_rooms_in_this_order():
    lines = [line.split("`")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    named = [name.rstrip("/").removesuffix(".py") for name in lines]
    assert [name for name in named if name in {*ROOMS, *TOOLS}] == [*ROOMS, *TOOLS]


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
