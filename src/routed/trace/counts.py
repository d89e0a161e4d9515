"""What a layer's file says, counted stripe by stripe: sums by group of sequences, from which every number of the page is made.

Two passes: tables of (code, expert) first; then what each assignment adds to the information of its code, and whether a table that
was filled from the other half of the sequences names its expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from routed.metrics import information
from routed.trace.format import Trace, stripes
from routed.trace.tokens import Given, Tokens

#: Tokens that are looked at together where each has a score of every expert.
SCORED = 1 << 16
#: Tokens that would queue together, for the drops that a capacity would cause.
QUEUE = 4096
#: Cells of a table of which one shuffle is counted, and not several.
LARGE = 1 << 23
#: Capacity factors whose drops are counted: a queue holds ceil(factor k T / E) assignments.
FACTORS = (1.0, 1.25, 2.0)

Arrays = tuple[np.ndarray, ...]


class Stream(NamedTuple):
    """Where choices come from: a layer's file, or a router that is compared with it. `read(columns)` gives arrays of stripes."""

    experts: int
    k: int
    held: Sequence[str]
    read: Callable[..., Iterator[Arrays]]


def of_layer(trace: Trace, layer: int) -> Stream:
    """The stream of a layer's file."""
    return Stream(trace.experts, trace.k, trace.held, lambda *columns: stripes(trace, layer, *columns))


def of_table(tokens: Tokens, table: np.ndarray, experts: int, size: int = 1 << 19) -> Stream:
    """The stream of a router that looks the experts of a token id up in `table` [V, k]."""
    ids = tokens.codes["token"]

    def read(*columns: str) -> Iterator[Arrays]:
        for begin in range(0, len(ids), size):
            yield tuple(table[ids[begin : begin + size]] for _ in columns)

    return Stream(experts, table.shape[1], ("expert",), read)


class Counts(NamedTuple):
    """Of one stream. G groups of sequences, C codes.

    `load` [G, E] and `pairs` [G, E, E] (of different choices of a token) count assignments; `tables` name -> [2, C, E] by half;
    `nulls` name -> information that shuffled codes seem to have. `sums` name -> [G], to be divided by `sums["tokens"]`, or by
    what `OVER` says. `given` name -> (I(expert; label | id), its shuffles, [G] of its influence, [G] assignments).
    """

    load: np.ndarray
    pairs: np.ndarray | None
    tables: dict[str, np.ndarray]
    nulls: dict[str, float]
    sums: dict[str, np.ndarray]
    given: dict[str, tuple[float, float, np.ndarray, np.ndarray]]


def count(stream: Stream, tokens: Tokens, given: Given | None) -> Counts:
    """Both passes over a stream."""
    experts, groups = stream.experts, tokens.groups
    load = np.zeros((groups, experts), np.int64)
    pairs = np.zeros((groups, experts, experts), np.int32) if stream.k > 1 else None
    sums: dict[str, np.ndarray] = {"tokens": np.bincount(tokens.group, minlength=groups)}
    tables = {name: np.zeros((2 * size, experts), np.int32) for name, size in tokens.counts.items()}
    mixed = {
        name: [np.zeros((size, experts), np.int32) for _ in tokens.orders[: 1 if size * experts > LARGE else None]]
        for name, size in tokens.counts.items()
    }
    chosen_given, begin = [], 0
    columns = ["expert", *(name for name in ("kept", "weight") if name in stream.held)]
    for found in stream.read(*columns):
        expert, rest = found[0], dict(zip(columns[1:], found[1:], strict=True))
        here = slice(begin, begin := begin + len(expert))
        group = tokens.group[here]
        load += information.joint(group, expert, groups, experts)
        for name, size in tokens.counts.items():
            code = tokens.codes[name][here]
            halved = tokens.half[here].astype(np.int64) * size + code
            accumulate(tables[name], information.joint(halved, expert, 2 * size, experts))
            for draw, table in enumerate(mixed[name]):
                accumulate(table, information.joint(tokens.shuffled(name, draw, here), expert, size, experts))
        if pairs is not None:
            _count_pairs(pairs, group, expert)
        _count_drops(sums, group, expert, stream, groups)
        _count_columns(sums, group, expert, rest, groups)
        if given is not None:
            first, last = np.searchsorted(given.where, (here.start, here.stop))
            chosen_given.append(expert[given.where[first:last] - here.start])
    if "scores" in stream.held:
        _count_scores(sums, stream, tokens)
    nulls = {name: float(np.mean([information.mutual(table) for table in of])) for name, of in mixed.items()}
    del mixed
    halves = {name: table.reshape(2, -1, experts) for name, table in tables.items()}
    _look_again(sums, stream, tokens, halves)
    within = {}
    if given is not None and chosen_given:
        within = _beyond(np.concatenate(chosen_given), given, tokens, experts)
    return Counts(load, pairs, halves, nulls, sums, within)


