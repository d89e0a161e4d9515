"""A training step: rates apart, weight decay, and a frozen router that is really frozen."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from routed.contracts import UserError
from routed.plan.checks import validate
from routed.settings.tree import node_of, override
from routed.training.optimiser import OPTIMISERS, optimiser, update

SETTINGS = {
    "router.learning_rate": 0.1,
    "experts.learning_rate": 0.01,
    "optimizer.weight_decay": 0.0,
    "optimizer.rate_scale": 1.0,
}
PARAMS = {"router": {"kernel": jnp.array([1.0, 2.0])}, "experts": {"value": jnp.array([4.0])}}
GRADS = {"router": {"kernel": jnp.array([1.0, -1.0])}, "experts": {"value": jnp.array([2.0])}}


def steps(config, settings=SETTINGS, frozen=False, grads=GRADS, count=1, wrap=lambda t: t):
    transform = wrap(optimiser(node_of(config, settings), PARAMS))
    params, state = PARAMS, transform.init(PARAMS)
    for _ in range(count):
        params, state = update(transform, params, grads, state, frozen)
    return params


def test_sgd_with_momentum_by_hand(small):
    params = steps(small, count=2)
    # Router: 1 - 0.1 * 1 - 0.1 * (1 + 0.9 * 1) = 0.71; experts: 4 - 0.01 * 2 - 0.01 * (2 + 0.9 * 2) = 3.942.
    assert float(params["router"]["kernel"][0]) == pytest.approx(0.71, rel=1e-6)
    assert float(params["experts"]["value"][0]) == pytest.approx(3.942, rel=1e-6)


def test_adam_first_step_is_the_rate(small):
    params = steps(override(small, {"optimizer.name": "adam"}))
    # Bias-corrected m / sqrt(v) = sign of the gradient on the first step.
    np.testing.assert_allclose(params["router"]["kernel"], [0.9, 2.1], rtol=1e-5)
    np.testing.assert_allclose(params["experts"]["value"], [3.99], rtol=1e-5)


def test_adafactor_factors_the_matrix_of_each_expert(small):
    """Each of 127 experts of 128 x 128 weights keeps 128 moments of its rows; an axis of 128 could be factored."""
    part, config = OPTIMISERS["adafactor"], override(small, {"optimizer.name": "adafactor", "experts.count": 127})
    validate(config)
    state = part.direction(config.optimizer).init({"kernel": jnp.zeros((127, 128, 128))})
    assert state[0].v_row["kernel"].shape == state[0].v_col["kernel"].shape == (127, 128)
    with pytest.raises(UserError, match=r"optimizer.name='adafactor': .* experts.count=128 is one"):
        validate(override(config, {"experts.count": 128}))


def test_weight_decay_is_decoupled_and_scaled_by_the_rate(small):
    params = steps(small, SETTINGS | {"optimizer.weight_decay": 0.5})
    # 1 - 0.1 * (1 + 0.5 * 1) = 0.85; 4 - 0.01 * (2 + 0.5 * 4) = 3.96.
    assert float(params["router"]["kernel"][0]) == pytest.approx(0.85)
    assert float(params["experts"]["value"][0]) == pytest.approx(3.96)


def test_rate_scale_multiplies_both(small):
    params = steps(small, SETTINGS | {"optimizer.rate_scale": 3.0})
    assert float(params["router"]["kernel"][0]) == pytest.approx(0.7)
    assert float(params["experts"]["value"][0]) == pytest.approx(3.94)


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        # Warm-up over 2 steps: 1/2, 1. Then 1; or (6 - t) / (6 - 2) for t = 2 .. 5; or sqrt(2 / (t + 1)).
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
        # (1 + cos(pi (t - 2) / 4)) / 2, where cos(pi / 4) = .7071
        ("cosine", [0.5, 1, 1, 0.85355339, 0.5, 0.14644661]),
        ("rsqrt", [0.5, 1, (2 / 3) ** 0.5, (2 / 4) ** 0.5, (2 / 5) ** 0.5, (2 / 6) ** 0.5]),
    ],
)
def test_schedule_by_hand(small, schedule, factors):
    config = override(
        small, {"optimizer.momentum": 0.0, "optimizer.schedule": schedule, "optimizer.warmup": 2, "steps": 6}
    )
    for count in range(1, 7):  # a gradient of 1 at a rate of .1
        assert float(steps(config, count=count)["router"]["kernel"][0]) == pytest.approx(1 - 0.1 * sum(factors[:count]))


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("bad", [1.0, np.nan, np.inf])
def test_frozen_router_keeps_its_bits(small, name, bad):
    grads = GRADS | {"router": {"kernel": jnp.array([bad, 1.0])}}
    config = override(small, {"optimizer.name": name})
    params = steps(config, SETTINGS | {"optimizer.weight_decay": 0.5}, True, grads, count=3)
    np.testing.assert_array_equal(params["router"]["kernel"], PARAMS["router"]["kernel"])


def test_frozen_gradient_does_not_reach_the_other_updates(small):
    """A clip by the global norm sees every gradient; the frozen router's must not change the experts' step."""
    clip = lambda t: optax.chain(optax.clip_by_global_norm(0.1), t)  # noqa: E731
    huge = GRADS | {"router": {"kernel": jnp.array([1e6, 1e6])}}
    calm, loud = (steps(small, frozen=True, grads=g, wrap=clip)["experts"]["value"] for g in (GRADS, huge))
    np.testing.assert_array_equal(calm, loud)
    free = steps(small, frozen=False, grads=huge, wrap=clip)["experts"]["value"]
    assert not np.array_equal(calm, free)  # the clip does act when the router is free


def test_freezing_is_traced(small):
    compiled = jax.jit(lambda frozen: steps(small, frozen=frozen))
    assert float(compiled(True)["router"]["kernel"][0]) == 1.0
    assert float(compiled(False)["router"]["kernel"][0]) == pytest.approx(0.9)
    assert compiled._cache_size() == 1
