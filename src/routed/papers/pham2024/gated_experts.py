"""Maximum likelihood of gated Gaussian experts, from several starts (Pham et al. 2024, Theorems 4.1, 4.2)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from routed.contracts import AT_LEAST_0, SHARE, Batch, Column
from routed.models.model import Model, ModelPart, Outputs
from routed.papers.pham2024 import gated
from routed.papers.pham2024.gated import SOFTMAX, Components
from routed.papers.pham2024.gated_gaussians import TRUE
from routed.settings.setting import Setting, at_least
from routed.training.task_losses import TaskLoss

SETTINGS = {
    "starts": Setting(
        3,
        "starts of the maximisation: the truth plus noise N(0, .1^2), the others at random; the likeliest end counts",
        at_least(1),
    )
}

#: Bounds of the variances: without a lower bound the likelihood is unbounded.
LEAST, LARGEST = 0.02, 5.0

#: A fit has converged if sqrt(n) |gradient of the mean log likelihood| is below this bound. With a Fisher information
#: of about 1, the remaining distance is then this share of the estimate's standard deviation. If all experts are
#: chosen, a converged fit is also at least as likely as the truth. If fewer experts are chosen, the likelihood jumps,
#: and a fit ends where the smooth part of the likelihood has no gradient: not a maximum, but the root of an unbiased
#: equation.
SETTLED = 0.1

#: Distances from G* at which h / D is computed, and number of random directions at each distance. Measures `far` from
#: G* are drawn as random starts.
RADII, DIRECTIONS = (0.01, 0.03, 0.1, 0.3, 1.0), 12

#: Nodes of the quadrature in x and in y, and the largest |y|.
NODES = (384, 121, 8.0)


def gated_experts(config: ConfigDict, mesh: Mesh | None = None) -> Model:
    """Builds the data's model: k* experts a x + b with variances, weighted as `data.gate` says.

    Predictions are -log p(y | x), with a column for each start.
    """
    gate, most, n = config.data.gate, config.data.chosen, config.batch_size

    def init(key, batch):
        near, random = jax.random.split(key)
        first = jax.tree.map(lambda a: a[None], _moved(TRUE, near, 0.1))
        random_starts = jax.vmap(_random)(jax.random.split(random, config.starts - 1))
        starts = jax.tree.map(lambda *parts: jnp.concatenate(parts), first, random_starts)
        experts = {"line": starts.line, "log_variance": jnp.log(starts.variance)}
        return {"router": {"gate": starts.gate} if gate == SOFTMAX else {}, "experts": experts}, {}

    def apply(params, state, batch: Batch, rule, dispatch, key=None, step=0):
        return Outputs(_surprise(gate, most, params, batch.x[:, 0], batch.y[:, 0]), {}, state)

    def watch(params, world, test: Batch, key):
        """Judges the likeliest start against the truth, and h / D at random G."""
        nodes = gated.grid(*NODES)
        return {
            **_judged(gate, most, nodes, params, (world.train.x[:n], world.train.y[:n])),
            **_ratios(gate, most, nodes, key),
        }

    return Model(init, apply, watch=watch)


def _surprise(gate: str, most: int, params, x: Float[Array, " T"], y: Float[Array, " T"]) -> Float[Array, "T S"]:
    """Computes -log p(y | x) under each start."""
    of_start = lambda components: -gated.log_density(components, gate, most, x, y[:, None])[:, 0]  # noqa: E731
    return jax.vmap(of_start, out_axes=1)(_components(params))


def _judged(gate: str, most: int, nodes: tuple, params, data: tuple[Array, Array]) -> dict[str, Array]:
    """Computes the likeliest start's distances from the truth, its convergence and its gain in likelihood."""
    x, y = data
    mean = lambda params: _surprise(gate, most, params, x, y).mean(0)  # noqa: E731
    losses = mean(params)
    best = losses.argmin()
    slopes = jax.grad(lambda params: mean(params).sum())(params)  # starts are independent
    squares = sum((leaf[best] ** 2).sum() for leaf in jax.tree.leaves(slopes))
    likeliest = jax.tree.map(lambda leaf: leaf[best], _components(params))
    truth = -gated.log_density(TRUE, gate, most, x, y[:, None]).mean()
    residual, gain = jnp.sqrt(len(x) * squares), len(x) * (truth - losses[best])
    settled = (residual < SETTLED) & ((gain > 0) | (most < len(TRUE.variance)))
    distances = {
        "theory/hellinger": gated.hellinger(likeliest, TRUE, gate, most, nodes),
        "theory/voronoi": gated.voronoi(likeliest, TRUE, gate, most),
    }
    return {
        **{name: jnp.where(settled, value, jnp.nan) for name, value in distances.items()},
        "theory/converged": settled.astype(jnp.float32),
        "theory/residual": residual,
        "theory/gain": gain,
        "theory/best_start": best.astype(jnp.float32),
    }


