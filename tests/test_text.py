"""Text from tokens to batches: span corruption, the stream, validation rows, and the bigram baseline."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routed.contracts import UserError
from routed.plan.config import base
from routed.settings.tree import override
from routed.tasks import text
from routed.tasks.text import corpus, ngram, spans, stream, tokenizers
from routed.tasks.text.documents import shares

BYTES = tokenizers.Tokenizer(259, b"", "bytes")


def text_config(**changes):
    flat = {"data.name": "artificial", "data.tokens": "bytes", "data.vocabulary": 300, "data.input_length": 64}
    return override(base(), flat | {"batch_size": 12, "data.eval_rows": 10} | changes)


def toy(config, rows=(40, 10, 5)):
    """A corpus whose row r of language l is full of 1000 l + r, so that a batch shows what it is made of."""
    length, _ = spans.lengths(config.data)
    train = tuple(
        np.full((n, length), 1000 * i, np.uint16) + np.arange(n, dtype=np.uint16)[:, None] for i, n in enumerate(rows)
    )
    return corpus.Corpus(("a", "b", "c")[: len(rows)], train, train, config.data.vocabulary, "", BYTES)


def origin(batch):
    """(language, row) of each row of a batch of `toy`."""
    first = np.asarray(batch.inputs)[:, 0]  # a row starts with a gap, not with a sentinel
    return list(zip(first // 1000, first % 1000, strict=True))


# --- span corruption ---


def test_corrupt_by_hand():
    # Row 10..17, spans {12, 13} and {16, 17}, vocabulary 100: sentinels 99 and 98.
    # inputs: 10 11 <99> 14 15 <98> end; targets: <99> 12 13 <98> 16 17 end.
    row = np.arange(10, 18)[None]
    noise = np.array([[0, 0, 1, 1, 0, 0, 1, 1]], bool)
    inputs, targets = spans.corrupt(row, noise, 100)
    assert inputs.tolist() == [[10, 11, 99, 14, 15, 98, 1]]
    assert targets.tolist() == [[99, 12, 13, 98, 16, 17, 1]]
    assert inputs.dtype == targets.dtype == np.int32


def test_corrupt_does_not_join_the_rows_of_a_batch():
    rows = np.array([[10, 11], [12, 13]])
    noise = np.array([[0, 1], [1, 0]], bool)  # the noise that ends one row does not go on in the next
    inputs, targets = spans.corrupt(rows, noise, 100)
    assert inputs.tolist() == [[10, 99, 1], [99, 13, 1]]
    assert targets.tolist() == [[99, 11, 1], [12, 99, 1]]


@pytest.mark.parametrize(
    ("length", "density", "span", "expected"),
    [
        (141, 0.15, 3.0, (21, 7)),  # 21.15, 7
        (568, 0.15, 3.0, (85, 28)),  # 85.2, 28.3
        (30, 0.15, 3.0, (4, 1)),  # 4.5 rounds to the even 4, as NumPy and TensorFlow round; 1.3
        (10, 0.01, 3.0, (1, 1)),  # never none
        (10, 0.99, 3.0, (9, 1)),  # never all; 9 / 3 = 3 spans would need 3 gaps of the 1 token left
    ],
)
def test_counts(length, density, span, expected):
    assert spans.counts(length, density, span) == expected


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (128, (141, 29)),  # 141 - 21 + 7 + 1 = 128; 21 + 7 + 1 = 29
        (512, (568, 114)),  # T5's own: 568 - 85 + 28 + 1 = 512; 85 + 28 + 1 = 114
    ],
)
def test_lengths(inputs, expected):
    assert spans.lengths(text_config(**{"data.input_length": inputs}).data) == expected


rows_of_noise = st.tuples(st.integers(3, 300), st.floats(0.01, 0.9), st.floats(1.0, 10.0), st.integers(0, 2**31))


@given(rows_of_noise)
@settings(deadline=None, max_examples=50)
def test_lengths_fill_the_encoder_exactly(case):
    inputs, density, span, seed = case
    config = text_config(**{"data.input_length": inputs, "data.noise_density": density, "data.mean_span": span})
    try:
        length, target = spans.lengths(config.data)
    except UserError as error:  # the length it names does exist
        inputs = int(str(error).rsplit(" ", 1)[1])
        config = override(config, {"data.input_length": inputs})
        length, target = spans.lengths(config.data)
    noise = spans.noise_mask(np.random.default_rng(seed), 3, length, density, span)
    got = spans.corrupt(np.full((3, length), 7), noise, 10_000)
    assert got[0].shape == (3, inputs) and got[1].shape == (3, target)


@given(rows_of_noise)
@settings(deadline=None, max_examples=50)
def test_inputs_and_targets_are_the_row_again(case):
    length, density, span, seed = case
    rng = np.random.default_rng(seed)
    rows = rng.integers(3, 1000, (4, length))
    noise = spans.noise_mask(rng, 4, length, density, span)
    tokens_out, cuts = spans.counts(length, density, span)
    assert (noise.sum(-1) == tokens_out).all()
    assert (np.diff(noise.astype(int), axis=-1) == 1).sum(-1).tolist() == [cuts] * 4  # each span follows a gap
    assert not noise[:, 0].any()
    for row, inputs, targets in zip(rows, *spans.corrupt(rows, noise, 2000), strict=True):
        assert inputs[-1] == targets[-1] == spans.END
        cut = {}
        for token in targets[:-1].tolist():
            if token >= 1000:
                cut[token] = span_of = []
            else:
                span_of.append(token)
        assert list(cut) == [2000 - 1 - i for i in range(cuts)]
        whole = [t for token in inputs[:-1].tolist() for t in (cut.pop(token) if token >= 1000 else [token])]
        assert whole == row.tolist() and not cut


def test_segmentations_are_equally_likely():
    # 5 tokens in 3 parts: C(4, 2) = 6 ways, each in 1000 of 6000 rows; 5 sigma = 5 sqrt(6000 / 6 * 5 / 6) = 144.
    parts = spans._segments(np.random.default_rng(0), 6000, 5, 3)
    ways, times = np.unique(parts, axis=0, return_counts=True)
    assert len(ways) == 6 and (ways.sum(-1) == 5).all() and ways.min() == 1
    assert (abs(times - 1000) < 144).all()


def test_an_input_that_no_row_fills_is_refused():
    with pytest.raises(UserError, match=r"data\.input_length=2: .* set it to 3$"):
        spans.lengths(text_config(**{"data.input_length": 2}).data)
    # Half noise in spans of 1: 3 tokens leave 1 gap and its sentinel (3 with the end), 4 leave 2 and 2 (5).
    change = {"data.input_length": 4, "data.noise_density": 0.5, "data.mean_span": 1.0}
    with pytest.raises(UserError, match=r"data\.input_length=4: .* set it to 5$"):
        spans.lengths(text_config(**change).data)


# --- the stream ---


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def maker(corpus, config, seed=0, rows=slice(None)):
    return stream.batch_function(stream.SPANS, corpus, config, seed, rows)


def test_a_batch_depends_on_seed_and_step_only():
    config = text_config()
    corpus = toy(config)
    first = [maker(corpus, config, 3)(step) for step in (0, 1, 4)]
    late = maker(corpus, config, 3)
    assert same(late(4), first[2]) and same(late(0), first[0])
    assert not same(maker(corpus, config, 4)(0), first[0])
    assert not same(first[0], first[1])
    assert [a.dtype for a in first[0]] == [np.int32] * 3
    assert [a.shape for a in first[0]] == [(12, 64), (12, spans.lengths(config.data)[1]), (12,)]


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_parts_of_a_batch_do_not_overlap(processes):
    config, size = text_config(), 12 // processes
    corpus = toy(config)
    makers = [maker(corpus, config, rows=slice(p * size, (p + 1) * size)) for p in range(processes)]
    for step in range(3):
        parts = [make(step) for make in makers]
        joined = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
        assert same(joined, maker(corpus, config)(step))


def test_every_epoch_has_every_row_once(monkeypatch):
    monkeypatch.setattr(stream, "DECK", 100)  # batches cross decks
    config = text_config()
    make = stream.batch_function(stream.SPANS, toy(config), config, 0, slice(None))
    drawn = [pair for step in range(100) for pair in origin(make(step))]
    for language, rows in enumerate((40, 10, 5)):
        order = [int(row) for which, row in drawn if which == language]
        epochs = [order[i : i + rows] for i in range(0, len(order) - rows + 1, rows)]
        assert len(epochs) > 10
        assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
        assert epochs[0] != epochs[1]
    languages = [language for language, _ in drawn]
    assert languages[:100] != languages[100:200]  # nor do decks repeat


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_languages_are_drawn_by_size_and_temperature(temperature):
    config = text_config(**{"data.temperature": temperature, "batch_size": 1000})
    make = stream.batch_function(stream.SPANS, toy(config, (64, 16, 4)), config, 0, slice(None))
    drawn = np.bincount(np.concatenate([make(step).language for step in range(20)]))
    # temperature 1: 64 : 16 : 4; temperature 2: the roots, 8 : 4 : 2.
    ratio = np.array([64, 16, 4]) if temperature == 1 else np.array([8, 4, 2])
    expected = 20_000 * ratio / ratio.sum()
    assert (abs(drawn - expected) < 5 * np.sqrt(expected)).all()
    np.testing.assert_allclose(shares([64, 16, 4], temperature), ratio / ratio.sum())


def test_the_language_of_a_row_is_told():
    config = text_config()
    batch = maker(toy(config), config)(0)
    assert [language for language, _ in origin(batch)] == batch.language.tolist()


def test_noise_is_new_in_each_epoch():
    config = text_config(batch_size=1)
    makes = [stream.batch_function(stream.SPANS, toy(config, rows=(1,)), config, seed, slice(None)) for seed in (0, 1)]
    places = {tuple(np.flatnonzero(make(step).inputs[0] > 290)) for make in makes for step in range(20)}
    assert len(places) > 35  # and with each seed


def test_validation_is_even_and_fixed():
    config = text_config(**{"data.eval_rows": 20})
    batch = stream.validation(toy(config, (40, 10, 5)), config)
    assert np.bincount(batch.language).tolist() == [7, 7, 5]  # 20 = 7 + 7 + 6, and c has 5 only
    assert [row for language, row in origin(batch) if language == 0] == [0, 5, 11, 17, 22, 28, 34]  # 40 i / 7
    assert same(batch, stream.validation(toy(config, (40, 10, 5)), override(config, {"seed": 9, "batch_size": 3})))


# --- the bigram baseline ---


def test_bigram_by_hand(monkeypatch):
    # Training target 5 5 6 from the start 0: pairs 05, 55, 56; vocabulary 8.
    # Unigram: c(5) = 2, c(6) = 1, N = 3, 2 kinds: p(5) = (2 + 2/8) / 5 = 0.45, p(6) = (1 + 2/8) / 5 = 0.25, p(7) =
    # 0.05. p(5|0) = (1 + 1 * 0.45) / 2; p(7|5) = (0 + 2 * 0.05) / 4; nothing follows 7: p(6|7) = p(6).
    config = text_config()
    monkeypatch.setattr(ngram, "ROWS", 1)
    monkeypatch.setattr(
        ngram, "batch_function", lambda *_: lambda step: text.stream.TextBatch(None, np.array([[5, 5, 6]]), None)
    )
    monkeypatch.setattr(ngram, "validation", lambda *_: text.stream.TextBatch(None, np.array([[5, 7, 6]]), None))
    expected = -(math.log(1.45 / 2) + math.log(0.1 / 4) + math.log(0.25)) / 3
    assert ngram.bigram_loss(toy(config)._replace(vocabulary=8), config) == pytest.approx(expected)


def test_bigram_is_a_distribution_that_beats_the_uniform(tmp_path):
    config = text_config(**{"data.cache": str(tmp_path), "data.languages": ("qaa", "qab"), "batch_size": 64})
    corpus = text.load(config.data)
    loss = ngram.bigram_loss(corpus, config)
    assert 1 < loss < 0.7 * math.log(300)
    assert loss == ngram.bigram_loss(corpus, config)


# --- bytes ---


@given(st.text(st.characters(exclude_categories=["Cs"])))
@settings(deadline=None, max_examples=50)
def test_bytes_round_trip(sample):
    (ids,) = tokenizers.encode(BYTES, [sample])
    assert ids.tolist() == [b + 3 for b in sample.encode()]
    assert tokenizers.decode(BYTES, np.append(ids, [1, 299, 0])) == sample
