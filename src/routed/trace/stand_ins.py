"""Routers that stand in a Hugging Face model for its own: put there by hooks, measured by the loss of text, and repaired by themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from routed.trace.arrays import as_array
from routed.trace.hooks import ROUTERS, Reader, Seen, replacing, rule_of
from routed.trace.replacements import Given, Router, Site


def is_constant(module: Any, read: Reader, site: Site, router: Router) -> bool:
    """Are the weights of the experts the same for other scores that choose alike, as of one expert whose weight is 1?"""
    import torch

    if type(module).__name__ not in ROUTERS:
        return False
    rule = rule_of(module, site.experts, router.k)
    some = torch.as_tensor(site.scores[:64]).to(module.weight.device)
    first, second = (read(module, rule(factor * some, None)).weights for factor in (1.0, 0.5))
    return bool(torch.allclose(first, second, atol=1e-4))


@contextlib.contextmanager
def operated(
    model: Any, known: Mapping[str, tuple[Any, Any]], made: Mapping[str, Router]
) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """While it lasts, these routers stand in the model. Gives their parameters, and a dict for who runs it: `ids` [T] and `batch` of now."""
    import torch

    now: dict[str, Any] = {}
    instead, every = dict[str, Any](), list[Any]()
    for name, router in made.items():
        start = router.start.items()
        params = {key: torch.tensor(value, dtype=torch.float32, device=model.device) for key, value in start}
        instead[name] = _instead(known[name][0], router, params, now)
        every += params.values()
    with replacing(instead, known):
        yield every, now


def _instead(
    module: Any, router: Router, params: Mapping[str, Any], now: Mapping[str, Any]
) -> Callable[[Seen, Any], Any]:
    """What a router returns, made of what it returned."""

    def replaced(seen: Seen, output: Any) -> Any:
        experts = seen.scores.shape[-1]
        scores = seen.scores.reshape(-1, experts).float()
        given = Given(scores, seen.features.reshape(len(scores), -1), now["ids"], now["batch"])
        return rule_of(module, experts, router.k, router.bias)(router.scores(params, given), output)

    return replaced


def losses_of(model: Any, rows: Sequence[np.ndarray], now: dict[str, Any], batch_size: int) -> np.ndarray:
    """Mean loss of the next tokens of each row [R], nats."""
    import torch

    found = []
    with torch.no_grad():
        for batch, begin in enumerate(range(0, len(rows), batch_size)):
            found.append(as_array(_loss(model, rows[begin : begin + batch_size], now, batch)))
    return np.concatenate(found)


def _loss(model: Any, rows: Sequence[np.ndarray], now: dict[str, Any], batch: int) -> Any:
    import torch

    ids = torch.as_tensor(np.stack(rows)).to(model.device)
    now |= {"ids": ids.reshape(-1), "batch": batch}
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


def repair(model, params, now, other, steps: int, rate: float, batch_size: int, seed: int) -> None:
    """Trains the routers' parameters on other text."""
    import torch

    groups = [{"params": [one], "lr": rate * float(one.std())} for one in params]
    adam = torch.optim.Adam(groups)
    falling = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 - step / steps)
    random = np.random.default_rng(seed)
    for one in params:
        one.requires_grad_(True)
    for step in range(steps):
        some = [other[i] for i in random.choice(len(other), min(batch_size, len(other)), replace=False)]
        adam.zero_grad()
        _loss(model, some, now, step).mean().backward()
        adam.step()
        falling.step()
