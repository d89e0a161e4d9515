"""Imports go one way, so that the package can be read top to bottom."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parent.parent / "src" / "routed"

#: Every module may import only from lines above its own (or from its own package).
ORDER = (
    ("words", "supervise"),
    ("config", "files", "hosts"),
    ("data", "routers", "selection", "experts"),
    ("dispatch", "metrics", "feed"),
    ("losses",),
    ("moe",),
    ("soft_moe",),
    ("models",),
    ("train", "arms", "observe"),
    ("run",),
    ("language",),
    ("kinds",),
    ("layout", "rules"),
    ("validate",),
    ("points",),
    ("shard",),
    ("results", "stats", "checkpoint", "machine", "events", "experiment"),
    ("progress",),
    ("advance",),
    ("execute", "diagnosis"),
    ("claims", "dry_run"),
    ("plots",),
    ("report",),
    ("main", "bench"),
)
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}


def test_imports_go_one_way():
    seen = set()
    for path in ROOT.rglob("*.py"):
        relative = path.relative_to(ROOT)
        name = relative.parts[0].removesuffix(".py")
        if name == "__init__":
            continue
        assert name in LEVEL, f"{name}: give it a place in ORDER"
        seen.add(name)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("routed"):
                parts = (node.module or "").split(".")
                targets = [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
                for target in targets:
                    allowed = LEVEL[target] < LEVEL[name] or target == name
                    assert allowed, f"{relative} imports {target}, which comes later"
    assert seen == set(LEVEL)


def test_files_are_short():
    long = {str(p.relative_to(ROOT)): n for p in ROOT.rglob("*.py") if (n := len(p.read_text().splitlines())) > 350}
    assert not long
