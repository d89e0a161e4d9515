"""All experts at once on TPUs: every `nn.Dense` of ONE expert multiplies all rows by their experts' weights.

Twin: `routed.kernels.ragged.blocks`, which runs the same experts one after the other.
Measured: on one v5e, compiled for T = 16,384 and 64 experts of 2,048 x 4,096, top-2: 7.8 M cycles and 50 M of six
kernels, against 838 M with `jax.lax.ragged_dot`; never run on a TPU.
Delete when: the blocks of `ragged` are as fast on TPUs, or Flax maps a module over groups of rows.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from routed.contracts import ExpertFunction
from routed.kernels import megablox


def grouped(
    expert: ExpertFunction,
    params,
    rows: Float[Array, "A ..."],
    sizes: Int[Array, " E"],
    multiply: Callable[..., Array] | None = None,
) -> Float[Array, "A O"]:
    """Runs expert e on its `sizes[e]` rows, rows sorted by expert; rows after the last expert's are garbage.

    `multiply` may be another product, by `product_of`.

    Raises:
      TypeError: a layer of the expert other than `nn.Dense` has parameters of its own.
    """
    sizes = sizes.at[-1].add(len(rows) - sizes.sum())  # every row has an expert, see `product`
    owner = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=len(rows))

    def layer(next_function, args, kwargs, context):
        if not (params_of_layer := _params_of_layer(context)):
            return next_function(*args, **kwargs)
        if type(module := context.module) is not nn.Dense:
            raise TypeError(
                "grouped products need experts whose parameters are in nn.Dense layers; "
                f"{type(module).__name__} has its own: {', '.join(params_of_layer)}"
            )
        (x,) = args
        each = x.size // (len(rows) * x.shape[-1])  # rows of this layer for each row routed, such as its patches
        y = (multiply or product)(x.reshape(-1, x.shape[-1]), params_of_layer["kernel"], sizes * each).reshape(
            *x.shape[:-1], -1
        )
        if "bias" in params_of_layer:
            y += params_of_layer["bias"][owner].reshape(len(rows), *[1] * (x.ndim - 2), -1)
        return y

    with nn.intercept_methods(layer):
        return expert(params, rows)


def is_dense(expert: ExpertFunction, params, rows: Float[Array, "A ..."]) -> bool:
    """True if `grouped` can run an expert: all its parameters are in `nn.Dense` layers. `params`: of all experts."""
    foreign = []

    def layer(next_function, args, kwargs, context):
        foreign.extend(_params_of_layer(context) if type(context.module) is not nn.Dense else ())
        return next_function(*args, **kwargs)

    with nn.intercept_methods(layer):
        jax.eval_shape(expert, jax.tree.map(lambda leaf: leaf[0], params), rows[:1])
    return not foreign


def _params_of_layer(context: nn.module.InterceptorContext) -> dict[str, Array]:
    """Returns the parameters of the layer that is being called; none for methods other than `__call__`."""
    if context.method_name != "__call__":
        return {}
    return {k: v for k, v in context.module.variables.get("params", {}).items() if not isinstance(v, dict)}


def _fold(operator, per_seed_groups: bool):
    """Returns the batching rule: the experts of S seeds are S E experts."""

    def rule(axis_size, batched, *args):
        args = [a if b else jnp.broadcast_to(a, (axis_size, *a.shape)) for a, b in zip(args, batched, strict=True)]
        outputs = operator(*[a.reshape(-1, *a.shape[2:]) for a in args])
        leading = args[2].shape[1] if per_seed_groups else args[0].shape[1]
        return outputs.reshape(axis_size, leading, *outputs.shape[1:]), True

    return rule


def product_of(multiply: Callable[..., Array], outer: Callable[..., Array]) -> Callable[[Array, Array, Array], Array]:
    """Returns `product(rows [A, K], weights [E, K, N], sizes [E]) -> [A, N]` by kernels.

    It multiplies rows of expert e by weights[e]. `sizes` sum to the number of rows, or several seeds would mix.
    Kernels are called as those of `megablox`; rules for derivatives and for batching, which they lack, are made here.
    """

    @jax.custom_batching.custom_vmap
    def _product(rows, weights, sizes):
        return multiply(rows, weights, sizes, transposed=False)

    @jax.custom_batching.custom_vmap
    def _product_transposed(rows, weights, sizes):
        return multiply(rows, weights, sizes, transposed=True)

    @jax.custom_batching.custom_vmap
    def _outer(rows, columns, sizes):
        return outer(rows, columns, sizes)

    _product.def_vmap(_fold(_product, per_seed_groups=False))
    _product_transposed.def_vmap(_fold(_product_transposed, per_seed_groups=False))
    _outer.def_vmap(_fold(_outer, per_seed_groups=True))

    @jax.custom_vjp
    def product(rows: Float[Array, "A K"], weights: Float[Array, "E K N"], sizes: Int[Array, " E"]):
        return _product(rows, weights, sizes)

    def save(rows, weights, sizes):
        return _product(rows, weights, sizes), (rows, weights, sizes)

    def backward(saved, cotangent):
        rows, weights, sizes = saved
        return _product_transposed(cotangent, weights, sizes), _outer(rows, cotangent, sizes), None

    product.defvjp(save, backward)
    return product


#: The product of the kernels of TPUs.
product = product_of(megablox.product, megablox.outer)
