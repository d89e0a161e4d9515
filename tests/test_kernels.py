"""The room of what exists because XLA is slow somewhere: each file names its twin, and a test compares the two."""

import ast
import pathlib
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed.kernels import comparisons
from routed.kernels.argmax import MANY, argmax
from routed.kernels.ranks import plain_ranks, ranks

TESTS = pathlib.Path(__file__).parent
ROOM = TESTS.parent / "src" / "routed" / "kernels"
#: file of the room -> the test that compares its values and gradients with those of its twin.
COMPARED = {
    "argmax": "test_kernels.py::test_the_first_of_the_largest_values_is_that_of_xla",
    "attention": "test_attention.py::test_parts_make_the_whole",
    "comparisons": "test_kernels.py::test_compared_indices_read_and_add_up_as_gathered_ones",
    "grouped": "test_dispatch.py::test_every_dispatch_is_dense",
    "head_product": "test_attention.py::test_the_product_with_a_head_has_the_gradients_of_a_plain_one",
    "matmul": "test_dispatch.py::test_the_derivative_of_a_product_is_that_of_a_product",
    "megablox": "test_dispatch.py::test_kernels_of_a_tpu_are_the_products_of_each_expert",
    "ragged": "test_dispatch.py::test_every_dispatch_is_dense",
    "ranks": "test_kernels.py::test_ranks_are_those_of_a_running_count",
}
FILES = sorted(path.stem for path in ROOM.glob("*.py") if path.stem != "__init__")


def test_every_file_has_a_test_against_its_twin():
    assert sorted(COMPARED) == FILES
    for test in COMPARED.values():
        file, name = test.split("::")
        assert f"def {name}(" in (TESTS / file).read_text(), test


@pytest.mark.parametrize("name", FILES)
def test_every_file_says_why_it_exists(name):
    document = ast.get_docstring(ast.parse((ROOM / f"{name}.py").read_text()))
    for label in ("Twin: ", "Measured: ", "Delete when: "):
        assert len(re.findall(rf"^{label}", document, re.MULTILINE)) == 1, label


@pytest.mark.parametrize("length", [1, 31, 32, 100])
def test_ranks_are_those_of_a_running_count(length):
    expert = jax.random.randint(jax.random.key(length), (length,), 0, 6)  # 5 stands behind all experts
    np.testing.assert_array_equal(ranks(expert, 5), plain_ranks(expert, 5))


def test_the_first_of_the_largest_values_is_that_of_xla():
    """Ties, infinities and NaNs too: a NaN is the largest."""
    values = jnp.round(jax.random.normal(jax.random.key(0), (64, MANY)))
    values = values.at[1].set(-jnp.inf).at[2, 3:5].set(jnp.inf).at[3, 7:9].set(jnp.nan).at[4].set(jnp.nan)
    np.testing.assert_array_equal(argmax(values), values.argmax(1))
    assert "argmax" not in str(jax.make_jaxpr(argmax)(values))
    assert "argmax" in str(jax.make_jaxpr(lambda values: argmax(values))(values[:, 1:]))


@pytest.mark.parametrize("tokens", [comparisons.FEW, comparisons.FEW + 1])
def test_compared_indices_read_and_add_up_as_gathered_ones(tokens, monkeypatch):
    """Values and gradients; assignments of a token to the same expert twice add up. Beyond FEW a TPU gathers too."""
    scores = jax.random.normal(jax.random.key(0), (tokens, 6))
    index = jax.random.randint(jax.random.key(1), (tokens, 2), 0, 6)
    token = jax.random.randint(jax.random.key(2), (2 * tokens,), 0, tokens)

    def numbers(scores):
        read = comparisons.along(scores, index)
        return read, comparisons.table(jnp.exp(read).reshape(-1), token, index.reshape(-1), scores)

    loss = lambda scores: sum((part**3).sum() for part in numbers(scores))  # noqa: E731
    text = lambda: str(jax.make_jaxpr(lambda scores: numbers(scores))(scores))  # noqa: E731
    expected, gathered = (numbers(scores), jax.grad(loss)(scores)), text()
    monkeypatch.setattr(comparisons, "platform", lambda: "tpu")
    chex.assert_trees_all_close((numbers(scores), jax.grad(loss)(scores)), expected, rtol=1e-5)
    assert (text() == gathered) == (tokens > comparisons.FEW)
