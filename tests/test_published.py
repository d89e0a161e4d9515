"""The pages of docs/results: made of the committed tables, and of nothing else."""

import contextlib
import json
import math
import pathlib
import re
import shlex
import shutil

import numpy as np
import pandas as pd
import pytest

from routed.analysis import changed, page, verdicts, versions, workdirs
from routed.contracts import UserError
from routed.engine import results
from routed.plan import experiment
from routed.publish import committed, coverage, published
from tests.test_command_line import command, describe, write_experiment

ROOT = pathlib.Path(__file__).parent.parent / "docs" / "results"


def test_the_committed_pages_are_those_of_the_committed_tables(tmp_path):
    shutil.copytree(ROOT / "data", tmp_path / "data")
    shutil.copy(ROOT / "coverage.json", tmp_path)
    readme = (ROOT / "README.md").read_text()  # marks and the table of the papers are made
    begin, end = readme.index(coverage.BEGIN) + len(coverage.BEGIN), readme.index(coverage.END)
    (tmp_path / "README.md").write_text(readme[:begin] + readme[end:])
    made = published.write_pages(tmp_path)
    assert (tmp_path / "README.md").read_text() == readme
    assert made and {path.name for path in made} == {path.name for path in ROOT.glob("*.md")} - {"without_page.md"}
    for path in made:
        assert path.read_text() == (ROOT / path.name).read_text(), path.name


def test_each_figure_of_the_papers_has_a_page_or_a_reason():
    """61 figures and tables, and 4 statements."""
    ids = json.loads((ROOT / "coverage.json").read_text())["ids"]
    assert len(ids) == 65
    for id, state in ids.items():
        assert state and (isinstance(state, str) or all((ROOT / "data" / name).is_dir() for name in state)), id


def test_a_tally_keeps_apart_what_is_no_evidence_about_a_figure():
    """Figures: one held, one failed, one open. The second "a" stands on another page, "a.set" has another protocol."""
    verdicts = [
        ("x.a", "supported", "same"), ("x.a", "opposite", "same"), ("x.b", "not reproduced", "same"),
        ("x.c", "inconclusive", "same"), ("x.d", "not judged", "stand_in"), ("x.d", "supported", "stand_in"),
        ("x.i", "opposite", "scaled"), ("x.theorem.e", "supported", "same"),
        ("x.f", "exact", "same"), ("x.g", "not run", "same"), ("x.d", "opposite", "stand_in"),
        ("x.ours.h", "supported", "same"), ("y.a", "supported", "same"), ("x.a.set", "opposite", "same"),
    ]  # fmt: skip
    claims = [{"id": id, "verdict": verdict, "comparability": where} for id, verdict, where in verdicts]
    listed = {
        "theorems": ["x.theorem"],
        "ours": ["x.ours"],
        "again": [".set"],
        "ids": {"x.a": ["page"], "x.z": "no files"},
    }
    figures, stand_ins, theorems = coverage.tally(claims, "x", listed)
    assert (
        figures == {"hold": 1, "fail": 1, "open": 1} and stand_ins == {"hold": 1, "fail": 1} and theorems == {"hold": 2}
    )
    made = coverage.table(claims, {"x": "X"}, listed).splitlines()
    assert made[2] == "| X | 3 | 1 | 1 | 1 | 1, 1, 0 | 2, 0, 0 | 1 of 2 |"
    assert made[-1] == "- 1 without a page: no files"


def test_kept_results_have_the_claims_that_their_commands_make():
    """An experiment that asks something else now, or in other words of the paper, is judged and kept again."""
    for path in (ROOT / "data").glob("*/about.json"):
        words = shlex.split(json.loads(path.read_text())["command"])
        (spec,) = (word.removeprefix("--config=") for word in words if word.startswith("--config="))
        settings = [word.removeprefix("--config.") for word in words if word.startswith("--config.")]
        module, config = experiment.configure(spec, settings)
        made = {claim.id: claim.paper for claim in experiment.figure_of(module, config).claims(config)}
        kept = json.loads(path.with_name("claims.json").read_text())
        # A paper's claim at other settings, which --sweep gives, is filed as the user's own.
        assert {claim["id"].removeprefix(changed.YOURS) for claim in kept} == {*made}, path
        texts = {claim["id"]: claim["paper"] for claim in kept if isinstance(claim["paper"], str)}
        texts = {id: text for id, text in texts.items() if not id.startswith(changed.YOURS)}
        assert texts == {id: str(made[id]) for id in texts}, path


