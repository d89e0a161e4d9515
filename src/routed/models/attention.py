"""T5's attention: several heads, unscaled scores, and a bias per head by relative position, or rotary positions."""

from __future__ import annotations

import math
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from routed.kernels import attention as kernel
from routed.kernels.attention import HIDDEN
from routed.layer.dispatch.parallel import DATA, EXPERT
from routed.layer.selection import divisors
from routed.system.platform import platform


def distances(queries: int, keys: int) -> Int[np.ndarray, " R"]:
    """Returns distances of a query from a key, 1 - keys to queries - 1, as ordered by `kernels.attention.by_place`."""
    return np.arange(1 - keys, queries)


def relative_buckets(
    distance: Int[np.ndarray, "*D"], *, buckets: int, max_distance: int, bidirectional: bool
) -> Int[np.ndarray, "*D"]:
    """Returns the bucket of a distance, query - key (Raffel et al. 2020, 2.1; as in Mesh TensorFlow).

    Half of the buckets hold one distance each, the others grow in logarithmic steps up to `max_distance`; what is
    further shares the last one. Bidirectional: half of all buckets are for keys behind the query's place. Otherwise
    such keys count as distance 0, and causality hides them.
    """
    first: Int[np.ndarray, "*D"] | int = 0
    if bidirectional:
        buckets //= 2
        first = np.where(distance < 0, buckets, 0)
        distance = np.abs(distance)
    else:
        distance = np.maximum(distance, 0)
    exact = buckets // 2
    # float32, operation by operation as in the reference: a power of two lies on the edge of a bucket.
    steps = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
    steps = steps / np.float32(math.log(max_distance / exact)) * np.float32(buckets - exact)
    far = np.minimum(exact + steps.astype(int), buckets - 1)
    return first + np.where(distance < exact, distance, far)


class PositionBias(nn.Module):
    """A bias of the scores by the distance of query and key: one table [buckets, H] for all layers of a stack; float32.

    A causal one hides what comes after the query. The table starts at N(0, 1/D), D the model's width. With a mesh every
    device has its own, one behind the other (N devices x H heads): then devices sum the gradient of the table, and not
    that of each layer's bias.
    """

    heads: int
    buckets: int
    max_distance: int
    causal: bool
    dim: int
    mesh: Mesh | None = None

    @nn.compact
    def __call__(self, length: int) -> Float[Array, "C R"]:
        table = self.param("table", nn.initializers.normal(self.dim**-0.5), (self.buckets, self.heads))
        distance = distances(length, length)
        bucket = relative_buckets(
            distance, buckets=self.buckets, max_distance=self.max_distance, bidirectional=not self.causal
        )

        def local(table):
            bias = table.astype(jnp.float32).T[:, bucket]
            return jnp.where(distance >= 0, bias, HIDDEN) if self.causal else bias

        if self.mesh is None:
            return local(table)
        return jax.shard_map(local, mesh=self.mesh, in_specs=P(), out_specs=P((DATA, EXPERT)), check_vma=False)(table)


def causal_bias(heads: int, length: int, mesh: Mesh | None = None) -> Float[Array, "C R"]:
    """Returns a bias that only hides the future; with a mesh a copy for each device, as `PositionBias`."""
    hidden = jnp.where(distances(length, length) >= 0, 0.0, HIDDEN)
    return jnp.broadcast_to(hidden, (heads * (1 if mesh is None else mesh.size), 2 * length - 1))


#: The longest wavelength of rotary positions, over 2 pi.
LONGEST = 10_000.0


def rotated(x: Float[Array, "N L K"]) -> Float[Array, "N L K"]:
    """Turns the pair (i, i + K/2) of position p by p / LONGEST^(2i/K): products of rows depend on their distance only.

    Su et al. (2021); halves in the place of neighbouring pairs, as GPT-NeoX has it.
    """
    half = x.shape[-1] // 2
    angle = (np.arange(x.shape[1])[:, None] * LONGEST ** (-np.arange(half) / half))[None]
    cos, sin = jnp.asarray(np.cos(angle), x.dtype), jnp.asarray(np.sin(angle), x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate((a * cos - b * sin, a * sin + b * cos), -1)


class Kernel(nn.Module):
    """A weight matrix, drawn from N(0, scale^2)."""

    shape: tuple[int, int]
    scale: float

    @nn.compact
    def __call__(self) -> Float[Array, "F O"]:
        return self.param("kernel", nn.initializers.normal(self.scale), self.shape)


class Attention(nn.Module):
    """sum_s softmax_s(q k_s + bias) v_s for each head, without biases or 1/sqrt(d), which T5 has in its initial scales.

    The bias is of the distance of query and key (`distances`). Queries come from `x`, keys and values from `source`
    (default: `x`), of which each query sees those that `seen` has, if it is given. The softmax is float32 whatever the
    type of `x`, and computed again for the gradient: that costs what keeping the scores does, in a seventh of the
    memory. With a mesh every device attends to its own rows: left to itself XLA would gather queries, keys and values,
    as it cannot divide the second of two joined axes, and each device would do the work of all.
    """

    heads: int
    head_dim: int
    mesh: Mesh | None = None
    rotary: bool = False
    causal: bool = False  # the bias hides what comes after a query: on a CPU it is not computed

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B Q D"],
        bias: Float[Array, "C R"] | None,
        source: Float[Array, "B S D"] | None = None,
        visible: Bool[Array, "B Q S"] | None = None,
    ) -> Float[Array, "B Q D"]:
        if self.causal and (bias is None or source is not None):
            raise ValueError("causal attention is of x to itself, and its bias hides what comes after a query")
        source = x if source is None else source
        dim, inner = x.shape[-1], self.heads * self.head_dim
        scales = {"query": (dim * self.head_dim) ** -0.5, "key": dim**-0.5, "value": dim**-0.5}
        kernels = [Kernel((dim, inner), scale, name=name)() for name, scale in scales.items()]
        kernels.append(Kernel((inner, dim), inner**-0.5, name="out")())
        attend = partial(_attend, self.heads, self.rotary, self.causal)
        if self.mesh is not None:
            rows = P((DATA, EXPERT))
            attend = jax.shard_map(
                attend, mesh=self.mesh, in_specs=(rows, rows, rows, P(), rows), out_specs=rows, check_vma=False
            )
        return attend(x, source, bias, kernels, visible)


