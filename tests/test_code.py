"""Edited code never stands behind old numbers: a part's code, and how a workdir of other code is refused."""

import json
import sys
import types

import pytest

from routed.layer.auxiliary import AUXILIARY
from routed.metrics.router import METRICS
from routed.plan import code, experiment, experiment_files
from routed.plan.arms import ARMS
from routed.plan.config import base
from routed.plan.runs import plan_runs, read_by
from routed.routers import ROUTERS
from routed.settings.tree import override
from tests.test_command_line import EXPERIMENT, command, describe, refusal

#: A user's file: two routers, one of them made by a function of the file with a constant, and a module beside it.
FILE = '''"""Is it mine?"""

import flax.linen as nn
from beside import sharper
from routed.routers import ROUTERS, Router

DECAY = 0.5
POWERS = {}
POWERS["mine"] = 2


def halved(x):  # by the constant
    return DECAY * x


class Mine(nn.Module):
    """A router."""

    experts: int

    @nn.compact
    def __call__(self, x, **context):
        """Scores."""
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[1], self.experts))
        return sharper(halved(x) @ kernel) ** POWERS["mine"]


class Other(Mine):
    def __call__(self, x, **context):
        return -super().__call__(x)


ROUTERS["mine"] = Router(lambda own, experts: Mine(experts))
ROUTERS["other"] = Router(lambda own, experts: Other(experts))
'''
BESIDE = '''"""Helps."""

from math import pi

import further


def sharper(scores):
    return scores * further.times
'''
FURTHER = "times = 3\n"


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with the experiment my.py and the modules that it imports; tables are as before afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(experiment_files, "LOADED", loaded := {})
    monkeypatch.setattr(code, "LOADED", loaded)
    for table in (ROUTERS, METRICS, AUXILIARY):
        for name in ("mine", "other", "router/mine"):
            monkeypatch.setitem(table, name, None)
            monkeypatch.delitem(table, name)
    write(tmp_path)
    yield tmp_path
    for name in ("beside", "further"):
        sys.modules.pop(name, None)


def write(folder, old="", new="", name="my.py"):
    """The three files, `old` replaced by `new` in one of them."""
    whole = (
        EXPERIMENT.format(name="my")
        .split('"""\n', 1)[1]
        .replace('"experts.name"', '"router.name": "mine", "experts.name"')
    )
    for file, text in (("my.py", FILE + whole), ("beside.py", BESIDE), ("further.py", FURTHER)):
        assert file != name or old in text
        (folder / file).write_text(text.replace(old, new) if file == name else text)


def loaded(folder, router="mine"):
    """(code of a run with the router, and the key of one)."""
    for name in ("beside", "further"):
        sys.modules.pop(name, None)
    _, config = experiment.configure(str(folder / "my.py"), [f"router.name={router}"])
    return code.code_of(config), plan_runs(config, ())[0].key


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("my.py", "  # by the constant", "  # another remark"),
        ("my.py", "return DECAY * x", "return (DECAY*\n        x)"),
        ("my.py", '    """A router."""\n', ""),
        ("my.py", '"""Scores."""', '"""Scores of tokens."""'),
        ("my.py", "Is it mine?", "Is it yours?"),
        ("my.py", "Learned against frozen", "In other words"),
        ("my.py", '"tiny.claim", "s"', '"tiny.claim", "another statement"'),
        ("my.py", "FIGURES = {", "import json\nFIGURES = {"),
        ("my.py", "-super()", "-2 * super()"),
        ("my.py", 'ROUTERS["other"] =', 'ROUTERS["third"] = ROUTERS["other"] ='),
        ("my.py", "import ROUTERS, Router", "import ROUTERS, Flat, Router"),
        ("my.py", "import flax", "import json\nimport flax"),
        ("beside.py", '"""Helps."""', ""),
    ],
)
def test_what_does_not_count(files, name, old, new):
    before = loaded(files)
    write(files, old, new, name)
    assert loaded(files) == before and set(before[0]) == {"router.name=mine"}
    ROUTERS.pop("third", None)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("my.py", "DECAY = 0.5", "DECAY = 0.25"),
        ("my.py", "return DECAY * x", "return DECAY + x"),
        ("my.py", "lecun_normal()", "ones"),
        ("my.py", 'POWERS["mine"] = 2', 'POWERS["mine"] = 3'),
        ("my.py", "lambda own, experts: Mine(experts))", "lambda own, experts: Mine(experts), learns=False)"),
        ("my.py", "from beside import sharper", "from beside import sharper as sharpest, sharper"),
        ("beside.py", "scores * further", "scores + further"),
        ("further.py", "times = 3", "times = 4"),
    ],
)
def test_what_counts(files, name, old, new):
    (before, key), _ = loaded(files), write(files, old, new, name)
    (after, other), label = loaded(files), "router.name=mine"
    if "sharpest" in new:  # the same function by the same name
        assert (after, other) == (before, key)
        return
    assert key != other
    assert code.change(label, before[label], after[label]) == f"{label} ({name})"


