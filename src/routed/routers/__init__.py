"""Routers: small stateless Flax modules that return scores [T, E] before any softmax.

A router is called with the tokens and with context that it may ignore (`cluster`, `token_id`); what it needs, it names.
"""

import flax.linen as nn

from routed.routers.fixed import HashIdRouter, HashRouter, OracleRouter, RandomRouter
from routed.routers.initial import initialise, temperature_for
from routed.routers.noise import KINDS, Noise, jitter
from routed.routers.scored import Convolutions, CosineRouter, Flat, Hidden, ProductRouter, Windows

#: name -> router for a config node `router` and a number of experts.
ROUTERS = {
    "linear": lambda router, experts: ProductRouter(experts, Flat(), router.bias),
    "mlp": lambda router, experts: ProductRouter(experts, Hidden(router.depth - 1, router.width), router.bias),
    "conv": lambda router, experts: ProductRouter(experts, Windows(router.window), router.bias),
    "cnn": lambda router, experts: ProductRouter(experts, Convolutions(router.depth, router.width)),
    "cosine": lambda router, experts: CosineRouter(experts, nn.Dense(router.dim, use_bias=False)),
    "hash": lambda router, experts: HashRouter(experts),
    "hash_id": lambda router, experts: HashIdRouter(experts, router.vocabulary, router.choices),
    "oracle": lambda router, experts: OracleRouter(experts),
    "random": lambda router, experts: RandomRouter(experts),
}

#: Routers whose choices no gradient can change: they contribute no auxiliary loss.
FIXED = ("hash", "hash_id", "oracle", "random")

__all__ = [
    "FIXED", "KINDS", "ROUTERS", "Convolutions", "CosineRouter", "Flat", "HashIdRouter", "HashRouter", "Hidden", "Noise",
    "OracleRouter", "ProductRouter", "RandomRouter", "Windows", "initialise", "jitter", "temperature_for",
]  # fmt: skip
