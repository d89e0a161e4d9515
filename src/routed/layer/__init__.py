"""The Mixture-of-Experts layer: selection, dispatch, the module that joins them, auxiliary losses, and Soft MoE."""

from routed.layer import published, published_losses

__all__ = ["published", "published_losses"]
