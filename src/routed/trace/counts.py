"""Counts of one layer's choices: sums by group of sequences, from which all numbers of the page are made.

There are two passes. The first fills tables of (code, expert). The second adds what each assignment contributes to
the information about its code, and counts the assignments that a table names which was filled from the other half of
the sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from routed.contracts import UserError
from routed.trace import information
from routed.trace.format import STRIPE, Arrays, with_slices
from routed.trace.tokens import Conditional, Tokens

#: Tokens that are processed together where each has a score of every expert.
SCORED = 1 << 16
#: Tokens whose terms are looked up together.
BLOCK = 1 << 14
#: Tokens that share the queues of the experts, for the drops that a capacity would cause.
BATCH = 4096
#: Cells of a table, and assignments of a layer, above which one shuffle is counted: its noise is negligible.
LARGE, MANY = 1 << 23, 1 << 21
#: Cells of the largest table that fits into memory: 4 GiB.
MOST_CELLS = 1 << 30
#: Cells of the tables of pairs in all groups (half a GiB), above which pairs are not counted.
PAIRS = 1 << 27
#: Capacity factors whose drops are counted.
FACTORS = (1.0, 1.25, 2.0)


class Stream(NamedTuple):
    """Choices from a layer's file or from another router. `read(*columns)` yields arrays of stripes."""

    experts: int
    k: int
    columns: Sequence[str]
    read: Callable[..., Iterator[Arrays]]


def table_stream(tokens: Tokens, table: np.ndarray, experts: int) -> Stream:
    """Returns the stream of a router that looks up the experts of a token id in `table` [V, k]."""
    ids = tokens.codes["token"]

    def read(*columns: str) -> Iterator[Arrays]:
        for begin in range(0, len(ids), STRIPE):
            yield tuple(table[ids[begin : begin + STRIPE]] for _ in columns)

    return Stream(experts, table.shape[1], ("expert",), read)


