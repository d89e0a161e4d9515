"""Tokenised text: a flat array of tokens for each language and split in the cache, cut into rows when loaded."""

from __future__ import annotations

import functools
import itertools
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO, NamedTuple

import numpy as np
from absl import logging as log
from jaxtyping import Integer
from ml_collections import ConfigDict
from tqdm import tqdm

from routed.contracts import UserError, nearest
from routed.settings.setting import refuse
from routed.tasks.text import cache, spans, tokenizers
from routed.tasks.text.documents import TEST, Damage, because, damage_rule
from routed.tasks.text.sources import SOURCES
from routed.tasks.text.spans import END

#: Characters that are tokenised at a time.
CHUNK = 1 << 20


class Cut(NamedTuple):
    """Rows of a text."""

    length: int  # tokens of a row
    shared: int = 0  # tokens that a row shares with the next row
    sentinels: int = 0  # reserved ids
    ends: bool = False  # each document ends with END


class Corpus(NamedTuple):
    """Rows of raw tokens by language: documents stand one behind the other, and a last partial row is left out.

    Equal digests mean equal tokens. `test` is empty if the source has no test text.
    """

    languages: tuple[str, ...]
    train: tuple[Integer[np.ndarray, "N R"], ...]
    validation: tuple[Integer[np.ndarray, "N R"], ...]
    vocabulary: int
    digest: str
    tokenizer: tokenizers.Tokenizer
    test: tuple[Integer[np.ndarray, "N R"], ...] = ()


def load(data: ConfigDict, cut: Cut | None = None) -> Corpus:
    """Loads the corpus of `config.data`, in rows for span corruption or by another `cut`.

    Text that is not in the cache is tokenised.

    Raises:
      UserError: missing or damaged files, a vocabulary that does not fit, a language without a full row.
    """
    if data.name not in SOURCES:
        raise UserError(f"data.name={data.name!r}: not a source of text{nearest(data.name, SOURCES)}")
    if cut is None:  # rows become `data.input_length` tokens when spans are removed; each span has a sentinel
        row, target = spans.lengths(data)
        cut = Cut(row, sentinels=target - spans.counts(row, data.noise_density, data.mean_span)[0] - 1)
    length, shared, sentinels, ends = cut
    source = SOURCES[data.name].open(data)
    tokenizer = tokenizers.tokenizer(data, source, sentinels)
    folder = cache.folder(data)
    keys: list[str] = []
    damaged: list[str] = []  # of all languages
    rows: dict[str, list[np.ndarray]] = {split: [] for split in source.splits}
    for language, split in itertools.product(source.languages, source.splits):
        key = cache.key(language, split, source.fingerprint(language, split), tokenizer.digest, *["ends"] * ends)
        documents, here = functools.partial(source.documents, language, split), len(damaged)
        flat = _tokens(
            folder / f"{key}.npy", documents, tokenizer, damage_rule(data, damaged), f"{language} {split}", ends
        )
        _refuse_symbols(tokenizers.decode(tokenizer, flat[:20_000]), data, f"the {split} text of {language}")
        if len(flat) < length:
            raise UserError(
                f"data.languages: the {split} text of {language} has {len(flat)} tokens, less than a row of {length}"
                f"{because(damaged[here:])}; give it more text or leave it out"
            )
        rows[split].append(np.lib.stride_tricks.sliding_window_view(flat, length)[:: length - shared])
        keys.append(key)
    if damaged:
        log.warning("data.damaged=skip: damaged files are used in part%s", because(damaged))
    return Corpus(
        source.languages,
        tuple(rows["train"]),
        tuple(rows["validation"]),
        data.vocabulary,
        cache.key(*keys),
        tokenizer,
        tuple(rows.get(TEST, ())),
    )


def _refuse_symbols(text: str, data: ConfigDict, name: str) -> None:
    """Refuses text whose words are single characters or numbers, as scripts that prepare enwik8 and text8 write them.

    Other scripts leave spaces alone where data.tokens=characters drops them.
    """
    symbols = text.split()
    if text and (len("".join(symbols)) < 1.5 * max(1, len(symbols)) or all(map(str.isdigit, symbols))):
        problem = f"{name} is {' '.join(symbols[:8])!r}..., symbols that are no words"
        refuse("data.tokens", data.tokens, f"{problem}; take the raw text (train.txt.raw of text8), or other tokens")


def _tokens(
    path: pathlib.Path,
    documents: Callable[[Damage], Iterator[str]],
    tokenizer: tokenizers.Tokenizer,
    report: Damage,
    name: str,
    ends: bool,
) -> Integer[np.ndarray, " N"]:
    """Returns the flat array of a text, mapped into memory. Damage is reported also for text from the cache."""
    if (note := cache.note_of(path)) is not None:
        for line in note["damaged"]:
            report(line)
        return np.load(path, mmap_mode="r")

    damaged: list[str] = []
    start = time.monotonic()

    def damage(line: str) -> None:
        report(line)
        damaged.append(line)

    def write(beside: pathlib.Path) -> None:
        with (
            open(beside, "wb") as file,
            tqdm(desc=f"tokenising {name}", unit="token", unit_scale=True, leave=False, disable=None) as bar,
        ):
            _header(file, tokenizer, 0)
            total = 0
            for texts in _chunks(documents(damage)):
                encoded = tokenizers.encode(tokenizer, texts)
                encoded = [np.append(ids, ids.dtype.type(END)) for ids in encoded] if ends else encoded
                ids = np.concatenate(encoded)
                file.write(ids.tobytes())
                total += len(ids)
                bar.update(len(ids))
            file.seek(0)
            _header(file, tokenizer, total)

    cache.store(path, write, {"text": name, "damaged": damaged})
    flat = np.load(path, mmap_mode="r")
    log.info("tokenised %s: %d tokens in %.1f s", name, len(flat), time.monotonic() - start)
    return flat


def _header(file: BinaryIO, tokenizer: tokenizers.Tokenizer, total: int) -> None:
    """Writes the header of an .npy file, which has the same length for every total: NumPy reserves room."""
    kind = np.lib.format.dtype_to_descr(np.dtype(tokenizers.dtype(tokenizer)))
    np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": (total,)})


def _chunks(documents: Iterable[str]) -> Iterator[list[str]]:
    """Yields lists of documents of about CHUNK characters together."""
    chunk: list[str] = []
    size = 0
    for text in documents:
        chunk.append(text)
        size += len(text)
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
