"""Capture of a trace from a Hugging Face model on text, part by part, so that a killed capture continues.

An encoder-decoder gives two traces, OUT/encoder and OUT/decoder. Its decoder reads the same text, behind its start
token and without the last token, as in training.
"""

from __future__ import annotations

import itertools
import os
import pathlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging as log

from routed.contracts import UserError
from routed.system import files
from routed.trace.checks import as_array
from routed.trace.features import MOST_TOKENS, Features
from routed.trace.format import DESCRIPTION, Trace, read
from routed.trace.hooks import RouterModule, check_heard, listening, routers_of, weights_of
from routed.trace.model_inputs import batches, bind_folder, check_ids, check_version
from routed.trace.readers import RouterOutput
from routed.trace.writing import append, finish, parts_of

#: Tokens of a part, about: the most that a kill loses.
PART = 1 << 16
#: Scores of a part over layers and experts, at most: half a GiB of float32.
SCORES = 1 << 27


def capture(
    model: Any,
    rows: Sequence[np.ndarray],
    out: str | os.PathLike,
    *,
    names: Sequence[str] | None = None,
    vocabulary: Any = None,
    batch_size: int = 8,
    routers: str = "",
    k: int = 0,
    keep_scores: bool = True,
    name: str = "",
    source: str = "",
) -> list[Trace]:
    """Runs `model` (of transformers) on rows of token ids of one length, and writes its routers' choices to `out`.

    `names` has the file of each row; `vocabulary` is the tokenizer. The same call continues a killed capture.

    Raises:
      UserError: transformers or a router is unknown, the model lacks a token id, or `out` holds another capture.
    """
    import torch

    check_version()
    check_ids(model, rows)
    modules, decoded = routers_of(model, routers, k), _decoded(model, rows)
    stacks = _stacks(folder := files.folder(out), list(modules))
    settings = {"routers": list(modules), "k": k, "batch_size": batch_size, "keep_scores": keep_scores, "name": name}
    bind_folder(folder / "capture.json", model, rows, settings | {"decoder_start": decoded and int(decoded[0][0])})
    if all((path / DESCRIPTION).exists() for path in stacks):
        return [read(path) for path in stacks]
    linear, length = [weights_of(router.module) for router in modules.values()], len(rows[0])
    experts = max((weights[0].shape[1] for weights in linear if weights), default=256)
    size = max(1, min(PART, SCORES // (len(modules) * experts)) // (batch_size * length)) * batch_size  # rows of a part
    if done := min(map(parts_of, stacks)):
        log.info("continuing behind %d parts of %d rows", done, size)
    share = max(1, MOST_TOKENS * size // max(len(rows), size))  # tokens of a part whose features are kept
    described = {"keep_scores": keep_scores, "model": name, "source": source, "vocabulary": vocabulary}
    model.eval()
    with torch.no_grad(), listening(modules) as outputs:
        for begin in range(done * size, len(rows), size):
            part = rows[here := slice(begin, begin + size)]
            sampled = np.sort(np.random.default_rng(begin).permutation(len(part) * length)[:share])
            columns, features = _run(model, modules, part, sampled, batch_size, outputs, decoded and decoded[here])
            for path, members in stacks.items():
                if parts_of(path) * size > begin:
                    continue  # this stack's part was written before the kill, the other's was not
                tokens = decoded if decoded and all("decoder" in name.split(".") for name in members) else rows
                values, weights = [features[member] for member in members], [_weights(outputs[m]) for m in members]
                append(
                    path,
                    **{key: [columns[member][key] for member in members] for key in columns[members[0]]},
                    **_token_arrays(tokens[here], begin, names),
                    layers=members,
                    num_experts=columns[members[0]]["scores"].shape[1],
                    features=Features(sampled, values, *zip(*weights, strict=True)) if all(weights) else None,
                    **described,
                )
            log.info("%d of %d rows", begin + len(part), len(rows))
    return [finish(path) for path in stacks]


def _stacks(folder: pathlib.Path, names: list[str]) -> dict[pathlib.Path, list[str]]:
    """Returns the routers of each trace by its folder; encoder and decoder have traces of their own."""
    inside = {stack: [name for name in names if stack in name.split(".")] for stack in ("encoder", "decoder")}
    if all(inside.values()) and sum(map(len, inside.values())) == len(names):
        return {folder / stack: members for stack, members in inside.items()}
    return {folder: names}


def _token_arrays(rows: Sequence[np.ndarray], begin: int, names: Sequence[str] | None) -> dict[str, Any]:
    """Returns the arrays of `routed.trace.write` that are of tokens, whatever the layer."""
    numbers, length = np.arange(begin, begin + len(rows)), len(rows[0])
    arrays: dict[str, Any] = {"token_ids": np.concatenate(rows), "sequence": np.repeat(numbers, length)}
    if names is not None:
        arrays["labels"] = {"file": np.repeat(names[begin : begin + len(rows)], length)}
    return arrays


def _decoded(model: Any, rows: Sequence[np.ndarray]) -> list[np.ndarray] | None:
    """Returns what the decoder of an encoder-decoder reads: its start token, then a row without its last token.

    Raises:
      UserError: an encoder-decoder names none.
    """
    if not model.config.is_encoder_decoder:
        return None
    configs = (getattr(model, "generation_config", None), model.config)
    starts = [start for c in configs if (start := getattr(c, "decoder_start_token_id", None)) is not None]
    if not starts:
        raise UserError("its config has no decoder_start_token_id, with which its decoder begins")
    return [np.concatenate([[starts[0]], row[:-1]]) for row in rows]


def _weights(output: RouterOutput) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns (kernel [D, E], offset [E]) of the linear map from a router's features to its scores."""
    if output.linear is None:
        return None
    weight, offset = output.linear
    return as_array(weight).T, np.zeros(len(weight), np.float32) if offset is None else as_array(offset)


def _run(
    model: Any,
    modules: Mapping[str, RouterModule],
    rows: Sequence[np.ndarray],
    sampled: np.ndarray,
    batch_size: int,
    outputs: Mapping[str, RouterOutput],
    decoder_rows: Sequence[np.ndarray] | None,
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """Returns the arrays of `routed.trace.write` by router, and the features of the tokens `sampled` by router."""
    columns: dict[str, dict[str, list[np.ndarray]]] = defaultdict(lambda: defaultdict(list))
    features: dict[str, list[np.ndarray]] = defaultdict(list)
    decoded: Iterable[Any] = itertools.repeat((0, None))
    if decoder_rows is not None:
        decoded = batches(model, decoder_rows, batch_size)
    for (begin, ids), (_, decoder_ids) in zip(batches(model, rows, batch_size), decoded, strict=False):
        model(input_ids=ids, **({} if decoder_ids is None else {"decoder_input_ids": decoder_ids}))
        check_heard(modules, outputs)
        here = sampled[(sampled >= begin) & (sampled < begin + ids.numel())] - begin
        for name, output in outputs.items():
            by_column = columns[name]
            by_column["scores"].append(as_array(output.scores))
            by_column["experts"].append(as_array(output.experts).astype(np.int16))
            by_column["weights"].append(as_array(output.weights))
            if output.kept is not None:
                by_column["kept"].append(as_array(output.kept))
            features[name].append(as_array(output.features[here]))
    joined = {name: {key: np.concatenate(parts) for key, parts in of.items()} for name, of in columns.items()}
    return joined, {name: np.concatenate(parts) for name, parts in features.items()}
