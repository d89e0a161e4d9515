"""The routers of a Hugging Face model, and hooks that read their scores and choices.

The choices are those that the experts' module received. Routers whose experts get something else have readers of
their own in `readers`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from routed.contracts import UserError
from routed.trace.checks import as_array
from routed.trace.readers import ROUTERS, RouterOutput, choices_in, highest

#: Names of a router beside its block's `experts` in transformers.
ROUTER_NAMES = ("gate", "router")
#: Last names of the biases that choose experts and leave their weights (DeepSeek-V3, LFM2, AFMoE).
CHOICE_BIASES = ("e_score_correction_bias", "expert_bias")


class RouterModule(NamedTuple):
    """A router of a model, the reader of its output if it needs its own, and the block that has it and its experts.

    `block` is None if the choices are read from the router alone. `k` is what the user says (0: nothing).
    """

    module: Any
    read: Callable[[Any, Any], RouterOutput] | None = None
    block: Any = None
    k: int = 0


def routers_of(model: Any, pattern: str = "", k: int = 0) -> dict[str, RouterModule]:
    """Returns the routers of a model by name: those beside `experts`, or modules whose whole name matches `pattern`.

    Raises:
      UserError: the model has no such router (the error says how to name them), `k` is larger than the number of
        experts, or `k` is given without a pattern.
    """
    if k and not pattern:
        raise UserError(f"--k={k} goes with --routers: a known router has its own number of experts per token")
    modules = dict(model.named_modules())
    try:
        names = [name for name in modules if (re.fullmatch(pattern, name) if pattern else _is_router(name, modules))]
    except re.error as error:
        raise UserError(f"--routers={pattern}: no regular expression ({error})") from None
    if not names:
        raise UserError(_no_router(model, pattern))
    if pattern and k < 1:
        raise UserError(f"--routers={pattern} needs --k, the number of experts of a token")
    routers = {}
    for name in names:
        module, block = modules[name], modules.get(name.rpartition(".")[0])
        read = ROUTERS.get(type(module).__name__)
        has_experts = read is None and hasattr(block, "experts")
        routers[name] = RouterModule(module, read, block if has_experts else None, k)
        if linear := weights_of(module):  # before a capture begins
            _check_k(k, linear[0].shape[1])
    return routers


def _is_router(name: str, modules: Mapping[str, Any]) -> bool:
    """True for a router with its own reader, and for one beside the experts of its block."""
    block, _, last = name.rpartition(".")
    return type(modules[name]).__name__ in ROUTERS or (
        last in ROUTER_NAMES and f"{block}.experts".strip(".") in modules
    )


def _check_k(k: int, experts: int) -> None:
    if k > experts:
        raise UserError(f"--k={k}: a token has at most all experts of its router, {experts}")


def _no_router(model: Any, pattern: str) -> str:
    kind = type(model).__name__
    classes = f"none beside a module `experts`, and none of the classes {', '.join(ROUTERS)}"
    reason = f"no module of {kind} is named {pattern}" if pattern else f"{kind} has no router that is known ({classes})"
    names = [name for name, _ in model.named_modules() if re.search(r"(^|\.)(gate|router|\w+_router)$", name)]
    guess = f"; perhaps {re.sub(r'[.][0-9]+[.]', '.[0-9]+.', names[0])}" if names else ""
    advice = "name its router modules, whose output must be scores of the experts, with --routers=REGEX --k=K"
    return f"{reason}: {advice}{guess}"


@contextlib.contextmanager
def listening(routers: Mapping[str, RouterModule]) -> Iterator[dict[str, RouterOutput]]:
    """Yields a dict that holds, after every forward pass, the outputs of the routers by name.

    Raises:
      UserError: during the forward pass, if the choices of a router cannot be read.
    """
    outputs: dict[str, RouterOutput] = {}
    with contextlib.ExitStack() as hooks:
        for name, router in routers.items():
            listener = _Listener(name, router, outputs)
            for handle in listener.hooks():
                hooks.callback(handle.remove)
        yield outputs


class _Listener:
    """Hears what a router gets and returns, and what its experts receive."""

    def __init__(self, name: str, router: RouterModule, outputs: dict[str, RouterOutput]):
        self.name, self.router, self.outputs = name, router, outputs
        self.call: tuple[Any, Any, Any] | None = None
        self.received: tuple[Any, Any] | None = None

    def hooks(self) -> Iterator[Any]:
        """Yields the handles of the hooks, which it registers."""
        module, _, block, _ = self.router
        yield module.register_forward_hook(self.hear, with_kwargs=True)
        if block is not None:
            yield block.experts.register_forward_pre_hook(self.receive, with_kwargs=True)
            yield block.register_forward_hook(lambda *_: self.finish())

    def hear(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        self.call, self.received = (args, kwargs, output), None
        if self.router.block is None:
            self.finish()

    def receive(self, module: Any, args: Any, kwargs: Any) -> None:
        self.received = choices_in([*args[1:], *kwargs.values()])

    def finish(self) -> None:
        """Puts the output of the router among the outputs, when its block has ended."""
        from routed.trace.router_scores import flat, map_of

        if self.call is None:
            return
        (args, kwargs, output), self.call = self.call, None
        linear = map_of(self.router.module, args, kwargs)
        if self.router.read:
            result = self.router.read(self.router.module, output)
            self._check_given_k(result.experts)
        else:
            result = self._read(output, None if linear is None else linear.scores)
        features = flat(args[0] if args else next(iter(kwargs.values())))
        weights = None
        if linear is not None and linear.scores.shape == result.scores.shape:
            features, weights = linear.features, (linear.weight, linear.offset)
            result = result._replace(scores=linear.scores)
        self.outputs[self.name] = result._replace(features=features, linear=weights)

    def _check_given_k(self, experts: Any) -> None:
        if self.router.k not in (0, experts.shape[-1]):
            raise UserError(f"--k={self.router.k}: {self.name} gives a token {experts.shape[-1]} experts")

    def _read(self, output: Any, scores: Any) -> RouterOutput:
        """Returns the choices: what the experts received, else what the router returns, else the k highest scores."""
        from routed.trace.router_scores import flat

        parts = [*output] if isinstance(output, tuple | list) else [output]
        parts = [flat(part) for part in parts if hasattr(part, "is_floating_point") and part.ndim > 1]
        if scores is None:
            scores = max((part for part in parts if part.is_floating_point()), key=lambda part: part.shape[-1])
        choices, k = self.received or choices_in(parts, scores), self.router.k
        if choices is None and not k:
            reason = "what it chooses cannot be read: its block's `experts` are not called with experts and weights"
            advice = "if its experts are those of the k highest scores, name it with --routers=REGEX --k=K"
            raise UserError(f"{self.name}: {reason}; {advice}")
        _check_k(k, scores.shape[-1])
        if choices is None:
            return highest(scores, k)
        experts, weights = choices
        self._check_given_k(experts)
        if len(experts) != len(scores) or int(experts.max()) >= scores.shape[-1] or int(experts.min()) < 0:
            given = f"experts {list(experts.shape)} up to {int(experts.max())}, and scores {list(scores.shape)}"
            raise UserError(f"{self.name}: its choices do not go with its scores: it has {given}")
        weights, order = weights.sort(dim=-1, descending=True, stable=True)
        return RouterOutput(scores, experts.gather(-1, order), weights)


def check_heard(routers: Mapping[str, RouterModule], outputs: Mapping[str, RouterOutput]) -> None:
    """Refuses a model that did not call all its routers.

    Raises:
      UserError: a router was not called.
    """
    if silent := [name for name in routers if name not in outputs]:
        advice = "name the routers that text passes with --routers=REGEX --k=K"
        raise UserError(f"{silent[0]} is not called when the model reads text: {advice}")


def weights_of(module: Any) -> tuple[np.ndarray, np.ndarray | None] | None:
    """Returns (kernel [D, E], offset [E] or None) of a router's own or last linear map; None if it has none."""
    linear = module
    if getattr(module, "weight", None) is None:
        maps = [part for part in module.modules() if type(part).__name__ == "Linear"]
        linear = maps[-1] if maps else None
    weight = getattr(linear, "weight", None)
    if weight is None or weight.ndim != 2:
        return None
    offset = getattr(linear, "bias", None)
    return as_array(weight).T, None if offset is None else as_array(offset)


def choice_bias(router: RouterModule) -> Any:
    """Returns the bias tensor that chooses experts and leaves their weights, or None."""
    for part in (router.module, router.block):
        for name, tensor in [*part.named_parameters(), *part.named_buffers()] if part is not None else []:
            if name.rpartition(".")[2] in CHOICE_BIASES:
                return tensor
    return None
