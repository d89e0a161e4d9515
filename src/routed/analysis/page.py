"""From rows to statistics, verdicts, figures and one self-contained page.

    python -m routed.report DIR... [--out=FILE]

makes the page of one workdir again, or an overview of several (runs/*): every claim of theirs in one table, and their
pages below it. Parts of one sweep (main's --shard), or other disjoint runs of one config and commit, are joined.
"""

from __future__ import annotations

import json
import pathlib
import types
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd
from absl import logging as log
from markupsafe import Markup, escape
from ml_collections import ConfigDict

from routed.analysis import answer, arms, controls, diagnosis, digits, findings, plots, points, verdicts
from routed.analysis.answer import as_text
from routed.analysis.claims import Claim
from routed.analysis.plots import interactive
from routed.analysis.plots.automatic_figures import Drawn, draw_all
from routed.analysis.plots.histories import as_json, histories
from routed.analysis.plots.rendering import theme
from routed.analysis.points import with_rows
from routed.analysis.wording import render, unique_ids
from routed.analysis.workdirs import command_of
from routed.contracts import Column, UserError, column_of
from routed.engine import results, rows
from routed.plan import experiment
from routed.plan.config import problem_of
from routed.plan.points import Point
from routed.settings.tree import flatten
from routed.system import files, stored

#: Points and arms in the page's table, which a browser has to lay out.
SHOWN = 500

#: Bytes of a page, at most: it goes by mail, and a telephone has to lay it out.
LARGEST = 3_900_000

#: Definitions of the headings of claims and maps.
DEFINITIONS = {
    "verdict": "The result of the claim by its interval, by rules fixed before: see “How a verdict is reached”."
    " Below: how comparable the setting is with the paper's.",
    "ours": "Both sides, then the effect with its 95 % interval over paired seeds. A ratio is the second side over the"
    " first, a difference the second minus the first: where an order holds they are above 1 and above 0.",
    "n": "Number of seeds on which both sides are compared.",
    "maps": "Mean probability of each expert over the test tokens of a row, on a log scale from a tenth of 1 / E to 1."
    " A fresh router is near 1 / E everywhere.",
    "load": "E times an expert's share of the assignments, before drops: 1 (dotted) is fair. A cross: a dead expert,"
    " below 1 % of a fair load.",
    "course": "Churn: share of the choices that differ from the evaluation before. Dead: share of the experts with less"
    " than 1 % of a fair load. The line is at the slider's step.",
    "holds": "Number of points of the settings that the claim names, and that should not matter, on which the claim is"
    " supported too.",
}


def write(workdir: pathlib.Path, module: types.ModuleType, config: ConfigDict, table: pd.DataFrame) -> str:
    """Writes report.html and what is in it as files, and returns the verdicts as text.

    Raises:
      UserError: the disk is full or read-only.
    """
    part = make_part([workdir], module, config, table)
    write_files(workdir, part)
    write_page(workdir / "report.html", [part])
    return as_text(part)


def write_unfinished(
    workdir: pathlib.Path, module: types.ModuleType, config: ConfigDict, table: pd.DataFrame, progress: str
) -> None:
    """Writes report.html from the runs that are finished: figures and means, without verdicts, so that none is peeked.

    Raises:
      UserError: the disk is full or read-only.
    """
    unjudged: dict[str, Any] = {"claims": [], "answer": [], "gap": [], "shares": [], "threats": [], "behind": []}
    sentence = f"Not finished: {progress}. The verdicts come with the last run; load this page again for more."
    part = make_part([workdir], module, config, table) | unjudged
    write_page(workdir / "report.html", [part | {"in_short": f"{part['diverged']} {sentence}".strip()}])


def write_files(workdir: pathlib.Path, part: dict[str, Any]) -> None:
    """Writes summary.csv, claims.json and figures/."""
    folder, names = files.own_folder(workdir / "figures"), {figure["name"] for figure in part["figures"]}
    drawn = folder / ".drawn"
    before = drawn.read_bytes().decode("utf-8", "replace").splitlines() if drawn.exists() else []
    for path in [*folder.glob("*.svg"), *folder.glob("*.png")]:  # of an earlier command, and none outside of the folder
        if path.stem in {*before} - names:
            path.unlink()
    files.write(drawn, "\n".join(sorted(names)))
    for figure in part["figures"]:
        files.write(folder / f"{figure['name']}.svg", figure["file"])
        files.write(folder / f"{figure['name']}.png", plots.png(figure["drawn"]))
    tables = {"summary.csv": files.csv_text(part["table"]), "claims.json": verdicts.to_json(part["claims"])}
    stored.write_tables(workdir, tables)


