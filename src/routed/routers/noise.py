"""Noise of routing, drawn from the random stream `noise`; without the stream (evaluation) there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from routed.settings.setting import RATE, Setting, When, accept, refuse
from routed.tasks.task import TASKS


class ScoreNoise(nn.Module):
    """Noise on scores: `scale` times a draw, or with `learned` softplus(x W) times a draw, where W starts at zero."""

    draw: Callable[..., Array]
    scale: float
    num_experts: int
    learned: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "T ..."]) -> Float[Array, "T E"]:
        shape = (len(x), self.num_experts)
        spread = jnp.full(shape, self.scale)
        if self.learned:
            flat = x.reshape(len(x), -1).astype(jnp.float32)
            weight = self.param("kernel", nn.initializers.zeros, (flat.shape[-1], self.num_experts))
            spread = jax.nn.softplus(flat @ weight)
        if not self.has_rng("noise"):
            return jnp.zeros(shape)
        return spread * self.draw(self.make_rng("noise"), shape)


def jitter(key, x: Float[Array, "T ..."], scale: float) -> Float[Array, "T ..."]:
    """Returns float32 x times uniform factors on [1 - scale, 1 + scale] (Fedus et al. 2022), for the router only."""
    return x.astype(jnp.float32) * jax.random.uniform(key, x.shape, jnp.float32, 1 - scale, 1 + scale)


class Noise(NamedTuple):
    """A kind of noise: a draw that is added to scores, or a change of the router's input (experts get the clean x)."""

    draw: Callable[..., Array] | None = None
    learned: bool = False
    on_input: Callable[[Any, Array, float], Array] | None = None
    settings: Mapping[str, Setting] = {}
    reads: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    check: Callable[[ConfigDict], None] = accept

    @property
    def optional_at_eval(self) -> bool:
        """True if test samples may be routed with this noise."""
        return "noise_at_eval" in self.reads


#: Settings of the node `router` that several kinds of noise read.
SHARED: dict[str, Setting] = {
    "noise_scale": Setting(1.0, "times the noise; of jitter: its largest relative change", RATE),
    "noise_in_weights": Setting(False, "noise reaches the combine weights too, not only the choice"),
    "noise_at_eval": Setting(
        False,
        "there is noise also when test samples are routed",
        when=When(lambda config: config.data.name in TASKS, "data are samples; text is evaluated without noise"),
    ),
}
_ON_SCORES = ("noise_in_weights", "noise_at_eval")


def _check_learned(config: ConfigDict) -> None:
    """Refuses a spread that has no gradient, as a choice has none."""
    if not config.router.noise_in_weights:
        refuse(
            "router.noise_in_weights", False, "the noise would not learn, as a choice has no gradient; set it to true"
        )


#: name -> noise. Uniform: Chen et al. 2022, on [0, 1]; learned: noisy top-k of Shazeer et al. 2017, N(0, softplus(x
#: W)^2).
NOISES: dict[str, Noise] = {
    "none": Noise(),
    "uniform": Noise(jax.random.uniform, reads=("noise_scale", *_ON_SCORES)),
    "gaussian": Noise(jax.random.normal, reads=("noise_scale", *_ON_SCORES)),
    "learned": Noise(jax.random.normal, learned=True, reads=_ON_SCORES, check=_check_learned),
    "jitter": Noise(on_input=jitter, reads=("noise_scale", "noise_at_eval")),
}


def noise_settings(config: ConfigDict, chooses: bool) -> dict[str, Any]:
    """Returns the noise of a layer as its arguments; none where it moves choices alone and the rule `chooses` none."""
    noise = NOISES[config.router.noise]
    given = {name: config.router[name] for name in ("noise_scale", "noise_in_weights") if name in noise.reads}
    if noise.draw is not None and not chooses and not given.get("noise_in_weights"):
        return {}
    return given | {"noise": config.router.noise}
