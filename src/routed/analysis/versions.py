"""Versions of the rules by which claims are judged."""

#: Version of the rules by which claims are judged -> its change. A change of a rule that can turn a verdict is a new
#: version: pages of earlier ones are judged again (`routed report --rejudge`), or say that they were not.
CHANGES = {
    1: "the rules of 22 November 2026",
    2: "intervals of bootstraps are as wide as t intervals, exponents leave bounds out, counts of successful runs have"
    " exact tests (24 November 2026)",
    3: "no verdict where the side that did better lost runs (25 November 2026)",
    4: "every kind of claim knows diverged runs, missed and missing controls, ends of grids, winners behind a constant"
    " and values equal in every seed; predictions are judged by their interval, numbers need power, bootstraps have"
    " p values in the family (27 November 2026)",
}
RULES = max(CHANGES)
