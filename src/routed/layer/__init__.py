"""The Mixture-of-Experts layer: selection, dispatch, the module that joins them, auxiliary losses, and Soft MoE."""
