"""Language models in the engine: fed, shared out, resumed, stopped; and what is measured of their routers."""

import functools
import struct

import jax
import numpy as np
import pandas as pd
import pytest
from tensorboardX.proto.event_pb2 import Event

from routed.contracts import UserError
from routed.engine import batches, checkpoint, execution, results
from routed.engine.batches import Watching
from routed.engine.devices import make_mesh
from routed.models.t5 import shifted
from routed.plan.checks import validate
from routed.plan.config import base, canonical, problem_of, traced
from routed.plan.runs import plan_runs
from routed.routers import ROUTERS, Router
from routed.settings.tree import override
from routed.tasks.text.stream import SPANS
from routed.training import program, text_problem
from tests.language_case import TINY
from tests.test_controls import Centroids

# Several programs to compile; the tests are about what is run.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled")]


@pytest.fixture
def tiny(tmp_path_factory):
    cache = tmp_path_factory.getbasetemp() / "text"
    return override(base(), TINY | {"data.cache": str(cache)})


def run(config, workdir, watching=Watching()):  # noqa: B008
    """The table of a config's runs, from the workdir as far as it has them."""
    validate(config)
    runs = plan_runs(config, ({},))
    table = results.open_workdir(workdir, "tiny", config, ({},))
    return execution.execute(runs, table, workdir, make_mesh(config), watching=watching)


def stopped_after(monkeypatch, count):
    """Ends the next command after so many checkpoints, as SIGTERM does."""
    save, saved = checkpoint.save, []

    def counted(*args, **kept):
        save(*args, **kept)
        saved.append(args[1])
        if len(saved) == count:
            raise EOFError

    monkeypatch.setattr(checkpoint, "save", counted)


def same(table, other, rtol=0.0, layer="encoder_0"):
    """Equal rows, keys of runs and arms aside."""
    columns = [name for name in table if "/" in name and name in other]
    assert {"eval/loss", "train/loss", f"router/load_max/{layer}", "eval/loss/qaa"} <= set(columns)
    a, b = table[columns].to_numpy(float), other[columns].to_numpy(float)
    np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The workdir of a run on one device that nothing disturbed."""
    config = override(base(), TINY | {"data.cache": str(tmp_path_factory.getbasetemp() / "text")})
    workdir = tmp_path_factory.mktemp("alone")
    run(config, workdir, Watching("tensorboard", profile=2))
    return workdir


def test_models_of_finished_runs_are_refused_where_none_was_kept(tiny, alone):
    with pytest.raises(UserError, match=r"checkpoint\.final=True: finished runs of .* kept no model; name a fresh"):
        run(override(tiny, {"checkpoint.final": True}), alone)


def test_devices_that_share_a_run_give_its_losses(tiny, alone, tmp_path):
    spread = override(tiny, {"mesh.data": 2, "mesh.expert": 4, "checkpoint.every": 2})
    same(run(spread, tmp_path), results.read_table(alone), rtol=2e-4)


@pytest.mark.parametrize("changes", [{"mesh.run": 1}, {"mesh.data": 2, "mesh.expert": 4, "checkpoint.every": 2}])
def test_a_run_goes_on_where_it_was_stopped_also_on_other_devices(tiny, alone, tmp_path, monkeypatch, changes):
    """Killed after 3 of 4 steps, between evaluations, on one device; also in the middle of what is fed at once."""
    with monkeypatch.context() as patch, pytest.raises(EOFError):
        stopped_after(patch, 3)
        run(tiny, tmp_path)
    assert checkpoint.latest(tmp_path / "checkpoints")[1]["step"] == 3
    with monkeypatch.context() as patch:
        stopped_after(patch, 2)  # only one is left
        table = run(override(tiny, changes), tmp_path)
    same(table, results.read_table(alone), rtol=0.0 if changes == {"mesh.run": 1} else 2e-4)


def test_arms_share_data_and_initial_weights(tiny, tmp_path):
    """And each trains its part. The oracle's experts tell the language fully, up to languages that share them."""
    arms = ("learned", "frozen", "frozen_balanced", "learned_balanced", "oracle_language")
    table = run(override(tiny, {"arms": arms}), tmp_path)
    first = table[table.step == 0].set_index("arm")
    for name in ("eval/loss", "router/entropy_token", "eval/loss/qaa"):
        assert first.loc["learned", name] == first.loc["frozen", name] == first.loc["frozen_balanced", name]
    last = table[table.step == 4].set_index("arm")
    assert last["eval/loss"].nunique() == 5  # and then each goes its own way
    assert {arm for arm in arms if last.loc[arm, "router/params_changed"]} == {"learned", "learned_balanced"}
    assert last.loc["frozen", "router/churn_router"] == 0
    assert last.loc["oracle_language", "router/mi_language"] > last.loc["learned", "router/mi_language"] + 0.2
    assert last.loc["learned", "router/churn_router"] > 0
    for arm in ("learned", "frozen", "frozen_balanced"):  # the whole churn is at most the sum of its parts
        row = last.loc[arm]
        assert row["router/churn"] <= row["router/churn_router"] + row["router/churn_features"] + 1e-6
    assert (table["eval/bigram"] > 1).all() and table["eval/bigram"].nunique() == 1


