"""A real browser for pages that are one file: playwright and Debian's chromium."""

import contextlib
import shutil

import pytest
from playwright.sync_api import sync_playwright

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

#: Colour scheme and width of what a page is looked at with.
LOOKS = [("light", 1100), ("dark", 1100), ("light", 400), ("dark", 400)]


@pytest.fixture(scope="module")
def browser():
    if BROWSER is None:
        pytest.fail("these tests need a Chromium on the PATH: apt-get install chromium")
    with sync_playwright() as started:
        one = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield one
        one.close()


@contextlib.contextmanager
def visited(browser, path, scheme, width):
    """A page; it fails on what the browser complains of and on what it asks a network for."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    one, said, asked = context.new_page(), [], []
    one.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    one.on("pageerror", lambda error: said.append(str(error)))
    one.on(
        "request", lambda request: asked.append(request.url) if not request.url.startswith(("file:", "data:")) else None
    )
    one.goto(path.as_uri())
    yield one
    assert not said and not asked
    context.close()
