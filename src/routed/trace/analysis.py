"""All numbers of a trace as tables: of layers, a hash of the token id, pairs of layers, checkpoints, other routers."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from absl import logging as log

from routed.routers.fixed import balanced_table
from routed.trace import counts, evidence, features, information, numbers, similarity
from routed.trace.arrays import top
from routed.trace.format import Trace, stripes
from routed.trace.tokens import Conditional, Tokens, dense, labels_within_ids, make_tokens, tokens_of

#: Draws of shuffled features and of random routers, whose means are taken.
DRAWS = 4
#: Layers that are counted together: each takes some hundred MB.
WORKERS = 2
#: Numbers of a choice of experts that do not depend on the scale of scores.
COMPARED = ("load_max", "experts_used", "dropped_1.25", "table", "mi", "pairs")


class Analysis(NamedTuple):
    """The content of the page.

    `table` has a row for each layer and number: value, low, high, chance, told (`evidence.told`), and hash, the value
    of a balanced table of token ids. `maps` is name -> assignments [L, C, E] by label and expert, `loads` is [L, E],
    `pairs` [L, E, E] or None. `left` is the entropy of each label that the token id leaves. `controls` has other
    routers on the features that the trace has, `routers` the result of `similarity.routers`. `traces` are all
    checkpoints, `trace` is the last.
    """

    traces: tuple[Trace, ...]
    trace: Trace
    tokens: Tokens
    table: pd.DataFrame
    maps: dict[str, np.ndarray]
    loads: np.ndarray
    pairs: np.ndarray | None
    between: similarity.Between | None
    churn: pd.DataFrame
    controls: pd.DataFrame
    routers: tuple[np.ndarray, np.ndarray] | None
    left: dict[str, float]


def analyse(traces: Sequence[Trace], seed: int = 0) -> Analysis:
    """Returns the numbers of the last trace, and churn between all of them: checkpoints of one model, in order."""
    trace = traces[-1]
    tokens = tokens_of(trace, seed)
    weights = numbers.bootstrap_weights(tokens.groups, seed) if trace.has_sequences else None
    conditional = labels_within_ids(tokens, list(trace.labels), seed)
    rows: list[dict[str, Any]] = []
    maps: dict[str, list[np.ndarray]] = {name: [] for name in trace.labels}
    loads, pairs, limits, mean_k = [], [], dict[tuple[str, str], float](), dict[str, int]()
    for name, counted in zip(trace.layers, _counted(trace, tokens, conditional), strict=True):
        rows += numbers.as_rows(numbers.numbers(counted, weights), name)
        loads.append(counted.load.sum(0))
        mean_k[name] = counts.mean_k(counted.load, trace.tokens)
        if counted.pairs is not None:
            pairs.append(counted.pairs.sum(0))
        for label in trace.labels:
            maps[label].append(counted.tables[label].sum(0))
            limits[name, f"mi.{label}"] = evidence.limit_of_permutations(counted.load, tokens, label, seed)
    between = similarity.compare_layers(trace, tokens, weights)
    if between is not None:
        for name, following, alike in zip(trace.layers, between.following, between.alike, strict=False):
            rows += numbers.as_rows({"next": following, "alike": alike}, name)
    table = pd.DataFrame(row for row in rows if row["number"] != "pairs" or np.any(pairs))
    hashed = {k: _hash_numbers(tokens, trace, k, conditional, weights) for k in {*mean_k.values()}}
    by_layer = zip(table.layer, table.number, strict=True)
    table["hash"] = [hashed[mean_k[layer]].get(name, numbers.NONE).value for layer, name in by_layer]
    table["told"] = evidence.told(table, tokens.groups, limits)
    return Analysis(
        traces=tuple(traces),
        trace=trace,
        tokens=tokens,
        table=table,
        maps={name: np.stack(by_layer) for name, by_layer in maps.items()},
        loads=np.stack(loads),
        pairs=np.stack(pairs) if pairs else None,
        between=between,
        churn=pd.DataFrame(similarity.churn(traces, tokens, weights)),
        controls=controls(trace, tokens, [*mean_k.values()], seed) if trace.has_features else pd.DataFrame(),
        routers=similarity.routers(trace, seed) if trace.has_features and len(trace.layers) > 1 else None,
        left={label: evidence.left_by_ids(tokens, conditional, label) for label in trace.labels},
    )


def _counted(trace: Trace, tokens: Tokens, conditional: Conditional | None) -> Iterator[counts.Counts]:
    """Yields the counts of each layer, `WORKERS` layers at a time, since most of the work is NumPy's and Arrow's."""

    def count(layer: int) -> counts.Counts:
        log.info("layer %s, %d of %d", trace.layers[layer], layer + 1, len(trace.layers))
        stream = counts.Stream(trace.experts, trace.k, trace.columns, functools.partial(stripes, trace, layer))
        return counts.count(stream, tokens, conditional)

    with futures.ThreadPoolExecutor(WORKERS) as pool:
        waiting = collections.deque[futures.Future[counts.Counts]]()
        for layer in range(len(trace.layers)):
            waiting.append(pool.submit(count, layer))
            if len(waiting) > WORKERS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _hash_numbers(tokens: Tokens, trace: Trace, k: int, conditional, weights) -> dict[str, numbers.Number]:
    """Returns the numbers of an untrained table: k experts for an id, balanced by occurrences (Roller et al. 2021)."""
    if "token" not in tokens.codes:
        return {}
    occurrences = np.bincount(tokens.codes["token"], minlength=tokens.counts["token"])
    table, second_table = (balanced_table(occurrences, trace.experts, k, seed).astype(np.int16) for seed in (0, 1))
    counted = counts.count(counts.table_stream(tokens, table, trace.experts), tokens, conditional)
    joint = np.zeros((trace.experts, trace.experts))
    np.add.at(joint, (table[:, 0], second_table[:, 0]), occurrences)
    two_hashes = {"next": information.mutual(joint), "alike": similarity.matched(joint)[0]}
    return numbers.numbers(counted, weights) | {
        name: numbers.NONE._replace(value=value) for name, value in two_hashes.items()
    }


def controls(trace: Trace, tokens: Tokens, ks: Sequence[int], seed: int = 0) -> pd.DataFrame:
    """Returns a row for each layer and number: `trained`, `shuffled` and `initial`, on tokens with features.

    Every router takes the experts with the highest scores, `ks` of them by layer. Shuffled: the trained weights on
    features that are permuted, by one permutation for all experts (Dikkala et al. 2023, Section 2.1). Initial: weights
    N(0, 1), without offset; choices do not depend on their scale. Both are means of draws.
    """
    rows, random = list[dict[str, Any]](), np.random.default_rng(seed)
    for layer, name in enumerate(trace.layers):
        where, values, kernel, offset = features.load(trace.folder, layer)
        scores = {"trained": [values @ kernel + offset], "shuffled": [], "initial": []}
        for _ in range(DRAWS):
            scores["shuffled"].append(values[:, random.permutation(values.shape[1])] @ kernel + offset)
            scores["initial"].append(values @ random.standard_normal(kernel.shape, np.float32))
        some = subset(tokens, where)
        by_router = {router: [_numbers(draw, ks[layer], some) for draw in draws] for router, draws in scores.items()}
        for number, trained in by_router["trained"][0].items():
            means = {router: np.mean([draw[number].value for draw in draws]) for router, draws in by_router.items()}
            rows.append({"layer": name, "number": number} | means | {"chance": trained.chance})
    return pd.DataFrame(rows)


def _numbers(scores: np.ndarray, k: int, tokens: Tokens) -> dict[str, numbers.Number]:
    chosen = top(scores, k)
    stream = counts.Stream(scores.shape[1], k, ("expert",), lambda *columns: iter([tuple(chosen for _ in columns)]))
    every = numbers.numbers(counts.count(stream, tokens, None), None)
    return {name: number for name, number in every.items() if name.partition(".")[0] in COMPARED or name in COMPARED}


def subset(tokens: Tokens, where: np.ndarray) -> Tokens:
    """Returns the tokens `where` alone, whose ids and sequences are numbered again."""
    codes, sizes = {name: code[where] for name, code in tokens.codes.items()}, dict(tokens.counts)
    if "token" in codes:
        ids, codes["token"] = dense(codes["token"])
        sizes["token"] = len(ids)
    return make_tokens(codes, sizes, tokens.names, dense(tokens.sequence[where])[1])
