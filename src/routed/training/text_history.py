"""Columns of a language model's finished run: by language, by layer, churn, information."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from routed.metrics import agreement
from routed.models.language_model import Read
from routed.tasks.text import Form
from routed.training.text_feed import corpus, held_out

#: Draws of the null in `agreement.information`.
DRAWS = 4


def offline(form: Form, read: Read, config: ConfigDict, history: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Columns made of several evaluations at once or on the host: by language, by layer, churn, information.

    A layer's column ends in its stack and its place in it, `router/load_max/encoder_1`; without them it is the mean of all.
    """
    found: dict[str, np.ndarray] = {}
    for i, name in enumerate(corpus(form, config).languages):
        for metric in ("loss", "accuracy"):
            found[f"eval/{metric}/{name}"] = history[f"language/{metric}"][:, i]
    columns: dict[str, list[np.ndarray]] = {}
    for stack, layer, metric, values in _of_layers(form, read, config, history):
        found[f"router/{metric}/{stack}_{layer}"] = values
        columns.setdefault(metric, []).append(values)
    return found | {f"router/{metric}": np.mean(values, axis=0) for metric, values in columns.items()}


class Tokens(NamedTuple):
    """What is known of a stack's validation tokens [T]: row of text, token id (of the decoder: its input), language (an index)."""

    row: np.ndarray
    token: np.ndarray
    language: np.ndarray


def tokens_of(form: Form, read: Read, config: ConfigDict) -> dict[str, Tokens]:
    """The tokens that each stack routes at an evaluation, in their order."""
    rows, found = jax.tree.map(jnp.asarray, held_out(form, config)["validation"]), {}
    for stack, ids_of in read.items():
        ids = np.asarray(ids_of(rows))
        row = np.repeat(np.arange(len(ids)), ids.shape[1])
        found[stack] = Tokens(row, ids.reshape(-1), np.asarray(rows.language)[row])
    return found


def layer_of(config: ConfigDict, place: int) -> int:
    """The layer of a stack in which its sparse layer number `place` is."""
    return (place + 1) * (config.transformer.layers // max(config.transformer.sparse_layers, 1)) - 1


def traced(form: Form, read: Read, config: ConfigDict) -> dict[str, dict[str, Any]]:
    """What is known of the tokens of the arrays of choices: `ProblemPart.traced`."""
    names, found = np.asarray(corpus(form, config).languages), {}
    for stack, (row, token, language) in tokens_of(form, read, config).items():
        layers = [f"{stack}_{layer_of(config, place)}" for place in range(config.transformer.sparse_layers)]
        known = {"sequence": row, "token_ids": token, "labels": {"language": names[language]}, "layers": layers}
        found[f"{stack}/choices"] = known
    return found


def _of_layers(form: Form, read: Read, config: ConfigDict, history) -> Iterator[tuple[str, int, str, np.ndarray]]:
    for stack, (row, token, language) in tokens_of(form, read, config).items():
        if f"{stack}/choices" not in history:
            continue
        choices, stale = history[f"{stack}/choices"], history[f"{stack}/stale"]
        for s in range(choices.shape[1]):
            layer = layer_of(config, s)
            for name, values in history.items():
                if name.startswith(f"{stack}/") and values.ndim == 2:
                    yield stack, layer, name.removeprefix(f"{stack}/"), values[:, s]
            now = choices[:, s]
            pairs = list(zip(now[1:], now[:-1], stale[1:, s], strict=True))
            churn = {"churn": [agreement.churn(new, before) for new, before, _ in pairs]}
            if (stale[:, s] >= 0).any():  # none: outputs choose, not scores
                churn["churn_router"] = [agreement.churn(new, old) for new, _, old in pairs]
                churn["churn_features"] = [agreement.churn(old, before) for _, before, old in pairs]
            for name, values in churn.items():
                yield stack, layer, name, np.array([np.nan, *values])
            yield stack, layer, "churn_to_final", np.array([agreement.churn(one, now[-1]) for one in now])
            told = [agreement.information(one, language, row, token, DRAWS) for one in now]
            for name in told[0]:
                yield stack, layer, name, np.array([one[name] for one in told])
