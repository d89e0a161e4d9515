"""Choices of routers in what they return: by type and shape, or by a reader of the few classes that are special."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from routed.contracts import UserError


class RouterOutput(NamedTuple):
    """Output of a router for a batch: scores [T, E], experts and weights [T, k], kept [T, k] or None.

    `features` [T, D] are the input of the linear map that gives the scores, `linear` its weight [E, D] and offset [E]
    (or None). Without a linear map, `features` are the router's input, and `linear` is None.
    """

    scores: Any
    experts: Any
    weights: Any
    kept: Any = None
    features: Any = None
    linear: tuple[Any, Any] | None = None


def choices_in(tensors: Sequence[Any], scores: Any = None) -> tuple[Any, Any] | None:
    """Returns (experts, weights) [T, k] among tensors in any order: integers, and reals of the same shape.

    `scores` [T, E] are not taken for weights. Returns None if there are no integers, or no reals like them.

    Raises:
      UserError: several reals have the shape of the integers.
    """
    tensors = [part.reshape(-1, part.shape[-1]) for part in tensors if hasattr(part, "shape") and part.ndim > 1]
    for experts in tensors:
        if experts.is_floating_point() or str(experts.dtype) == "torch.bool":
            continue
        alike = [part for part in tensors if part.is_floating_point() and part.shape == experts.shape]
        if len(alike) > 1 and scores is not None:
            alike = [part for part in alike if not (part.shape == scores.shape and bool((part == scores).all()))]
        if len(alike) > 1:
            raise UserError(f"a router returns {len(alike)} tensors that may be weights: they cannot be told apart")
        if alike:
            return experts.long(), alike[0]
    return None


def highest(scores: Any, k: int) -> RouterOutput:
    """Returns the k experts of the highest scores, weighted by their softmax probabilities."""
    scores = scores.float()
    weights, experts = scores.softmax(-1).topk(k, dim=-1)
    return RouterOutput(scores, experts, weights)


def scattered(module: Any, output: Any) -> RouterOutput:
    """Reads (weights of all experts, 0 where not chosen; logits) of Llama 4, which scales the inputs of experts."""
    all_weights, scores = output
    weights, experts = all_weights.topk(module.top_k, dim=-1)
    return RouterOutput(scores, experts, weights)


def switch(module: Any, output: Any) -> RouterOutput:
    """Reads (one-hot mask of tokens that were not dropped, weight, logits), with axes of batch and position.

    The model chooses by probabilities in the type of its input; in bfloat16 they may be equal where logits are not.
    """
    mask, weights, scores = (tensor.reshape(-1, tensor.shape[-1]) for tensor in output)
    is_kept = mask.any(-1, keepdim=True)
    chosen = _probabilities(scores, module, weights).argmax(-1, keepdim=True)
    return RouterOutput(scores, chosen.where(~is_kept, mask.argmax(-1, keepdim=True)), weights, is_kept)


def nllb(module: Any, output: Any) -> RouterOutput:
    """Reads (mask; weights of all experts, 0 where dropped; logits).

    The first expert has the highest probability in the type of the model's input, the second the highest other logit.
    """
    _, all_weights, scores = output
    first = _probabilities(scores, module, all_weights).argmax(-1, keepdim=True)
    second = scores.scatter(-1, first, float("-inf")).argmax(-1, keepdim=True)
    experts = first.new_empty((len(first), 2))
    experts[:, :1], experts[:, 1:] = first, second
    weights = all_weights.gather(-1, experts)
    return RouterOutput(scores, experts, weights, weights > 0)


def _probabilities(scores: Any, module: Any, like: Any) -> Any:
    return scores.softmax(-1, dtype=module.dtype).to(like.dtype)


def jetmoe(module: Any, output: Any) -> RouterOutput:
    """Reads (order of choices by expert, tokens, weights in that order, choices of each expert, logits) of JetMoE."""
    order, _, weights, sizes, scores = output
    sorted_experts = order.new_tensor([expert for expert, size in enumerate(sizes) for _ in range(size)])
    experts, shares = order.new_empty(order.shape), weights.new_empty(order.shape)
    experts[order], shares[order] = sorted_experts, weights
    shape = (len(scores), module.top_k)
    return RouterOutput(scores, experts.reshape(shape), shares.reshape(shape))


#: Class of a router in transformers 5 whose experts do not receive (experts, weights) -> reader of its output.
ROUTERS: dict[str, Callable[[Any, Any], RouterOutput]] = {
    "Llama4Router": scattered,
    "SwitchTransformersTop1Router": switch,
    "NllbMoeTop2Router": nllb,
    "JetMoeTopKGating": jetmoe,
}
