"""Router traces of Megatron-LM (`--moe-routing-trace-path`), read as the arguments of `routed.trace.write`."""

from __future__ import annotations

import os
import pathlib
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from absl import logging as log

from routed.contracts import UserError
from routed.system import files
from routed.trace.engines import choices_of, records


class Record(NamedTuple):
    """Experts [n, k] of a layer in one step of a rank, and where its scores [n, E] are, if they were kept."""

    experts: np.ndarray
    scores: tuple[pathlib.Path, int, tuple[int, int]] | None


class Scores(Sequence[np.ndarray]):
    """Scores [tokens, E] of each layer, read when they are asked for."""

    def __init__(self, layers: list[list[Record]]) -> None:
        self.layers = layers

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: Any) -> Any:
        return np.concatenate([_read_scores(record) for record in self.layers[layer]])


def read_megatron(path: str | os.PathLike, num_experts: int | None = None) -> dict[str, Any]:
    """Reads a folder of `router_trace_rank*.jsonl`, and `logits_rank*.bin` beside them, if scores were kept.

    A line has `top_indices` [tokens, k] of a layer in a step. Tokens stand rank by rank, in the order of the lines.
    The files have no token ids and no sequences. Layers of other blocks than the decoder are left out. Without scores
    `num_experts` is needed. A rank that wrote the same choices as an earlier one has the same tokens and is left out.

    Raises:
      UserError: no such file, a line of another form, or layers with different numbers of tokens.
    """
    folder = files.folder(path)
    traces = sorted(folder.glob("router_trace_rank*.jsonl"), key=lambda file: int("0" + re.sub(r"\D", "", file.name)))
    if not traces:
        raise UserError(f"{folder} has no router_trace_rank*.jsonl: give the folder of --moe-routing-trace-path")
    layers, ranks = defaultdict[int, list[Record]](list), dict[bytes, pathlib.Path]()
    for file in traces:
        of_rank = _read_rank(file)
        key = b"".join(record.experts.tobytes() for layer in sorted(of_rank) for record in of_rank[layer])
        if (same := ranks.setdefault(key, file)) != file:
            log.info("%s left out: it has the choices of %s", file.name, same.name)
            continue
        for layer, some in of_rank.items():
            layers[layer] += some
    numbers = sorted(layers)
    sizes = {layer: [record.experts.shape for record in layers[layer]] for layer in numbers}
    for layer in numbers[1:]:
        if sizes[layer] != sizes[numbers[0]]:
            raise UserError(f"{folder}: layers {numbers[0]} and {layer} have different tokens or k: trace them again")
    every = [layers[layer] for layer in numbers]
    arguments: dict[str, Any] = {
        "experts": [np.concatenate([record.experts for record in layer]) for layer in every],
        "layers": [str(layer) for layer in numbers],
        "source": folder.name,
    }
    if all(record.scores for layer in every for record in layer):
        arguments["scores"] = Scores(every)
    elif num_experts is None:
        raise UserError(f"{folder} has no scores, so the number of experts is unknown: give --experts=N")
    return arguments | {"num_experts": num_experts}


def _read_rank(file: pathlib.Path) -> dict[int, list[Record]]:
    """Returns the records of each layer of the decoder, in the order of the file."""
    layers, blocks = defaultdict[int, list[Record]](list), set[str]()
    for number, record in records(file):
        where = f"{file}, line {number}"
        if (block := record.get("block", "decoder")) != "decoder":
            blocks.add(str(block))
            continue
        experts = choices_of(where, [record.get("top_indices")], "top_indices")[0]
        layer = record.get("layer")
        if not isinstance(layer, int) or record.get("num_tokens", len(experts)) != len(experts):
            raise UserError(f"{where}: layer and num_tokens {record.get('num_tokens')} must be those of top_indices")
        scores = None
        if "logit_offset" in record:
            sidecar = file.with_name(file.name.replace("router_trace", "logits").replace(".jsonl", ".bin"))
            given = record.get("logit_shape")
            shape = tuple(given) if isinstance(given, list) else ()
            whole = [record["logit_offset"], *shape]
            if len(shape) != 2 or shape[0] != len(experts) or not all(isinstance(n, int) and n >= 0 for n in whole):
                raise UserError(f"{where}: logit_offset and logit_shape {list(shape)} do not fit {len(experts)} tokens")
            scores = (sidecar, record["logit_offset"], shape)
        layers[layer].append(Record(experts, scores))
    if blocks:
        log.info("%s: layers of the block %s left out", file.name, ", ".join(sorted(blocks)))
    if not layers:
        raise UserError(f"{file} has no layers of the decoder: no router ran while it was traced")
    return layers


def _read_scores(record: Record) -> np.ndarray:
    assert record.scores is not None
    file, offset, shape = record.scores
    count = shape[0] * shape[1]
    try:
        scores = np.fromfile(file, jnp.bfloat16, count, offset=offset)
    except OSError as error:
        raise UserError(f"{file} cannot be read ({(error.strerror or str(error)).lower()})") from error
    if len(scores) != count:
        raise UserError(f"{file} is cut: {count} numbers at {offset} are not there")
    return scores.astype(np.float32).reshape(shape)
