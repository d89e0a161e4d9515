"""The files that the README tells users to write do what it says, and stay under 30 lines."""

import pathlib
import re
import textwrap

import pytest

from routed import routers, tasks
from routed.analysis import page
from routed.engine import execution, results
from routed.engine.devices import make_mesh
from routed.plan import experiment
from routed.plan.experiment import figure_of
from routed.plan.runs import plan_runs
from routed.settings.tree import override

pytestmark = pytest.mark.slow  # processes, or several programs to compile

ROOT = pathlib.Path(__file__).parent.parent


def block(heading):
    """The first indented block below a heading."""
    section = (ROOT / "README.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    return (
        textwrap.dedent(re.search(r"(?:^(?:    .*)?\n)+(?:^    .*\n)", section, re.MULTILINE).group(0)).strip() + "\n"
    )


@pytest.mark.parametrize(
    ("heading", "figure", "swept"),
    [
        ("Add your own router", "fig2c", {"router.slope": 3.0}),
        ("Add your own router", "", {}),
        ("Add your own task", "phase", {"data.inner": 3.0}),
    ],
)
def test_add_your_own(heading, figure, swept, tmp_path, monkeypatch):
    text = block(heading)
    assert len([line for line in text.splitlines() if line.strip()]) <= 30
    monkeypatch.chdir(tmp_path)
    for known in (routers.ROUTERS, tasks.TASKS):  # other tests see what they always saw
        for name in ("distance", "shells"):
            monkeypatch.setitem(known, name, None)
            monkeypatch.delitem(known, name)
    (tmp_path / "mine.py").write_text(text)
    spec = f"{tmp_path / 'mine.py'}:{figure},smoke" if figure else f"{tmp_path / 'mine.py'}:smoke"
    module, config = experiment.configure(spec, [])
    few = {
        "steps": 2,
        "eval_every": 1,
        "data.test_samples": 80,
        "experts.depth": 1,
    }  # of one layer they compile fastest
    config = override(config, few)
    last = figure_of(module, config).sweep(config)[-1] | {"arms": ("learned", "frozen_data")}
    sweep = (last, last | swept) if swept else (last,)
    runs = plan_runs(config, sweep)
    (work := tmp_path / "work").mkdir()
    table = execution.execute(runs, results.open_workdir(work, spec, config, sweep), work, make_mesh(config))
    assert set(table.status) == {"ok"} and page.write(work, module, config, table)
    for key in swept:  # each value has rows of its own
        ends = table[(table.step == 2) & (table.arm == "learned") & (table.seed == table.seed.min())]
        assert ends[key].nunique() == ends["test/loss_soft"].nunique() == 2
