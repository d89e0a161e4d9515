"""The one rule for ties: functions of JAX and of NumPy choose the same indices, the lowest of equal values first."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed.contracts.ties import highest, is_highest
from routed.trace.arrays import highest_of_array

INFINITE, UNKNOWN = float("inf"), float("nan")


@pytest.mark.parametrize("k", [1, 2, 5, 8])
@pytest.mark.parametrize("levels", [1, 3, 1000])
def test_all_functions_break_ties_alike(k, levels):
    """Rows of 8 values of few levels have many ties; a stable sort is the reference."""
    values = np.random.default_rng(levels).integers(0, levels, (200, 8)).astype(np.float32)
    expected = np.argsort(-values, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(highest(jnp.asarray(values), k), expected)
    np.testing.assert_array_equal(jax.jit(highest, static_argnums=1)(values, k), expected)
    np.testing.assert_array_equal(highest_of_array(values, k), expected)
    mask = np.zeros(values.shape, bool)
    np.put_along_axis(mask, expected, True, axis=1)
    np.testing.assert_array_equal(is_highest(jnp.asarray(values), k), mask)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([1.0, INFINITE, 2.0, INFINITE], [1, 3, 2]),
        ([UNKNOWN, INFINITE, UNKNOWN, 0.0], [0, 2, 1]),
        ([-INFINITE, -INFINITE, -1.0, -INFINITE], [2, 0, 1]),
    ],
)
def test_infinities_and_nan_have_an_order(row, expected):
    for k in (1, 3):
        assert highest(jnp.array([row]), k)[0].tolist() == expected[:k]
    if -INFINITE not in row:
        assert highest_of_array(np.array([row]), 3)[0].tolist() == expected
        assert np.flatnonzero(is_highest(jnp.array([row]), 3)[0]).tolist() == sorted(expected)


def test_signed_zeros_are_a_tie_but_for_several_indices_of_jax():
    values = np.array([[-0.0, 0.0, -0.0]], np.float32)
    assert highest(jnp.asarray(values), 1).tolist() == [[0]] and highest_of_array(values, 2).tolist() == [[0, 1]]
    assert highest(jnp.asarray(values), 2).tolist() == [[1, 0]]
