"""Hooks that read the outputs of the routers of a Hugging Face model, and the known router classes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from routed.contracts import UserError
from routed.trace.arrays import as_array


class RouterOutput(NamedTuple):
    """Output of a router for a batch: scores [T, E], experts and weights [T, k], kept [T, k] or None.

    `features` are the router's input, in its own shape.
    """

    scores: Any
    experts: Any
    weights: Any
    kept: Any = None
    features: Any = None


#: Function from (module of a router, its output) to the parts of the output.
Reader = Callable[[Any, Any], RouterOutput]


class RouterModule(NamedTuple):
    """A router of a model, with the reader of its output."""

    module: Any
    read: Reader


def indexed(module: Any, output: Any) -> RouterOutput:
    """Reads (logits, weights, indices), whose weights are in any order."""
    scores, weights, experts = output
    weights, order = weights.sort(dim=-1, descending=True, stable=True)
    return RouterOutput(scores, experts.gather(-1, order), weights)


def scattered(module: Any, output: Any) -> RouterOutput:
    """Reads (weights of all experts, 0 where not chosen; logits) of Llama 4, which scales the inputs of experts."""
    all_weights, scores = output
    weights, experts = all_weights.topk(module.top_k, dim=-1)
    return RouterOutput(scores, experts, weights)


def switch(module: Any, output: Any) -> RouterOutput:
    """Reads (one-hot mask of tokens that were not dropped, weight, logits), with axes of batch and position."""
    mask, weights, scores = (tensor.reshape(-1, tensor.shape[-1]) for tensor in output)
    return RouterOutput(scores, scores.argmax(-1, keepdim=True), weights, mask.any(-1, keepdim=True))


def nllb(module: Any, output: Any) -> RouterOutput:
    """Reads (mask; weights of all experts, 0 where dropped; logits), whose two highest logits are chosen."""
    _, all_weights, scores = output
    experts = scores.topk(2, dim=-1).indices
    weights = all_weights.gather(-1, experts)
    return RouterOutput(scores, experts, weights, weights > 0)


def plain(k: int) -> Reader:
    """Returns the reader of logits alone: the k highest, weighted by their softmax probabilities."""

    def read(module: Any, output: Any) -> RouterOutput:
        scores = (output[0] if isinstance(output, tuple) else output).float()
        _check_k(k, scores.shape[-1])
        weights, experts = scores.softmax(-1).topk(k, dim=-1)
        return RouterOutput(scores, experts, weights)

    return read


def _check_k(k: int, experts: int) -> None:
    if k > experts:
        raise UserError(f"--k={k}: a token has at most all experts of its router, {experts}")


#: Class of a router's module in transformers 5 -> reader of its output.
_INDEXED = (
    *("MixtralTopKRouter", "OlmoeTopKRouter", "Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter"),
    *("DeepseekV2TopkRouter", "DeepseekV3TopkRouter", "GptOssTopKRouter"),
)
ROUTERS: dict[str, Reader] = dict.fromkeys(_INDEXED, indexed) | {
    "Llama4Router": scattered,
    "SwitchTransformersTop1Router": switch,
    "NllbMoeTop2Router": nllb,
}


def is_known(module: Any) -> bool:
    """True if the class of a module is a router of `ROUTERS`."""
    return type(module).__name__ in ROUTERS


def routers_of(model: Any, pattern: str = "", k: int = 0) -> dict[str, RouterModule]:
    """Returns the routers of a model by name: those of `ROUTERS`, or modules whose whole name matches `pattern`.

    Raises:
      UserError: the model has no such router (the error says how to name them), `k` is larger than the number of
        experts, or `k` is given without a pattern.
    """
    if k and not pattern:
        raise UserError(f"--k={k} goes with --routers: a known router has its own number of experts per token")
    try:
        named = {
            name: module
            for name, module in model.named_modules()
            if (re.fullmatch(pattern, name) if pattern else is_known(module))
        }
    except re.error as error:
        raise UserError(f"--routers={pattern}: no regular expression ({error})") from None
    if not named:
        raise UserError(_no_router(model, pattern))
    if pattern and k < 1:
        raise UserError(f"--routers={pattern} needs --k, the number of experts of a token")
    for module in named.values():
        if not is_known(module) and (linear := weights_of(module)):  # before a capture begins
            _check_k(k, len(linear[1]))
    return {name: RouterModule(module, ROUTERS.get(type(module).__name__, plain(k))) for name, module in named.items()}


def _no_router(model: Any, pattern: str) -> str:
    kind, known_names = type(model).__name__, ", ".join(ROUTERS)
    reason = (
        f"no module of {kind} is named {pattern}" if pattern else f"{kind} has no router that is known ({known_names})"
    )
    likely = [name for name, _ in model.named_modules() if re.search(r"(^|\.)(gate|router)\w*$", name)]
    guess = f"; perhaps {re.sub(r'[.][0-9]+[.]', '.[0-9]+.', likely[0])}" if likely else ""
    advice = "name its router modules, whose output must be scores of the experts, with --routers=REGEX --k=K"
    return f"{reason}: {advice}{guess}"


@contextlib.contextmanager
def listening(routers: Mapping[str, RouterModule]) -> Iterator[dict[str, RouterOutput]]:
    """Yields a dict that holds, after every forward pass, the outputs of the routers by name."""
    outputs: dict[str, RouterOutput] = {}

    def store(name: str, read: Reader, module: Any, inputs: Any, output: Any) -> None:
        outputs[name] = read(module, output)._replace(features=inputs[0] if inputs else None)

    with hooked({name: (router.module, partial(store, name, router.read)) for name, router in routers.items()}):
        yield outputs


@contextlib.contextmanager
def hooked(hooks: Mapping[str, tuple[Any, Callable[..., Any]]]) -> Iterator[None]:
    """Registers forward hooks (module, hook), and removes them at the end."""
    handles = []
    try:
        handles += [module.register_forward_hook(hook) for module, hook in hooks.values()]
        yield
    finally:
        for handle in handles:
            handle.remove()


def weights_of(module: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns (kernel [D, E], offset [E]) of a router that is a linear map of its input; None for any other router."""
    linear = getattr(module, "classifier", module)
    weight, offset = getattr(linear, "weight", None), getattr(linear, "bias", None)
    if weight is None or weight.ndim != 2:
        return None
    return as_array(weight).T, np.zeros(len(weight), np.float32) if offset is None else as_array(offset)
