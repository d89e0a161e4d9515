"""Networks on images as experts: their layers, sizes, and that an expert knows one image only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed.contracts import Batch
from routed.engine.limits import bytes_of_run
from routed.experts import EXPERTS
from routed.layer.dispatch import DISPATCHES
from routed.layer.rule import SelectionRule
from routed.layer.selection import select
from routed.papers.chen2022.convolutions import convolve, plain_convolution, windows
from routed.papers.chen2022.image_layers import Depthwise, Norm
from routed.papers.chen2022.networks import ConvNet, MobileNetV2, Network, ResNet18
from routed.plan.config import canonical
from routed.settings.tree import override
from routed.training.samples import build
from routed.training.task_losses import cross_entropy
from tests.conftest import build_model

BODIES = {"conv_net": ConvNet, "mobilenet_v2": MobileNetV2, "resnet18": ResNet18}
LAYOUT = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}


def test_windows_by_hand():
    """The image 1 2 / 3 4: around 1 there are zeros above and to the left, then 1 2, then 3 4."""
    x = jnp.array([[1.0, 2.0], [3.0, 4.0]])[None, :, :, None]
    assert windows(x)[0, 0, 0].tolist() == [0, 0, 0, 0, 1, 2, 0, 3, 4]
    assert windows(x)[0, 1, 1].tolist() == [1, 2, 0, 3, 4, 0, 0, 0, 0]
    assert windows(x, 2).shape == (1, 1, 1, 9)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_and_its_gradients_are_those_of_xla(stride):
    keys = jax.random.split(jax.random.key(0), 3)
    x, kernel = jax.random.normal(keys[0], (2, 6, 6, 3)), jax.random.normal(keys[1], (27, 5))
    weight = jax.random.normal(keys[2], (2, 6 // stride, 6 // stride, 5))
    theirs = lambda x, kernel: jax.lax.conv_general_dilated(  # noqa: E731
        x, kernel.reshape(3, 3, 3, 5), (stride,) * 2, [(1, 1)] * 2, **LAYOUT
    )
    expected, pull = jax.vjp(theirs, x, kernel)
    ours, own_pull = jax.vjp(lambda x, kernel: convolve(x, kernel, stride), x, kernel)
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)
    for got, right in zip(own_pull(weight), pull(weight), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_depthwise_convolution_and_its_gradients_are_those_of_xla(stride):
    keys, shape = jax.random.split(jax.random.key(0), 3), (2, 6 // stride, 6 // stride, 4)
    x, kernel, weight = (jax.random.normal(k, s) for k, s in zip(keys, ((2, 6, 6, 4), (9, 4), shape), strict=True))
    theirs = lambda x, kernel: jax.lax.conv_general_dilated(  # noqa: E731
        x, kernel.reshape(3, 3, 1, 4), (stride,) * 2, [(1, 1)] * 2, feature_group_count=4, **LAYOUT
    )
    expected, pull = jax.vjp(theirs, x, kernel)
    ours, own_pull = jax.vjp(lambda x, kernel: Depthwise(stride).apply({"params": {"kernel": kernel}}, x), x, kernel)
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)
    for got, right in zip(own_pull(weight), pull(weight), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5)


def test_a_norm_by_hand():
    """Two positions of three channels are one group: 1 to 6 has mean 3.5 and variance 35 / 12."""
    x = jnp.arange(1.0, 7).reshape(1, 1, 2, 3)
    params = {"params": {"scale": jnp.array([1.0, 2, 1]), "bias": jnp.array([0.0, 0, 5])}}
    plain = (np.arange(1.0, 7) - 3.5) / np.sqrt(35 / 12 + 1e-5)
    expected = plain * [1, 2, 1, 1, 2, 1] + [0, 0, 5, 0, 0, 5]
    np.testing.assert_allclose(Norm().apply(params, x).reshape(-1), expected, rtol=1e-5)


@pytest.mark.parametrize(("name", "width", "count"), [
    # conv: 27 x 64 + 64, 576 x 128 + 128, linear: 8 x 8 x 128 x 10 + 10. Others: as pytorch-cifar's networks count
    # theirs.
    ("conv_net", 64, 1792 + 73856 + 81930), ("mobilenet_v2", 32, 2_296_922), ("resnet18", 64, 11_173_962),
])  # fmt: skip
def test_sizes_are_those_of_the_paper(name, width, count):
    net = Network(10, width, BODIES[name])
    params = jax.eval_shape(net.init, jax.random.key(0), jnp.zeros((1, 32, 32, 3)))
    assert sum(a.size for a in jax.tree.leaves(params)) == count


def products(jaxpr):
    """FLOPs of all products of matrices in a program, those of its parts included."""
    total = 0.0
    for one in jaxpr.eqns:
        if one.primitive.name == "dot_general":
            (contracted, _), _ = one.params["dimension_numbers"]
            total += 2 * one.outvars[0].aval.size * np.prod([one.invars[0].aval.shape[i] for i in contracted])
        inner = (getattr(value, "jaxpr", value) for value in one.params.values())
        total += sum(products(value) for value in inner if hasattr(value, "eqns"))
    return total


@pytest.mark.parametrize("name", BODIES)
def test_flops_are_those_of_the_products(name):
    net, x = Network(10, 16, BODIES[name]), jnp.zeros((1, 16, 16, 3))
    params = jax.eval_shape(net.init, jax.random.key(0), x)
    traced = jax.make_jaxpr(net.apply)(params, x)
    # Depthwise filters are no products of matrices: 9 x hidden channels x positions, by the blocks of width 16 on 16 x
    # 16 pixels.
    blocks = [(16, 256), (48, 256), (72, 256), (72, 64), *[(96, 64)] * 2, (96, 16), *[(192, 16)] * 3, *[(192, 16)]]
    blocks += [*[(288, 16)] * 2, (288, 4), *[(480, 4)] * 2, (480, 4)]
    single = sum(2 * 9 * channels * places for channels, places in blocks) if name == "mobilenet_v2" else 0
    assert EXPERTS[name].flops(16, 16, 3, 10) == products(traced.jaxpr) + single


IMAGES = {
    "data.name": "rotated", "data.target": "class", "data.target_dim": 2, "data.clusters": 10, "data.image_side": 8,
    "data.samples": 64, "data.test_samples": 20, "data.fresh": True, "loss": "cross_entropy",
    "experts.name": "conv_net", "experts.width": 4, "router.name": "conv", "router.window": 4, "dispatch": "ragged",
    "selection.name": "top_k", "selection.k": 1, "selection.renormalise": False,
}  # fmt: skip


@pytest.mark.slow
def test_dispatches_agree_and_an_expert_knows_one_image(small):
    """Values and gradients of sorted rows in blocks are those of every expert on every image."""
    net, keys = Network(2, 4, ConvNet), jax.random.split(jax.random.key(0), 3)
    x, scores = jax.random.normal(keys[0], (13, 8, 8, 3)), jax.random.normal(keys[1], (13, 3))
    params = jax.vmap(lambda e: net.init(jax.random.fold_in(keys[2], e), x[:1])["params"])(jnp.arange(3))

    def loss(params, name):
        routing = select(SelectionRule("top_k"), scores)
        y = DISPATCHES[name].run(lambda own, x: net.apply({"params": own}, x), params, x, routing, None)
        return (y**3).sum(), y

    got, right = (
        jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)(params, n) for n in ("ragged", "dense")
    )
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)


def test_a_network_alone_is_evaluated_without_the_settings_of_a_router(small):
    """Of a model without a router the node `losses` is not read: shapes of a run come out all the same."""
    config = canonical(override(small, IMAGES | {"model": "dense_expert", "optimizer.normalise": "none"}))
    assert "losses" not in config and bytes_of_run(config) > 0


@pytest.mark.slow
def test_an_ensemble_trains_each_member_and_averages_probabilities(small):
    changes = {"model": "ensemble", "experts.count": 2, "optimizer.normalise": "expert"}
    config = override(small, IMAGES | changes)
    model, problem = build_model(config), build(config, 64)
    x, label = jax.random.normal(jax.random.key(0), (6, 8, 8, 3)), jnp.arange(6) % 2
    batch = Batch(x, jax.nn.one_hot(label, 2), label)
    params, state = model.init(jax.random.key(1), batch)
    net = Network(2, 4, ConvNet)
    own = [net.apply({"params": jax.tree.map(lambda a, e=e: a[e], params["experts"])}, x) for e in range(2)]
    trained = model.apply(params, state, batch, None, "dense", jax.random.key(2))
    loss, _ = problem.task_loss(config, trained, batch)
    each = [cross_entropy(one, batch.y).mean() for one in own]
    np.testing.assert_allclose(loss, (each[0] + each[1]) / 2, rtol=1e-5)
    looked = model.apply(params, state, batch, None, "dense").prediction
    np.testing.assert_allclose(jnp.exp(looked), sum(map(jax.nn.softmax, own)) / 2, rtol=1e-4)


def test_a_plain_convolution_of_groups_has_a_filter_for_each_channel():
    x, kernel = jnp.ones((1, 4, 4, 2)), jnp.stack([jnp.ones(9), jnp.zeros(9)], 1)
    y = plain_convolution(x, kernel, groups=2)
    assert y.shape == (1, 4, 4, 2) and float(y[0, 1, 1, 0]) == 9 and not y[..., 1].any()
