"""Routing traces: choices of the routers of any model, in an open format, with one page of statistics.

    routed.trace.write("trace", scores=scores, k=2, token_ids=ids, sequence=rows, labels={"language": languages})

writes a trace from arrays; `python -m routed.trace report trace` makes its page, and `routed.analyse` does both.
`read_vllm` and its like give these arguments from files of other programs. The format is in docs/traces.md.
"""

from collections.abc import Callable
from typing import Any

from routed.trace.engines import read_olmoe, read_sglang, read_vllm
from routed.trace.features import Features
from routed.trace.format import Trace, read
from routed.trace.megatron import read_megatron
from routed.trace.tensors import export, read_hf, read_npz
from routed.trace.writing import append, finish, parts_of, write

#: Format of another program -> the function that reads it.
FORMATS: dict[str, Callable[..., dict[str, Any]]] = {
    "vllm": read_vllm,
    "sglang": read_sglang,
    "megatron": read_megatron,
    "hf": read_hf,
    "olmoe": read_olmoe,
    "npz": read_npz,
}

__all__ = ["FORMATS", "Features", "Trace", "append", "export", "finish", "parts_of", "read", "write"]
__all__ += [function.__name__ for function in FORMATS.values()]
