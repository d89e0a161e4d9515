"""Experiments on Mixture-of-Experts routers: does learning to route help, and what did the router learn?"""

from routed.results import load

__all__ = ["load"]
