"""Routing traces: choices of the routers of any model, in an open format, with one page of statistics.

    routed.trace.write("trace", scores=scores, k=2, token_ids=ids, sequence=rows, labels={"language": languages})

writes a trace from arrays; `python -m routed.trace report trace` makes its page, and `routed.analyse` does both. The
format is in docs/traces.md.
"""

from routed.trace.features import Features
from routed.trace.format import Trace, read
from routed.trace.writing import append, finish, parts_of, write

__all__ = ["Features", "Trace", "append", "finish", "parts_of", "read", "write"]
