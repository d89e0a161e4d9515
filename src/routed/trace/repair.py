"""Loss of a Hugging Face model on rows of text, and the repair of its routers: training of their parameters alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from routed.trace.arrays import as_array


class Repair(NamedTuple):
    """Settings of a repair: Adam, with steps of `rate` standard deviations of a parameter, falling linearly to 0."""

    steps: int
    rate: float
    batch_size: int
    seed: int


def losses_of(model: Any, rows: Sequence[np.ndarray], current: dict[str, Any], batch_size: int) -> np.ndarray:
    """Returns the mean loss of the next tokens of each row [R], in nats."""
    import torch

    losses = []
    with torch.no_grad():
        for batch, begin in enumerate(range(0, len(rows), batch_size)):
            losses.append(as_array(_loss(model, rows[begin : begin + batch_size], current, batch)))
    return np.concatenate(losses)


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
