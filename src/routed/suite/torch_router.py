"""Routers written in PyTorch, as Flax modules: callbacks fetch their scores and gradients from PyTorch.

A router is a class of `torch.nn.Module` that is made with (dimensions, experts), or with (experts) if it finds the
dimensions itself (`nn.LazyLinear`). It maps tokens [T, D] to scores [T, E]. Training, data, arms and scores of a card
are those of any other router, so cards of both libraries are comparable.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from routed.contracts import UserError
from routed.routers import Router

#: Tokens on which a module is tried.
TOKENS = 3

#: Devices call in threads of their own, and `functional_call` puts parameters into a module that they share.
_LOCK = threading.Lock()


def is_class(value: Any) -> bool:
    """Returns True for a class of PyTorch modules; imports no PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, type) and issubclass(value, torch.nn.Module)


def router_of(kind: type) -> Router:
    """Returns the router of a class of PyTorch modules."""
    return Router(lambda node, experts: TorchRouter(kind, experts), tokens=("rows",))


class TorchRouter(nn.Module):
    """The scores of a PyTorch module. Its parameters and float buffers are the parameters of this module, by name."""

    kind: type
    experts: int

    @nn.compact
    def __call__(self, x: Float[Array, "T ..."], **context) -> Float[Array, "T E"]:
        rows = x.reshape(len(x), -1).astype(jnp.float32)
        sizes = (rows.shape[1], self.experts)
        like = {
            name: jax.ShapeDtypeStruct(value.shape, np.float32) for name, value in initial(self.kind, sizes).items()
        }

        def init(key):
            draw = functools.partial(initial, self.kind, sizes)
            return jax.pure_callback(draw, like, jax.random.bits(key), vmap_method="sequential")

        params = self.param("torch", init)
        return _scores(self.kind, sizes, params, rows).astype(x.dtype)


def flops(kind: type, sizes: tuple[int, int], tokens: int) -> float:
    """Returns the FLOPs of the products of a forward pass, as PyTorch counts them; NaN without products."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        _module(kind, sizes)(torch.zeros(tokens, sizes[0]))
    return float(counter.get_total_flops() or np.nan)


def initial(kind: type, sizes: tuple[int, int], seed: Any = 0) -> dict[str, np.ndarray]:
    """Returns fresh parameters and float buffers by name, drawn from a seed.

    Raises:
      UserError: a buffer of integers depends on the seed.
    """
    module, fixed = _module(kind, sizes, int(seed)), dict(_module(kind, sizes).named_buffers())
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, value in tensors.items():
        if not value.is_floating_point() and not value.equal(fixed[name]):
            raise UserError(f"{kind.__name__}: buffer {name} holds random integers: keep them as floats")
    floats = {name: value for name, value in tensors.items() if value.is_floating_point()}
    return {name: value.detach().numpy().astype(np.float32) for name, value in floats.items()}


@functools.lru_cache(64)
def _module(kind: type, sizes: tuple[int, int], seed: int = 0) -> Any:
    """Returns a module that was tried on tokens.

    Raises:
      UserError: its scores are no floats [T, E], its buffers move in training, or its scores are random.
    """
    import torch

    dims, experts = sizes
    required = [p for p in inspect.signature(kind).parameters.values() if p.default is p.empty and p.kind < 2]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = kind(experts) if len(required) == 1 else kind(dims, experts)
        tokens = torch.randn(TOKENS, dims)
        first = module(tokens)  # gives lazy parameters their shapes
        before = {name: value.clone() for name, value in module.named_buffers()}
        scores = module(tokens)
    if not isinstance(scores, torch.Tensor) or scores.shape != (TOKENS, experts) or not scores.is_floating_point():
        shape = list(getattr(scores, "shape", ())) or type(scores).__name__
        raise UserError(f"{kind.__name__}: scores of {TOKENS} tokens are {shape}, must be floats [{TOKENS}, {experts}]")
    moved = [name for name, value in module.named_buffers() if not torch.equal(value, before[name])]
    if moved:
        raise UserError(f"{kind.__name__}: buffer {moved[0]} changes in training: write the router in Flax, with state")
    if not torch.equal(scores, first):
        raise UserError(f"{kind.__name__}: scores are random, in evaluation too: write this router in Flax, with noise")
    return module


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scores(
    kind: type, sizes: tuple[int, int], params: dict[str, Array], x: Float[Array, "T D"]
) -> Float[Array, "T E"]:
    """The scores; differentiable in the parameters and the tokens."""
    like = jax.ShapeDtypeStruct((len(x), sizes[1]), np.float32)
    return jax.pure_callback(functools.partial(_forward, kind, sizes), like, params, x, vmap_method="sequential")


def _keep(kind, sizes, *inputs):
    return _scores(kind, sizes, *inputs), inputs


def _pull(kind, sizes, inputs, cotangent):
    like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), inputs)
    call = functools.partial(_backward, kind, sizes)
    return jax.pure_callback(call, like, *inputs, cotangent, vmap_method="sequential")


_scores.defvjp(_keep, _pull)


def _call(kind, sizes, params, x):
    """Returns scores, and the tensors of parameters and tokens that they depend on; only some learn."""
    import torch

    module = _module(kind, sizes)
    learns = {name for name, value in module.named_parameters() if value.requires_grad}
    named = {name: torch.tensor(np.asarray(value), requires_grad=name in learns) for name, value in params.items()}
    tokens = torch.tensor(np.asarray(x), requires_grad=True)
    with _LOCK:
        return torch.func.functional_call(module, named, (tokens,)), named, tokens


def _forward(kind, sizes, params, x) -> np.ndarray:
    scores, _, _ = _call(kind, sizes, params, x)
    return scores.detach().numpy().astype(np.float32)


def _backward(kind, sizes, params, x, cotangent) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns the gradients of the parameters and of the tokens; 0 where scores do not depend on them."""
    import torch

    scores, named, tokens = _call(kind, sizes, params, x)
    inputs = named | {"": tokens}
    learns = [name for name, value in inputs.items() if value.requires_grad]
    gradients = {name: np.zeros(value.shape, np.float32) for name, value in inputs.items()}
    if scores.requires_grad:
        given = torch.tensor(np.asarray(cotangent)).to(scores.dtype)
        of_each = torch.autograd.grad(scores, [inputs[name] for name in learns], given, allow_unused=True)
        gradients |= {name: value.numpy() for name, value in zip(learns, of_each, strict=True) if value is not None}
    of_tokens = gradients.pop("")
    return gradients, of_tokens