def test_a_transplanted_router_is_the_trained_one_and_stays(tiny, tmp_path):
    config = override(tiny, {"arms": ("transplant",), "checkpoint.final": True})
    table = run(config, tmp_path)
    keys = table.groupby("arm").run.first()
    assert set(keys.index) == {"learned", "transplant"}  # the source comes along
    assert table[table.arm == "transplant"]["router/params_changed"].max() == 0
    routers = {}
    for arm, key in keys.items():
        read, problem = canonical(config), problem_of(config)
        one = program.make_program(read, problem.build(read, 0, None))
        start = functools.partial(program.start, one)
        _, state = jax.eval_shape(start, np.uint32(0), traced(read), problem.shared_arrays(read))
        routers[arm] = checkpoint.load_router(tmp_path / "models" / key, state["router0"])
    for a, b in zip(jax.tree.leaves(routers["learned"]), jax.tree.leaves(routers["transplant"]), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(UserError, match="set checkpoint\\.final"):
        plan_runs(override(config, {"checkpoint.final": False}), ({},))


def test_a_run_that_diverges_stops_and_names_its_last_good_checkpoint(tiny, alone, tmp_path, monkeypatch, caplog):
    """Its neighbour in the batch goes on."""
    drop = batches._drop_diverged

    def poisoned(active, losses, batch, step, workdir):
        losses = losses.copy()
        if step >= 3:
            losses[[r.seed for r in batch].index(1)] = np.nan
        drop(active, losses, batch, step, workdir)

    monkeypatch.setattr(batches, "_drop_diverged", poisoned)
    table = run(override(tiny, {"seeds": 2}), tmp_path)
    lost, kept = table[table.seed == 1], table[table.seed == 0]
    assert set(lost.status) == {"diverged"} and set(kept.status) == {"ok"}
    assert np.isfinite(lost[lost.step <= 2]["eval/loss"]).all() and np.isnan(lost[lost.step == 4]["eval/loss"]).all()
    same(
        kept, results.read_table(alone), rtol=1e-5
    )  # XLA compiles a loop over two runs in another way than one over one
    (folder,) = (tmp_path / "diverged").iterdir()
    assert str(folder) in caplog.text and "seed1" in folder.name
    assert checkpoint._meta(folder)["step"] == 2


def test_a_frozen_router_of_a_transformer_keeps_its_state(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(ROUTERS, "centroids", Router(lambda own, experts: Centroids(experts)))
    table = run(override(tiny, {"router.name": "centroids", "arms": ("learned", "frozen")}), tmp_path)
    moved = table.pivot_table(index="step", columns="arm", values="router/params_changed")
    assert moved["frozen"].tolist() == [0, 0, 0] and moved["learned"].tolist() == [0, 1, 1]


def test_a_profile_of_the_first_steps_is_kept(alone):
    assert {path.name.partition(".")[2] for path in (alone / "profile").rglob("*.*")} >= {"xplane.pb", "json.gz"}


def test_event_files_hold_the_rows(alone):
    found = {}
    for file in (alone / "tensorboard").rglob("events*"):
        data, place = file.read_bytes(), 0
        while place < len(data):  # a record: length, its checksum, an Event, its checksum
            (size,) = struct.unpack("<Q", data[place : place + 8])
            event = Event.FromString(data[place + 12 : place + 12 + size])
            found |= {(v.tag, event.step): v.simple_value for v in event.summary.value}
            place += size + 16
    for _, row in results.read_table(alone).iterrows():
        assert found["eval/loss", row.step] == pytest.approx(row["eval/loss"])


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"data.name": "mc4_jsonl"}, "data.directory is empty"),
        ({"transformer.sparse_layers": 0}, "transformer.sparse_layers"),
        ({"transformer.layers": 3, "transformer.sparse_layers": 2}, "use 1"),
        ({"selection.name": "soft", "dispatch": "dense"}, "selection.name='soft'"),
        (
            {"router.name": "hash_id", "router.vocabulary": 7},
            "^config key router.vocabulary=7: must be data.vocabulary=320: the router has a table",
        ),
        ({"mesh.expert": 8}, "does not divide experts.count=4; use 4"),
        ({"mesh.data": 3}, "batch_size=8"),
        ({"checkpoint.every": 3}, "must divide eval_every=2"),
        ({"model": "kmeans"}, "model='kmeans': not for data.name='artificial'; use one of moe, dense_active"),
        ({"selection.name": "expert_choice"}, "it routes a token of the decoder by later ones"),
        ({"router.name": "conv"}, "routes rows or patches or images, the tokens of data.name='artificial' are hidden"),
    ],
)
def test_impossible_settings_are_refused(tiny, changes, part):
    with pytest.raises(UserError, match=part):
        validate(override(tiny, changes))


