"""What a report says first: the answer in words, the arms, the words that explain themselves."""

import json
import re

import pytest

from routed.analysis import answer, arms, page, verdicts
from routed.analysis.claims import FROZEN, LEARNED, Writer
from routed.analysis.plots import interactive
from routed.contracts import UserError
from routed.plan.config import base, problem_of
from routed.settings.tree import override
from tests.test_command_line import reported
from tests.test_figures import data, table

#: Arms of a made-up table; the loss of seed s is the level times 1 + .02 s, so a ratio of two arms is that of their
#: levels.
LEVELS = {"learned": 0.1, "frozen": 1.0, "frozen_sharp": 0.4, "frozen_data": 0.05}


def made(levels=LEVELS, **columns):
    rows = table({"data.samples": (512,)}, levels, **columns)
    drawing = data(rows, ("data.samples",))
    return arms.table(drawing.last, drawing, override(base(), {"data.samples": 512}))


@pytest.mark.slow
def test_arms_stand_best_first_against_the_fairest_control():
    found = made()
    assert [line["arm"] for line in found.lines] == ["frozen_data", "learned", "frozen_sharp", "frozen"]
    place = [head.words for head in found.headings].index("against the fairest control")
    cells = [line["cells"][place] for line in found.lines]
    # Levels over .05; equal ratios for every seed leave no interval.
    assert [cell.value for cell in cells] == ["is it", "2", "8", "20"] and not any(cell.interval for cell in cells)
    # .1 times the mean of 1, 1.02, 1.04, 1.06.
    # As claims have it, the geometric mean: .1 (1 x 1.02 x 1.04 x 1.06)^(1/4) = .10298; the arithmetic one is .103.
    assert found.lines[1]["cells"][0].value == "0.103" and found.means.startswith("geometric means of top-1 test loss")
    # .01 times the mean of 0, 1, 2, 3: a share is told in percent, with its interval inside 0 and 100 %.
    dead = found.lines[0]["cells"][[head.words for head in found.headings].index("share of dead experts")]
    assert dead.value == "1.5 %" and 0 <= float(dead.interval.strip("[]").split(",")[0]) < 1.5
    assert "k-means" in found.headings[place].definition


def test_losses_in_nats_stand_against_the_fairest_control_by_differences():
    """Means of levels times 1 + .02 s, s = 0 to 3: frozen_data has .0515; .103, .412 and 1.03 are that much above."""
    rows = table({"data.samples": (512,)}, LEVELS)
    drawing = data(rows, ("data.samples",))
    drawing.axes = {**drawing.axes, "test/loss": drawing.axes["test/loss"]._replace(log=False)}
    shown = arms.table(drawing.last, drawing, override(base(), {"data.samples": 512}))
    column = [head.words for head in shown.headings].index("against the fairest control")
    cells = [line["cells"][column].value for line in shown.lines]
    assert cells[0] == "is it" and [float(cell) for cell in cells[1:]] == pytest.approx(
        [0.0515, 0.3605, 0.9785], rel=0.03
    )


def test_without_a_fair_control_arms_stand_against_the_learned_router():
    found = made({"learned": 0.1, "frozen": 1.0})
    place = [head.words for head in found.headings].index("against the learned router")
    assert [line["cells"][place].value for line in found.lines] == ["–", "10"]


def test_flops_and_parameters_are_those_of_the_model():
    """64 experts of a constant of 10 outputs, a router of 24 x 64: 64 x 10 + 1,536 = 2,176 parameters, 6 FLOPs each."""
    config = override(
        base(),
        {"experts.name": "constant", "data.dim": 24, "data.clusters": 64, "data.target_dim": 10, "experts.count": 64},
    )
    rows = table({"data.samples": (512,)}, LEVELS)
    drawing = data(rows, ("data.samples",))
    found = arms.table(drawing.last, drawing, config)
    assert [cell.value for cell in found.lines[1]["cells"][-3:]] == ["13.1 k", "2.18 k", "4"]


def test_a_table_and_a_claim_have_one_mean_of_an_arm():
    """Losses .1 and .4: .2 in both, where the arithmetic mean is .25."""
    rows = table({"data.samples": (512,)}, {"learned": 1.0, "frozen": 2.0})
    rows = rows[rows.seed < 2]
    rows.loc[rows.arm == "learned", "test/loss"] = rows.seed.map({0: 0.1, 1: 0.4})
    drawing, config = data(rows, ("data.samples",)), override(base(), {"data.samples": 512, "gate.horizon": 1.0})
    (point,) = arms.by_point(drawing, config)
    claim = Writer("same").order("x.y", "s", "", LEARNED, FROZEN)
    (record,) = verdicts.judge((claim,), rows, config, ["data.samples"])
    assert point.standings.lines[0]["cells"][0].value == "0.2" and "learned 0.2 against" in record["text"]
    assert "geometric" in record["text"] and point.standings.means.startswith("geometric means of top-1 test loss")


def test_the_terminal_and_the_menu_have_the_arms_at_each_point():
    """At 16 experts learned has .2, at 4 a quarter of it; claims are at the largest, which stands on the page first."""
    rows = table({"data.samples": (512,), "experts.count": (4, 8, 16)}, {"learned": 0.1, "frozen": 1.0})
    drawing = data(rows, ("data.samples", "experts.count"))
    found = arms.by_point(drawing, override(base(), {"data.samples": 512}))
    assert [(point.values, point.is_first) for point in found] == [
        ({"experts.count": count}, count == "16") for count in ("4", "8", "16")
    ]
    _, title, stars, heads, learned, frozen = answer._arms_of(found).splitlines()
    assert "geometric means" in title and stars.split() == ["*"] and heads.split() == ["experts.count", "4", "8", "16"]
    assert [text[:4] for text in re.findall(r"\S+ \[", learned)] == ["0.05", "0.10", "0.20"] and "frozen" in frozen
    assert not answer._arms_of([])


