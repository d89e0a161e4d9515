"""Other routers on the features of a trace: the trained one, the same with shuffled features, and one drawn anew."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from routed.trace import counts, features, numbers, tokens
from routed.trace.arrays import top
from routed.trace.format import Trace
from routed.trace.tokens import Tokens

#: Routers that are drawn, of which the mean is taken.
DRAWS = 4
#: Numbers that a choice of experts has, whatever the scale of its scores.
COMPARED = ("load_max", "experts_used", "dropped_1.25", "table", "mi", "pairs")


def controls(trace: Trace, known: Tokens, seed: int = 0) -> pd.DataFrame:
    """A row a layer and number: `trained`, `shuffled` and `initial`, all on the tokens whose features the trace has.

    Every router takes the k experts with the highest scores. Shuffled: the trained weights on features that are permuted, by one
    permutation for all experts (Dikkala et al. 2023, Section 2.1). Initial: weights N(0, 1), without offset; choices do not depend on
    their scale. Both are means of draws.
    """
    rows: list[dict[str, Any]] = []
    random = np.random.default_rng(seed)
    for layer, name in enumerate(trace.layers):
        where, values, kernel, offset = features.load(trace.folder, layer)
        some = subset(known, where)
        routers = {"trained": [values @ kernel + offset], "shuffled": [], "initial": []}
        for _ in range(DRAWS):
            routers["shuffled"].append(values[:, random.permutation(values.shape[1])] @ kernel + offset)
            routers["initial"].append(values @ random.standard_normal(kernel.shape, np.float32))
        found = {of: [_numbers(scores, trace.k, some) for scores in drawn] for of, drawn in routers.items()}
        for number in found["trained"][0]:
            means = {of: float(np.mean([one[number].value for one in drawn])) for of, drawn in found.items()}
            rows.append({"layer": name, "number": number} | means | {"chance": found["trained"][0][number].chance})
    return pd.DataFrame(rows)


def _numbers(scores: np.ndarray, k: int, some: Tokens) -> dict[str, numbers.Number]:
    chosen, _ = top(scores, k)
    stream = counts.Stream(scores.shape[1], k, ("expert",), lambda *columns: iter([tuple(chosen for _ in columns)]))
    found = numbers.numbers(counts.count(stream, some, None), k, None)
    return {name: number for name, number in found.items() if name.partition(".")[0] in COMPARED or name in COMPARED}


def subset(known: Tokens, where: np.ndarray, seed: int = 0) -> Tokens:
    """What is known of the tokens `where` alone."""
    codes = {name: values[where] for name, values in known.codes.items()}
    found = dict(known.counts)
    if "token" in codes:
        ids, codes["token"] = tokens.dense(codes["token"])
        found["token"] = len(ids)
    rows = tokens.dense(known.rows[where])[1]
    return tokens.make(codes, found, known.names, rows, None, seed)
