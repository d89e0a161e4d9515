"""A surgery about given losses: differences paired by row, shares of a router's worth, sentences, the page."""

import numpy as np
import pytest

from routed.contracts import UserError
from routed.trace import surgery_page, surgery_results
from routed.trace.model_inputs import BYTES, halves, rows_of
from routed.trace.surgery_jobs import ALL, Job, SurgeryResult

RNG = np.random.default_rng(4)
ROWS = 60
AS_IS = 3 + RNG.normal(size=ROWS)  # rows differ by far more than routers do
SMALL = 0.01 * RNG.normal(size=ROWS)


def result(**more):
    """Two layers: noise loses 1 in both, .5 and .3 alone; a table a quarter, repaired a tenth; repair alone: .1."""
    losses = {Job(ALL, ""): AS_IS, Job(ALL, "trained", 0, 9): AS_IS - 0.1}
    for layer, lost in ((ALL, 1.0), ("a", 0.5), ("b", 0.3)):
        losses[Job(layer, "trained", 0, 9)] = AS_IS - 0.1
        losses |= {Job(layer, "noise", draw): AS_IS + lost + SMALL + 0.02 * draw for draw in (0, 1)}
        losses[Job(layer, "table")] = AS_IS + lost / 4 + SMALL
        losses[Job(layer, "table", 0, 9)] = AS_IS - 0.1 + lost / 10 + SMALL
    outcomes = {"losses": losses, "reasons": {Job(ALL, "top1"): "a token has one expert already"}} | more
    return SurgeryResult(
        layers=("a", "b"),
        experts=4,
        unseen=0.125,
        tokens=60 * 9,
        repair_steps=9,
        draws=2,
        model="m",
        source="t.txt",
        **outcomes,
    )


def row(table, layer, name, repaired=0):
    (line,) = table[(table.place == layer) & (table.router == name) & (table.repaired == repaired)].itertuples()
    return line


def test_losses_are_paired_and_repaired_ones_compared_with_their_like():
    table = surgery_results.table(result())
    noise = row(table, ALL, "noise")
    assert noise.lost == pytest.approx(1.01 + SMALL.mean()) and noise.draws == 2 and noise.spread == pytest.approx(0.02)
    # SMALL, not the rows' deviation of 1: 2 * 1.96 * .01 / sqrt(60)
    assert noise.high - noise.low == pytest.approx(2 * 1.96 * SMALL.std() / 60**0.5, rel=0.15)
    assert row(table, "a", "table").lost == pytest.approx(0.125 + SMALL.mean())
    repaired = row(table, "a", "table", 9)
    assert repaired.lost == pytest.approx(0.05 + SMALL.mean()) and repaired.against == pytest.approx(AS_IS.mean() - 0.1)
    # of the worth .51 + s against the model as it is, .61 + s against the repaired one
    s = SMALL.mean()
    assert row(table, "a", "table").kept == pytest.approx(1 - (0.125 + s) / (0.51 + s))
    assert (
        repaired.kept == pytest.approx(1 - (0.05 + s) / (0.61 + s))
        and repaired.kept_low < repaired.kept < repaired.kept_high
    )
    assert row(table, ALL, "trained", 9).lost == pytest.approx(-0.1)
    assert row(table, ALL, "top1").reason == "a token has one expert already" and np.isnan(row(table, ALL, "top1").lost)


def test_a_router_that_is_worth_nothing_leaves_no_share():
    losses = {Job(ALL, ""): AS_IS, Job(ALL, "noise"): AS_IS + SMALL - SMALL.mean(), Job(ALL, "table"): AS_IS + 0.1}
    table = surgery_results.table(result(losses=losses))
    assert np.isnan(row(table, ALL, "table").kept) and surgery_results.kept_share(row(table, ALL, "table")) == "–"


