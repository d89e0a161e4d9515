"""A model of transformers and rows of token ids from text files, for `capture` and `surgery`, and their folder.

A killed command continues in its folder, and a different command is refused.
"""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from routed.contracts import UserError
from routed.system import stored

#: Versions of transformers whose routers and experts are known: from the first, below the second.
VERSIONS = (5, 18), (6, 0)
#: The tokenizer whose tokens are bytes.
BYTES = "bytes"


def load(model: str, tokens: str = "") -> tuple[Any, Any]:
    """Returns (model, tokenizer) of transformers, by path or name; `tokens` names another tokenizer, or `bytes`.

    Raises:
      UserError: transformers is not installed or of another version, or has no such model or tokenizer, or the model
        lacks weights.
    """
    check_version()
    import torch
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(model)
        decoders = [getattr(transformers, f"AutoModel{part}") for part in ("ForCausalLM", "ForImageTextToText", "")]
        kinds = [transformers.AutoModelForSeq2SeqLM] if config.is_encoder_decoder else decoders
        kind = next((kind for kind in kinds if type(config) in kind._model_mapping), kinds[-1])
        method = (getattr(config, "quantization_config", None) or {}).get("quant_method")
        # A block of gpt-oss in MXFP4 reads its router's weights without a call of the router.
        plain = {"quantization_config": transformers.Mxfp4Config(dequantize=True)} if method == "mxfp4" else {}
        loaded, report = kind.from_pretrained(model, dtype="auto", output_loading_info=True, **plain)
    except (OSError, ValueError) as error:
        raise UserError(f"--model={model}: {str(error).splitlines()[0]}") from error
    if missing := sorted(report["missing_keys"]):  # transformers fills them with random numbers
        raise UserError(f"--model={model} lacks {len(missing)} weights of {kind.__name__}, the first is {missing[0]}")
    model_on_device = loaded.to("cuda" if torch.cuda.is_available() else "cpu")
    return model_on_device, BYTES if tokens == BYTES else _tokenizer(tokens, model)


def _tokenizer(tokens: str, model: str) -> Any:
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(tokens or model)
        if not tokenizer("a", add_special_tokens=False)["input_ids"]:  # transformers makes one of an empty folder
            raise ValueError("it knows no words")
    except (OSError, ValueError, ImportError, KeyError) as error:
        where = f"--tokens={tokens}" if tokens else f"--model={model}"
        reason = str(error).splitlines()[0].rstrip(":").strip()
        advice = "give --tokens=FOLDER_OR_NAME of its tokenizer, or --tokens=bytes for a model of bytes"
        text = f"{where} has no tokenizer that can be read ({reason})"
        raise UserError(f"{ascii(text)[1:-1]}: {advice}") from error  # a terminal may lack the letters
    return tokenizer


def check_version() -> None:
    """Refuses versions of transformers whose routers return other things than those that are known.

    Raises:
      UserError: PyTorch or transformers is not installed, or transformers is too old or too new.
    """
    try:
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        reason = (str(error) or "not found").splitlines()[0]
        raise UserError(f"a capture needs PyTorch and transformers ({reason}): pip install -e '.[torch]'") from error
    least, end = VERSIONS
    if not least <= tuple(map(int, transformers.__version__.split(".")[:2])) < end:
        needed = f">={least[0]}.{least[1]},<{end[0]}"
        advice = f"pip install 'transformers{needed}'"
        raise UserError(f"transformers {transformers.__version__}: routers are read in versions {needed}: {advice}")


