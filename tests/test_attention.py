"""Attention in parts, a few rows and queries at once, against all of it at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed.kernels import attention as kernel
from routed.kernels.head_product import head_product
from routed.models import attention
from routed.models.attention import HIDDEN, Attention, rotated

HEADS, DIM = 2, 12


def at_once(params, x, bias, source, seen, rotary):
    """softmax(q k + bias) v, head by head, in the order of the formula."""
    size = params["out"]["kernel"].shape[0] // HEADS
    weight = {name: params[name]["kernel"] for name in ("query", "key", "value", "out")}
    split = lambda a, name: jnp.einsum("BLD,DHK->HBLK", a, weight[name].reshape(DIM, HEADS, size))  # noqa: E731
    q, k, v = split(x, "query"), split(source, "key"), split(source, "value")
    if rotary:
        q, k = jax.vmap(rotated)(q), jax.vmap(rotated)(k)
    scores = jnp.einsum("HBQK,HBSK->HBQS", q, k)
    if bias is not None:
        place = np.arange(x.shape[1])[:, None] - np.arange(source.shape[1])[None, :] + source.shape[1] - 1
        scores = scores + bias[:, None, place]
    scores = scores if seen is None else jnp.where(seen[None], scores, HIDDEN)
    mixed = jnp.einsum("HBQS,HBSK->BQHK", jax.nn.softmax(scores), v)
    return mixed.reshape(*x.shape[:2], HEADS * size) @ weight["out"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("causal", "length", "keys", "rotary", "packed"),
    [
        (True, 150, 150, False, False),  # queries 0-74, 75-149
        (True, 300, 300, True, True),  # 0-127, 128-255, 256-299
        (True, 20, 20, False, True),  # all at once
        (False, 70, 70, False, False),
        (False, 5, 90, False, False),  # of another source
    ],
)
@pytest.mark.parametrize(
    ("platform", "most", "size"),
    [
        ("cpu", 2**19, 4),  # all rows and heads at once
        ("cpu", 2**14, 4),  # one by one, but for the least
        ("cpu", 2**17, 8),  # heads that together are wider than rows, one after the other
        ("gpu", 0, 4),  # without parts
    ],
)
def test_parts_make_the_whole(causal, length, keys, rotary, packed, platform, most, size, monkeypatch):
    monkeypatch.setattr(kernel, "SCORES", most)
    monkeypatch.setattr(attention, "platform", lambda: platform)
    key = jax.random.key(0)
    x, other = jax.random.normal(key, (3, length, DIM)), jax.random.normal(key, (3, keys, DIM))
    source = None if keys == length else other
    distance = np.arange(1 - length, length)
    bias = None if source is not None else jax.random.normal(key, (HEADS, len(distance)))
    if causal:
        bias = jnp.where(distance >= 0, bias, HIDDEN)
    seen = None
    if packed:
        document = jnp.arange(length) // 7
        seen = jnp.broadcast_to(document[:, None] == document[None, :], (3, length, length))
    module = Attention(HEADS, size, rotary=rotary, causal=causal)
    params = jax.tree.map(lambda a: 3 * a, module.init(key, x, bias, source, seen)["params"])

    def loss(run):
        return jax.jit(
            jax.value_and_grad(
                lambda params, x, bias: (run(params, x, bias) ** 2).sum(), (0, 1) if bias is None else (0, 1, 2)
            )
        )(params, x, bias)

    parts = loss(lambda params, x, bias: module.apply({"params": params}, x, bias, source, seen))
    whole = loss(lambda params, x, bias: at_once(params, x, bias, x if source is None else source, seen, rotary))
    for ours, right in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(ours, right, rtol=2e-4, atol=1e-4 * float(jnp.abs(right).max()))


def test_a_bias_by_place_is_that_of_its_distance():
    """Query q is q - s + 2 distances from key s = 0, 1, 2, of 4 in all: two queries."""
    bias = jnp.array([[10.0, 11, 12, 13], [20, 21, 22, 23]])
    by_key = np.array([[12, 13], [11, 12], [10, 11]])
    np.testing.assert_array_equal(kernel.by_place(bias, 3), [by_key, by_key + 10])
    # Each place's gradient goes to its distance: 1 + ... + 6 by rows, so 5; 3 + 6; 1 + 4; 2.
    weights = jnp.arange(1.0, 7).reshape(3, 2)
    gradient = jax.grad(lambda bias: (kernel.by_place(bias, 3)[0] * weights).sum())(bias)
    np.testing.assert_array_equal(gradient, [[5, 9, 5, 2], [0, 0, 0, 0]])


@pytest.mark.parametrize(
    ("heads", "rows", "expected"),
    [(4, 8, (4, 8)), (4, 32, (1, 32)), (12, 32, (1, 32)), (8, 64, (1, 32)), (8, 48, (1, 24)), (6, 8, (3, 8))],
)
def test_parts_fill_the_cache(heads, rows, expected):
    """64 queries and 64 keys are 16 KiB of scores: 32 of them fit into 512."""
    assert kernel.at_once(heads, rows, 64, 64) == expected


@pytest.mark.parametrize("size", [4, 8])
def test_gradients_of_many_parts_lose_nothing_in_few_bits(size, monkeypatch):
    """64 equal rows, one after the other: 64 times the gradient of one. Sums in bfloat16 would stop to grow."""
    monkeypatch.setattr(kernel, "SCORES", 1)
    row = jax.random.normal(jax.random.key(0), (1, 6, DIM), jnp.bfloat16)
    module = Attention(HEADS, size)
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), module.init(jax.random.key(1), row, None)["params"])
    loss = lambda params, x: module.apply({"params": params}, x, None).astype(jnp.float32).sum()  # noqa: E731
    one, many = (jax.jit(jax.grad(loss))(params, jnp.tile(row, (n, 1, 1))) for n in (1, 64))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
        a, b = (np.asarray(leaf, np.float32) for leaf in (a, b))
        np.testing.assert_allclose(b, 64 * a, rtol=0.02, atol=0.02 * 64 * np.abs(a).max())


def test_causal_attention_needs_a_bias_that_hides_the_future():
    x = jnp.ones((1, 4, DIM))
    with pytest.raises(ValueError, match="its bias hides what comes after"):
        Attention(HEADS, 4, causal=True).init(jax.random.key(0), x, None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_product_with_a_head_has_the_gradients_of_a_plain_one(dtype):
    first, second = (jax.random.normal(jax.random.key(i), shape, dtype) for i, shape in enumerate(((3, 5, 4), (4, 7))))

    def gradients(run):
        return jax.jit(jax.value_and_grad(lambda a, b: jnp.sin(run(a, b).astype(jnp.float32)).sum(), (0, 1)))(
            first, second
        )

    ours, right = gradients(head_product), gradients(lambda a, b: jnp.einsum("BMD,DV->BMV", a, b))
    assert [leaf.dtype for leaf in jax.tree.leaves(ours)] == [leaf.dtype for leaf in jax.tree.leaves(right)]
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(right), strict=True):
        scale = float(jnp.abs(b.astype(jnp.float32)).max())
        np.testing.assert_allclose(
            a.astype(jnp.float32),
            b.astype(jnp.float32),
            rtol=0,
            atol=scale * {"float32": 1e-5, "bfloat16": 3e-2}[dtype],
        )