def accumulate(table: np.ndarray, more: np.ndarray) -> None:
    """Adds counts to those of 32 bits, which 10^9 tokens do not fill."""
    np.add(table, more, out=table, casting="unsafe")


def _add(sums: dict[str, np.ndarray], name: str, group: np.ndarray, values: np.ndarray, groups: int) -> None:
    sums[name] = sums.get(name, 0) + np.bincount(group, weights=values, minlength=groups)


def _count_pairs(pairs: np.ndarray, group: np.ndarray, expert: np.ndarray) -> None:
    experts = pairs.shape[1]
    for i in range(expert.shape[1]):
        for j in range(i + 1, expert.shape[1]):
            both = (expert[:, i] >= 0) & (expert[:, j] >= 0)
            where = slice(None) if both.all() else both
            key = (group[where].astype(np.int64) * experts + expert[where, i]) * experts + expert[where, j]
            accumulate(pairs, np.bincount(key, minlength=pairs.size).reshape(pairs.shape))


def _count_drops(sums, group: np.ndarray, expert: np.ndarray, stream: Stream, groups: int) -> None:
    """Assignments beyond capacity, were every QUEUE consecutive tokens a batch; what a stripe has beyond whole queues is left out."""
    size = min(QUEUE, len(expert))
    whole = len(expert) // size
    some = expert[: whole * size]
    queued = information.joint(np.repeat(np.arange(whole), size), some, whole, stream.experts)
    first = group[: whole * size : size]
    for factor in FACTORS:
        over = np.maximum(queued - capacity(factor, stream.k, size, stream.experts), 0).sum(1)
        _add(sums, f"dropped_{factor:g}", first, over, groups)
    _add(sums, "queued", first, queued.sum(1), groups)


def capacity(factor: float, k: int, tokens: int, experts: int) -> int:
    """Places of a queue by the layer's rule per_assignment."""
    from routed.layer.rule import Rule
    from routed.layer.selection import capacity as places

    return places(Rule(k=k, capacity_factor=factor), tokens, experts)


def _count_columns(sums, group: np.ndarray, expert: np.ndarray, rest: dict[str, np.ndarray], groups: int) -> None:
    there = expert >= 0
    if "kept" in rest:
        _add(sums, "dropped", group, (there & ~rest["kept"]).sum(1), groups)
        _add(sums, "chosen", group, there.sum(1), groups)
    if "weight" in rest:
        _add(sums, "weight_first", group, np.where(there, rest["weight"], 0).max(1), groups)
        _add(sums, "weight_all", group, np.where(there, rest["weight"], 0).sum(1, dtype=np.float32), groups)


