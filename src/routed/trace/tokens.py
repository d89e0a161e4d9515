"""Tokens of a trace as integer codes, with groups for intervals and shuffles for values by chance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from routed.metrics.agreement import mixed_labels
from routed.trace.format import Trace, label_names, token_column

#: Groups of whole sequences that the bootstrap draws; with fewer sequences each group is one sequence.
GROUPS = 128


def groups_of(rows: int) -> int:
    """Returns the number of groups of neighbouring rows, which are alike: the bootstrap draws groups."""
    return min(GROUPS, rows)


#: Shuffles whose mean is a value by chance; above MANY tokens one shuffle, since its noise is negligible.
SHUFFLES, MANY = 4, 1 << 20
#: Tokens, in whole sequences, on which information given the token id is measured: rare ids need a table of pairs.
CONDITIONAL = 1 << 19


class Conditional(NamedTuple):
    """Labels within token ids on the tokens `where`: codes of ids, and codes of pairs (id, label).

    `pairs[label]` holds the pairs of the real labels first, then those of shuffled labels.
    """

    where: np.ndarray
    token: np.ndarray
    pairs: Mapping[str, tuple[np.ndarray, ...]]


class Tokens(NamedTuple):
    """Codes [T] by name (token, position, labels) below `counts[name]`, with the group and the half of each token.

    `sequence` numbers sequences. With `groups` below 2 no number has an interval: the trace has one sequence or does
    not say. A code that is equal in all of a sequence (`by_sequence`) is shuffled among sequences, any other code
    within its sequence.
    """

    codes: Mapping[str, np.ndarray]
    counts: Mapping[str, int]
    names: Mapping[str, list[str]]
    by_sequence: Mapping[str, np.ndarray | None]
    sequence: np.ndarray
    group: np.ndarray
    groups: int
    half: np.ndarray
    token_orders: tuple[np.ndarray, ...]
    sequence_orders: tuple[np.ndarray, ...]

    @property
    def sequences(self) -> int:
        """Returns the number of sequences."""
        return int(self.sequence[-1]) + 1

    def shuffled(self, name: str, draw: int, here: slice) -> np.ndarray:
        """Returns the shuffled code of the tokens `here`."""
        by_sequence = self.by_sequence[name]
        if by_sequence is not None:
            return by_sequence[self.sequence_orders[draw]][self.sequence[here]]
        return self.codes[name][self.token_orders[draw][here]]


def tokens_of(trace: Trace, seed: int = 0) -> Tokens:
    """Returns the tokens of a trace. Positions are coded by powers of two: 0, 1, 2-3, 4-7, ..."""
    sequence = token_column(trace, "sequence")
    numbers = np.cumsum(np.diff(sequence, prepend=sequence[0]) != 0).astype(np.int32)
    codes, counts, names = dict[str, np.ndarray](), dict[str, int](), dict[str, list[str]]()
    if trace.has_ids:
        ids, codes["token"] = dense(token_column(trace, "token"))
        counts["token"] = len(ids)
    # A trace from before `has_positions` was given positions if they do not begin at 0.
    if trace.has_sequences or trace.has_positions or token_column(trace, "position")[0]:
        position = token_column(trace, "position")
        codes["position"] = np.frexp(position.astype(np.float32))[1].astype(np.uint8)  # 0, 1, 2, 2, 3, ...
        counts["position"] = int(codes["position"].max()) + 1
    for name in trace.labels:
        codes[name], names[name] = token_column(trace, name).astype(np.int32), label_names(trace, name)
        counts[name] = len(names[name])
    return make_tokens(codes, counts, names, numbers, seed)


def make_tokens(codes, counts, names, sequence: np.ndarray, seed: int = 0) -> Tokens:
    """Returns tokens with their groups, halves and shuffles from codes and numbers of sequences."""
    random, sequences = np.random.default_rng(seed), int(sequence[-1]) + 1
    groups = min(sequences, GROUPS)
    # Neighbours share a group, as rows of one text do; the halves, every second group, are random.
    group = random.permutation(groups).astype(np.uint8)[np.arange(sequences) * groups // sequences][sequence]
    half = group % 2 if sequences > 1 else (np.arange(len(sequence)) >= len(sequence) / 2).astype(np.uint8)
    starts = np.flatnonzero(np.diff(sequence, prepend=-1))
    slices = [slice(begin, begin + MANY) for begin in range(0, len(sequence), MANY)]
    by_sequence: dict[str, np.ndarray | None] = {}
    for name, code in codes.items():
        first = code[starts]
        equal = sequences > 1 and all((first[sequence[here]] == code[here]).all() for here in slices)
        by_sequence[name] = first if equal else None
    draws = SHUFFLES if len(sequence) <= MANY else 1
    token_orders = tuple(shuffle_within(sequence, random) for _ in range(draws))
    sequence_orders = tuple(random.permutation(sequences) for _ in range(draws))
    return Tokens(codes, counts, names, by_sequence, sequence, group, groups, half, token_orders, sequence_orders)


def labels_within_ids(tokens: Tokens, labels: list[str], seed: int = 0) -> Conditional | None:
    """Returns labels within token ids, on at most `CONDITIONAL` tokens; None without ids or labels."""
    if "token" not in tokens.codes or not labels:
        return None
    random = np.random.default_rng(seed)
    lengths = np.bincount(tokens.sequence)
    order = random.permutation(len(lengths))
    wanted = np.zeros(len(lengths), bool)
    wanted[order[: max(1, int(np.searchsorted(np.cumsum(lengths[order]), CONDITIONAL, "right")))]] = True
    where = np.flatnonzero(wanted[tokens.sequence])[:CONDITIONAL]  # of one long sequence, its beginning
    token = dense(tokens.codes["token"][where])[1].astype(np.int64)
    sequence, pairs = tokens.sequence[where].astype(np.int64), {}
    for name in labels:
        label, size = tokens.codes[name][where].astype(np.int64), tokens.counts[name]
        unit = sequence if tokens.by_sequence[name] is not None else np.arange(len(where))
        shuffled = [mixed_labels(label, unit, token, random) for _ in range(len(tokens.token_orders))]
        pairs[name] = tuple(dense(token * size + codes)[1] for codes in (label, *shuffled))
    return Conditional(where, token, pairs)


def dense(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (values that occur, index of each value among them as int32); sorts only values that are spread far."""
    top = int(values.max()) + 1
    if top > 1 << 26:
        occurring, codes = np.unique(values, return_inverse=True)
        return occurring, codes.astype(np.int32)
    occurs = np.zeros(top, bool)
    occurs[values] = True
    index = np.cumsum(occurs, dtype=np.int32) - 1
    return np.flatnonzero(occurs), index[values]


def shuffle_within(sequence: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Returns an order of tokens in which each sequence is rotated by 1 or more of its tokens.

    Tokens that follow each other still do, as in the text: routing in runs then has the same runs by chance. A free
    order has none, and would call runs of one expert a dependence. Sequences of one token are permuted.
    """
    begins = np.flatnonzero(np.diff(sequence, prepend=sequence[:1] - 1))
    lengths = np.diff(begins, append=len(sequence))
    turns = random.integers(np.minimum(1, lengths - 1), lengths)
    begin, length, turn = (np.repeat(some.astype(np.int32), lengths) for some in (begins, lengths, turns))
    order = begin + (np.arange(len(sequence), dtype=np.int32) - begin + turn) % length
    single = begins[lengths == 1]
    order[single] = random.permutation(single)
    return order
