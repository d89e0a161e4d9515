"""The overview of two runs in a real browser: matrix, claims sorted, filtered, open; needs playwright and chromium."""

import json
import shutil
import types

import pytest

from routed import report
from routed.analysis import workdirs
from routed.analysis.claims import FROZEN, LEARNED, Writer
from tests.external.browsing import LOOKS, browser, visited  # noqa: F401, a fixture
from tests.test_report import experiment, finished  # noqa: F401, the fixture

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.fixture(scope="module")
def overview(finished, tmp_path_factory):  # noqa: F811
    """The page of two runs that claim opposite orders."""
    config, path, _, _ = finished
    runs, modules = tmp_path_factory.mktemp("several"), {"first": experiment(), "second": experiment()}
    write = Writer("scaled", "test/loss", at={"data.samples": 32})
    claim = write.order("paper.reverse", "frozen < learned", "worse", FROZEN, LEARNED)
    modules["second"].FIGURES = {"": modules["second"].FIGURES[""]._replace(claims=lambda config: (claim,))}
    for number, name in enumerate(modules):
        shutil.copytree(path, runs / name)
        described = json.loads((path / "config.json").read_text())
        described["config"] |= {"batch_size": 8 + number}  # no shards of each other
        (runs / name / "config.json").write_text(json.dumps(described))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workdirs, "_experiment_of", lambda folder: (modules[folder.name], config))
        for flag in ("OUT", "DOCS", "FINDINGS"):
            patch.setattr(report, flag, types.SimpleNamespace(value=None))
        report.main(["report", *map(str, sorted(runs.iterdir()))])
    return runs / "report.html"


@pytest.fixture(params=LOOKS, ids=str)
def opened(browser, overview, request):  # noqa: F811
    with visited(browser, overview, *request.param) as one:
        yield one


def shown(page):
    """Ids of the claims that are seen in the table of all, in their order."""
    return page.locator(".filtered").first.locator("tr.claim:visible code").all_inner_texts()


def test_the_matrix_counts_and_its_links_open_what_is_folded(opened):
    rows = opened.locator("table.matrix tbody tr")
    assert rows.locator("th a").all_inner_texts() == ["first", "second"]
    assert rows.locator("td.some").all_inner_texts() == ["1", "1"]
    part = opened.locator("details.part").nth(1)
    assert part.get_attribute("open") is None
    rows.nth(1).locator("a").focus()
    opened.keyboard.press("Enter")
    opened.wait_for_function("document.querySelectorAll('details.part')[1].open")


def test_claims_of_all_runs_are_filtered_by_source_and_text(opened):
    bar = opened.locator(".filtered").first
    assert bar.locator(".count").inner_text() == "2 of 2 claims"
    bar.locator(".by-source").select_option(index=1)
    assert len(shown(opened)) == 1
    bar.locator(".by-source").select_option("")
    bar.locator(".by-text").fill("FROZEN < ")
    assert shown(opened) == ["paper.reverse"] and bar.locator(".count").inner_text() == "1 of 2 claims"


def test_claims_of_all_runs_are_sorted(opened):
    before = shown(opened)
    button = opened.locator(".filtered th button.sort").first
    button.focus()
    opened.keyboard.press("Enter")
    up = shown(opened)
    opened.keyboard.press("Enter")
    assert up == sorted(before) and shown(opened) == up[::-1]


def test_nothing_is_wider_than_the_page(opened):
    assert opened.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
