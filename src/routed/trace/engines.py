"""Routing that serving and training engines wrote, read as the arguments of `routed.trace.write`.

    routed.trace.write("trace", **routed.trace.read_vllm("responses.jsonl", num_experts=128))

These engines write the chosen experts. They do not write the number of experts: the caller gives it.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging as log

from routed.contracts import UserError
from routed.system import files
from routed.trace import checks

#: An array of choices is stored with two bytes for an expert, as vLLM has it.
KIND = np.int16


class Responses:
    """Experts [n, layers, k] of tokens, sequence after sequence, and token ids where every sequence has them."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.experts: list[np.ndarray] = []
        self.ids: list[np.ndarray | None] = []
        self.begins: list[int] = []

    def add(self, experts: np.ndarray, ids: Sequence[int] | None, begin: int = 0) -> None:
        """Adds a sequence whose first token has the position `begin`. Its last token may have ids and no experts."""
        if self.experts and experts.shape[1:] != self.experts[0].shape[1:]:
            shapes = f"[layers, k] {list(experts.shape[1:])}, the first one {list(self.experts[0].shape[1:])}"
            raise UserError(f"{self.path}: sequence {len(self.experts)} has {shapes}: one file is of one model")
        if ids is not None and len(ids) - len(experts) not in (0, 1):
            rows = f"{len(experts)} rows of experts for {len(ids)} tokens"
            raise UserError(f"{self.path}: sequence {len(self.experts)} has {rows}: must be as many, or one row less")
        self.experts.append(experts)
        self.ids.append(None if ids is None else whole_numbers(self.path, ids)[: len(experts)])
        self.begins.append(begin)

    def arguments(self, num_experts: int, how_ids: str) -> dict[str, Any]:
        """Returns the arguments of `routed.trace.write`. Layers without routers, whose rows are all 0, are left out."""
        if not sum(map(len, self.experts)):
            raise UserError(f"{self.path} has no token with experts: keep answers of at least one token")
        experts = np.concatenate(self.experts).swapaxes(0, 1)
        has_router = [i for i, layer in enumerate(experts) if layer.any()]
        if not has_router:
            raise UserError(f"{self.path} has expert 0 alone, as engines write layers without a router")
        if len(has_router) < len(experts):
            log.info("layers without a router left out: %s", sorted(set(range(len(experts))) - set(has_router)))
        lengths = [len(rows) for rows in self.experts]
        all_ids = None
        if any(ids is None for ids in self.ids):
            log.info("%s has no token ids for every sequence; to have them: %s", self.path, how_ids)
        else:
            all_ids = np.concatenate([ids for ids in self.ids if ids is not None])
        spans = zip(lengths, self.begins, strict=True)
        return {
            "experts": [experts[i] for i in has_router],
            "num_experts": num_experts,
            "layers": [str(i) for i in has_router],
            "token_ids": all_ids,
            "sequence": np.repeat(np.arange(len(lengths)), lengths),
            "position": np.concatenate([begin + np.arange(length) for length, begin in spans]),
            "source": self.path.name,
        }


def read_vllm(path: str | os.PathLike, num_experts: int) -> dict[str, Any]:
    """Reads answers of vLLM, one a line of JSON, or `RequestOutput`s as dicts of prompt_token_ids and outputs.

    `routed_experts` [tokens, layers, k] of a choice are nested lists, or base64 of an .npy file. They begin with the
    prompt, unless the answer has `prompt_routed_experts`. The prompt of several choices is taken once. Choices of
    several prompts have their own `prompt_token_ids`.

    Raises:
      UserError: a line is no answer of vLLM, or rows and token ids do not agree.
    """
    file, responses = files.folder(path), Responses(files.folder(path))
    for number, record in records(file):
        where = f"{file}, answer {number}"
        choices = record.get("choices", record.get("outputs"))
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise UserError(f"{where}: it has neither choices nor outputs, as answers of vLLM have")
        apart, before = record.get("prompt_routed_experts"), list[list[int]]()
        for choice in choices:
            prompt_ids, ids = choice.get("prompt_token_ids") or record.get("prompt_token_ids"), choice.get("token_ids")
            for part in (prompt_ids, ids):
                if part not in (None, []):
                    whole_numbers(file, part)
            rows = _of_vllm(where, choice.get("routed_experts"))
            if apart is not None:
                first = _of_vllm(where, apart)
                rows, prompt = np.concatenate([first, rows]), len(first)
            else:  # a chat has one prompt, other requests may have several
                usage = record.get("usage") if "message" in choice else None
                prompt = len(prompt_ids or ()) or (usage or {}).get("prompt_tokens", 0)
            if not prompt and len(choices) > 1:
                raise UserError(f"{where} has several choices and no ids of the prompt: ask with return_token_ids")
            both = None if ids is None or prompt_ids is None else [*prompt_ids, *ids]
            key = prompt_ids or []
            begin = prompt if key in before else 0
            before.append(key)
            responses.add(rows[begin:], both and both[begin:], begin)
    return responses.arguments(num_experts, 'ask with "return_token_ids": true')


def _of_vllm(where: str, value: Any) -> np.ndarray:
    if value is None:
        raise UserError(f"{where} has no routed_experts: start the engine with --enable-return-routed-experts")
    if isinstance(value, str):
        try:
            value = np.load(io.BytesIO(base64.b64decode(value, validate=True)), allow_pickle=False)
        except (ValueError, EOFError, binascii.Error) as error:
            raise UserError(f"{where}: routed_experts is no .npy file in base64 ({error})") from error
    return choices_of(where, value, "routed_experts")


