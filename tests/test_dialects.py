"""Dialects that share all words: what follows a word, what can be known of it, and what a reader can lose at least."""

import itertools
import math

import numpy as np
import pytest

from routed.contracts import TextBatch, UserError
from routed.papers.ours import dialect_floors, dialects
from routed.plan.checks import validate
from routed.plan.config import base
from routed.settings.tree import override
from routed.tasks import text
from routed.tasks.text import spans, stream


def config_of(**changes):
    flat = {
        "data.name": "dialects", "data.tokens": "bytes", "data.vocabulary": 300, "data.input_length": 16,
        "data.eval_rows": 60, "data.dialects": 3, "data.words": 8, "data.rows": 400, "router.vocabulary": 300,
    }  # fmt: skip
    return override(base(), flat | {name.replace("__", "."): value for name, value in changes.items()})


def documents(config, language, split="train"):
    return [*dialects.dialects(config.data).documents(language, split, lambda line: None)]


def test_two_dialects_of_three_words_by_hand():
    """Frequencies 6, 4 and 3 of 13. Side by side from 0 to 13: words 0 1 2 end at 6, 10, 13; 2 1 0 end at 3, 7, 13.

    So 0 shares [0, 3] with 2, [3, 6] with 1; 1 shares [6, 7] with itself, [7, 10] with 0; 2 shares [10, 13] with 0.
    And 0 1 2 above 1 2 0 (ends 4, 7, 13): 0 shares 4 with 1, 2 with 2; 1 shares [6, 7] with 2, [7, 10] with 0;
    2 shares 3 with 0.
    """
    frequency = dialects.frequencies(3)
    np.testing.assert_allclose(frequency, np.array([6, 4, 3]) / 13)
    orders = np.arange(3), np.array([2, 1, 0]), np.array([1, 2, 0])
    one, other = (dialects.shared(orders[0], below, frequency) for below in orders[1:])
    np.testing.assert_allclose(13 * one, [[0, 3, 3], [3, 1, 0], [3, 0, 0]], atol=1e-12)
    np.testing.assert_allclose(13 * other, [[0, 4, 2], [3, 0, 1], [3, 0, 0]], atol=1e-12)
    # Entropies: of word 0 in the one, ln 2; of word 1, that of (3/4, 1/4); after word 2 always comes 0.
    table = one / frequency[:, None]
    expected = 6 / 13 * math.log(2) + 4 / 13 * (3 / 4 * math.log(4 / 3) + 1 / 4 * math.log(4))
    assert dialects.entropy_rate(table, frequency) == pytest.approx(expected)


def test_all_dialects_have_the_same_words_equally_often():
    data = config_of(data__words=40, data__dialects=5).data
    frequency, tables = dialects.frequencies(40), dialects.tables(data)
    assert tables.min() >= 0 and frequency[0] > 10 * frequency[39] > 0
    np.testing.assert_allclose(tables.sum(2), 1)
    for table in tables:
        np.testing.assert_allclose(frequency @ table, frequency)  # and so at every place of a row
    for one, other in itertools.combinations(tables, 2):
        assert (frequency[:, None] * abs(one - other)).sum() > 1  # of at most 2: what follows is another


def test_text_is_that_of_its_tables():
    """Every row of its own, words by frequency at its first and its last place, pairs by the table of the dialect."""
    config = config_of(data__rows=20000, data__input_length=32)
    frequency, tables = dialects.frequencies(8), dialects.tables(config.data)
    for language, table in zip(dialects.names(config.data), tables, strict=True):
        rows = np.array([[ord(c) - dialects.FIRST for c in row] for row in documents(config, language)])
        assert rows.shape == (20000, spans.lengths(config.data)[0])
        for place in (0, -1):
            found = np.bincount(rows[:, place], minlength=8) / len(rows)
            np.testing.assert_allclose(found, frequency, atol=5 * math.sqrt(0.25 / len(rows)))
        pairs = np.zeros((8, 8))
        np.add.at(pairs, (rows[:, :-1], rows[:, 1:]), 1)
        np.testing.assert_allclose(pairs / pairs.sum(), frequency[:, None] * table, atol=0.003)
        # The entropy rate is what the text loses by its own table, and the blind one by the mean of all.
        before, word = rows[:, :-1].ravel(), rows[:, 1:].ravel()
        loss = -np.log(table[before, word]).mean()
        assert loss == pytest.approx(dialects.entropy_rate(table, frequency), abs=0.01)
    blind = [
        -np.log(tables.mean(0)[row[:-1], row[1:]]).mean()
        for language in dialects.names(config.data)
        for row in [np.array([[ord(c) - dialects.FIRST for c in row] for row in documents(config, language)]).T]
    ]
    assert np.mean(blind) == pytest.approx(dialects.entropy_rate(tables.mean(0), frequency), abs=0.01)


def test_text_follows_from_its_settings():
    config = config_of(data__rows=dialects.VALIDATION)
    first = documents(config, "d01")
    dialects._tables.cache_clear()
    assert documents(config, "d01") == first
    assert not {*first} & {*documents(config, "d01", "validation")}
    assert documents(config, "d00") != first
    prints = {dialects.dialects(config.data).fingerprint("d01", "train")}
    for change in (
        {"data__draw": 1},
        {"data__orders": 3},
        {"data__words": 9},
        {"data__rows": 401},
        {"data__input_length": 18},
    ):
        other = config_of(**{"data__rows": dialects.VALIDATION} | change)
        assert documents(other, "d01") != first, change
        prints.add(dialects.dialects(other.data).fingerprint("d01", "train"))
    assert len(prints) == 6
    # More dialects are added behind those that were there.
    assert documents(config_of(data__dialects=5, data__rows=dialects.VALIDATION), "d01") == first


