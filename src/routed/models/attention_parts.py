"""softmax(q k + bias) v on a CPU: a few rows and queries at once, with a derivative of its own.

Scores lie transposed, keys before queries: the maximum and the sum of a softmax then go along whole vectors, where XLA:CPU takes one number after
the other along the last axis, and four of the seven products have no transposed factor. What is kept for the gradient is the logarithm of each
softmax's sum, of which one exponential makes the weights again (as Dao et al. 2022 do): the scores themselves are never in memory as a whole
(`python -m routed.bench lm`; BUILD_NOTES.md, section 4).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

#: Added to the scores of what must not be seen: its softmax is exactly 0 in float32.
HIDDEN = -1e9

#: Bytes of the scores that a CPU core computes at once, as they should stay in its cache; and queries, the least and most, whose future is skipped.
SCORES, QUERIES = 2**19, (64, 128)


def queries_at_once(length: int, causal: bool) -> int:
    """How many queries of a row are computed together: all, unless none of them sees what comes behind the last."""
    return min(length, max(QUERIES[0], min(QUERIES[1], length // 2))) if causal else length


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    chunk: int,
    q: Float[Array, "N K Q"],
    k: Float[Array, "N S K"],
    v: Float[Array, "N K S"],
    bias: Float[Array, "H S Q"] | None,
    seen: Bool[Array, "B S Q"] | None,
) -> Float[Array, "N K Q"]:
    """The mixed values of N = heads x B rows, heads first; `chunk` queries at once, fewer than all of which see no key behind their last.

    The bias is of each head, or one for all.
    """
    return _forward(chunk, q, k, v, bias, seen)[0]


def _forward(chunk, q, k, v, bias, seen) -> tuple[Float[Array, "N K Q"], Float[Array, "N 1 Q"]]:
    outputs, sums = [], []
    for own, keys in _parts(chunk, q.shape[2], k.shape[1]):
        scores = _scores(q[..., own], k[:, keys], bias, seen, own, keys)
        largest = scores.max(1, keepdims=True)
        weight = jnp.exp(scores - largest)
        total = weight.sum(1, keepdims=True)
        outputs.append((_product("NKS,NSQ->NKQ", v[..., keys], weight) / total).astype(v.dtype))
        sums.append(largest + jnp.log(total))
    return _joined(outputs), _joined(sums)


def _save(chunk, q, k, v, bias, seen):
    outputs, sums = _forward(chunk, q, k, v, bias, seen)
    return outputs, (q, k, v, bias, seen, outputs, sums)


def _backward(chunk, saved, g):
    """Of dL/dy = g: dL/dscores = weight (v g - sum of g y), as the gradient of a softmax takes its mean away."""
    q, k, v, bias, seen, outputs, sums = saved
    mean = (g.astype(jnp.float32) * outputs.astype(jnp.float32)).sum(1, keepdims=True)
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
    return _joined(of_q), of_k.astype(k.dtype), of_v.swapaxes(1, 2).astype(v.dtype), of_bias, None


attend.defvjp(_save, _backward)


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


def _joined(parts: list[Array]) -> Array:
    return jnp.concatenate(parts, -1) if len(parts) > 1 else parts[0]
