"""What is said before anything runs: the dry run, and the arithmetic of the bench."""

import sys

import pytest

from routed.bench import cluster, gmm
from routed.contracts import UserError
from routed.engine import dry_run
from routed.engine.devices import make_mesh
from routed.plan import experiment
from routed.plan.config import base
from routed.plan.points import of_command, unique
from routed.plan.runs import plan_runs
from routed.settings.tree import override


@pytest.mark.slow
def test_dry_run_lists_points_groups_and_costs(small):
    sweep = ({"data.samples": 8}, {"data.samples": 32})
    text = dry_run.describe(plan_runs(small, sweep), make_mesh(small))
    assert "point data.samples=8: learned, frozen" in text and "8 runs, 0 of them tuning, on 8 devices (cpu)" in text
    # Router 3 x 4; experts 4 x ((3+1) 5 + (5+1) 5 + (5+1) 2) = 4 x 62.
    assert text.count("group ") == 1 and f"{12 + 4 * 62} parameters a run" in text
    assert "estimated time" in text


def test_points_are_unique(small):
    assert unique(small, ({"seed": 1}, {"seed": 2}, {"seed": 1})) == ({"seed": 1}, {"seed": 2})
    assert unique(small, ({}, {"steps": 20}, {"steps": 40})) == ({}, {"steps": 40})  # the config's own steps


OWN = ({"data.samples": 8}, {"data.samples": 16, "arms": ("learned",), "seeds": 1}, {"data.samples": 16, "steps": 40})


@pytest.mark.parametrize(
    ("changes", "flags", "points"),
    [
        ({}, [], OWN),
        ({"data.samples": 32}, [], ({"data.samples": 32}, {"data.samples": 32} | OWN[1] | {"data.samples": 32}, OWN[2] | {"data.samples": 32})),
        ({"steps": 10, "eval_every": 10}, [], (OWN[0], OWN[1], OWN[2] | {"steps": 10})),
        ({"arms": ("frozen",), "seeds": 3}, [], (OWN[0], OWN[1] | {"arms": ("frozen",), "seeds": 3}, OWN[2])),
        ({"data.samples": 32, "arms": ("frozen",), "seeds": 3, "steps": 10, "eval_every": 10}, [], ({"data.samples": 32},)),
        ({"steps": 40}, ["data.samples=8,64"], ({"data.samples": 8}, {"data.samples": 64}, *({"data.samples": n, "arms": ("learned",), "seeds": 1} for n in (8, 64)))),
    ],
    ids=["nothing", "an axis", "a key of some points", "arms and seeds", "all", "both"],
)  # fmt: skip
def test_a_command_wins_over_the_points_of_a_figure(small, changes, flags, points):
    """At every point; points that become equal are one."""
    found = of_command(override(small, changes), lambda config: OWN, list(changes), flags)
    assert sorted(map(str, found)) == sorted(map(str, points))


def twice(config):
    """Half the samples have the config's steps, all of them twice as many."""
    return ({"data.samples": 8}, {"data.samples": 16, "steps": 2 * config.steps})


def test_a_command_goes_through_what_a_figure_computes_from_it(small):
    """Twice the steps of a command stay twice as many; a key that nothing is computed from holds at every point."""
    config = override(small, {"steps": 10, "eval_every": 10, "data.dim": 2})
    given = ["steps", "eval_every", "data.dim"]
    own = ({"data.samples": 8}, {"data.samples": 16, "steps": 20})
    assert of_command(config, twice, given, [], ("steps",)) == own
    assert of_command(config, twice, given, []) == ({"data.samples": 8}, {"data.samples": 16, "steps": 10})
    # 2 x 10 and 2 x 40 steps would both be 2 x 10; and 64 samples have no steps of their own.
    with pytest.raises(
        UserError, match=r"--sweep=steps=10,40: the figure computes steps from it.*--config.steps=VALUE"
    ):
        of_command(config, twice, [], ["steps=10,40"], ("steps",))
    with pytest.raises(UserError, match=r"--config.data.samples: the figure computes steps for each of its own values"):
        of_command(config, twice, ["data.samples"], [], ("steps",))
    assert len(of_command(config, twice, [], ["data.dim=2,3"], ("steps",))) == 4


def test_a_command_says_that_it_wins_and_what_is_ambiguous_is_refused(small, caplog):
    with caplog.at_level("INFO", logger="absl"):
        of_command(override(small, {"data.samples": 8}), lambda config: OWN, ["data.samples", "data.dim"], [])
    assert [r.getMessage() for r in caplog.records] == [
        "--config.data.samples holds at every point, in place of the figure's own values"
    ]
    with pytest.raises(UserError, match=r"--config.steps and --sweep=steps: one value or several"):
        of_command(small, lambda config: OWN, ["steps"], ["steps=10,20"])
    with pytest.raises(UserError, match=r"--sweep=steps: given twice"):
        of_command(small, lambda config: OWN, [], ["steps=10", "data.dim=3", "steps=20"])


def test_floor_is_the_larger_of_work_and_traffic():
    config = override(base(), gmm.COMMON | gmm.CASES["constant"][0])
    # P = 24 * 64 + 64 * 10 = 2176; FLOPs = 2 * 512 * (3 P - 24 * 64) = 5,111,808: 5.1 ms at 1e9 FLOP/s.
    assert gmm.floor_ms(config, rate=1e9, bandwidth=1e15) == pytest.approx(5.111808)
    assert gmm.floor_ms(config, rate=1e15, bandwidth=1e6) == pytest.approx(1e3 * 40 * 2176 / 1e6)


def test_baseline_lines_are_read():
    script = "print('constant experts, ms per step: 0.3\\ndepth-3 experts, ms per step: 9.5')"
    assert gmm.run_baseline(f'{sys.executable} -c "{script}"') == {"constant": 0.3, "mlp": 9.5}
    with pytest.raises(UserError, match="exit code 3"):
        gmm.run_baseline(f"{sys.executable} -c 'raise SystemExit(3)'")
    with pytest.raises(UserError, match="got only constant"):
        gmm.run_baseline("echo 'constant .3'")
    assert cluster.run_baseline("printf 'seed 0: 2.0 s, 100 steps, x\\nseed 1: 4.0 s, 300 steps, x\\n'") == (3.0, 200.0)


def test_the_floor_of_a_step_by_hand():
    """800 samples of 4 x 50, 16 filters, 8 experts: 4 800 (200 16 + 50 8) = 11.52 MFLOP, and 800 200 8 bytes = 1.28 MB."""
    _, config = experiment.configure("experiments/cluster_cnn.py:smoke", ["data.samples=800", "batch_size=800"])
    assert cluster.floor(config, 1e9, 1e12) == pytest.approx(0.01152)
    assert cluster.floor(config, 1e15, 1e9) == pytest.approx(0.00128)
