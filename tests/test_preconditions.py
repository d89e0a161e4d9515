"""What a claim needs before it has a verdict, and the share of a gain, on tables whose answer is known."""

import numpy as np
import pytest

from routed.analysis.claims import Precondition
from routed.analysis.verdicts import judge
from routed.plan.config import base
from routed.settings.tree import override
from tests.test_claims import comparison, number, order, table

#: Learning gains .1 of the .4 that the oracle gains over frozen; the oracle gains .3 over the hash, .2 over the dense
#: net.
NATS = {
    "learned": [1.30, 1.31, 1.29, 1.30],
    "frozen": [1.40, 1.41, 1.392, 1.398],
    "oracle_dialect": [1.00, 1.02, 0.98, 1.00],
    "hash_token": [1.30, 1.31, 1.292, 1.298],
    "dense_active": [1.20, 1.21, 1.19, 1.20],
}
#: A task without a constant to beat.
CONFIG = override(base(), {"data.name": "gated_gaussians"})
NEEDS = tuple(Precondition("oracle_dialect", worse, 0.05, "test/loss") for worse in ("hash_token", "dense_active"))


def verdict(claim, rows):
    return judge((claim,), rows, CONFIG, ["data.samples"])[0]


@pytest.mark.parametrize(("lower", "higher"), [("learned", "frozen"), ("frozen", "learned")])
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"hash_token": [1.04] * 4}, "oracle_dialect gains only 0.040 [0.014, 0.066] over hash_token (needed 0.05)"),
        (
            {"dense_active": [1.04] * 4},
            "oracle_dialect gains only 0.040 [0.014, 0.066] over dense_active (needed 0.05)",
        ),
        (
            {"dense_active": [1.06] * 4},
            "oracle_dialect gains only 0.060 [0.034, 0.086] over dense_active (needed 0.05)",
        ),
        ({"dense_active": [1.10] * 4}, None),  # .1 [.074, .126]
        ({"hash_token": [0.5] * 4}, "oracle_dialect gains only -0.500 [-0.526, -0.474] over hash_token (needed 0.05)"),
        ({"hash_token": [1.3]}, "oracle_dialect gains only 0.3 over hash_token (needed 0.05)"),
        ({"oracle_dialect": []}, "nobody knows what oracle_dialect gains over hash_token (needed 0.05)"),
    ],
)
def test_a_claim_has_a_verdict_only_where_what_it_needs_is_seen(lower, higher, changes, why):
    """In neither direction; of the interval, and over each of them."""
    claim = order(lower, higher, unit="difference", needs=NEEDS)
    found = verdict(claim, table(NATS | changes))
    assert verdict(claim.replace(needs=()), table(NATS | changes))["verdict"] == found["verdict"] or why
    if why is None:
        assert found["verdict"] == ("supported" if lower == "learned" else "opposite")
    else:
        assert found["verdict"] == "inconclusive" and found["reason"] == f"{why}, so this setting cannot tell"


def test_equivalences_and_numbers_have_needs_too():
    weak = table(NATS | {"hash_token": [1.0] * 4})
    null = comparison("null", "learned", "hash_token", unit="difference", needs=NEEDS)
    loss = number(1.3).replace(metric="test/loss", unit="difference", needs=NEEDS, uninformed=5.0)
    for claim, verdict_of_strong in ((null, "supported"), (loss, "reproduced")):
        assert verdict(claim, table(NATS))["verdict"] == verdict_of_strong
        found = verdict(claim, weak)
        assert found["verdict"] == "inconclusive" and "so this setting cannot tell" in found["reason"]


def share_of(**changes):
    return comparison("share", **{"best": {"arm": "oracle_dialect"}, "unit": "difference"} | changes)


def test_a_kind_that_does_not_look_at_its_needs_has_its_verdict_taken_back(monkeypatch):
    claim = comparison("null", "learned", "hash_token", unit="difference", needs=NEEDS)
    monkeypatch.setattr(type(claim), "judge", lambda self, rows: {"verdict": "supported", "n": 4})
    assert verdict(claim, table(NATS))["verdict"] == "supported"
    found = verdict(claim, table(NATS | {"hash_token": [1.0] * 4}))
    assert found["verdict"] == "inconclusive" and "so this setting cannot tell" in found["reason"]


def test_the_share_of_a_gain_is_of_means_and_paired_by_seed():
    """Learning gains .1 in every seed, and the oracle .4: a quarter. Seeds that differ alike make no interval."""
    found = verdict(share_of(needs=NEEDS), table(NATS))
    assert found["verdict"] == "measured" and found["n"] == 4 and found["p"] is None
    assert found["ours"] == pytest.approx(0.25) and found["interval"][0] < 0.25 < found["interval"][1]
    assert (
        found["text"].startswith("25 % [")
        and "(frozen - learned) / (frozen - oracle_dialect) = 0.1000 [" in found["text"]
    )
    gains = np.array([0.2, 0.4, 0.6, 0.8])  # of which a quarter is captured in every seed
    alike = {"frozen": [1.4] * 4, "oracle_dialect": list(1.4 - gains), "learned": list(1.4 - gains / 4)}
    assert verdict(share_of(), table(alike))["interval"] == pytest.approx([0.25, 0.25])
    # A learned router that is worse than the frozen one has a share below 0.
    assert verdict(share_of(lower={"arm": "hash_token"}), table(NATS | {"hash_token": [1.5] * 4}))["ours"] < 0


@pytest.mark.parametrize(
    ("changes", "needs", "why"),
    [
        ({"dense_active": [1.0] * 4}, NEEDS, "oracle_dialect gains only 0.000 [-0.026, 0.026] over dense_active"),
        ({"oracle_dialect": [1.39, 1.42, 1.38, 1.41]}, (), "oracle_dialect may gain nothing over frozen"),
        ({"frozen": [0.9] * 4}, NEEDS, "oracle_dialect may gain nothing over frozen"),
    ],
)
def test_there_is_no_share_of_what_may_be_nothing(changes, needs, why):
    found = verdict(share_of(needs=needs), table(NATS | changes))
    assert found["verdict"] == "inconclusive" and found["reason"].startswith(why)
    assert found["ours"] is None and found["n"] == 4


def test_a_share_without_runs_is_not_run():
    assert verdict(share_of(best={"arm": "oracle"}), table(NATS))["verdict"] == "not run"