def check(asked: Any, config: ConfigDict) -> None:
    """Refuses unknown claims and figures of an experiment before it trains for hours.

    Raises:
      UserError: an unknown kind of either, or a claim of unknown names.
    """
    claims, specs = asked.claims(config), asked.plots(config)
    for name, values, kind in (("claims", claims, Claim), ("plots", specs, Mapping)):
        if not isinstance(values, tuple | list) or not all(isinstance(value, kind) for value in values):
            raise UserError(f"{name} of the figure must return a tuple: (a,) with a comma for a single one")
    for claim in claims:
        verdicts.check(claim)
        verdicts.check_parts(claim, config)
    for spec in specs:
        plots.check(spec)
        plots.check_names(spec, config)
    for of, names in (("figures", [spec["name"] for spec in specs]), ("claims", [claim.id for claim in claims])):
        if again := [name for name in names if names.count(name) > 1]:
            raise UserError(f"two {of} have the name {again[0]}: give each a name of its own")


def warn_of_claims(asked: Any, config: ConfigDict, points: Sequence[Point]) -> None:
    """Warns of claims that stay unanswered because a command replaces their points."""
    ever = verdicts.unanswered(asked.claims(config), config, asked.sweep(config))
    claims = with_rows(asked.claims(config), config, points)
    if lost := [claim for claim in verdicts.unanswered(claims, config, points) if claim not in ever]:
        log.warning(
            f"{len(lost)} of the figure's {len(claims)} claims are about points that this command replaces, and stay"
            f" unanswered (the first: {lost[0].id}, {lost[0].statement}); leave out --config and --sweep of what the"
            " figure sweeps itself to have them answered"
        )


def make_part(
    joined: list[pathlib.Path], module: types.ModuleType, config: ConfigDict, table: pd.DataFrame
) -> dict[str, Any]:
    """Returns the contents of the page of one workdir, or of several with rows joined in `table`; writes nothing."""
    workdir, swept = joined[0], results.swept_keys(joined[0])
    heatmaps = results.read_heatmaps(*joined)
    asked = experiment.figure_of(module, config)
    data = findings.frame(asked, config, table, swept, heatmaps)
    columns, loss, last = data.axes, data.loss, data.last
    result = findings.of_rows(module, config, table, data)
    judged, summary = result["claims"], result["table"]
    asked_for = points.claims_of(asked, config, table, swept)
    drawn, undrawn = draw_all(asked.plots(config), data)
    figures = [_figure(figure, columns, workdir.name) for figure in drawn]
    described, lost = results.stored_config(workdir), rows.diverged(table, problem_of(config).loss)
    document = (module.__doc__ or "").strip()
    return result | {
        "name": workdir.name,
        "question": document.splitlines()[0] if document else config.name,
        "line": asked.line if config.figure else "",
        "claims": points.add(judged, asked_for, table, config, swept, data.own, result["changes"]),
        "in_short": f"{lost} {answer.in_short(judged)}".strip(),
        "diverged": lost,
        "answer": answer.answer(judged),
        "behind": arms.behind(data),
        "by_point": arms.by_point(data, config),
        "horizon": config.gate.horizon,
        "threats": [
            *diagnosis.threats(table, config, swept),
            ("Controls", controls.named(last, swept, problem_of(config).loss, _left_out(joined, table))),
        ],
        "figures": figures,
        "left_out": [],
        "undrawn": undrawn,
        "maps": as_json(list(histories(data))),
        "command": command_of(described.get("experiment", config.name), module, config, table),
        "arms": Markup(result["by_arm"].to_html(index=False, border=0)),
        "loss": loss,
        "loss_definition": columns[loss].definition,
        "summary": Markup(_wide(summary, swept, columns)),
        "summary_of": _rows_description(summary, swept),
        "config": "\n".join(f"{key} = {value!r}" for key, value in flatten(config).items()),
        "versions": json.dumps({k: v for k, v in described.items() if k != "config"}, indent=1),
        "document": document,
    }


def _figure(figure: Drawn, columns: Mapping[str, Column], workdir: str) -> dict[str, Any]:
    """Returns a figure as the page shows it: interactive panels, their legend, and the picture for print."""
    chart, text = figure.drawn, plots.svg(figure.drawn)
    return figure._asdict() | {
        "file": text,
        "svg": Markup(unique_ids(text, f"{workdir}/{figure.name}")),
        "panels": interactive.panels(chart, columns),
        "legend": interactive.legend(chart) if chart.legend else [],
        "seeds": interactive.has_seeds(chart),
    }


def _left_out(joined: list[pathlib.Path], table: pd.DataFrame) -> dict[str, str]:
    """Returns the reason of each arm that did not run, of all folders; a later command may have run it."""
    reasons: dict[str, str] = {}
    for folder in joined:
        reasons |= results.stored_config(folder).get("left_out", {})
    ran = {arm for arm in reasons if " (at " not in reasons[arm]} & {*table.arm}
    return {arm: reason + " (at some points)" * (arm in ran) for arm, reason in reasons.items()}


