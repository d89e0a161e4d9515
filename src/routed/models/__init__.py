"""Models: what is trained. Each is an `init` and an `apply` on a batch; `apply` also returns the routing, if there is one."""

from __future__ import annotations

import itertools
from typing import Any

from jax.sharding import Mesh
from ml_collections import ConfigDict

from routed.data import text
from routed.models import shallow, theory
from routed.models.shallow import Model
from routed.models.sizes import flops_per_row
from routed.models.t5 import t5

__all__ = ["MODELS", "Model", "build", "expert_axis", "flops_per_row"]

#: name -> model of a config, for tasks of samples.
MODELS = shallow.MODELS | theory.MODELS


def build(config: ConfigDict, mesh: Mesh | None = None) -> Model:
    """The model that the config describes: a T5 for text, one layer for samples."""
    return t5(config, mesh) if config.data.name in text.SOURCES else MODELS[config.model](config)


def expert_axis(path: tuple[Any, ...]) -> int | None:
    """Which axis of a T5's leaf counts experts, by its path in a tree of parameters; None where none does.

    Leaves of experts are [sparse layers of the stack, experts, ...], wherever the tree hangs (an optimiser's state, say).
    """
    names = [getattr(key, "key", None) for key in path]
    return 1 if ("moe", "experts") in itertools.pairwise(names) else None
