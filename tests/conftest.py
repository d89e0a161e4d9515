"""Eight virtual CPU devices for every test, and no silent broadcasting between ranks."""

import os

# Tests compile much and compute little: without LLVM's optimisations compiling takes half the time.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


#: Programs of this size compile in a few seconds and train in milliseconds.
SMALL = {
    "name": "small", "seeds": 2, "steps": 20, "eval_every": 10, "batch_size": 8, "data.clusters": 4, "data.dim": 3,
    "data.target_dim": 2, "data.samples": 32, "data.test_samples": 400, "experts.count": 4, "experts.width": 5,
}  # fmt: skip


@pytest.fixture
def small():
    """The base config, small."""
    from routed.config import base, override

    return override(base(), SMALL)
