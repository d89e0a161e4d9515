"""One training step of a layer with its experts shared out over a mesh."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from routed.experts.ffn import Ffn
from routed.layer.auxiliary import auxiliary
from routed.layer.moe import MoE
from routed.layer.rule import SelectionRule, selection_rule
from routed.metrics import load
from routed.routers.features import Flat
from routed.routers.product import ProductRouter

TOKENS, DIM, EXPERTS = 64, 4, 8
RULE = SelectionRule(k=2, capacity_factor=0.75, group_size=8)


def make_mesh(data, expert):
    devices = jax.devices()[: data * expert]
    return jax.make_mesh((data, expert), ("data", "expert"), axis_types=(AxisType.Auto,) * 2, devices=devices)


def loss_and_gradients(build, config, batch, mesh):
    """Of a language model with the parameters of key 0, on one device or a mesh."""
    params, state = jax.jit(build(config).init)(jax.random.key(0), batch)
    model, dispatch = build(config, mesh), "auto" if mesh else "dense"

    def loss(params, batch):
        logits = model.apply(params, state, batch, selection_rule(config.selection), dispatch)[0]
        right = jnp.take_along_axis(logits, batch.targets[..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - right).mean()

    on = batch if mesh is None else jax.device_put(batch, NamedSharding(mesh, P(("data", "expert"))))
    return jax.jit(jax.value_and_grad(loss))(params, on)


def layer(mesh, rule=RULE, experts=EXPERTS):
    dispatch = "dense" if mesh is None else "slots"
    return MoE(ProductRouter(experts, Flat()), Ffn(DIM, 6), experts, rule, dispatch, mesh=mesh)


def placed(tree, mesh):
    """Everything of the experts, optimiser state included, over the axis `expert`; all else on every device."""

    def place(path, leaf):
        spec = P("expert") if "experts" in jax.tree_util.keystr(path) else P()
        return jax.make_array_from_callback(
            leaf.shape, NamedSharding(mesh, spec), lambda index: np.asarray(leaf)[index]
        )

    return jax.tree_util.tree_map_with_path(place, tree)


def case(mesh):
    """The step, and its arguments on the mesh (None: one device and the dense oracle's placement)."""
    moe = layer(mesh)
    x = np.asarray(jax.random.normal(jax.random.key(0), (TOKENS, DIM)))
    with jax.default_device(jax.local_devices()[0]):
        params = layer(None).init(jax.random.key(1), jnp.asarray(x))["params"]
        state = optax.adam(0.1).init(params)
    if mesh is None:
        params, state = nn.meta.unbox((params, state))
    if mesh is not None:
        params, state = placed(params, mesh), placed(state, mesh)  # the optimiser's moments keep the metadata
        sharding = NamedSharding(mesh, P(("data", "expert")))
        x = jax.make_array_from_callback(x.shape, sharding, lambda index, x=x: x[index])

    def loss(params, x):
        y, routing = moe.apply({"params": params}, x)
        extra, _ = auxiliary(routing, {"balance": 0.1}, groups=TOKENS // RULE.group_size)
        return ((y - 1) ** 2).mean() + extra, load.dropped(routing)

    @jax.jit
    def step(params, state, x):
        (value, dropped), grads = jax.value_and_grad(loss, has_aux=True)(params, x)
        norms = jax.tree.map(lambda g: jnp.sqrt((g**2).sum()), grads)
        updates, state = optax.adam(0.1).update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, dropped, norms

    return step, (params, state, x)


def numbers(mesh, steps=2):
    """Loss, dropped share and the norms of all gradients, at each of a few steps."""
    step, (params, state, x) = case(mesh)
    seen = []
    for _ in range(steps):
        params, state, value, dropped, norms = step(params, state, x)
        seen.append([float(value), float(dropped), *map(float, jax.tree.leaves(norms))])
    return seen