def write_page(path: pathlib.Path, parts: list[dict[str, Any]]) -> None:
    """Writes one HTML file that opens offline."""
    title = parts[0]["name"] if len(parts) == 1 else "Overview"
    question = parts[0]["question"] if len(parts) == 1 else f"What {len(parts)} experiments found."
    claims = [claim | {"workdir": part["name"]} for part in parts for claim in part["claims"]]
    overview = sorted(claims, key=lambda claim: (claim["id"], claim["workdir"])) if len(parts) > 1 else []
    alive = any(part["maps"] or any(figure["panels"] for figure in part["figures"]) for part in parts)
    filled = lambda: render(  # noqa: E731
        "analysis/report.html",
        title=title,
        question=question,
        parts=parts,
        overview=overview,
        counts=answer.counted(overview),
        by_source=by_source,
        shown=lambda part: part["by_point"] if len(parts) == 1 else [p for p in part["by_point"] if p.is_first],
        words=DEFINITIONS,
        library=Markup(interactive.library()) if alive else "",
        themes=[theme(False), theme(True)],
    )
    page = filled()
    if (size := len(page.encode())) > LARGEST:
        fit(parts, size)
        page = filled()
    files.write(path, page)


def fit(parts: list[dict[str, Any]], size: int) -> None:
    """Removes parts from a page of `size` bytes until it is within `LARGEST`, and names them in `left_out`.

    First printed pictures that also answer a pointer, then wide tables, maps over training, figures; of the last part
    first.
    """
    for label, take in (
        ("printed pictures", _without_prints),
        ("the table of every metric", partial(_without, "summary")),
        ("maps over training", partial(_without, "maps")),
        ("figures", partial(_without, "figures")),
    ):
        for part in reversed(parts):
            if size <= LARGEST:
                return
            if freed := take(part):
                part["left_out"] = [*part["left_out"], label]
                size -= freed
    if size > LARGEST:
        log.warning(
            "the page has %.1f MB, more than %.0f: name fewer workdirs, or sweep fewer points",
            size / 1e6,
            LARGEST / 1e6,
        )


def _without_prints(part: dict[str, Any]) -> int:
    """Removes the printed pictures of interactive figures; returns their bytes."""
    freed = 0
    for figure in part["figures"]:
        if figure["panels"]:
            freed += len(figure["svg"].encode())
            figure["svg"] = ""
    return freed


def _without(name: str, part: dict[str, Any]) -> int:
    """Removes something from a part; returns its bytes."""
    empty: dict[str, Any] = {"summary": "", "maps": None, "figures": []}
    freed, part[name] = part[name], empty[name]
    if name == "figures":
        return sum(len(json.dumps(figure["panels"])) + len(figure["svg"].encode()) for figure in freed)
    return (len(freed.encode()) if isinstance(freed, str) else len(json.dumps(freed))) if freed else 0


def by_source(claims: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns the claims by their source, with which their ids begin: a paper, or ours."""
    claims_by_source: dict[str, list[dict[str, Any]]] = {}
    for claim in claims:
        claims_by_source.setdefault(claim["id"].partition(".")[0], []).append(claim)
    return claims_by_source


def _rows_description(summary: pd.DataFrame, swept: list[str]) -> str:
    """Returns a description of the rows of the page's table: every point and arm, or the first of many."""
    count = len(summary[[*swept, "arm"]].drop_duplicates()) if len(summary) else 0
    if count <= SHOWN:
        return "every point and arm"
    return f"the first {SHOWN} of {count:,} points and arms (summary.csv in the workdir has all)"


def _wide(summary: pd.DataFrame, swept: list[str], columns: Mapping[str, Column]) -> str:
    """Returns the table of every metric; headings have definitions, and a layer's column has that of all layers."""
    if not len(summary):
        return ""

    def heading(metric: str) -> Markup:
        column = column_of(metric, columns)
        if column is None or not column.definition:
            return escape(metric)
        tip = Markup('<span class="term" tabindex="0">{}<span role="tooltip">{}</span></span>')
        return tip.format(metric, column.definition)

    shown = summary.merge(summary[[*swept, "arm"]].drop_duplicates().head(SHOWN))
    shown["value"] = [
        f"{digits.with_interval((m, low, high))} n={n}"
        for m, low, high, n in zip(shown["mean"], shown.low, shown.high, shown.n, strict=True)
    ]
    for key in (*swept, "arm"):
        shown[key] = [escape(str(value)) if isinstance(value, str) else value for value in shown[key]]
    table = shown.pivot_table(index="metric", columns=[*swept, "arm"], values="value", aggfunc="first").fillna("").T
    return table.rename(columns=heading).to_html(border=0, escape=False)
