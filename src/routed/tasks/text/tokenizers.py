"""Tokenizers as data: a SentencePiece model given or trained here, bytes, or the letters.

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
from routed.tasks.text import cache
from routed.tasks.text.documents import Source, because, damage_rule, shares
from routed.tasks.text.spans import END, PAD, UNKNOWN

#: Characters of training text that a tokenizer is trained on.
SAMPLE = 4_000_000

#: Characters of a line of it, of at most 4 bytes each; the library leaves out what is longer, and fails where nothing
#: is left.
LINE = 1 << 14

#: Changes when training changes, so that old models are not taken from the cache.
RECIPE = "unigram 2"

#: Share of the characters of a text that the library wants to have pieces, at least.
COVERAGE = 0.98

#: Pieces that no text decides: pad, end, unknown; and a piece for every byte, for characters without a piece.
RESERVED, BYTES = 3, 256


#: The alphabet of text8 (Mahoney 2006): in it digits are spelt out, and whatever else stands between words is one
#: space.
LETTERS = " abcdefghijklmnopqrstuvwxyz"
DIGITS = dict(
    zip("0123456789", ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"], strict=True)
)


class Tokenizer(NamedTuple):
    """`pieces` ids, from 0; `model` is the content of a SentencePiece file, empty for bytes (ByT5: byte b is b + 3) and characters."""

    pieces: int
    model: bytes
    digest: str


#: What `data.tokens=characters` names.
CHARACTERS = Tokenizer(RESERVED + len(LETTERS), b"", "characters 1")


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Integer[np.ndarray, " N"]]:
    """Ids of each text, without an end; uint16 where they fit, else uint32."""
    if tokenizer.digest == CHARACTERS.digest:
        return [_places(letters(text)) + np.uint16(RESERVED) for text in texts]
    if not tokenizer.model:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint16) + RESERVED for text in texts]
    ids = _processor(tokenizer.model).encode(list(texts), out_type=int, num_threads=-1)
    return [np.array(one, dtype(tokenizer)) for one in ids]


def decode(tokenizer: Tokenizer, ids: Integer[np.ndarray, " N"]) -> str:
    """The text of ids; pad, end and sentinels have none."""
    pieces = [i for i in ids.tolist() if UNKNOWN <= i < tokenizer.pieces]
    if tokenizer.digest == CHARACTERS.digest:
        return "".join(LETTERS[i - RESERVED] for i in pieces if i >= RESERVED)
    if not tokenizer.model:
        return bytes(i - RESERVED for i in pieces if i >= RESERVED).decode(errors="replace")
    return _processor(tokenizer.model).decode(pieces)


def letters(text: str) -> str:
    """The text in the alphabet of text8: lower case, accents dropped, and one space at its end, so that texts can be joined."""
    plain = unicodedata.normalize("NFKD", text).lower()
    spelt = re.sub(r"[0-9]", lambda digit: f" {DIGITS[digit[0]]} ", re.sub(r"[\u0300-\u036f]", "", plain))
    return " ".join(re.findall("[a-z]+", spelt)) + " "


def _places(text: str) -> Integer[np.ndarray, " N"]:
    """The place of each letter in LETTERS: of a the first, as the space is before all."""
    codes = np.frombuffer(text.encode(), np.uint8).astype(np.uint16)
    return np.where(codes == ord(" "), 0, codes - (ord("a") - 1)).astype(np.uint16)


def dtype(tokenizer: Tokenizer) -> type[np.unsignedinteger]:
    """The smallest that holds every piece."""
    return np.uint16 if tokenizer.pieces <= 2**16 else np.uint32


def tokenizer(data: ConfigDict, source: Source, sentinels: int) -> Tokenizer:
    """What `data.tokens` names: bytes, characters, train, or a SentencePiece file.

    Raises:
      UserError: no such file, not a model of T5's convention, or it does not fit `data.vocabulary` with the sentinels.
    """
    if data.tokens == "bytes":
        made = Tokenizer(RESERVED + BYTES, b"", "bytes")
    elif data.tokens == "characters":
        made = CHARACTERS
    elif data.tokens == "train":
        made = _trained(data, source, data.vocabulary - sentinels)
    else:
        made = _from_file(pathlib.Path(data.tokens).expanduser())
    needed = made.pieces + sentinels
    if needed > data.vocabulary:
        raise UserError(
            f"data.vocabulary={data.vocabulary}: {made.pieces} pieces and {sentinels} sentinels do not fit; "
            f"set it to {needed} or more"
        )
    return made


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
        raise UserError(
            f"data.tokens={path}: pad, end and unknown have the ids {ids}; T5's (0, 1, 2) are needed, as mT5's model "
            f"has"
        )
    return Tokenizer(processor.vocab_size(), model, hashlib.sha256(model).hexdigest())


def _trained(data: ConfigDict, source: Source, pieces: int) -> Tokenizer:
    """A unigram model, from the cache where it has been trained on the same text with the same settings."""
    prints = [source.fingerprint(language, "train") for language in source.languages]
    path = cache.folder(data) / f"{cache.key(RECIPE, str(pieces), str(data.temperature), *prints)}.model"
    if cache.note_of(path) is None:
        start = time.monotonic()
        log.info("training a tokenizer of %d pieces on %d languages", pieces, len(source.languages))
        lines = _sample(data, source)
        try:
            model = _train(lines, pieces, data)
        except RuntimeError as error:  # the library's, whatever it does not like
            raise UserError(
                f"data.tokens=train: no tokenizer of {pieces} pieces can be trained on this text"
                f" ({' '.join(str(error).split())}): set data.tokens to bytes or a model file"
            ) from error
        cache.store(path, model, {"text": " ".join(source.languages)})
        log.info("trained it in %.1f s: %s", time.monotonic() - start, path)
    return _from_model(path.read_bytes(), path)


def _train(lines: list[str], pieces: int, data: ConfigDict) -> bytes:
    """Characters get at most half of the pieces, or the fewest possible; the others are spelt in bytes."""
    found = collections.Counter(
        unicodedata.normalize("NFKC", "".join(f" {line}" for line in lines))
    )  # as the library will
    covered = np.cumsum([count for _, count in found.most_common()]) / found.total()
    fewest = RESERVED + BYTES + int(np.searchsorted(covered, COVERAGE)) + 1
    all_of_them = RESERVED + 2 * len(found)
    if pieces < min(fewest, all_of_them):
        raise UserError(
            f"data.vocabulary={data.vocabulary}: too few ids to train a tokenizer of {len(found)} different "
            f"characters; "
            f"set it to {min(fewest, all_of_them) + data.vocabulary - pieces} or more, or data.tokens to bytes"
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
        num_threads=4,  # sums depend on it, so it may not depend on the machine
        minloglevel=2,
    )
    return model.getvalue()


def _sample(data: ConfigDict, source: Source) -> list[str]:
    """Lines of documents spread over the whole text; languages in proportion to their `shares`."""
    weights = shares([source.size(language) for language in source.languages], data.temperature)
    lines: list[str] = []
    damaged: list[str] = []
    for language, weight in zip(source.languages, weights, strict=True):
        lines += _thinned(source.documents(language, "train", damage_rule(data, damaged)), int(SAMPLE * weight))
    if not lines:
        raise UserError(
            f"data.languages: no training text in any of {', '.join(source.languages)}{because(damaged)}; give them "
            f"some"
        )
    return lines


def _thinned(documents: Iterable[str], budget: int) -> list[str]:
    """Lines of evenly spaced documents of about `budget` characters; never holds more than twice as much."""
    kept: list[str] = []
    stride, size = 1, 0
    for number, text in enumerate(documents):
        if number % stride == 0:
            kept.append(text)
            size += len(text)
        if size > 2 * budget and len(kept) > 1:
            kept, stride = kept[::2], 2 * stride
            size = sum(map(len, kept))
    count = max(1, round(len(kept) * min(1, budget / max(size, 1))))
    chosen = [kept[i] for i in np.linspace(0, len(kept) - 1, count).astype(int)] if kept else []
    lines = (line for text in chosen for line in text.splitlines() if line.strip())
    return [line[start : start + LINE] for line in lines for start in range(0, len(line), LINE)]


@functools.lru_cache(maxsize=4)
def _processor(model: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=model)
