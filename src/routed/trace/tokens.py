"""What is known of the tokens of a trace as integer codes, their groups for intervals, and the shuffles that make nulls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from routed.metrics.agreement import mixed_labels
from routed.trace.format import Trace, label_names, token_column

#: Groups of whole sequences that the bootstrap draws; fewer sequences are groups of one.
GROUPS = 128
#: Shuffles of a null, of which the mean is taken; of more than MANY tokens one, as its noise is gone.
DRAWS, MANY = 4, 1 << 20
#: Tokens, in whole sequences, of which information given the token id is measured: of rare ids it needs a table of pairs.
CONDITIONAL = 1 << 19


class Given(NamedTuple):
    """Labels within token ids, on the tokens `where`: codes of ids and of pairs (id, label), and pairs of shuffled labels."""

    where: np.ndarray
    token: np.ndarray
    pairs: Mapping[str, tuple[np.ndarray, ...]]


class Tokens(NamedTuple):
    """Codes [T] by name (token, position, labels) below `counts[name]`; the group and half of each token.

    `groups` below 2: the trace has one sequence or does not say, and nothing has an interval. `rows` numbers sequences.
    A code that is the same in all of a sequence (`constant`) is shuffled among sequences, any other within its sequence.
    """

    codes: Mapping[str, np.ndarray]
    counts: Mapping[str, int]
    names: Mapping[str, list[str]]
    constant: Mapping[str, np.ndarray | None]
    rows: np.ndarray
    group: np.ndarray
    groups: int
    half: np.ndarray
    orders: tuple[np.ndarray, ...]
    row_orders: tuple[np.ndarray, ...]
    ids: np.ndarray | None

    @property
    def sequences(self) -> int:
        """How many there are."""
        return int(self.rows[-1]) + 1

    def shuffled(self, name: str, draw: int, here: slice) -> np.ndarray:
        """A code as the null has it, of the tokens `here`."""
        of_rows = self.constant[name]
        if of_rows is not None:
            return of_rows[self.row_orders[draw]][self.rows[here]]
        return self.codes[name][self.orders[draw][here]]


def of(trace: Trace, seed: int = 0) -> Tokens:
    """Of a trace. Positions are codes by powers of two: 0, 1, 2-3, 4-7, ..."""
    sequence = token_column(trace, "sequence")
    rows = np.cumsum(np.diff(sequence, prepend=sequence[0]) != 0).astype(np.int32)
    del sequence
    codes, counts, names, ids = dict[str, np.ndarray](), dict[str, int](), dict[str, list[str]](), None
    if trace.has_ids:
        ids, codes["token"] = dense(token_column(trace, "token"))
        counts["token"] = len(ids)
    # Of a trace whose description is older than `has_positions`, those that do not begin at 0 were given.
    if trace.has_sequences or trace.has_positions or token_column(trace, "position")[0]:
        position = token_column(trace, "position")
        codes["position"] = np.frexp(position.astype(np.float32))[1].astype(np.uint8)  # 0, 1, 2, 2, 3, ...
        counts["position"] = int(codes["position"].max()) + 1
    for name in trace.labels:
        codes[name], names[name] = token_column(trace, name).astype(np.int32), label_names(trace, name)
        counts[name] = len(names[name])
    return make(codes, counts, names, rows, ids, seed)


def make(codes, counts, names, rows: np.ndarray, ids: np.ndarray | None, seed: int = 0) -> Tokens:
    """Groups, halves and shuffles for tokens whose codes are known."""
    random, sequences = np.random.default_rng(seed), int(rows[-1]) + 1
    groups = min(sequences, GROUPS)
    dealt = random.permutation(np.arange(sequences) % groups).astype(np.uint8)
    group = dealt[rows]
    half = group % 2 if sequences > 1 else (np.arange(len(rows)) >= len(rows) / 2).astype(np.uint8)
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    constant = {}
    for name, values in codes.items():
        of_rows = values[starts]
        constant[name] = (
            of_rows
            if sequences > 1 and all((of_rows[rows[here]] == values[here]).all() for here in _slices(len(rows)))
            else None
        )
    draws = DRAWS if len(rows) <= MANY else 1
    orders = tuple(within(rows, random) for _ in range(draws))
    row_orders = tuple(random.permutation(sequences) for _ in range(draws))
    return Tokens(codes, counts, names, constant, rows, group, groups, half, orders, row_orders, ids)


def given_token(tokens: Tokens, labels: list[str], seed: int = 0) -> Given | None:
    """What information of labels beyond the token id needs, on at most `CONDITIONAL` tokens of random whole sequences."""
    if "token" not in tokens.codes or not labels:
        return None
    random = np.random.default_rng(seed)
    lengths = np.bincount(tokens.rows)
    order = random.permutation(len(lengths))
    wanted = np.zeros(len(lengths), bool)
    wanted[order[: max(1, int(np.searchsorted(np.cumsum(lengths[order]), CONDITIONAL, "right")))]] = True
    where = np.flatnonzero(wanted[tokens.rows])[:CONDITIONAL]  # of one long sequence its beginning
    token = dense(tokens.codes["token"][where])[1].astype(np.int64)
    row, pairs = tokens.rows[where].astype(np.int64), {}
    for name in labels:
        label, size = tokens.codes[name][where].astype(np.int64), tokens.counts[name]
        unit = row if tokens.constant[name] is not None else np.arange(len(where))  # a label of rows, or of tokens
        mixed = [mixed_labels(label, unit, token, random) for _ in range(len(tokens.orders))]
        pairs[name] = tuple(dense(token * size + one)[1] for one in (label, *mixed))
    return Given(where, token, pairs)


def dense(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(values that occur, the place of each value among them as int32), without sorting where they are not spread far."""
    top = int(values.max()) + 1
    if top > 1 << 26:
        found, codes = np.unique(values, return_inverse=True)
        return found, codes.astype(np.int32)
    seen = np.zeros(top, bool)
    seen[values] = True
    place = np.cumsum(seen, dtype=np.int32) - 1
    return np.flatnonzero(seen), place[values]


def within(rows: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """A random order of tokens that leaves each in its sequence, or moves any if all are sequences of one; by whole sequences, so that it stays small."""
    if len(rows) > 1 and (np.diff(rows) != 0).all():
        return random.permutation(len(rows)).astype(np.int32)
    order, begin = np.empty(len(rows), np.int32), 0
    while begin < len(rows):
        end = int(np.searchsorted(rows, rows[min(begin + MANY, len(rows)) - 1], "right"))
        order[begin:end] = begin + np.lexsort((random.random(end - begin, dtype=np.float32), rows[begin:end]))
        begin = end
    return order


def _slices(size: int, step: int = MANY):
    return (slice(begin, begin + step) for begin in range(0, size, step))
