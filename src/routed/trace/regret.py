"""Regret of a router's choices: the loss of a token with the chosen experts, minus that with the best ones.

One token in one layer gets other experts, with the weights of the chosen ones; its loss is that of its own next token.
All tokens before it, all other layers and the rules of their routers stay. So the tokens before it are read once, into
the model's cache, and each try computes one token: this is exact, as no token before it sees the change.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from routed.contracts import UserError
from routed.trace.checks import as_array
from routed.trace.hooks import RouterModule, listening
from routed.trace.hooks_replace import replacing
from routed.trace.replacements import DROPPED, Router, Site
from routed.trace.tokens import groups_of

#: Most choices that a token tries; of more, so many are drawn.
MOST = 256
#: Random choices of a token, where not all choices are tried, and hashes of its id.
RANDOM, HASHES = 8, 3
#: Tries in a pass, in batches.
COPIES = 16
#: Largest mean difference, in nats, between a token's loss with a cache and in a whole pass.
MOST_DEVIATION = 0.05
#: Factor on the scores of the sharpened router.
SHARPENED = 2.0


class RegretSettings(NamedTuple):
    """Number of tokens, rows of a batch, and seed."""

    tokens: int
    batch_size: int
    seed: int


class Tries(NamedTuple):
    """Ordered experts that tokens try instead of their own [B, A, k], by what they are for.

    `choices` are those among which the best is found: all of them if `complete`. `every` says that they are all ordered
    sets, and not exchanges of one expert.
    """

    choices: np.ndarray
    random: np.ndarray
    hashed: np.ndarray
    table: np.ndarray
    complete: bool
    every: bool


def regret_of(
    model: Any,
    modules: Mapping[str, RouterModule],
    layer: str,
    site: Site,
    rows: Sequence[np.ndarray],
    repaired: Mapping[str, np.ndarray],
    settings: RegretSettings,
) -> dict[str, np.ndarray]:
    """Returns losses [T] of sampled tokens, in nats, with other experts in a layer.

    `as_is`; `best` of all that were tried; `half`: the best of half of them, expected; `random`, `hash`, `table` and
    `sharpened` routers; `repaired`, the trained router with the parameters `repaired` (NaN without). `group` numbers
    groups of neighbouring rows, `refused` is the share of tries that the model's rule did not follow, `complete` and
    `every` are those of `Tries`, and `deviation` is the mean difference of losses with a cache and in a whole pass.

    Raises:
      UserError: the model has no cache, other losses with the cache, or no expert that a token does not have.
    """
    if site.k == site.experts:
        raise UserError(f"every token has all {site.experts} experts: there is no other choice")
    parts: list[dict[str, np.ndarray]] = []
    random = np.random.default_rng(settings.seed)
    for where, position in batches_of(len(rows), len(rows[0]) if rows else 0, settings):
        some = np.stack([rows[row] for row in where])
        part = _of_batch(_Token(model, modules, layer, site, some, position), repaired, random, settings.seed)
        parts.append(part | {"group": where * groups_of(len(rows)) // len(rows)})
        deviation = float(np.mean(np.concatenate([part["deviation"] for part in parts])))
        if not deviation < MOST_DEVIATION:  # also NaN
            difference = f"with its cache the model's losses differ by {deviation:.2g} nats from those of a whole pass"
            raise UserError(f"{layer}: {difference}, so a token cannot be computed alone, and there is no regret")
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def batches_of(rows: int, length: int, settings: RegretSettings) -> Iterator[tuple[np.ndarray, int]]:
    """Yields the numbers of neighbouring rows, and the position of the token in them, for so many tokens in all.

    No position comes twice before all have come.

    Raises:
      UserError: a row has no token with one before it and one after it.
    """
    if length < 3:
        raise UserError(f"rows have {length} tokens: regret needs 3, as a token needs one before it and one after it")
    random = np.random.default_rng([settings.seed, 1])
    size = min(settings.batch_size, rows, settings.tokens)
    count = max(1, settings.tokens // size)
    rounds = -(-count // (length - 2))
    positions = np.concatenate([random.permutation(np.arange(1, length - 1)) for _ in range(rounds)])[:count]
    for begin, position in zip(np.linspace(0, rows - size, count).round().astype(int), positions, strict=True):
        yield begin + np.arange(size), int(position)


class _Token:
    """A token of each row of a batch, whose choice in a layer is replaced, with the tokens before it in a cache."""

    def __init__(
        self, model: Any, modules: Mapping[str, RouterModule], layer: str, site: Site, rows: np.ndarray, position: int
    ) -> None:
        import torch

        self.model, self.layer, self.site = model, layer, site
        self.bias = None if site.trained is None else site.trained.bias
        self.modules = {layer: modules[layer]}
        ids = torch.as_tensor(rows).to(model.device)
        self.ids, self.targets = ids[:, position : position + 1], ids[:, position + 1]
        with torch.no_grad():
            whole = model(input_ids=ids[:, : position + 1], use_cache=False).logits[:, -1]
            self.whole = as_array(_nats(whole, self.targets))
            output = model(input_ids=ids[:, :position], use_cache=True)
        # The name that this release of transformers has for it.
        self.cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self.before = output.get(self.cache)
        if not hasattr(self.before, "batch_repeat_interleave"):
            raise UserError(
                f"{layer}: {type(model).__name__} keeps no cache of the tokens before, so there is no regret"
            )
        with listening(self.modules) as outputs:
            self.as_is = self._losses(1)[:, 0]
        output = outputs[layer]
        self.scores = as_array(output.scores).astype(np.float32)
        self.features = as_array(output.features).astype(np.float32)
        self.experts, self.weights = as_array(output.experts), as_array(output.weights).astype(np.float32)

    def with_experts(self, tries: np.ndarray) -> np.ndarray:
        """Returns the losses [B, A] with ordered experts [B, A, k]; NaN where the model's rule took others.

        Raises:
          UserError: the model's rule gives them other weights than those of the chosen experts.
        """
        has_bias, parts = self.bias is not None, list[np.ndarray]()
        for begin in range(0, tries.shape[1], COPIES):
            some = tries[:, begin : begin + COPIES]
            losses, taken, weights = self.with_scores(moved(self.scores, self.experts, some, alone=has_bias), None)
            same = (np.sort(taken, -1) == np.sort(some, -1)).all(-1)
            wanted = np.broadcast_to(np.sort(self.weights)[:, None], weights.shape)
            if not np.allclose(np.sort(weights)[same], wanted[same], rtol=0.05, atol=1e-3):
                reason = "a softmax over all experts, with a bias for the choice"
                raise UserError(f"{self.layer}: tried experts do not get the weights of the chosen ones ({reason})")
            parts.append(np.where(same, losses, np.nan))
        return np.concatenate(parts, axis=1)

    def with_scores(self, scores: np.ndarray, bias: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns losses [B, A] with given scores [B, A, E] and choosing bias, and experts and weights [B, A, k]."""
        import torch

        given = torch.as_tensor(scores.reshape(-1, scores.shape[-1])).to(self.model.device)
        router = Router(lambda params, batch: given, bias=bias)
        with (
            replacing(self.model, self.modules, {self.layer: router}) as (_, current),
            listening(self.modules) as heard,
        ):
            current |= {"ids": self.ids.repeat_interleave(scores.shape[1], 0).reshape(-1), "batch": 0}
            losses = self._losses(scores.shape[1])
        taken, shape = heard[self.layer], (*scores.shape[:2], -1)
        return losses, as_array(taken.experts).reshape(shape), as_array(taken.weights).astype(np.float32).reshape(shape)

    def _losses(self, copies: int) -> np.ndarray:
        """Returns the losses [B, copies] of the token, computed so many times after the tokens before it."""
        import torch

        with torch.no_grad():
            cache = copy.deepcopy(self.before)
            cache.batch_repeat_interleave(copies)
            ids = self.ids.repeat_interleave(copies, 0)
            logits = self.model(input_ids=ids, use_cache=True, **{self.cache: cache}).logits[:, -1]
            return as_array(_nats(logits, self.targets.repeat_interleave(copies, 0))).reshape(-1, copies)


