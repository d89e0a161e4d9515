"""Other routers on the features of a trace: trained, trained with shuffled features, and random."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from routed.trace import counts, features, numbers
from routed.trace.arrays import top
from routed.trace.format import Trace
from routed.trace.tokens import Tokens, dense, make_tokens

#: Draws of shuffled features and of random routers, whose means are taken.
DRAWS = 4
#: Numbers of a choice of experts that do not depend on the scale of scores.
COMPARED = ("load_max", "experts_used", "dropped_1.25", "table", "mi", "pairs")


def controls(trace: Trace, tokens: Tokens, seed: int = 0) -> pd.DataFrame:
    """Returns a row for each layer and number: `trained`, `shuffled` and `initial`, on tokens with features.

    Every router takes the k experts with the highest scores. Shuffled: the trained weights on features that are
    permuted, by one permutation for all experts (Dikkala et al. 2023, Section 2.1). Initial: weights N(0, 1), without
    offset; choices do not depend on their scale. Both are means of draws.
    """
    rows: list[dict[str, Any]] = []
    random = np.random.default_rng(seed)
    for layer, name in enumerate(trace.layers):
        where, values, kernel, offset = features.load(trace.folder, layer)
        scores = {"trained": [values @ kernel + offset], "shuffled": [], "initial": []}
        for _ in range(DRAWS):
            scores["shuffled"].append(values[:, random.permutation(values.shape[1])] @ kernel + offset)
            scores["initial"].append(values @ random.standard_normal(kernel.shape, np.float32))
        some = subset(tokens, where)
        by_router = {router: [_numbers(draw, trace.k, some) for draw in draws] for router, draws in scores.items()}
        for number, trained in by_router["trained"][0].items():
            means = {router: np.mean([draw[number].value for draw in draws]) for router, draws in by_router.items()}
            rows.append({"layer": name, "number": number} | means | {"chance": trained.chance})
    return pd.DataFrame(rows)


def _numbers(scores: np.ndarray, k: int, tokens: Tokens) -> dict[str, numbers.Number]:
    chosen, _ = top(scores, k)
    stream = counts.Stream(scores.shape[1], k, ("expert",), lambda *columns: iter([tuple(chosen for _ in columns)]))
    every = numbers.numbers(counts.count(stream, tokens, None), k, None)
    return {name: number for name, number in every.items() if name.partition(".")[0] in COMPARED or name in COMPARED}


def subset(tokens: Tokens, where: np.ndarray, seed: int = 0) -> Tokens:
    """Returns the tokens `where` alone, whose ids and sequences are numbered again."""
    codes, sizes = {name: code[where] for name, code in tokens.codes.items()}, dict(tokens.counts)
    if "token" in codes:
        ids, codes["token"] = dense(codes["token"])
        sizes["token"] = len(ids)
    return make_tokens(codes, sizes, tokens.names, dense(tokens.sequence[where])[1], seed)
