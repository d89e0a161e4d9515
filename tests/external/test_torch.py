"""Our training step against PyTorch's: same weights and batch in, same loss and weights out, over several steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from routed import models
from routed.contracts import Batch
from routed.settings.tree import override
from routed.training.optimiser import optimiser, update

STEPS = 5


def batches(config):
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        x, y = rng.normal(size=(8, 3)), rng.normal(size=(8, 2))
        yield Batch(jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32), jnp.zeros(8, int))


#: PyTorch's SGD decays through the momentum, ours is decoupled: with decay, AdamW is the common ground.
@pytest.mark.parametrize(("name", "decay"), [("sgd", 0.0), ("adam", 0.0), ("adam", 0.1)])
def test_soft_mixture_of_mlps(small, name, decay):
    config = override(small, {"optimizer.name": name, "data.target_dim": 2})
    settings = {
        "router.learning_rate": 0.05, "experts.learning_rate": 0.02, "optimizer.weight_decay": decay,
        "optimizer.rate_scale": 1.0,
    }  # fmt: skip
    model, transform = models.build(config), optimiser(config, settings)
    params = model.init(jax.random.key(0), next(batches(config)))
    state = transform.init(params)

    router = torch.nn.Parameter(torch.tensor(np.asarray(params["router"]["kernel"])))
    layers = [params["experts"][f"Dense_{i}"] for i in range(3)]
    weights = [torch.nn.Parameter(torch.tensor(np.asarray(p["kernel"]))) for p in layers]
    biases = [torch.nn.Parameter(torch.tensor(np.asarray(p["bias"]))) for p in layers]
    groups = [{"params": [router], "lr": 0.05}, {"params": weights + biases, "lr": 0.02}]
    optimizer = (
        torch.optim.SGD(groups, momentum=0.9) if name == "sgd" else torch.optim.AdamW(groups, weight_decay=decay)
    )

    for batch in batches(config):

        def loss(params, batch=batch):
            return ((model.apply(params, batch, config.selection, "dense")[0] - batch.y) ** 2).sum(-1).mean()

        value, grads = jax.value_and_grad(loss)(params)
        params, state = update(transform, params, grads, state, False)

        x, y = torch.tensor(np.asarray(batch.x)), torch.tensor(np.asarray(batch.y))
        hidden = x.expand(4, -1, -1)
        for i in range(3):
            hidden = torch.bmm(hidden, weights[i]) + biases[i][:, None]
            hidden = torch.relu(hidden) if i < 2 else hidden
        theirs = ((torch.einsum("te,eto->to", torch.softmax(x @ router, -1), hidden) - y) ** 2).sum(-1).mean()
        optimizer.zero_grad()
        theirs.backward()
        optimizer.step()
        assert float(value) == pytest.approx(theirs.item(), rel=1e-5)

    np.testing.assert_allclose(params["router"]["kernel"], router.detach().numpy(), atol=2e-5)
    for i in range(3):
        np.testing.assert_allclose(params["experts"][f"Dense_{i}"]["kernel"], weights[i].detach().numpy(), atol=2e-5)
