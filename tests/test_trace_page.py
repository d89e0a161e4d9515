"""The page of a trace: its findings name the layers where something was planted, and no others; its view of tokens."""

import base64
import json
import re

import numpy as np
import pandas as pd
import pytest

import routed
from routed import trace
from routed.contracts import UserError
from routed.tasks.text import tokenizers
from routed.trace import __main__ as command
from routed.trace import analysis, evidence, findings, tokens, view, words

ROWS, LENGTH, EXPERTS, IDS = 40, 48, 8, 30
SEQUENCE, POSITION = np.repeat(np.arange(ROWS), LENGTH), np.tile(np.arange(LENGTH), ROWS)
LABEL = np.array(["de", "en"])[SEQUENCE % 2]
TOKEN = np.random.default_rng(0).integers(0, IDS, ROWS * LENGTH)
CODES = {"token": TOKEN, "language": SEQUENCE % 2, "position": np.frexp(POSITION.astype(np.float32))[1]}


def planted(*kinds, seed=0, k=1):
    """Choices [layers, T, k]: of a table by the kind's code with noise, by chance, or in runs and topics of a text."""
    random, layers = np.random.default_rng(seed), []
    for kind in kinds:
        scores = random.gumbel(size=(ROWS * LENGTH, EXPERTS))
        if kind in CODES:
            scores += 3 * random.normal(size=(IDS, EXPERTS))[CODES[kind]]
        if kind == "topic":
            scores += 3 * random.normal(size=(ROWS, EXPERTS))[SEQUENCE]
        if kind == "runs":  # each token is like the one before
            for row in range(1, len(scores)):
                if POSITION[row]:
                    scores[row] = 0.97 * scores[row - 1] + 0.25 * scores[row]
        layers.append(np.argsort(-scores, 1)[:, :k])
    return np.stack(layers)


def said(tmp_path, experts, **more):
    given = {"num_experts": EXPERTS, "token_ids": TOKEN, "sequence": SEQUENCE, "labels": {"language": LABEL}} | more
    return analysis.analyse([trace.write(tmp_path / "trace", experts=experts, **given)])


def first(result, name):
    (found,) = [found.text for found in findings.findings(result) if found.numbers == (f"mi.{name}",)]
    return found


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("name", CODES)
def test_the_sentence_names_the_layers_that_follow(name, k, tmp_path):
    """Layers 1 and 3 follow one code. Of the other codes the sentences say that they are not told from chance."""
    result = said(tmp_path, planted("random", name, "random", name, k=k))
    shown = "token id" if name == "token" else name
    number = r"(0\.[0-9]+|1\.[0-9]+|[12])"
    told = rf"Layers 1 and 3 follow the {shown}: {number} of at most {number} nats beyond chance in layer [13]\."
    assert re.fullmatch(told + r" Layers 0 and 2 are not told from chance\.", first(result, name))
    for other in CODES.keys() - {name}:
        text = first(result, other)
        assert text.startswith("No layer is seen to follow the ") and text.endswith("none is told from chance.")


@pytest.mark.parametrize("kind", ["random", "topic", "runs"])
def test_what_follows_nothing_is_not_told_from_chance(kind, tmp_path):
    """A topic of each sequence is no language, and runs of one expert are no position, however few sequences."""
    for rows in (6, ROWS):
        here = np.isin(SEQUENCE, range(rows))
        some = {"sequence": SEQUENCE[here], "token_ids": TOKEN[here], "labels": {"language": LABEL[here]}}
        result = said(tmp_path, planted(*[kind] * 6)[:, here], **some)
        for name in CODES:
            assert "none is told from chance" in first(result, name), (rows, first(result, name))


def test_a_label_beyond_the_token_id_is_told_from_one_through_it(tmp_path):
    """Language de has ids 0 to 19, en 10 to 29: a router of ids carries the language, through the ids alone."""
    random = np.random.default_rng(1)
    ids = random.integers(0, 20, ROWS * LENGTH) + 10 * (SEQUENCE % 2)
    by_id = random.integers(0, EXPERTS, IDS)[ids]
    by_language = 4 * (SEQUENCE % 2) + random.integers(0, 4, ROWS * LENGTH)
    experts = np.stack([by_id, by_language])[:, :, None]
    (found,) = [found for found in findings.findings(said(tmp_path, experts, token_ids=ids))
                if found.numbers == ("mi.language",)]  # fmt: skip
    assert found.text.startswith("Both layers follow the language: 0.67 of at most 0.67 nats")  # ln 2 - .02
    assert "Layer 1 does so beyond the token id" in found.more
    assert "Layer 0 is not seen to know more than the token id tells" in found.more
    apart = 20 * (SEQUENCE % 2) + random.integers(0, 10, ROWS * LENGTH)
    (found,) = [found for found in findings.findings(said(tmp_path, experts, token_ids=apart))
                if found.numbers == ("mi.language",)]  # fmt: skip
    assert "a token id nearly names the language" in found.more and "beyond" not in found.more


