"""What the README and the pages of docs/ say can be done: links lead somewhere, commands plan, files are where they are said to be."""

import pathlib
import re
import shlex

import pytest

from routed.plan import experiment, points
from routed.plan.runs import plan_runs

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "launch" / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
#: Commands of our own experiments, without what a shell does with them.
COMMANDS = sorted(
    {
        line.strip().removesuffix("\\").partition(" #")[0].strip()
        for page in PAGES
        for line in page.read_text().splitlines()
        if re.match(r"    (\$P|\.venv/bin/python -m routed\.main|routed run) --config=experiments/", line)
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
    assert len(PAGES[0].read_text().splitlines()) <= 70


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_pages_plans(line):
    """Its figure, its settings and its sweep are known, and make runs; no data are read for it."""
    flags = [word for word in shlex.split(line) if word.startswith("--")]
    spec = flags[0].removeprefix("--config=")
    given = [flag.removeprefix("--config.") for flag in flags if flag.startswith("--config.")]
    swept = [flag.removeprefix("--sweep=") for flag in flags if flag.startswith("--sweep=")]
    module, config = experiment.configure(str(ROOT / spec), given)
    own = experiment.figure_of(module, config).sweep(config)[-1:]
    keys = [key.partition("=")[0] for key in given]
    assert plan_runs(config, points.of_command(config, own, keys, swept), [flag.partition("=")[0] for flag in swept])


def test_there_are_commands_to_test():
    assert len(COMMANDS) > 12
