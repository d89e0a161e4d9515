"""Versions of the rules by which claims are judged."""

#: Version of the rules by which claims are judged -> its change. A change of a rule that can turn a verdict is a new
#: version: pages of earlier ones are judged again (`routed report --rejudge`), or say that they were not.
CHANGES = {
    1: "the rules of 22 November 2026",
    2: "bootstrap intervals are as wide as t intervals, exponents omit sizes that are known only as bounds, counts of"
    " successful runs have exact tests (24 November 2026)",
    3: "no verdict where the side that did better lost runs (25 November 2026)",
    4: "every claim is checked for diverged runs, failed or missing controls, learning rates at an end of their grid,"
    " winners worse than a constant and values equal in every seed; predictions are judged by their interval, numbers"
    " need power, Holm's correction includes bootstraps (27 November 2026)",
    5: "what a user sets is the user's claim also where a figure sets nothing; runs without a value of the metric are"
    " lost runs; exact tests for rates that differ; predictions need two seeds a point, are extrapolated, and have p"
    " values; no exponent from a level that a fortieth of the draws miss (28 November 2026)",
    6: "a setting is compared with the figure's own points, not with points made from the user's settings; rules of"
    " verdicts that a user changes make a claim the user's; competence on text is judged by the interval of the gain"
    " on counts; infinite values are lost runs; edges of grids are those of an arm's own rate; ratios need positive"
    " values (28 November 2026)",
    7: "a number of fewer than eight runs needs an interval that is narrow in logarithms, too (28 November 2026)",
}
RULES = max(CHANGES)