def test_each_table_seed_and_each_stack_have_a_table_of_their_own(tiny):
    """A table is balanced by the ids that its stack reads: those of a decoder begin with START."""
    hashed = override(
        tiny, {"router.name": "hash_id", "router.vocabulary": tiny.data.vocabulary, "router.frozen": True}
    )
    tables = [
        problem_of(config).shared_arrays(config)["table"]
        for config in (hashed, override(hashed, {"router.table_seed": 1}))
    ]
    one, other = (table["decoder"]["routers_0"] for table in tables)
    assert (one != other).any() and (one != tables[0]["encoder"]["routers_0"]).any()
    feed = text_problem.feed(SPANS, hashed, text_problem.COUNTING)
    ids = np.concatenate([shifted(feed(step, 1).targets[0]).reshape(-1) for step in range(64)])
    load = np.bincount(one[ids].reshape(-1).astype(int), minlength=4) / one[ids].size
    assert abs(load - 1 / 4).max() < 0.01


def test_other_data_at_a_swept_folder_is_refused(tiny, tmp_path, monkeypatch):
    """The first folder's text is as it was, the second's is not."""
    text, problem = {"a": "1", "b": "2"}, problem_of(tiny)
    reading = problem._replace(digest=lambda config: text.get(config.data.directory, "1"))
    monkeypatch.setattr(results, "problem_of", lambda config: reading)
    monkeypatch.setattr(
        results.tables,
        "gather",
        lambda path: (
            pd.DataFrame({"run": ["r"], "data.directory": ["a"], "arm": ["learned"], "seed": [0], "step": [0]}),
            True,
        ),
    )
    sweep = ({"data.directory": "a"}, {"data.directory": "b"})
    with monkeypatch.context() as patch:
        patch.setattr(results.tables, "gather", lambda path: (pd.DataFrame(), True))
        results.open_workdir(tmp_path, "tiny", tiny, sweep)
    assert results.stored_config(tmp_path)["further_data"] == {"data.directory=b": "2"}
    results.open_workdir(tmp_path, "tiny", tiny, sweep)
    text["b"] = "3"
    with pytest.raises(UserError, match=r"other data at data.directory=b \(2; now 3\)"):
        results.open_workdir(tmp_path, "tiny", tiny, sweep)


def test_other_data_is_refused_in_an_old_workdir(tiny, alone, monkeypatch):
    problem = problem_of(tiny)
    monkeypatch.setattr(results, "problem_of", lambda config: problem._replace(digest=lambda config: "others"))
    moved = override(tiny, {"data.directory": "moved"})
    with pytest.raises(UserError, match=f"other data.*restore data.directory='{tiny.data.directory}' with its files"):
        run(moved, alone)