def kept_result(root, name, claims, **changes):
    """Writes a made-up result as `keep` does."""
    about = {"question": "why?", "command": "routed run --config=x", "seconds": 1, "machine": "m", "devices": 1,
             "commit": "c", "rules": versions.RULES,
             "gap": [], "gap_at": "", "figures": []} | changes  # fmt: skip
    (root / "data" / name).mkdir(parents=True)
    (root / "data" / name / "claims.json").write_text(json.dumps(claims))
    (root / "data" / name / "about.json").write_text(json.dumps(about))
    (root / "data" / name / "arms.csv").write_text("learned\n1\n")


def test_a_figure_stands_with_its_own_line(tmp_path):
    """In the contents in place of the question, which all figures of an experiment share."""
    kept_result(tmp_path, "x-f", [], line="Fig. 1: that", experts={"learned": [2, 2], "compete": [2.7, 16]})
    kept_result(tmp_path, "x-g", [], line="")
    (page,) = published.write_pages(tmp_path)
    text = page.read_text()
    assert "| [x-f](#x-f) | Fig. 1: that | figures and tables |\n| [x-g](#x-g) | why? |" in text
    assert "## x-f\n\nwhy?\n\nFig. 1: that\n\n" in text
    assert "\n\nExperts computed per training token: learned 2, compete 2.7 to 16.\n" in text


def test_experts_of_arms_are_told_where_they_differ():
    summary = pd.DataFrame(
        [
            ("train/experts_per_token", arm, mean)
            for arm, mean in (("learned", 2.0), ("compete", 2.7), ("compete", 16.0))
        ]
        + [("test/loss", "frozen", 1.0)],
        columns=["metric", "arm", "mean"],
    )
    assert committed.experts_of(summary) == {"learned": [2.0, 2.0], "compete": [2.7, 16.0]}
    assert committed.experts_of(summary[:1]) == committed.experts_of(summary[3:]) == {}


#: An interval of the README -> (kept result, claim or part of the gap, what is done to its ends).
FINDINGS = {
    "[13.2, 15.1]": ("gmm_router", "dikkala.fig3a.frozen", float),
    "[52, 56]": ("gmm_router", "sharpness", lambda share: 100 * share),
    "[.48, .60]": ("gmm_router", "routed.gmm.fair", float),
    "[.35, .43]": ("gmm_router-rates", "routed.rates.mlp.learned", float),
    "[1.14, 2.27]": ("sequence_router", "routed.sequence.fair", float),
    "[1.02, 1.11]": ("dictionary_router", "routed.dictionary.fair", float),
    "[.011, .015]": ("token_router", "routed.tokens.frozen", float),
    "[.027, .031]": ("token_router", "routed.tokens.hash-token", abs),  # behind
    "[3.3, 6.8]": ("geometry", "routed.geometry.learned-wins-high", float),
    "[1.1, 2.0]": ("gmm_router-rates_constant-again", "routed.rates.constant.learned", float),
    "[.044, .064]": ("competition_lm", "pham.table9", abs),  # behind: below 0 there
}


def ends_of(kept, name):
    """The interval of a claim, or of the share of a part of the gap."""
    claims = {claim["id"]: claim for claim in json.loads((ROOT / "data" / kept / "claims.json").read_text())}
    if name in claims:
        return claims[name]["interval"]
    about = json.loads((ROOT / "data" / kept / "about.json").read_text())
    (part,) = [part for part in about["gap"] if part["part"] == name]
    return part["share_low"], part["share_high"]


@pytest.mark.parametrize("interval", FINDINGS)
def test_a_finding_of_the_readme_is_that_of_its_table(interval):
    kept, name, shown = FINDINGS[interval]
    ends = sorted(shown(float(end)) for end in ends_of(kept, name))
    for text, end in zip(interval.strip("[]").split(", "), ends, strict=True):
        assert float(text) == pytest.approx(round(end, len(text.partition(".")[2])), abs=1e-9)


def test_every_interval_of_the_readme_is_checked():
    text = " ".join((ROOT.parent.parent / "README.md").read_text().split())  # an interval may be on two lines
    assert set(re.findall(r"\[[-\d.]+, [-\d.]+\]", text)) == set(FINDINGS)


