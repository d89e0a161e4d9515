"""One run of a language model: the same two functions as `routed.run`, on rows of text that the host feeds.

Validation is paired: every arm and seed sees the same rows, with the same spans cut out.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from routed import losses, metrics, models
from routed.data import text
from routed.feed import corpus
from routed.routers import FIXED
from routed.run import Program, new_history, recorded, streams
from routed.selection import group_of, rule_of, select
from routed.train import optimiser, update
from routed.words import Routing, SoftRouting, TextBatch

#: Draws of the null in `metrics.information`.
DRAWS = 4


def program(config: ConfigDict, mesh: Mesh | None = None) -> Program:
    """The run that `config` describes; with a mesh of axes `data` and `expert`, its devices share the run."""
    model = models.build(config, mesh)
    evaluations = config.steps // config.eval_every + 1
    training, evaluation = rule_of(config.selection), rule_of(config.selection, evaluation=True)
    coefficients = {name: config.losses[name] for name in ("balance", "importance", "z", "entropy")}
    learns = config.router.name not in FIXED and any(coefficients.values())

    def train_loss(params, layer, batch: TextBatch, key, frozen):
        logits, seen, layer = model.apply(params, layer, batch, training, config.dispatch, key)
        partition = jax.nn.logsumexp(logits, axis=-1)
        nats = (partition - _at(logits, batch.targets)).mean()
        total = nats
        if config.losses.logits_z:
            total += config.losses.logits_z * (partition**2).mean()
        if seen is not None and learns:
            total += _auxiliary(seen, coefficients, ~frozen, config)
        return total, (nats, layer)

    def start(seed, settings, given):
        keys = streams(seed, config)
        rows = jax.tree.map(lambda a: a[:1], given["validation"])
        params, layer = model.init(keys["init"], rows)
        if "table" in given:
            params = params | {
                "router": jax.tree.map(lambda a: jnp.broadcast_to(given["table"], a.shape), params["router"])
            }
        state = {
            "params": params,
            "layer": layer,
            "opt": optimiser(config, settings).init(params),
            "router0": params["router"],
            "before": (params["router"], layer),  # at the last evaluation
            "step": jnp.int32(0),
        }
        seen = jax.eval_shape(lambda: evaluate(state, settings, given))
        return (), state | new_history(seen, evaluations)

    def chunk(active, steps, evaluated, seed, settings, world, state, feed, given):
        keys = streams(seed, config)
        transform = optimiser(config, settings)
        frozen = settings["router.frozen"]

        def step(_, carry):
            params, layer, opt, number, total = carry
            batch = jax.tree.map(lambda a: a[number % len(a)], feed)
            noise = jax.random.fold_in(keys["noise"], number)
            grads, (value, layer) = jax.grad(train_loss, has_aux=True)(params, layer, batch, noise, frozen)
            params, opt = update(transform, params, grads, opt, frozen)
            return params, layer, opt, number + 1, total + value

        def advance(state):
            carry = tuple(state[name] for name in ("params", "layer", "opt", "step", "total"))
            params, layer, opt, number, total = jax.lax.fori_loop(0, steps, step, carry)
            new = state | {"params": params, "layer": layer, "opt": opt, "step": number, "total": total}
            return jax.lax.cond(evaluated, record, lambda new: new, new)

        def record(new):
            made = recorded(new, evaluate(new, settings, given), config.eval_every)
            return made | {"before": (new["params"]["router"], new["layer"])}

        return jax.lax.cond(active, advance, lambda state: state, state)

    def choose(params, layer, stack: str, features, block: TextBatch):
        """The experts [S, T, k] that a stack's routers, and their balancing bias, choose on given features."""
        assert model.scores is not None  # a dense twin has no stacks to choose for
        scores = model.scores(params, stack, features, block)
        biases = jax.tree.leaves(layer.get("balance", {}).get(stack, {}))
        bias = biases[0] if biases else jnp.zeros((len(scores), config.experts.count))
        rule = evaluation._replace(capacity_factor=0.0, group_size=0)

        def chosen(scores, bias):
            routing = select(rule, scores, bias=bias)
            soft = isinstance(routing, SoftRouting)
            return scores.argmax(-1)[:, None] if soft else routing.expert.reshape(len(scores), -1)

        return jax.vmap(chosen)(scores, bias)

    def evaluate(state, settings, given) -> dict[str, jax.Array]:
        """All metrics of one moment; validation rows pass in blocks of at most a batch."""
        params, layer, rows = state["params"], state["layer"], given["validation"]
        languages = len(corpus(config).languages)
        count, old = config.experts.count, state["before"]

        def forward(block: TextBatch):
            logits, seen, _ = model.apply(params, layer, block, evaluation, config.dispatch)
            nats = jax.nn.logsumexp(logits, axis=-1) - _at(logits, block.targets)
            right = (logits.argmax(-1) == block.targets).astype(jnp.float32)
            sums = metrics.cluster_sums(jnp.stack([nats.mean(1), right.mean(1)], 1), block.language, languages)
            return sums, {name: of_stack(name, one, block) for name, one in (seen or {}).items()}

        def of_stack(name, one, block: TextBatch):
            tokens = one.features.shape[1]
            language = jnp.repeat(block.language, tokens // len(block.language))
            probs = jax.nn.softmax(one.routing.scores)
            stale = choose(params | {"router": old[0]}, old[1], name, one.features, block)
            choices = choose(params, layer, name, one.features, block)
            return {
                "probs": jax.vmap(lambda p: metrics.cluster_sums(p, language, languages))(probs),
                "token": metrics.entropy(probs).sum(1),
                "dropped": jax.vmap(metrics.dropped)(one.routing) * tokens,
                "choices": choices.astype(jnp.int16),
                "stale": stale.astype(jnp.int16),
            }

        size = max(b for b in range(1, config.batch_size + 1) if len(rows.inputs) % b == 0)
        blocks = jax.tree.map(lambda a: a.reshape(-1, size, *a.shape[1:]), rows)
        sums, stacks = jax.lax.map(forward, blocks)
        by_language = sums.sum(0) / jnp.maximum(jnp.bincount(rows.language, length=languages), 1)[:, None]
        nats, right = sums.sum((0, 1)) / len(rows.inputs)
        seen = {
            "eval/loss": nats,
            "eval/accuracy": right,
            "eval/bigram": given["bigram"],
            "language/loss": by_language[:, 0],
            "language/accuracy": by_language[:, 1],
            "train/rate_scale": settings["optimizer.rate_scale"],
            "router/moved": _moved(params["router"], state["router0"]),
        }
        for name, one in stacks.items():
            tokens = one["choices"].shape[0] * one["choices"].shape[2]
            choices = jnp.moveaxis(one["choices"], 0, 1).reshape(one["choices"].shape[1], tokens, -1)
            found = jax.vmap(lambda probs, token, tokens=tokens: metrics.split(probs, token / tokens))(
                one["probs"].sum(0), one["token"].sum(0)
            )
            load = jax.vmap(lambda c: metrics.load(c, count))(choices)
            found |= jax.vmap(lambda share, tokens=tokens: metrics.load_summary(share, tokens))(load)
            found["dropped"] = one["dropped"].sum(0) / tokens
            seen |= {f"{name}/{metric}": values for metric, values in found.items()}
            seen[f"{name}/choices"] = choices
            seen[f"{name}/stale"] = jnp.moveaxis(one["stale"], 0, 1).reshape(choices.shape)
        return seen

    return Program(start, chunk)


def _auxiliary(seen, coefficients, learned, config: ConfigDict):
    """Auxiliary losses, mean over all sparse layers of both stacks."""

    def of_layer(routing: Routing):
        tokens = len(routing.scores)
        size = group_of(config.selection.group_size, tokens)
        groups = tokens // size if config.losses.balance_scope == "group" else 1
        return losses.auxiliary(routing, coefficients, learned=learned, groups=groups)[0]

    values = [jax.vmap(of_layer)(one.routing) for one in seen.values()]
    return jnp.concatenate(values).mean()


def _at(logits, targets):
    return jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]


