"""Cores that share the rows of each run where the program decides about it (`mesh.data=0`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from routed.engine import devices, sharing
from routed.plan.config import base
from routed.plan.runs import plan_runs
from routed.settings.tree import override
from tests.language_case import TINY

#: One run of text, whose devices nobody chose.
ALONE = TINY | {"mesh.run": 0, "dispatch": "auto"}


def mesh_of(changes, monkeypatch, cores=2, work=0):
    monkeypatch.setattr(sharing, "WORK", work)
    monkeypatch.setattr(sharing.os, "sched_getaffinity", lambda _: range(cores))
    config = override(base(), ALONE | changes)
    return dict(sharing.mesh_of(config, plan_runs(config, ())).shape)


def shared(count):
    return {"run": 1, "data": count, "expert": 1}


def test_a_run_that_leaves_cores_idle_shares_its_rows_over_them(monkeypatch):
    assert mesh_of({}, monkeypatch) == shared(2)
    assert mesh_of({}, monkeypatch, cores=3) == shared(2)  # 3 cores cannot share 8 rows
    assert mesh_of({"seeds": 2}, monkeypatch, cores=4) == shared(4)  # two runs at once would leave two cores idle


@pytest.mark.parametrize(
    "changes",
    [
        {"seeds": 2},  # a core each
        {"mesh.data": 1},
        {"mesh.run": 2},
        {"batch_size": 7, "selection.group_size": 0},
        {"data.eval_rows": 15},  # evaluated in blocks of 5
        {"arms": ("learned", "dense_active"), "seeds": 2},
    ],
)
def test_other_runs_have_a_core_each(changes, monkeypatch):
    assert "data" not in mesh_of(changes, monkeypatch)


def test_little_work_for_many_parameters_is_not_shared(monkeypatch):
    """Every core updates all parameters. TINY has 328 tokens a step, so at most 6 x 328 FLOPs for most of them."""
    assert "data" not in mesh_of({}, monkeypatch, work=sharing.WORK)


def test_a_part_of_a_sweep_without_runs_shares_nothing():
    assert sharing.cores_of_a_run([]) == 1


def test_leaves_without_an_axis_of_experts_are_on_all_devices():
    """Adafactor keeps one number, [runs, 1], in place of a factor that it does not use."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("run", "data", "expert"))
    tree = {"experts": {"decoder": {"gate": jnp.zeros((1, 2, 4, 8)), "factor": jnp.zeros((1, 1))}}}
    of = jax.tree_util.tree_map_with_path(lambda path, leaf: devices.state_sharding(path, leaf, mesh).spec, tree)
    assert of["experts"]["decoder"] == {"gate": P(None, None, "expert"), "factor": P()}


def test_the_number_of_devices_is_in_no_key():
    keys = {plan_runs(override(base(), ALONE | {"mesh.data": count}), ())[0].key for count in (0, 1, 2)}
    assert len(keys) == 1
