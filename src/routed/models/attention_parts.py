"""softmax(q k + bias) v on a CPU: a few rows, heads and queries at once, with a derivative of its own.

Scores lie transposed, keys before queries: the maximum and the sum of a softmax then go along whole vectors, where XLA:CPU takes one number after
the other along the last axis, and four of the seven products have no transposed factor. What is kept for the gradient is the logarithm of each
softmax's sum, of which one exponential makes the weights again (as Dao et al. 2022 do): the scores themselves are never in memory as a whole, and
nor is the bias, which a head spreads over queries and keys while it is at work (`python -m routed.bench lm`; docs/measurements/lm.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from routed.layer.selection import divisors

#: Added to the scores of what must not be seen: its softmax is exactly 0 in float32.
HIDDEN = -1e9

#: Bytes of the scores that a CPU core computes at once, as they should stay in its cache; and queries, the least and most, whose future is skipped.
SCORES, QUERIES = 2**19, (64, 128)


def queries_at_once(length: int, causal: bool) -> int:
    """How many queries of a row are computed together: all, unless none of them sees what comes behind the last."""
    return min(length, max(QUERIES[0], min(QUERIES[1], length // 2))) if causal else length


def at_once(heads: int, rows: int, chunk: int, keys: int) -> tuple[int, int]:
    """How many heads and rows are computed together: some heads of all rows, or some rows of one head."""
    fit = max(1, SCORES // (4 * chunk * keys))
    if fit < rows:
        return 1, max(n for n in divisors(rows) if n <= fit)
    return max(n for n in divisors(heads) if n * rows <= fit), rows


def by_place(bias: Float[Array, "H R"], keys: int) -> Float[Array, "H S Q"]:
    """The bias of each key and query, of one for each distance: query q is q - s + S - 1 = 0 ... Q + S - 2 from key s.

    Copies of all distances and one number more, cut into rows of as many numbers as there are distances, begin one distance earlier in each row:
    no gather, whose gradient XLA:CPU adds up number by number.
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
    seen: Bool[Array, "B S Q"] | None,
) -> Float[Array, "H B K Q"]:
    """The mixed values; `chunk` queries at once, fewer than all of which see no key behind their last. The bias: of each distance (`by_place`)."""
    return _forward(chunk, q, k, v, bias, seen)[0]


def _forward(chunk, q, k, v, bias, seen) -> tuple[Float[Array, "H B K Q"], Float[Array, "H B 1 Q"]]:
    heads, rows = size = at_once(len(q), q.shape[1], chunk, k.shape[2])
    seen = _pieces(rows, seen)

    def of_heads(own):
        bias, parts = own
        places = _by_place(k.shape[2], bias)
        return jax.lax.map(lambda part: _mixed(chunk, places, *part), (*parts, seen))

    return _joined(size, jax.lax.map(of_heads, (_pieces(heads, bias), _grouped(size, (q, k, v)))))


def _mixed(chunk, bias, q, k, v, seen) -> tuple[Float[Array, "N K Q"], Float[Array, "N 1 Q"]]:
    """Of N = heads x rows at once: the mixed values, and the logarithm of each softmax's sum."""
    outputs, sums = [], []
    for own, keys in _parts(chunk, q.shape[2], k.shape[1]):
        scores = _scores(q[..., own], k[:, keys], bias, seen, own, keys)
        largest = scores.max(1, keepdims=True)
        weight = jnp.exp(scores - largest)
        total = weight.sum(1, keepdims=True)
        outputs.append((_product("NKS,NSQ->NKQ", v[..., keys], weight) / total).astype(v.dtype))
        sums.append(largest + jnp.log(total))
    return jnp.concatenate(outputs, -1), jnp.concatenate(sums, -1)


def _save(chunk, q, k, v, bias, seen):
    outputs, sums = _forward(chunk, q, k, v, bias, seen)
    return outputs, (q, k, v, bias, seen, outputs, sums)


def _backward(chunk, saved, g):
    q, k, v, bias, seen, outputs, sums = saved
    heads, rows = size = at_once(len(q), q.shape[1], chunk, k.shape[2])
    mean = (g.astype(jnp.float32) * outputs.astype(jnp.float32)).sum(2, keepdims=True)
    seen = _pieces(rows, seen)

    def of_heads(own):
        bias, parts = own
        places, pull = jax.vjp(partial(_by_place, k.shape[2]), bias)

        def of_rows(of_places, part):
            *factors, mine = _gradients(chunk, places, *part)
            return jax.tree.map(jnp.add, of_places, mine), factors

        of_places, factors = jax.lax.scan(of_rows, jax.tree.map(jnp.zeros_like, places), (*parts, seen))
        return factors, *pull(of_places)

    grouped = _grouped(size, (q, k, v, sums, mean, g))
    factors, of_bias = jax.lax.map(of_heads, (_pieces(heads, bias), grouped))
    return *_joined(size, factors), jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), of_bias), None


