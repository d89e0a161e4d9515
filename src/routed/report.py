"""Writes reports: statistics, verdicts and figures of finished runs, in one self-contained page.

    routed report DIR... [--out=FILE] [--experiment=FILE]
    routed report --docs=docs/results DIR...       (or python -m routed.report)
    routed report --rejudge=docs/results [--store]
    routed findings [DIR...]      (the answers, in the terminal; default runs/*)

makes the page of one workdir again, with its tables and figures, or an overview of several (runs/*): experiments
against verdicts, all their claims in one table, and their pages below. Parts of one sweep (main's --shard), or other
disjoint runs of one config and commit, are joined. The code of an experiment that is not one of routed's own is run if
--experiment names its file; else the stored verdicts are printed. --docs copies the tables of these workdirs to that
folder's `data/`, and makes its pages from all tables there: one for each paper. --rejudge judges these tables again
from their values per seed, prints what differs from the committed verdicts, and ends with 1 if anything does; --store
stores the new ones. Without runs, `findings` prints those that a checkout publishes in docs/results.
"""

from __future__ import annotations

import functools
import pathlib
import sys
from typing import Any

from routed.system import signals

if __name__ == "__main__":
    signals.end_on_signals()  # before the other imports, which take seconds

from absl import flags
from absl import logging as log

from routed.contracts import UserError
from routed.system import commands, files, stored

OUT = flags.DEFINE_string(
    "out", "", "The page to write; default report.html in the folder, or in the first one's parent."
)
DOCS = flags.DEFINE_string(
    "docs", None, "The folder of result pages: keeps these workdirs' tables in its data/ and makes its pages again."
)
REJUDGE = flags.DEFINE_string(
    "rejudge", None, "The folder of result pages: judges its tables again from their values per seed, and compares."
)
STORE = flags.DEFINE_bool("store", False, "With --rejudge: stores verdicts and tables that differ.")
EXPERIMENT = flags.DEFINE_multi_string("experiment", [], "The file of a folder's experiment, whose code judges it.")
ACCEPT_EDITS = flags.DEFINE_bool("accept_edits", False, "Read files that were edited since they were written.")
FINDINGS = flags.DEFINE_bool("findings", False, "Print the answers and verdicts of finished runs; write nothing.")


def main(argv: list[str]) -> None:
    """Writes the page of one workdir or of several, or the result pages of --docs; or prints findings."""
    stored.ACCEPTS_EDITS.set(ACCEPT_EDITS.value)
    if FINDINGS.value and (OUT.value or DOCS.value or REJUDGE.value or STORE.value):
        raise UserError("--findings writes nothing: leave out --out, --docs, --rejudge and --store")
    if FINDINGS.value and EXPERIMENT.value:
        raise UserError("--findings prints stored verdicts: leave out --experiment, or judge again by routed report")
    if DOCS.value and OUT.value:
        raise UserError("--docs writes result pages, --out one page of workdirs: give one of them")
    if FINDINGS.value:
        return _print_findings(argv[1:])
    # Here, since --help needs no pandas, which takes seconds to load.
    if REJUDGE.value:
        return _rejudge(pathlib.Path(REJUDGE.value), argv[1:])
    if STORE.value:
        raise UserError("--store stores what --rejudge=docs/results finds: give both")
    from routed.analysis.page import write_files, write_page
    from routed.publish import published

    folders = _workdirs(argv[1:])
    if not folders and not DOCS.value:
        raise UserError("no folder with results is named; usage: routed report DIR... [--out=FILE]")
    parts = _make_parts(folders)
    if DOCS.value:
        with files.folders_by("docs"):
            files.tell("\n".join(f"wrote {page}" for page in published.write_pages(pathlib.Path(DOCS.value))))
        return
    if not parts:
        return
    if OUT.value:
        out = files.folder(OUT.value)
    else:
        out = (folders[0] if len(folders) == 1 else folders[0].parent) / "report.html"
        if len(folders) == 1:
            write_files(folders[0], parts[0])  # the page and the workdir's own tables come from the same code
    with files.folders_by("out" if OUT.value else "workdir"):
        write_page(out, parts)
    files.tell(f"wrote {out}")


def _rejudge(root: pathlib.Path, names: list[str]) -> None:
    """Judges published results again; ends with 1 if any differs and is not stored.

    Raises:
      UserError: workdirs are named, too.
    """
    from routed.publish import rejudged

    if names or DOCS.value or OUT.value:
        raise UserError("--rejudge reads the tables of its folder alone: leave out workdirs, --docs and --out")
    if not rejudged.rejudge(root, STORE.value, EXPERIMENT.value) and not STORE.value:
        sys.exit(1)


