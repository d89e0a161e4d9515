"""The documentation site: pages of the repository outside of docs/ join it, and links to other files work.

`mkdocs build` calls these hooks (mkdocs.yml). A link to a file of code leads to a copy of its text on the site.
"""

from __future__ import annotations

import pathlib
import posixpath
import re
from typing import Any

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parent.parent
#: Pages outside of docs/ that the site has.
PAGES = ("README.md", "BUILD_NOTES.md", "CHANGELOG.md", "CONTRIBUTING.md", "launch/README.md")
#: Links in Markdown and HTML: what stands before the address, the address, and an anchor.
LINK = re.compile(r"(\]\(|src=\"|srcset=\"|href=\")(?!\w+:|#)([^)#\"\s]+)(#[^)\"\s]*)?")


def on_config(config: Any) -> Any:
    """Lists the pages of docs/decisions and docs/measurements in the navigation."""
    for group in config.nav[-1]["Develop"]:
        for title, (folder,) in group.items() if isinstance(group, dict) else ():
            group[title] = [f"{folder}{path.name}" for path in sorted((ROOT / "docs" / folder).glob("*.md"))]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages outside of docs/, and the files of code that some page links to."""
    for name in PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for page in [*files.documentation_pages()]:
        for name in _targets(_place(page.src_uri), page.content_string):
            if files.get_file_from_path(_uri(name)) is None and (ROOT / name).is_file():
                files.append(File.generated(config, _uri(name), abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Makes the links of a page, which are right in the repository, right on the site."""
    here = page.file.src_uri

    def moved(match: re.Match[str]) -> str:
        before, address, anchor = match.groups()
        name = _uri(posixpath.normpath(posixpath.join(posixpath.dirname(_place(here)), address)))
        return f"{before}{posixpath.relpath(name, posixpath.dirname(here) or '.')}{anchor or ''}"

    return LINK.sub(moved, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Makes the links of HTML and of notebooks to pages right, which mkdocs leaves as they are."""
    return re.sub(r'(href="(?!\w+:)[\w/.-]+)\.md(["#])', r"\1.html\2", html)


def _place(uri: str) -> str:
    """Returns the path in the repository of a page of the site."""
    return uri if uri in PAGES else f"docs/{uri}"


def _uri(name: str) -> str:
    """Returns the address on the site of a file of the repository; code is shown as text."""
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return name if name in PAGES else f"files/{name}.txt"


def _targets(name: str, markdown: str) -> set[str]:
    """Returns the files of the repository that a page links to."""
    folder = posixpath.dirname(name)
    return {posixpath.normpath(posixpath.join(folder, match[2])) for match in LINK.finditer(markdown)}
