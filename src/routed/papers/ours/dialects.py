"""Artificial dialects: the same words, equally often in each; what follows a word is the dialect's own.

Nothing to fetch.

A word tells nothing of its dialect, its neighbours nearly everything. A word is one character, so that with
`data.tokens=bytes` it is one token, and a document is a row: a stationary Markov chain, of which all that can be known
is known (`dialect_floors`).
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float, Int
from ml_collections import ConfigDict

from routed.settings.setting import COUNT, Setting, at_least, refuse, within
from routed.tasks.text import spans
from routed.tasks.text.documents import SPLITS, Damage, Source, choose

#: The character of the most frequent word; the others follow it in ASCII, as far as these are printed.
FIRST, MOST = ord("!"), 94

#: Zipf's law: the frequency of the word of rank r, from 0 on, is in proportion to 1 / (r + SHIFT).
SHIFT = 2

#: Rows of a dialect to validate on, of which `data.eval_rows` are taken.
VALIDATION = 1024

SETTINGS: dict[str, Setting] = {
    "dialects": Setting(8, "of the same words", within(2, 99)),
    "words": Setting(64, "of all dialects; each is one character", within(2, MOST)),
    "orders": Setting(2, "pairs of orders of the words that a dialect is the mean of: more, and any word may follow", COUNT),
    "rows": Setting(16384, "of each dialect to train on; then they come again", COUNT),
    "draw": Setting(0, "which dialects are drawn", at_least(0)),
}  # fmt: skip


def dialects(data: ConfigDict) -> Source:
    """The same text on every machine and in every run; a document fills a row."""

    def fingerprint(language: str, split: str) -> str:
        """Changes with what text is made of, with this file, and with NumPy, whose generators may change."""
        text = f"{language} {split} {_length(data)} {[data[name] for name in SETTINGS]} {np.__version__} "
        return hashlib.sha256(text.encode() + pathlib.Path(__file__).read_bytes()).hexdigest()

    def documents(language: str, split: str, damage: Damage) -> Iterator[str]:
        del damage
        count = data.rows if split == "train" else VALIDATION
        rng = np.random.default_rng([data.draw, names(data).index(language), 1 + SPLITS.index(split)])
        table = tables(data)[names(data).index(language)]
        for row in chains(rng, table, frequencies(data.words), count, _length(data)):
            yield (row + FIRST).astype(np.uint8).tobytes().decode("ascii")

    return Source(choose(data, names(data)), documents, fingerprint, lambda language: 1)


def names(data: ConfigDict) -> tuple[str, ...]:
    """The codes of the dialects, d00, d01, ...: their languages."""
    return tuple(f"d{number:02d}" for number in range(data.dialects))


def tables(data: ConfigDict) -> Float[np.ndarray, "C V V"]:
    """Of each dialect: the probability that word j follows word i."""
    return _tables(data.draw, data.dialects, data.words, data.orders)


@functools.lru_cache(maxsize=4)
def _tables(draw: int, count: int, vocabulary: int, orders: int) -> Float[np.ndarray, "C V V"]:
    frequency = frequencies(vocabulary)
    joint = np.zeros((count, vocabulary, vocabulary))
    for dialect, table in enumerate(joint):
        rng = np.random.default_rng([draw, dialect, 0])
        for _ in range(orders):
            table += shared(rng.permutation(vocabulary), rng.permutation(vocabulary), frequency) / orders
    return joint / frequency[:, None]


def frequencies(vocabulary: int) -> Float[np.ndarray, " V"]:
    """Of each word in every dialect."""
    weight = 1 / (np.arange(vocabulary) + SHIFT)
    return weight / weight.sum()


def shared(
    above: Int[np.ndarray, " V"], below: Int[np.ndarray, " V"], frequency: Float[np.ndarray, " V"]
) -> Float[np.ndarray, "V V"]:
    """How often word j follows word i: words lie side by side on [0, 1] in one order, and below in another; i and j share so much.

    A word is as long as it is frequent, so both sums over words are the frequencies, and at most 2 V - 1 pairs share
    anything.
    """
    (start, end), (under, until) = (_stretches(order, frequency) for order in (above, below))
    both = np.minimum(end[:, None], until[None]) - np.maximum(start[:, None], under[None])
    return np.maximum(both, 0)


def _stretches(order: Int[np.ndarray, " V"], frequency: Float[np.ndarray, " V"]) -> Float[np.ndarray, "2 V"]:
    """Where each word starts and ends."""
    end = np.empty_like(frequency)
    end[order] = frequency[order].cumsum()
    return np.stack([end - frequency, end])


def chains(
    rng: np.random.Generator,
    table: Float[np.ndarray, "V V"],
    frequency: Float[np.ndarray, " V"],
    count: int,
    length: int,
) -> Int[np.ndarray, "N R"]:
    """Stationary chains: the first word by its frequency, the next by the table. All advance together."""
    follows, rows = table.cumsum(1)[:, :-1], np.empty((count, length), int)
    rows[:, 0] = np.searchsorted(frequency.cumsum()[:-1], rng.random(count), side="right")
    for position in range(1, length):
        rows[:, position] = (follows[rows[:, position - 1]] <= rng.random(count)[:, None]).sum(1)
    return rows


def entropy_rate(table: Float[np.ndarray, "V V"], frequency: Float[np.ndarray, " V"]) -> float:
    """Nats of the next word, given the one before: -sum_ij f_i P_ij log P_ij.

    Of a dialect: the entropy rate of its text. Of the mean of all tables: the loss of who sees one word and not the
    dialect.
    """
    logs = np.log(np.where(table > 0, table, 1))
    return float(-(frequency[:, None] * table * logs).sum())


def about(data: ConfigDict) -> str:
    """What can be achieved, for the threats to validity."""
    frequency, known_tables = frequencies(data.words), tables(data)
    rate = np.mean([entropy_rate(table, frequency) for table in known_tables])
    blind = entropy_rate(known_tables.mean(0), frequency)
    return (
        f", dialects of the same {data.words} words: after a word the next has {rate:.3f} nats where the dialect is "
        f"known,"
        f" {blind:.3f} where it is not"
    )


def check(config: ConfigDict) -> None:
    """Refuses tokens that are not words."""
    if config.data.tokens != "bytes":
        refuse("data.tokens", config.data.tokens, "words are single characters; set it to bytes")


def _length(data: ConfigDict) -> int:
    return spans.lengths(data)[0]