def test_a_row_is_a_document_of_one_dialect(tmp_path):
    config = config_of(data__cache=str(tmp_path), data__languages=("d02", "d00"))
    corpus = text.load(config.data)
    assert corpus.languages == ("d02", "d00")
    for language, rows in zip(corpus.languages, corpus.train, strict=True):
        assert [bytes((row - 3).astype(np.uint8)).decode() for row in rows] == documents(config, language)


def all_rows(length, words):
    return np.array([*itertools.product(range(words), repeat=length)])


@pytest.mark.parametrize("length", [7, 8])
def test_floors_by_enumeration(tmp_path, length):
    """Bayes' rule over every row of three words and every noise that could have made an input."""
    changes = {
        "data.words": 3,
        "data.dialects": 2,
        "data.input_length": length,
        "data.noise_density": 0.4,
        "data.mean_span": 2.0,
    }
    config = override(config_of(), changes | {"data.cache": str(tmp_path), "data.eval_rows": 20})
    size, target = spans.lengths(config.data)
    count, cuts = spans.counts(size, 0.4, 2.0)
    assert cuts == 2 and count >= 3  # so that lengths are unknown
    batch = stream.validation(text.load(config.data), config)
    rows = all_rows(size, 3)
    tables = dialects.tables(config.data)
    chance = dialects.frequencies(3)[rows[:, 0]] * tables[:, rows[:, :-1], rows[:, 1:]].prod(2)  # [dialect, row]
    noises = [noise for noise in all_rows(size, 2).astype(bool) if _possible(noise, count, cuts)]
    both: dict[bytes, float] = {}
    read: dict[bytes, float] = {}
    for noise in noises:
        inputs, targets = spans.corrupt(rows + dialects.FIRST + 3, np.repeat(noise[None], len(rows), 0), 300)
        for i, (given, asked) in enumerate(zip(inputs, targets, strict=True)):
            p = chance[:, i].sum()
            read[given.tobytes()] = read.get(given.tobytes(), 0.0) + p
            both[given.tobytes() + asked.tobytes()] = both.get(given.tobytes() + asked.tobytes(), 0.0) + p
    losses = [
        -math.log(both[given.tobytes() + asked.tobytes()] / read[given.tobytes()])
        for given, asked in zip(batch.inputs, batch.targets, strict=True)
    ]
    found = dialect_floors.floors(config.data, batch)
    assert found["floor"] == pytest.approx(np.mean(losses) / target)
    assert found["floor_blind"] > found["floor"]


def _possible(noise, count, cuts):
    starts = np.diff(noise.astype(int), prepend=0) == 1
    return noise.sum() == count and starts.sum() == cuts and not noise[0] and noise[-1]


def test_a_row_by_hand():
    """Words 0 2 <gap> 1 <gap>, of which 1 0 and 2 were cut out."""
    config = config_of()
    zero, one, two = (word + dialects.FIRST + 3 for word in range(3))
    inputs, targets = [zero, two, 299, one, 298, 1], [299, one, zero, 298, two, 1]
    row = dialect_floors.cut(config.data, np.array(inputs), np.array(targets))
    assert row == dialect_floors.Cut([[0, 2], [1]], [[1, 0], [2]])
    assert dialect_floors._paths(row) == [[2, 1, 0, 1], [1, 2]]


def test_the_blind_floor_of_single_words_by_bayes_rule(tmp_path):
    """Two gaps of a word each: between u and v a word is P(u, w) P(w, v) of P^2(u, v), at the end P(u, w)."""
    changes = {"data.input_length": 9, "data.noise_density": 0.25, "data.mean_span": 1.0, "data.cache": str(tmp_path)}
    config = override(config_of(), changes)
    size, target = spans.lengths(config.data)
    assert spans.counts(size, 0.25, 1.0) == (2, 2)
    batch, table, losses = stream.validation(text.load(config.data), config), dialects.tables(config.data), []
    for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
        (u, v, y), (w, x) = _around(inputs), (int(targets[i]) - dialects.FIRST - 3 for i in (1, 3))
        inside = (table[:, u, w] * table[:, w, v]).mean() / (table[:, u] * table[:, :, v]).sum(1).mean()
        losses.append(-math.log(inside * table[:, y, x].mean()))
    found = dialect_floors.floors(config.data, batch)
    assert found["floor_blind"] == pytest.approx(np.mean(losses) / target)


def _around(inputs):
    """The words before and behind the first gap, and before the last, which ends the row."""
    (gap,) = np.flatnonzero(inputs == 299)
    return [int(inputs[i]) - dialects.FIRST - 3 for i in (gap - 1, gap + 1, -3)]


def test_one_dialect_has_one_floor(tmp_path):
    """Whoever knows that there is one dialect only is not blind."""
    config = config_of(data__languages=("d01",), data__cache=str(tmp_path))
    batch = stream.validation(text.load(config.data), config)
    found = dialect_floors.floors(config.data, TextBatch(*batch))
    assert found["floor"] == pytest.approx(found["floor_blind"])


def test_other_tokens_are_refused():
    competent = {"experts__name": "gated_ffn", "selection__name": "top_k", "selection__k": 2, "dispatch": "slots"}
    validate(config_of(**competent))
    with pytest.raises(UserError, match=r"data\.tokens='train': words are single characters; set it to bytes"):
        validate(config_of(data__tokens="train", **competent))