def _count_scores(sums, stream: Stream, tokens: Tokens) -> None:
    """Entropy of a token's softmax, its largest probability, that on its k experts, and the gap between places k and k + 1."""
    begin = 0
    for (scores,) in stream.read("scores"):
        for first in range(0, len(scores), SCORED):
            some = scores[first : first + SCORED].astype(np.float32)
            group = tokens.group[begin + first : begin + first + len(some)]
            highest = some.max(1)
            some -= highest[:, None]
            exponent = np.exp(some)
            total = exponent.sum(1)
            entropy = np.log(total) - np.einsum("te,te->t", exponent, some) / total
            _add(sums, "entropy_token", group, entropy, tokens.groups)
            _add(sums, "confidence", group, 1 / total, tokens.groups)
            if stream.k < stream.experts:
                exponent.partition((stream.experts - stream.k - 1, stream.experts - stream.k), axis=1)
                above, below = exponent[:, -stream.k], exponent[:, -stream.k - 1]
                _add(sums, "margin", group, (above - below) / total, tokens.groups)
        begin += len(scores)


def best(table: np.ndarray, k: int) -> np.ndarray:
    """Which experts a table names for each code: its k most frequent [C, E]; for a code that it never saw the k most loaded."""
    counts = table.astype(np.float32)
    counts += table.sum(0) / (1 + table.sum())  # less than one assignment: decides where nothing, or as much, was seen
    named = np.zeros(table.shape, bool)
    step = max(1, (1 << 24) // table.shape[1])
    for begin in range(0, len(counts), step):
        some = counts[begin : begin + step]
        np.put_along_axis(named[begin : begin + step], np.argpartition(-some, k - 1, axis=1)[:, :k], True, axis=1)
    return named


def _look_again(sums, stream: Stream, tokens: Tokens, halves: dict[str, np.ndarray]) -> None:
    """Adds `mi_NAME` and `table_NAME`, and `table` of no code: what the k most loaded experts of the other half get."""
    influence = {name: information.pointwise(table.sum(0)) for name, table in halves.items()}
    named = {name: np.stack([best(one, stream.k) for one in table]) for name, table in halves.items()}
    load = next(iter(halves.values())).sum(1) if halves else None
    constant = None if load is None else np.stack([best(one[None], stream.k)[0] for one in load])
    begin = 0
    for (expert,) in stream.read("expert") if halves else ():
        here = slice(begin, begin := begin + len(expert))
        group, other = tokens.group[here], 1 - tokens.half[here].astype(np.int64)
        there = expert >= 0
        safe, count_of = np.maximum(expert, 0), there.sum(1)
        _add(sums, "assignments", group, count_of, tokens.groups)
        for name in halves:
            code = tokens.codes[name][here].astype(np.int64)
            told = np.where(there, influence[name][code[:, None], safe], 0).sum(1, dtype=np.float32)
            _add(sums, f"mi_{name}", group, told, tokens.groups)
            hit = (named[name][other[:, None], code[:, None], safe] & there).sum(1)
            _add(sums, f"table_{name}", group, hit, tokens.groups)
        if constant is not None:
            _add(sums, "table", group, (constant[other[:, None], safe] & there).sum(1), tokens.groups)


def _beyond(expert: np.ndarray, given: Given, tokens: Tokens, experts: int):
    """I(expert; label | id) = I(expert; (label, id)) - I(expert; id) of each label, with its shuffles and its influence."""
    group, found = tokens.group[given.where], {}
    by_token = information.joint(given.token, expert, int(given.token.max()) + 1, experts)
    told, per_token = information.mutual(by_token), information.pointwise(by_token)
    there, safe = expert >= 0, np.maximum(expert, 0)
    for name, codes in given.pairs.items():
        values = []
        for draw, code in enumerate(codes):
            table = information.joint(code, expert, int(code.max()) + 1, experts)
            values.append(max(0.0, information.mutual(table) - told))
            if not draw:
                more = information.pointwise(table)[code[:, None], safe] - per_token[given.token[:, None], safe]
                influence = np.bincount(group, weights=np.where(there, more, 0).sum(1), minlength=tokens.groups)
        assigned = np.bincount(group, weights=there.sum(1), minlength=tokens.groups)
        found[name] = (values[0], float(np.mean(values[1:])), influence, assigned)
    return found
