"""The law: forms that cross-validation tells apart, predictions and their limits, claims about predictions."""

import math

import numpy as np
import pandas as pd
import pytest
from absl import flags

import routed
from routed import predict
from routed.analysis.claims import FAIREST, LEARNED, Writer
from routed.analysis.verdicts import judge
from routed.contracts import UserError
from routed.papers.ours import law
from routed.papers.ours.preregistered import SCORES, Preregistered
from routed.plan import experiment
from routed.plan.config import base
from routed.settings.tree import flatten, override
from tests.test_claims import table


def points(count, seed=0):
    """Settings at random; separation 1 to 4, the others as in the experiment."""
    rng = np.random.default_rng(seed)
    return [
        {
            "data.separation": 4.0**a, "data.samples": int(32 * 8 * 32**b),
            "experts.count": int(rng.choice([16, 32, 64])), "batch_size": int(rng.choice([8, 32, 128])),
            "data.irrelevant_fraction": 0.8 * c, "router.init_scale": 0.3 * 33**d, "data.clusters": 32,
        }
        for a, b, c, d in rng.random((count, 4))
    ]  # fmt: skip


def gap_of(point):
    """A law that is linear in the coordinates: .7 c sqrt(1 - s) - 2 s."""
    return (
        0.7 * point["data.separation"] * math.sqrt(1 - point["data.irrelevant_fraction"])
        - 2 * point["data.irrelevant_fraction"]
    )


@pytest.fixture(scope="module")
def fitted():
    some = points(40)
    noise = np.random.default_rng(1).normal(0, 0.05, len(some))
    return law.fit(some, [gap_of(one) + e for one, e in zip(some, noise, strict=True)], {"experiment": "x", "seeds": 5})


@pytest.mark.slow
def test_a_linear_law_is_found_and_foretells_points_that_it_has_not_seen(fitted):
    assert fitted.form == "linear" and fitted.scores["linear"]["r2"] > 0.97
    new = points(60, seed=2)
    expected = law.expect(fitted, new)
    gaps = np.array([gap_of(one) for one in new])
    assert np.abs(gaps - [one.gap for one in expected]).max() < 0.15  # noise .05, of 40 points on 7 coefficients
    # 1.96 deviations of .05 on both sides, and a little for what 40 points leave open.
    assert np.median([one.high - one.low for one in expected]) == pytest.approx(4 * 0.05, rel=0.35)


def test_it_says_where_it_extrapolates(fitted):
    inside = points(1, seed=3)[0]
    outside = law.expect(fitted, [inside | {"data.separation": 8.0, "batch_size": 4}])[0].beyond
    assert len(outside) == 2 and outside[0].startswith("separation 8 is outside of [1") and "batch 4" in outside[1]
    # What decides of a point inside of all ranges is how far it is from those of the fit, by the law's own deviation.
    assert law.expect(fitted, [inside])[0].beyond == ()
    assert law.expect(fitted._replace(reach=0.0), [inside])[0].beyond == ("no point of the fit is near",)


def test_a_law_is_read_as_it_was_written(fitted, tmp_path):
    law.write(fitted, tmp_path / "law.json")
    again = law.read(tmp_path / "law.json")
    assert law.expect(again, points(3, seed=4)) == law.expect(fitted, points(3, seed=4))
    (tmp_path / "other.json").write_text('{"points": 3}')
    with pytest.raises(UserError, match=r"other.json: not a law: make one with routed predict --fit=DIR"):
        law.read(tmp_path / "other.json")


def test_scores_by_hand():
    """Gaps 1, 2, -3 (mean 0, squares 14), expected 1, 1, 1: squared errors 0 + 1 + 16, so 1 - 17/14; two signs."""
    gaps = np.array([1.0, 2.0, -3.0])
    expected = np.array([[1.0, 1.0, 1.5], [1.0, 0.0, 1.9], [1.0, -2.9, 1.0]])
    found = {name: float(score(gaps, expected)) for name, score in SCORES.items()}
    assert found == {"r2": pytest.approx(-3 / 14), "signs": pytest.approx(2 / 3), "coverage": pytest.approx(1 / 3)}


