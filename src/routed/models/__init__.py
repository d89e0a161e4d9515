"""Models: what is trained. Each is an `init` and an `apply` on a Batch; `apply` also returns the routing, if there is one."""

from routed.models.shallow import MODELS, Model, build

__all__ = ["MODELS", "Model", "build"]
