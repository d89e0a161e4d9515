"""Batches as a function of (seed, step): any process may compute its share of any step, in any order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from ml_collections import ConfigDict

from routed.contracts import TextBatch, UserError
from routed.tasks.text import spans
from routed.tasks.text.corpus import Corpus, Cut, load
from routed.tasks.text.documents import shares

#: Size of a shuffled deck, from which languages are dealt. A deck has each language's share of cards, at least one. So
#: the next row of a language follows from the step, without counting through all steps before.
DECK = 1 << 16

#: Independent random streams of a seed.
LANGUAGES, ROWS, NOISE = 0, 1, 2

#: Languages with fewer rows are permuted in memory. Grain's shuffle needs no memory, but is slow for few rows (1 ms a
#: row for ten rows).
FEW = 4096


def batch_function(
    form: Form, corpus: Corpus, config: ConfigDict, seed: int, part: slice
) -> Callable[[int], TextBatch]:
    """Returns the function that makes the rows `part` of the global batch of a step.

    Every epoch of a language has every row once, in an order of its own. The noise is new at each step.
    """
    sizes = [len(rows) for rows in corpus.train]
    temperature = config.data.temperature if form.mixed else 1.0
    cards = np.maximum(1, np.round(DECK * shares(sizes, temperature))).astype(int)

    @functools.lru_cache(maxsize=4)
    def deck(number: int) -> Int[np.ndarray, "2 D"]:
        """Returns the language of each card, and the number of earlier cards of the language, in all decks."""
        language = np.random.default_rng([seed, LANGUAGES, number]).permutation(np.repeat(np.arange(len(cards)), cards))
        times = np.empty_like(language)
        times[np.argsort(language, kind="stable")] = np.concatenate([np.arange(c) + number * c for c in cards])
        return np.stack([language, times])

    @functools.lru_cache(maxsize=2 * len(sizes))  # the end of one epoch and the start of the next
    def order(language: int, epoch: int) -> Callable[[int], int]:
        rng = np.random.default_rng([seed, ROWS, language, epoch])
        if sizes[language] < FEW:
            return rng.permutation(sizes[language]).tolist().__getitem__
        import grain  # here, as it brings array_record, and half a second that only text is worth

        last, key = sizes[language] - 1, int(rng.integers(2**32))
        return functools.partial(grain.experimental.index_shuffle, max_index=last, seed=key, rounds=4)

    def row(language: int, times: int) -> np.ndarray:
        epoch, index = divmod(times, sizes[language])
        return corpus.train[language][order(language, epoch)(index)]

    def make(step: int) -> TextBatch:
        number, position = np.divmod(np.arange(config.batch_size) + step * config.batch_size, cards.sum())
        dealt = [deck(n)[:, position[number == n]] for n in range(number[0], number[-1] + 1)]
        language, times = np.concatenate(dealt, axis=1)[:, part]
        rows = np.stack([row(*key) for key in zip(language.tolist(), times.tolist(), strict=True)])
        rng = np.random.default_rng([seed, NOISE, step])
        return form.batch(rows, language, config.data, rng, part, config.batch_size)

    return make


def held_out(form: Form, corpus: Corpus, config: ConfigDict) -> tuple[TextBatch, TextBatch]:
    """Returns validation rows and test rows, about `data.eval_rows` of each.

    Every language gives the same number of rows, evenly spaced in its text, or all rows if it has fewer. The noise is
    fixed. Without a test text every second validation row is a test row.

    Raises:
      UserError: a language with a single validation row and no test text.
    """
    if corpus.test:
        return _spread(form, corpus.validation, config), _spread(form, corpus.test, config)
    for language, rows in zip(corpus.languages, corpus.validation, strict=True):
        if len(rows) < 2:
            raise UserError(
                f"data.languages: the validation text of {language} is a single row, and every second is for the test; "
                "give it more text or leave it out"
            )
    first, second = (tuple(rows[start::2] for rows in corpus.validation) for start in (0, 1))
    return _spread(form, first, config), _spread(form, second, config)


def validation(corpus: Corpus, config: ConfigDict) -> TextBatch:
    """Returns about `data.eval_rows` validation rows with fixed noise.

    Every language gives the same number of rows, evenly spaced in its text, or all rows if it has fewer.
    """
    return _spread(SPANS, corpus.validation, config)


def _spread(form: Form, by_language: tuple[np.ndarray, ...], config: ConfigDict) -> TextBatch:
    each, more = divmod(config.data.eval_rows, len(by_language))
    counts = np.maximum(1, each + (np.arange(len(by_language)) < more))
    counts = np.minimum(counts, [len(rows) for rows in by_language])
    rows = [rows[np.arange(n) * len(rows) // n] for rows, n in zip(by_language, counts, strict=True)]
    language = np.repeat(np.arange(len(counts)), counts)
    return form.batch(np.concatenate(rows), language, config.data, np.random.default_rng(0), slice(None), len(language))


def _corrupted(rows, language, data: ConfigDict, rng: np.random.Generator, part: slice, size: int) -> TextBatch:
    """Corrupts the rows `part` of a batch of `size`. Every process draws the noise of the whole batch."""
    noise = spans.noise_mask(rng, size, rows.shape[1], data.noise_density, data.mean_span)[part]
    return _batch(*spans.corrupt(rows.astype(np.int32), noise, data.vocabulary), language)


def _batch(inputs: np.ndarray, targets: np.ndarray, language: np.ndarray) -> TextBatch:
    """Returns a batch of NumPy arrays, which the caller copies to devices."""
    return TextBatch(*(ids.astype(np.int32) for ids in (inputs, targets, language)))  # type: ignore[arg-type]


class Form(NamedTuple):
    """The form of training rows."""

    load: Callable[[ConfigDict], Corpus]
    batch: Callable[..., TextBatch]  # of rows
    lengths: Callable[[ConfigDict], tuple[int, int]]  # of a row's inputs and targets
    tokens: Callable[[ConfigDict], int]  # of a row that the stacks read
    tested: bool = False  # test rows are held out too
    padded: bool = False  # inputs have pads, which no metric of a router counts
    packed: bool = False  # rows may be documents that END ends (`data.packing`)
    mixed: bool = True  # rows of several languages are mixed by `data.temperature`


#: For an encoder and a decoder: the decoder predicts spans that are cut out of the encoder's row.
SPANS = Form(
    load,
    _corrupted,
    lambda data: (data.input_length, spans.lengths(data)[1]),
    lambda data: data.input_length + spans.lengths(data)[1],
)

#: Packings of a decoder's rows: one stream of text, or documents that END separates.
STREAM, DOCUMENTS = "stream", "documents"

#: For a decoder-only transformer: contiguous text. Targets are the tokens that follow the inputs; the last token
#: of a row is also the first token of the next row.
CONTINUED = Form(
    lambda data: load(data, Cut(data.input_length + 1, shared=1, ends=data.packing == DOCUMENTS)),
    lambda rows, language, *rest: _batch(rows[:, :-1], rows[:, 1:], language),
    lambda data: (data.input_length, data.input_length),
    lambda data: data.input_length,
    tested=True,
    packed=True,
)