class Sums(dict[str, np.ndarray]):
    """Sums over the tokens of each group, by name: arrays [G]."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def add(self, name: str, group: np.ndarray, values: np.ndarray) -> None:
        """Adds `values` of tokens to the sums of their groups."""
        self[name] = self.get(name, 0) + np.bincount(group, weights=values, minlength=self.groups)


class ConditionalInformation(NamedTuple):
    """I(expert; label | token id): its value by chance, and its terms and assignments by group [G]."""

    chance: float
    terms: np.ndarray
    assignments: np.ndarray


class Counts(NamedTuple):
    """Counts of one stream, with G groups of sequences and C codes.

    `load` [G, E] counts assignments, `pairs` [G, E, E] pairs of different experts of a token. `tables` maps a name to
    assignments [2, C, E] by half, `chance` to the information about shuffled codes. `conditional` is by label.
    """

    load: np.ndarray
    pairs: np.ndarray | None
    tables: dict[str, np.ndarray]
    chance: dict[str, float]
    sums: dict[str, np.ndarray]
    conditional: dict[str, ConditionalInformation]


def count(stream: Stream, tokens: Tokens, conditional: Conditional | None) -> Counts:
    """Returns the counts of a stream.

    Raises:
      UserError: there are more experts than tables of them fit into memory.
    """
    experts, groups = stream.experts, tokens.groups
    largest = max((2 * size * experts for size in tokens.counts.values()), default=0)
    if largest > MOST_CELLS:
        raise UserError(f"trace: tables of {experts:,} experts have {largest:,} cells, more than {MOST_CELLS:,}")
    many = len(tokens.sequence) * stream.k > MANY
    load, sums = np.zeros((groups, experts), np.int64), Sums(groups)
    fits = groups * experts**2 <= PAIRS
    pairs = np.zeros((groups, experts, experts), np.int32) if stream.k > 1 and fits else None
    sums["tokens"] = np.bincount(tokens.group, minlength=groups)
    tables = {name: np.zeros((2 * size, experts), np.int32) for name, size in tokens.counts.items()}
    shuffled = {
        name: [
            np.zeros((size, experts), np.int32)
            for _ in tokens.token_orders[: 1 if many or size * experts > LARGE else None]
        ]
        for name, size in tokens.counts.items()
    }
    conditional_choices = []
    columns = ["expert", *(name for name in ("kept", "weight") if name in stream.columns)]
    for here, arrays in with_slices(stream.read(*columns)):
        expert, group = arrays[0], tokens.group[here]
        load += information.joint(group, expert, groups, experts)
        for name, size in tokens.counts.items():
            halved = tokens.half[here].astype(np.int64) * size + tokens.codes[name][here]
            accumulate(tables[name], information.joint(halved, expert, 2 * size, experts))
            for draw, table in enumerate(shuffled[name]):
                accumulate(table, information.joint(tokens.shuffled(name, draw, here), expert, size, experts))
        if pairs is not None:
            _count_pairs(pairs, group, expert)
        _count_drops(sums, group, expert, stream)
        for name, column in zip(columns[1:], arrays[1:], strict=True):
            _count_column(sums, group, expert, name, column)
        if conditional is not None:
            first, last = np.searchsorted(conditional.where, (here.start, here.stop))
            conditional_choices.append(expert[conditional.where[first:last] - here.start])
    if "scores" in stream.columns:
        _count_scores(sums, stream, tokens, mean_k(load, len(tokens.sequence)))
    chance = {name: float(np.mean([information.mutual(table) for table in of])) for name, of in shuffled.items()}
    halves = {name: table.reshape(2, -1, experts) for name, table in tables.items()}
    _count_information(sums, stream, tokens, halves, mean_k(load, len(tokens.sequence)))
    within_ids = {}
    if conditional is not None and conditional_choices:
        within_ids = _conditional_information(np.concatenate(conditional_choices), conditional, tokens, experts)
    return Counts(load, pairs, halves, chance, sums, within_ids)


def accumulate(table: np.ndarray, more: np.ndarray) -> None:
    """Adds counts to counts of 32 bits, which 10^9 tokens do not fill."""
    np.add(table, more, out=table, casting="unsafe")


def _count_pairs(pairs: np.ndarray, group: np.ndarray, expert: np.ndarray) -> None:
    experts = pairs.shape[1]
    for i in range(expert.shape[1] - 1):
        before, after = expert[:, i, None], expert[:, i + 1 :]
        key = (group[:, None].astype(np.int64) * experts + before) * experts + after
        flat = key.ravel() if expert.min() >= 0 else key[(before >= 0) & (after >= 0)]
        accumulate(pairs, np.bincount(flat, minlength=pairs.size).reshape(pairs.shape))


def _count_drops(sums: Sums, group: np.ndarray, expert: np.ndarray, stream: Stream) -> None:
    """Counts assignments beyond capacity, in whole batches of consecutive tokens of a stripe."""
    size = min(BATCH, len(expert))
    batches = len(expert) // size
    queues = information.joint(np.repeat(np.arange(batches), size), expert[: batches * size], batches, stream.experts)
    first = group[: batches * size : size]
    queued = queues.sum(1)
    for factor in FACTORS:
        over = np.maximum(queues - capacity(factor, queued, size, stream.experts)[:, None], 0).sum(1)
        sums.add(f"dropped_{factor:g}", first, over)
    sums.add("queued", first, queued)


def capacity(factor: float, assignments: np.ndarray | int, tokens: int, experts: int) -> Any:
    """Returns the slots of an expert's queue: ceil(factor assignments / E), from 1 to T: the layer's per_assignment."""
    return np.clip(np.ceil(np.round(factor * np.asarray(assignments) / experts, 6)), 1, tokens).astype(int)


def mean_k(load: np.ndarray, tokens: int) -> int:
    """Returns the number of experts that a token has on average, rounded, at least 1, from assignments `load`."""
    return max(1, round(load.sum() / tokens))


def _count_column(sums: Sums, group: np.ndarray, expert: np.ndarray, name: str, column: np.ndarray) -> None:
    assigned = expert >= 0
    if name == "kept":
        sums.add("dropped", group, (assigned & ~column).sum(1))
        sums.add("chosen", group, assigned.sum(1))
    else:
        weight = np.where(assigned, column, 0)
        sums.add("weight_first", group, weight.max(1))
        sums.add("weight_all", group, row_sums(weight))


def _count_scores(sums: Sums, stream: Stream, tokens: Tokens, k: int) -> None:
    """Sums the entropy of a token's softmax, its largest probability, and the gap between ranks k and k + 1."""
    for here, (scores,) in with_slices(stream.read("scores")):
        for first in range(0, len(scores), SCORED):
            some = scores[first : first + SCORED].astype(np.float32)
            group = tokens.group[here.start + first : here.start + first + len(some)]
            some -= some.max(1)[:, None]
            exponent = np.exp(some)
            total = exponent.sum(1)
            sums.add("entropy_token", group, np.log(total) - np.einsum("te,te->t", exponent, some) / total)
            sums.add("confidence", group, 1 / total)
            if k < stream.experts:
                exponent.partition((stream.experts - k - 1, stream.experts - k), axis=1)
                above, below = exponent[:, -k], exponent[:, -k - 1]
                sums.add("margin", group, (above - below) / total)


