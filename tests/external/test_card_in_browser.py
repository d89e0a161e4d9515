"""The score card in a real browser: one file without a network, beside any reference; needs playwright and chromium."""

import pytest

from routed.suite import card, run
from tests.external.browsing import LOOKS, browser, visited  # noqa: F401, a fixture
from tests.test_suite import made


@pytest.fixture(params=LOOKS, ids=str)
def opened(browser, tmp_path, request):  # noqa: F811
    """A card beside two others."""
    known = {"suite": run.identity(False)}
    known["routers"] = {
        name: made(values, name=name) for name, values in (("linear", [0.1, 0.11, 0.12]), ("mlp", [0.5, 0.6, 0.7]))
    }
    (tmp_path / "card.html").write_text(card.page(made([0.5, 0.6, 0.7]), known, "mine.py:Mine"), encoding="utf-8")
    with visited(browser, tmp_path / "card.html", *request.param) as one:
        yield one


def test_another_router_is_chosen_with_the_keyboard(opened):
    shape = opened.locator("#other").get_attribute("points")
    first = opened.locator("td.beside").first
    assert "this card: above" in first.inner_text()
    opened.locator("#which").focus()
    opened.keyboard.press("ArrowDown")
    assert opened.locator("#other").get_attribute("points") != shape
    assert "0.60" in first.inner_text() and "this card: not told apart" in first.inner_text()
    assert opened.locator("th .which").text_content() == "mlp"


def test_nothing_is_wider_than_the_page(opened):
    assert opened.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
