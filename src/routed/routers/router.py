"""A router: a small Flax module that returns scores, and what it says of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from ml_collections import ConfigDict

from routed.routers import clusters
from routed.routers.features import Flat
from routed.settings.setting import Setting, accept

#: What rows that are filled from data may be (`router.init_rows`).
EXAMPLES, CLUSTERS = "examples", "clusters"


class Router(NamedTuple):
    """A router: its inputs, its settings, and the initial weights that a comparison may give it.

    `tokens` are the kinds of tokens that it can score (rows, patches, images, hidden; empty: any), `needs` the context
    without which it cannot: it is told of no other. A router that does not learn contributes no auxiliary loss; one
    without parameters may learn through the layers below it. Without `scale`, `from_examples` or `from_clusters` the
    settings that ask for them are refused; sharpening needs neither, as it multiplies the scores.
    """

    #: The module of (node `router`, number of experts). It is called with tokens [T, ...] and with context that it may
    #: ignore: `step` of the run's `steps`, and what it `needs` of `cluster` [T] and `token_id` [T]; it returns scores
    #: [T, E] before any softmax. Variables of further collections move when the layer is called with mutable state
    #: (training), and are frozen with the parameters; those of the collection `objective` are losses, minimised beside
    #: the task's.
    make: Callable[[Any, int], nn.Module]
    tokens: tuple[str, ...] = ("rows", "hidden")
    needs: tuple[str, ...] = ()
    learns: bool = True
    has_parameters: bool = True
    #: Parameters that make the scores `factor` times as large, of (params, factor) (`router.init_scale`).
    scale: Callable[[Any, Float[Array, ""] | float], Any] | None = None
    #: Parameters from an example for each expert, of (module, params, examples [E, ...]) (`router.init_from_data`).
    from_examples: Callable[[nn.Module, Any, Array], Any] | None = None
    #: Parameters from k-means, a cluster an expert, of (module, params, samples [T, ...], weight [T], key)
    #: (`router.init_rows=clusters`). Samples of weight 0 take no part. The key is consumed. The number of starts is the
    #: next argument, where `router.init_starts` is above 1; `balanced` asks for clusters of equal size (`router.fit`).
    from_clusters: Callable[..., Any] | None = None
    #: The router's only parameter from how often each token id occurs, the experts, experts per token, and a seed.
    from_counts: Callable[[np.ndarray, int, int, int], np.ndarray] | None = None
    settings: Mapping[str, Setting] = {}
    reads: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    check: Callable[[ConfigDict], None] = accept


def scale_kernel(params: Any, factor: Float[Array, ""] | float) -> Any:
    """Scales the columns of `kernel` [F, E], of cosines `log_scale`; a factor of 0 makes all scores 0."""
    if "log_scale" in params:  # the norms of the columns do not matter
        params = params | {"log_scale": params["log_scale"] + jnp.log(jnp.where(factor == 0, 1.0, factor))}
        factor = jnp.where(factor == 0, 0.0, 1.0)
    return params | {"kernel": params["kernel"] * factor}


def kernel_from_examples(module: nn.Module, params: Any, examples: Float[Array, "E ..."]) -> Any:
    """Sets column e of `kernel` to the features of example e (Dikkala et al. 2023, Theorem 2)."""
    return params | {"kernel": _features(module, params, examples).T}


def kernel_from_clusters(
    module: nn.Module,
    params: Any,
    samples: Float[Array, "T ..."],
    weight: Float[Array, " T"],
    key: PRNGKeyArray,
    starts: int = 1,
    balanced: bool = False,
) -> Any:
    """Sets column e of `kernel` to the centre of cluster e of the samples' features under the fresh router.

    With `balanced` clusters have equal size, by `bias` [E].
    """
    features = _features(module, params, samples)
    centres = clusters.kmeans(key, features, weight, params["kernel"].shape[1], starts)
    if not balanced:
        return params | {"kernel": centres.T}
    centres, offsets = clusters.balanced(centres, features, weight)
    return params | {"kernel": centres.T, "bias": offsets}


def _features(module: nn.Module, params: Any, x: Float[Array, "T ..."]) -> Any:
    """Returns the features of tokens that a router scores, float32 [T, F]."""
    features = getattr(module, "features", Flat()).clone(parent=None)
    return features.apply({"params": params.get("features", {})}, x.astype(jnp.float32))


def initial_parameters(
    router: Router,
    module: nn.Module,
    params: Any,
    examples: Float[Array, "E ..."],
    node: Any,
    samples: tuple[Any, ...] | None = None,
) -> Any:
    """Returns the initial parameters that `router.init_from_data` and `router.init_scale` ask for; both are traced.

    Rows from data take the place of scaled parameters, they are not scaled themselves. They are `examples`, or where
    `samples` are given (with the further arguments of `Router.from_clusters`) the centres of their clusters.
    """
    scaled, informed = params if router.scale is None else router.scale(params, node.init_scale), None
    if samples is not None and router.from_clusters is not None:
        informed = router.from_clusters(module, params, *samples)
    elif router.from_examples is not None:
        informed = router.from_examples(module, params, examples)
    if informed is not None:
        return jax.tree.map(lambda a, b: jnp.where(node.init_from_data, a, b), informed, scaled)
    return scaled