def test_parts_of_a_file_do_not_depend_on_each_other_and_inherit(files):
    before = loaded(files, "other")[0]["router.name=other"]
    assert set(before) == {"my.py", "beside.py", "further.py"}
    write(files, "-super()", "-2 * super()")
    assert loaded(files, "other")[0]["router.name=other"]["my.py"] != before["my.py"]
    write(files, "DECAY = 0.5", "DECAY = 0.25")
    assert loaded(files, "other")[0]["router.name=other"]["my.py"] != before["my.py"]


def test_a_module_that_a_function_imports_counts_before_it_is_loaded(files):
    lazily = "return DECAY * x * __import__('math').pi"
    write(files, "return DECAY * x", f"from lazy import times\n    {lazily} * times")
    (files / "lazy.py").write_text("times = 1\n")
    before = loaded(files)
    (files / "lazy.py").write_text("times = 30\n")
    assert "lazy" not in sys.modules and loaded(files)[1] != before[1]


def test_a_file_imports_modules_beside_it_from_any_folder(files, monkeypatch):
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != str(files)])
    monkeypatch.chdir(files.parent)
    assert loaded(files)[0]["router.name=mine"].keys() == {"my.py", "beside.py", "further.py"}


def test_a_part_made_in_a_loop_and_one_that_another_file_loads(files):
    """A loop is the code of any part; also that of a file that the experiment loads."""
    loop = 'for name, make in {"mi" + "ne": Mine}.items():\n'
    loop += "    ROUTERS[name] = Router(lambda own, n, make=make: make(n))\n"
    write(files, 'ROUTERS["mine"] = Router(lambda own, experts: Mine(experts))\n', loop)
    before, _ = loaded(files)
    write(
        files, 'ROUTERS["mine"] = Router(lambda own, experts: Mine(experts))\n', loop.replace("make(n)", "make(2 * n)")
    )
    assert loaded(files)[0] != before
    (files / "outer.py").write_text(
        'from routed.plan import experiment, override\n\nmy = experiment.load("my.py")\nFIGURES = my.FIGURES\n'
        'get_config = lambda arg=None: override(my.get_config(arg), {"name": "outer"})\n'
    )
    write(files)
    inside, _ = loaded(files)
    experiment_files.LOADED.clear()
    assert code.code_of(experiment.configure(str(files / "outer.py"), [])[1]) == inside


def test_packaged_parts_and_losses_that_do_not_count_have_no_code(files):
    config = override(base(), {"losses.balance": 0.1})
    assert code.code_of(config) == {}
    # Two problems have a model `moe`: the code of the second was every loop of every loaded file.
    assert code.code_of(override(base(), {"data.name": "dialects"})) == {}
    write(
        files,
        "DECAY = 0.5",
        'from routed.layer.auxiliary import AUXILIARY, Auxiliary\nAUXILIARY["mine"] = Auxiliary(lambda gate: 0.0, '
        '"none")',
    )
    (files / "my.py").write_text((files / "my.py").read_text().replace("DECAY * x", "x"))
    experiment.load(str(files / "my.py"))
    assert code.code_of(base()) == {}
    assert set(code.code_of(override(base(), {"losses.mine": 0.1}))) == {"loss mine"}


def test_what_an_arm_is_counts_and_how_it_looks_does_not(files, monkeypatch):
    """Rows of an arm that was something else would stand beside new ones of the same name."""
    config = override(base(), {"arms": ("frozen_sharp",)})
    before, key = read_by(config, ())[1]["arm frozen_sharp"], plan_runs(config, ())[-1].key
    arm = ARMS["frozen_sharp"]
    monkeypatch.setitem(ARMS, "frozen_sharp", arm._replace(label="another", colour="#000000", fair=False))
    assert read_by(config, ())[1]["arm frozen_sharp"] == before and plan_runs(config, ())[-1].key == key
    for other in (
        arm._replace(match=arm.match._replace(metric="router/entropy_token")),
        arm._replace(changes={"router.frozen": True, "router.init_scale": 2.0}),
    ):
        monkeypatch.setitem(ARMS, "frozen_sharp", other)
        after = read_by(config, ())[1]["arm frozen_sharp"]
        assert code.change("arm frozen_sharp", before, after) == "arm frozen_sharp (ARMS)"
        assert {run.key for run in plan_runs(config, ()) if run.arm == "frozen_sharp"}.isdisjoint({key})


