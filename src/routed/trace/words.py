"""Words of token ids, from a vocabulary or a tokenizer; a trace keeps those of its own ids in words.parquet."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import sentencepiece

from routed.contracts import UserError
from routed.system import files
from routed.trace.format import WORDS, damaged
from routed.trace.model_inputs import BYTES

#: Letters of a word that are kept.
LONGEST = 64
#: What `vocabulary` may be.
KINDS = (
    "give a list of words by id, a dict id -> word or word -> id, a tokenizer of transformers, its folder, a"
    " SentencePiece .model, a .json or .txt vocabulary, or 'bytes'"
)


def words_of(source: Any, ids: Iterable[int]) -> dict[int, str]:
    """Returns the words of token ids; ids that the source lacks have none.

    Raises:
      UserError: the source is of no known kind, or cannot be read.
    """
    wanted = [int(token) for token in ids]
    if isinstance(source, str | os.PathLike):
        source = _read(os.fspath(source))
    if hasattr(source, "convert_ids_to_tokens"):
        return {token: _of_transformers(source, token)[:LONGEST] for token in wanted}
    if isinstance(source, Mapping):
        by_id = _by_id(source)
        texts = {token: by_id[token] for token in wanted if token in by_id}
    elif isinstance(source, Sequence):
        texts = {token: source[token] for token in wanted if token < len(source)}
    else:
        raise UserError(f"vocabulary: {type(source).__name__} is no vocabulary: {KINDS}")
    if wanted and not texts:
        raise UserError(f"vocabulary: it has none of the trace's token ids, such as {wanted[0]}: {KINDS}")
    for token, word in texts.items():
        if not isinstance(word, str):
            raise UserError(f"vocabulary: id {token} has {type(word).__name__} for a word: {KINDS}")
    return {token: word[:LONGEST] for token, word in texts.items()}


def _by_id(vocabulary: Mapping[Any, Any]) -> dict[int, Any]:
    """Returns id -> word of a dict id -> word, whose ids may be text (as in JSON), or word -> id."""
    if all(isinstance(token, int | np.integer) for token in vocabulary.values()):
        return {int(token): word for word, token in vocabulary.items()}
    return {int(token): word for token, word in vocabulary.items() if str(token).isdigit()}


def _read(name: str) -> Any:
    """Returns the vocabulary that a path or a name stands for: a list, a dict, or a tokenizer of transformers."""
    path = files.home(name)
    if name == BYTES:
        return [chr(byte) if byte < 128 else f"\\x{byte:02x}" for byte in range(256)]
    try:
        if path.suffix == ".model" and path.is_file():
            model = sentencepiece.SentencePieceProcessor(model_file=str(path))
            return [model.id_to_piece(token).replace("▁", " ") for token in range(model.get_piece_size())]
        if path.suffix == ".txt" and path.is_file():
            return path.read_text("utf-8").split("\n")
        if path.suffix == ".json" and path.name != "tokenizer.json" and path.is_file():
            content = json.loads(path.read_text("utf-8"))
            return content if isinstance(content, list) else dict(content)
    except (OSError, ValueError, RuntimeError, AttributeError, TypeError) as error:
        raise UserError(f"vocabulary={name}: {(str(error).splitlines() or ['cannot be read'])[0]}; {KINDS}") from error
    return _tokenizer(str(path.parent if path.name == "tokenizer.json" else name))


def _tokenizer(name: str) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UserError(f"vocabulary={name}: a tokenizer needs pip install -e '.[torch]'; {KINDS}") from error
    try:
        return transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise UserError(f"vocabulary={name}: {(str(error).splitlines() or ['cannot be read'])[0]}; {KINDS}") from error


def _of_transformers(tokenizer: Any, token: int) -> str:
    """Returns the text of one id. SentencePiece marks a space by ▁, which decoding a single id would lose."""
    piece = tokenizer.convert_ids_to_tokens(token)
    if piece is None:
        return ""
    return piece.replace("▁", " ") if "▁" in piece else str(tokenizer.decode([token]))


def store(folder: pathlib.Path, texts_by_id: Mapping[int, str]) -> None:
    """Writes the words of a trace's ids; without words, removes those of a trace that was in the folder before."""
    if not texts_by_id:
        (folder / WORDS).unlink(missing_ok=True)
        return
    ids, texts = zip(*sorted(texts_by_id.items()), strict=True)
    clean = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]  # lone surrogates are no UTF-8
    table = pa.table({"token": np.array(ids, np.int64), "word": clean})
    files.write(folder / WORDS, lambda path: pq.write_table(table, path, compression="zstd"))


def load(folder: pathlib.Path) -> dict[int, str]:
    """Returns the words that a trace has, by token id; none if it was written without.

    Raises:
      UserError: the file is damaged.
    """
    if not (folder / WORDS).exists():
        return {}
    try:
        table = pq.read_table(folder / WORDS)
        return dict(zip(table["token"].to_pylist(), map(str, table["word"].to_pylist()), strict=True))
    except (OSError, KeyError, pa.ArrowException) as error:
        raise damaged(folder / WORDS, error) from error
