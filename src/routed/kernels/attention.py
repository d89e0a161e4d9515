"""softmax(q k + bias) v on a CPU: some rows, heads and queries at once, with a derivative of its own.

Scores lie transposed, keys before queries: the maximum and the sum of a softmax then go along whole vectors, and four
of the seven products have no transposed factor. The logarithm of each softmax's sum is kept for the gradient, of which
one exponential makes the weights again (Dao et al. 2022). Neither the scores nor the bias are ever in memory as a
whole: each head spreads its bias over queries and keys while it is at work.

Twin: `routed.models.attention._whole`, which all other platforms run.
Measured: forward and backward on one core, ms, rows x length of width d: 8 x 128 of 64 5.6 -> 3.7, 32 x 256 of 96 82 ->
61, 8 x 512 of 264 234 -> 177 (`python -m routed.bench lm`).
Delete when: XLA:CPU reduces along the last axis as fast as along the one before, and has attention in blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

#: Added to the scores of what must not be seen: its softmax is exactly 0 in float32.
HIDDEN = -1e9

#: Bytes of the scores that a CPU core computes at once, as they should stay in its cache; and queries, the least and
#: most, whose future is skipped.
SCORES, QUERIES = 2**19, (64, 128)


def queries_at_once(length: int, causal: bool) -> int:
    """Returns how many queries of a row are computed together: fewer than all only where no query sees a later key."""
    return min(length, max(QUERIES[0], min(QUERIES[1], length // 2))) if causal else length


def at_once(heads: int, rows: int, chunk: int, keys: int) -> tuple[int, int]:
    """Returns how many heads and rows are computed together: some heads of all rows, or some rows of one head."""
    fit = max(1, SCORES // (4 * chunk * keys))
    if fit < rows:
        return 1, _largest_divisor(rows, fit)
    return _largest_divisor(heads, fit // rows), rows


def _largest_divisor(number: int, most: int) -> int:
    return max(n for n in range(1, min(number, most) + 1) if number % n == 0)


def by_place(bias: Float[Array, "H R"], keys: int) -> Float[Array, "H S Q"]:
    """Spreads a bias of distances over keys and queries: query q is q - s + S - 1 = 0 ... Q + S - 2 from key s.

    Copies of all distances and one number more, cut into rows of as many numbers as there are distances, begin one
    distance earlier in each row: no gather, whose gradient XLA:CPU adds up number by number.
    """
    heads, reach = bias.shape
    longer = jnp.pad(bias, ((0, 0), (0, 1)))[:, None]
    copies = jnp.broadcast_to(longer, (heads, keys, reach + 1)).reshape(heads, -1)
    rows = copies[:, keys - 1 : keys - 1 + keys * reach].reshape(heads, keys, reach)
    return rows[..., : reach + 1 - keys]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    chunk: int,
    q: Float[Array, "H B K Q"],
    k: Float[Array, "H B S K"],
    v: Float[Array, "H B K S"],
    bias: Float[Array, "H R"] | None,
    visible: Bool[Array, "B S Q"] | None,
) -> Float[Array, "H B K Q"]:
    """Returns the mixed values, `chunk` queries at once; fewer than all queries see no key behind their last."""
    return _forward(chunk, q, k, v, bias, visible)[0]


def _forward(chunk, q, k, v, bias, visible) -> tuple[Float[Array, "H B K Q"], Float[Array, "H B 1 Q"]]:
    heads, rows = size = at_once(len(q), q.shape[1], chunk, k.shape[2])
    visible = _pieces(rows, visible)

    def of_heads(group):
        bias, parts = group
        spread = _by_place(k.shape[2], bias)
        return jax.lax.map(lambda part: _mixed(chunk, spread, *part), (*parts, visible))

    return _joined(size, jax.lax.map(of_heads, (_pieces(heads, bias), _grouped(size, (q, k, v)))))


def _mixed(chunk, bias, q, k, v, visible) -> tuple[Float[Array, "N K Q"], Float[Array, "N 1 Q"]]:
    """Returns the mixed values and the logarithm of each softmax's sum, for N = heads x rows at once."""
    outputs, sums = [], []
    for queries, keys in _parts(chunk, q.shape[2], k.shape[1]):
        scores = _scores(q[..., queries], k[:, keys], bias, visible, queries, keys)
        largest = scores.max(1, keepdims=True)
        weight = jnp.exp(scores - largest)
        total = weight.sum(1, keepdims=True)
        outputs.append((_product("NKS,NSQ->NKQ", v[..., keys], weight) / total).astype(v.dtype))
        sums.append(largest + jnp.log(total))
    return jnp.concatenate(outputs, -1), jnp.concatenate(sums, -1)


def _save(chunk, q, k, v, bias, visible):
    outputs, sums = _forward(chunk, q, k, v, bias, visible)
    return outputs, (q, k, v, bias, visible, outputs, sums)


