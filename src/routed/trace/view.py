"""Text with the experts of each token: a bounded sample of a trace as data for view.js, escaped."""

from __future__ import annotations

import base64
import json
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from routed.trace.analysis import Analysis
from routed.trace.format import Trace, rows_of, stripes, token_column, with_slices
from routed.trace.similarity import common

#: Bytes of the view's numbers on the page; tokens and experts of a token that it shows at most.
BYTES, TOKENS, SHOWN = 700_000, 4096, 8
#: Tokens of an excerpt, at least and at most.
SHORTEST, LONGEST = 16, 96
#: Tokens of a trace above which the view does without scores, whose columns take long to read.
SCORED = 1 << 18
#: Share of the excerpts in which most tokens changed their experts between checkpoints.
CHANGED = 1 / 3
#: Letters of a word that the page shows, and of another text.
WORD, NAME = 24, 60


def view_of(analysis: Analysis, texts: Mapping[int, str], seed: int = 0) -> Markup:
    """Returns the data of the view as JSON for a script element: excerpts, words, and experts by layer and token."""
    trace, before = analysis.trace, analysis.traces[-2] if len(analysis.traces) > 1 else None
    columns = [name for name in ("weight", "scores") if name in trace.columns]
    columns = [name for name in columns if name == "weight" or trace.tokens <= SCORED]
    shown, wide = min(trace.k, SHOWN), 1 if trace.experts < 256 else 2
    size = len(trace.layers) * shown * (wide * (1 if before is None else 2) + len(columns)) * 4 / 3 + 16
    most = max(1, min(TOKENS, int(BYTES / size), trace.tokens))
    excerpts, where = _excerpts(analysis, most, _changes(before, trace) if before else None, seed)
    position, data = token_column(trace, "position")[where], dict[str, Any]()
    if trace.has_ids:
        ids, token = np.unique(token_column(trace, "token")[where], return_inverse=True)
        data["ids"], data["words"] = ids.tolist(), [visible(texts.get(int(i), f"{i}"), WORD) for i in ids]
        data["token"], data["textual"] = token.tolist(), bool(texts)
    data |= {
        "layers": list(trace.layers),
        "experts": trace.experts,
        "shown": shown,
        "wide": wide,
        "excerpts": excerpts,
        "position": position.tolist(),
        "labels": {
            visible(name, NAME): {
                "names": [visible(value, NAME) for value in analysis.tokens.names[name]],
                "code": analysis.tokens.codes[name][where].tolist(),
            }
            for name in trace.labels
        },
        "left_out": trace.k - shown,
    }
    data |= _arrays(trace, where, columns, shown, wide)
    if before is not None:
        data["before"] = _arrays(before, where, [], shown, wide)["expert"]
        data["before_name"] = visible(_name(before), NAME)
    return escaped(data)


