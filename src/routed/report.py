"""From rows to statistics, verdicts, figures and one self-contained page.

    routed report DIR... [--out=FILE]        (or python -m routed.report)
    routed report --docs=docs/results DIR...
    routed findings [DIR...]      (the answers, in the terminal; default runs/*)

makes the page of one workdir again, with its tables and figures, or an overview of several (runs/*): experiments against
verdicts, every claim of theirs in one table, and their pages below it. Parts of one sweep (main's --shard), or other disjoint runs of
one config and commit, are joined. With --docs the tables of these workdirs are kept in that folder's `data/`, and its pages are made
of all that is kept there: one for each paper. Without runs, findings in a checkout are those that docs/results publishes.
"""

from __future__ import annotations

import functools
import pathlib
import sys

from routed.system import signals

if __name__ == "__main__":
    signals.end_on_signals()  # before the other imports, which take seconds

from absl import flags
from absl import logging as log

from routed.contracts import UserError
from routed.system import commands, files

OUT = flags.DEFINE_string(
    "out", None, "The page to write; default report.html in the folder, or in the first one's parent."
)
DOCS = flags.DEFINE_string(
    "docs", None, "The folder of result pages: keeps these workdirs' tables in its data/ and makes its pages again."
)
FINDINGS = flags.DEFINE_bool("findings", False, "Print the answers and verdicts of finished runs; write nothing.")


def main(argv: list[str]) -> None:
    """The page of one workdir or of several."""
    if FINDINGS.value:
        return _tell_findings(argv[1:])
    # Here, since --help needs none of it, and pandas and the rest take seconds.
    from routed.analysis import published
    from routed.analysis.page import make_part, write_files, write_page
    from routed.analysis.terminal import as_text
    from routed.analysis.workdirs import _experiment_of, joined_table, merged

    folders = [
        path for name in argv[1:] if not (path := files.folder(name)).is_file()
    ]  # runs/* holds the page of before
    folders = [path for path in folders if not _is_card(path, alone=len(folders) == 1)]
    folders = [path if path.name not in ("", "..") else path.resolve() for path in folders]  # a page has a name
    if not folders and not DOCS.value:
        raise UserError("no folder with results is named; usage: routed report DIR... [--out=FILE]")
    parts = []
    for group in merged(folders):
        module, config = _experiment_of(group[0])
        table = joined_table(group)
        if not len(table):
            log.warning("%s has no finished runs yet: left out", group[0])
            continue
        parts.append(make_part(group, module, config, table))
        if DOCS.value:
            published.keep(parts[-1], group, pathlib.Path(DOCS.value))
        files.tell(f"{parts[-1]['name']}\n{as_text(parts[-1])}\n")
    if DOCS.value:
        for page in published.write_pages(pathlib.Path(DOCS.value)):
            files.tell(f"wrote {page}")
        return
    if not parts:
        raise UserError("none of these folders has finished runs")
    out = (
        files.folder(OUT.value)
        if OUT.value
        else (folders[0] if len(folders) == 1 else folders[0].parent) / "report.html"
    )
    if len(folders) == 1 and not OUT.value:
        write_files(folders[0], parts[0])  # else they would tell of the code of before
    write_page(out, parts)
    files.tell(f"wrote {out}")


def _is_card(folder: pathlib.Path, alone: bool) -> bool:
    """Does it hold a score card, whose runs make no report of an experiment?

    Raises:
      UserError: it is all that was asked for.
    """
    if not (folder / "suite.json").exists():
        return False
    if alone:
        raise UserError(f"{folder} holds a score card: open {folder / 'card.html'}, which routed suite makes again")
    log.warning("%s holds a score card: left out", folder)
    return True


def _tell_findings(names: list[str]) -> None:
    """What workdirs found, from their claims.json alone; without names, those below runs/, or else the published ones of a checkout."""
    from routed.analysis.answer import findings

    folders = [files.folder(name) for name in names] or _finished("runs")
    if not folders and (folders := _finished("docs/results/data")):
        files.tell("no finished runs below runs/; what is published in docs/results:\n")
    if not folders:
        raise UserError("no finished runs below runs/: name their folders, routed findings DIR...")
    files.tell(findings([folder for folder in folders if not folder.is_file()]))  # runs/* holds a page


def _finished(below: str) -> list[pathlib.Path]:
    return sorted(path.parent for path in pathlib.Path(below).glob("*/claims.json"))


def run() -> None:
    """Entry point."""
    commands.start(main, functools.partial(commands.parse_flags, module=sys.modules[__name__]))


if __name__ == "__main__":
    run()
