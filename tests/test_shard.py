"""Parts of a sweep: together the whole, each about as long, and a report joins only what belongs together."""

import shutil

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routed.analysis import page, workdirs
from routed.contracts import UserError
from routed.engine import results, tables
from routed.plan import experiment, shards
from routed.plan.runs import groups, plan_runs
from routed.settings.tree import override
from tests.test_command_line import command, describe, refusal, reported, write_experiment

# Several programs to compile; the tests are about what is run.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled")]

SWEEP = tuple({"data.samples": n, "experts.count": e} for n in (8, 16) for e in (2, 4, 8))


@pytest.fixture
def runs(small):
    """2 x 3 points, 2 seeds; learned, its matched arm and one arm that needs nobody."""
    return plan_runs(override(small, {"arms": ("learned", "frozen_sharp", "dense_active")}), SWEEP)


def test_a_run_costs_six_flops_a_parameter_that_serves_a_token_and_its_updates(small):
    # Soft: all 4 experts serve. Router 3 x 4; experts 4 x 62 (test_plans). 20 steps x (8 tokens x 6 + an update's 80) x
    # 260.
    assert shards.cost(small) == 20 * (8 * 6 + 80) * (12 + 4 * 62)
    one = override(small, {"selection.name": "top_k", "selection.k": 1})
    assert shards.cost(one) == 20 * (8 * 6 * (12 + 62) + 80 * (12 + 4 * 62))
    assert shards.cost(override(one, {"steps": 40})) == 2 * shards.cost(one)


def test_families_hold_what_needs_each_other(runs):
    found = shards.families(runs)
    assert (
        sorted(len(f) for f in found) == [1] * 12 + [2] * 12
    )  # 12 points and seeds: dense alone; learned and its match
    for family in found:
        assert {key for run in family for key in run.needs} <= {run.key for run in family}


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_parts_are_disjoint_whole_and_balanced(runs, parts):
    made = [shards.part(runs, f"{i + 1}/{parts}") for i in range(parts)]
    assert sorted(run.key for one in made for run in one) == sorted(run.key for run in runs)
    for one in made:
        keys = {run.key for run in one}
        assert all(set(run.needs) <= keys for run in one)
    costs = [sum(shards.cost(run.config) for run in one) for one in made]
    largest = max(sum(shards.cost(run.config) for run in family) for family in shards.families(runs))
    assert max(abs(c - sum(costs) / parts) for c in costs) <= largest
    assert [run.key for run in shards.part(runs, f"1/{parts}")] == [run.key for run in made[0]]  # whoever asks
    assert len(made[0][0].config.keys()) == len(runs[0].config.keys())


def test_few_programs_are_compiled_twice(runs):
    """6 programs (2 of dense nets, sized by the experts, x 3 counts) in 3 parts: a cut adds at most one."""

    parts = [shards.part(runs, f"{i + 1}/3") for i in range(3)]
    assert (
        sum(len(groups(part)) for part in parts) <= len(groups(runs)) + 2 * 2
    )  # a cut may go through a family's two arms


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=6))
def test_what_is_no_part_is_refused(text):
    try:
        number, parts = shards.parse(text)
    except UserError as error:
        assert "expected I/N with I from 1 to N" in str(error)
    else:
        assert 1 <= number <= parts