def escaped(data: Any) -> Markup:
    """Returns JSON in ASCII that no element of HTML can end: <, > and & are written by their numbers."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def visible(text: str, most: int) -> str:
    """Returns a text whose control characters are signs that can be seen, and that cannot turn its neighbours."""
    shown = "".join(map(_sign, text[:most])) + ("…" if len(text) > most else "")
    if shown.strip(" ") == "":
        return "␣" * max(1, len(shown))
    return f"◌{shown}" if unicodedata.category(shown[0]) in ("Mn", "Me") else shown


def _sign(letter: str) -> str:
    if letter == "\n":
        return "↵"
    if ord(letter) < 32:
        return chr(0x2400 + ord(letter))
    joins = letter in "\u200c\u200d"  # needed to write Persian and to join emoji
    return f"‹{ord(letter):04X}›" if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Co") and not joins else letter


def _name(trace: Trace) -> str:
    return f"step {trace.step}" if trace.step is not None else trace.folder.name


def _changes(before: Trace, after: Trace) -> np.ndarray:
    """Returns how many experts of each token changed between two checkpoints, over all layers [T]."""
    changed = np.zeros(after.tokens, np.int32)
    for layer in range(len(after.layers)):
        both = zip(stripes(before, layer, "expert"), stripes(after, layer, "expert"), strict=True)
        for here, (old, new) in with_slices((old, new) for (old,), (new,) in both):
            changed[here] += (old >= 0).sum(1) - common(old, new)
    return changed


def _excerpts(
    analysis: Analysis, most: int, changed: np.ndarray | None, seed: int
) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Returns excerpts, and the rows of the trace in them: windows of sequences, as many of each label as of another.

    The first window of a sequence comes before its values_of. Windows with most changes come first of all.
    """
    tokens, random = analysis.tokens, np.random.default_rng(seed)
    length = int(np.clip(most // 24, SHORTEST, LONGEST))
    starts = np.flatnonzero(np.diff(tokens.sequence, prepend=-1))
    if len(tokens.sequence) < 4 * len(starts):  # sequences of single tokens: windows of several
        starts = np.array([0])
    ends = np.append(starts[1:], len(tokens.sequence))
    counts = -(-(ends - starts) // length)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    index = np.arange(counts.sum()) - first
    begins = np.repeat(starts, counts) + index * length
    stops = np.minimum(begins + length, np.repeat(ends, counts))
    kinds = next((name for name, code in tokens.by_sequence.items() if code is not None and name in tokens.names), "")
    kind = tokens.codes[kinds][begins] if kinds else np.zeros(len(begins), int)
    order = np.lexsort((random.random(len(begins)), index))
    order = order[np.argsort(kind[order], kind="stable")]
    rank = np.arange(len(order)) - np.searchsorted(kind[order], kind[order])  # within its kind
    order = order[np.argsort(rank, kind="stable")]
    chosen = [(int(window), False) for window in order[: max(1, most // length)]]
    if changed is not None:
        sums = np.add.reduceat(changed, begins) / (stops - begins)
        top = np.argsort(-sums, kind="stable")[: max(1, int(CHANGED * len(chosen)))]
        rest = [entry for entry in chosen if entry[0] not in set(top.tolist())]
        chosen = ([(int(window), True) for window in top] + rest)[: len(chosen)]
    excerpts, where = list[dict[str, Any]](), list[np.ndarray]()
    for window, is_changed in chosen:
        begin, stop = int(begins[window]), int(min(stops[window], begins[window] + most))
        where.append(np.arange(begin, stop))
        excerpts.append({"sequence": int(tokens.sequence[begin]), "tokens": stop - begin, "changed": is_changed})
    return excerpts, np.concatenate(where)


def _arrays(trace: Trace, where: np.ndarray, columns: Sequence[str], shown: int, wide: int) -> dict[str, Any]:
    """Returns expert, and the columns, as base64 of [layers, tokens, shown]: experts + 1 (0: none), and parts in 255
    between the ends of a layer's values.
    """
    order = np.argsort(where, kind="stable")
    back = np.argsort(order, kind="stable")
    experts, values = [], {name: list[np.ndarray]() for name in columns}
    for layer in range(len(trace.layers)):
        expert, *rest = (array[back] for array in rows_of(trace, layer, where[order], "expert", *columns))
        values_of = dict(zip(columns, rest, strict=True))
        if "scores" in values_of:
            values_of["scores"] = np.take_along_axis(values_of["scores"], np.maximum(expert, 0).astype(np.int64), 1)
        rank = np.where(expert >= 0, -values_of.get("weight", np.zeros(expert.shape)), np.inf)
        first = np.argsort(rank, axis=1, kind="stable")[:, :shown]
        experts.append(np.take_along_axis(expert, first, 1))
        for name, array in values_of.items():
            shown_here = np.take_along_axis(np.where(expert >= 0, array, 0), first, 1)  # -1 may have any weight
            values[name].append(shown_here.astype(float))
    data: dict[str, Any] = {"expert": _base64((np.stack(experts) + 1).astype(f"<u{wide}"))}
    for name, by_layer in values.items():
        ends = [(float(np.nanmin(array)), float(np.nanmax(array))) for array in by_layer]
        both = zip(by_layer, ends, strict=True)
        parts = [np.round(255 * (array - low) / max(high - low, 1e-12)) for array, (low, high) in both]
        data[name] = {"ends": [[float(f"{end:.4g}") for end in pair] for pair in ends]}
        data[name]["parts"] = _base64(np.nan_to_num(np.stack(parts)).astype(np.uint8))
    return data


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()