def _backward(chunk, saved, g):
    q, k, v, bias, visible, outputs, sums = saved
    heads, rows = size = at_once(len(q), q.shape[1], chunk, k.shape[2])
    mean = (g.astype(jnp.float32) * outputs.astype(jnp.float32)).sum(2, keepdims=True)
    visible = _pieces(rows, visible)

    def of_heads(group):
        bias, parts = group
        spread, pull = jax.vjp(partial(_by_place, k.shape[2]), bias)

        def of_rows(of_spread, part):
            *factors, mine = _gradients(chunk, spread, part)
            return jax.tree.map(jnp.add, of_spread, mine), factors

        of_spread, factors = jax.lax.scan(of_rows, jax.tree.map(jnp.zeros_like, spread), (*parts, visible))
        return factors, *pull(of_spread)

    grouped = _grouped(size, (q, k, v, sums, mean, g))
    factors, of_bias = jax.lax.map(of_heads, (_pieces(heads, bias), grouped))
    return *_joined(size, factors), jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), of_bias), None


def _gradients(chunk, bias, part):
    """Returns the gradients for dL/dy = g: dL/dscores = weight (v g - sum of g y), a softmax without its mean."""
    q, k, v, sums, mean, g, visible = part
    # The barrier keeps XLA from turning the small factors back and the large ones around.
    kt, vt, qt, gt = jax.lax.optimization_barrier(tuple(a.swapaxes(1, 2) for a in (k, v, q, g)))
    of_q, of_bias = [], None if bias is None else jnp.zeros_like(bias)
    of_k, of_v = (jnp.zeros(a.shape, jnp.float32) for a in (k, vt))
    for queries, keys in _parts(chunk, q.shape[2], k.shape[1]):
        weight = jnp.exp(_scores(q[..., queries], k[:, keys], bias, visible, queries, keys) - sums[..., queries])
        of_scores = weight * (_product("NSK,NKQ->NSQ", vt[:, keys], g[..., queries]) - mean[..., queries])
        of_q.append(_product("NKS,NSQ->NKQ", kt[..., keys], of_scores).astype(q.dtype))
        of_k = of_k.at[:, keys].add(_product("NSQ,NQK->NSK", of_scores, qt[:, queries]))
        of_v = of_v.at[:, keys].add(_product("NSQ,NQK->NSK", weight, gt[:, queries]))
        if bias is not None:
            by_head = of_scores.reshape(len(bias), -1, *of_scores.shape[1:]).sum(1)
            of_bias = of_bias.at[:, keys, queries].add(by_head)
    return jnp.concatenate(of_q, -1), of_k.astype(k.dtype), of_v.swapaxes(1, 2).astype(v.dtype), of_bias


attend.defvjp(_save, _backward)


def _grouped(size: tuple[int, int], tree: Any) -> Any:
    """Returns [H, B, ...] as [H / h, B / b, h b, ...], of h heads and b rows that are computed together."""
    h, b = size

    def group(a):
        apart = a.reshape(len(a) // h, h, -1, b, *a.shape[2:]).swapaxes(1, 2)
        return apart.reshape(*apart.shape[:2], h * b, *a.shape[2:])

    return jax.tree.map(group, tree)


def _joined(size: tuple[int, int], tree: Any) -> Any:
    """Returns the inverse of `_grouped`."""
    h, b = size

    def join(a):
        apart = a.reshape(*a.shape[:2], h, b, *a.shape[3:]).swapaxes(1, 2)
        return apart.reshape(len(a) * h, -1, *a.shape[3:])

    return jax.tree.map(join, tree)


def _pieces(size: int, tree: Any) -> Any:
    """Splits the first axis into pieces of `size`."""
    return jax.tree.map(lambda a: a.reshape(-1, size, *a.shape[1:]), tree)


def _by_place(keys: int, bias: Array | None) -> Array | None:
    return None if bias is None else by_place(bias, keys)


def _parts(chunk: int, queries: int, keys: int) -> Iterator[tuple[slice, slice]]:
    """Yields the queries of each part, and the keys that they may see."""
    for first in range(0, queries, chunk):
        last = min(first + chunk, queries)
        yield slice(first, last), slice(0, last if chunk < queries else keys)


def _scores(q, k, bias, visible, queries: slice, keys: slice) -> Float[Array, "N S Q"]:
    scores = _product("NSK,NKQ->NSQ", k, q)
    if bias is not None:
        scores = (scores.reshape(len(bias), -1, *scores.shape[1:]) + bias[:, None, keys, queries]).reshape(scores.shape)
    if visible is not None:
        by_head = scores.reshape(-1, len(visible), *scores.shape[1:])
        scores = jnp.where(visible[None, :, keys, queries], by_head, HIDDEN).reshape(scores.shape)
    return scores


def _product(form: str, a, b) -> Float[Array, "N X Y"]:
    """Returns a product of the type of the shorter one's numbers, summed in float32."""
    dtype = min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
    return jnp.einsum(form, a.astype(dtype), b.astype(dtype), preferred_element_type=jnp.float32)
