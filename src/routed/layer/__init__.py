"""The Mixture-of-Experts layer: selection, dispatch, the module that joins them, and auxiliary losses."""

from routed.layer import model_losses, model_rules

__all__ = ["model_losses", "model_rules"]
