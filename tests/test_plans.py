"""What is said before anything runs: the dry run, and the arithmetic of the bench."""

import sys

import pytest

from routed.aot import this_machine
from routed.bench import dispatch, gmm, harness, lm, scaling, t5, trace
from routed.bench.__main__ import BENCHES
from routed.bench.harness import Baseline, Case, Work, as_line, timed
from routed.contracts import UserError
from routed.engine.devices import make_mesh
from routed.plan.config import base
from routed.plan.points import points_of_command, unique
from routed.plan.runs import plan_runs
from routed.settings.tree import override
from routed.system.machine import Rates


@pytest.mark.slow
def test_dry_run_lists_points_groups_and_costs(small):
    sweep = ({"data.samples": 8}, {"data.samples": 32})
    text = this_machine.describe(plan_runs(small, sweep), make_mesh(small))
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
        ({"data.samples": 32}, [], ({"data.samples": 32}, {"data.samples": 32} | OWN[1] | {"data.samples": 32},
                                    OWN[2] | {"data.samples": 32})),
        ({"steps": 10, "eval_every": 10}, [], (OWN[0], OWN[1], OWN[2] | {"steps": 10})),
        ({"arms": ("frozen",), "seeds": 3}, [], (OWN[0], OWN[1] | {"arms": ("frozen",), "seeds": 3}, OWN[2])),
        ({"data.samples": 32, "arms": ("frozen",), "seeds": 3, "steps": 10, "eval_every": 10}, [],
         ({"data.samples": 32},)),
        ({"steps": 40}, ["data.samples=8,64"], ({"data.samples": 8}, {"data.samples": 64},
            *({"data.samples": n, "arms": ("learned",), "seeds": 1} for n in (8, 64)))),
    ],
    ids=["nothing", "an axis", "a key of some points", "arms and seeds", "all", "both"],
)  # fmt: skip
def test_a_command_wins_over_the_points_of_a_figure(small, changes, flags, points):
    """At every point; points that become equal are one."""
    found = points_of_command(override(small, changes), lambda config: OWN, list(changes), flags)
    assert sorted(map(str, found)) == sorted(map(str, points))


def twice(config):
    """Half the samples have the config's steps, all of them twice as many."""
    return ({"data.samples": 8}, {"data.samples": 16, "steps": 2 * config.steps})


def test_a_command_goes_through_what_a_figure_computes_from_it(small):
    """Twice the steps of a command stay twice as many; a key that nothing is computed from holds at every point."""
    config = override(small, {"steps": 10, "eval_every": 10, "data.dim": 2})
    given = ["steps", "eval_every", "data.dim"]
    own = ({"data.samples": 8}, {"data.samples": 16, "steps": 20})
    assert points_of_command(config, twice, given, [], ("steps",)) == own
    assert points_of_command(config, twice, given, []) == ({"data.samples": 8}, {"data.samples": 16, "steps": 10})
    # 2 x 10 and 2 x 40 steps would both be 2 x 10; and 64 samples have no steps of their own.
    with pytest.raises(
        UserError, match=r"--sweep=steps=10,40: the figure computes steps from it.*--config.steps=VALUE"
    ):
        points_of_command(config, twice, [], ["steps=10,40"], ("steps",))
    with pytest.raises(UserError, match=r"--config.data.samples: the figure computes steps for each of its own values"):
        points_of_command(config, twice, ["data.samples"], [], ("steps",))
    assert len(points_of_command(config, twice, [], ["data.dim=2,3"], ("steps",))) == 4


def test_a_command_says_that_it_wins_and_what_is_ambiguous_is_refused(small, caplog):
    with caplog.at_level("INFO", logger="absl"):
        points_of_command(override(small, {"data.samples": 8}), lambda config: OWN, ["data.samples", "data.dim"], [])
    assert [r.getMessage() for r in caplog.records] == [
        "--config.data.samples holds at every point, in place of the figure's own values"
    ]
    with pytest.raises(UserError, match=r"--config.steps and --sweep=steps: one value or several"):
        points_of_command(small, lambda config: OWN, ["steps"], ["steps=10,20"])
    with pytest.raises(UserError, match=r"--sweep=steps: given twice"):
        points_of_command(small, lambda config: OWN, [], ["steps=10", "data.dim=3", "steps=20"])


