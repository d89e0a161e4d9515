"""Tokenizers as data: a SentencePiece model that is given or trained here, bytes, or characters.

Ids: 0 pads, 1 ends, 2 is unknown.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import io
import pathlib
import re
import time
import unicodedata
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import sentencepiece
from absl import logging as log
from jaxtyping import Integer
from ml_collections import ConfigDict

from routed.contracts import UserError
from routed.system import files
from routed.tasks.text import cache
from routed.tasks.text.documents import Source, because, damage_rule, shares
from routed.tasks.text.spans import END, PAD, UNKNOWN

#: Number of characters of training text for the training of a tokenizer.
SAMPLE = 4_000_000

#: Most characters of a line, each of at most 4 bytes; the library ignores longer lines, and fails if no line remains.
LINE = 1 << 14

#: Version of the training: another version does not use old models of the cache.
RECIPE = "unigram 2"

#: Least share of the characters of a text that must have pieces.
COVERAGE = 0.98

#: Pieces that do not depend on the text: pad, end and unknown; and a piece for every byte, for rare characters.
RESERVED, BYTES = 3, 256


#: The alphabet of text8 (Mahoney 2006): digits are spelt out, and all other characters become one space.
LETTERS = " abcdefghijklmnopqrstuvwxyz"
DIGITS = dict(
    zip("0123456789", ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"], strict=True)
)


class Tokenizer(NamedTuple):
    """A tokenizer of `pieces` ids, from 0; `model` is the content of a SentencePiece file.

    `model` is empty for bytes (as in ByT5, byte b has id b + 3) and for characters.
    """

    pieces: int
    model: bytes
    digest: str


#: The tokenizer of `data.tokens=characters`.
CHARACTERS = Tokenizer(RESERVED + len(LETTERS), b"", "characters 1")


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Integer[np.ndarray, " N"]]:
    """Returns the ids of each text, without END: uint16 if all ids fit, else uint32."""
    if tokenizer.digest == CHARACTERS.digest:
        codes = [np.frombuffer(letters(text).encode(), np.uint8).astype(np.uint16) for text in texts]
        return [np.where(code == ord(" "), 0, code - (ord("a") - 1)).astype(np.uint16) + RESERVED for code in codes]
    if not tokenizer.model:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint16) + RESERVED for text in texts]
    ids = _processor(tokenizer.model).encode(list(texts), out_type=int, num_threads=-1)
    return [np.array(text_ids, dtype(tokenizer)) for text_ids in ids]


def decode(tokenizer: Tokenizer, ids: Integer[np.ndarray, " N"]) -> str:
    """Returns the text of ids; pad, end and sentinels have no text."""
    pieces = [i for i in ids.tolist() if UNKNOWN <= i < tokenizer.pieces]
    if tokenizer.digest == CHARACTERS.digest:
        return "".join(LETTERS[i - RESERVED] for i in pieces if i >= RESERVED)
    if not tokenizer.model:
        return bytes(i - RESERVED for i in pieces if i >= RESERVED).decode(errors="replace")
    return _processor(tokenizer.model).decode(pieces)


def words(tokenizer: Tokenizer) -> list[str]:
    """Returns the word of each id, for a reader: pad, end and unknown have names, bytes beyond ASCII are numbers."""
    reserved = ["<pad>", "</s>", "<unk>"]
    if tokenizer.digest == CHARACTERS.digest:
        return [*reserved, *LETTERS]
    if not tokenizer.model:
        return reserved + [chr(byte) if byte < 128 else f"\\x{byte:02x}" for byte in range(BYTES)]
    model = _processor(tokenizer.model)
    return [model.id_to_piece(token).replace("▁", " ") for token in range(tokenizer.pieces)]


def letters(text: str) -> str:
    """Converts text to the alphabet of text8: lower case, without accents, with a space at the end."""
    plain = unicodedata.normalize("NFKD", text).lower()
    spelt = re.sub(r"[0-9]", lambda digit: f" {DIGITS[digit[0]]} ", re.sub(r"[\u0300-\u036f]", "", plain))
    return " ".join(re.findall("[a-z]+", spelt)) + " "


def dtype(tokenizer: Tokenizer) -> type[np.unsignedinteger]:
    """Returns the smallest integer type that holds every piece."""
    return np.uint16 if tokenizer.pieces <= 2**16 else np.uint32


def tokenizer(data: ConfigDict, source: Source, sentinels: int) -> Tokenizer:
    """Returns the tokenizer of `data.tokens`: bytes, characters, train, or a SentencePiece file.

    Raises:
      UserError: no such file, not a model of T5's convention, or it does not fit `data.vocabulary` with the sentinels.
    """
    if data.tokens == "bytes":
        chosen = Tokenizer(RESERVED + BYTES, b"", "bytes")
    elif data.tokens == "characters":
        chosen = CHARACTERS
    elif data.tokens == "train":
        chosen = _trained(data, source, data.vocabulary - sentinels)
    else:
        chosen = _from_file(files.home(data.tokens))
    needed = chosen.pieces + sentinels
    if needed > data.vocabulary:
        raise UserError(
            f"data.vocabulary={data.vocabulary}: {chosen.pieces} pieces and {sentinels} sentinels do not fit; "
            f"set it to {needed} or more"
        )
    return chosen


def _from_file(path: pathlib.Path) -> Tokenizer:
    try:
        model = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"data.tokens={path}: cannot be read ({error.strerror}); name a SentencePiece model file, train, bytes or "
            f"characters"
        ) from error
    return _from_model(model, path)


def _from_model(model: bytes, path: pathlib.Path) -> Tokenizer:
    try:
        processor = _processor(model)
    except RuntimeError as error:
        raise UserError(f"data.tokens: {path} is not a SentencePiece model; name one, train or bytes") from error
    ids = processor.pad_id(), processor.eos_id(), processor.unk_id()
    if ids != (PAD, END, UNKNOWN):
        raise UserError(f"data.tokens={path}: pad, end and unknown have the ids {ids}; T5's (0, 1, 2) are needed")
    return Tokenizer(processor.vocab_size(), model, hashlib.sha256(model).hexdigest())


def _trained(data: ConfigDict, source: Source, pieces: int) -> Tokenizer:
    """Returns a unigram model; the cache has it if the text and the settings are the same."""
    prints = [source.fingerprint(language, "train") for language in source.languages]
    path = cache.folder(data) / f"{cache.key(RECIPE, str(pieces), str(data.temperature), *prints)}.model"
    if cache.note_of(path) is None:
        start = time.monotonic()
        log.info("training a tokenizer of %d pieces on %d languages", pieces, len(source.languages))
        lines = _sample(data, source)
        try:
            model = _train(lines, pieces, data)
        except RuntimeError as error:  # any complaint of the library
            raise UserError(
                f"data.tokens=train: no tokenizer of {pieces} pieces can be trained on this text"
                f" ({' '.join(str(error).split())}): set data.tokens to bytes or a model file"
            ) from error
        cache.store(path, model, {"text": " ".join(source.languages)})
        log.info("trained it in %.1f s: %s", time.monotonic() - start, path)
    return _from_model(path.read_bytes(), path)


def _train(lines: list[str], pieces: int, data: ConfigDict) -> bytes:
    """Trains a model in which characters have at most half of the pieces; other characters are spelt in bytes."""
    # The library normalises in the same way.
    characters = collections.Counter(unicodedata.normalize("NFKC", "".join(f" {line}" for line in lines)))
    covered = np.cumsum([count for _, count in characters.most_common()]) / characters.total()
    fewest = RESERVED + BYTES + int(np.searchsorted(covered, COVERAGE)) + 1
    all_of_them = RESERVED + 2 * len(characters)
    if pieces < min(fewest, all_of_them):
        raise UserError(
            f"data.vocabulary={data.vocabulary}: too few ids to train a tokenizer of {len(characters)} different"
            f" characters; set it to {min(fewest, all_of_them) + data.vocabulary - pieces} or more, or data.tokens to "
            f"bytes"
        )
    spelt = pieces < all_of_them
    half = max((pieces - RESERVED - BYTES) // 2, 1)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=pieces,
        hard_vocab_limit=False,  # little text yields fewer pieces
        pad_id=PAD,
        eos_id=END,
        unk_id=UNKNOWN,
        bos_id=-1,
        byte_fallback=spelt,
        character_coverage=max(COVERAGE, float(covered[half - 1])) if spelt else 1.0,
        max_sentence_length=4 * LINE,
        num_threads=4,  # sums depend on this number, so the machine must not decide it
        minloglevel=2,
    )
    return model.getvalue()


def _sample(data: ConfigDict, source: Source) -> list[str]:
    """Returns lines of documents that are spread over the whole text, languages in proportion to their `shares`."""
    weights = shares([source.size(language) for language in source.languages], data.temperature)
    lines: list[str] = []
    damaged: list[str] = []
    for language, weight in zip(source.languages, weights, strict=True):
        lines += _thinned(source.documents(language, "train", damage_rule(data, damaged)), int(SAMPLE * weight))
    if not lines:
        raise UserError(f"data.languages: no training text in any of {', '.join(source.languages)}{because(damaged)}")
    return lines


def _thinned(documents: Iterable[str], budget: int) -> list[str]:
    """Returns lines of evenly spaced documents with about `budget` characters; memory holds at most twice as many."""
    texts: list[str] = []
    stride, size = 1, 0
    for number, text in enumerate(documents):
        if number % stride == 0:
            texts.append(text)
            size += len(text)
        if size > 2 * budget and len(texts) > 1:
            texts, stride = texts[::2], 2 * stride
            size = sum(map(len, texts))
    count = max(1, round(len(texts) * min(1, budget / max(size, 1))))
    chosen = [texts[i] for i in np.linspace(0, len(texts) - 1, count).astype(int)] if texts else []
    lines = (line for text in chosen for line in text.splitlines() if line.strip())
    return [line[start : start + LINE] for line in lines for start in range(0, len(line), LINE)]


@functools.lru_cache(maxsize=4)
def _processor(model: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=model)
