"""Hooks that replace the scores of a Hugging Face model's routers, its loss with them, and their repair.

The model's own rule makes the choices. A repair trains the parameters of the routers alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from routed.contracts import UserError
from routed.trace.checks import as_array
from routed.trace.hooks import RouterModule, check_heard, choice_bias, listening
from routed.trace.readers import RouterOutput
from routed.trace.replacements import Batch, Router


@contextlib.contextmanager
def replacing(
    model: Any, modules: Mapping[str, RouterModule], routers: Mapping[str, Router]
) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Puts `routers` into the model, by name of the module, and removes them at the end.

    Yields the parameters of the routers, and a dict that the caller fills before each forward pass: `ids` [T] and
    `batch`.
    """
    import torch

    from routed.trace.router_scores import REPLACED

    current: dict[str, Any] = {}
    parameters = list[Any]()
    with contextlib.ExitStack() as hooks:
        for name, router in routers.items():
            start, module = router.start.items(), modules[name].module
            params = {key: torch.tensor(value, dtype=torch.float32, device=model.device) for key, value in start}
            parameters += params.values()
            hook = functools.partial(_replace, name, modules[name], router, params, current)
            hooks.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            hooks.callback(REPLACED.pop, module, None)
        yield parameters, current


def _replace(
    name: str, trained: RouterModule, router: Router, params: Mapping[str, Any], current: Mapping[str, Any], *call: Any
) -> Any:
    """Returns what a router's module returns for the scores of `router`; `call` is (module, args, kwargs, output)."""
    import torch

    from routed.trace.router_scores import output_with

    module, args, kwargs, _ = call

    def make(linear: Any) -> Any:
        batch = Batch(linear.scores.float(), linear.features, current["ids"], current["batch"])
        return router.scores(params, batch)

    values = []
    if (bias := choice_bias(trained)) is not None:
        value = torch.zeros_like(bias) if router.bias is None else torch.as_tensor(router.bias).to(bias)
        values = [(bias, value.reshape(bias.shape))]
    with _with_k(module, router.k):
        result = output_with(module, args, kwargs, make, values)
    if result is None:
        raise UserError(f"{name}: its scores come from no linear map, so its rule is unknown and they stay as they are")
    return result


@contextlib.contextmanager
def _with_k(module: Any, k: int) -> Iterator[None]:
    """Sets a module's experts per token (0: its own)."""
    if not k:
        yield
        return
    kind, before = type(module).__name__, getattr(module, "top_k", None)
    if before is None or kind == "JetMoeTopKGating":  # whose block has a k too
        raise UserError(f"{kind} returns scores alone, and the model takes its k experts behind it")
    module.top_k = k
    try:
        yield
    except (AssertionError, ValueError, RuntimeError) as error:
        raise UserError(f"{kind} has no rule for {k} experts a token ({str(error).splitlines()[0]})") from error
    finally:
        module.top_k = before


def choices_of(
    model: Any, modules: Mapping[str, RouterModule], routers: Mapping[str, Router], row: np.ndarray
) -> tuple[dict[str, RouterOutput], float]:
    """Returns the outputs of the routers for a row of text with `routers` in the model, and the row's loss."""
    import torch

    with torch.no_grad(), replacing(model, modules, routers) as (_, current), listening(modules) as outputs:
        loss = _loss(model, [row], current, 0)
        check_heard(modules, outputs)
        return outputs, float(loss)


def check_rules(model: Any, modules: Mapping[str, RouterModule], row: np.ndarray) -> None:
    """Refuses a model whose choices do not follow the scores of its routers by a rule that can be repeated.

    Own scores, put back, must leave the choices as they are. The scores of other experts must change them, or the
    loss if the choices cannot be seen.

    Raises:
      UserError: a router is not such a router.
    """

    def turned(name: str, by: int) -> Router:
        bias = choice_bias(modules[name])
        value = None if bias is None else as_array(bias).reshape(-1)
        return Router(lambda params, batch: batch.scores.roll(by, 1), bias=value)

    trained, loss = choices_of(model, modules, {}, row)
    repeated, _ = choices_of(model, modules, {name: turned(name, 0) for name in modules}, row)
    advice = "surgery cannot replace it; name the routers to replace with --routers=REGEX --k=K"
    for name, router in modules.items():
        if not _alike(trained[name], repeated[name], weights=True):
            raise UserError(f"{name}: its own scores, put back, make other choices: {advice}")
        changed, changed_loss = choices_of(model, modules, {name: turned(name, 1)}, row)
        all_chosen = trained[name].experts.shape[-1] == trained[name].scores.shape[-1]
        is_seen = router.block is not None or router.read is not None
        if _alike(trained[name], changed[name], weights=all_chosen) or (not is_seen and loss == changed_loss):
            raise UserError(f"{name}: its choices stay the same with the scores of other experts: {advice}")


def _alike(first: RouterOutput, second: RouterOutput, weights: bool) -> bool:
    """True if two outputs have the same experts for every token, and the same weights if `weights`."""
    if not first.experts.sort(-1).values.equal(second.experts.sort(-1).values):
        return False
    return not weights or bool(first.weights.float().isclose(second.weights.float(), atol=1e-3).all())


def has_constant_weights(
    model: Any, modules: Mapping[str, RouterModule], routers: Mapping[str, Router], row: np.ndarray
) -> bool:
    """True if the experts' weights do not depend on the scale of scores, as with one expert whose weight is 1."""

    def halved(router: Router) -> Router:
        return router._replace(scores=lambda params, batch: 0.5 * router.scores(params, batch))

    first, _ = choices_of(model, modules, routers, row)
    second, _ = choices_of(model, modules, {name: halved(router) for name, router in routers.items()}, row)
    return all(bool(first[name].weights.isclose(second[name].weights, atol=1e-4).all()) for name in routers)


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
