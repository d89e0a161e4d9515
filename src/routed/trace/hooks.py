"""Routers of Hugging Face transformers, listened to while the model runs: which modules they are, and what their outputs mean."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from routed.contracts import UserError
from routed.trace.arrays import as_array


class Seen(NamedTuple):
    """What a router returned for a batch, as tensors with a row a token: scores [T, E], experts and weights [T, k], kept or None.

    `features` are what it was given, as it was given it.
    """

    scores: Any
    experts: Any
    weights: Any
    kept: Any = None
    features: Any = None


#: What a router's module and its output say.
Reader = Callable[[Any, Any], Seen]


def indexed(module: Any, output: Any) -> Seen:
    """(logits, weights, indices), the weights in any order."""
    scores, weights, experts = output
    weights, order = weights.sort(dim=-1, descending=True, stable=True)
    return Seen(scores, experts.gather(-1, order), weights)


def scattered(module: Any, output: Any) -> Seen:
    """(weights of all experts, 0 where not chosen; logits): Llama 4, whose weights scale the experts' inputs."""
    all_weights, scores = output
    weights, experts = all_weights.topk(module.top_k, dim=-1)
    return Seen(scores, experts, weights)


def switch(module: Any, output: Any) -> Seen:
    """(one-hot mask of what found a place, weight, logits), with axes of batch and position."""
    mask, weights, scores = (one.reshape(-1, one.shape[-1]) for one in output)
    return Seen(scores, scores.argmax(-1, keepdim=True), weights, mask.any(-1, keepdim=True))


def nllb(module: Any, output: Any) -> Seen:
    """(mask, weights of all experts, 0 where dropped; logits): the two highest logits."""
    _, all_weights, scores = output
    experts = scores.topk(2, dim=-1).indices
    weights = all_weights.gather(-1, experts)
    return Seen(scores, experts, weights, weights > 0)


def plain(k: int) -> Reader:
    """Logits and nothing else, as of a linear layer: the k highest, weighted by their softmax probabilities."""

    def read(module: Any, output: Any) -> Seen:
        scores = (output[0] if isinstance(output, tuple) else output).float()
        _check_k(k, scores.shape[-1])
        weights, experts = scores.softmax(-1).topk(k, dim=-1)
        return Seen(scores, experts, weights)

    return read


def _check_k(k: int, experts: int) -> None:
    if k > experts:
        raise UserError(f"--k={k}: a token has at most all experts of its router, {experts}")


#: The class of a router's module -> how its output is read. Names are those of transformers 5.
ROUTERS: dict[str, Reader] = {
    "MixtralTopKRouter": indexed, "OlmoeTopKRouter": indexed, "Qwen2MoeTopKRouter": indexed, "Qwen3MoeTopKRouter": indexed,
    "DeepseekV2TopkRouter": indexed, "DeepseekV3TopkRouter": indexed, "GptOssTopKRouter": indexed, "Llama4Router": scattered,
    "SwitchTransformersTop1Router": switch, "NllbMoeTop2Router": nllb,
}  # fmt: skip


#: The buffer of a router that is added to its scores where experts are chosen, and not in their weights (DeepSeek-V3).
CHOOSES = "e_score_correction_bias"


def routers_of(model: Any, pattern: str = "", k: int = 0) -> dict[str, tuple[Any, Reader]]:
    """The routers of a model by name, in order: those that `ROUTERS` knows, or the modules whose whole name matches `pattern`.

    Raises:
      UserError: there are none; it says how to name them. `k` is more than their experts, or goes with no pattern.
    """
    if k and not pattern:
        raise UserError(f"--k={k} goes with --routers: a router that is known says itself how many experts a token has")
    if pattern:
        try:
            named = {name: module for name, module in model.named_modules() if re.fullmatch(pattern, name)}
        except re.error as error:
            raise UserError(f"--routers={pattern}: no regular expression ({error})") from None
        if named and k < 1:
            raise UserError(f"--routers={pattern} needs --k, the experts of a token")
        found = {name: (module, ROUTERS.get(type(module).__name__, plain(k))) for name, module in named.items()}
        for module in named.values():  # before anything is written down; of others their outputs tell
            if type(module).__name__ not in ROUTERS and (held := weights_of(module)):
                _check_k(k, len(held[1]))
    else:
        found = {
            name: (module, ROUTERS[type(module).__name__])
            for name, module in model.named_modules()
            if type(module).__name__ in ROUTERS
        }
    if not found:
        likely = [name for name, _ in model.named_modules() if re.search(r"(^|\.)(gate|router)\w*$", name)]
        kind = type(model).__name__
        what = (
            f"no module of {kind} is named {pattern}"
            if pattern
            else f"{kind} has no router that is known ({', '.join(ROUTERS)})"
        )
        seen = f"; perhaps {re.sub(r'[.][0-9]+[.]', '.[0-9]+.', likely[0])}" if likely else ""
        raise UserError(
            f"{what}: name its router modules, whose output are scores of the experts, with --routers=REGEX --k=K{seen}"
        )
    return found


