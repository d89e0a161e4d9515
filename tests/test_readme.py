"""The README and the pages of docs/ can be trusted: links lead somewhere, commands plan, named files are there."""

import inspect
import pathlib
import re
import shlex

import numpy as np
import pytest

from routed.plan import arms, experiment, points
from routed.plan.runs import plan_runs
from tests.test_law import command as predict_command

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "launch" / "README.md", *sorted(ROOT.glob("docs/**/*.md")), ROOT / "BUILD_NOTES.md"]
#: Commands of our own experiments, wherever they stand in an indented line, without what a shell does with them.
COMMAND = re.compile(r"^    (?:.*&& )?(?:\$P|\.venv/bin/python -m routed\.main|routed run) (--config=experiments/.*)")
COMMANDS = sorted(
    {
        found.group(1).removesuffix("\\").partition(" #")[0].strip()
        for page in PAGES
        for line in page.read_text().splitlines()
        if (found := COMMAND.match(line))
    }
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_page_is_linked_from_the_readme():
    text = PAGES[0].read_text()
    assert [
        page for page in PAGES[1:] if f"({page.relative_to(ROOT)})" not in text and page.parent == ROOT / "docs"
    ] == []


def test_the_readme_is_one_screen():
    text = PAGES[0].read_text()
    assert len(text.splitlines()) <= 90 and len(text.split()) < 1000


def test_every_arm_is_explained():
    """Those of the package; an experiment file explains its own."""
    text = (ROOT / "docs" / "method.md").read_text()
    sources = [inspect.getsource(arms), *(path.read_text() for path in (ROOT / "src/routed/papers").rglob("*.py"))]
    own = set(re.findall(r'^(?:    "|ARMS\[")(\w+)"(?:: |\] = )Arm\(', "\n".join(sources), re.MULTILINE))
    assert len(own) > 40 and own <= set(arms.ARMS)
    assert [name for name in own if f"`{name}`" not in text] == []


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_pages_plans(line):
    """Its figure, its settings and its sweep are known, and make runs; no data are read for it."""
    flags = [word for word in shlex.split(line) if word.startswith("--")]
    spec = flags[0].removeprefix("--config=")
    given = [flag.removeprefix("--config.") for flag in flags if flag.startswith("--config.")]
    swept = [flag.removeprefix("--sweep=") for flag in flags if flag.startswith("--sweep=")]
    module, config = experiment.configure(str(ROOT / spec), given)
    figure = experiment.figure_of(module, config)
    last = lambda config: figure.sweep(config)[-1:]  # noqa: E731
    keys = [key.partition("=")[0] for key in given]
    assert plan_runs(
        config,
        points.points_of_command(config, last, keys, swept, figure.computed),
        [flag.partition("=")[0] for flag in swept],
    )


def test_there_are_commands_to_test():
    assert len(COMMANDS) > 12 and "--config=experiments/gmm_router.py" in COMMANDS


def indented(page):
    """The indented lines of a page, without comments."""
    lines = (line for line in page.read_text().splitlines() if line.startswith("    "))
    return [line.partition("  #")[0].strip() for line in lines]


def test_files_that_the_readme_runs_are_on_the_page_that_it_names():
    """Their commands are tested there, in test_docs; a score card is of a router that one of them has."""
    extending = ROOT / "docs" / "extending.md"
    mine = [line for line in indented(PAGES[0]) if line.startswith("$P --config=my_")]
    assert len(mine) == 2
    for line in mine:
        file = line.split()[1].removeprefix("--config=").partition(":")[0]
        assert any(known.startswith("$P --config=" + file) for known in indented(extending)), line
    (card,) = [line for line in indented(PAGES[0]) if "routed suite my_" in line]
    file, _, name = card.split()[-1].partition(":")
    assert f'ROUTERS["{name}"]' in extending.read_text() and f"--config={file}" in extending.read_text()


def test_the_readmes_prediction_is_made(capsys):
    (line,) = [line for line in indented(PAGES[0]) if "routed predict" in line]
    predict_command(*line.split()[2:])
    assert "for a mean over 5 seeds" in capsys.readouterr().out


@pytest.mark.slow
def test_the_readmes_snippet_writes_its_page(tmp_path, monkeypatch):
    """Of 2 layers, 64 tokens and 16 experts, in 8 rows of two languages."""
    monkeypatch.chdir(tmp_path)
    lines = [line for line in indented(PAGES[0]) if line.startswith(("import routed", "routed.analyse"))]
    rng = np.random.default_rng(0)
    given = {"scores": rng.normal(size=(2, 64, 16)).astype(np.float32), "ids": rng.integers(0, 30, 64)}
    rows = np.repeat(np.arange(8), 8)
    exec("\n".join(lines), given | {"rows": rows, "languages": np.array(["de", "en"])[rows % 2]})
    assert (tmp_path / "trace" / "report.html").stat().st_size > 1000
