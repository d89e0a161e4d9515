"""Capture of a trace from a Hugging Face model on text, part by part, so that a killed capture continues.

An encoder-decoder gives two traces, OUT/encoder and OUT/decoder; its decoder reads the same tokens as its encoder.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging as log

from routed.system import files
from routed.trace.arrays import as_array
from routed.trace.features import KEPT, Features
from routed.trace.format import DESCRIPTION, Trace, read
from routed.trace.hooks import RouterModule, RouterOutput, listening, routers_of, weights_of
from routed.trace.model_inputs import check_ids
from routed.trace.resume import bind_folder
from routed.trace.writing import append, finish, parts_of

#: Tokens of a part, about: the most that a kill loses.
PART = 1 << 16
#: Scores of a part over layers and experts, at most: half a GiB of float32.
SCORES = 1 << 27


class _Part(NamedTuple):
    """A part of the rows: number of the first, the rows, and the indices of the tokens whose features are kept."""

    begin: int
    rows: Sequence[np.ndarray]
    sampled: np.ndarray


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
    """Runs `model` (of transformers) on rows of token ids of one length, and writes its routers' choices to `out`.

    `names` has the file of each row, for the label `file`. The same call continues a killed capture, and reads a
    finished one. Returns one trace, or two of an encoder-decoder.

    Raises:
      UserError: the architecture is unknown, the model lacks a token id, or `out` holds a capture of other rows or
      another model.
    """
    import torch

    check_ids(model, rows)
    folder, modules = files.folder(out), routers_of(model, routers, k)
    stacks = _stacks(folder, list(modules))
    settings = {"routers": list(modules), "k": k, "batch_size": batch_size, "keep_scores": keep_scores, "name": name}
    bind_folder(folder / "capture.json", model, rows, settings)
    if all((path / DESCRIPTION).exists() for path in stacks):
        return [read(path) for path in stacks]
    size = _part_size(modules, batch_size, len(rows[0]))
    done = min(map(parts_of, stacks))
    if done:
        log.info("continuing behind %d parts of %d rows", done, size)
    described = {"keep_scores": keep_scores, "model": name, "source": source}
    model.eval()
    with torch.no_grad(), listening(modules) as outputs:
        for part in _parts(rows, done * size, size):
            columns, features = _run(model, part, batch_size, outputs)
            for path, members in stacks.items():
                if parts_of(path) * size > part.begin:
                    continue  # this stack's part was written before the kill, the other's was not
                linear = [weights_of(modules[member].module) for member in members]
                append(
                    path,
                    **{key: [columns[member][key] for member in members] for key in columns[members[0]]},
                    **_token_arrays(part, names),
                    **described,
                    layers=members,
                    num_experts=columns[members[0]]["scores"].shape[1],
                    features=_features(part, [features[member] for member in members], linear),
                )
            log.info("%d of %d rows", part.begin + len(part.rows), len(rows))
    return [finish(path) for path in stacks]


def _stacks(folder: pathlib.Path, names: list[str]) -> dict[pathlib.Path, list[str]]:
    """Returns the routers of each trace by its folder; encoder and decoder have traces of their own."""
    inside = {stack: [name for name in names if stack in name.split(".")] for stack in ("encoder", "decoder")}
    if all(inside.values()) and sum(map(len, inside.values())) == len(names):
        return {folder / stack: members for stack, members in inside.items()}
    return {folder: names}


def _part_size(modules: Mapping[str, RouterModule], batch_size: int, length: int) -> int:
    """Returns the rows of a part, whole batches."""
    experts = [len(linear[1]) for module, _ in modules.values() if (linear := weights_of(module))]
    tokens = min(PART, SCORES // (len(modules) * max(experts, default=256)))
    return max(1, tokens // (batch_size * length)) * batch_size


def _parts(rows: Sequence[np.ndarray], begin: int, size: int) -> Iterator[_Part]:
    share = max(1, KEPT * size // max(len(rows), size))  # tokens of a part whose features are kept
    for first in range(begin, len(rows), size):
        some = rows[first : first + size]
        order = np.random.default_rng(first).permutation(len(some) * len(rows[0]))
        yield _Part(first, some, np.sort(order[:share]))


def _run(
    model: Any, part: _Part, batch_size: int, outputs: Mapping[str, RouterOutput]
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """Returns the arrays of `routed.trace.write` by router, and the sampled features by router, of a part."""
    import torch

    batches: list[dict[str, dict[str, np.ndarray]]] = []
    features: list[dict[str, np.ndarray]] = []
    for first in range(0, len(part.rows), batch_size):
        ids = torch.as_tensor(np.stack(part.rows[first : first + batch_size])).to(model.device)
        model(input_ids=ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}))
        batches.append({name: _arrays(output) for name, output in outputs.items()})
        begin = first * len(part.rows[0])
        here = part.sampled[(part.sampled >= begin) & (part.sampled < begin + ids.numel())] - begin
        features.append({name: as_array(_flat(output.features)[here]) for name, output in outputs.items()})
    columns = {
        name: {key: np.concatenate([batch[name][key] for batch in batches]) for key in arrays}
        for name, arrays in batches[0].items()
    }
    return columns, {name: np.concatenate([batch[name] for batch in features]) for name in features[0]}


def _flat(tensor: Any) -> Any:
    return tensor.reshape(-1, tensor.shape[-1])


def _arrays(output: RouterOutput) -> dict[str, np.ndarray]:
    """Returns the arrays of `routed.trace.write` of one layer."""
    arrays = {"scores": as_array(_flat(output.scores)), "experts": as_array(output.experts).astype(np.int16)}
    arrays["weights"] = as_array(output.weights)
    return arrays if output.kept is None else arrays | {"kept": as_array(output.kept)}


def _token_arrays(part: _Part, names: Sequence[str] | None) -> dict[str, Any]:
    """Returns the arrays of `routed.trace.write` that are of tokens, whatever the layer."""
    lengths, end = [len(row) for row in part.rows], part.begin + len(part.rows)
    arrays: dict[str, Any] = {
        "token_ids": np.concatenate(part.rows),
        "sequence": np.repeat(np.arange(part.begin, end), lengths),
    }
    return arrays if names is None else arrays | {"labels": {"file": np.repeat(names[part.begin : end], lengths)}}


def _features(
    part: _Part, values: list[np.ndarray], linear: list[tuple[np.ndarray, np.ndarray] | None]
) -> Features | None:
    """Returns the sampled features of a part; None if a router is not linear."""
    weights = [kernel_offset for kernel_offset in linear if kernel_offset is not None]
    if len(weights) < len(linear):
        return None
    return Features(part.sampled, values, [kernel for kernel, _ in weights], [offset for _, offset in weights])
