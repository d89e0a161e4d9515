"""Texts with a class each, from plain tables: what a language model is fine-tuned on.

A row is the class, then the tokens.
"""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from absl import logging as log
from jaxtyping import Integer
from ml_collections import ConfigDict

from routed.contracts import UserError
from routed.settings.setting import Setting, refuse
from routed.tasks.labelled_tables import LABELS, Row, read_table
from routed.tasks.text import cache, tokenizers
from routed.tasks.text.corpus import Corpus
from routed.tasks.text.documents import Source

#: The only language: a table may have several, but nothing here goes by them.
LANGUAGE = "text"

#: Of so many training texts one is to validate on, where no table is.
EVERY = 10
#: part -> what it is for.
PURPOSE = {"train": "train on", "valid": "validate on", "test": "test on"}

#: Texts of the artificial table, by part.
ARTIFICIAL = {"train": 400, "valid": 40, "test": 40}

#: What `data.table` may be beside the name of a table.
MADE = "artificial"


class Tables(NamedTuple):
    """Where such texts come from, as a part; `about(data)` ends the sentence that says what the data are."""

    about: Callable[[ConfigDict], str]
    check: Callable[[ConfigDict], None]
    tokens: str = "hidden"
    provides: frozenset[str] = frozenset({"token_id"})
    settings: Mapping[str, Setting] = {}
    reads: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()


def load(data: ConfigDict) -> Corpus:
    """The texts of `data.table`, of the classes `data.labels`, as rows of 1 + `data.input_length` numbers.

    NAME-train.tsv and NAME-test.tsv have a head with `text` and `label`; NAME-valid.tsv is there, or a tenth of the
    training texts is held out. A text to validate on that is trained on is left out, and one to test on that is in
    either. Texts of other labels, or without a label or a word, are left out, which the log counts. A long text is cut
    at its end; before a short one stand pads, as its last token is read.

    Raises:
      UserError: a table that is missing, damaged, has no text of a class, or mostly texts without a label or a word.
    """
    tables = _artificial(data.labels) if data.table == MADE else _tables(data)
    # Its text decides nothing of a tokenizer, which is that of the text before (`check`).
    tokenizer = tokenizers.tokenizer(data, Source((), _none, lambda *_: "", len), 0)
    made = {part: _rows(data, tokenizer, rows, part) for part, rows in tables.items()}
    digest = cache.key(
        tokenizer.digest, data.table, str(data.input_length), *(_digest(rows) for rows in tables.values())
    )
    train, valid, test = ((made[part],) for part in ("train", "valid", "test"))
    return Corpus((LANGUAGE,), train, valid, data.vocabulary, digest, tokenizer, test)


def check(config: ConfigDict) -> None:
    """Refuses a folder that nobody named, and tokens of the table's own.

    Raises:
      UserError: names the key.
    """
    data = config.data
    if data.table != MADE and not data.directory:
        raise UserError(f"config key data.directory is empty: name the folder with the table {data.table}-train.tsv")
    if data.tokens == "train":
        refuse(
            "data.tokens",
            "train",
            "texts with classes have the tokens of the text before; name bytes, characters or the SentencePiece model "
            "file"
            " (initial.workdir keeps that of its text: pieces/*.model)",
        )