def best(table: np.ndarray, k: int) -> np.ndarray:
    """Returns the experts that a table names for each code [C, E]: its k most frequent, else the most loaded ones."""
    counts = table.astype(np.float32)
    counts += table.sum(0) / (1 + table.sum())  # less than one assignment: decides only between equal counts
    named = np.zeros(table.shape, bool)
    step = max(1, (1 << 24) // table.shape[1])
    for begin in range(0, len(counts), step):
        some = counts[begin : begin + step]
        np.put_along_axis(named[begin : begin + step], np.argpartition(-some, k - 1, axis=1)[:, :k], True, axis=1)
    return named


def _count_information(sums: Sums, stream: Stream, tokens: Tokens, halves: dict[str, np.ndarray], k: int) -> None:
    """Adds `mi_NAME` and `table_NAME` of each code, and `table` of the k most loaded experts of the other half."""
    if not halves:
        return
    terms = {name: information.pointwise(table.sum(0)) for name, table in halves.items()}
    named = {name: np.stack([best(half, k) for half in table]) for name, table in halves.items()}
    loads = next(iter(halves.values())).sum(1)
    most_loaded = np.stack([best(load[None], k)[0] for load in loads])
    # A few tokens at a time: what is computed for them stays in the processor's cache.
    blocks = (
        block for (expert,) in stream.read("expert") for block in np.split(expert, range(BLOCK, len(expert), BLOCK))
    )
    for here, (expert,) in with_slices((block,) for block in blocks):
        group, other_half = tokens.group[here], 1 - tokens.half[here].astype(np.int64)
        assigned, safe = expert >= 0, np.maximum(expert, 0)
        sums.add("assignments", group, row_sums(assigned))
        for name, table in halves.items():
            cell = tokens.codes[name][here].astype(np.int64)[:, None] * stream.experts + safe
            sums.add(f"mi_{name}", group, row_sums(terms[name].ravel().take(cell) * assigned))
            cell += other_half[:, None] * table[0].size
            sums.add(f"table_{name}", group, row_sums(named[name].ravel().take(cell) & assigned))
        by_load = most_loaded.ravel().take(other_half[:, None] * stream.experts + safe)
        sums.add("table", group, row_sums(by_load & assigned))


def row_sums(values: np.ndarray) -> np.ndarray:
    """Returns sums [T] over few columns [T, k] in float32, many times faster than `sum(1)`."""
    return values.astype(np.float32, copy=False) @ np.ones(values.shape[1], np.float32)


def _conditional_information(
    expert: np.ndarray, conditional: Conditional, tokens: Tokens, experts: int
) -> dict[str, ConditionalInformation]:
    """Returns I(expert; label | id) = I(expert; (label, id)) - I(expert; id) of each label."""
    group, assigned, safe = tokens.group[conditional.where], expert >= 0, np.maximum(expert, 0)
    by_id = information.joint(conditional.token, expert, int(conditional.token.max()) + 1, experts)
    id_terms = information.pointwise(by_id).ravel().take(conditional.token[:, None] * experts + safe)
    assignments = np.bincount(group, weights=row_sums(assigned), minlength=tokens.groups)
    of_ids, results = information.mutual(by_id), {}

    def table_of(codes: np.ndarray) -> np.ndarray:
        return information.joint(codes, expert, int(codes.max()) + 1, experts)

    for name, (pairs, *shuffled) in conditional.pairs.items():
        # One table at a time: a table of pairs may take hundreds of MB.
        draws = shuffled[: 1 if expert.size > MANY else None]
        chance = float(np.mean([max(0.0, information.mutual(table_of(codes)) - of_ids) for codes in draws]))
        terms = information.pointwise(table_of(pairs)).ravel().take(pairs[:, None] * experts + safe) - id_terms
        by_group = np.bincount(group, weights=row_sums(terms * assigned), minlength=tokens.groups)
        results[name] = ConditionalInformation(chance, by_group, assignments)
    return results