def test_verdicts_against_k_means_as_the_better_router_stand_beside_it():
    """Both pages say that frozen k-means is ahead: each supported verdict of learning over k-means is named there."""
    text = "".join((folder / "README.md").read_text() for folder in (ROOT, ROOT.parent.parent))
    kept = [claim for path in ROOT.glob("data/*/claims.json") for claim in json.loads(path.read_text())]
    against = {
        claim["id"]
        for claim in kept
        if claim["id"].endswith(".fair")
        and claim["verdict"] == "supported"
        and "learned" in claim["text"]
        and "against frozen_kmeans" in claim["text"]
    }
    assert against and {name for name in against if name not in text} == set()


#: What prose does to the ends of an interval: a log ratio as a factor, either way round; a share in per cent; a ratio
#: turned around.
SHOWN = (lambda x: x, lambda x: 100 * x, lambda x: -x, math.exp, lambda x: math.exp(-x), lambda x: 1 / x)


def kept_intervals():
    """All intervals of the committed tables, sorted ends: numbers, in any way of showing them, and those in words."""
    ends = set[tuple[float, float]]()

    def look(one):
        if isinstance(one, dict):
            pairs = [
                one.get("interval"),
                [one.get("low"), one.get("high")],
                [one.get("share_low"), one.get("share_high")],
                (one.get("later") or [])[1:],
            ]
            ends.update(tuple(pair) for pair in pairs if pair and len(pair) == 2 and None not in pair)
            one = one.values()
        for each in one if not isinstance(one, str | float | int | None) else ():
            look(each)

    for path in ROOT.glob("data/*/*.json"):
        look(json.loads(path.read_text()))
    words = "\n".join(path.read_text() for path in ROOT.glob("data/*/*") if path.suffix in (".json", ".csv"))
    found = {tuple(map(float, pair)) for pair in re.findall(r"\[([-+.\d]+), ([-+.\d]+)\]", words)}
    for low, high in ends | found:
        for show in SHOWN:
            with contextlib.suppress(OverflowError, ZeroDivisionError):
                found.add(tuple(sorted((show(low), show(high)))))
    return np.array(sorted(found))


def test_every_interval_of_the_results_is_that_of_a_table():
    """Of docs/results/README.md, which is written by hand: both ends, to the digits that are shown."""
    kept, lost = kept_intervals(), []
    for low, high in re.findall(r"\[([-.\d]+), ([-.\d]+)\]", (ROOT / "README.md").read_text()):
        near = [
            abs(kept[:, i] - float(text)) <= 0.5001 * 10.0 ** -len(text.partition(".")[2])
            for i, text in enumerate((low, high))
        ]
        lost += [f"[{low}, {high}]"] * (not (near[0] & near[1]).any())
    assert lost == []


#: A number of an experiment: an interval, a factor, a share.
NUMBER = re.compile(r"\[[-+.\d]+, [-+.\d]+\]|\d-fold|\d %")


@pytest.mark.parametrize("name", ["README.md", "docs/results/README.md", "BUILD_NOTES.md"])
def test_no_number_of_an_experiment_is_cited_without_a_page(name):
    """Each bullet and paragraph, with the table below it, links to a result or to those that have no page."""
    pages = {page: (ROOT / f"{page}.md").read_text() for page in (*dict(published.SOURCES.values()), "without_page")}
    headings = {page: re.findall("^## (.+)$", text, re.MULTILINE) for page, text in pages.items()}
    anchors = {(page, re.sub("[^a-z0-9_ -]", "", title.lower()).replace(" ", "-"))
               for page, titles in headings.items() for title in titles}  # fmt: skip
    for block in re.split(r"\n\n(?!\|)|\n(?=- )", (ROOT.parent.parent / name).read_text()):
        links = set(re.findall(r"\]\((?:docs/results/)?(\w+)\.md#([\w-]+)\)", block))
        assert not NUMBER.search(block) or links & anchors, block
        assert {link for link in links if link[0] in pages} <= anchors, block


def test_the_table_of_the_first_page_is_that_of_the_results():
    """Statements of figures and tables: hold, do not, open; of a paper that has none but on other data, those."""
    of_results = {}
    for line in (ROOT / "README.md").read_text().splitlines():
        if match := re.match(r"\| \[.+\]\((\w+\.md)\) \| (.*) \|$", line):
            cells = match[2].split(" | ")
            of_results[match[1]] = ", ".join(cells[1:4]) if cells[0] != "0" else cells[4]
    rows = re.findall(
        r"\(docs/results/(\w+\.md)\).* \| (\d+) \| (\d+) \| (\d+) \|", (ROOT.parent.parent / "README.md").read_text()
    )
    assert len(rows) == 4 and {page: ", ".join(counts) for page, *counts in rows} == of_results


