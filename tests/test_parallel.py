"""Experts over devices: the same numbers on every mesh, one copy of the weights, and no collective too many."""

import os
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed.contracts import UserError
from routed.engine.devices import allow_collectives
from routed.layer.dispatch.parallel import check
from routed.layer.rule import SelectionRule
from routed.plan.config import base
from routed.settings.tree import override
from tests.parallel_case import EXPERTS, RULE, case, layer, make_mesh, numbers

MESHES = [(8, 1), (1, 8), (2, 4)]


@pytest.fixture(scope="module")
def alone():
    """Loss, drops and gradients on one device, every expert on every token."""
    found = numbers(None)
    assert found[0][1] > 0.05  # something is dropped
    return found


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES)
def test_every_mesh_gives_the_numbers_of_one_device(alone, shape):
    np.testing.assert_allclose(numbers(make_mesh(*shape)), alone, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES)
def test_a_device_holds_its_experts_only_and_the_program_no_collective_too_many(shape):
    expert = shape[1]
    step, arguments = case(make_mesh(*shape))
    params, state, *_ = step(*arguments)
    of_experts = [
        leaf
        for tree in (params, state)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if "experts" in jax.tree_util.keystr(path)
    ]
    assert len(of_experts) == 3 * 2  # two matrices, each with two moments
    for leaf in of_experts:  # after the step too: the optimiser did not gather them
        assert {s.data.shape[0] for s in leaf.addressable_shards} == {EXPERTS // expert}
        assert leaf.addressable_shards[0].data.nbytes * expert == leaf.nbytes
    text = step.lower(*arguments).compile().as_text()
    count = lambda name: len(re.findall(rf" {name}(?:-start)?\(", text))  # noqa: E731
    # Slots go out and come back, and so do the gradients of outputs. Gradients of shared weights and the loss are
    # summed.
    assert count("all-to-all") == (3 if expert > 1 else 0)
    assert 0 < count("all-reduce") <= 5
    assert not count("all-gather") + count("reduce-scatter") + count("collective-permute")


def test_what_does_not_divide_is_refused_with_what_does():
    mesh = make_mesh(2, 4)
    with pytest.raises(UserError, match=r"4 devices of the mesh's axis 'expert' cannot share 6 experts; use 3"):
        check(mesh, 6, 64, 8)
    with pytest.raises(
        UserError, match=r"group_size=16: 64 tokens make 4 groups, no multiple of 8 .* use group_size=8"
    ):
        check(mesh, 8, 64, 16)
    with pytest.raises(UserError, match="96 tokens make 12 groups, no multiple of 8 devices; use group_size=4"):
        check(mesh, 8, 96, 8)  # more groups than devices
    with pytest.raises(UserError, match="use a multiple of 8 tokens"):
        check(mesh, 8, 12, 12)
    with pytest.raises(UserError, match=r"65 tokens make 8\.125 groups, .* use a multiple of 8 tokens"):
        check(mesh, 8, 65, 8)
    with pytest.raises(UserError, match="tokens over the axes 'data' and 'expert' alone"):
        check(jax.sharding.Mesh(np.reshape(jax.devices(), (2, 2, 2)), ("data", "expert", "model")), 8, 64, 8)
    check(mesh, 8, 64, 8)
    x = jnp.zeros((64, 4))
    with pytest.raises(UserError, match=r"^group_size=64: 64 tokens make 1 groups, .* use group_size=8"):
        jax.eval_shape(layer(mesh, SelectionRule(k=2, capacity_factor=1.0)).init, jax.random.key(0), x)
    jax.eval_shape(layer(mesh, SelectionRule(k=2)).init, jax.random.key(0), x)  # dropless: groups mean nothing
    with pytest.raises(TypeError, match="'gather' cannot share experts over a mesh; use 'slots', 'ragged' or 'auto'"):
        jax.eval_shape(layer(mesh).clone(dispatch="gather").init, jax.random.key(0), x)
    assert RULE.group_size == 8


def test_devices_of_a_cpu_that_share_a_run_have_threads_to_wait_in(monkeypatch):
    """Four for each of 8 devices, one where rows alone are shared, unless the user says more; not for one device."""
    shared, rows = override(base(), {"mesh.data": 2, "mesh.expert": 4}), override(base(), {"mesh.data": 8})
    contest = override(rows, {"selection.name": "compete"})
    cases = [
        ([base()], None, None), ([base(), shared], None, "32"), ([shared], "20", "20"), ([rows], None, "8"),
        ([rows, contest], None, "32"),
    ]  # fmt: skip
    for configs, given, expected in cases:
        monkeypatch.delenv("PJRT_NPROC", raising=False)
        monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
        if given:
            monkeypatch.setenv("PJRT_NPROC", given)
        allow_collectives(configs)
        assert os.environ.get("PJRT_NPROC") == expected


@pytest.mark.parametrize(
    "rule",
    [
        SelectionRule(group_size=8),
        SelectionRule("expert_choice", group_size=8),
        SelectionRule("sigmoid", k=3, group_size=4),
    ],
)
def test_other_selections_over_devices(rule):
    x = jax.random.normal(jax.random.key(0), (64, 4))
    variables = jax.jit(layer(None, rule).init)(jax.random.key(1), x)
    expected, found = (jax.jit(layer(m, rule).apply)(variables, x)[0] for m in (None, make_mesh(2, 4)))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def compared(name, mesh, rule, scale=1.0):
    """Loss and gradients of a layer, jitted, and its arguments; all scores are times `scale`."""
    moe = layer(mesh, rule).clone(dispatch=name)
    x = jax.random.normal(jax.random.key(0), (64, 4))
    variables = jax.jit(layer(None, rule).init)(jax.random.key(1), x)
    variables["params"]["router"] = jax.tree.map(lambda leaf: scale * leaf, variables["params"]["router"])
    loss = lambda variables, x: ((moe.apply(variables, x)[0] - 1) ** 2).mean()  # noqa: E731
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1))), (variables, x)