#: log(frozen_data / learned) = log 2, log 3 and log 1/2 of every seed at three points; the sharpened control is always
#: worse.
FACTORS = {8: 2.0, 16: 3.0, 32: 0.5}


def rows():
    losses = {"learned": [0.1, 0.2], "frozen": [1.0, 1.0]}
    parts = [
        table(
            losses | {"frozen_data": [0.1 * by, 0.2 * by], "frozen_sharp": [0.4 * by, 0.8 * by]}, samples=(n,)
        )
        for n, by in FACTORS.items()
    ]  # fmt: skip
    return pd.concat(parts, ignore_index=True)


def verdict(expected, score, least, most, found, floor=0.0):
    points = tuple(({"data.samples": n}, one) for n, one in zip(FACTORS, expected, strict=True))
    claim = Writer("same").prediction("x", "s", "p", LEARNED, FAIREST, Preregistered(points, score, least, most, floor))
    return judge((claim,), found, base(), ["data.samples"])[0]


def test_claims_about_what_was_foretold():
    right = [(math.log(by), math.log(by) - 0.1, math.log(by) + 0.1) for by in FACTORS.values()]
    good = verdict(right, "r2", 0.8, 1.0, rows())
    assert good["verdict"] == "supported" and good["ours"] == pytest.approx(1) and good["n"] == 3 and good["p"] is None
    assert verdict(right, "coverage", 0.88, 1.0, rows())["ours"] == 1
    # All three are inside, which is more than was asked for, and so is every draw of points.
    wide = verdict(right, "coverage", 0.88, 0.99, rows())
    assert wide["verdict"] == "opposite" and wide["reason"] == "asked for: 0.88 to 0.99"
    # One sign of three is wrong: 2/3 is out, but draws of points that leave it out have 1.
    turned = verdict([right[0], right[1], (0.1, 0.0, 0.2)], "signs", 0.9, 1.0, rows())
    assert turned["ours"] == pytest.approx(2 / 3) and turned["verdict"] == "inconclusive"
    # Cut at .3 the learned losses .1 and .2 count as .3, and the control's .2, .4; .3, .6; .05, .1 as .3, .4; .3, .6;
    # .3, .3.
    low = verdict(right, "r2", 0.8, 1.0, rows(), floor=0.3)
    halves = np.array([math.log(4 / 3) / 2, math.log(2) / 2, 0.0])
    wrong = np.log([2.0, 3.0, 0.5]) - halves
    assert low["ours"] == pytest.approx(1 - (wrong**2).sum() / ((halves - halves.mean()) ** 2).sum())
    part = rows()
    part = part[part["data.samples"] != 32]
    short = verdict(right, "r2", 0.8, 1.0, part)
    assert short["verdict"] == "inconclusive" and short["reason"] == "2 of 3 points that were foretold have run"


def command(*arguments):
    """`routed predict` in this process, with the flags as they were before."""
    flags.FLAGS.unparse_flags()
    try:
        predict.main(predict.parse_flags(["routed predict", *map(str, arguments)]))
    finally:
        flags.FLAGS.unparse_flags()
        predict._OVERRIDES.clear()


