"""The Mixture-of-Experts layer: selection, dispatch, the module that joins them, and auxiliary losses."""

from routed.layer import competition, model_losses, model_rules

__all__ = ["competition", "model_losses", "model_rules"]
