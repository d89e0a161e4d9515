"""Text from files to tokens: mC4's shards, TFDS, artificial languages, tokenizers, and the cache."""

import gzip
import json
import os
import pathlib
import shutil

import numpy as np
import pytest
import sentencepiece
from absl import logging

from routed.contracts import UserError
from routed.plan.checks import validate
from routed.plan.config import base
from routed.settings.tree import override
from routed.tasks import text
from routed.tasks.text import artificial, cache, sources, spans, stream, tokenizers
from routed.tasks.text import documents as text_documents
from routed.tasks.text import mc4 as mc4_source

SENTENCE = "in the beginning was the word and the word was with the reader. "


def config_of(tmp_path, **changes):
    flat = {
        "data.tokens": "bytes",
        "data.vocabulary": 300,
        "data.input_length": 32,
        "data.cache": str(tmp_path / "cache"),
    }
    return override(base(), flat | {"batch_size": 4, "data.eval_rows": 4} | changes)


def shard(folder, stem, texts, index=0, count=1, level=9):
    folder.mkdir(exist_ok=True)
    path = folder / f"c4-{stem}.tfrecord-{index:05d}-of-{count:05d}.json.gz"
    lines = [
        json.dumps({"text": t, "timestamp": "1970-01-01T00:00:00Z", "url": "u"}, ensure_ascii=False) for t in texts
    ]
    path.write_bytes(gzip.compress("".join(line + "\n" for line in lines).encode(), level, mtime=0))
    return path


@pytest.fixture
def mc4(tmp_path):
    """Two languages of mC4's layout; en has two training shards."""
    folder = tmp_path / "mc4"
    shard(folder, "en", [SENTENCE + "one", SENTENCE + "two"], 0, 2)
    shard(folder, "en", [SENTENCE + "three"], 1, 2)
    shard(folder, "en-validation", [SENTENCE])
    shard(folder, "bg-Latn", ["v nachaloto be slovoto i slovoto beshe u chetetsa"])
    shard(folder, "bg-Latn-validation", ["i slovoto beshe chetets i be v nachaloto pri nego"])
    return folder


def load_mc4(tmp_path, folder, **changes):
    return text.load(config_of(tmp_path, **{"data.name": "mc4_jsonl", "data.directory": str(folder)} | changes).data)


def text_of(loaded, language, split="train"):
    rows = getattr(loaded, split)[loaded.languages.index(language)]
    return tokenizers.decode(loaded.tokenizer, rows.ravel())


@pytest.fixture
def warnings(monkeypatch):
    told = []
    monkeypatch.setattr(logging, "warning", lambda form, *args: told.append(form % args))
    return told


# --- what happens to files ---

FLIP = [0, -1, 200]  # of the header, of the last token, of one between


def flipped(path):
    content = bytearray(path.read_bytes())
    for place in FLIP:
        content[place % len(content)] ^= 0x80
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path):
    path.write_bytes(b"")


def foldered(path):
    path.unlink()
    (path / "inner").mkdir(parents=True)


# --- mC4's shards ---


