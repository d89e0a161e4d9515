"""The score card in a real browser: one file without a network, drawn beside any reference router; needs playwright and chromium."""

import pytest

from routed.suite import card, run
from tests.external.test_page_in_browser import browser  # noqa: F401, the fixture
from tests.test_suite import made


@pytest.fixture(params=[("light", 1100), ("dark", 1100), ("light", 400)], ids=str)
def opened(browser, tmp_path, request):  # noqa: F811
    """A card beside two others; it fails on what the browser complains of and on what it asks a network for."""
    known = {"suite": run.identity(False)}
    known["routers"] = {
        name: made(values, name=name) for name, values in (("linear", [0.1, 0.11, 0.12]), ("mlp", [0.5, 0.6, 0.7]))
    }
    (tmp_path / "card.html").write_text(card.page(made([0.5, 0.6, 0.7]), known, "mine.py:Mine"), encoding="utf-8")
    scheme, width = request.param
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    one, said, asked = context.new_page(), [], []
    one.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    one.on("pageerror", lambda error: said.append(str(error)))
    one.on(
        "request", lambda request: asked.append(request.url) if not request.url.startswith(("file:", "data:")) else None
    )
    one.goto((tmp_path / "card.html").as_uri())
    yield one
    assert not said and not asked
    context.close()


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
