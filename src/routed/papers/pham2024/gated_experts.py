"""Maximum likelihood for Gaussian experts under a gate of the K largest scores, from several starts (Pham et al. 2024, Theorems 4.1, 4.2)."""

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

SETTINGS = {
    "starts": Setting(
        3,
        "starts of the maximisation: the truth plus noise N(0, .1^2), the others at random; the likeliest end counts",
        at_least(1),
    )
}

#: Variances stay within these: without a bound the likelihood has none.
LEAST, LARGEST = 0.02, 5.0

#: A fit has converged if sqrt(n) |gradient of the mean log likelihood| is below this: where the Fisher information is
#: about 1, what is left to go is then this share of the estimate's own deviation. Where all experts are chosen it is at
#: least as likely as the truth, too; where fewer are, the likelihood jumps, and such an end is where its smooth part
#: has no gradient: not its maximum, though its equation is unbiased.
SETTLED = 0.1

#: Distances from G* at which h / D is asked, in random directions, and directions; `far` are draws as those of random
#: starts.
RADII, DIRECTIONS = (0.01, 0.03, 0.1, 0.3, 1.0), 12

#: Nodes of the quadrature in x and in y, and how far y goes.
NODES = (384, 121, 8.0)


def gated_experts(config: ConfigDict, mesh: Mesh | None = None) -> Model:
    """k* experts a x + b with variances, weighed as `data.gate` says, as the data are; predictions are -log p(y | x), a column a start."""
    del mesh
    gate, most, n = config.data.gate, config.data.chosen, config.batch_size

    def init(key, batch):
        del batch
        near, random = jax.random.split(key)
        first = jax.tree.map(lambda a: a[None], _moved(TRUE, near, 0.1))
        random_starts = jax.vmap(_random)(jax.random.split(random, config.starts - 1))
        starts = jax.tree.map(lambda *parts: jnp.concatenate(parts), first, random_starts)
        experts = {"line": starts.line, "log_variance": jnp.log(starts.variance)}
        return {"router": {"gate": starts.gate} if gate == SOFTMAX else {}, "experts": experts}, {}

    def surprise(params, x, y) -> Float[Array, "T S"]:
        of_start = lambda components: -gated.log_density(components, gate, most, x, y[:, None])[:, 0]  # noqa: E731
        return jax.vmap(of_start, out_axes=1)(_components(params))

    def apply(params, state, batch: Batch, rule, dispatch, key=None, step=0):
        del rule, dispatch, key, step
        return Outputs(surprise(params, batch.x[:, 0], batch.y[:, 0]), {}, state)

    def watch(params, world, test: Batch, key):
        """The likeliest start's distances from the truth and whether it settled there; and h / D at random G."""
        del test
        x, y = world.train.x[:n], world.train.y[:n]
        mean = lambda params: surprise(params, x, y).mean(0)  # noqa: E731
        losses, nodes = mean(params), gated.grid(*NODES)
        best = losses.argmin()
        slopes = jax.grad(lambda params: mean(params).sum())(params)  # starts do not meet
        squares = sum((leaf[best] ** 2).sum() for leaf in jax.tree.leaves(slopes))
        likeliest = jax.tree.map(lambda leaf: leaf[best], _components(params))
        truth = -gated.log_density(TRUE, gate, most, x, y[:, None]).mean()
        residual, gain = jnp.sqrt(n * squares), n * (truth - losses[best])
        settled = (residual < SETTLED) & ((gain > 0) | (most < len(TRUE.variance)))
        distances = {
            "theory/hellinger": gated.hellinger(likeliest, TRUE, gate, most, nodes),
            "theory/voronoi": gated.voronoi(likeliest, TRUE, gate, most),
        }
        return {
            **{name: jnp.where(settled, value, jnp.nan) for name, value in distances.items()},
            "theory/settled": settled.astype(jnp.float32),
            "theory/residual": residual,
            "theory/gain": gain,
            "theory/best_start": best.astype(jnp.float32),
            **_ratios(gate, most, nodes, key),
        }

    return Model(init, apply, watch=watch)


