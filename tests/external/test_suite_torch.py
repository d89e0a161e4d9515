"""PyTorch routers have cards: scores, gradients and training are those of their JAX twins."""

import functools

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from routed.contracts import UserError
from routed.engine import execution, results
from routed.engine.devices import make_mesh
from routed.plan.config import base
from routed.plan.runs import plan_runs
from routed.routers import ROUTERS, Router
from routed.settings.tree import override
from routed.suite import measures, probes, subject, torch_router


class Linear(nn.Linear):
    def __init__(self, dims, experts):
        super().__init__(dims, experts, bias=False)


class Mlp(nn.Module):
    def __init__(self, dims, experts):
        super().__init__()
        self.inner, self.outer = nn.Linear(dims, 7), nn.Linear(7, experts)

    def forward(self, x):
        return self.outer(torch.relu(self.inner(x)))


class Cosine(nn.Module):
    def __init__(self, dims, experts):
        super().__init__()
        self.places = nn.Parameter(torch.randn(experts, dims))

    def forward(self, x):
        return 5 * nn.functional.normalize(x, dim=1) @ nn.functional.normalize(self.places, dim=1).T


class Distance(Cosine):
    def forward(self, x):
        return -(torch.cdist(x[None], self.places[None])[0] ** 2) / 2


class Lazy(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.layer = nn.LazyLinear(experts)

    def forward(self, x):
        return self.layer(torch.tanh(x))


def unit(x):
    return x / jnp.linalg.norm(x, axis=1, keepdims=True)


def distance(p, x):
    return -((x[:, None] - p["places"][None]) ** 2).sum(-1) / 2


def affine(p, name, x):
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"][None]


#: The classes, and the same functions in JAX.
TWINS = {
    Linear: lambda p, x: x @ p["weight"].T,
    Mlp: lambda p, x: affine(p, "outer", jax.nn.relu(affine(p, "inner", x))),
    Cosine: lambda p, x: 5 * unit(x) @ unit(p["places"]).T,
    Distance: distance,
    Lazy: lambda p, x: affine(p, "layer", jnp.tanh(x)),
}


@pytest.mark.parametrize("made", TWINS)
def test_scores_and_gradients_are_those_of_a_twin_for_many_runs(made):
    """Three runs under vmap and jit, which a program of the engine uses."""
    router = torch_router.TorchRouter(made, 5)
    x = jax.random.normal(jax.random.key(1), (3, 4, 6))
    params = jax.jit(jax.vmap(router.init))(jax.random.split(jax.random.key(0), 3), x)["params"]["torch"]
    assert all(value.std(0).max() > 0 for value in params.values())  # every run has its own draw

    def loss(scores):
        return lambda params, x: (scores(params, x) * jnp.arange(20.0).reshape(4, 5)).sum()

    ours = jax.jit(jax.vmap(jax.value_and_grad(loss(lambda p, x: router.apply({"params": {"torch": p}}, x)), (0, 1))))
    twin = jax.vmap(jax.value_and_grad(loss(TWINS[made]), (0, 1)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), ours(params, x), twin(params, x))


class JaxLinear(linen.Module):
    """The twin of Linear, from the same draws."""

    experts: int

    @linen.compact
    def __call__(self, x, **context):
        def init(key):
            like = {"weight": jax.ShapeDtypeStruct((self.experts, x.shape[1]), np.float32)}
            draw = functools.partial(torch_router.initial, Linear, (x.shape[1], self.experts))
            return jax.pure_callback(draw, like, jax.random.bits(key), vmap_method="sequential")

        return x @ self.param("torch", init)["weight"].T


def test_a_run_of_the_engine_is_that_of_a_twin(monkeypatch, tmp_path):
    """Losses after 20 steps of the probes agree, of learned routers and of frozen ones as sharp as these."""
    monkeypatch.setitem(ROUTERS, "torch_linear", torch_router.router_of(Linear))
    monkeypatch.setitem(ROUTERS, "jax_linear", Router(lambda node, experts: JaxLinear(experts)))
    changes = {"name": "suite", "seeds": 2, "steps": 20, "eval_every": 10, "rates": "paper"}
    changes["arms"] = ("learned", "frozen_sharp")
    losses = []
    for name in ("torch_linear", "jax_linear"):
        config = override(base(), {**probes.settings(quick=True), **changes, "router.name": name})
        table = results.open_workdir(tmp_path / name, "suite", config, ({},))
        table = execution.execute(plan_runs(config, ({},)), table, tmp_path / name, make_mesh(config))
        losses.append(table.sort_values(["arm", "seed", "step"])["test/loss"].to_numpy())
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    assert len(losses[0]) == 12 and losses[0][2] < losses[0][0]


#: A file of a stranger.
FILE = """
import torch

class Gate(torch.nn.Module):
    def __init__(self, dims, experts):
        super().__init__()
        self.layer = torch.nn.Linear(dims, experts)
        {more}

    def forward(self, x):
        return {scores}
"""


def gate(folder, scores="self.layer(x)", more=""):
    path = folder / "gate.py"
    path.write_text(FILE.format(scores=scores, more=more))
    return f"{path}:Gate"


def test_a_class_of_a_file_is_found_with_its_cost_and_signal(tmp_path):
    try:
        found = subject.find(gate(tmp_path), [], quick=True)
        assert found.config.router.name == "Gate" and subject.has_gradient(found.config)
        # 2 x 1,024 x 512 x 64 FLOPs, as the linear router's.
        cost = measures.cost(found.config)
        assert cost["flops"] == pytest.approx(cost["flops_linear"], rel=0.02)
    finally:
        ROUTERS.pop("Gate", None)


class Projected(nn.Module):
    """Learns on a fixed projection, and adds a fixed offset."""

    def __init__(self, dims, experts):
        super().__init__()
        self.fixed = nn.Parameter(torch.randn(dims, dims), requires_grad=False)
        self.out = nn.Linear(dims, experts, bias=False)
        self.register_buffer("offset", torch.randn(experts))

    def forward(self, x):
        return self.out(x @ self.fixed) + self.offset


def test_what_a_module_keeps_fixed_follows_the_seed_and_has_no_gradient():
    router, x = torch_router.TorchRouter(Projected, 3), jax.random.normal(jax.random.key(1), (4, 6))
    params = [router.init(jax.random.key(seed), x) for seed in (0, 1)]
    for p in params:
        tensors = p["params"]["torch"]
        expected = x @ tensors["fixed"] @ tensors["out.weight"].T + tensors["offset"][None]
        np.testing.assert_allclose(router.apply(p, x), expected, rtol=1e-4, atol=1e-4)
    gradients = jax.grad(lambda p: (router.apply(p, x) ** 2).sum())(params[0])["params"]["torch"]
    assert {name for name, value in gradients.items() if value.any()} == {"out.weight"}
    assert all(not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, params), strict=True))
    assert np.isnan(torch_router.flops(Elementwise, (6, 3), 4))


class Elementwise(Cosine):
    def forward(self, x):
        return -((x[:, None] - self.places[None]) ** 2).sum(-1)


@pytest.mark.parametrize(
    ("scores", "more", "message"),
    [
        ("self.layer(x).T", "", r"scores of 3 tokens are \[5, 3\], must be floats \[3, 5\]"),
        ("(self.layer(x), 1)", "", "scores of 3 tokens are tuple"),
        ("self.norm(self.layer(x))", "self.norm = torch.nn.BatchNorm1d(experts)", "buffer norm.running_mean changes"),
        ("torch.dropout(self.layer(x), 0.5, True)", "", "scores are random"),
        ("self.lost(x)", "", "AttributeError"),
    ],
)
def test_what_cannot_have_a_card_is_refused(tmp_path, scores, more, message):
    try:
        with pytest.raises(UserError, match=message):
            subject.find(gate(tmp_path, scores, more), [], quick=True)
    finally:
        ROUTERS.pop("Gate", None)
