"""A run as a pure function: alone or in a batch, on one device or eight, frozen, sharpened, diverging."""

import math
import os
from functools import partial
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pandas as pd
import pytest
from jax.sharding import Mesh

from routed.analysis.paired_values import at_edge
from routed.contracts import UserError
from routed.engine import batches, compilation, early_pages, execution, limits, results, rows, tables
from routed.engine.compilation import compile_group
from routed.engine.devices import make_mesh
from routed.engine.execution import execute, make_groups
from routed.engine.profile import Profile
from routed.engine.schedule import Group
from routed.plan.config import base, canonical, problem_of, traced
from routed.plan.runs import plan_runs
from routed.settings.tree import override
from routed.system import files, machine
from routed.system.progress import Progress
from routed.training import program
from routed.training.problem import Cost
from routed.training.program import STREAMS, streams
from tests.conftest import SMALL

pytestmark = pytest.mark.usefixtures("compiled")  # several tests train the same programs


def train(config, sweep, path):
    """The full table of a sweep."""
    path.mkdir(exist_ok=True)
    runs = plan_runs(config, sweep)
    table = results.open_workdir(path, "test", config, sweep)
    return execute(runs, table, path, make_mesh(config))


def test_a_workdir_has_the_value_of_a_swept_key_that_the_last_command_set(small, tmp_path):
    def stored(config, *sweep):
        results.open_workdir(tmp_path, "test", config, sweep)
        return results.stored_config(tmp_path)["config"]["router.init_scale"]

    scale, three = small.router.init_scale, override(small, {"router.init_scale": 3.0})
    assert stored(small) == scale
    tables.merge(tmp_path, pd.DataFrame({"run": ["a"], "arm": ["learned"], "seed": [0], "step": [0], "status": ["ok"]}))
    assert stored(three, {"router.init_scale": 2.0}, {"router.init_scale": 3.0}) == scale  # of the rows before
    assert stored(three) == 3.0  # swept by the command before


def test_an_evaluation_is_traced_once(small, monkeypatch):
    """For the shapes of the history and for its rows: a type that differs between both would trace it again."""
    evaluate, traced_for = program.evaluate, []
    monkeypatch.setattr(program, "evaluate", lambda *args: traced_for.append(args[0]) or evaluate(*args))
    config = canonical(small)
    compilation.lower_group(config, config.data.samples, 2, make_mesh(override(config, {"mesh.run": 1})))
    assert len(traced_for) == 1