def test_sentences_and_what_cannot_be_said():
    measured = result()
    table = surgery_results.table(measured)
    said = "\n".join(surgery_results.findings(measured, table, surgery_results.regret_table(measured)))
    assert f"has a loss of {AS_IS.mean():.4g} [" in said and "nats a token, on 540 tokens" in said
    assert (
        "from 0.31" in said
        and "(b) to 0.51" in said
        and "Their sum, 0.82" in said
        and "less than the worth of all routers together" in said
    )
    assert (
        'With "table by token id, from other text" in every layer the model loses 0.25' in said
        and "12.5 % of the tokens have an id that the other text lacks" in said
    )
    assert 'Repaired for 9 steps, "table by token id, from other text" loses least: 0.1 [' in said
    assert "whose own repair changes the loss by -0.1 [" in said
    unsaid = "\n".join(surgery_results.unsaid(measured, table, surgery_results.regret_table(measured)))
    assert (
        "the experts here were trained for the trained router" in unsaid
        and "one expert a token, anywhere: a token has one expert already" in unsaid
    )
    assert "one random draw" not in unsaid and "--draws above 1" in "\n".join(
        surgery_results.unsaid(measured._replace(draws=1), table, surgery_results.regret_table(measured))
    )
    assert "set --repair_steps" in "\n".join(
        surgery_results.unsaid(measured._replace(repair_steps=0), table, surgery_results.regret_table(measured))
    )


def test_the_page_has_the_table_and_its_figures(tmp_path):
    report = surgery_page.report(result(), tmp_path)
    page = (tmp_path / "surgery.html").read_text()
    assert (
        page.count("<svg") == 3
        and "keeps of the worth" in page
        and all(text.split("(")[0].replace("'", "&#39;").replace('"', "&#34;") in page for text in report["findings"])
    )
    assert len((tmp_path / "surgery.csv").read_text().splitlines()) == 1 + len(report["worth"])
    alone = {job: losses for job, losses in result().losses.items() if not job.repair_steps}
    surgery_page.report(result(losses=alone)._replace(repair_steps=0), tmp_path)
    assert (
        "repaired"
        not in (tmp_path / "surgery.html").read_text().partition("<h2>All routers")[2].partition("</table>")[0]
    )


class Tokenizer:
    """Letters by number behind `before`, and 99 at the end, as tokenizers of T5 have it."""

    def __init__(self, before):
        self.before = before

    def __call__(self, text, add_special_tokens=True):
        ids = [ord(letter) - 97 for letter in text]
        return {"input_ids": [*self.before, *ids, 99] if add_special_tokens else ids}


def test_every_row_begins_with_bos(tmp_path):
    """Rows of 4 tokens are BOS and 3 letters; of 7 letters the last is left out."""
    (tmp_path / "x.txt").write_text("abcdefg")
    rows, _ = rows_of([str(tmp_path / "x.txt")], Tokenizer([50]), 4)
    assert [row.tolist() for row in rows] == [[50, 0, 1, 2], [50, 3, 4, 5]]
    rows, _ = rows_of([str(tmp_path / "x.txt")], Tokenizer([]), 3)
    assert [row.tolist() for row in rows] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(UserError, match="--length=1: the tokenizer puts 1 tokens before a text"):
        rows_of([str(tmp_path / "x.txt")], Tokenizer([50]), 1)


def test_halves_are_of_every_file():
    rows = [np.array([i]) for i in range(7)]
    first, second = halves(rows, ["de"] * 4 + ["en"] * 3)
    assert [int(row[0]) for row in first] == [0, 1, 4] and [int(row[0]) for row in second] == [2, 3, 5, 6]
    with pytest.raises(UserError, match="en has one row, which cannot be halved"):
        halves(rows[:5], ["de"] * 4 + ["en"])


def test_files_of_one_name_are_halved_each(tmp_path):
    """a/x and b/x have two rows of three bytes each: both first rows, then both second; as one file a came first."""
    paths = [tmp_path / folder / "x.txt" for folder in "ab"]
    for path, text in zip(paths, ("abcdef", "uvwxyz"), strict=True):
        path.parent.mkdir()
        path.write_text(text)
    rows, names = rows_of([str(path) for path in paths], BYTES, 3)
    assert names == [str(paths[0])] * 2 + [str(paths[1])] * 2
    first, second = halves(rows, names)
    assert [bytes(row.astype(np.uint8)) for row in first] == [b"abc", b"uvw"]
    assert [bytes(row.astype(np.uint8)) for row in second] == [b"def", b"xyz"]
