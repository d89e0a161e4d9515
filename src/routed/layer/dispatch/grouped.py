"""All experts at once through grouped matrix products, `jax.lax.ragged_dot`, for TPUs and GPUs.

An expert is ONE expert, written with `nn.Dense`; here every Dense of it multiplies all rows by the weights of each row's
expert. On NVIDIA the fast lowering is off by default and the fallback multiplies every row with every expert without a
word, so `prepare` turns it on and `is_dense` tells what a compiled program does.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from routed.contracts import ExpertFunction


def grouped(
    expert: ExpertFunction, params, rows: Float[Array, "A ..."], sizes: Int[Array, " E"]
) -> Float[Array, "A O"]:
    """Expert e runs on its `sizes[e]` rows, rows sorted by expert; what comes after the last expert's is garbage.

    Raises:
      TypeError: a layer of the expert other than `nn.Dense` has parameters of its own.
    """
    sizes = sizes.at[-1].add(len(rows) - sizes.sum())  # every row has an expert, see `product`
    owner = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=len(rows))

    def layer(next_function, args, kwargs, context):
        module = context.module
        own = {k: v for k, v in module.variables.get("params", {}).items() if not isinstance(v, dict)}
        if context.method_name != "__call__" or not own:
            return next_function(*args, **kwargs)
        if type(module) is not nn.Dense:
            raise TypeError(
                f"dispatch 'ragged' on this platform needs experts whose parameters are in nn.Dense layers; "
                f"{type(module).__name__} has its own: {', '.join(own)}. Use dispatch 'slots' or 'dense'"
            )
        (x,) = args
        each = x.size // (len(rows) * x.shape[-1])  # rows of this layer for each row routed, such as its patches
        y = product(x.reshape(-1, x.shape[-1]), own["kernel"], sizes * each).reshape(*x.shape[:-1], -1)
        if "bias" in own:
            y += own["bias"][owner].reshape(len(rows), *[1] * (x.ndim - 2), -1)
        return y

    with nn.intercept_methods(layer):
        return expert(params, rows)


@jax.custom_vjp
def product(rows: Float[Array, "A K"], weights: Float[Array, "E K N"], sizes: Int[Array, " E"]) -> Float[Array, "A N"]:
    """Rows of expert e times weights[e]; `sizes` sum to the number of rows, or several seeds would run into each other.

    Has rules of its own for derivatives and for batching, since `ragged_dot` under vmap takes no operand that is shared.
    """
    return _product(rows, weights, sizes)


@jax.custom_batching.custom_vmap
def _product(rows, weights, sizes):
    return jax.lax.ragged_dot(rows, weights, sizes)


@jax.custom_batching.custom_vmap
def _outer(rows, other, sizes):
    """[E, K, N]: rows^T other over the rows of each expert."""
    contract = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    return jax.lax.ragged_dot_general(rows, other, sizes, contract)


def _fold(operator, per_seed_groups: bool):
    """The batching rule: the experts of S seeds are S E experts."""

    def rule(axis_size, batched, *args):
        args = [a if b else jnp.broadcast_to(a, (axis_size, *a.shape)) for a, b in zip(args, batched, strict=True)]
        outputs = operator(*[a.reshape(-1, *a.shape[2:]) for a in args])
        leading = args[2].shape[1] if per_seed_groups else args[0].shape[1]
        return outputs.reshape(axis_size, leading, *outputs.shape[1:]), True

    return rule


_product.def_vmap(_fold(_product, per_seed_groups=False))

_outer.def_vmap(_fold(_outer, per_seed_groups=True))


def _save(rows, weights, sizes):
    return _product(rows, weights, sizes), (rows, weights, sizes)


def _backward(saved, cotangent):
    rows, weights, sizes = saved
    return _product(cotangent, weights.swapaxes(1, 2), sizes), _outer(rows, cotangent, sizes), None


product.defvjp(_save, _backward)


def prepare() -> None:
    """Asks for the fast lowering on NVIDIA GPUs (compute capability 8 and above); nothing elsewhere."""
    if jax.default_backend() == "gpu":
        jax.config.update("jax_ragged_dot_use_gpu_pallas_triton_lowering", True)


def is_dense(compiled_text: str, platform: str) -> bool:
    """Whether a compiled program multiplies every row with every expert: no grouped kernel is in its text."""
    kernels = {"gpu": ("triton", "ragged"), "tpu": ("ragged", "custom-call")}.get(platform, ())
    return not any(name in compiled_text.lower() for name in kernels)