def test_work_of_a_step_on_the_mixture_by_hand():
    config = override(base(), gmm.COMMON | gmm.CASES["constant"][0])
    # P = 24 * 64 + 64 * 10 = 2176; FLOPs = 2 * 512 * (3 P - 24 * 64) = 5,111,808.
    assert gmm.work_of(config)[:2] == (5_111_808, 40 * 2176)


def test_baseline_lines_are_read():
    script = "print('constant experts, ms per step: 0.3\\ndepth-3 experts, ms per step: 9.5')"
    baseline = Baseline(f'{sys.executable} -c "{script}"', gmm.LINES)
    assert baseline.run() == {"constant": (0.3,), "depth-3": (9.5,)} == baseline.medians()
    with pytest.raises(UserError, match="exit code 3"):
        Baseline(f"{sys.executable} -c 'raise SystemExit(3)'", gmm.LINES).run()
    with pytest.raises(UserError, match="got only constant"):
        Baseline("echo 'constant .3'", gmm.LINES).run()
    assert Baseline(None, gmm.LINES).run() == {}


def test_cases_are_timed_in_turn_with_a_baseline(monkeypatch):
    """Medians of 2 and 5 ms; 1 MFLOP at 1 GFLOP/s takes 1 ms; the baseline prints 10 ms."""
    monkeypatch.setattr(harness, "rates", lambda: Rates({"float32": 1e9}, 1e9))
    times, calls = {"a": [0.001, 0.003, 0.002], "b": [0.005, 0.005, 0.005]}, []

    def case(name, work, peer):
        return Case({"name": name}, {"ms_per_step": lambda: calls.append(name) or times[name].pop()}, work, peer)

    baseline = Baseline("echo 'constant 10\ndepth-3 20'", gmm.LINES)
    first, second = timed([case("a", Work(1e6, 1e3), "constant"), case("b", None, "")], 3, baseline)
    assert calls == ["a", "b"] * 3 and second == {"name": "b", "ms_per_step": 5.0, "fastest_ms_per_step": 5.0}
    assert first == {
        **{"name": "a", "ms_per_step": 2.0, "fastest_ms_per_step": 1.0, "floor_ms": 1.0, "bound": "FLOPs"},
        **{"over_floor": 2.0, "baseline_ms": 10.0, "speedup": 5.0},
    }


#: bench -> its module's sizes here, as small as they can be.
SMALLEST = {
    "gmm": {"CASES": {"constant": ({"experts.name": "constant", "batch_size": 8}, 2, "")}, "RUNS": (1,)},
    "dispatch": {
        "SMALL": dispatch.SMALL | {"tokens": 64, "dim": 8, "hidden": 8, "experts": 4},
        "CASES": {"base": ({}, ("slots", "dense_ffn"))}, "TIMES": 1, "SEED_TIMES": 1, "SEEDS": 2,
    },
    "t5": {"SHAPES": {"small": t5.Shape(scaling.SMALL | t5.TOP_K, 4, (("dense", 4, 2), ("sparse", 4, 2)))}},
    "lm": {"SHAPES": {"least": lm._shape(8, 2, 8, 4, 30)}, "KINDS": {"smoe": lm.KINDS["smoe"]}, "SHARED": ()},
    "patches": {
        "RUNS": {1: 1}, "STEPS": 1, "MODELS": {"cnn": {"model": "patch_cnn"}},
        "EXPERIMENT": "experiments/patch_wrn.py:smoke", "CHANGES": ["data.images=patterns"],
    },
    "scaling": {"MESHES": ((2, 4),), "in_new_process": lambda code: 1.0},
    "trace": {"TOKENS": 2048, "MANY": 4096, "CHUNK": 2048, "DEEP": trace.Shape(4, 8, 2)},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_every_bench_runs_at_its_smallest_size(name, monkeypatch):
    """Others have tests of their own: gpu, parts (tests/test_decoder.py); pods needs libtpu."""
    assert BENCHES.keys() - SMALLEST.keys() == {"gpu", "parts", "pods"}
    for key, value in SMALLEST[name].items():
        monkeypatch.setattr(BENCHES[name], key, value)
    arguments = [Baseline(None, BENCHES[name].LINES)] if hasattr(BENCHES[name], "LINES") else []
    records = [*BENCHES[name].bench(1, *arguments)]
    assert records and all(as_line(record) for record in records)