def test_documents_follow_each_other_and_are_cut_into_rows(tmp_path, mc4):
    loaded = load_mc4(tmp_path, mc4)
    assert loaded.languages == ("bg-Latn", "en")
    length, _ = spans.lengths(config_of(tmp_path).data)
    whole = SENTENCE + "one" + SENTENCE + "two" + SENTENCE + "three"
    assert text_of(loaded, "en") == whole[: len(whole) // length * length]
    assert loaded.train[1].shape == (len(whole) // length, length)
    assert SENTENCE.startswith(text_of(loaded, "en", "validation"))
    assert load_mc4(tmp_path, mc4, **{"data.languages": ("en",)}).languages == ("en",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data.directory": ""}, r"data\.directory='': no such folder"),
        ({"data.directory": "/nowhere"}, r"data\.directory='/nowhere': no such folder"),
        ({"data.directory": "~nobody-here"}, "~nobody-here: no user has the name behind ~; write the whole path"),
        ({"data.languages": ("eng",)}, r"data\.languages: no 'eng' \(did you mean 'en'\?\); there are: bg-Latn, en"),
        ({"data.name": "mc4_json"}, r"data\.name='mc4_json': .*did you mean 'mc4_jsonl'"),
        ({"data.tokens": "/nowhere/sp.model"}, r"data\.tokens=/nowhere/sp\.model: .*train, bytes or characters"),
        ({"data.vocabulary": 259}, r"data\.vocabulary=259: 259 pieces and 2 sentinels do not fit; set it to 261"),
        ({"data.cache": "/dev/null/x"}, r"data\.cache=/dev/null/x: cannot be used .*name another folder"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(tmp_path, mc4, change, message):
    with pytest.raises(UserError, match=message) as error:
        load_mc4(tmp_path, mc4, **change)
    assert "\n" not in str(error.value)


def test_a_folder_without_shards_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no mC4 shards in it \(names like c4-LANG"):
        load_mc4(tmp_path, tmp_path)


def test_a_missing_shard_is_named(tmp_path, mc4):
    (mc4 / "c4-en.tfrecord-00001-of-00002.json.gz").unlink()
    with pytest.raises(UserError, match=r"1 of 2 shards of c4-en missing, first c4-en\.tfrecord-00001-of-00002"):
        load_mc4(tmp_path, mc4)
    whole = {"data.languages": ("bg-Latn",)}
    load_mc4(tmp_path, mc4, **whole)
    (mc4 / "c4-bg-Latn-validation.tfrecord-00000-of-00001.json.gz").unlink()
    with pytest.raises(UserError, match=r"1 of 1 shards of c4-bg-Latn-validation missing"):
        load_mc4(tmp_path, mc4, **whole)


def test_a_shard_that_is_trained_on_is_not_held_out(tmp_path, mc4):
    train, valid = (mc4 / f"c4-{stem}.tfrecord-00000-of-00001.json.gz" for stem in ("bg-Latn", "bg-Latn-validation"))
    valid.write_bytes(train.read_bytes())
    with pytest.raises(UserError, match=rf"{valid.name} is the same file as {train.name}: what is held out must not"):
        load_mc4(tmp_path, mc4)


def test_shards_of_two_sets_are_refused(tmp_path, mc4):
    shard(mc4, "en", [SENTENCE], 0, 3)
    with pytest.raises(UserError, match=r"c4-en has shards of 2 different sets \(of 2 and of 3\)"):
        load_mc4(tmp_path, mc4)


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("texts", [["too short"], []])
def test_an_empty_language_is_named(tmp_path, mc4, split, texts):
    shard(mc4, "bg-Latn" if split == "train" else "bg-Latn-validation", texts)
    size = len("".join(texts))
    with pytest.raises(UserError, match=rf"data\.languages: the {split} text of bg-Latn has {size} tokens"):
        load_mc4(tmp_path, mc4)


def truncate(path, documents=400):
    """A shard of many documents, cut in the middle of the file."""
    rng = np.random.default_rng(0)
    name = path.name.removeprefix("c4-").split(".")[0]
    whole = shard(path.parent, name, [f"{SENTENCE}{i} {rng.integers(1 << 60)}" for i in range(documents)])
    whole.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])


def test_a_truncated_shard_is_skipped_and_counted(tmp_path, mc4, warnings):
    truncate(mc4 / "c4-bg-Latn.tfrecord-00000-of-00001.json.gz")
    loaded = load_mc4(tmp_path, mc4)
    kept = text_of(loaded, "bg-Latn")
    assert kept.startswith(SENTENCE + "0 ") and SENTENCE + "100 " in kept and SENTENCE + "399 " not in kept
    assert len(warnings) == 1
    assert "1 damaged files" in warnings[0] and "c4-bg-Latn.tfrecord-00000" in warnings[0]
    assert int(warnings[0].split("after ")[1].split()[0]) == pytest.approx(kept.count(SENTENCE), abs=1)
    load_mc4(tmp_path, mc4)
    assert len(warnings) == 2  # from the cache, too


@pytest.mark.parametrize("how", [{"data.tokens": "bytes"}, {"data.tokens": "train"}])
def test_a_truncated_shard_is_refused(tmp_path, mc4, how):
    truncate(mc4 / "c4-bg-Latn.tfrecord-00000-of-00001.json.gz")
    refuse = {"data.damaged": "refuse", **how}
    for _ in range(2):
        with pytest.raises(
            UserError, match=r"c4-bg-Latn\.tfrecord.* is damaged after \d+ documents .*data\.damaged=skip"
        ):
            load_mc4(tmp_path, mc4, **refuse)
        load_mc4(tmp_path, mc4)  # and what was cached while skipping is refused all the same


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is damaged after 0 documents (empty file)"),
        (b"not gzip", "is damaged after 0 documents (Not a gzipped file"),
        (
            gzip.compress(b'{"text": 3}\n{"no": 1}\n[]\nx\n\xff\n{"text": "\\ud800"}\n{"text": "fine"}\n'),
            "has 6 lines that",
        ),
    ],
    ids=["empty", "no gzip", "lines"],
)
def test_other_damage_is_counted_as_well(tmp_path, mc4, warnings, content, message):
    (mc4 / "c4-en.tfrecord-00001-of-00002.json.gz").write_bytes(content)
    assert text_of(load_mc4(tmp_path, mc4), "en").startswith(SENTENCE)
    assert message in warnings[0]


SHARD = "c4-en.tfrecord-00001-of-00002.json.gz"


def looped(path):
    path.unlink()
    path.symlink_to(path)


def dangling(path):
    path.unlink()
    path.symlink_to("nowhere")


def piped(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("tokens", ["bytes", "train"])
@pytest.mark.parametrize("change", [foldered, looped, dangling, piped])
def test_what_is_no_file_is_named(tmp_path, mc4, change, tokens):
    change(mc4 / SHARD)
    with pytest.raises(
        UserError, match=rf"cannot read {mc4 / SHARD} \(.+\): make it readable, or leave its language out"
    ):
        load_mc4(tmp_path, mc4, **{"data.tokens": tokens})


def test_an_unreadable_shard_or_folder_is_named(tmp_path, mc4, monkeypatch):
    def denied(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(text_documents, "open", denied, raising=False)  # a test may run as root, who may read anything
        with pytest.raises(UserError, match=r"cannot read .*c4-bg-Latn\.tfrecord.* \(Permission denied\)"):
            load_mc4(tmp_path, mc4)
    monkeypatch.setattr(pathlib.Path, "iterdir", denied)
    with pytest.raises(UserError, match=r"data\.directory='.*': cannot be read \(Permission denied\); name the one"):
        load_mc4(tmp_path, mc4)


@pytest.mark.parametrize("line", [b"[" * 200_000, b'{"text": ' * 100_000, b"9" * 10_000], ids=["list", "dict", "int"])
def test_a_line_that_json_gives_up_on_is_counted(tmp_path, mc4, warnings, line):
    (mc4 / SHARD).write_bytes(gzip.compress(line + b'\n{"text": "fine"}\n'))
    assert text_of(load_mc4(tmp_path, mc4), "en").startswith(SENTENCE)
    assert "has 1 lines that are not JSON with a text, beside 1 that are" in warnings[0]


def test_a_line_without_end_does_not_fill_the_memory(tmp_path, mc4, warnings, monkeypatch):
    monkeypatch.setattr(mc4_source, "LONGEST", 1000)
    (mc4 / SHARD).write_bytes(gzip.compress(b"x" * 2500 + b'\n{"text": "fine"}\n'))
    load_mc4(tmp_path, mc4)
    assert "has 3 lines that are not JSON" in warnings[0]  # 1000 + 1000 + 501


def test_an_encoder_decoder_takes_plain_files(tmp_path):
    validate(
        config_of(
            tmp_path,
            **{
                "data.name": "files",
                "data.directory": "somewhere",
                "selection.name": "top_k",
                "selection.renormalise": False,
            },
        )
    )


@pytest.mark.parametrize(
    ("content", "tokens", "beginning"),
    [
        ("a n a r c h i s m _ o r i g i n " * 99, "characters", "'a n a r c h i s'"),  # as text8 is prepared
        ("60 109 101 100 105 97 " * 99, "bytes", "'60 109 101 100 105 97 60 109'"),  # and enwik8
        ("\u043c\u0438\u0440 " * 99, "characters", "''"),  # Russian, of which no letter is in the alphabet
    ],
)
def test_symbols_that_are_no_words_are_refused(tmp_path, content, tokens, beginning):
    for name in ("train", "valid", "test"):
        (tmp_path / f"{name}.txt").write_text(f"{content}{name}\n" * (name != "train") or content * 2, "utf-8")
    data = config_of(tmp_path, **{"data.name": "files", "data.directory": str(tmp_path), "data.tokens": tokens}).data
    with pytest.raises(
        UserError, match=rf"data.tokens='{tokens}': the train text of text is {beginning}.* take the raw text"
    ):
        text.load(data)


def test_a_tokenizer_is_trained_on_lines_of_any_length(tmp_path):
    words = "".join(f"{word} " for word in SENTENCE.split() * 40_000)  # 2 MB without a line's end
    for stem in ("en", "en-validation"):
        shard(tmp_path / "mc4", stem, [words + stem])
    loaded = load_mc4(tmp_path, tmp_path / "mc4", **{"data.tokens": "train"})
    assert text_of(loaded, "en").startswith(SENTENCE)


def test_text_that_no_tokenizer_can_be_trained_on_is_refused(tmp_path):
    for stem in ("en", "en-validation"):
        shard(tmp_path / "mc4", stem, ["\u200b" * 1000 * len(stem)])  # which the library takes for nothing
    with pytest.raises(
        UserError, match=r"data\.tokens=train: no tokenizer of \d+ pieces .*: set data\.tokens to bytes"
    ):
        load_mc4(tmp_path, tmp_path / "mc4", **{"data.tokens": "train"})


@pytest.mark.parametrize("tokens", ["bytes", "train"])
@pytest.mark.parametrize(
    "content",
    [b"", b"not gzip", gzip.compress(b"x\n"), gzip.compress(b'{"url": "u"}\n')],
    ids=["empty", "no gzip", "no JSON", "no text"],
)
def test_too_little_text_says_that_its_files_are_damaged(tmp_path, content, tokens):
    path = shard(tmp_path / "mc4", "de", [])
    shard(tmp_path / "mc4", "de-validation", [SENTENCE])
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"text (of|in any of) de.*: 1 damaged files: c4-de\.tfrecord-00000"):
        load_mc4(tmp_path, tmp_path / "mc4", **{"data.tokens": tokens})


def test_damage_is_refused_before_a_tokenizer_is_trained(tmp_path, mc4, monkeypatch):
    truncate(mc4 / "c4-bg-Latn.tfrecord-00000-of-00001.json.gz")
    monkeypatch.setattr(tokenizers, "_train", lambda *_: pytest.fail("trained"))
    with pytest.raises(UserError, match=r"data\.damaged=skip"):
        load_mc4(tmp_path, mc4, **{"data.damaged": "refuse", "data.tokens": "train"})


def test_changed_text_is_tokenised_again(tmp_path, mc4):
    texts = [SENTENCE * 200]
    size = shard(mc4, "en", texts, 1, 2, level=0).stat().st_size  # uncompressed
    first = load_mc4(tmp_path, mc4)
    assert load_mc4(tmp_path, shutil.copytree(mc4, tmp_path / "moved")).digest == first.digest
    texts = [SENTENCE * 100 + SENTENCE.upper() + SENTENCE * 99]  # only the checksum at the end of the file tells
    assert shard(mc4, "en", texts, 1, 2, level=0).stat().st_size == size
    second = load_mc4(tmp_path, mc4)
    assert second.digest != first.digest
    assert "IN THE" in text_of(second, "en") and "IN THE" not in text_of(first, "en")


@pytest.mark.parametrize("damage", [flipped, cut, emptied, foldered])
@pytest.mark.parametrize("suffix", [".npy", ".model", ".json"])
def test_a_damaged_cache_entry_is_named_and_made_again(tmp_path, warnings, suffix, damage):
    changes = {"data.name": "artificial", "data.tokens": "train", "data.vocabulary": 200, "data.languages": ("qaa",)}
    data = config_of(tmp_path, **changes).data
    first = text.load(data)
    expected = [np.array(rows) for rows in (*first.train, *first.validation)]
    entries = sorted((tmp_path / "cache").iterdir())
    assert [path.suffix for path in entries].count(".json") == 3  # a tokenizer and two splits
    wanted = {path: path.read_bytes() for path in entries}
    broken = [path for path in entries if path.suffix == suffix]
    for path in broken:
        damage(path)
    again = text.load(data)
    assert again.digest == first.digest
    for rows, before in zip((*again.train, *again.validation), expected, strict=True):
        np.testing.assert_array_equal(rows, before)
    assert len(warnings) == len(broken)
    for path in broken:
        assert any(path.stem in line and "is damaged" in line and "made again" in line for line in warnings)
    assert {path: path.read_bytes() for path in sorted((tmp_path / "cache").iterdir())} == wanted
    text.load(data)
    assert len(warnings) == len(broken)


# --- TFDS ---


def prepare(folder, validation=True):
    """c4/multilingual as TFDS prepares it, small."""
    tfds = pytest.importorskip("tensorflow_datasets")

    class C4(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("3.1.0")
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="multilingual")]  # noqa: RUF012
        name = "c4"
        __module__ = "c4"  # of no package, else TFDS wants importlib_resources, which it does not install

        def _info(self):
            fields = ("text", "timestamp", "url", "content-type", "content-length")
            features = tfds.features.FeaturesDict({field: tfds.features.Text() for field in fields})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {
                name: self._generate_examples(name)
                for language in ("aa", "bb")
                for name in (language, f"{language}-validation")
            }

        def _generate_examples(self, name):
            for i in range(300):
                yield (
                    i,
                    dict.fromkeys(("timestamp", "url", "content-type", "content-length"), "")
                    | {"text": f"{name} ü {i};"},
                )

    builder = C4(data_dir=str(folder), config="multilingual", file_format="array_record")
    builder.download_and_prepare()
    return pathlib.Path(builder.data_dir)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """TFDS's data_dir."""
    folder = tmp_path_factory.mktemp("tfds")
    prepare(folder)
    return folder


def load_tfds(tmp_path, folder, **changes):
    return text.load(config_of(tmp_path, **{"data.name": "tfds", "data.directory": str(folder)} | changes).data)


def test_tfds_reads_every_document(tmp_path, prepared):
    loaded = load_tfds(tmp_path, prepared)
    assert loaded.languages == ("aa", "bb")
    length = loaded.train[0].shape[1]
    for split, name in (("train", "bb"), ("validation", "bb-validation")):
        documents = text_of(loaded, "bb", split).split(";")
        expected = {f"{name} ü {i}" for i in range(300)}
        assert set(documents[:-1]) <= expected and len(set(documents[:-1])) == len(documents) - 1
        assert len(documents) > 300 - length / 10


def test_tfds_tells_how_to_convert_a_tfrecord_copy(tmp_path, prepared):
    folder = next(shutil.copytree(prepared, tmp_path / "copy").glob("c4/multilingual/*"))
    info = folder / "dataset_info.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | {"fileFormat": "tfrecord"}))
    with pytest.raises(
        UserError, match=rf"as tfrecord; convert it .*convert_format --dataset_version_dir={folder} --out_"
    ):
        load_tfds(tmp_path, tmp_path / "copy")
    # What the conversion leaves in the same folder: the other format beside the first.
    info.write_text(json.dumps(json.loads(info.read_text()) | {"alternativeFileFormats": ["array_record"]}))
    assert load_tfds(tmp_path, tmp_path / "copy").languages == ("aa", "bb")


def test_tfds_errors(tmp_path, prepared, warnings):
    with pytest.raises(UserError, match=r"no c4/multilingual/VERSION/dataset_info\.json in it"):
        load_tfds(tmp_path, tmp_path)
    with pytest.raises(UserError, match=r"no 'cc'; there are: aa, bb"):
        load_tfds(tmp_path, prepared, **{"data.languages": ("cc",)})
    copy = shutil.copytree(prepared, tmp_path / "copy")
    file = next(copy.rglob("c4-aa.array_record*"))
    content = bytearray(file.read_bytes())
    content[2000:2100] = b"x" * 100
    file.write_bytes(bytes(content))
    assert len(load_tfds(tmp_path, copy).train[0]) < len(load_tfds(tmp_path, prepared).train[0])
    assert "of 300 documents of" in warnings[0]
    with pytest.raises(UserError, match=r"split aa, cannot be read .*data\.damaged=skip"):
        load_tfds(tmp_path, copy, **{"data.damaged": "refuse"})
    file.unlink()
    with pytest.raises(UserError, match=r"1 shards of aa missing, first .*c4-aa\.array_record"):
        load_tfds(tmp_path, copy)


# --- artificial languages ---


def documents(language, split="train"):
    return artificial._texts(language, split)


def words(language):
    return {word.rstrip(".") for document in documents(language) for word in document.split()}


def test_artificial_languages_share_alphabets_and_words():
    letters = {language: set("".join(words(language))) for language in artificial.LANGUAGES}
    assert letters["qaa"] == letters["qab"] == letters["qac"]  # a letter does not tell the language
    assert not letters["qaa"] & letters["qba"]
    assert len(words("qaa") & words("qab")) < 0.1 * len(words("qaa"))
    assert len(words("qaa") & words("qac")) > 0.8 * len(words("qaa"))  # nor does a word: the order does


def test_grammar_tells_languages_of_the_same_words_apart():
    lexicon = artificial._lexicon("latin", 0).tolist()
    kind = {word: (i - 1) // artificial.RANKS for i, word in enumerate(lexicon)}

    def follows(language, split="train"):
        """Shares of the pairs (class, class of the next word) [C * C]."""
        pairs = np.zeros((artificial.CLASSES, artificial.CLASSES))
        for document in documents(language, split):
            for sentence in document.split("."):
                kinds = [kind[word] for word in sentence.split()]
                np.add.at(pairs, (kinds[:-1], kinds[1:]), 1)
        return pairs.ravel() / pairs.sum()

    qaa = follows("qaa")
    assert abs(qaa - follows("qaa", "validation")).sum() < 0.1
    assert abs(qaa - follows("qac")).sum() > 0.5


def test_artificial_text_is_zipfian_and_enough():
    for language in artificial.LANGUAGES:
        train = documents(language)
        assert len("".join(train).encode()) > 250_000
        assert not set(train) & set(documents(language, "validation"))
    _, counts = np.unique(" ".join(documents("qaa")).split(), return_counts=True)
    assert counts.max() > 20 * np.median(counts)


def test_artificial_text_is_the_same_in_every_process():
    artificial._texts.cache_clear()
    before = documents("qca")[:3]
    artificial._texts.cache_clear()
    assert documents("qca")[:3] == before
    assert before != documents("qcb")[:3]


# --- tokenizers and the cache ---


def test_a_tokenizer_is_trained_once(tmp_path, monkeypatch):
    changes = {
        "data.name": "artificial",
        "data.tokens": "train",
        "data.vocabulary": 200,
        "data.languages": ("qaa", "qba"),
    }
    config = config_of(tmp_path, **changes)
    first = text.load(config.data)
    assert first.tokenizer.pieces == 200 - 2
    document = documents("qba", "validation")[0]
    (ids,) = tokenizers.encode(first.tokenizer, [document])
    assert tokenizers.decode(first.tokenizer, ids) == document and 2 not in ids
    assert len(ids) < len(document)
    again = tokenizers._train(
        tokenizers._sample(config.data, sources.SOURCES["artificial"].open(config.data)), 198, config.data
    )
    assert again == first.tokenizer.model  # training is deterministic

    monkeypatch.setattr(tokenizers, "_train", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr(tokenizers, "encode", lambda *_: pytest.fail("tokenised again"))
    second = text.load(config.data)
    assert second.digest == first.digest
    assert all(np.array_equal(a, b) for a, b in zip(first.train, second.train, strict=True))
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        text.load(override(config, {"data.vocabulary": 210}).data)


def test_an_interrupted_build_leaves_nothing_half_made(tmp_path, mc4, monkeypatch):
    real, calls = tokenizers.encode, []

    def interrupted(tokenizer, texts):
        calls.append(texts)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(tokenizer, texts)

    monkeypatch.setattr(tokenizers, "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_mc4(tmp_path, mc4)
    left = list((tmp_path / "cache").iterdir())
    assert len(left) == 4 and {path.suffix for path in left} == {".npy", ".json"}  # two texts, whole
    load_mc4(tmp_path, mc4)
    assert len(calls) == 3 + 2  # the interrupted one and the one after


def small_model(folder, **options):
    path = folder / "sp.model"
    with open(path, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([SENTENCE] * 50), model_writer=file, vocab_size=40, hard_vocab_limit=False,
            minloglevel=2, **options,
        )  # fmt: skip
    return path


def test_a_given_model_may_be_smaller_than_the_vocabulary(tmp_path, mc4):
    path = small_model(tmp_path, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    english = {"data.tokens": str(path), "data.languages": ("en",)}
    loaded = load_mc4(tmp_path, mc4, **english, **{"data.vocabulary": 250_112, "data.input_length": 16})
    pieces = loaded.tokenizer.pieces
    assert pieces < 100 and loaded.vocabulary == 250_112
    assert text_of(loaded, "en").startswith("in the beginning was the word")
    config = config_of(tmp_path, **{"data.vocabulary": 250_112, "data.input_length": 16})
    batch = stream.batch_function(stream.SPANS, loaded, config, 0, slice(None))(0)
    assert batch.targets.max() == 250_111 and sorted(set(batch.inputs.ravel()))[-2] < pieces  # 16 tokens: one span
    with pytest.raises(
        UserError, match=rf"data\.vocabulary={pieces + 1}: {pieces} pieces .* set it to {pieces + 2} or"
    ):
        load_mc4(tmp_path, mc4, **english, **{"data.vocabulary": pieces + 1})


def test_models_of_another_convention_are_refused(tmp_path, mc4):
    path = small_model(tmp_path)
    with pytest.raises(UserError, match=r"have the ids \(-1, 2, 0\); T5's \(0, 1, 2\) are needed"):
        load_mc4(tmp_path, mc4, **{"data.tokens": str(path)})
    path.write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"sp\.model is not a SentencePiece model"):
        load_mc4(tmp_path, mc4, **{"data.tokens": str(path)})


@pytest.mark.parametrize("letters", [50, 600])
def test_a_vocabulary_too_small_to_train_names_one_that_is_not(tmp_path, letters):
    alphabet = [chr(0x4E00 + i) for i in range(letters)]
    rng = np.random.default_rng(0)
    for stem in ("zh", "zh-validation"):
        shard(tmp_path / "mc4", stem, ["".join(rng.choice(alphabet, 40)) for _ in range(200)])
    few = {"data.tokens": "train", "data.vocabulary": 60}
    characters = letters + 1  # and the space
    with pytest.raises(UserError, match=rf"data\.vocabulary=60: too few ids .* of {characters} different") as error:
        load_mc4(tmp_path, tmp_path / "mc4", **few)
    enough = int(str(error.value).split("set it to ")[1].split()[0])
    loaded = load_mc4(tmp_path, tmp_path / "mc4", **few | {"data.vocabulary": enough})
    assert loaded.tokenizer.pieces <= enough - 2
    (unseen,) = tokenizers.encode(loaded.tokenizer, ["Ω"])
    assert (2 in unseen) == (letters == 50)  # characters too many for pieces are spelt in bytes, and so is any other


def test_the_sample_is_spread_over_the_text_and_of_the_size_asked():
    lines = tokenizers._thinned((f"{i:03d}" + "x" * 97 for i in range(1000)), budget=5_000)
    assert len(lines) == 50  # 5000 / 100
    numbers = np.array([int(line[:3]) for line in lines])
    assert numbers[0] == 0 and numbers[-1] > 950 and np.diff(numbers).max() <= 40
    assert len(tokenizers._thinned(["a\nb", "c"], 1000)) == 3
    assert tokenizers._thinned([], 1000) == []


def test_two_processes_may_store_the_same_file(tmp_path, monkeypatch):
    path = tmp_path / "file"

    def slow(beside):
        with open(beside, "wb") as file:
            file.write(b"fi")
            with monkeypatch.context() as other:
                other.setattr(cache.os, "getpid", lambda: 2)
                cache.store(path, b"second", {"by": 2})
            file.write(b"rst")

    monkeypatch.setattr(cache.os, "getpid", lambda: 1)
    cache.store(path, slow, {"by": 1})
    assert path.read_bytes() == b"first" and cache.note_of(path) == {"by": 1}
    assert sorted(tmp_path.iterdir()) == [path, path.with_suffix(".json")]


def test_an_edit_anywhere_in_plain_text_is_another_text(tmp_path):
    """Of the same size, in the middle of a file that is longer than what is read of both ends of others."""
    file = tmp_path / "train.txt"
    file.write_bytes(b"a" * 3 * text_documents.EDGE)
    before = text_documents.whole_fingerprint(file)
    file.write_bytes(b"a" * text_documents.EDGE + b"b" + b"a" * (2 * text_documents.EDGE - 1))
    assert text_documents.whole_fingerprint(file) != before
