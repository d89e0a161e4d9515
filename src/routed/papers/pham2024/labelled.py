"""Texts with a class, from plain tables, for fine-tuning a language model.

A row is the class, then the tokens.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from absl import logging as log
from jaxtyping import Integer
from ml_collections import ConfigDict

from routed.contracts import TextBatch, UserError
from routed.papers.labelled_tables import LABELS, Row, read_table
from routed.settings.setting import Setting, refuse
from routed.system import files
from routed.tasks.text import cache, tokenizers
from routed.tasks.text.corpus import Corpus
from routed.tasks.text.documents import Source
from routed.tasks.text.stream import Form

#: The only language: the languages of a table are ignored.
LANGUAGE = "text"

#: Without a validation table one of so many training texts is held out for validation.
EVERY = 10
#: part -> its purpose, for messages.
PURPOSE = {"train": "train on", "valid": "validate on", "test": "test on"}

#: Texts of the artificial table, by part.
ARTIFICIAL = {"train": 400, "valid": 40, "test": 40}

#: The value of `data.table` for a generated table.
GENERATED = "artificial"


class Tables(NamedTuple):
    """A source of labelled texts as a part; `about(data)` is the end of the sentence that describes the data."""

    about: Callable[[ConfigDict], str]
    check: Callable[[ConfigDict], None]
    tokens: str = "hidden"
    provides: frozenset[str] = frozenset({"token_id", "previous_id"})
    settings: Mapping[str, Setting] = {}
    reads: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()


def load(data: ConfigDict) -> Corpus:
    """Loads the texts of `data.table` with the classes `data.labels`, as rows of 1 + `data.input_length` numbers.

    NAME-train.tsv and NAME-test.tsv have a head with `text` and `label`. NAME-valid.tsv is optional; without this file
    a tenth of the training texts is held out. A validation text that is a training text is left out, and so is a test
    text of either part. Texts with another label, without a label or without a word are left out, and the log counts
    them. A long text is cut at its end; pads stand before a short text, since the model reads the last token.

    Raises:
      UserError: a table that is missing, damaged, has no text of a class, or mostly texts without a label or a word.
    """
    tables = _artificial(data.labels) if data.table == GENERATED else _tables(data)
    # The tokenizer comes from the text of pretraining (`check`), not from the table.
    tokenizer = tokenizers.tokenizer(data, Source((), lambda *_: iter(()), lambda *_: "", len), 0)
    rows_of = {part: _rows(data, tokenizer, rows, part) for part, rows in tables.items()}
    digests = [cache.key(*(f"{row.label}\t{row.text}" for row in rows)) for rows in tables.values()]
    digest = cache.key(tokenizer.digest, data.table, str(data.input_length), *digests)
    train, valid, test = ((rows_of[part],) for part in ("train", "valid", "test"))
    return Corpus((LANGUAGE,), train, valid, data.vocabulary, digest, tokenizer, test)


def check(config: ConfigDict) -> None:
    """Refuses a missing folder name, and a tokenizer trained on the table.

    Raises:
      UserError: names the key.
    """
    data = config.data
    if data.table != GENERATED and not data.directory:
        raise UserError(f"config key data.directory is empty: name the folder with the table {data.table}-train.tsv")
    if data.tokens == "train":
        refuse(
            "data.tokens",
            "train",
            "texts with classes have the tokens of the text before; name bytes, characters or the SentencePiece model "
            "file (initial.workdir keeps that of its text: pieces/*.model)",
        )


def _tables(data: ConfigDict) -> dict[str, list[Row]]:
    folder = files.home(data.directory)
    paths = {part: folder / f"{data.table}-{part}.tsv" for part in ("train", "valid", "test")}
    if not paths["train"].exists() and (tables := sorted(folder.glob("*-train.tsv"))):
        names = ", ".join(path.name.removesuffix("-train.tsv") for path in tables)
        refuse("data.table", data.table, f"{folder} has no {paths['train'].name}; there are: {names}")
    train, test = read_table(paths["train"]), read_table(paths["test"])
    if paths["valid"].exists():
        valid = read_table(paths["valid"])
    else:  # at random: classes may take turns in a table
        held_out = {*np.random.default_rng(0).permutation(len(train))[: len(train) // EVERY].tolist()}
        valid = [row for i, row in enumerate(train) if i in held_out]
        train = [row for i, row in enumerate(train) if i not in held_out]
    rows_of: dict[str, list[Row]] = {}
    earlier: set[str] = set()
    for part, rows in (("train", train), ("valid", valid), ("test", test)):
        rows_of[part] = [row for row in rows if row.text not in earlier]
        earlier |= {row.text for row in rows}
        if repeated := len(rows) - len(rows_of[part]):
            message = "%s: %d of %d texts (%s) are left out: a part before it has them too"
            log.info(message, data.table, repeated, len(rows), part)
    return rows_of


def _rows(data: ConfigDict, tokenizer: tokenizers.Tokenizer, rows: list[Row], part: str) -> Integer[np.ndarray, "N R"]:
    length, classed = data.input_length, [row for row in rows if row.label in data.labels]
    ids = tokenizers.encode(tokenizer, [row.text for row in classed])
    # A text without a meaningful token would become a row of pads: a label with nothing to learn from.
    used = [i for i, tokens in enumerate(ids) if tokenizers.decode(tokenizer, tokens[:length]).strip()]
    _say_left_out(data, rows, len(classed) - len(used), part)
    if missing := [name for name in data.labels if name not in {classed[i].label for i in used}]:
        classes = sorted({row.label for row in rows})
        if len(classes) < 2:
            only = f"have the label {classes[0]!r}" if rows else "are in a part before it too, or there are none"
            raise UserError(
                f"{data.table}: all texts to {PURPOSE[part]} {only}; a classifier needs two classes or more"
            )
        first_labels = ", ".join(classes[:10])
        raise UserError(
            f"{data.table}: no text to {PURPOSE[part]} has the label {missing[0]!r} (its labels: {first_labels}); set"
            " data.labels to two or more that it has"
        )
    encoded = np.zeros((len(used), 1 + length), np.int32)
    for row, i in zip(encoded, used, strict=True):
        row[0] = data.labels.index(classed[i].label)
        row[1 + length - min(len(ids[i]), length) :] = ids[i][:length]
    if long := sum(len(ids[i]) > length for i in used):
        log.info("%s: %d of %d texts (%s) are cut after %d tokens", data.table, long, len(used), part, length)
    # In random order: classes may take turns in a table, and evaluations take evenly spaced rows.
    return encoded[np.random.default_rng(0).permutation(len(encoded))]


def _say_left_out(data: ConfigDict, rows: list[Row], empty: int, part: str) -> None:
    """Logs how many texts of a part are left out; `empty` of them have no text.

    Raises:
      UserError: most texts have no label or no text.
    """
    unused = collections.Counter(row.label for row in rows if row.label not in data.labels)
    bare, most = unused.pop("", 0), unused.most_common(1)
    counts = {
        "without a label": bare,
        f"without a word in data.tokens={data.tokens}": empty,
        f"of a label that data.labels lacks (most have {most[0][0]!r})" if most else "": unused.total(),
    }
    reasons = ", ".join(f"{count} {why}" for why, count in counts.items() if count)
    if 2 * (bare + empty) > len(rows):
        raise UserError(
            f"{data.table}: most of the {len(rows)} texts to {PURPOSE[part]} cannot be used: {reasons}; mend the "
            "table, or name other data.tokens"
        )
    if reasons:
        left = bare + empty + unused.total()
        log.warning("%s: %d of %d texts to %s are left out: %s", data.table, left, len(rows), PURPOSE[part], reasons)


def _artificial(labels: Sequence[str]) -> dict[str, list[Row]]:
    """Generates texts of two-letter words; each class has a word of its own."""
    random, rows_of = np.random.default_rng(0), {}
    for part, count in ARTIFICIAL.items():
        classes = np.arange(count) % len(labels)
        vocabulary = [["ab", "ba", *[chr(ord("c") + label % 20) * 2] * 2] for label in classes]
        texts = [" ".join(random.choice(some, 4)) for some in vocabulary]
        rows_of[part] = [
            Row(text, labels[label], LANGUAGE) for text, label in zip(texts, classes.tolist(), strict=True)
        ]
    return rows_of


def _classified(rows, language, data: ConfigDict, rng: np.random.Generator, part: slice, size: int) -> TextBatch:
    """Splits rows into inputs, all tokens but the first, and the target, the first token: the class."""
    ids = rows.astype(np.int32)
    return TextBatch(ids[:, 1:], ids[:, :1], language.astype(np.int32))  # type: ignore[arg-type]


#: For a decoder with a head: texts, each with its class as the only target.
CLASSIFIED = Form(
    load,
    _classified,
    lambda data: (data.input_length, 1),
    lambda data: data.input_length,
    tested=True,
    padded=True,
    mixed=False,
)

LABELLED = Tables(
    lambda data: f", table {data.table}, classes {', '.join(data.labels)}",
    check,
    settings={
        "labels": LABELS,
        "table": Setting(
            GENERATED, f"NAME of NAME-train.tsv and NAME-test.tsv in data.directory; {GENERATED}: one of its own"
        ),
    },
    reads=("directory",),
)
