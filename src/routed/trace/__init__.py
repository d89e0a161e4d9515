"""Routing traces: what the routers of any model decided, in an open format, and one page of what that says.

    routed.trace.write("trace", scores=scores, k=2, token_ids=ids, sequence=rows, labels={"language": languages})

writes one from arrays; `python -m routed.trace report trace` makes its page, and `routed.analyse` does both. docs/traces.md has the format.
"""

from routed.trace.features import Features
from routed.trace.format import Trace, read
from routed.trace.writing import append, finish, parts_of, write

__all__ = ["Features", "Trace", "append", "finish", "parts_of", "read", "write"]
