"""Claims: sentences that a run can prove wrong, written down before it runs. Each kind is a class that judges the rows.

The kinds that most experiments use are here: `order` (one side is lower than the other), `null` (two sides are
equivalent), `number` (the paper's value lies in our prediction interval for one run) and `beside` (a number on a scale
that the paper does not state: both are shown, nothing is judged). Other kinds register themselves in `KINDS`.
"""

from routed.analysis.claims.claim import (
    FAIREST,
    FROZEN,
    KINDS,
    LEARNED,
    Along,
    Claim,
    OneSide,
    Point,
    Reading,
    Setup,
    Side,
    Stakes,
    TwoSides,
)
from routed.analysis.claims.comparison import Comparison, Equivalence, Order
from routed.analysis.claims.number import Beside, Measured, Number
from routed.analysis.claims.preconditions import Precondition
from routed.analysis.claims.writer import Writer, comparability

KINDS |= {kind.kind: kind for kind in (Order, Equivalence, Number, Beside)}

__all__ = [
    "FAIREST", "FROZEN", "KINDS", "LEARNED", "Along", "Beside", "Claim", "Comparison", "Equivalence", "Measured",
    "Number", "OneSide", "Order", "Point", "Precondition", "Reading", "Setup", "Side", "Stakes", "TwoSides", "Writer",
    "comparability"
]  # fmt: skip
