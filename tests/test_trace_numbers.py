"""The numbers of a trace against plain NumPy and hand-computed values, its nulls, its page, and its command."""

import itertools
import math
import re

import numpy as np
import pytest

import routed
from routed import trace
from routed.contracts import UserError
from routed.layer.rule import SelectionRule
from routed.layer.selection import capacity
from routed.trace import __main__ as command
from routed.trace import analysis, counts, information, numbers, tokens

RNG = np.random.default_rng(1)
LAYERS, TOKENS, EXPERTS, K, ROWS = 3, 600, 5, 2, 30
IDS = RNG.integers(0, 7, TOKENS)
SEQUENCE = np.repeat(np.arange(ROWS), TOKENS // ROWS)
LANGUAGE = np.array(["de", "en", "fr"])[SEQUENCE % 3]
SCORES = RNG.normal(size=(LAYERS, TOKENS, EXPERTS)) + 2 * RNG.normal(size=(3, EXPERTS))[SEQUENCE % 3][None]
SCORES = SCORES.astype(np.float16).astype(np.float32)  # as a trace keeps them
GIVEN = {"k": K, "token_ids": IDS, "sequence": SEQUENCE, "labels": {"language": LANGUAGE}}
CHOSEN = np.argsort(-SCORES, axis=2, kind="stable")[:, :, :K]
WEIGHTS = np.random.default_rng(2).random(CHOSEN.shape)  # of a model whose gate is no softmax


@pytest.fixture(scope="module")
def analysed(tmp_path_factory):
    """(what `analyse` returns, its folder)"""
    out = tmp_path_factory.mktemp("trace")
    return routed.analyse(SCORES, experts=CHOSEN, weights=WEIGHTS, out=out, **GIVEN), out


def value(result, layer, number, of="value"):
    rows = result["numbers"]
    (entry,) = rows[(rows.layer == str(layer)) & (rows.number == number)][of]
    return entry


def plain_information(code, chosen):
    """I(code; expert) by its definition, one assignment at a time."""
    pairs = [(c, e) for c, experts in zip(code, chosen, strict=True) for e in experts]

    def count(items):
        return {item: items.count(item) / len(pairs) for item in set(items)}

    both, codes, experts = count(pairs), count([c for c, _ in pairs]), count([e for _, e in pairs])
    return sum(p * math.log(p / codes[c] / experts[e]) for (c, e), p in both.items())


@pytest.mark.parametrize("layer", range(LAYERS))
def test_numbers_are_those_of_plain_numpy(analysed, layer):
    result, _ = analysed
    chosen, scores = CHOSEN[layer], SCORES[layer].astype(float)
    load = np.array([(chosen == e).mean() for e in range(EXPERTS)])
    probs = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    highest = -np.sort(-probs, axis=1)
    language, position = np.unique(LANGUAGE, return_inverse=True)[1], np.arange(TOKENS) % 20
    bucket = [0 if p == 0 else 1 + int(math.log2(p)) for p in position]
    capacity = math.ceil(1.25 * K * TOKENS / EXPERTS)
    expected = {
        "load_max": EXPERTS * load.max(), "experts_used": np.exp(-(load * np.log(load)).sum()),
        "dropped_1.25": np.maximum(load * TOKENS * K - capacity, 0).sum() / (TOKENS * K),
        "entropy_token": -(probs * np.log(probs)).sum(1).mean(), "confidence": highest[:, 0].mean(),
        "margin": (highest[:, K - 1] - highest[:, K]).mean(), "weight_first": WEIGHTS[layer].max(1).mean(),
        "weight_all": WEIGHTS[layer].sum(1).mean(), "mi.token": plain_information(IDS.tolist(), chosen),
        "mi.language": plain_information(language.tolist(), chosen), "mi.position": plain_information(bucket, chosen),
        "given.language": plain_information([*zip(IDS.tolist(), language.tolist(), strict=True)],
                                            chosen) - plain_information(IDS.tolist(), chosen),
    }  # fmt: skip
    for name, number in expected.items():
        assert value(result, layer, name) == pytest.approx(number, rel=2e-4, abs=1e-6), name
    np.testing.assert_allclose(result["loads"][layer], load * TOKENS * K, rtol=1e-9)
    for code, e in itertools.product(range(3), range(EXPERTS)):
        assert result["maps"]["language"][layer, code, e] == (chosen[language == code] == e).sum()


def test_nulls_say_what_chance_has(analysed):
    """Language decides the experts; positions tell nothing, and a hash of the id knows no language beyond chance."""
    result, _ = analysed
    for layer in range(LAYERS):
        assert value(result, layer, "mi.language", "low") > 2 * value(result, layer, "mi.language", "chance")
        assert value(result, layer, "mi.position") < 2 * value(result, layer, "mi.position", "chance")
        assert value(result, layer, "mi.language", "hash") < 0.05 < value(result, layer, "mi.language")
        assert value(result, layer, "given.language", "hash") < 1e-6 < value(result, layer, "given.language", "low")
        for number in ("load_max", "entropy_token", "mi.language"):
            assert (
                value(result, layer, number, "low")
                < value(result, layer, number)
                < value(result, layer, number, "high")
            )
    assert value(result, 0, "entropy_token", "chance") == pytest.approx(math.log(EXPERTS))
    assert math.isnan(value(result, 0, "entropy_token", "hash"))


def test_a_table_by_token_id_is_filled_from_the_other_half(tmp_path):
    """A router by token id is named entirely, a blind one no better than by load; nor by tokens that filled it."""
    ids = np.tile(np.arange(100), 4)  # two tokens of each in a half
    rows = np.repeat(np.arange(20), 20)
    by_id, random = (ids % 4)[:, None], RNG.integers(0, 4, (400, 1))
    result = routed.analyse(
        experts=np.stack([by_id, random]), num_experts=4, token_ids=ids, sequence=rows, out=tmp_path
    )
    assert value(result, 0, "table.token") == 1
    assert abs(value(result, 1, "table.token") - 0.25) < 0.08  # 400 draws: 3.7 deviations of .0217
    assert value(result, 0, "mi.token") == pytest.approx(math.log(4), rel=1e-5)


def test_information_of_a_table_by_hand():
    table = np.array([[2, 0], [1, 1]])  # p = .5, 0, .25, .25; rows .5, .5; columns .75, .25
    by_hand = (
        0.5 * math.log(0.5 / (0.5 * 0.75)) + 0.25 * math.log(0.25 / (0.5 * 0.75)) + 0.25 * math.log(0.25 / (0.5 * 0.25))
    )
    assert information.mutual(table) == pytest.approx(by_hand)
    assert (information.pointwise(table) * table).sum() / 4 == pytest.approx(by_hand, rel=1e-6)
    joint = information.joint(np.array([0, 0, 1]), np.array([[0, -1], [1, 0], [1, -1]]), 2, 2)
    np.testing.assert_array_equal(joint, [[2, 1], [0, 1]])


def test_pairs_of_independent_experts_by_hand():
    """Three experts, equal loads: each of the three pairs a third. Loads 1/2, 1/4, 1/4: expert 0 is in every pair."""
    third = np.array([[0, 1, 1], [1, 0, 1], [1, 1, 0]]) / 6
    np.testing.assert_allclose(information.independent_pairs(np.ones(3)), third, atol=1e-9)
    q = information.independent_pairs(np.array([2.0, 1.0, 1.0]))
    np.testing.assert_allclose(q, [[0, 0.25, 0.25], [0.25, 0, 0], [0.25, 0, 0]], atol=5e-3)
    loads = np.array([0.4, 0.3, 0.2, 0.1])
    np.testing.assert_allclose(information.independent_pairs(loads).sum(0), loads, atol=1e-6)


def test_choices_as_gates_of_all_experts_have_the_same_numbers(tmp_path):
    """Two of 5 experts in columns of ReLU gates (-1: not chosen), and in two columns."""
    gates = np.where((np.arange(EXPERTS) == CHOSEN[..., None]).any(2), np.arange(EXPERTS), -1)
    given = {name: of for name, of in GIVEN.items() if name != "k"} | {"num_experts": EXPERTS}
    by_gate, by_choice = (
        routed.analyse(experts=experts, out=tmp_path / name, **given)["numbers"]
        for name, experts in (("gates", gates), ("choices", CHOSEN))
    )
    both = by_gate.merge(by_choice, on=["layer", "number"], suffixes=("", "_of_choice"))
    assert set(by_choice.number) - set(both.number) == {"next", "alike"}  # gates of a token have no first expert
    for column in ("value", "chance", "hash"):
        np.testing.assert_allclose(both[column], both[f"{column}_of_choice"])


def test_pairs_of_the_layers_that_have_some(tmp_path):
    """One expert a token in layer a, none used with another in b; 2i and 2i + 1 always together in c."""
    first = RNG.integers(0, 4, TOKENS)
    alone, together = np.stack([first, np.full(TOKENS, -1)], 1), np.stack([first, first ^ 1], 1)
    layers = {"a": alone, "b": alone, "c": together}
    given = {"num_experts": 4, "sequence": SEQUENCE, "layers": [*layers]}
    result = routed.analyse(experts=np.stack([*layers.values()]), out=tmp_path, **given)
    (said,) = (text for text in result["findings"] if text.startswith("Experts of one token"))
    assert "most in layer c" in said and "Layers a and b are not told" in said
    assert ">layer c<" in (tmp_path / "report.html").read_text()


def test_a_layer_of_fewer_experts_has_the_margin_of_its_own_k(tmp_path):
    """Layer 0 has two experts a token, layer 1 one expert, and -1 of an infinite weight."""
    scores = np.random.default_rng(0).standard_normal((2, 60, 4)).astype(np.float32)
    experts = np.argsort(-scores, axis=2)[..., :2]
    weights = np.full(experts.shape, 0.5)
    experts[1, :, 1], weights[1, :, 1] = -1, -np.inf
    given = {"experts": experts, "weights": weights, "sequence": np.arange(60) // 6}
    numbers = routed.analyse(scores, out=tmp_path, **given)["numbers"]
    margins = numbers[numbers.number == "margin"].set_index("layer").value
    chances = np.sort(np.exp(scores) / np.exp(scores).sum(2, keepdims=True), axis=2)
    assert margins["0"] == pytest.approx((chances[0, :, -2] - chances[0, :, -3]).mean(), rel=1e-3)
    assert margins["1"] == pytest.approx((chances[1, :, -1] - chances[1, :, -2]).mean(), rel=1e-3)


def test_rounding_is_not_told_from_chance(tmp_path):
    """Every token has an id of its own, and loads are balanced: no information in any draw."""
    given = {"num_experts": 4, "token_ids": np.arange(200), "sequence": np.arange(200) // 10}
    experts = np.random.default_rng(0).permutation(np.tile(np.arange(4), 50))
    result = routed.analyse(experts=experts[None, :, None], out=tmp_path, **given)
    numbers = result["numbers"].set_index("number")
    assert not numbers.told["mi.token"] and result["findings"][0].startswith("The layer is not seen to follow")


def test_neighbouring_sequences_share_a_group():
    """400 rows of one text: 128 groups of 3 or 4 neighbours, half of the groups in each half."""
    coded = tokens.make_tokens({}, {}, {}, np.arange(400))
    starts = np.flatnonzero(np.diff(coded.group, prepend=-1))
    assert len(starts) == coded.groups == 128 and set(np.diff(starts, append=400)) == {3, 4}
    assert len(np.unique(coded.group[coded.half == 0])) == 64


def test_shuffles_keep_the_unit_of_a_label():
    """A label of sequences stays one of sequences, with the lengths it falls on; tokens' labels stay in theirs."""
    rows = np.repeat(np.arange(40), 25)
    language, speech = np.repeat(RNG.integers(0, 2, 40), 25), RNG.integers(0, 3, 1000) + 3 * (rows % 2)
    coded = tokens.make_tokens({"language": language, "speech": speech}, {"language": 2, "speech": 6}, {}, rows)
    mixed = coded.shuffled("language", 0, slice(0, 1000)).reshape(40, 25)
    assert (mixed == mixed[:, :1]).all() and mixed.sum() == language.sum() and (mixed.ravel() != language).any()
    mixed = coded.shuffled("speech", 1, slice(0, 1000)).reshape(40, 25)
    assert (np.sort(mixed, 1) == np.sort(speech.reshape(40, 25), 1)).all() and (mixed.ravel() != speech).any()
    np.testing.assert_array_equal(coded.shuffled("speech", 1, slice(100, 200)), mixed.ravel()[100:200])


def test_intervals_draw_sequences_and_not_tokens():
    """The mean of 20 sequences of 50 equal tokens has the error of 20 values, 1 / sqrt(20), not of 1,000."""
    values = RNG.normal(size=20)
    result = numbers.ratio(50 * values, np.full(20, 50.0), numbers.bootstrap_weights(20))
    error = values.std() / math.sqrt(20)
    assert result.high - result.low == pytest.approx(2 * 1.96 * error, rel=0.15)
    assert math.isnan(numbers.ratio(values, np.ones(20), None).low)


def test_draws_that_have_nothing_below_are_left_out():
    """The one group of ten that counts has 2 / 10 in every draw that has it; .9^10 = .35 of the draws lack it."""
    at_last = np.arange(10) == 9
    result = numbers.ratio(2.0 * at_last, 10.0 * at_last, numbers.bootstrap_weights(10))
    assert (result.value, result.low, result.high) == pytest.approx((0.2, 0.2, 0.2))
    none = numbers.ratio(np.zeros(10), np.zeros(10), numbers.bootstrap_weights(10))
    assert none.value == 0 and math.isnan(none.low) and math.isnan(none.high)


@pytest.mark.parametrize(("queues", "enough"), [(7, False), (8, True)])
def test_drops_have_an_interval_where_queues_are_many(queues, enough):
    queued = np.where(np.arange(20) < queues, 4096.0, 0)
    sums = {"tokens": np.full(20, 2048), "queued": queued}
    sums |= {f"dropped_{factor:g}": queued * np.linspace(0, 0.5, 20) for factor in counts.FACTORS}
    analysed = counts.Counts(np.full((20, 2), 1024), None, {}, {}, sums, {})
    result = numbers.numbers(analysed, numbers.bootstrap_weights(20))
    # shares 0, .5 / 19, ..., (queues - 1) / 38 of equal queues: their mean is (queues - 1) / 2 / 38
    assert result["dropped_1.25"].value == pytest.approx((queues - 1) / 76)
    assert (result["dropped_1.25"].low < result["dropped_1.25"].high) == enough
    assert result["load_max"].low == result["load_max"].high == 1


def test_positions_that_are_given_count_without_sequences(tmp_path):
    """From 0 too, where they were taken for those that are counted: 4 values by powers of two, of positions 0 to 4."""
    experts = np.zeros((1, 20, 1), int)
    given = tokens.tokens_of(
        trace.write(tmp_path / "given", experts=experts, num_experts=2, position=np.tile(np.arange(5), 4))
    )
    assert given.codes["position"].tolist() == [0, 1, 2, 2, 3] * 4 and given.counts["position"] == 4
    assert "position" not in tokens.tokens_of(trace.write(tmp_path / "none", experts=experts, num_experts=2)).codes


def test_drops_by_hand():
    """Four tokens of one expert each, all the first of two: factor 1: two places, half is dropped; factor 2: none."""
    sums = counts.Sums(1)
    stream = counts.Stream(2, 1, ("expert",), lambda *columns: iter(()))
    counts._count_drops(sums, np.zeros(4, int), np.zeros((4, 1), int), stream)
    assert (sums["dropped_1"], sums["dropped_1.25"], sums["dropped_2"], sums["queued"]) == (2, 1, 0, 4)


def test_what_a_model_dropped_is_of_what_it_chose(tmp_path):
    chosen = np.array([[[0, 1], [0, -1], [0, 2], [1, 2]]])
    kept = np.array([[[1, 1], [1, 0], [0, 1], [1, 1]]], bool)  # one of seven assignments was dropped
    result = routed.analyse(experts=chosen, kept=kept, num_experts=3, out=tmp_path)
    assert value(result, 0, "dropped") == pytest.approx(1 / 7)
    np.testing.assert_array_equal(result["loads"], [[3, 2, 2]])
    page = (tmp_path / "report.html").read_text()
    for missing in ("give token_ids", "give sequence", "give labels", "keep its scores"):
        assert missing in page


def test_the_page_opens_offline_and_says_every_number(analysed):
    result, out = analysed
    page = (out / "report.html").read_text()
    assert not re.search(r'(src|href)="(?!#|data:)', page)
    assert page.count("<svg") == 4 + 7 and all(
        text.split(". ")[0].replace("'", "&#39;") in page for text in result["findings"]
    )
    assert "keep its scores" not in page and "several checkpoints" in page
    assert set(result) == {"numbers", "maps", "loads", "between", "equal", "churn", "controls", "findings"}
    assert (out / "numbers.csv").read_text().count("\n") == 1 + len(result["numbers"])
    again = routed.analyse(SCORES, experts=CHOSEN, weights=WEIGHTS, out=out, **GIVEN)
    assert again["findings"] == result["findings"] and (out / "report.html").read_text() == page


def test_layers_and_checkpoints_are_compared(tmp_path, monkeypatch):
    """The next layer repeats the first, so it tells its whole entropy; half of two checkpoints' experts changed."""
    first = RNG.integers(0, 4, (200, 1))
    rows = np.repeat(np.arange(20), 10)
    for step, changed in ((1, first), (2, np.where(np.arange(200)[:, None] % 2, first, (first + 1) % 4))):
        trace.write(
            tmp_path / str(step), experts=np.stack([first, first, changed]), num_experts=4, sequence=rows, step=step
        )
    result = analysis.analyse([trace.read(tmp_path / "1"), trace.read(tmp_path / "2")])
    share = np.bincount(first[:, 0]) / 200
    whole = -(share * np.log(share)).sum()
    (after,) = result.table[(result.table.number == "next") & (result.table.layer == "0")].value
    assert after == pytest.approx(whole, rel=1e-5)
    assert result.churn.value.tolist() == [0, 0, 0.5] and result.churn.chance.between(0.6, 0.9).all()
    lines = []
    monkeypatch.setattr(command.files, "tell", lines.append)
    monkeypatch.setattr(command.OUT, "_value", str(tmp_path / "page.html"), raising=False)
    command.flags.FLAGS.mark_as_parsed()
    command.main(["trace", "report", str(tmp_path / "1"), str(tmp_path / "2")])
    assert "From step 1 to step 2, 50 % of a token's experts changed in layer 2, the most, and 0 %" in lines[0]
    trace.write(tmp_path / "3", experts=first[None], num_experts=4, sequence=rows)
    with pytest.raises(UserError, match=r"has layers \('0',\)"):
        analysis.analyse([trace.read(tmp_path / "1"), trace.read(tmp_path / "3")])


@pytest.mark.parametrize(
    "argv", [["trace"], ["trace", "report"], ["trace", "capture", "more"], ["trace", "reprt", "x"]]
)
def test_a_wrong_command_says_the_right_one(argv):
    with pytest.raises(UserError, match="usage: routed trace report DIR"):
        command.main(argv)


@pytest.mark.parametrize("factor", [1.0, 1.1, 2.0])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("size", [7, 100, 4096])
def test_capacity_is_the_layers_own(factor, k, size):
    for experts in (4, 10):
        assert counts.capacity(factor, k * size, size, experts) == capacity(
            SelectionRule(k=k, capacity_factor=factor), size, experts
        )
