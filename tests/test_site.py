"""The documentation site builds strictly, and every link of its pages leads to a file of the site."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import routed

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.slow
def test_the_site_builds_strictly_and_its_links_lead_somewhere(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    lost = []
    for page in (tmp_path / "site").rglob("*.html"):
        if page.name == "404.html":
            continue
        for address in re.findall(r'(?:href|src|srcset)="([^"#?:]+)["#?]', page.read_text("utf-8")):
            target = page.parent / address
            if not (target / "index.html" if target.is_dir() else target).is_file():
                lost.append(f"{page.relative_to(tmp_path)}: {address}")
    assert not lost


def test_the_api_page_has_every_public_name():
    text = (ROOT / "docs" / "api.md").read_text("utf-8")
    names = {name for name in routed.__all__ if name != "trace"}
    assert {f"routed.{name}" for name in names} <= set(re.findall(r"heading: (routed\.\w+)}", text))