@pytest.mark.parametrize("capacity", [0.0, 0.75])
@pytest.mark.parametrize("name", ["ragged", "gather", "dense", "slots"])
def test_where_no_expert_is_shared_out_any_dispatch_runs_on_each_devices_tokens(name, capacity):
    rule = SelectionRule(k=2, group_size=8, capacity_factor=capacity)
    step, arguments = compared(name, make_mesh(8, 1), rule)
    expected, arguments_alone = compared("dense", None, rule)
    chex.assert_trees_all_close(step(*arguments), expected(*arguments_alone), atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 4), (1, 8)])
@pytest.mark.parametrize(
    ("rule", "scale"),
    [
        (SelectionRule(k=2, group_size=8), 1.0),
        (SelectionRule(k=2, group_size=8, capacity_factor=0.75), 1.0),
        (SelectionRule(k=2, group_size=8), 0.0),  # equal scores: all tokens choose the first device's experts
        (SelectionRule("expert_choice", group_size=8), 1.0),
    ],
    ids=["dropless", "drops", "overflow", "expert_choice"],
)
def test_ragged_dispatch_over_shared_experts_is_every_expert_on_every_token(rule, scale, shape):
    """Values and all gradients; 8 experts over 4 devices, top-2: 128 assignments, room for 40 on a device at once."""
    step, arguments = compared("ragged", make_mesh(*shape), rule, scale)
    expected, arguments_alone = compared("dense", None, rule, scale)
    chex.assert_trees_all_close(step(*arguments), expected(*arguments_alone), atol=1e-6)


@pytest.mark.parametrize("shape", [(8, 1), (2, 4)])
@pytest.mark.parametrize(("capacity", "chosen", "other"), [(0.0, "ragged", "slots"), (0.75, "slots", "ragged")])
def test_auto_without_a_capacity_is_not_slots_for_all_tokens_on_every_expert(capacity, chosen, other, shape):
    """Dropless slots of 16 experts, top-2, would compute eight times the rows."""
    rule = SelectionRule(k=2, group_size=8, capacity_factor=capacity)
    cases = [compared(name, make_mesh(*shape), rule) for name in ("auto", chosen, other)]
    auto, same, different = (step.lower(*arguments).as_text() for step, arguments in cases)
    assert auto == same != different