def heads_at_once(heads: int, size: int, dim: int) -> int:
    """Returns how many heads are computed together: those whose keys are no wider than the rows, or one."""
    return max(n for n in divisors(heads) if n == 1 or n * size <= dim)


def _attend(heads: int, rotary: bool, causal: bool, x, source, bias, kernels, visible):
    """Returns the attention of all rows; on a CPU in parts (`routed.kernels.attention`)."""
    if platform() != "cpu":
        return jax.checkpoint(partial(_whole, heads, rotary), prevent_cse=False)(bias, kernels, (x, source, visible))
    size = kernels[0].shape[1] // heads
    group = heads_at_once(heads, size, x.shape[2])
    run = partial(_in_parts, group, rotary, kernel.queries_at_once(x.shape[1], causal))
    if group == heads:
        return run(bias, kernels, (x, source, visible))
    # All keys and values would take more memory than what they are made of: some heads after the others, computed again
    # for the gradient.
    wide = x.astype(jnp.float32), source.astype(jnp.float32)  # whose gradients are sums over heads

    @partial(jax.checkpoint, prevent_cse=False)
    def mixed(weights):
        rows, keys = (a.astype(x.dtype) for a in wide)
        return run(weights[0], weights[1], (rows, keys, visible))

    into = [kernel.reshape(len(kernel), -1, group * size).swapaxes(0, 1) for kernel in kernels[:3]]
    out = kernels[3].reshape(-1, group * size, x.shape[2])
    biases = None if bias is None else bias.reshape(-1, group, bias.shape[1])
    empty = jnp.zeros(x.shape, jnp.float32)
    total, _ = jax.lax.scan(lambda total, weights: (total + mixed(weights), None), empty, (biases, [*into, out]))
    return total.astype(x.dtype)


def _in_parts(heads: int, rotary: bool, chunk: int, bias, kernels, part):
    """Returns the attention of `heads` heads, some rows and `chunk` queries at once."""
    x, source, visible = part
    q, k, v = (a.reshape(heads, len(x), *a.shape[1:]) for a in _projected(heads, rotary, x, source, kernels))
    visible = None if visible is None else visible.swapaxes(1, 2)
    mixed = kernel.attend(chunk, q.swapaxes(2, 3), k, v.swapaxes(2, 3), bias, visible).swapaxes(2, 3)
    return joined(mixed.reshape(-1, *mixed.shape[2:]), kernels[-1].astype(x.dtype), heads)


def _whole(heads: int, rotary: bool, bias, kernels, part):
    """Returns the attention of all queries of all rows at once."""
    x, source, visible = part
    q, k, v = _projected(heads, rotary, x, source, kernels)
    scores = jnp.einsum("NQK,NSK->NQS", q, k, preferred_element_type=jnp.float32)
    by_head = scores.reshape(heads, -1, *scores.shape[1:])
    if bias is not None:
        by_head += kernel.by_place(bias, source.shape[1]).swapaxes(1, 2)[:, None]
    if visible is not None:
        by_head = jnp.where(visible[None], by_head, HIDDEN)
    weight = jax.nn.softmax(by_head.reshape(scores.shape)).astype(x.dtype)
    return joined(jnp.einsum("NQS,NSK->NQK", weight, v), kernels[-1].astype(x.dtype), heads)


def _projected(heads: int, rotary: bool, x, source, kernels) -> tuple[Float[Array, "N L K"], ...]:
    """Returns queries, keys and values, head by head."""
    query, key, value = (kernel.astype(x.dtype) for kernel in kernels[:3])
    q, k, v = split(x, query, heads), split(source, key, heads), split(source, value, heads)
    return (rotated(q), rotated(k), v) if rotary else (q, k, v)


def split(x: Float[Array, "B L D"], kernel: Float[Array, "D I"], heads: int) -> Float[Array, "N L K"]:
    """Returns x W, head by head; all rows are one matrix: else XLA:CPU copies them for the gradient of W."""
    projected = x.reshape(-1, len(kernel)) @ kernel
    by_head = projected.reshape(*x.shape[:2], heads, -1).transpose(2, 0, 1, 3)
    return by_head.reshape(-1, *by_head.shape[2:])


def joined(mixed: Float[Array, "N Q K"], kernel: Float[Array, "I D"], heads: int) -> Float[Array, "B Q D"]:
    """Returns the heads side by side, times W."""
    by_head = mixed.reshape(heads, -1, *mixed.shape[1:]).transpose(1, 2, 0, 3)
    return (by_head.reshape(-1, len(kernel)) @ kernel).reshape(*by_head.shape[:2], -1)
