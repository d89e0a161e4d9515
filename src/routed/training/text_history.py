"""Columns of a language model's finished run: by language, by layer, churn, information."""

from __future__ import annotations

from collections.abc import Iterator

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


def _of_layers(form: Form, read: Read, config: ConfigDict, history) -> Iterator[tuple[str, int, str, np.ndarray]]:
    rows = jax.tree.map(jnp.asarray, held_out(form, config)["validation"])
    every = config.transformer.layers // max(config.transformer.sparse_layers, 1)
    for stack, ids_of in read.items():
        if f"{stack}/choices" not in history:
            continue
        ids = np.asarray(ids_of(rows))
        row, token = np.repeat(np.arange(len(ids)), ids.shape[1]), ids.reshape(-1)
        language = np.asarray(rows.language)[row]
        choices, stale = history[f"{stack}/choices"], history[f"{stack}/stale"]
        for s in range(choices.shape[1]):
            layer = (s + 1) * every - 1
            for name, values in history.items():
                if name.startswith(f"{stack}/") and values.ndim == 2:
                    yield stack, layer, name.removeprefix(f"{stack}/"), values[:, s]
            now = choices[:, s]
            pairs = list(zip(now[1:], now[:-1], stale[1:, s], strict=True))
            churn = {
                "churn": [agreement.churn(new, before) for new, before, _ in pairs],
                "churn_router": [agreement.churn(new, old) for new, _, old in pairs],
                "churn_features": [agreement.churn(old, before) for _, before, old in pairs],
            }
            for name, values in churn.items():
                yield stack, layer, name, np.array([np.nan, *values])
            yield stack, layer, "churn_to_final", np.array([agreement.churn(one, now[-1]) for one in now])
            told = [agreement.information(one, language, row, token, DRAWS) for one in now]
            for name in told[0]:
                yield stack, layer, name, np.array([one[name] for one in told])