def last(table, arm, column, **where):
    found = rows.last_evaluations(table)
    found = found[found.arm == arm]
    for key, value in where.items():
        found = found[found[key.replace("__", ".")] == value]
    return found.sort_values([*(k for k in ("data.samples",) if k in found), "seed"])[column].to_numpy()


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Two sample counts, three arms, two seeds; on eight devices, in one program."""
    config = override(base(), SMALL | {"arms": ("learned", "frozen", "frozen_sharp")})
    sweep = ({"data.samples": 8}, {"data.samples": 32})
    return config, train(config, sweep, tmp_path_factory.mktemp("swept"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"mesh.run": 1}, {"mesh.run": 2, "mesh.runs_per_batch": 4}, {"mesh.run": 1, "mesh.batching": "vmap"}]
)
def test_a_batched_run_equals_the_run_alone(swept, changes, tmp_path):
    """Another number of devices, or another batching, changes nothing beyond 1e-5 relative after 20 steps."""
    config, table = swept
    alone = train(override(config, changes | {"seeds": 1}), ({"data.samples": 8},), tmp_path)
    for arm in config.arms:
        for metric in ("train/loss", "test/loss", "router/entropy_token"):
            both = last(table, arm, metric, data__samples=8)[:1], last(alone, arm, metric, data__samples=8)
            np.testing.assert_allclose(*both, rtol=1e-5)


def test_finished_runs_are_reported_while_others_train(tmp_path, monkeypatch, caplog):
    """After two tuning runs and the first of two others; a page that fails ends nothing, and the log says it."""
    monkeypatch.setattr(early_pages, "FIRST", 0.0)
    one_by_one = {"arms": ("learned",), "seeds": 2, "mesh.run": 1, "mesh.runs_per_batch": 1}
    tuned = {"rates": "tuned", "tune.multipliers": (1.0, 2.0), "tune.seeds": 1, "tune.steps": 10}
    config = override(base(), SMALL | one_by_one | tuned)
    runs, reports = plan_runs(config, ({},)), []

    def report(table, progress):
        reports.append((set(table.run), progress))
        raise KeyError("an arm that has not run")

    table = results.open_workdir(tmp_path, "test", config, ({},))
    table = execute(runs, table, tmp_path, make_mesh(config), report)
    assert [(len(finished), progress) for finished, progress in reports] == [(3, "3 of 4 runs are done")]
    assert len(set(table.run)) == 4 and "report.html waits for the last run" in caplog.text
    for watching, told in ((batches.Watching(), False), (batches.Watching(profile=3), True)):
        execute(runs, table, tmp_path, make_mesh(config), watching=watching)
        assert ("--tracker and --profile have nothing to record" in caplog.text) == told


def test_training_learns_and_arms_are_paired(swept):
    _, table = swept
    first = table[table.step == 0].pivot_table(index=["data.samples", "seed"], columns="arm", values="test/loss_soft")
    np.testing.assert_array_equal(first["learned"], first["frozen"])  # same initial weights and data
    assert (last(table, "learned", "train/loss") < first["learned"].to_numpy()).all()
    assert not np.array_equal(last(table, "learned", "test/loss"), last(table, "frozen", "test/loss"))


def test_only_the_learned_router_moves(swept):
    _, table = swept
    assert (last(table, "learned", "router/params_changed") == 1).all()
    assert (last(table, "frozen", "router/params_changed") == 0).all()


def test_the_sharpened_router_has_the_learned_entropy(swept):
    """On training samples: no test input decides how sharp a control is."""
    _, table = swept
    asked, reached = (
        last(table, "frozen_sharp", f"router/{name}") for name in ("entropy_target", "entropy_token_train")
    )
    np.testing.assert_allclose(asked, last(table, "learned", "router/entropy_token_train"), rtol=1e-6)
    np.testing.assert_allclose(reached, asked, rtol=1e-3)
    tested = last(table, "frozen_sharp", "router/entropy_token")
    assert (np.abs(tested - reached) > 1e-3).all() and (np.abs(tested - reached) < 0.2).all()


def test_more_samples_keep_the_initial_router(swept):
    _, table = swept
    norms = table[(table.arm == "learned") & (table.step == 0)].pivot_table(
        index="seed", columns="data.samples", values="router/norm_mean"
    )
    np.testing.assert_array_equal(norms[8], norms[32])


def test_a_diverging_point_does_not_touch_its_neighbours(small, tmp_path):
    sane, mad = {"experts.learning_rate": 0.01}, {"experts.learning_rate": 1e4}
    config = override(small, {"seeds": 1})
    both, one = train(config, (sane, mad), tmp_path / "a"), train(config, (sane,), tmp_path / "b")
    assert set(both[both["experts.learning_rate"] > 1].status) == {"diverged"}
    rest = both[both["experts.learning_rate"] < 1].reset_index(drop=True)
    assert set(rest.status) == {"ok"}
    columns = [c for c in one.columns if c != "experts.learning_rate"]
    np.testing.assert_array_equal(rest[columns].select_dtypes("number"), one[columns].select_dtypes("number"))


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["frozen_top1", "frozen_data", "oracle", "hash", "dense_active", "dense_total"])
def test_every_other_arm_trains(small, arm, tmp_path):
    table = train(override(small, {"arms": (arm,), "seeds": 1}), ({},), tmp_path)
    assert set(table.status) == {"ok"} and (table["router/params_changed"] == 0).all()
    assert table["test/loss"].iloc[-1] < table["test/loss"].iloc[0]


@pytest.mark.slow
def test_constant_experts_and_an_easy_mixture_are_solved(small, tmp_path):
    """Separable clusters, an expert each: the oracle's vectors must converge to the targets, so the loss to 0."""
    config = override(
        small,
        {"experts.name": "constant", "arms": ("oracle",), "data.separation": 6.0, "steps": 1000, "eval_every": 500,
         "seeds": 1, "data.fresh": True,
         "optimizer.name": "adam", "experts.learning_rate": 0.05},
    )  # fmt: skip
    table = train(config, ({},), tmp_path)
    assert table["test/loss"].iloc[-1] < 1e-4 and table["router/homogeneity"].iloc[-1] == pytest.approx(1)