def _ratios(gate: str, most: int, nodes: tuple, key) -> dict[str, Array]:
    """Computes the smallest E h / D over random G at each distance from G*, and far from G*. The key is consumed."""

    def ratio(components: Components):
        return gated.hellinger(components, TRUE, gate, most, nodes) / gated.voronoi(components, TRUE, gate, most)

    def at(distance, key):
        moved, far = _moved(TRUE, key, distance, unit=True), _random(key)
        return ratio(jax.tree.map(lambda a, b: jnp.where(distance > 0, a, b), moved, far))

    distances = jnp.repeat(jnp.array((*RADII, 0.0)), DIRECTIONS)  # 0: far from G*
    ratios = jax.lax.map(lambda draw: at(*draw), (distances, jax.random.split(key, len(distances))))
    smallest = dict(zip((*RADII, 0.0), ratios.reshape(-1, DIRECTIONS).min(1), strict=True))
    return {
        **{ratio_name(radius): smallest[radius] for radius in RADII},
        "theory/ratio_far": smallest[0.0],
        "theory/ratio_fall": jnp.log(smallest[0.01] / smallest[0.3]),
    }


def ratio_name(radius: float) -> str:
    """Returns the column of h / D at a distance."""
    return f"theory/ratio_{radius:g}"


def _components(params) -> Components:
    line, variance = params["experts"]["line"], jnp.exp(params["experts"]["log_variance"])
    gate = params["router"].get("gate", jnp.zeros_like(line))
    return Components(line, jnp.clip(variance, LEAST, LARGEST), gate)


def _moved(components: Components, key, scale: Float[Array, ""] | float, unit: bool = False) -> Components:
    """Adds noise of deviation `scale` to the components; with `unit`, moves by `scale` in a random direction.

    Logarithms of variances are moved.
    """
    keys = jax.random.split(key, 3)
    noise = [jax.random.normal(noise_key, part.shape) for noise_key, part in zip(keys, components, strict=True)]
    length: Any = jnp.sqrt(sum((part**2).sum() for part in noise)) if unit else 1.0
    line, variance, gate = (scale * part / length for part in noise)
    return Components(components.line + line, components.variance * jnp.exp(variance), components.gate + gate)


def _random(key) -> Components:
    keys = jax.random.split(key, 3)
    normal = lambda key, shape, scale: scale * jax.random.normal(key, shape)  # noqa: E731
    line, gate = (normal(part_key, TRUE.line.shape, scale) for part_key, scale in ((keys[0], 1.5), (keys[1], 1.0)))
    return Components(line, 0.3 * jnp.exp(normal(keys[2], TRUE.variance.shape, 0.5)), gate)


#: Columns of `watch`.
COLUMNS = {
    "theory/hellinger": Column(
        "Hellinger distance from the truth,\nmean over x",
        "Mean over x of the Hellinger distance between the estimated and the true density of y; of fits that "
        "converged.",
        log=True,
        bounds=AT_LEAST_0,
    ),
    "theory/voronoi": Column(
        "Voronoi loss D",
        "How far the estimated experts are from the true ones that they are nearest to, over the two worst; of "
        "fits that converged.",
        log=True,
        bounds=AT_LEAST_0,
    ),
    "theory/converged": Column(
        "fits that converged",
        "1 where the gradient at the likeliest start, times the root of the samples, is below .1 and (if all "
        "experts are chosen) it is at least as likely as the truth.",
        bounds=SHARE,
        higher_is_better=True,
    ),
    "theory/residual": Column(
        "root of n times the gradient",
        "Norm of the gradient of the mean log likelihood of the likeliest start, times the root of the number of "
        "samples.",
        log=True,
        bounds=AT_LEAST_0,
    ),
    "theory/gain": Column(
        "log likelihood over the truth's (nats)",
        "Log likelihood of all training samples at the likeliest start, minus that of the truth: a maximum is above 0.",
    ),
    "theory/best_start": Column(
        "number of the likeliest start", "0 is the start near the truth, others began at random.", bounds=AT_LEAST_0
    ),
    "theory/ratio_fall": Column(
        "log of smallest h / D at .01 over that at .3",
        "Logarithm of the smallest ratio of both distances at distance .01 from the truth over that at .3: far "
        "below 0 where it vanishes.",
    ),
    **{
        name: Column(
            f"smallest h / D, {where}",
            f"Smallest ratio of mean Hellinger distance and Voronoi loss over random measures {where}.",
            log=True,
            bounds=AT_LEAST_0,
        )
        for name, where in (
            *((ratio_name(r), f"at distance {r:g} from the truth") for r in RADII),
            ("theory/ratio_far", "far from the truth"),
        )
    },
}


#: Gaussian experts under a gate, fitted by maximum likelihood.
GATED_EXPERTS = ModelPart(
    gated_experts,
    needs=("gated Gaussians",),
    targets=("density",),
    columns=COLUMNS,
    settings=SETTINGS,
    reads=("data.gate", "data.chosen", "experts.learning_rate", "router.frozen", "router.learning_rate"),
)
#: Its loss is the mean of its predictions, -log p(y), one column for each start of a fit.
LIKELIHOOD = TaskLoss(lambda prediction, y: prediction.mean(-1), fits=("density",), labelled=False)