def test_links_to_results_of_earlier_rules_are_marked():
    about = {path.parent.name: json.loads(path.read_text()) for path in ROOT.glob("data/*/about.json")}
    stale = {result for result, facts in about.items() if facts["rules"] != versions.RULES}
    for text in ((folder / "README.md").read_text() for folder in (ROOT, ROOT.parent.parent)):
        assert published.marked(text, stale) == text
        assert ("† marks" in text) == ("†" in text)  # explained where it stands


def test_a_command_gives_what_points_are_computed_from_and_not_what_is_computed():
    """Steps of as many FLOPs follow from steps and lambda; of lambda there is one value, which is not the figure's."""
    given = ["steps=3000", "selection.competition_rate=0.01", "arms=learned,compete", "data.directory=/there"]
    module, config = experiment.configure("competition_lm:decisive", given)
    same, longer = experiment.figure_of(module, config).sweep(config)
    rows = [
        {key: one[key] for key in ("steps", "eval_every", "selection.competition_rate")} | {"seed": 3100}
        for one in (same, longer)
    ]
    assert workdirs.command_of("competition_lm:decisive", module, config, pd.DataFrame(rows)) == (
        "routed run --config=competition_lm:decisive --config.selection.competition_rate=0.01 --config.steps=3000"
        " --config.arms=learned,compete --config.data.directory=DIR"
    )


def test_no_kept_command_names_a_place_of_the_machine_that_ran_it():
    commands = [json.loads(path.read_text())["command"] for path in (ROOT / "data").glob("*/about.json")]
    assert len(commands) > 40 and not [text for text in commands if re.search(r"=['\"]?[/~]", text)]


def test_a_page_begins_with_what_is_on_it():
    """A line for each section, with its verdicts."""
    text = (ROOT / "ours.md").read_text()
    assert re.findall(r"^\| \[(.+?)\]\(#", text, re.MULTILINE) == re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert "| 3 inconclusive |\n" in re.search(r"\| \[law-again\].*\n", text).group()


def test_contradictions_are_of_papers():
    slips = json.loads((ROOT / "data" / "contradictions.json").read_text())
    assert set(slips) <= set(published.SOURCES) and all(
        text.endswith(".") for texts in slips.values() for text in texts
    )


def test_what_speaks_against_a_paper_has_a_cause_or_is_open():
    """A sentence beside every verdict that contradicts the paper's number or order; our own questions need none."""
    causes = json.loads((ROOT / "data" / "causes.json").read_text())
    silent = [
        claim["id"]
        for path in ROOT.glob("data/*/claims.json")
        for claim in json.loads(path.read_text())
        if claim["verdict"] in ("opposite", "not reproduced") and claim["paper"] != "not asked"
        if not (claim["reason"] or claim["id"] in causes)
    ]
    assert silent == []
    assert all(why.startswith(("because", "still open")) for why in causes.values())


def test_a_paper_s_page_lists_what_does_not_hold(tmp_path):
    """An order and a number, each once though two results say the same; not what was never asked of the paper."""
    made = {
        "verdict": "opposite",
        "paper": "better",
        "statement": "s",
        "text": "t",
        "reason": "",
        "n": 3,
        "comparability": "stand_in",
    }
    first = [
        made | {"id": "pham.a"},
        made | {"id": "pham.b", "verdict": "not reproduced", "paper": 0.5, "text": "other"},
    ]
    second = [
        made | {"id": "pham.a"},
        made | {"id": "pham.c", "paper": "not asked"},
        made | {"id": "pham.d", "verdict": "supported"},
    ]
    for name, claims in (("one", first), ("two", second)):
        kept_result(tmp_path, name, claims)
    (tmp_path / "data" / "causes.json").write_text('{"pham.a": "because of a"}')
    (page,) = published.write_pages(tmp_path)
    verdicts = re.findall(r"`pham.(\w)`.*\*\*\w+\*\*(.*) \|$", page.read_text(), re.MULTILINE)
    assert dict(verdicts)["d"] == " (other data)" and dict(verdicts)["c"] == ""
    table = page.read_text().partition("**What does not hold here**")[2].partition("\n## ")[0]
    assert re.findall(r"^\| \[.*$", table, re.MULTILINE) == [
        "| [one](#one) | s | better | t | because of a |", "| [one](#one) | s | 0.5 | other |  |",
    ]  # fmt: skip
    (tmp_path / "data" / "contradictions.json").write_text('{"pham": ["1 is 2"], "chen": ["3 is 4"]}')
    (tmp_path / "data" / "half").mkdir()  # of a command that was killed
    (page,) = published.write_pages(tmp_path)
    assert "contradicts itself**, by its own numbers:\n\n- 1 is 2\n\n## one" in page.read_text()