def _gradients(chunk, bias, q, k, v, sums, mean, g, seen):
    """Of dL/dy = g: dL/dscores = weight (v g - sum of g y), as the gradient of a softmax takes its mean away."""
    # The barrier keeps XLA from turning the small factors back and the large ones around.
    kt, vt, qt, gt = jax.lax.optimization_barrier(tuple(a.swapaxes(1, 2) for a in (k, v, q, g)))
    of_q, of_bias = [], None if bias is None else jnp.zeros_like(bias)
    of_k, of_v = (jnp.zeros(a.shape, jnp.float32) for a in (k, vt))
    for own, keys in _parts(chunk, q.shape[2], k.shape[1]):
        weight = jnp.exp(_scores(q[..., own], k[:, keys], bias, seen, own, keys) - sums[..., own])
        of_scores = weight * (_product("NSK,NKQ->NSQ", vt[:, keys], g[..., own]) - mean[..., own])
        of_q.append(_product("NKS,NSQ->NKQ", kt[..., keys], of_scores).astype(q.dtype))
        of_k = of_k.at[:, keys].add(_product("NSQ,NQK->NSK", of_scores, qt[:, own]))
        of_v = of_v.at[:, keys].add(_product("NSQ,NQK->NSK", weight, gt[:, own]))
        if bias is not None:
            by_head = of_scores.reshape(len(bias), -1, *of_scores.shape[1:]).sum(1)
            of_bias = of_bias.at[:, keys, own].add(by_head)
    return jnp.concatenate(of_q, -1), of_k.astype(k.dtype), of_v.swapaxes(1, 2).astype(v.dtype), of_bias


attend.defvjp(_save, _backward)


def _grouped(size: tuple[int, int], tree: Any) -> Any:
    """[H, B, ...] as [H / h, B / b, h b, ...], of h heads and b rows that are computed together."""
    h, b = size

    def group(a):
        apart = a.reshape(len(a) // h, h, -1, b, *a.shape[2:]).swapaxes(1, 2)
        return apart.reshape(*apart.shape[:2], h * b, *a.shape[2:])

    return jax.tree.map(group, tree)


def _joined(size: tuple[int, int], tree: Any) -> Any:
    """The inverse of `_grouped`."""
    h, b = size

    def join(a):
        apart = a.reshape(*a.shape[:2], h, b, *a.shape[3:]).swapaxes(1, 2)
        return apart.reshape(len(a) * h, -1, *a.shape[3:])

    return jax.tree.map(join, tree)


def _pieces(size: int, tree: Any) -> Any:
    """So many of what the first axis counts at a time."""
    return jax.tree.map(lambda a: a.reshape(-1, size, *a.shape[1:]), tree)


def _by_place(keys: int, bias: Array | None) -> Array | None:
    return None if bias is None else by_place(bias, keys)


def _parts(chunk: int, queries: int, keys: int) -> Iterator[tuple[slice, slice]]:
    """The queries of each part, and the keys that they may see."""
    for first in range(0, queries, chunk):
        last = min(first + chunk, queries)
        yield slice(first, last), slice(0, last if chunk < queries else keys)


def _scores(q, k, bias, seen, own: slice, keys: slice) -> Float[Array, "N S Q"]:
    scores = _product("NSK,NKQ->NSQ", k, q)
    if bias is not None:
        scores = (scores.reshape(len(bias), -1, *scores.shape[1:]) + bias[:, None, keys, own]).reshape(scores.shape)
    if seen is not None:
        by_head = scores.reshape(-1, len(seen), *scores.shape[1:])
        scores = jnp.where(seen[None, :, keys, own], by_head, HIDDEN).reshape(scores.shape)
    return scores


def _product(form: str, a, b) -> Float[Array, "N X Y"]:
    """A product of the type of the shorter one's numbers, float32 summed: weights are float32 whatever they weigh."""
    dtype = min(a.dtype, b.dtype, key=lambda one: one.itemsize)
    return jnp.einsum(form, a.astype(dtype), b.astype(dtype), preferred_element_type=jnp.float32)