@pytest.mark.slow
def test_tuned_runs_use_the_best_candidate(small, tmp_path):
    changes = {"rates": "tuned", "arms": ("learned",), "seeds": 1, "tune.multipliers": (1e-6, 1.0), "tune.steps": 10}
    config = override(small, changes)
    table = train(config, ({},), tmp_path)
    tuned = table[table.status == "ok"]
    plain = train(override(config, {"rates": "paper"}), ({},), tmp_path / "plain")
    assert [*table[table.status == "tuning"].step] == [0, 10] * 2  # two candidates, of half the steps
    np.testing.assert_array_equal(tuned["test/loss"], plain["test/loss"])  # 1.0 wins over a rate of nothing


@pytest.mark.slow
def test_rates_of_routers_and_experts_are_tuned_apart(small, tmp_path):
    """A learned router has 2 x 2 candidates, a frozen one 2; rates of nothing lose, here to the file's own."""
    changes = {"rates": "tuned", "arms": ("learned", "frozen"), "seeds": 1, "tune.multipliers": (1e-6, 1.0)}
    config = override(small, changes | {"tune.router_multipliers": (1e-6, 1.0)})
    table = train(config, ({},), tmp_path)
    tuning, tuned = table[table.status == "tuning"], table[table.status == "ok"]
    assert tuning.groupby("arm").run.nunique().to_dict() == {"frozen": 2, "learned": 4}
    plain = train(override(small, {"rates": "paper", "arms": ("learned",), "seeds": 1}), ({},), tmp_path / "plain")
    learned = tuned[tuned.arm == "learned"]
    np.testing.assert_array_equal(learned["test/loss"], plain["test/loss"])
    np.testing.assert_allclose(learned["train/router_rate"], small.router.learning_rate)
    assert tuned[tuned.arm == "frozen"]["train/router_rate"].isna().all()
    last = tuned.drop_duplicates("arm", keep="last")
    assert set(last.arm) == {"frozen", "learned"} and at_edge(last, config).all()
    wider = override(config, {"tune.multipliers": (1e-6, 1.0, 3.0), "tune.router_multipliers": (1e-6, 1.0, 3.0)})
    assert not at_edge(last, wider).any()


def test_streams_are_independent_and_can_be_held(small):
    a, b = streams(1, small), streams(2, small)
    assert len({str(jax.random.key_data(k)) for k in (*a.values(), *b.values())}) == 2 * len(STREAMS)
    held = override(small, {"shared_streams": ("world",)})
    a, b = streams(1, held), streams(2, held)
    assert (a["world"] == b["world"]).all() and not (a["init"] == b["init"]).all()


def test_the_second_call_compiles_nothing(small):
    """Runs that differ in traced settings only are one group, so one program."""
    sweep = ({"data.separation": 0.5, "router.learning_rate": 0.3}, {"optimizer.weight_decay": 0.1, "data.samples": 16})
    assert len(make_groups(plan_runs(small, sweep), make_mesh(small))) == 1


def test_tokens_and_flops_are_those_of_the_group_that_runs(small, monkeypatch):
    """4 steps in 2 s are 2 a second, of 100 FLOP/s: 2 x 30 tokens, 2 x 5 FLOPs in a group, then 2 x 7, 2 x 20."""
    runs = plan_runs(override(small, {"arms": ("learned",)}), ({},))
    group = Group("a", runs, 0, 1, problem_of(runs[0].config))
    assert execution.work_left(group, set()).flops is None  # samples: steps alone are shown
    costs = [Cost(30, 5.0), Cost(7, 20.0)]
    problems = [SimpleNamespace(watched=True, cost=lambda config, cost=cost: cost) for cost in costs]
    monkeypatch.setattr(machine, "peak", lambda: 100.0)
    followed = Progress([execution.work_left(Group("a", runs, 0, 1, problem), set()) for problem in problems], 2)
    texts = []
    for i in (0, 1):
        followed.begin(i)
        followed.steps_unshown, followed.seconds_unshown = 4, 2.0
        texts.append(followed._speed_text())
    assert texts == [", 2 steps/s, 60 tokens/s, MFU 10 %", ", 2 steps/s, 14 tokens/s, MFU 40 %"]
    monkeypatch.setattr(machine, "peak", lambda: 39.0)  # of 40 FLOP/s that it takes
    assert followed._speed_text().endswith("MFU unknown: other work ran while the processor's rate was measured")
    followed.close()


