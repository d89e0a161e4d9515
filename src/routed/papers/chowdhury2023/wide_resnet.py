"""Wide ResNets of 10 layers, without a mixture or with a patch-level mixture as the last convolution.

Sources: Zagoruyko and Komodakis (2016), and Chowdhury et al. (2023, 5.2).

Convolutions are products with windows (`routed.routers.features.patches`): XLA:CPU takes 30 times as long for the
gradient of a convolution within a loop. Statistics of a batch normalisation are the model's state, which moves in
training steps and is used at evaluation.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from routed.contracts import AT_LEAST_0, Column
from routed.kernels.matmul import matmul
from routed.layer.dispatch.direct import apart, apart_dense
from routed.layer.selection import in_samples, select
from routed.models.model import Model, ModelPart, Outputs, Site
from routed.models.single_layer import SITE
from routed.papers.chowdhury2023.patch_moe import check_selections
from routed.routers import ROUTERS
from routed.routers.features import IMAGES, patches
from routed.routers.scores import layer_scores
from routed.settings.setting import FRACTION, Allowed, Setting, at_least, one_of, refuse
from routed.settings.tree import node_of
from routed.tasks import TASKS

SETTINGS: dict[str, Setting] = {
    "resnet.factor": Setting(10, "widening factor: a block has 16, 32 and 64 filters times this", at_least(1)),
    "resnet.norm": Setting(
        "batch", "what is normalised: channels over a batch, or groups of 8 of a sample", one_of(("batch", "group"))
    ),
    "resnet.momentum": Setting(0.9, "what the statistics of a batch normalisation keep in a step", FRACTION),
}
#: Settings of the mixture alone.
PATCHES: dict[str, Setting] = {
    "resnet.patch": Setting(1, "positions of a side of a patch of the last map", at_least(1)),
    "resnet.filter": Setting(
        1,
        "positions of a side of an expert's filters: 1, or 3, which see their patch only",
        Allowed(lambda v: v in (1, 3), lambda: "must be 1 or 3"),
    ),
}
COLUMNS: dict[str, Column] = {
    "model/flops": Column(
        "FLOPs a sample, forward",
        "FLOPs of the products and convolutions of one sample, forward, by their sizes.",
        log=True,
        bounds=AT_LEAST_0,
    ),
    "model/flops_last": Column(
        "FLOPs a sample of the last convolution\nor of the mixture, forward",
        "The part of these that the last convolution has, or the mixture in its place.",
        log=True,
        bounds=AT_LEAST_0,
    ),
    "model/train_flops": Column(
        "FLOPs of the whole training",
        "Three times the FLOPs of a forward pass, of all samples of the training.",
        log=True,
        bounds=AT_LEAST_0,
    ),
    "model/parameters": Column(
        "parameters that are trained",
        "Trained numbers of the model, of all of its experts.",
        log=True,
        bounds=AT_LEAST_0,
    ),
}


#: Filters of the first convolution and, times the widening factor, of the three blocks; strides of the blocks.
FIRST, WIDTHS, STRIDES = 16, (16, 32, 64), (1, 2, 2)
#: Standard deviation of a router's initial weights (released code).
STD = 1e-4

#: dispatch -> function that computes the experts' outputs side by side.
APART = {"auto": apart, "slots": apart, "dense": apart_dense}


class Convolution(nn.Module):
    """`filters` of 3 x 3 (or 1 x 1) positions with a stride, without bias, He-normal."""

    filters: int
    size: int = 3
    stride: int = 1

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B h w F"]:
        if self.size == 1:
            x = x[:, :: self.stride, :: self.stride]
        else:
            x = jax.vmap(lambda image: patches(image, self.stride))(x)
        kernel = self.param("kernel", nn.initializers.he_normal(), (x.shape[-1], self.filters))
        return matmul(x.reshape(-1, x.shape[-1]), kernel).reshape(*x.shape[:-1], self.filters)


class Activation(nn.Module):
    """Normalisation, then ReLU."""

    norm: str
    momentum: float
    training: bool

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B H W C"]:
        if self.norm == "group":
            return nn.relu(nn.GroupNorm(num_groups=None, group_size=8)(x))
        return nn.relu(nn.BatchNorm(not self.training, momentum=self.momentum, epsilon=1e-3)(x))


class Trunk(nn.Module):
    """The layers up to the last map.

    Without `whole`, the trunk ends after the first convolution of the last block, without shortcut (released code).
    """

    node: Any
    training: bool
    whole: bool

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B h w F"]:
        x = Convolution(FIRST)(x)
        for width, stride in zip(WIDTHS, STRIDES, strict=True):
            filters, last = width * self.node.factor, width == WIDTHS[-1]
            before = self._activation()(x)
            y = Convolution(filters, stride=stride)(before)
            if last and not self.whole:
                return self._activation()(y)
            shortcut = Convolution(filters, 1, stride)(before) if stride > 1 or filters != x.shape[-1] else x
            x = Convolution(filters)(self._activation()(y)) + shortcut
        return x

    def _activation(self) -> Activation:
        return Activation(self.node.norm, self.node.momentum, self.training)


class Head(nn.Module):
    """Normalised responses, their mean over positions, and a linear layer."""

    node: Any
    training: bool
    outputs: int

    @nn.compact
    def __call__(self, x: Float[Array, "B h w F"]) -> Float[Array, "B O"]:
        x = Activation(self.node.norm, self.node.momentum, self.training)(x)
        return nn.Dense(self.outputs)(x.mean((1, 2)))


class Filters(nn.Module):
    """An expert: a convolution of a zero-padded patch [p, p, C], which returns one row [p p F]."""

    filters: int
    size: int

    @nn.compact
    def __call__(self, x: Float[Array, "T p p C"]) -> Float[Array, "T Q"]:
        return Convolution(self.filters, self.size)(x).reshape(len(x), -1)


def side_of_map(config: Any) -> int:
    """Returns the positions of a side of the last map: two blocks halve the side of the image."""
    pixels = TASKS[config.data.name].pixels
    return math.ceil(math.ceil(pixels(config.data) / 2) / 2) if pixels else 0


def positions(config: Any) -> int:
    """Returns the number of patches of a sample that the mixture routes."""
    return (side_of_map(config) // config.resnet.patch) ** 2


def wide_resnet(config: ConfigDict, mesh: Mesh | None = None) -> Model:
    """Builds the network without a router. Trunk and head are the group `experts` of parameters."""
    node, outputs = node_of(config).resnet, TASKS[config.data.name].outputs(config.data)

    def parts(training):
        return Trunk(node, training, whole=True), Head(node, training, outputs)

    def init(key, batch):
        trunk, head = parts(training=True)
        x, first = trunk.init_with_output(key, batch.x[:2])
        second = head.init(jax.random.fold_in(key, 1), x)
        return {"router": {}, "experts": _trained(first, second)}, _statistics(first, second)

    def apply(params, state, batch, rule, dispatch, key=None, step=0):

        def run(x):
            trunk, head = parts(key is not None)
            x, moved = _run(trunk, "trunk", params["experts"], state, x, key)
            y, moved_head = _run(head, "head", params["experts"], state, x, key)
            return y, moved | moved_head

        y, moved = run(batch.x) if key is not None else (_in_parts(lambda x: run(x)[0], batch.x), {})
        return Outputs(y, {}, state | moved)

    return Model(init, apply, watch=_watch(config, routed=False))


def _cut(x: Float[Array, "B h w C"], patch: int) -> Float[Array, "T p p C"]:
    """Cuts maps into patches, sample by sample."""
    samples, high, wide, channels = x.shape
    x = x.reshape(samples, high // patch, patch, wide // patch, patch, channels)
    return x.swapaxes(2, 3).reshape(-1, patch, patch, channels)


def _joined(y: Float[Array, "T E n"], shape: tuple[int, ...], patch: int) -> Float[Array, "B h w m"]:
    """Joins the filters of all experts at the positions of patches, n = p p F, to maps with m = E F channels."""
    samples, high, wide, _ = shape
    y = y.reshape(samples, high // patch, wide // patch, y.shape[1], patch, patch, -1)
    return y.transpose(0, 1, 4, 2, 5, 3, 6).reshape(samples, high, wide, -1)


def wide_resnet_moe(config: ConfigDict, mesh: Mesh | None = None) -> Model:
    """Builds the network whose last convolution is a mixture: experts convolve the patches of the last map they take.

    Channel f of expert s at patch j is G_js (w_sf * x_j), or 0 if the expert does not take the patch. The channels of
    all experts are joined, normalised and averaged over positions. Parameters: `router`, `experts`, and `trunk`, which
    has all other parameters.
    """
    node, outputs, count = node_of(config).resnet, TASKS[config.data.name].outputs(config.data), config.experts.count
    router = ROUTERS[config.router.name].make(node_of(config).router, count)
    expert, patch = Filters(config.experts.width, node.filter), node.patch

    def init(key, batch):
        keys = jax.random.split(key, 4)
        x, first = Trunk(node, True, whole=False).init_with_output(keys[0], batch.x[:2])
        tokens = _cut(x, patch)
        routing = router.init(keys[1], tokens.reshape(len(tokens), -1), step=0).get("params", {})
        routing = jax.tree.map(lambda a: STD * a / jnp.maximum(a.std(), 1e-12), routing)
        experts = jax.vmap(lambda e: expert.init(jax.random.fold_in(keys[2], e), tokens[:1])["params"])(
            jnp.arange(count)
        )
        second = Head(node, True, outputs).init(keys[3], jnp.zeros((*x.shape[:3], count * config.experts.width)))
        params = {"router": routing, "experts": experts, "trunk": _trained(first, second)}
        return params, _statistics(first, second)

    def apply(params, state, batch, rule, dispatch, key=None, step=0):
        rule = in_samples(rule, positions(config))

        def run(x):
            x, moved = _run(Trunk(node, key is not None, whole=False), "trunk", params["trunk"], state, x, key)
            tokens = _cut(x, patch)
            rngs = {"noise": key} if key is not None else {}
            apply_router = partial(router.apply, {"params": params["router"]}, rngs=rngs)
            scores = layer_scores(apply_router, tokens.reshape(len(tokens), -1), {"step": step})
            routing = select(rule, scores)
            compute = APART[dispatch] if key is not None else apart
            y = compute(
                lambda expert_params, x: expert.apply({"params": expert_params}, x), params["experts"], tokens, routing
            )
            head = Head(node, key is not None, outputs)
            y, moved_head = _run(head, "head", params["trunk"], state, _joined(y, x.shape, patch), key)
            return (y, routing, tokens.reshape(len(tokens), -1)), moved | moved_head

        if key is None and len(batch.x) > IMAGES:  # one part of the samples after the other
            y, routing, tokens = _in_parts(lambda x: run(x)[0], batch.x)
            size = len(routing.scores) // len(batch.x) * _part(len(batch.x))
            part = jnp.arange(len(routing.token)) // (len(routing.token) * _part(len(batch.x)) // len(batch.x))
            routing, moved = routing._replace(token=routing.token + part * size), {}
        else:
            (y, routing, tokens), moved = run(batch.x)
        return Outputs(y, {SITE: Site(routing, tokens)}, state | moved)

    return Model(init, apply, watch=_watch(config, routed=True))


def _run(module: nn.Module, name: str, params, state, x, key):
    """Returns (outputs, updated statistics)."""
    variables = {"params": params[name]} | ({"batch_stats": state[name]} if name in state else {})
    if key is None or name not in state:
        return module.apply(variables, x), {}
    y, moved = module.apply(variables, x, mutable=["batch_stats"])
    return y, {name: moved["batch_stats"]}


def _trained(trunk, head) -> dict[str, Any]:
    return {"trunk": trunk["params"], "head": head["params"]}


def _statistics(trunk, head) -> dict[str, Any]:
    return {
        name: variables["batch_stats"]
        for name, variables in (("trunk", trunk), ("head", head))
        if "batch_stats" in variables
    }


def _part(samples: int) -> int:
    """Returns the number of samples that are evaluated at once."""
    return max(n for n in range(1, min(samples, IMAGES) + 1) if samples % n == 0)


def _in_parts(run, x):
    """Evaluates one part of the samples after another, so that windows fit into memory."""
    outputs = jax.lax.map(run, x.reshape(-1, _part(len(x)), *x.shape[1:]))
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), outputs)


def flops(config: ConfigDict, routed: bool, channels: int = 3) -> tuple[float, float]:
    """Counts a sample's forward FLOPs: of the network, and of the last convolution or the mixture with its router."""
    node = config.resnet
    side, inputs, last = 4 * side_of_map(config), FIRST, 0.0
    total = 2.0 * side**2 * 9 * channels * FIRST
    for width, stride in zip(WIDTHS, STRIDES, strict=True):
        filters, side = width * node.factor, side // stride
        shortcut = stride > 1 or filters != inputs
        first, second, third = (2.0 * side**2 * n * filters for n in (9 * inputs, 9 * filters, inputs * shortcut))
        if width != WIDTHS[-1] or not routed:
            last = second
            total += first + second + third
        else:
            taken, cells = config.selection.patches, node.patch**2
            last = 2.0 * config.experts.count * filters
            last *= taken * cells * node.filter**2 * config.experts.width + side**2
            total += first + last
        inputs = filters
    width = config.experts.count * config.experts.width if routed else inputs
    return total + 2.0 * width * TASKS[config.data.name].outputs(config.data), last


