"""A trace of a Hugging Face model on text of yours: rows of tokens, batches, and parts that survive a kill.

An encoder-decoder gives two traces, OUT/encoder and OUT/decoder; its decoder reads the same tokens as its encoder.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import logging as log

from routed.contracts import UserError
from routed.system import files
from routed.trace.arrays import as_array
from routed.trace.features import KEPT, Features
from routed.trace.format import DESCRIPTION, Trace, read
from routed.trace.hooks import arrays_of, listening, routers_of, weights_of
from routed.trace.writing import append, finish, parts_of

#: Tokens of a part, about: what a kill may lose.
PART = 1 << 16
#: Scores of a part, over layers and experts, at most: half a GiB of float32.
HELD = 1 << 27
#: What a half-written capture is known by.
SETTINGS = "capture.json"
BYTES = "bytes"


def capture(
    model: Any,
    rows: Sequence[np.ndarray],
    out: str | os.PathLike,
    *,
    names: Sequence[str] | None = None,
    batch_size: int = 8,
    routers: str = "",
    k: int = 0,
    keep_scores: bool = True,
    name: str = "",
    source: str = "",
) -> list[Trace]:
    """Runs `model` (of transformers, on its device) on rows of token ids of one length, and writes what its routers did to `out`.

    `names` says which file each row is of: the label `file`. The same call goes on where a killed one stopped; a finished one is
    read. Returns a trace, or two of an encoder-decoder.

    Raises:
      UserError: an unknown architecture; token ids that the model lacks; `out` holds a capture of other rows or another model.
    """
    import torch

    check_ids(model, rows)
    folder, known = files.folder(out), routers_of(model, routers, k)
    stacks = _stacks(list(known))
    places = {stack: folder / stack if len(stacks) > 1 else folder for stack in stacks}
    linear_maps = [weights_of(module) for module, _ in known.values()]
    same_command(
        folder,
        model,
        rows,
        {
            "routers": list(known), "k": k, "batch_size": batch_size, "keep_scores": keep_scores, "name": name,
            "weights": digest_of_model(model),
        },
    )  # fmt: skip
    if all((place / DESCRIPTION).exists() for place in places.values()):
        return [read(place) for place in places.values()]
    experts = [len(held[1]) for held in linear_maps if held]
    tokens = min(PART, HELD // (len(known) * max(experts, default=256)))
    each = max(1, tokens // (batch_size * len(rows[0]))) * batch_size  # rows of a part
    share = max(1, KEPT * each // max(len(rows), each))  # tokens of a part whose features are kept
    done = min(parts_of(place) for place in places.values())
    if done:
        log.info("going on behind %d parts of %d rows", done, each)
    model.eval()
    with torch.no_grad(), listening(known) as seen:
        for begin in range(done * each, len(rows), each):
            some = rows[begin : begin + each]
            found: dict[str, list[dict[str, Any]]] = {stack: [] for stack in stacks}
            picked = np.sort(np.random.default_rng(begin).permutation(len(some) * len(rows[0]))[:share])
            sample: dict[str, list[np.ndarray]] = {member: [] for member in known}
            for first in range(0, len(some), batch_size):
                ids = torch.as_tensor(np.stack(some[first : first + batch_size])).to(model.device)
                more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
                model(input_ids=ids, **more)
                for stack, members in stacks.items():
                    found[stack].append(arrays_of([seen[member] for member in members]))
                    for member in members:
                        sample[member].append(_sampled(seen[member].features, first * len(rows[0]), picked))
            for stack, members in stacks.items():
                linear = [weights_of(known[member][0]) for member in members]
                if parts_of(places[stack]) * each > begin:
                    continue  # written before the kill, as the other stack's was not
                append(
                    places[stack], **_joined(found[stack]), token_ids=np.concatenate(some), layers=members,
                    sequence=np.repeat(np.arange(begin, begin + len(some)), [len(row) for row in some]),
                    labels={"file": np.repeat(names[begin : begin + each], [len(row) for row in some])} if names is not None else None,
                    features=Features(
                        picked, [np.concatenate(sample[member]) for member in members], [one[0] for one in linear if one],
                        [one[1] for one in linear if one],
                    ) if all(linear) else None,
                    num_experts=found[stack][0]["scores"][0].shape[1], keep_scores=keep_scores, model=name, source=source,
                )  # fmt: skip
            log.info("%d of %d rows", min(begin + each, len(rows)), len(rows))
    return [finish(place) for place in places.values()]


def _stacks(names: list[str]) -> dict[str, list[str]]:
    """The routers of encoder and decoder, whose tokens differ; of other models all under the name of none."""
    inside = {stack: [name for name in names if stack in name.split(".")] for stack in ("encoder", "decoder")}
    both = {stack: members for stack, members in inside.items() if members}
    return both if sum(map(len, both.values())) == len(names) and len(both) > 1 else {"": names}


def _sampled(features: Any, begin: int, picked: np.ndarray) -> np.ndarray:
    """The features [n, D] of a batch, whose first token is number `begin` of its part, at the picked tokens that are in it."""
    flat = features.reshape(-1, features.shape[-1])
    here = picked[(picked >= begin) & (picked < begin + len(flat))] - begin
    return as_array(flat[here])


def _joined(batches: list[dict[str, Any]]) -> dict[str, Any]:
    """The arrays of several batches, layer by layer."""
    return {
        key: [np.concatenate(layers) for layers in zip(*(batch[key] for batch in batches), strict=True)]
        for key in batches[0]
    }


def same_command(
    folder: pathlib.Path, model: Any, rows: Sequence[np.ndarray], settings: dict[str, Any], name: str = SETTINGS
) -> None:
    """Writes down what is captured (or operated on) in the file `name`, or compares it with what was.

    Raises:
      UserError: they differ.
    """
    digest = hashlib.sha256()
    for row in rows:
        digest.update(np.ascontiguousarray(row, np.int64).tobytes())
    settings |= {"class": type(model).__name__, "rows": len(rows), "text": digest.hexdigest()[:16]}
    with files.explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if (folder / name).exists():
        before = json.loads((folder / name).read_text("utf-8"))
        for key, value in settings.items():
            if before.get(key) != value:
                raise UserError(
                    f"{folder} holds a {pathlib.Path(name).stem} with {key}={before.get(key)}, now {value}: choose another --out, or remove it"
                )
        return
    files.write(folder / name, json.dumps(settings, indent=1) + "\n")


def digest_of_model(model: Any) -> str:
    """What all parameters and buffers of a PyTorch model are known by: experts that train on under a frozen router make another model."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def digest_of(arrays: Sequence[np.ndarray]) -> str:
    """What arrays are known by."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def check_ids(model: Any, rows: Sequence[np.ndarray]) -> None:
    """Refuses text of another tokenizer's ids, which a lookup would answer with a traceback.

    Raises:
      UserError: a token id that the model has no embedding of.
    """
    most, vocabulary = max((int(row.max()) for row in rows), default=0), len(model.get_input_embeddings().weight)
    if most >= vocabulary:
        raise UserError(
            f"--tokens: the text has token id {most}, the model knows {vocabulary:,}: use its own tokenizer"
        )


def rows_of(paths: Sequence[str], tokenizer: Any, length: int) -> tuple[list[np.ndarray], list[str]]:
    """Rows of `length` token ids of each text file, and the file's name of each; the rest of a file is left out.

    A name is without folder and ending, unless two files have it: theirs are their paths.

    Raises:
      UserError: a file is missing, no text, or shorter than a row.
    """
    rows, names = list[np.ndarray](), list[str]()
    stems = [pathlib.Path(path).stem for path in paths]
    for path in map(pathlib.Path, paths):
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--text={path}: {getattr(error, 'strerror', None) or 'it is no UTF-8 text'}") from error
        ids = (
            np.frombuffer(text.encode(), np.uint8).astype(np.int64)
            if tokenizer == BYTES
            else np.asarray(tokenizer(text)["input_ids"], np.int64)
        )
        if len(ids) < length:
            raise UserError(f"--text={path} has {len(ids)} tokens, less than one row: choose --length below it")
        some = ids[: len(ids) // length * length].reshape(-1, length)
        rows += [*some]
        names += [path.stem if stems.count(path.stem) == 1 else str(path)] * len(some)
    return rows, names


def load(model: str, tokens: str = "") -> tuple[Any, Any]:
    """(model, tokenizer) of transformers, by path or name; `tokens`: the tokenizer's, or `bytes`.

    Raises:
      UserError: transformers is not installed, or has no such model.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UserError("a capture needs PyTorch and transformers: pip install 'routed[torch]'") from error
    try:
        config = transformers.AutoConfig.from_pretrained(model)
        kinds = (
            (transformers.AutoModelForSeq2SeqLM,)
            if config.is_encoder_decoder
            else (transformers.AutoModelForCausalLM, transformers.AutoModel)
        )
        kind = next((kind for kind in kinds if type(config) in kind._model_mapping), kinds[-1])
        loaded = kind.from_pretrained(model, dtype="auto").to("cuda" if torch.cuda.is_available() else "cpu")
        reader = BYTES if tokens == BYTES else transformers.AutoTokenizer.from_pretrained(tokens or model)
    except (OSError, ValueError) as error:
        raise UserError(f"--model={model}: {str(error).splitlines()[0]}") from error
    return loaded, reader