@pytest.mark.parametrize(
    ("seeds", "devices", "size"),
    # 20 of at most 16: two batches of 10, not 16 and 4 (all on the first device); 40: three of 14 (13 1/3, even); 17
    # over 8 devices: two of 9, so 16; 3 over 8: 8.
    [(16, 2, 16), (20, 2, 10), (40, 2, 14), (17, 8, 16), (3, 8, 8), (5, 1, 5)],
)
def test_batches_of_a_group_are_equal(small, seeds, devices, size):
    config = override(small, {"arms": ("learned",), "seeds": seeds, "mesh.run": devices})
    assert [group.size for group in make_groups(plan_runs(config, ({},)), make_mesh(config))] == [size]


def test_accelerators_take_some_runs_each(small, monkeypatch):
    """75 runs on 8 devices: at most 4 x 8 = 32 together, so three batches of 25, made 32; unless the config says.

    At most 30 are at most 24 of 8 devices: four batches of 19, made 24.
    """
    monkeypatch.setattr(execution, "platform_of", lambda mesh: "tpu")
    config = override(small, {"arms": ("learned",), "seeds": 75, "mesh.run": 8})
    for asked, size in ((0, 32), (40, 40), (30, 24)):
        runs = plan_runs(override(config, {"mesh.runs_per_batch": asked}), ({},))
        assert [group.size for group in make_groups(runs, make_mesh(config))] == [size]


def test_the_batch_of_a_checkpoint_stays_whole_or_is_refused(small):
    """Five runs were begun side by side, at most two are now: 5, made 6 for two devices; not where 4 fit."""
    config = override(small, {"arms": ("learned",), "seeds": 8, "mesh.run": 2, "mesh.runs_per_batch": 2})
    runs, mesh = plan_runs(config, ({},)), make_mesh(config)
    saved = {run.key for run in runs[:5]}
    assert [[group.size for group in make_groups(runs, mesh, saved=keys)] for keys in ((), saved)] == [[2], [6]]
    each = limits.refuse_if_too_large(runs[0].config, 2, 2**40)
    with pytest.raises(UserError, match="the checkpoint has 5 runs side by side, and 4 fit here: go on with more mem"):
        make_groups(runs, mesh, memory=int(4.5 * each / limits.USABLE), saved=saved)


def test_a_profile_in_a_bucket_is_refused():
    with pytest.raises(UserError, match="--profile=2: JAX writes profiles on a disk alone"):
        Profile(files.folder("gs://lab/p"), 2)


def test_more_samples_than_memory_are_refused(small):
    with pytest.raises(UserError, match=r"data\.samples=2000000000: .* lower data\.samples"):
        make_groups(plan_runs(override(small, {"data.samples": 2_000_000_000}), ({},)), make_mesh(small))


@pytest.mark.slow
def test_a_step_that_needs_more_than_the_memory_is_refused_before_it_runs(small, monkeypatch):
    """Computed, beside its inputs: 16,384 x 4 experts x 5 units x 4 bytes are 1.3 MB, a batch of it .3 MB."""
    config = override(small, {"arms": ("learned",), "seeds": 1, "mesh.run": 1, "batch_size": 2**14})
    mesh = make_mesh(config)
    (group,) = make_groups(plan_runs(config, ({},)), mesh)
    monkeypatch.setattr(limits, "memory", lambda mesh: 2_000_000)
    with pytest.raises(
        UserError,
        match=r"batch_size=16384: a step takes 0.\d+ GiB on each device, of 0.\d+ GiB of memory; lower batch_size$",
    ):
        compile_group(group.config, group.pool, group.size, mesh)


@pytest.mark.parametrize(
    "said",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (67.51G) "
        "exceeds available HBM (15.75G).",
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 67.51G of "
        "15.75G hbm.",
        "INTERNAL: a bug",
    ],
)
def test_a_program_that_its_compiler_refuses_for_memory_is_refused_in_a_line(small, monkeypatch, said):
    """A TPU's compiler looks itself, and its error ended in a traceback; other errors stay what they are."""
    config = override(small, {"arms": ("learned",), "seeds": 1, "mesh.run": 1, "batch_size": 2**12})
    mesh = make_mesh(config)
    (group,) = make_groups(plan_runs(config, ({},)), mesh)

    def compile_not(*about):
        raise jax.errors.JaxRuntimeError(said)

    monkeypatch.setattr(compilation, "compile_lowered", compile_not)
    line = r"batch_size=4096: a step takes 67.51G on each device, of 15.75G of memory; "
    line += r"lower batch_size or mesh.runs_per_batch$"
    expected = (jax.errors.JaxRuntimeError, "a bug") if "bug" in said else (UserError, line)
    with pytest.raises(expected[0], match=expected[1]):
        compile_group(group.config, group.pool, group.size, mesh)


