"""Artificial dialects: the same words, equally frequent in every dialect, with different transitions between words.

A single word says nothing about the dialect, pairs of words say nearly everything. The text is generated, without any
download. A word is one character, so that with `data.tokens=bytes` a word is one token. A document is a row: a
stationary Markov chain, whose least loss is known exactly (`dialect_floors`).
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

#: The character of the most frequent word; further words are the next printable ASCII characters.
FIRST, MOST = ord("!"), 94

#: Zipf's law: the frequency of the word of rank r >= 0 is proportional to 1 / (r + SHIFT).
SHIFT = 2

#: Validation rows of a dialect, from which `data.eval_rows` rows are taken.
VALIDATION = 1024

SETTINGS: dict[str, Setting] = {
    "dialects": Setting(8, "of the same words", within(2, 99)),
    "words": Setting(64, "of all dialects; each is one character", within(2, MOST)),
    "orders": Setting(
        2, "pairs of orders of the words that a dialect is the mean of: more, and any word may follow", COUNT
    ),
    "rows": Setting(16384, "of each dialect to train on; then they come again", COUNT),
    "draw": Setting(0, "which dialects are drawn", at_least(0)),
}


def dialects(data: ConfigDict) -> Source:
    """Returns a source with the same text on every machine and in every run; a document fills a row."""

    def fingerprint(language: str, split: str) -> str:
        """Hashes the settings of the text, the source file, and NumPy's version, as its generators may change."""
        text = f"{language} {split} {_length(data)} {[data[name] for name in SETTINGS]} {np.__version__} "
        return hashlib.sha256(text.encode() + pathlib.Path(__file__).read_bytes()).hexdigest()

    def documents(language: str, split: str, damage: Damage) -> Iterator[str]:
        count = data.rows if split == "train" else VALIDATION
        rng = np.random.default_rng([data.draw, names(data).index(language), 1 + SPLITS.index(split)])
        table = tables(data)[names(data).index(language)]
        for row in chains(rng, table, frequencies(data.words), count, _length(data)):
            yield (row + FIRST).astype(np.uint8).tobytes().decode("ascii")

    return Source(choose(data, names(data)), documents, fingerprint, lambda language: 1)


def names(data: ConfigDict) -> tuple[str, ...]:
    """Returns the codes of the dialects, d00, d01, ..., which serve as languages."""
    return tuple(f"d{number:02d}" for number in range(data.dialects))


def tables(data: ConfigDict) -> Float[np.ndarray, "C V V"]:
    """Returns each dialect's probability that word j follows word i."""
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
    """Returns the frequencies of words, which are equal in all dialects."""
    weight = 1 / (np.arange(vocabulary) + SHIFT)
    return weight / weight.sum()


def shared(
    above: Int[np.ndarray, " V"], below: Int[np.ndarray, " V"], frequency: Float[np.ndarray, " V"]
) -> Float[np.ndarray, "V V"]:
    """Returns the joint frequencies of word i and the next word j: the overlap of two intervals.

    Words are intervals of [0, 1], as long as their frequencies, side by side in the order `above` (word i) or `below`
    (word j). So both marginals are the frequencies, and at most 2 V - 1 pairs have an overlap.
    """
    (start, end), (under, until) = (_stretches(order, frequency) for order in (above, below))
    both = np.minimum(end[:, None], until[None]) - np.maximum(start[:, None], under[None])
    return np.maximum(both, 0)


def _stretches(order: Int[np.ndarray, " V"], frequency: Float[np.ndarray, " V"]) -> Float[np.ndarray, "2 V"]:
    """Returns the start and the end of each word's interval."""
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
    """Draws stationary chains, all at once: the first word by frequency, each next word by the table."""
    follows, rows = table.cumsum(1)[:, :-1], np.empty((count, length), int)
    rows[:, 0] = np.searchsorted(frequency.cumsum()[:-1], rng.random(count), side="right")
    for position in range(1, length):
        rows[:, position] = (follows[rows[:, position - 1]] <= rng.random(count)[:, None]).sum(1)
    return rows


def entropy_rate(table: Float[np.ndarray, "V V"], frequency: Float[np.ndarray, " V"]) -> float:
    """Computes the nats of the next word, given the previous word: -sum_ij f_i P_ij log P_ij.

    For the table of a dialect: the entropy rate of the dialect's text. For the mean of all tables: the least loss of a
    model that reads the previous word only.
    """
    logs = np.log(np.where(table > 0, table, 1))
    return float(-(frequency[:, None] * table * logs).sum())


def about(data: ConfigDict) -> str:
    """Describes the least losses on the dialects, for the threats to validity."""
    frequency, known_tables = frequencies(data.words), tables(data)
    rate = np.mean([entropy_rate(table, frequency) for table in known_tables])
    blind = entropy_rate(known_tables.mean(0), frequency)
    return (
        f", documents of {_length(data)} words in dialects of the same {data.words} words: after a word the next of"
        f" its document has {rate:.3f} nats where the dialect is known, {blind:.3f} where it is not"
    )


def check(config: ConfigDict) -> None:
    """Refuses tokens that are not words."""
    if config.data.tokens != "bytes":
        refuse("data.tokens", config.data.tokens, "words are single characters; set it to bytes")


def _length(data: ConfigDict) -> int:
    return spans.lengths(data)[0]