def _moved(router, router0):
    moved = [(a != b).any() for a, b in zip(jax.tree.leaves(router), jax.tree.leaves(router0), strict=True)]
    return jnp.float32(jnp.stack(moved).any() if moved else False)


def offline(config: ConfigDict, history: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Columns made of several evaluations at once or on the host: by language, by layer, churn, information.

    A layer's column ends in its stack and its place in it, `router/load_max/encoder_1`; without them it is the mean of all.
    """
    found: dict[str, np.ndarray] = {}
    for i, name in enumerate(corpus(config).languages):
        for metric in ("loss", "accuracy"):
            found[f"eval/{metric}/{name}"] = history[f"language/{metric}"][:, i]
    columns: dict[str, list[np.ndarray]] = {}
    for stack, layer, metric, values in _of_layers(config, history):
        found[f"router/{metric}/{stack}_{layer}"] = values
        columns.setdefault(metric, []).append(values)
    return found | {f"router/{metric}": np.mean(values, axis=0) for metric, values in columns.items()}


def _of_layers(config: ConfigDict, history) -> Iterator[tuple[str, int, str, np.ndarray]]:
    rows = text.validation(corpus(config), config)
    shifted = np.pad(rows.targets, ((0, 0), (1, 0)))[:, :-1]
    every = config.transformer.layers // max(config.transformer.sparse_layers, 1)
    for stack, ids in (("encoder", rows.inputs), ("decoder", shifted)):
        if f"{stack}/choices" not in history:
            continue
        language, token = np.repeat(rows.language, ids.shape[1]), np.asarray(ids).reshape(-1)
        choices, stale = history[f"{stack}/choices"], history[f"{stack}/stale"]
        for s in range(choices.shape[1]):
            layer = (s + 1) * every - 1
            for name, values in history.items():
                if name.startswith(f"{stack}/") and values.ndim == 2:
                    yield stack, layer, name.removeprefix(f"{stack}/"), values[:, s]
            now = choices[:, s]
            pairs = list(zip(now[1:], now[:-1], stale[1:, s], strict=True))
            churn = {
                "churn": [metrics.churn(new, before) for new, before, _ in pairs],
                "churn_router": [metrics.churn(new, old) for new, _, old in pairs],
                "churn_features": [metrics.churn(old, before) for _, before, old in pairs],
            }
            for name, values in churn.items():
                yield stack, layer, name, np.array([np.nan, *values])
            yield stack, layer, "churn_to_final", np.array([metrics.churn(one, now[-1]) for one in now])
            told = [metrics.information(one, language, token, DRAWS) for one in now]
            for name in told[0]:
                yield stack, layer, name, np.array([one[name] for one in told])