def _ratios(gate: str, most: int, nodes: tuple, key) -> dict[str, Array]:
    """The smallest E h / D over random G at each distance from G*, and far from it. The key is consumed."""

    def ratio(components: Components):
        return gated.hellinger(components, TRUE, gate, most, nodes) / gated.voronoi(components, TRUE, gate, most)

    def at(distance, key):
        moved, far = _moved(TRUE, key, distance, unit=True), _random(key)
        return ratio(jax.tree.map(lambda a, b: jnp.where(distance > 0, a, b), moved, far))

    distances = jnp.repeat(jnp.array((*RADII, 0.0)), DIRECTIONS)  # 0: anywhere
    ratios = jax.lax.map(lambda draw: at(*draw), (distances, jax.random.split(key, len(distances))))
    smallest = dict(zip((*RADII, 0.0), ratios.reshape(-1, DIRECTIONS).min(1), strict=True))
    return {
        **{ratio_name(radius): smallest[radius] for radius in RADII},
        "theory/ratio_far": smallest[0.0],
        "theory/ratio_fall": jnp.log(smallest[0.01] / smallest[0.3]),
    }


def ratio_name(radius: float) -> str:
    """The column of h / D at a distance."""
    return f"theory/ratio_{radius:g}"


def _components(params) -> Components:
    line, variance = params["experts"]["line"], jnp.exp(params["experts"]["log_variance"])
    gate = params["router"].get("gate", jnp.zeros_like(line))
    return Components(line, jnp.clip(variance, LEAST, LARGEST), gate)


def _moved(components: Components, key, scale: Float[Array, ""] | float, unit: bool = False) -> Components:
    """The components plus noise of deviation `scale`; `unit`: by `scale` in a random direction.

    Variances move in logarithms.
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


#: How its columns are shown.
COLUMNS = {
    "theory/hellinger": Column(
        "Hellinger distance from the truth,\nmean over x", log=True, bounds=AT_LEAST_0,
        definition=(
            "Mean over x of the Hellinger distance between the estimated and the true density of y; of fits that "
            "converged."
        ),
    ),
    "theory/voronoi": Column(
        "Voronoi loss D", log=True, bounds=AT_LEAST_0,
        definition=(
            "How far the estimated experts are from the true ones that they are nearest to, over the two worst; of "
            "fits that converged."
        ),
    ),
    "theory/settled": Column(
        "fits that converged", bounds=SHARE, higher_is_better=True,
        definition=(
            "1 where the gradient at the likeliest start, times the root of the samples, is below .1 and (if all "
            "experts are chosen) it is at least as likely as the truth."
        ),
    ),
    "theory/residual": Column(
        "root of n times the gradient", log=True, bounds=AT_LEAST_0,
        definition=(
            "Norm of the gradient of the mean log likelihood of the likeliest start, times the root of the number of "
            "samples."
        ),
    ),
    "theory/gain": Column(
        "log likelihood over the truth's (nats)",
        definition=(
            "Log likelihood of all training samples at the likeliest start, minus that of the truth: a maximum is "
            "above 0."
        ),
    ),
    "theory/best_start": Column(
        "number of the likeliest start", bounds=AT_LEAST_0,
        definition="0 is the start near the truth, others began at random.",
    ),
    "theory/ratio_fall": Column(
        "log of smallest h / D at .01 over that at .3",
        definition=(
            "Logarithm of the smallest ratio of both distances at distance .01 from the truth over that at .3: far "
            "below 0 where it vanishes."
        ),
    ),
    **{
        name: Column(
            f"smallest h / D, {where}", log=True, bounds=AT_LEAST_0,
            definition=f"Smallest ratio of mean Hellinger distance and Voronoi loss over random measures {where}.",
        )
        for name, where in (
            *((ratio_name(r), f"at distance {r:g} from the truth") for r in RADII), ("theory/ratio_far", "far from the truth")
        )
    },
}  # fmt: skip


#: Gaussian experts behind a gate, fitted by maximum likelihood.
GATED_EXPERTS = ModelPart(
    gated_experts,
    needs=("gated Gaussians",),
    targets=("density",),
    columns=COLUMNS,
    settings=SETTINGS,
    reads=("data.gate", "data.chosen", "experts.learning_rate", "router.frozen", "router.learning_rate"),
)