def _workdirs(names: list[str]) -> list[pathlib.Path]:
    """The folders among the arguments, without score cards; runs/* also matches the page of an earlier command."""
    folders = [path for name in names if not (path := files.folder(name)).is_file()]
    folders = [path for path in folders if not _is_card(path, is_only=len(folders) == 1)]
    begun = [path for path in folders if len(folders) > 1 and _is_unused(path)]
    folders = [path for path in folders if path not in begun]
    return [path if path.name not in ("", "..") else path.resolve() for path in folders]  # a page needs a name


def _make_parts(folders: list[pathlib.Path]) -> list[dict[str, Any]]:
    """The page's part on each experiment with finished runs; prints its summary, and copies its tables for --docs."""
    from routed.analysis import answer, workdirs

    groups, parts = workdirs.merged(folders), []
    judged = [group for group in groups if workdirs.trusted(group[0], EXPERIMENT.value)]
    for group in groups:
        if group not in judged:
            if DOCS.value or len(group) > 1:
                raise UserError(f"{group[0]} is not judged, as {workdirs.anew(group[0])}")
            files.tell(f"{answer.findings(group)}\n")
            log.warning("%s: these verdicts are stored, as %s", group[0], workdirs.anew(group[0]))
        elif (part := _judged(group)) is None:
            log.warning("%s has no finished runs yet: left out", group[0])
        else:
            files.tell(f"{part['name']}\n{answer.as_text(part)}\n")
            parts.append(part)
    if judged and not parts and not DOCS.value:
        raise UserError("none of these folders has finished runs")
    return parts


def _judged(group: list[pathlib.Path]) -> dict[str, Any] | None:
    """The page's part on joined workdirs, judged by the code of their experiment; None without finished runs."""
    from routed.analysis.page import make_part
    from routed.analysis.workdirs import experiment_of, joined_table, with_arms_of_all
    from routed.engine import results
    from routed.plan.config import problem_of
    from routed.publish import committed

    ours = all(stored.is_sealed(results.stored_config(folder)) for folder in group)
    with stored.fitting(f"{group[0] / 'config.json'} or its results", "restore them, or run it again", ours):
        module, config = experiment_of(group[0], EXPERIMENT.value)
        config = with_arms_of_all(config, group)
        table = joined_table(group, problem_of(config).loss)
        if not len(table) or (table.status == "tuning").all():
            return None
        part = make_part(group, module, config, table)
        if DOCS.value:
            committed.keep(part, group, module, config, table, pathlib.Path(DOCS.value))
    return part


def _is_unused(folder: pathlib.Path) -> bool:
    """True for a folder with nothing but the log of a command that was refused, or that has only begun."""
    unused = folder.is_dir() and {path.name for path in folder.iterdir()} <= {".lock", "routed.log"}
    if unused:
        log.warning("%s holds no results: left out", folder)
    return unused


def _is_card(folder: pathlib.Path, is_only: bool) -> bool:
    """True if the folder has a score card, whose runs make no report of an experiment.

    Raises:
      UserError: it is the only folder.
    """
    if not (folder / "suite.json").exists():
        return False
    if is_only:
        raise UserError(f"{folder} holds a score card: open {folder / 'card.html'}, which routed suite makes again")
    log.warning("%s holds a score card: left out", folder)
    return True


def _print_findings(names: list[str]) -> None:
    """Prints the findings of workdirs, by default of those in runs/, or else the published ones of a checkout."""
    from routed.analysis.answer import findings

    folders = [files.folder(name) for name in names] or _finished("runs")
    if not folders and (folders := _finished("docs/results/data")):
        files.tell("no finished runs below runs/; what is published in docs/results:\n")
    if not folders:
        raise UserError("no finished runs below runs/: name their folders, routed findings DIR...")
    files.tell(findings([folder for folder in folders if not folder.is_file()]))  # runs/* matches pages too


def _finished(folder: str) -> list[pathlib.Path]:
    return sorted(path.parent for path in pathlib.Path(folder).glob("*/claims.json"))


def run() -> None:
    """Entry point."""
    commands.start(main, functools.partial(commands.parse_flags, module=sys.modules[__name__]))


if __name__ == "__main__":
    run()