def test_digests_know_no_names_of_files():
    assert code.change("a", {"x.py": "1", "y.py": "2"}, {"z.py": "1", "y.py": "2"}) == ""
    assert code.change("a", {"x.py": "1", "y.py": "2"}, {"x.py": "1", "y.py": "3"}) == "a (y.py)"
    assert code.change("a", {"x.py": "1", "y.py": "2"}, {"x.py": "1"}) == "a (x.py)"  # y.py is no longer read


@pytest.mark.slow
def test_a_workdir_of_other_code_is_refused_by_name(files, monkeypatch, capsys):
    small = [
        f"--config={files / 'my.py'}",
        "--workdir=work",
        "--config.steps=10",
        "--config.seeds=1",
        "--config.mesh.run=1",
    ]
    command(*small)
    whole = capsys.readouterr().out
    stored = json.loads((files / "work" / "config.json").read_text())["code"]
    assert set(stored) == {"router.name=mine", "arm learned", "arm frozen"}
    assert set(stored["router.name=mine"]) == {"my.py", "beside.py", "further.py"}
    for old, new, name, words in (
        (
            "DECAY = 0.5",
            "DECAY = 0.25",
            "my.py",
            "other code of router.name=mine (my.py): choose another --workdir, or undo the edit",
        ),
        ("times = 3", "times = 4", "further.py", "other code of router.name=mine (further.py)"),
    ):
        write(files, old, new, name)
        assert words in refusal(*small)
    write(files, '"tiny.claim", "s"', '"tiny.claim", "reworded"')
    command(*small)
    said = capsys.readouterr().out
    assert said == whole.replace("tiny.claim: s", "tiny.claim: reworded").replace("Open: s", "Open: reworded")
    monkeypatch.setattr("routed.engine.results.VERSION", "9.9")
    assert f"holds results of routed {code.VERSION}, this is 9.9: choose another --workdir, or install" in refusal(
        *small
    )
    monkeypatch.undo()
    monkeypatch.chdir(files)
    describe(files / "work", lambda content: content | {"format": 2})
    assert "written by another version of routed" in refusal(*small)


@pytest.mark.slow
def test_an_edited_metric_is_refused_and_a_new_one_is_not(files):
    small = [
        f"--config={files / 'my.py'}",
        "--workdir=work",
        "--config.steps=10",
        "--config.seeds=1",
        "--config.mesh.run=1",
    ]
    command(*small, "--config.router.name=linear")
    metric = (
        "from routed.contracts import Column\nfrom routed.metrics.router import METRICS, Metric\n"
        'METRICS["router/mine"] = Metric(lambda gate: gate.probs.max(), Column("largest"))\n\nDECAY = 0.5'
    )
    write(files, "DECAY = 0.5", metric)
    command(*small, "--config.router.name=linear")
    write(files, "DECAY = 0.5", metric.replace("max()", "min()"))
    assert "other code of metric router/mine (my.py)" in refusal(*small, "--config.router.name=linear")


@pytest.mark.parametrize("folder", ["lib/python3.11/site-packages", "dist-packages"])
def test_packages_of_another_environment_are_no_code_of_a_part(files, monkeypatch, folder):
    """A .pth file, PYTHONPATH or the system's Python may add packages of other environments."""
    (files / folder).mkdir(parents=True)
    for name in ("beside.py", "further.py"):
        (files / name).rename(files / folder / name)
    monkeypatch.syspath_prepend(files / folder)
    assert set(loaded(files)[0]["router.name=mine"]) == {"my.py"}


def test_a_compiled_module_is_no_code_of_a_part(files, monkeypatch):
    fast = types.ModuleType("fast")
    fast.__file__ = str(files / "fast.so")
    (files / "fast.so").write_bytes(b"\xf8\x00")
    monkeypatch.setitem(sys.modules, "fast", fast)
    write(files, "import further", "import fast\nimport further", "beside.py")
    assert set(loaded(files)[0]["router.name=mine"]) == {"my.py", "beside.py", "further.py"}
