"""The Mixture-of-Experts layer: selection, dispatch, the module that joins them, auxiliary losses, and Soft MoE."""

from routed.layer import model_losses, model_rules

__all__ = ["model_losses", "model_rules"]