def _watch(config: ConfigDict, routed: bool):
    def watch(params, world, test, key):
        whole, last = flops(config, routed, test.x.shape[-1])
        trained = sum(a.size for a in jax.tree.leaves(params))
        return {
            "model/flops": jnp.float32(whole),
            "model/train_flops": jnp.float32(3 * whole * config.batch_size * config.steps),
            "model/flops_last": jnp.float32(last),
            "model/parameters": jnp.float32(trained),
        }

    return watch


def check(config: ConfigDict) -> None:
    """Refuses tasks without images of a size that the config determines."""
    if TASKS[config.data.name].pixels is None:
        fits = [name for name, task in TASKS.items() if task.pixels is not None]
        refuse("model", config.model, f"needs images of data.name={' or '.join(fits)}, not {config.data.name!r}")


def check_patches(config: ConfigDict) -> None:
    """Refuses patches that do not tile the last map, and selections that do not choose among a sample's patches."""
    check(config)
    router, token = ROUTERS[config.router.name], jnp.zeros((1, config.resnet.patch**2 * WIDTHS[-1]))
    module = router.make(node_of(config).router, config.experts.count)
    if router.needs or {*jax.eval_shape(partial(module.init, step=0), jax.random.key(0), token)} - {"params"}:
        reason = "reads labels or has a state, which a map has not; use linear, mlp, cosine or projected"
        refuse("router.name", config.router.name, reason)
    side, patch = side_of_map(config), config.resnet.patch
    if side % patch:
        size = max(n for n in range(1, min(patch, side) + 1) if side % n == 0)
        refuse("resnet.patch", patch, f"does not divide the {side} positions of a side of the last map; use {size}")
    check_selections(config)
    if config.dispatch not in APART:
        refuse("dispatch", config.dispatch, f"model={config.model!r} has 'slots', or 'dense' as a check; use 'auto'")


#: Wide ResNets, without a mixture and with a mixture as the last convolution.
WIDE_RESNET = ModelPart(
    wide_resnet,
    targets=("class", "vector"),
    flops=lambda config: flops(config, routed=False)[0],
    columns=COLUMNS,
    settings=SETTINGS,
    reads=("experts.learning_rate",),
    check=check,
)
WIDE_RESNET_MOE = ModelPart(
    wide_resnet_moe,
    routed=True,
    targets=("class", "vector"),
    inner=positions,
    flops=lambda config: flops(config, routed=True)[0],
    columns=COLUMNS,
    settings=SETTINGS | PATCHES,
    uses=("router.name", "selection.name", "selection.eval.name", "dispatch"),
    reads=(
        "experts.count",
        "experts.width",
        "experts.learning_rate",
        "selection.no_gradient",
        "selection.balance_rate",
        "router.frozen",
        "router.learning_rate",
        "transformer.learning_rate",
    ),
    check=check_patches,
)
