"""Hooks that replace the scores of a Hugging Face model's routers, its loss with them, and their repair.

The model's own rule makes the choices. A repair trains the parameters of the routers alone.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from routed.contracts import UserError
from routed.trace.arrays import as_array
from routed.trace.hooks import RouterModule, hooked, is_known
from routed.trace.replacements import Batch, Router, Site

#: Buffer of a router that is added to its scores for the choice of experts, and not for their weights (DeepSeek-V3).
CHOICE_BIAS = "e_score_correction_bias"


def model_rule(module: Any, experts: int, k: int = 0, bias: np.ndarray | None = None) -> Callable[[Any, Any], Any]:
    """Returns a function from (scores [T, E], output of the router) to the router's output for these scores.

    The result has the types of the given output, unless that is None. A known router is a rule behind a linear map,
    so the function calls a copy of it whose map is the identity: groups of experts, scalings and norms are the
    model's own. `k` is the number of experts (0: the router's own); `bias` [E] is added to scores for the choice, if
    the router has such a bias. The output of any other module is scores, and the model applies its rule to them.

    Raises:
      UserError: the router's k cannot be set.
    """
    if not is_known(module):
        if k:
            reason = "returns scores alone, and the model takes its k experts behind it"
            raise UserError(f"{type(module).__name__} {reason}")
        return _with_scores
    import torch

    rule, device = copy.copy(module), module.weight.device
    rule._parameters, rule._buffers = dict(module._parameters), dict(module._buffers)
    rule._parameters["weight"] = torch.eye(experts, device=device)
    if rule._parameters.get("bias") is not None:
        rule._parameters["bias"] = torch.zeros(experts, device=device)
    if CHOICE_BIAS in rule._buffers:
        value = torch.zeros(experts) if bias is None else torch.as_tensor(bias)
        rule._buffers[CHOICE_BIAS] = value.to(device)
    rule.__dict__ |= {"hidden_dim": experts} | ({"top_k": k} if k else {})

    def output_for(scores: Any, output: Any) -> Any:
        tensors = type(module).forward(rule, scores.float())
        return tensors if output is None else tuple(a.to(b.dtype) for a, b in zip(tensors, output, strict=True))

    return output_for


def _with_scores(scores: Any, output: Any) -> Any:
    """Returns the output of a module that returns scores, alone or as the first of several, with other scores."""
    if isinstance(output, tuple):
        return scores.reshape(output[0].shape).to(output[0].dtype), *output[1:]
    return scores.reshape(output.shape).to(output.dtype)


def has_constant_weights(router_module: RouterModule, site: Site, router: Router) -> bool:
    """True if the experts' weights do not depend on the scale of scores, as with one expert whose weight is 1."""
    import torch

    module, read = router_module
    if not is_known(module):
        return False
    rule = model_rule(module, site.experts, router.k)
    some = torch.as_tensor(site.scores[:64]).to(module.weight.device)
    first, second = (read(module, rule(factor * some, None)).weights for factor in (1.0, 0.5))
    return bool(torch.allclose(first, second, atol=1e-4))


@contextlib.contextmanager
def replacing(
    model: Any, modules: Mapping[str, RouterModule], routers: Mapping[str, Router]
) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Puts `routers` into the model, by name of the module, and removes them at the end.

    Yields the parameters of the routers, and a dict that the caller fills before each forward pass: `ids` [T] and
    `batch`.
    """
    import torch

    current: dict[str, Any] = {}
    hooks, parameters = dict[str, Any](), list[Any]()

    def replace(name: str, params: Mapping[str, Any], module: Any, inputs: Any, output: Any) -> Any:
        trained, router = modules[name].read(module, output).scores, routers[name]
        scores = trained.reshape(-1, trained.shape[-1]).float()
        batch = Batch(scores, inputs[0].reshape(len(scores), -1), current["ids"], current["batch"])
        return model_rule(module, scores.shape[-1], router.k, router.bias)(router.scores(params, batch), output)

    for name, router in routers.items():
        start = router.start.items()
        params = {key: torch.tensor(value, dtype=torch.float32, device=model.device) for key, value in start}
        parameters += params.values()
        hooks[name] = modules[name].module, functools.partial(replace, name, params)
    with hooked(hooks):
        yield parameters, current


class Repair(NamedTuple):
    """Settings of a repair: Adam, with steps of `rate` standard deviations of a parameter, falling linearly to 0."""

    steps: int
    rate: float
    batch_size: int
    seed: int


def losses_of(model: Any, rows: Sequence[np.ndarray], current: dict[str, Any], batch_size: int) -> np.ndarray:
    """Returns the mean loss of the next tokens of each row [R], in nats."""
    import torch

    begins = enumerate(range(0, len(rows), batch_size))
    with torch.no_grad():
        losses = [_loss(model, rows[begin : begin + batch_size], current, batch) for batch, begin in begins]
    return np.concatenate([*map(as_array, losses)])


def _loss(model: Any, rows: Sequence[np.ndarray], current: dict[str, Any], batch: int) -> Any:
    import torch

    ids = torch.as_tensor(np.stack(rows)).to(model.device)
    current |= {"ids": ids.reshape(-1), "batch": batch}
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


def repair(model: Any, parameters: list[Any], current: dict[str, Any], rows: Sequence[np.ndarray], how: Repair) -> None:
    """Trains `parameters` on rows of text, with the loss of the text alone."""
    import torch

    groups = [{"params": [parameter], "lr": how.rate * float(parameter.std())} for parameter in parameters]
    adam = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 - step / how.steps)
    random, size = np.random.default_rng(how.seed), min(how.batch_size, len(rows))
    for parameter in parameters:
        parameter.requires_grad_(True)
    for step in range(how.steps):
        some = [rows[i] for i in random.choice(len(rows), size, replace=False)]
        adam.zero_grad()
        _loss(model, some, current, step).mean().backward()
        adam.step()
        schedule.step()