def _tables(data: ConfigDict) -> dict[str, list[Row]]:
    folder = pathlib.Path(data.directory).expanduser()
    paths = {part: folder / f"{data.table}-{part}.tsv" for part in ("train", "valid", "test")}
    if not paths["train"].exists() and (there := sorted(folder.glob("*-train.tsv"))):
        names = ", ".join(path.name.removesuffix("-train.tsv") for path in there)
        refuse("data.table", data.table, f"{folder} has no {paths['train'].name}; there are: {names}")
    train, test = read_table(paths["train"]), read_table(paths["test"])
    if paths["valid"].exists():
        valid = read_table(paths["valid"])
    else:  # at random: classes may take turns in a table
        held = {*np.random.default_rng(0).permutation(len(train))[: len(train) // EVERY].tolist()}
        valid = [row for i, row in enumerate(train) if i in held]
        train = [row for i, row in enumerate(train) if i not in held]
    found: dict[str, list[Row]] = {}
    known: set[str] = set()
    for part, rows in (("train", train), ("valid", valid), ("test", test)):
        found[part] = [row for row in rows if row.text not in known]
        known |= {row.text for row in rows}
        if seen := len(rows) - len(found[part]):
            words = "%s: %d of %d texts (%s) are left out: a part before it has them too"
            log.info(words, data.table, seen, len(rows), part)
    return found


def _rows(data: ConfigDict, tokenizer: tokenizers.Tokenizer, rows: list[Row], part: str) -> Integer[np.ndarray, "N R"]:
    length, classed = data.input_length, [row for row in rows if row.label in data.labels]
    ids = tokenizers.encode(tokenizer, [row.text for row in classed])
    # Of a text without a token that says something the row would be pads: a label and nothing to learn it from.
    kept = [i for i, one in enumerate(ids) if tokenizers.decode(tokenizer, one[:length]).strip()]
    _say_left_out(data, rows, len(classed) - len(kept), part)
    if missing := [name for name in data.labels if name not in {classed[i].label for i in kept}]:
        classes = sorted({row.label for row in rows})
        if len(classes) < 2:
            only = f"have the label {classes[0]!r}" if rows else "are in a part before it too"
            raise UserError(
                f"{data.table}: all texts to {PURPOSE[part]} {only}; a classifier needs two classes or more"
            )
        found = ", ".join(classes[:10])
        raise UserError(
            f"{data.table}: no text to {PURPOSE[part]} has the label {missing[0]!r} (its labels: {found}); set"
            " data.labels to two or more that it has"
        )
    made = np.zeros((len(kept), 1 + length), np.int32)
    for row, i in zip(made, kept, strict=True):
        row[0] = data.labels.index(classed[i].label)
        row[1 + length - min(len(ids[i]), length) :] = ids[i][:length]
    if long := sum(len(ids[i]) > length for i in kept):
        log.info("%s: %d of %d texts (%s) are cut after %d tokens", data.table, long, len(kept), part, length)
    # Classes may take turns in a table, of which evaluations take every so many-th row.
    return made[np.random.default_rng(0).permutation(len(made))]


def _say_left_out(data: ConfigDict, rows: list[Row], empty: int, part: str) -> None:
    """Counts, in a line, the texts of a part that are left out, `empty` of them for want of text.

    Raises:
      UserError: most have no label or no text, which nobody means.
    """
    others = collections.Counter(row.label for row in rows if row.label not in data.labels)
    bare, most = others.pop("", 0), others.most_common(1)
    counts = {
        "without a label": bare,
        f"without a word in data.tokens={data.tokens}": empty,
        f"of a label that data.labels lacks (most have {most[0][0]!r})" if most else "": others.total(),
    }
    words = ", ".join(f"{count} {why}" for why, count in counts.items() if count)
    if 2 * (bare + empty) > len(rows):
        raise UserError(
            f"{data.table}: most of the {len(rows)} texts to {PURPOSE[part]} cannot be used: {words}; mend the table, "
            f"or"
            " name other data.tokens"
        )
    if words:
        left = bare + empty + others.total()
        log.warning("%s: %d of %d texts to %s are left out: %s", data.table, left, len(rows), PURPOSE[part], words)


def _digest(rows: list[Row]) -> str:
    return cache.key(*(f"{row.label}\t{row.text}" for row in rows))


def _artificial(labels: Sequence[str]) -> dict[str, list[Row]]:
    """Words of two letters, of which each class has one of its own."""
    random, found = np.random.default_rng(0), {}
    for part, count in ARTIFICIAL.items():
        classes = np.arange(count) % len(labels)
        words = [["ab", "ba", *[chr(ord("c") + label % 20) * 2] * 2] for label in classes]
        texts = [" ".join(random.choice(some, 4)) for some in words]
        found[part] = [Row(text, labels[label], LANGUAGE) for text, label in zip(texts, classes.tolist(), strict=True)]
    return found


def _none(*_):
    return iter(())


#: By `data.name`.
LABELLED: dict[str, Tables] = {
    "labelled": Tables(
        lambda data: f", table {data.table}, classes {', '.join(data.labels)}",
        check,
        settings={
            "labels": LABELS,
            "table": Setting(
                MADE, f"NAME of NAME-train.tsv and NAME-test.tsv in data.directory; {MADE}: one of its own"
            ),
        },
        reads=("directory",),
    )
}
