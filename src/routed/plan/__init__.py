"""The plan of a command: the config, an experiment file's figures, points, arms, and the runs of them all."""

from routed.plan.config import base
from routed.plan.experiment import SCALES, Figure, make_config, variant
from routed.plan.points import Point, chain, cross, product
from routed.settings.tree import override, value_of

__all__ = [
    "SCALES", "Figure", "Point", "base", "chain", "cross", "make_config", "override", "product", "value_of", "variant"
]  # fmt: skip
