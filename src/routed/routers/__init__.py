"""Routers: small stateless Flax modules that return scores [T, E] before any softmax.

A router is called with the tokens and with context that it may ignore (`cluster`); what it needs, it names.
"""

from routed.routers.fixed import HashRouter, OracleRouter
from routed.routers.linear import LinearRouter

ROUTERS = {"linear": LinearRouter, "hash": HashRouter, "oracle": OracleRouter}