def rule_of(module: Any, experts: int, k: int = 0, bias: np.ndarray | None = None) -> Callable[[Any, Any], Any]:
    """The rule of a router as a function of (scores [T, E], an output of the router) to what it would return for these scores.

    In the types of that output, if it is not None.

    A known router is asked itself: it is a rule behind a linear map, and the map of this copy of it is the identity. So its groups of
    experts, scalings and norms hold for any scores. `k` is another count of experts (0: its own), `bias` [E] is added where it chooses,
    if it has such a bias. Of other modules, whose outputs are the scores, the rule is the model's own and behind them.

    Raises:
      UserError: a router whose k cannot be set.
    """
    if type(module).__name__ not in ROUTERS:
        if k:
            raise UserError(
                f"{type(module).__name__} returns scores alone, and the model takes its k experts behind it"
            )
        return _in_place_of_scores
    import torch

    asked, device = copy.copy(module), module.weight.device
    asked._parameters, asked._buffers = dict(module._parameters), dict(module._buffers)
    asked._parameters["weight"] = torch.eye(experts, device=device)
    if asked._parameters.get("bias") is not None:
        asked._parameters["bias"] = torch.zeros(experts, device=device)
    if CHOOSES in asked._buffers:
        asked._buffers[CHOOSES] = (
            torch.zeros(experts, device=device) if bias is None else torch.as_tensor(bias, device=device)
        )
    asked.__dict__ |= {"hidden_dim": experts} | ({"top_k": k} if k else {})

    def returned(scores: Any, output: Any) -> Any:
        found = type(module).forward(asked, scores.float())
        return found if output is None else tuple(a.to(b.dtype) for a, b in zip(found, output, strict=True))

    return returned


def _in_place_of_scores(scores: Any, output: Any) -> Any:
    """The output of a module that returns scores, alone or as the first of several."""
    if isinstance(output, tuple):
        return scores.reshape(output[0].shape).to(output[0].dtype), *output[1:]
    return scores.reshape(output.shape).to(output.dtype)


@contextlib.contextmanager
def replacing(
    routers: Mapping[str, Callable[[Seen, Any], Any]], known: Mapping[str, tuple[Any, Reader]]
) -> Iterator[None]:
    """While it lasts, the routers of these names return what their functions make of (what they returned, their output)."""

    def replace(read: Reader, instead: Callable[[Seen, Any], Any]):
        def hook(module, inputs, output):
            return instead(read(module, output)._replace(features=inputs[0]), output)

        return hook

    handles = []
    try:
        for name, instead in routers.items():
            module, read = known[name]
            handles.append(module.register_forward_hook(replace(read, instead)))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def listening(routers: Mapping[str, tuple[Any, Reader]]) -> Iterator[dict[str, Seen]]:
    """While it lasts, every forward pass leaves what each router returned in the dict that is given, by name."""
    seen: dict[str, Seen] = {}

    def listen(name: str, read: Reader):
        def hook(module, inputs, output):
            seen[name] = read(module, output)._replace(features=inputs[0] if inputs else None)

        return hook

    handles = [module.register_forward_hook(listen(name, read)) for name, (module, read) in routers.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def weights_of(module: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """(kernel [D, E], offset [E]) of a router that is a linear map of its input; None: it has no such weights."""
    linear = getattr(module, "classifier", module)
    weight, offset = getattr(linear, "weight", None), getattr(linear, "bias", None)
    if weight is None or weight.ndim != 2:
        return None
    return as_array(weight).T, np.zeros(len(weight), np.float32) if offset is None else as_array(offset)


def arrays_of(seen: list[Seen]) -> dict[str, Any]:
    """The arguments of `routed.trace.write` that layers of one stack give: their scores, experts, weights and what was kept."""
    given: dict[str, Any] = {
        "scores": [as_array(one.scores).reshape(-1, one.scores.shape[-1]) for one in seen],
        "experts": [as_array(one.experts).astype(np.int16) for one in seen],
        "weights": [as_array(one.weights) for one in seen],
    }
    if seen[0].kept is not None:
        given["kept"] = [as_array(one.kept) for one in seen]
    return given
