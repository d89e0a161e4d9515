"""Other routers on a trace's features: the trained one is itself, a blind one knows nothing, and parts are joined."""

import pathlib

import numpy as np
import pytest

import routed
from routed import trace
from routed.contracts import UserError
from routed.trace import analysis, features, tokens

RNG = np.random.default_rng(2)
TOKENS, DIM, EXPERTS = 800, 6, 4
LABEL = RNG.integers(0, EXPERTS, TOKENS)
#: The first four features say the label, the others nothing; the trained router reads those of the label.
VALUES = np.concatenate([3 * np.eye(EXPERTS)[LABEL], np.zeros((TOKENS, 2))], 1).astype(np.float32)
VALUES += 0.01 * RNG.standard_normal(VALUES.shape).astype(np.float32)
KERNEL = np.eye(DIM, EXPERTS, dtype=np.float32)
GIVEN = {"k": 1, "labels": {"kind": LABEL}, "sequence": np.arange(TOKENS) // 10}


def features_of(where, layers=1, kernel=KERNEL, **more):
    return features.Features(where, [VALUES[where]] * layers, [kernel] * layers, **more)


def test_the_trained_router_on_all_features_is_that_of_the_trace(tmp_path):
    tables = routed.analyse((VALUES @ KERNEL)[None], out=tmp_path, features=features_of(np.arange(TOKENS)), **GIVEN)
    ours = tables["numbers"].set_index("number").value
    for row in tables["controls"].itertuples():
        assert row.trained == pytest.approx(ours[row.number], rel=0.02), row.number  # halves and shuffles are others
    row = tables["controls"].set_index("number").loc["mi.kind"]
    assert row.trained == pytest.approx(np.log(4), rel=0.01) and row.trained > row.initial > row.chance
    assert any("a random router carries" in text for text in tables["findings"])
    assert "Other routers on the same features" in (tmp_path / "report.html").read_text()


def test_a_router_of_what_tells_nothing_has_chance(tmp_path):
    kernel = np.zeros((DIM, EXPERTS), np.float32)
    kernel[4:] = RNG.standard_normal((2, EXPERTS))
    where = np.arange(0, TOKENS, 2)
    stored = trace.write(tmp_path, scores=(VALUES @ kernel)[None], features=features_of(where, kernel=kernel), **GIVEN)
    row = analysis.controls(stored, tokens.tokens_of(stored), [1]).set_index("number").loc["mi.kind"]
    assert row.trained < 0.05 < row.shuffled  # shuffled, it reads the features of the label half of the time


def test_a_subset_of_tokens_keeps_its_sequences_and_codes():
    rows = np.repeat(np.arange(4), 3)
    every = tokens.make_tokens({"token": np.array([5, 1, 1, 0, 2, 2, 2, 3, 3, 4, 4, 5])}, {"token": 6}, {}, rows)
    some = analysis.subset(every, np.array([0, 2, 9, 11]))
    assert (
        some.codes["token"].tolist() == [2, 0, 1, 2]
        and some.counts["token"] == 3
        and some.sequence.tolist() == [0, 0, 1, 1]
    )


def test_features_of_parts_are_joined(tmp_path):
    for begin in (0, 400):
        here = slice(begin, begin + 400)
        part = features.Features([3, 7], [VALUES[here][[3, 7]]] * 2, [KERNEL] * 2, [np.ones(EXPERTS)] * 2)
        trace.append(tmp_path, scores=np.stack([(VALUES @ KERNEL)[here]] * 2), k=1, features=part)
    stored = trace.finish(tmp_path)
    assert stored.has_features and trace.read(tmp_path) == stored
    where, values, kernel, offset = features.load(tmp_path, 1)
    assert where.tolist() == [3, 7, 403, 407] and offset.tolist() == [1] * EXPERTS
    np.testing.assert_allclose(values, VALUES[where], atol=2e-3)
    np.testing.assert_array_equal(kernel, KERNEL)


def test_features_beyond_half_precision_are_kept(tmp_path):
    """3e5 is above 65,504, where a float16 ends; so of parts the one, and the whole."""
    large = VALUES * np.float32(1e5)
    for values in (VALUES, large):
        part = features.Features([3, 7], [values[[3, 7]]], [KERNEL])
        trace.append(tmp_path, scores=(VALUES @ KERNEL)[None], k=1, features=part)
    trace.finish(tmp_path)
    _, values, _, _ = features.load(tmp_path, 0)
    np.testing.assert_array_equal(values[:2], VALUES[[3, 7]].astype(np.float16))
    np.testing.assert_array_equal(values[2:], large[[3, 7]])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (features_of(np.array([5, 3])), "in ascending order"),
        (features_of(np.array([0, 1]))._replace(where=np.array([1, TOKENS])), "0 to 799"),
        (features_of(np.array([0, 1]), layers=2), "features.values has 2 layers, the trace has 1"),
        (
            features_of(np.array([0, 1]))._replace(values=[np.full((2, DIM), np.inf)]),
            "features of layer 0 are not finite",
        ),
        (features_of(np.array([0, 1]), kernel=KERNEL[:, :3]), r"kernel \[6, 3\]"),
    ],
)
def test_features_that_do_not_agree_are_refused(given, message, tmp_path):
    with pytest.raises(UserError, match=message):
        trace.write(tmp_path, scores=(VALUES @ KERNEL)[None], features=given, **GIVEN)


@pytest.mark.parametrize("damage", [pathlib.Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:40])])
def test_features_that_are_gone_or_damaged_are_said_to_be(damage, tmp_path):
    trace.write(tmp_path, scores=(VALUES @ KERNEL)[None], features=features_of(np.array([0, 1])), **GIVEN)
    damage(tmp_path / "features_00.npz")
    with pytest.raises(UserError, match=r"features_00.npz is missing or damaged .*: write the trace again"):
        features.load(tmp_path, 0)