@pytest.mark.parametrize("name", ["gmm", "artificial"])
def test_every_metric_says_what_it_measures(name):
    config = override(base(), {"data.name": name} | ({"model": "t5"} if name == "artificial" else {}))
    columns = problem_of(config).columns(config)
    assert not [metric for metric, column in columns.items() if not column.definition.endswith((".", ")"))]


def claim(verdict, **changes):
    return {
        "id": "x.y", "verdict": verdict, "statement": "a beats b", "text": "ratio 2 [1.5, 2.5]", "n": 5,
        "paper": "not asked", "reason": "", "comparability": "same",
    } | changes  # fmt: skip


def test_the_answer_tells_first_what_speaks_against_the_claims():
    claims = [claim("supported"), *[claim("inconclusive", reason="one seed")] * 6, claim("opposite", paper=0.5)]
    assert answer.summary(claims) == "Of 8 claims: 1 opposite, 1 supported, 6 inconclusive."
    found = answer.answer(claims)
    assert [one.verdict for one in found] == ["opposite", "supported", *["inconclusive"] * 5]
    assert found[0].rests == "ratio 2 [1.5, 2.5]; n = 5; the paper: 0.5"
    assert found[2].rests.endswith("one seed") and found[-1].says == "2 more, below"


def test_a_page_begins_with_its_first_judged_claims_and_open_ones_come_last():
    claims = [claim("not judged"), claim("inconclusive"), claim("supported"),
              claim("opposite", text="a 2 against b 1; ratio 0.5 [0.4, 0.6]")]  # fmt: skip
    assert answer.in_short(claims) == (
        "A beats b (ratio 2 [1.5, 2.5], n = 5); the opposite of: a beats b (ratio 0.5 [0.4, 0.6], n = 5); open: a beats"
        " b (ratio 2 [1.5, 2.5], n = 5). Of 4 claims: 1 opposite, 1 supported, 1 inconclusive, 1 not judged."
    )
    last = claim("supported", text="R^2 0.9 [0.8, 1.0] over 30 points; without the largest gaps 0.4")
    assert "(R^2 0.9 [0.8, 1.0] over 30 points, n = 5)" in answer.in_short([last])


def test_nothing_is_answered_by_a_smoke_run():
    claims = [claim("not judged", reason="a smoke run shows that the figure runs, not what it finds")] * 2
    records = [record | {"points": []} for record in claims]
    part = {"in_short": answer.in_short(claims), "behind": [], "claims": records, "by_point": [], "gap": None}
    assert answer.as_text(part | {"shares": None}).count("a smoke run") == 1  # not once for each claim
    assert answer.in_short(claims).startswith("Nothing can be said yet") and not answer.answer(claims)
    assert "figures and tables" in answer.summary([])


def test_findings_are_read_from_claims_alone(tmp_path):
    (tmp_path / "claims.json").write_text(json.dumps([claim("opposite")]))
    text = answer.findings([tmp_path])
    assert (
        "The opposite holds of “a beats b” (ratio 2 [1.5, 2.5]; n = 5)" in text
        and "OPPOSITE        x.y: a beats b" in text
    )
    (tmp_path / "claims.json").write_text("[")
    with pytest.raises(UserError, match="damaged"):
        answer.findings([tmp_path])
    (tmp_path / "claims.json").unlink()
    with pytest.raises(UserError, match=r"no claims\.json: name a finished workdir"):
        answer.findings([tmp_path])


def test_the_command_finds_the_runs_of_the_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no finished runs below runs/"):
        reported("--findings")
    (published := tmp_path / "docs" / "results" / "data" / "two").mkdir(parents=True)
    (published / "claims.json").write_text(json.dumps([claim("opposite")]))
    reported("--findings")
    assert capsys.readouterr().out.startswith(
        "no finished runs below runs/; what is published in docs/results:\n\ntwo\n"
    )
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "claims.json").write_text(json.dumps([claim("supported")]))
    (tmp_path / "runs" / "report.html").write_text("the overview")
    for names in ([], ["runs/one", "runs/report.html"]):
        reported("--findings", *names)
        assert capsys.readouterr().out.startswith("one\nOf 1 claim: 1 supported.\n  Supported: “a beats b”")


def test_the_overview_begins_with_experiments_against_verdicts(tmp_path):
    """Two experiments of 1 and 30 claims: a matrix of two rows before the claims, each with its experiment's name."""
    some = {"in_short": "", "answer": [], "behind": [], "by_point": [], "figures": [], "left_out": [],
            "undrawn": [], "maps": None,
            "gap": [], "shares": [], "gap_at": "", "threats": [], "arms": "", "loss": "test/loss",
            "loss_definition": "", "horizon": 4.0, "summary": "", "summary_of": "", "config": "", "versions": "",
            "document": "", "command": "", "question": "q"}  # fmt: skip
    shown = claim("supported", comparability="same", robustness=None, points=[], points_there=0)
    parts = [
        some | {"name": "a", "claims": [shown]},
        some | {"name": "b", "claims": [shown | {"verdict": "opposite"}] * 30},
    ]
    page.write_page(tmp_path / "report.html", parts)
    text = (tmp_path / "report.html").read_text()
    matrix, claims = text.index('class="matrix"'), text.index('class="claim"')
    cells = re.findall(r"<td[^>]*>(\d+|·)</td>", text[matrix:claims])
    assert matrix < claims and cells == ["·", "1", "30", "·"]  # what speaks against a claim first
    assert text[claims:].count('href="#b"') == 30 and text.count("<h1 id=") == 2
    assert interactive.library() not in text  # nothing there to draw
