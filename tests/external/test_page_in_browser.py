"""The page in a real browser: it answers a pointer and keys, in one file, without a network; needs playwright."""

import pytest

from tests.external.browsing import LOOKS, browser, visited  # noqa: F401, a fixture
from tests.test_report import finished  # noqa: F401, the fixture

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.fixture(params=LOOKS, ids=str)
def opened(browser, finished, request):  # noqa: F811
    """The page, scrolled through."""
    with visited(browser, finished[1] / "report.html", *request.param) as one:
        for node in one.locator(".live").all():
            node.scroll_into_view_if_needed()
        one.wait_for_function("[...document.querySelectorAll('.live')].every(node => node.dataset.ready)")
        yield one


def points(figure):
    """Marks of means in a figure's panels."""
    return figure.locator(".mark-symbol.role-mark path").count()


def test_arms_are_switched_on_and_off_and_seeds_shown(opened):
    figure = opened.locator("figure", has=opened.locator("text=Figure 1: loss")).locator(".live")
    every = points(figure)
    assert every == 2 * 4 * 2  # panels, arms, sizes
    box = figure.locator("input.arm").first
    box.focus()
    opened.keyboard.press("Space")
    opened.wait_for_timeout(200)
    assert points(figure) == every - 2 * 2
    figure.locator("input.seeds").check()
    opened.wait_for_timeout(200)
    assert points(figure) == (every - 4) * (1 + 2)  # two seeds beside each mean
    figure.locator("button.everything").click()
    opened.wait_for_timeout(200)
    assert points(figure) == 0


def test_a_pointer_is_told_the_value_its_interval_and_n(opened):
    mark = opened.locator("figure .live .mark-symbol.role-mark path").first
    mark.scroll_into_view_if_needed()
    mark.hover()
    told = opened.locator("#vg-tooltip-element")
    told.wait_for(state="visible")
    text = told.inner_text()
    assert "mean [95 %]" in text and "[" in text.split("mean [95 %]")[1] and "n" in text and "learned router" in text


def test_the_values_are_there_without_a_pointer(opened):
    details = opened.locator("figure details.values").first
    details.locator("summary").focus()
    opened.keyboard.press("Enter")
    details.locator("table").wait_for()
    assert details.locator("tr").count() == 1 + 2 * 4 * 2  # panels, arms, sizes
    assert details.locator("tr").nth(1).inner_text().split("\t")[:3] == [
        "top-1 test loss (1 = trivial)",
        "learned router",
        "8",
    ]


def test_the_slider_moves_the_map_over_training(opened):
    maps = opened.locator(".live.maps")
    slider, said = maps.locator("input.step"), maps.locator("output")
    assert said.inner_text().startswith("step 20:")
    before = maps.locator("canvas").first.evaluate("node => node.toDataURL()")
    slider.focus()
    opened.keyboard.press("Home")
    opened.wait_for_timeout(300)
    assert said.inner_text().startswith("step 0:") and slider.get_attribute("aria-valuetext") == said.inner_text()
    assert maps.locator("canvas").first.evaluate("node => node.toDataURL()") != before
    maps.locator("select.router").select_option(index=1)
    opened.wait_for_timeout(300)
    assert said.inner_text().startswith("step 0:")


def test_claims_are_filtered_and_sorted_and_a_command_is_copied(opened):
    assert opened.locator(".filters .count").inner_text() == "1 of 1 claims"
    opened.locator(".filters .by-text").fill("nobody claims this")
    assert opened.locator(".filters .count").inner_text() == "0 of 1 claims"
    opened.locator(".filters .by-text").fill("")
    opened.locator("figure button.copy").first.click()
    opened.locator("figure button.copy", has_text="copied").wait_for()


def test_nothing_is_cut_off_and_words_explain_themselves(opened):
    assert opened.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    cells = opened.locator(".arms td").evaluate_all(
        "nodes => nodes.filter(node => node.scrollWidth > node.clientWidth + 1).length"
    )
    assert cells == 0
    term = opened.locator(".term:visible").first
    term.focus()
    assert term.locator("span").is_visible()
    opened.keyboard.press("Escape")
    opened.mouse.move(0, 0)
    assert not term.locator("span").is_visible()