def test_the_command_gives_a_factor_its_interval_and_a_warning(fitted, tmp_path, capsys):
    law.write(fitted, tmp_path / "law.json")
    command(f"--law={tmp_path / 'law.json'}", "--config.data.separation=2", "--config.data.irrelevant_fraction", "0.1")
    told = capsys.readouterr().out
    # .7 x 2 sqrt(.9) - .2 = 1.128, a factor 3.09.
    assert float(told.split("one's: ")[1].split(" ")[0]) == pytest.approx(3.09, rel=0.06)
    assert (
        "for a mean over 5 seeds" in told
        and predict.CONDITIONS not in told
        and "separation 2, " in told
        and "EXTRAPOLATES" not in told
    )
    command(f"--law={tmp_path / 'law.json'}", "--config.data.separation=9")
    assert "\nEXTRAPOLATES: separation 9 is outside of [" in capsys.readouterr().out
    command()
    assert predict.CONDITIONS in capsys.readouterr().out  # of the law that comes with routed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--config.data.dim=4"],
            r"--config.data.dim: the law does not know it.*; it knows data.separation, data.samples",
        ),
        (["--config.data.irrelevant_fractions=.1"], r"did you mean 'data.irrelevant_fraction'"),
        (["--config.data.irrelevant_fraction=2"], r"data.irrelevant_fraction=2.0: must be in \[0.0, 1.0\]"),
        (["--fit=runs/x"], r"--write=FILE goes with"),
        (["--fit=runs/x", "--points=law:held_out", "--write=y"], r"one at a time"),
        (["runs/x"], r"unexpected argument 'runs/x'"),
        (["--fit=runs/x", "--config.data.irrelevant_fraction=.1", "--write=y"], r"drop --law and --config.KEY"),
        (["--fit=nowhere", "--write=y"], r"nowhere is no workdir"),
    ],
)
def test_what_the_command_refuses(arguments, words):
    with pytest.raises(UserError, match=words) as caught:
        command(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 500}, r"--fit=b: it has steps=500, a 100"),
        ({"seeds": 9}, r"--fit=b: it has seeds=9, a 3"),
        ({"swept": "router.bias"}, r"--fit=b: it sweeps router.bias, which a law does not know"),
    ],
)
def test_a_law_is_of_points_that_differ_in_its_axes_alone(monkeypatch, tmp_path, changes, words):
    flat = {**flatten(base()), "steps": 100, "seeds": 3, "name": "x", "figure": ""}
    columns = ["run", *law.AXES, "arm"]
    tables = {
        "a": pd.DataFrame(columns=columns),
        "b": pd.DataFrame(columns=[*columns[:-1], *({changes.get("swept")} - {None}), "arm"]),
    }
    own = {key: value for key, value in changes.items() if key != "swept"}
    monkeypatch.setattr(
        routed, "load", lambda name: {"results": tables[name], "config": flat | (own if name == "b" else {})}
    )
    monkeypatch.setattr(law, "gaps_of", lambda *given: ([], []))
    with pytest.raises(UserError, match=words):
        command("--fit=a,b", f"--write={tmp_path / 'law.json'}")


def test_predictions_that_were_written_are_those_of_the_law_that_comes_with_the_package():
    """At the design's points, so that neither changes alone; those of the first round are of a law before it."""
    module, config = experiment.configure("law:again", [])
    written, sweep = module.predictions("again"), module.FIGURES["again"].sweep(config)
    assert [at for at, _ in written] == [*sweep] and len(sweep) == 30
    expected = law.expect(law.read(), [flatten(override(config, point)) for point in sweep])
    assert np.allclose([one[:3] for one in expected], [gap for _, gap in written], atol=1e-3)
    assert [at for at, _ in module.predictions("held_out")] == [*module.FIGURES["held_out"].sweep(config)]


def test_designs_stay_within_their_ranges():
    module, config = experiment.configure("law:fit", [])
    sweep = module.FIGURES["fit"].sweep(config)
    assert len(sweep) == 60
    for key, (low, high) in module.RANGES.items() | {"data.irrelevant_fraction": module.SHARE}.items():
        values = [point[key] for point in sweep]
        assert low <= min(values) and max(values) <= high and min(values) < low + 0.05 * (high - low)
    # A Latin hypercube has as many points at each of three levels.
    assert [sum(point["batch_size"] == size for point in sweep) for size in module.LEVELS["batch_size"]] == [20, 20, 20]