def read_sglang(path: str | os.PathLike, num_experts: int, k: int) -> dict[str, Any]:
    """Reads answers of SGLang, one a line of JSON.

    `meta_info.routed_experts` (of a chat: `sglext.routed_experts`) is base64 of int32 [tokens, layers, k] without its
    shape, so k is needed. The last token has no row. Token ids are those of `input_ids` and `output_ids`, or of
    `input_token_logprobs` and `output_token_logprobs`.

    Raises:
      UserError: a line is no answer of SGLang, or its numbers are not whole rows.
    """
    if k < 1:
        raise UserError(f"k={k}: give the number of experts per token, at least 1")
    file, responses = files.folder(path), Responses(files.folder(path))
    for number, record in records(file):
        where = f"{file}, answer {number}"
        try:
            about = record["meta_info"] if "meta_info" in record else record["usage"]
            encoded = (about if "routed_experts" in about else _extension(record))["routed_experts"]
            rows = int(about["prompt_tokens"]) + int(about["completion_tokens"]) - 1
            flat = np.frombuffer(base64.b64decode(encoded, validate=True), np.int32)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            needed = "prompt_tokens, completion_tokens and routed_experts (base64 of int32)"
            raise UserError(f"{where}: {needed} are needed; ask with return_routed_experts ({error!r})") from error
        if rows < 1 or not len(flat) or len(flat) % (rows * k):
            raise UserError(f"{where}: {len(flat)} experts are no whole layers of {rows} tokens with k={k}")
        responses.add(choices_of(where, flat.reshape(rows, -1, k), "routed_experts"), _ids_of_sglang(record))
    return responses.arguments(num_experts, "keep input_ids, or ask with return_logprob and logprob_start_len=0")


def _extension(record: dict[str, Any]) -> dict[str, Any]:
    """Returns what SGLang adds to an answer of a chat: of the answer, or of its choice."""
    return record["sglext"] if "sglext" in record else record["choices"][0]["sglext"]


def _ids_of_sglang(record: dict[str, Any]) -> list[int] | None:
    about, parts = record.get("meta_info") or record.get("usage") or {}, list[list[int]]()
    for name in ("input", "output"):
        ids, logprobs = record.get(f"{name}_ids"), about.get(f"{name}_token_logprobs")
        if ids is None and logprobs is not None:
            try:
                ids = [row[1] for row in logprobs]
            except (TypeError, IndexError):
                return None
        if not isinstance(ids, list):
            return None
        parts.append(ids)
    both = parts[0] + parts[1]
    expected = about.get("prompt_tokens", 0) + about.get("completion_tokens", 0)
    return both if len(both) == expected else None


def read_olmoe(path: str | os.PathLike, num_experts: int) -> dict[str, Any]:
    """Reads lines of JSON of OLMoE's analysis: `input_ids` [tokens] and `exp_ids` [tokens, k, layers].

    Raises:
      UserError: a line has other fields, or shapes do not agree.
    """
    file, responses = files.folder(path), Responses(files.folder(path))
    for number, record in records(file):
        if not {"input_ids", "exp_ids"} <= record.keys():
            raise UserError(f"{file}, line {number}: input_ids and exp_ids are needed, as OLMoE's analysis writes them")
        experts = choices_of(f"{file}, line {number}", record["exp_ids"], "exp_ids").swapaxes(1, 2)
        if (tokens := len(whole_numbers(file, record["input_ids"]))) != len(experts):
            raise UserError(f"{file}, line {number}: {tokens} input_ids, {len(experts)} exp_ids")
        responses.add(experts, record["input_ids"])
    return responses.arguments(num_experts, "write input_ids")


def choices_of(where: str, value: Any, name: str) -> np.ndarray:
    """Returns choices of experts with three axes as int16.

    Raises:
      UserError: they are no integers, or have other axes.
    """
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise UserError(f"{where}: {name} has rows of different lengths") from error
    if array.ndim != 3 or array.dtype.kind not in "iu":
        raise UserError(f"{where}: {name} has shape {list(array.shape)} of {array.dtype}: must be integers on 3 axes")
    if array.size and not -1 <= array.min() <= array.max() < checks.MOST_EXPERTS:
        raise UserError(f"{where}: {name} has expert {array.max()}: a trace holds 0 to {checks.MOST_EXPERTS - 1}")
    return array.astype(KIND)


def whole_numbers(path: pathlib.Path, values: Any) -> np.ndarray:
    """Returns token ids as an array."""
    try:
        array = np.asarray(values)
    except ValueError:
        array = np.zeros((0, 0))
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UserError(f"{path}: token ids must be a list of integers")
    return array


def records(path: pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (number, object) of a file of JSON: an object a line, one object, or a list of them.

    Raises:
      UserError: the file is missing or damaged.
    """
    number = 0
    try:
        with path.open(encoding="utf-8") as file:
            head = file.read(1)
            file.seek(0)
            whole = head == "[" or path.suffix == ".json"
            for text in [file.read()] if whole else file:
                if not text.strip():
                    continue
                value = json.loads(text)
                for record in value if isinstance(value, list) else [value]:
                    number += 1
                    if not isinstance(record, dict):
                        raise UserError(f"{path}, {number}: {str(record)[:40]!r} is no object of JSON")
                    yield number, record
    except OSError as error:
        raise UserError(f"{path} cannot be read ({(error.strerror or str(error)).lower()})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON after object {number} ({error})") from error
