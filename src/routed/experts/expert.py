"""An expert: ONE Flax module on tokens, which the layer maps over experts, and what it says of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import flax.linen as nn
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from routed.settings.setting import Setting, accept


class MakeExpertFn(Protocol):
    """The module of one expert with so many outputs; `own` is the config node `experts`.

    The module maps tokens [T, ...] to outputs [T, O], or to [1, O] for all tokens.
    """

    def __call__(self, node: Any, outputs: int) -> nn.Module: ...


class Affine(NamedTuple):
    """All experts as maps x -> slope^T x + offset; without slopes they are constants."""

    slope: Float[Array, "E D O"] | None
    offset: Float[Array, "E O"]


class Expert(NamedTuple):
    """`tokens` are the kinds of tokens that the expert can compute on (rows, patches, images, hidden; empty: any).

    `readout` names the module of its output weights, if a model may take them out of training. `affine` reads the
    parameters of all experts as maps x -> slope^T x + offset, for the columns `regret/`; None: they are none.
    """

    make: MakeExpertFn
    tokens: tuple[str, ...] = ("rows", "hidden")
    settings: Mapping[str, Setting] = {}
    reads: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    check: Callable[[ConfigDict], None] = accept
    affine: Callable[[Any], Affine] | None = None
    readout: str = ""
    #: Of images: products and sums of one, forward, from the width, the pixels of a side, the channels and the outputs,
    #: where parameters do not tell them; and whether the module has an `embed`, what its last layer is given.
    flops: Callable[[int, int, int, int], float] | None = None
    embeds: bool = False