def test_claims_of_papers_without_a_page_stand_among_our_own():
    assert "| `fan.random` a frozen random router" in (ROOT / "ours.md").read_text()


def test_figures_keep_their_words_and_lose_decimals():
    small = committed.lightened(
        '<g transform="translate(1.2345,0)"><path d="M1.234567,2.55L3.0123,4"/><text>0.055</text></g>'
    )
    assert small == '<g transform="translate(1.2,0)"><path d="M1.2,2.5L3.0,4"/><text>0.055</text></g>'
    mark = '<path transform="translate({},2)" d="M1,0Z" fill="red"/>'
    marks = f"<svg>{mark.format(3)}{mark.format(4)}</svg>"
    uses = '<use href="#mark0" x="3" y="2"/><use href="#mark0" x="4" y="2"/>'
    assert committed.lightened(marks) == f'<svg><defs><path id="mark0" d="M1,0Z" fill="red"/></defs>{uses}</svg>'


@pytest.mark.slow
def test_a_workdir_is_kept_with_its_command_and_again_in_its_place(tmp_path):
    experiment, workdir, pages = write_experiment(tmp_path), tmp_path / "mine", tmp_path / "pages"
    command(f"--config={experiment}", f"--workdir={workdir}", "--config.seeds=1", "--sweep=data.separation=1,2")
    describe(workdir, lambda content: content | {"commit": "0123456789ab"})  # as if all is committed
    module, config = workdirs.experiment_of(workdir, [str(experiment)])
    table = results.read_table(workdir)
    part = page.make_part([workdir], module, config, table)
    for _ in range(2):
        committed.keep(part, [workdir], module, config, table, pages)
    about = json.loads((pages / "data" / "mine" / "about.json").read_text())
    assert about["command"] == "routed run --config=tiny.py --sweep=data.separation=1.0,2.0 --config.seeds=1"
    assert committed.judged(pages / "data" / "mine", [str(experiment)])["about.json"] == verdicts.to_json(about)
    assert about["seconds"] > 0 and len([*(pages / "data" / "mine" / "figures").iterdir()]) == 2 * len(about["figures"])
    assert "data.separation,learned,frozen" in (pages / "data" / "mine" / "arms.csv").read_text()


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"data holds no results: name workdirs to take them from"):
        published.write_pages(tmp_path)
    shutil.copytree(ROOT / "data", tmp_path / "data")
    (tmp_path / "data" / "causes.json").write_text('{"dikkala.fig9": "because"}')
    with pytest.raises(UserError, match=r"causes\.json: no claim of the kept results has the id 'dikkala.fig9'"):
        published.write_pages(tmp_path)


def test_results_without_claims_are_with_their_experiments_others(tmp_path):
    """Figures alone: on the page of the paper that the experiment's claims name, else among ours; nowhere twice."""
    shutil.copytree(ROOT / "data", tmp_path / "data")
    kept = json.loads((tmp_path / "data" / "chen_images-fig6" / "claims.json").read_text())
    assert kept == []
    stranger = tmp_path / "data" / "stranger"
    shutil.copytree(tmp_path / "data" / "chen_images-fig6", stranger)
    about = json.loads((stranger / "about.json").read_text())
    (stranger / "about.json").write_text(json.dumps(about | {"command": "routed run --config=stranger"}))
    pages = {path.stem: path.read_text() for path in published.write_pages(tmp_path)}
    assert [name for name, text in pages.items() if "\n## chen_images-fig6\n" in text] == ["chen2022"]
    assert [name for name, text in pages.items() if "\n## stranger\n" in text] == ["ours"]
    section = pages["ours"].partition("\n## stranger\n")[2]
    assert "| claim |" not in section.partition("\n## ")[0] and "figures/fig6.svg" in section


def test_every_figure_that_is_kept_is_on_a_page():
    """A name with two meanings left the figures, arms and gap of every result with a claim out for some commits."""
    pages = "".join(path.read_text() for path in ROOT.glob("*.md"))
    figures = [path for path in ROOT.glob("data/*/figures/*.svg") if not path.stem.endswith("-dark")]
    assert len(figures) > 50
    assert not [path for path in figures if f'src="{path.relative_to(ROOT)}"' not in pages]