def rows_of(paths: Sequence[str], tokenizer: Any, length: int) -> tuple[list[np.ndarray], list[str]]:
    """Returns rows of `length` token ids of each text file without its rest, and the name of each row's file.

    Every row begins with the tokens that the tokenizer puts before a text (BOS), as models were trained with them. A
    name is the stem of the path; of files with equal stems it is the path.

    Raises:
      UserError: a file is missing, is not text, or is shorter than a row.
    """
    rows, names = list[np.ndarray](), list[str]()
    stems = [pathlib.Path(path).stem for path in paths]
    first = _before(tokenizer)
    size = length - len(first)
    if size < 1:
        raise UserError(f"--length={length}: the tokenizer puts {len(first)} tokens before a text: give more")
    for path in map(pathlib.Path, paths):
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: {getattr(error, 'strerror', None) or 'it is no UTF-8 text'}") from error
        if tokenizer == BYTES:
            ids = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
        else:
            ids = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)
        if len(ids) < size:
            raise UserError(f"{path} has {len(ids)} tokens, less than one row: choose --length below it")
        some = ids[: len(ids) // size * size].reshape(-1, size)
        rows += [np.concatenate([first, row]) for row in some]
        names += [path.stem if stems.count(path.stem) == 1 else str(path)] * len(some)
    return rows, names


def _before(tokenizer: Any) -> np.ndarray:
    """Returns the token ids that a tokenizer puts before a text: of most models BOS, of NLLB the language."""
    if tokenizer == BYTES:
        return np.zeros(0, np.int64)
    plain, special = (tokenizer("a", add_special_tokens=given)["input_ids"] for given in (False, True))
    begin = next((i for i in range(len(special)) if special[i : i + len(plain)] == plain), 0)
    return np.asarray(special[:begin], np.int64)


def halves(rows: Sequence[np.ndarray], names: Sequence[str]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the first and the second half of the rows of every file; `names` has the file of each row.

    Raises:
      UserError: a file has one row.
    """
    first, second = list[np.ndarray](), list[np.ndarray]()
    for name in dict.fromkeys(names):
        some = [row for row, file in zip(rows, names, strict=True) if file == name]
        if len(some) < 2:
            advice = "choose a smaller --length, or give --other_text"
            raise UserError(f"--text: {name} has one row, which cannot be halved: {advice}")
        first += some[: len(some) // 2]
        second += some[len(some) // 2 :]
    return first, second


def batches(model: Any, rows: Sequence[np.ndarray], size: int) -> Iterator[tuple[int, Any]]:
    """Yields the number of a batch's first token, and the token ids [size, N] of its rows, on the model's device."""
    import torch

    for begin in range(0, len(rows), size):
        yield begin * len(rows[0]), torch.as_tensor(np.stack(rows[begin : begin + size])).to(model.device)


def check_ids(model: Any, rows: Sequence[np.ndarray]) -> None:
    """Refuses token ids of another tokenizer, which the model's lookup would answer with a traceback.

    Raises:
      UserError: the model has no embedding of a token id.
    """
    largest, vocabulary = max((int(row.max()) for row in rows), default=0), len(model.get_input_embeddings().weight)
    if largest >= vocabulary:
        text = f"the text has token id {largest}, the model knows {vocabulary:,}"
        raise UserError(f"--tokens: {text}: use its own tokenizer")


def bind_folder(file: pathlib.Path, model: Any, rows: Sequence[np.ndarray], settings: dict[str, Any]) -> None:
    """Writes the settings, model and text of a command to `file`, or compares them with those of an earlier call.

    Raises:
      UserError: a setting differs from that of the earlier call.
    """
    digests = {"weights": digest_of_model(model), "class": type(model).__name__, "text": digest_of_rows(rows)}
    settings = settings | digests | {"rows": len(rows)}
    before = stored.remember(file, settings, "choose another --out, or remove it")
    for key, value in settings.items():
        if before.get(key) != value:
            difference = f"{file.parent} holds a {file.stem} with {key}={before.get(key)}, now {value}"
            raise UserError(f"{difference}: choose another --out, or remove it")


def digest_of_model(model: Any) -> str:
    """Returns a digest of all parameters and buffers of a PyTorch model: experts may train under a frozen router."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def digest_of_rows(rows: Sequence[np.ndarray]) -> str:
    """Returns a digest of rows of token ids."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(np.ascontiguousarray(row, np.int64).tobytes())
    return digest.hexdigest()[:16]