def _nats(logits: Any, targets: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")


def _of_batch(
    token: _Token, repaired: Mapping[str, np.ndarray], random: np.random.Generator, seed: int
) -> dict[str, np.ndarray]:
    """Returns the losses of the tokens of a batch, as `regret_of` does."""
    tries = tries_of(token.experts, as_array(token.ids)[:, 0], token.site, random, seed)
    each = [tries.choices, tries.random, tries.hashed, tries.table]
    ends = np.cumsum([part.shape[1] for part in each])[:-1]
    losses, by_chance, hashed, table = np.split(token.with_experts(np.concatenate(each, axis=1)), ends, axis=1)
    as_is = token.as_is
    sharpened, *_ = token.with_scores(SHARPENED * token.scores[:, None], token.bias)
    after = np.full(len(as_is), np.nan)
    if "kernel" in repaired:
        scores = token.features @ repaired["kernel"] + repaired.get("offset", np.float32(0))
        after = token.with_scores(scores[:, None], token.bias)[0][:, 0]
    same = (tries.choices == np.asarray(token.experts)[:, None]).all(-1)  # computed again, it is rounded otherwise
    allowed = np.where(same, as_is[:, None], np.where(np.isnan(losses), np.inf, losses))
    return {
        "as_is": as_is,
        "best": np.minimum(allowed.min(1), as_is),
        "half": np.minimum(best_of_half(allowed, as_is), as_is),
        "random": _mean(by_chance if by_chance.size else losses),
        "hash": _mean(hashed),
        "table": _mean(table),
        "sharpened": sharpened[:, 0],
        "repaired": after,
        "refused": np.isnan(losses).mean(1),
        "tries": np.full(len(as_is), losses.shape[1]),
        "complete": np.full(len(as_is), tries.complete),
        "every": np.full(len(as_is), tries.every),
        "deviation": np.abs(token.whole - as_is),
    }


def _mean(losses: np.ndarray) -> np.ndarray:
    """Returns means over tries [B], without those that the model's rule refused; NaN if it refused all."""
    counted = ~np.isnan(losses)
    return np.where(counted.any(1), np.where(counted, losses, 0).sum(1) / np.maximum(counted.sum(1), 1), np.nan)


def tries_of(experts: np.ndarray, ids: np.ndarray, site: Site, random: np.random.Generator, seed: int) -> Tries:
    """Returns what tokens with chosen experts [B, k] and token ids [B] try.

    For k = 1, and for pairs up to `MOST`, all ordered sets of experts; otherwise exchanges of one chosen expert for one
    that is not chosen, at most `MOST` of them. A hash and a table name the experts by token id, without features.
    """
    (batch, k), count = experts.shape, site.experts
    every = k <= 2 and math.perm(count, k) <= MOST
    if every:
        sets = np.array([*itertools.permutations(range(count), k)]).reshape(-1, k)
        choices, complete = np.broadcast_to(sets, (batch, *sets.shape)), True
    else:
        complete = k * (count - k) <= MOST
        choices = np.stack([_exchanges(row, count, random) for row in experts])
    draws = 0 if every else RANDOM
    by_chance = random.permuted(np.broadcast_to(np.arange(count), (batch, draws, count)), axis=-1)[..., :k]
    hashed = [
        [np.random.default_rng([seed, draw, token]).permutation(count)[:k] for draw in range(HASHES)] for token in ids
    ]
    loads = site.counts[-1] / max(site.counts[-1].sum(), 1)
    counts = site.counts[site.row_of[ids]] + loads
    table = np.argsort(-counts, axis=1, kind="stable")[:, None, :k]
    return Tries(choices, by_chance, np.array(hashed), table, complete, every)


def _exchanges(chosen: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
    """Returns ordered experts [A, k] that differ from the chosen ones [k] in one expert: all, or `MOST` drawn."""
    rest = np.setdiff1d(np.arange(count), chosen)
    pairs = np.array([*itertools.product(range(len(chosen)), rest)])
    if len(pairs) > MOST:
        pairs = pairs[np.sort(random.permutation(len(pairs))[:MOST])]
    sets = np.repeat(chosen[None], len(pairs), 0)
    sets[np.arange(len(pairs)), pairs[:, 0]] = pairs[:, 1]
    return sets


def moved(scores: np.ndarray, chosen: np.ndarray, tries: np.ndarray, alone: bool) -> np.ndarray:
    """Returns scores [B, A, E] that name the experts `tries` [B, A, k] instead of `chosen` [B, k].

    The i-th tried expert gets the score of the i-th chosen one. The other experts share the other scores, so that a
    softmax has the same denominator; or, if `alone`, they get a score that no rule chooses.
    """
    count, every = scores.shape[-1], np.arange(scores.shape[-1])
    moved_scores = np.full((*tries.shape[:2], count), np.float32(DROPPED))
    for row, (ranked, values) in enumerate(zip(chosen, scores, strict=True)):
        rest = values[np.setdiff1d(every, ranked)]
        for number, tried in enumerate(tries[row]):
            moved_scores[row, number, tried] = values[ranked]
            if not alone:
                moved_scores[row, number, np.setdiff1d(every, tried)] = rest
    return moved_scores


def best_of_half(losses: np.ndarray, as_is: np.ndarray) -> np.ndarray:
    """Returns the expected least loss [B] of a random half of the tries [B, A] and the choice as it is.

    The i-th smallest of n is the least of h drawn ones with probability C(n - i - 1, h - 1) / C(n, h).
    """
    count = losses.shape[1]
    half = max(1, count // 2)
    chances = [math.comb(count - i - 1, half - 1) / math.comb(count, half) for i in range(count - half + 1)]
    ordered = np.minimum(np.sort(losses, axis=1)[:, : len(chances)], as_is[:, None])
    return ordered @ np.array(chances)