def test_without_sequences_nothing_is_told_from_chance(tmp_path):
    result = said(tmp_path, planted("token"), sequence=None)
    assert result.table.told.isna().all()
    assert first(result, "token").startswith("Whether experts follow the token id is not told from chance")


def test_four_sequences_of_two_languages_prove_nothing(tmp_path):
    """Two of the 6 permutations of de, en, de, en have the value itself: a third of them are as large."""
    here = SEQUENCE < 4
    some = {"sequence": SEQUENCE[here], "token_ids": TOKEN[here], "labels": {"language": LABEL[here]}}
    result = said(tmp_path, planted("language")[:, here], **some)
    assert not result.table[result.table.number == "mi.language"].told.item()


def test_codes_are_rotated_in_their_sequences():
    """Each rotated sequence has the neighbours of its text, but at the one place where it was cut."""
    order = tokens.shuffle_within(SEQUENCE, np.random.default_rng(0)).reshape(ROWS, LENGTH)
    assert (np.sort(order, 1) == np.arange(ROWS * LENGTH).reshape(ROWS, LENGTH)).all()
    assert ((np.diff(order, axis=1) != 1).sum(1) <= 1).all()
    assert len(set(order[:, 0] % LENGTH)) > 10
    for ids in (np.arange(50), np.arange(51) // 2 * 2, np.minimum(np.arange(50), 48)):  # singles, pairs, and both
        short = tokens.shuffle_within(ids, np.random.default_rng(0))
        assert sorted(short) == list(range(len(ids))) and (short == np.arange(len(ids))).sum() <= 5


@pytest.mark.parametrize(
    ("layers", "short"),
    [
        (["model.layers.3.mlp.gate", "model.layers.10.mlp.gate"], ["3", "10"]),
        (["encoder_1", "encoder_3"], ["1", "3"]),
        (["encoder_1", "decoder_1"], ["encoder_1", "decoder_1"]),
        (["a.0.b.1", "a.1.b.2"], ["a.0.b.1", "a.1.b.2"]),  # two numbers differ
        (["only.7"], ["only.7"]),
    ],
)
def test_names_of_layers_are_short(layers, short):
    assert evidence.short_names(layers) == short


@pytest.mark.parametrize(
    ("indices", "text"),
    [([2], "layer 2"), ([0, 2], "layers 0 and 2"), ([0, 1, 2, 4], "layers 0 to 2 and 4"),
     ([0, 1, 3, 5, 6, 7], "layers 0, 1, 3 and 5 to 7"), ([*range(9)], "all 9 layers")],
)  # fmt: skip
def test_layers_are_listed(indices, text):
    assert evidence.among(indices, [*"012345678"]) == text


def test_the_number_in_a_sentence_is_that_of_a_layer_which_it_names():
    """Layer 0 has more nats, .3 of 4: it follows weakly. Layer 1 has .2 of 1, and is the one that is named."""
    values = (np.array(row) for row in ([0.3, 0.2, 0.9], [0.0, 0.0, 0.0], [4.0, 1.0, 1.0], [0.0, 0.0, 0.0]))
    layers = evidence.Followed(*values, np.array([True, True, False]))
    assert (layers.strong.tolist(), layers.weak.tolist(), layers.untold.tolist(), layers.top) == ([1], [0], [2], 1)
    assert layers._replace(is_told=np.array([True, False, False])).top == 0
    assert layers._replace(is_told=None).top == 2


def test_a_layer_is_told_by_its_error_and_the_number_of_layers():
    """Error (high - low) / 3.92 = 1: t of 100 groups, 2.5 % one-sided, is 1.98 for one layer, 2.63 for five."""

    def table(beyond, layers):
        return pd.DataFrame({"layer": [*"abcde"[:layers]], "number": "mi.x", "value": 1.0 + beyond, "chance": 1.0,
                             "low": beyond - 0.96, "high": beyond + 2.96})  # fmt: skip

    assert evidence.told(table(2.1, 1), 100, {}) == [True] and evidence.told(table(1.9, 1), 100, {}) == [False]
    assert evidence.told(table(2.5, 5), 100, {}) == [False] * 5 and evidence.told(table(2.8, 5), 100, {}) == [True] * 5
    assert evidence.told(table(2.8, 1), 100, {("a", "mi.x"): 3.9}) == [False]  # a permutation has more than 3.8


HOSTILE = (
    *("<script>alert(1)</script>", "</script>", "a\u202eb", "\x00\x1b[0m", "\u05e9\u05dc\u05d5\u05dd", "\n", "  "),
    *("\u0301", "\ud800", "&amp;\u2028"),
)


def data_of(page):
    (text,) = re.findall(r'<script type="application/json" id="view-data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def test_text_of_any_kind_reaches_the_page_as_text(tmp_path):
    """Two scripts are the page's own; no letter that could end them, or turn the text around, comes from a word."""
    vocabulary = [*HOSTILE, *(f"w{i}" for i in range(IDS))]
    evil = np.where(LABEL == "de", "</script><img src=x>", "en")
    routed.analyse(experts=planted("token"), num_experts=EXPERTS, token_ids=TOKEN, sequence=SEQUENCE,
                   labels={"<b>label": evil}, vocabulary=vocabulary, layers=["</script>0"], out=tmp_path)  # fmt: skip
    page = (tmp_path / "report.html").read_text("utf-8")
    assert page.count("<script") == 2 and page.count("</script") == 2 and "<img" not in page and "<b>label" not in page
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", page)
    shown = dict(zip(data_of(page)["ids"], data_of(page)["words"], strict=True))
    assert shown[0] == "<script>alert(1)</script"[:24] + "…" and shown[2] == "a‹202E›b" and shown[3] == "␀␛[0m"
    assert shown[4] == "שלום" and shown[5] == "↵" and shown[6] == "␣␣" and shown[7] == "◌\u0301"
    assert shown[8] in ("?", "‹D800›") and "\u2028" not in page.replace("\\u2028", "")


def test_the_view_has_the_experts_of_the_trace(tmp_path):
    """Each shown token has its experts, and its score within 1/255 of their range."""
    scores = np.random.default_rng(3).normal(size=(3, ROWS * LENGTH, EXPERTS)).astype(np.float32)
    routed.analyse(scores, k=2, token_ids=TOKEN, sequence=SEQUENCE, labels={"language": LABEL}, out=tmp_path)
    data = data_of((tmp_path / "report.html").read_text("utf-8"))
    count = len(data["position"])
    rows = np.concatenate([e["sequence"] * LENGTH + np.arange(e["tokens"]) for e in data["excerpts"]])
    assert count == sum(e["tokens"] for e in data["excerpts"]) and len(data["excerpts"]) >= 16

    def array(text):
        return np.frombuffer(base64.b64decode(text), np.uint8).reshape(3, count, 2)

    order = np.argsort(-scores, 2, kind="stable")[:, :, :2]
    np.testing.assert_array_equal(array(data["expert"]).astype(int) - 1, order[:, rows])
    low, high = np.array(data["scores"]["ends"]).T
    for layer in range(3):
        found = low[layer] + (high[layer] - low[layer]) * array(data["scores"]["parts"])[layer] / 255
        expected = np.take_along_axis(scores[layer], order[layer], 1)[rows]
        np.testing.assert_allclose(found, expected, atol=(high[layer] - low[layer]) / 255)
    names = data["labels"]["language"]["names"]
    assert [names[code] for code in data["labels"]["language"]["code"]] == LABEL[rows].tolist()
    starts = np.cumsum([0, *(e["tokens"] for e in data["excerpts"])])[:-1]
    assert abs((LABEL[rows][starts] == "de").sum() - len(starts) / 2) <= 1  # as many of each label
    assert "shown by its id: give vocabulary" in (tmp_path / "report.html").read_text("utf-8")


def test_the_view_is_bounded_and_shows_what_changed(tmp_path):
    """Checkpoints differ in sequence 7 alone, and its excerpts come first; 60 layers, 16 experts a token."""
    random = np.random.default_rng(4)
    experts = np.stack([random.permuted(np.tile(np.arange(32), (ROWS * LENGTH, 1)), axis=1)[:, :16]] * 60)
    changed = experts.copy()
    changed[:, SEQUENCE == 7] = (changed[:, SEQUENCE == 7] + 16) % 32
    both = [trace.write(tmp_path / name, experts=some, num_experts=32, token_ids=TOKEN, sequence=SEQUENCE)
            for name, some in (("old", experts), ("new", changed))]  # fmt: skip
    result = analysis.Analysis(*[None] * len(analysis.Analysis._fields))._replace(
        traces=tuple(both), trace=both[1], tokens=tokens.tokens_of(both[1])
    )
    text = view.view_of(result, {})
    data = json.loads(text)
    assert len(text) < 1_000_000 and data["shown"] == view.SHOWN and data["left_out"] == 8
    assert data["before_name"] == "old" and len(data["before"]) == len(data["expert"])
    assert data["excerpts"][0]["changed"] and data["excerpts"][0]["sequence"] == 7
    assert {e["changed"] for e in data["excerpts"]} == {True, False}


def test_words_come_from_vocabularies_of_many_kinds(tmp_path):
    (tmp_path / "vocabulary.txt").write_text("a\nb\nc\n", "utf-8")
    (tmp_path / "list.json").write_text('["a", "b", "c"]', "utf-8")
    (tmp_path / "vocab.json").write_text('{"c": 2, "a": 0, "b": 1}', "utf-8")
    files = [tmp_path / name for name in ("vocabulary.txt", "list.json", "vocab.json")]
    (tmp_path / "by_id.json").write_text('{"2": "c", "0": "a", "1": "b"}', "utf-8")
    files.append(tmp_path / "by_id.json")
    dicts = ({0: "a", 1: "b", 2: "c"}, {"c": 2, "a": 0, "b": 1})
    for source in (["a", "b", "c"], *dicts, *files, *map(str, files)):
        found = words.words_of(source, [2, 0, 9])
        assert (found[2], found[0]) == ("c", "a") and 9 not in found
    assert words.words_of("bytes", [65, 200]) == {65: "A", 200: "\\xc8"}
    assert words.words_of(["x" * 200], [0]) == {0: "x" * words.LONGEST}
    (tmp_path / "broken.json").write_text("{", "utf-8")
    for source, message in (
        (tmp_path / "broken.json", "broken.json"),
        (3, "int is no vocabulary"),
        ([5], "id 0 has"),
        ({7: "a"}, "it has none of the trace's token ids, such as 0"),
    ):
        with pytest.raises(UserError, match=message) as error:
            words.words_of(source, [0])
        assert "\n" not in str(error.value) and "give a list of words by id" in str(error.value)


def test_words_of_own_tokenizers():
    by_byte = tokenizers.words(tokenizers.Tokenizer(259, b"", "bytes"))
    assert (by_byte[:3], by_byte[3 + 97], by_byte[3 + 0xC3], len(by_byte)) == (
        ["<pad>", "</s>", "<unk>"],
        "a",
        "\\xc3",
        259,
    )
    letters = tokenizers.words(tokenizers.CHARACTERS)
    assert letters[3] == " " and letters[4] == "a" and len(letters) == tokenizers.CHARACTERS.pieces


def test_a_trace_keeps_the_words_of_its_ids(tmp_path):
    given = {"experts": planted("token"), "num_experts": EXPERTS, "token_ids": TOKEN}
    vocabulary = [f"w{i}" for i in range(1000)]
    stored = trace.write(tmp_path / "a", vocabulary=vocabulary, **given)
    assert words.load(stored.folder) == {i: f"w{i}" for i in range(IDS)}  # and not all thousand
    for begin in (0, 960):
        here = slice(begin, begin + 960)
        part = {"experts": given["experts"][:, here], "num_experts": EXPERTS, "token_ids": TOKEN[here]}
        trace.append(tmp_path / "b", vocabulary=vocabulary, **part)
    assert words.load(trace.finish(tmp_path / "b").folder) == words.load(stored.folder)
    trace.write(tmp_path / "a", **given)
    assert words.load(tmp_path / "a") == {}  # those of the trace before are not this trace's
    with pytest.raises(UserError, match="vocabulary: its words are those of token ids: give token_ids too"):
        trace.write(tmp_path / "c", experts=given["experts"], num_experts=EXPERTS, vocabulary=vocabulary)
    (stored.folder / words.WORDS).write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"words.parquet.*: write the trace again"):
        words.load(stored.folder)


def test_the_command_takes_words(tmp_path, monkeypatch):
    trace.write(tmp_path / "t", experts=planted("token"), num_experts=EXPERTS, token_ids=TOKEN, sequence=SEQUENCE)
    (tmp_path / "vocabulary.txt").write_text("\n".join(f"word{i}" for i in range(IDS)), "utf-8")
    monkeypatch.setattr(command.files, "tell", lambda text: None)
    command.flags.FLAGS(["trace", f"--vocabulary={tmp_path / 'vocabulary.txt'}"])
    try:
        command.main(["trace", "report", str(tmp_path / "t")])
    finally:
        command.flags.FLAGS.unparse_flags()
    assert "word7" in data_of((tmp_path / "t" / "report.html").read_text("utf-8"))["words"]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((6000, 3, 8), r"6,000 layers of 3 tokens: its axes must be \[layers, tokens, experts\].*swapaxes\(0, 1\)"),
        ((3, 8, 6000), r"8 tokens with 6,000 entries each: .*swapaxes\(1, 2\)"),
    ],
)
def test_swapped_axes_are_refused_before_a_layer_is_written(shape, message, tmp_path):
    with pytest.raises(UserError, match=message):
        routed.analyse(np.broadcast_to(np.float32(0), shape), k=2, out=tmp_path / "new")
    assert not (tmp_path / "new").exists()