@pytest.mark.parametrize(
    ("shape", "together"), [({"run": 4, "data": 1, "expert": 1}, 4), ({"run": 1, "data": 2, "expert": 4}, 8)]
)
def test_a_run_that_is_spread_has_the_memory_of_all_its_devices(shape, together):
    """Four runs on four chips of 100 bytes share 400; a run over 2 x 4 chips has 800. A step may take 100 a chip."""
    chip = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 100})
    mesh = mock.Mock(spec=Mesh, shape=shape, size=math.prod(shape.values()), local_devices=[chip] * together)
    assert limits.memory(mesh) == 100 * together and limits.memory(mesh) // limits.devices_sharing(mesh) == 100


def test_devices_of_a_processor_share_its_memory():
    """Eight devices of a host, over which one run is spread, have the host's memory together, not each."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    mesh = Mesh(np.array(jax.devices()).reshape(1, 8), ("run", "data"))
    assert limits.memory(mesh) == host // 8 * 8


def test_a_machine_whose_axes_must_be_split_still_has_a_mesh(small, monkeypatch):
    """8 x 8 on 4 x 4 x 4 chips: JAX refuses unless it may split the axes (tests/external: on a described v5p)."""

    def refuse(*shape, **about):
        raise NotImplementedError("Failed to find assignment for logical_axis_index 2 of size 8")

    monkeypatch.setattr(jax, "make_mesh", refuse)
    mesh = make_mesh(override(small, {"mesh.data": 2, "mesh.expert": 4}))
    assert dict(mesh.shape) == {"run": 1, "data": 2, "expert": 4} and {*mesh.devices.flat} == {*jax.devices()}


def test_more_devices_than_there_are(small):
    with pytest.raises(UserError, match=r"mesh\.run=9: this machine has 8 devices"):
        make_mesh(override(small, {"mesh.run": 9}))


def test_a_frozen_router_that_moved_fails_the_run(small):
    run = plan_runs(override(small, {"arms": ("frozen",)}), ({},))[0]
    history = {"router/params_changed": np.array([0.0, 1.0]), "test/loss": np.ones(2), "train/loss": np.ones(2)}
    with pytest.raises(UserError, match="moved"):
        rows.rows_of(run, history, [], problem_of(run.config))


def test_an_option_that_xla_does_not_know_is_left_out_alone():
    """As jaxlib 0.11 says it of one that 0.10 has."""
    asked = []

    def compile_with(compiler_options=None):
        asked.append(compiler_options)
        if compiler_options and "xla_cpu_use_fusion_emitters" in compiler_options:
            raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: No such compile option: 'xla_cpu_use_fusion_emitters'")
        return "compiled"

    lowered = mock.Mock(spec=jax.stages.Lowered, compile=compile_with)
    assert compilation.compile_lowered(lowered, "fuse", compilation.LITTLE_EFFORT) == "compiled"
    assert [sorted(each) for each in asked] == [
        ["xla_backend_optimization_level", "xla_cpu_experimental_ynn_fusion_type", "xla_cpu_use_fusion_emitters"],
        ["xla_backend_optimization_level", "xla_cpu_experimental_ynn_fusion_type"],
    ]


def test_groups_need_not_divide_the_blocks_of_an_evaluation(small):
    """400 test samples are a block, which groups of 64 do not divide: there they are of 50."""
    changes = {"batch_size": 64, "data.samples": 64, "selection.name": "top_k", "selection.group_size": 64}
    config = canonical(override(small, changes | {"dispatch": "dense"}))
    one = program.make_program(config, problem_of(config).build(config, 64, None))
    world, run = jax.eval_shape(partial(program.start, one), 0, traced(config))
    seen = jax.eval_shape(partial(program.record, one), 0, traced(config), world, run)
    assert seen["history"]["test/loss"].shape == (3,)