def test_more_parts_than_runs_leave_some_with_nothing(runs):
    assert [len(shards.part(runs[:1], f"{i}/3")) for i in (1, 2, 3)] == [0, 1, 0]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A sweep run whole, and in two parts."""
    folder = tmp_path_factory.mktemp("shards")
    always = f"--config={write_experiment(folder)}", "--sweep=data.samples=16,32"
    command(*always, f"--workdir={folder / 'whole'}")
    for i in (1, 2):
        command(*always, f"--workdir={folder / f'part{i}'}", f"--shard={i}/2")
    return folder


def test_joined_parts_are_the_whole(parts, tmp_path, caplog):
    folders = [parts / "part1", parts / "part2"]
    assert not (parts / "part1" / "report.html").exists()  # verdicts of a part would be of too few runs
    assert workdirs.merged(folders) == [folders]
    joined, whole = workdirs.joined_table(folders), results.read_table(parts / "whole")
    order = ["run", "step"]
    pd.testing.assert_frame_equal(
        joined.sort_values(order, ignore_index=True), whole.sort_values(order, ignore_index=True), check_exact=True
    )
    module, config = experiment.configure(str(parts / "tiny.py"), [])
    made = [
        page.make_part(group, module, config, workdirs.joined_table(group)) for group in ([parts / "whole"], folders)
    ]
    assert made[0]["claims"] == made[1]["claims"] and made[0]["summary"] == made[1]["summary"]
    assert workdirs.merged([parts / "part2"]) == [[parts / "part2"]]
    assert "of the sweep's parts 1/2 is missing" in caplog.text


def test_the_command_joins_parts(parts, tmp_path, capsys):
    out = tmp_path / "page.html"
    reported(parts / "part1", parts / "part2", f"--out={out}", f"--experiment={parts / 'tiny.py'}")
    assert "tiny.claim" in capsys.readouterr().out and out.exists()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"config": {"steps": 31}},
            "part2 is no part of the sweep of .*part1: its steps is 31, there it is 30; report them",
        ),
        ({"commit": "0123"}, "its commit is 0123, there it is"),
        ({"format": 2}, "its format is 2, there it is 3"),
        ({"versions": {"routed": "9"}}, "its version of routed is 9, there"),
        ({"versions": {"jax": "0.1"}}, r"its version of jax is 0\.1, there"),
        ({"experiment": "/tmp/other.py"}, r"its experiment is other\.py:, there it is tiny\.py:"),
        ({"shard": "1/2"}, "part1 and .*part2 are the same part of a sweep"),
        ({"shard": "1/999999999999"}, r"part2/config\.json: shard 1/999999999999: expected I/N"),
        ({"shard": f"{'9' * 5000}/1"}, "expected I/N"),
        ({"shard": "²/2"}, "expected I/N"),
        ({"left_out": {"frozen": "is learned here"}}, "part2: config.json says that the arm frozen is left out"),
        ({"swept": []}, r"its swept keys is \[\], there it is \['data.samples'\]"),
    ],
)
def test_strangers_are_refused(parts, tmp_path, changes, text):
    for name in ("part1", "part2"):
        shutil.copytree(parts / name, tmp_path / name)
    describe(
        tmp_path / "part2",
        lambda content: content | {k: content[k] | v if isinstance(v, dict) else v for k, v in changes.items()},
    )
    with pytest.raises(UserError, match=text):
        (group,) = workdirs.merged([tmp_path / "part1", tmp_path / "part2"])
        workdirs.joined_table(group)


def test_a_part_that_read_other_data_at_a_point_is_refused(parts, tmp_path):
    for name in ("part1", "part2"):
        shutil.copytree(parts / name, tmp_path / name)
        describe(tmp_path / name, lambda content, name=name: content | {"further_data": {"data.directory=x": name}})
    with pytest.raises(
        UserError, match=r"at data\.directory=x, .*part2 has other data than .*part1: report them apart"
    ):
        workdirs.merged([tmp_path / "part1", tmp_path / "part2"])


def test_a_part_without_a_column_of_the_others_is_refused(parts, tmp_path):
    for name in ("part1", "part2"):
        shutil.copytree(parts / name, tmp_path / name)
    group, whole = [tmp_path / "part1", tmp_path / "part2"], results.read_table(parts / "whole")
    for folder, rows in zip(group, (whole[whole.seed == whole.seed.min()], whole), strict=True):
        tables.merge(folder, rows[rows.seed == rows.seed.max()].reset_index(drop=True))
    assert len(workdirs.joined_table(group)) == len(whole)
    tables.merge(group[1], results.read_table(group[1]).drop(columns="train/loss"))
    with pytest.raises(UserError, match="part2 has no column train/loss, which parts beside it have"):
        workdirs.joined_table(group)
    with pytest.raises(UserError, match="part2: its results have no column 'train/loss'"):
        workdirs.joined_table(group[1:], "train/loss")


def test_duplicates_are_refused(parts, tmp_path):
    copy = shutil.copytree(parts / "whole", tmp_path / "copy")
    for twice in ([parts / "whole", copy], [parts / "whole", parts / "whole"]):
        (group,) = workdirs.merged(twice) if twice[0] != twice[1] else [twice]
        with pytest.raises(UserError, match=r"whole and .* hold the same run .*: name one of them only"):
            workdirs.joined_table(group)


def test_a_part_that_is_none_ends_in_one_line(parts):
    for text in ("0/2", "3/2", "2", "a/b"):
        assert f"--shard={text}: expected I/N" in refusal(f"--config={parts / 'tiny.py'}", f"--shard={text}")


def test_two_parts_in_one_workdir_are_refused(parts):
    text = refusal(
        f"--config={parts / 'tiny.py'}", f"--workdir={parts / 'part1'}", "--sweep=data.samples=16,32", "--shard=2/2"
    )
    assert "is that of part 1/2, this is part 2/2: give each part a --workdir of its own" in text


def test_parts_have_workdirs_of_their_own(parts, monkeypatch):
    monkeypatch.chdir(parts)
    command("--config=tiny.py", "--shard=2/2", "--config.seeds=1")
    assert [path.name for path in (parts / "runs").iterdir()] == ["tiny-seeds=1-shard2of2"]
