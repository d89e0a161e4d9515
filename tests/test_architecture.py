"""The rooms of the house, in reading order: imports go one way, so that the package can be read from top to bottom."""

import ast
import json
import pathlib
import re
import subprocess
import sys

import jax.numpy as jnp
import jaxtyping
import pytest

from routed.layer.auxiliary import z
from tests.conftest import CHECKED
from tests.patience import PATIENCE

HOME = pathlib.Path(__file__).parent.parent
ROOT = HOME / "src" / "routed"
PAGE = HOME / "docs" / "architecture.md"

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
TOOLS = {"publish": (), "trace": (), "suite": (), "aot": (), "bench": ("aot", "trace")}
#: Commands of a user: each may import any room and tool, and none another of them.
COMMANDS = ("main", "report", "predict", "notebook")


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
    """The core knows no paper, and a paper knows no other one, but what lies beside their folders."""
    for path in MODULES:
        if room_of(path) != "papers":
            assert room_of(path) in (*COMMANDS, *TOOLS) or "papers" not in {*imported_rooms(path)}, path
        else:
            own = {path.relative_to(ROOT / "papers").parts[0], *(one.stem for one in (ROOT / "papers").glob("*.py"))}
            other = [name for name in re.findall(r"routed\.papers\.(\w+)", path.read_text()) if name not in own]
            assert other == [], path


#: Prints the names of the core's parts that an experiment may choose, by kind, without the defaults of a config.
PARTS = """
import json
from routed.analysis import claims, plots
from routed.plan import arms, config
from routed.tasks import image_files
tables = {key: set(choice.parts) - {choice.default} for key, choice in config.CHOICES.items()}
tables |= {"arm": arms.ARMS, "chart": plots.PLOTS, "claim": claims.KINDS, "images": image_files.SETS}
print(json.dumps({kind: sorted(names) for kind, names in tables.items()}))
"""

#: Parts that one experiment uses, and stay: the page that offers them to users, or the reason.
GENERIC = {
    "method.md": {  # controls of any experiment on samples or text
        "frozen_as_sharp", "hash_bigram", "kmeans_as_sharp", "kmeans_fitted", "kmeans_online", "learned_top1_balanced",
        "learned_top2", "learned_top2_balanced", "oracle_language", "self_routed", "transplant",
    },
    # The layer as a library.
    "layer.md": {"expert_choice", "group_limited", "hash_id", "jitter", "sinkhorn"},
    "figures.md": {"against", "forest", "sample"},
    "running.md": {"mc4_jsonl"},
    "read as cifar10 is": {"cifar100"},
    "the schedule of T5, beside the other schedules": {"rsqrt"},
}  # fmt: skip


def words_of(path):
    """The strings of a file that may name a part, and attributes, which name kinds of claims, but for `jax.lax`'s."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    blocks = (ast.Module, ast.FunctionDef, ast.ClassDef)
    docstrings = {ast.get_docstring(node, clean=False) for node in nodes if isinstance(node, blocks)}
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    texts = [text for text in texts if text not in docstrings]
    named = {word for text in texts for word in re.findall(r"=(\w+)", text)}  # settings in phases
    attributes = [node for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "jax.lax"]
    return {*texts, *named, *(node.attr for node in attributes)}


def test_no_part_of_the_core_is_used_by_one_experiment_alone():
    """Such a part belongs to its paper. A part that the folder of a second paper names has another user."""
    users = {}  # word -> papers and, of experiment files, the file
    for path in [*(HOME / "experiments").glob("*.py"), *(ROOT / "papers").glob("*/*.py")]:
        imported = re.search(r"^import routed\.papers\.(\w+)", path.read_text(), re.MULTILINE)
        user = (imported[1], path.stem) if path.parent.name == "experiments" else (path.parent.name, "")
        for word in words_of(path):
            users.setdefault(word, set()).add(user)
    line = [sys.executable, "-c", PARTS]
    found = subprocess.run(line, capture_output=True, text=True, check=True, timeout=PATIENCE)
    alone = {}
    for kind, names in json.loads(found.stdout).items():
        for name in users.keys() & names:
            papers, files = map(set, zip(*users[name], strict=True))
            if len(papers) == len(files - {""}) == 1:
                alone[name] = f"{kind} {name}: only {files - {''}} uses it"
    offered = set().union(*GENERIC.values())
    assert [text for name, text in alone.items() if name not in offered] == []
    assert offered - alone.keys() == set()  # no exception that is not needed
    for page, names in GENERIC.items():
        if page.endswith(".md"):
            assert [name for name in names if name not in (HOME / "docs" / page).read_text().lower()] == [], page


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
