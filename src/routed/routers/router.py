"""A router: a small Flax module that returns scores, and what it says of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from routed.routers.features import Flat
from routed.settings.setting import Setting, accept


class Make(Protocol):
    """The module of a router for so many experts; `own` is the config node `router`.

    The module is called with tokens [T, ...] and with context that it may ignore: `cluster` [T], `token_id` [T], `step`.
    It returns scores [T, E] before any softmax. It may hold variables of further collections: they move when the layer is
    called with mutable state (training), and are frozen with the parameters.
    """

    def __call__(self, own: Any, experts: int) -> nn.Module: ...


class Scale(Protocol):
    """Initial parameters that make the scores `factor` times as large (`router.init_scale`)."""

    def __call__(self, params: Any, factor: Float[Array, ""] | float) -> Any: ...


class FromExamples(Protocol):
    """Initial parameters taken from one example for each expert (`router.from_data`), in the place of drawn ones."""

    def __call__(self, module: nn.Module, params: Any, examples: Float[Array, "E ..."]) -> Any: ...


class Router(NamedTuple):
    """What a router reads, and what a comparison may do to its initial weights.

    `tokens` are the kinds of tokens that it can score (rows, patches, images, hidden; empty: any), `needs` the context without
    which it cannot. A router that does not learn contributes no auxiliary loss. Without `scale` or `from_examples` the
    settings that ask for them are refused; sharpening needs neither, as it multiplies the scores.
    """

    make: Make
    tokens: tuple[str, ...] = ("rows", "hidden")
    needs: tuple[str, ...] = ()
    learns: bool = True
    scale: Scale | None = None
    from_examples: FromExamples | None = None
    #: The router's only parameter from how often each token id occurs, the number of experts, and experts per token.
    from_counts: Callable[[np.ndarray, int, int], np.ndarray] | None = None
    settings: Mapping[str, Setting] = {}
    reads: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    check: Callable[[ConfigDict], None] = accept


def scale_kernel(params: Any, factor: Float[Array, ""] | float) -> Any:
    """Scales the columns of `kernel` [F, E]; a factor of 0 makes all scores 0."""
    return params | {"kernel": params["kernel"] * factor}


def kernel_from_examples(module: nn.Module, params: Any, examples: Float[Array, "E ..."]) -> Any:
    """Column e of `kernel` becomes the features of example e (Dikkala et al. 2023, Theorem 2)."""
    features = getattr(module, "features", Flat()).clone(parent=None)
    informed: Any = features.apply({"params": params.get("features", {})}, examples.astype(jnp.float32))
    return params | {"kernel": informed.T}


def initial_parameters(
    router: Router, module: nn.Module, params: Any, examples: Float[Array, "E ..."], own: Any
) -> Any:
    """The initial parameters that `router.from_data` and `router.init_scale` ask for; both are traced.

    Examples take the place of scaled parameters, they are not scaled themselves.
    """
    if router.scale is not None:
        params = router.scale(params, own.init_scale)
    if router.from_examples is not None:
        informed = router.from_examples(module, params, examples)
        params = jax.tree.map(lambda a, b: jnp.where(own.from_data, a, b), informed, params)
    return params
