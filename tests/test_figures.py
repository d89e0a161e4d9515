"""Figures and lines of swept keys, on tables whose answer is known: nothing is lost in silence or drawn askew."""

import itertools
import pathlib
import types

import numpy as np
import pandas as pd
import pytest

from routed.analysis import answer, arms, changed, page, plots, points, statistics
from routed.analysis.claims import FAIREST, FROZEN, LEARNED, Writer
from routed.analysis.paired_values import Rows
from routed.analysis.plots import automatic_figures, curves, frame, layers, panels, pictures, scales, swept
from routed.analysis.plots import tokens as token_charts
from routed.contracts import Column, UserError
from routed.layer.auxiliary import AUXILIARY, Auxiliary
from routed.metrics.router import METRICS, Metric
from routed.plan import Figure, experiment_files
from routed.plan import arms as plan_arms
from routed.plan.arms import ARMS, Arm
from routed.plan.config import base, problem_of
from routed.settings.tree import flatten, override
from tests import charts

AXES = problem_of(base()).columns(base())
LOSS = {"kind": "curves", "name": "loss", "x": "data.samples", "metrics": ("test/loss", "router/sparsity")}
TRAINING = {"kind": "training", "name": "training", "metrics": ("test/loss",)}
LEVELS = {"learned": 0.1, "frozen": 1.0, "frozen_sharp": 0.4, "frozen_data": 0.2, "oracle": 1e-6}


def table(axes, levels=LEVELS, **columns):
    """Two evaluations of four seeds of every arm and point: losses near `levels`, learned times the experts / 8."""
    rows = []
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        for (arm, level), seed, step in itertools.product(levels.items(), range(4), (0, 10)):
            loss = level * (1 + 0.02 * seed) * (point.get("experts.count", 8) / 8 if arm == "learned" else 1)
            rows.append(
                {"run": f"{arm}{seed}{values}", **point, "arm": arm, "seed": seed, "step": step, "status": "ok",
                 "test/loss": loss,
                 "train/loss": 0.01, "router/sparsity": 2.0 + seed, "router/dead": 0.01 * seed,
                 "router/params_changed": 0.0} | columns
            )  # fmt: skip
    return pd.DataFrame(rows)


def data(rows, swept, own=("data.samples",)):
    return frame.Data(rows, list(swept), flatten(base()), {}, AXES, own=own)


SWEPT = {"data.samples": (512, 8192), "experts.count": (4, 8, 16)}


def drawn(axes=SWEPT, specs=(LOSS, TRAINING), **columns):
    found, _ = automatic_figures.draw_all(specs, data(table(axes, **columns), axes))
    return {one.name: one for one in found}


def test_a_swept_key_that_no_figure_shows_gets_its_figures():
    """Three counts were run and one was drawn."""
    found = drawn()
    assert list(found) == ["by-experts.count", "loss-by-experts.count", "loss", "training"]
    loss, gap, dead = found["by-experts.count"].drawn.panels
    assert charts.labels(loss.x) == ["4", "8", "16"]
    assert dead.y.label == "share of dead experts"
    # Against the fairest control, whose loss is .2: log(.2 / .05), log(.2 / .1), log(.2 / .2), of equal pairs.
    values = charts.values(gap, "log(fairest frozen control / learned)")
    assert values == pytest.approx(np.log([4, 2, 1]), abs=1e-4)
    panels = found["loss-by-experts.count"].drawn.panels
    assert [panel.title for panel in panels[:3]] == ["experts = 4", "experts = 8", "experts = 16"]
    assert len(panels) == 6 and len({panel.y.domain for panel in panels[:3]}) == 1
    assert "by-experts.count" not in drawn(specs=(LOSS | {"x": "experts.count"}, TRAINING))


@pytest.mark.parametrize(
    ("spec", "words"),
    (
        ({"kind": "curvs", "name": "f"}, "figure f: unknown kind 'curvs' (did you mean 'curves'?)"),
        ({"kind": "curves", "name": "f", "x": "steps"}, "figure f: kind 'curves' needs the key 'metrics'"),
        ({"kind": "gap", "x": "steps"}, "figure (without a name): kind 'gap' needs the key 'name'"),
        ({"kind": "gap", "name": "f", "x": "steps", "metric": "a"}, "figure f: kind 'gap' has no key 'metric'"),
        *(
            ({"kind": "gap", "name": name, "x": "steps"}, f"figure {name!r}: a name has 1 to 80 letters, digits")
            for name in ("../escape", "/abs", "", "a\0", "\ud800", "a" * 81)
        ),
        (
            {"kind": "multiples", "name": "f", "of": TRAINING, "over": "steps", "values": (1,)},
            "figure f: the figure in 'of' must have one of the kinds curves, gap, paired",
        ),
        (
            {"kind": "curves", "name": "f", "x": "steps", "metrics": (), "arm": ()},
            "has no key 'arm' (did you mean 'arms'?)",
        ),
    ),
)
def test_a_figure_that_cannot_be_drawn_is_refused(spec, words):
    """A missing key was a KeyError after hours of training."""
    with pytest.raises(UserError) as error:
        plots.check(spec)
    assert words in str(error.value)
    if "key" in words:
        assert str(error.value).endswith(f"keys of this kind: {', '.join(plots.PLOTS[spec['kind']].keys)}")


def test_a_figure_of_what_was_not_swept_is_none_and_the_page_goes_on():
    """Each was an error after all training; pairs without `words` name the values of `by`."""
    unswept = (
        {"kind": "against", "x": "data.samples"},
        {"kind": "forest"},
        {"kind": "paired", "metric": "test/los"},
        {"kind": "multiples", "of": LOSS, "over": "steps", "values": (1, 2)},
    )
    specs = [spec | {"name": f"f{i}"} for i, spec in enumerate(unswept)]
    pairs = {"kind": "paired", "name": "pairs", "metric": "test/loss", "by": "experts.count", "x": "data.samples"}
    assert set(drawn({}, (*specs, LOSS))) <= {"loss"}
    (panel,) = drawn(specs=(pairs,))["pairs"].drawn.panels
    assert any(row["series"].endswith(", experts.count = 8") for row in charts.rows(panel))


def test_the_protocol_of_a_forest_is_the_base_config():
    """4 experts came first as the least of three values, each with as many points."""
    rows = table({"experts.count": (4, 16, 64)}, LEVELS)
    drawing = data(rows, ("experts.count",), ("experts.count",))
    chart = plots.draw({"kind": "forest", "name": "f"}, drawing)
    assert chart.panels[0].y.ticks[0.0] == "the protocol" and chart.panels[0].y.ticks[1.0] == "experts = 4"


def test_two_figures_of_one_name_are_refused():
    asked = types.SimpleNamespace(claims=lambda config: (), plots=lambda config: (LOSS, LOSS))
    with pytest.raises(UserError, match="two figures have the name loss: give each a name of its own"):
        page.check(asked, base())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"at": {"data.sample": 1}}, r"no setting 'data.sample' \(did you mean 'data.samples'\?\)"),
        ({"x": "data.sample"}, "no setting 'data.sample'"),
        ({"arms": ("learned", "frozenn")}, r"no arm 'frozenn' \(did you mean 'frozen'\?\)"),
        ({"metrics": ("test/los",)}, r"no column 'test/los' \(did you mean 'test/loss'\?\)"),
    ],
)
def test_names_that_do_not_exist_are_refused_before_training(changes, told):
    wrong = {"kind": "multiples", "name": "many", "over": "steps", "values": (1,), "of": LOSS | changes}
    for spec in (LOSS | changes, wrong):
        asked = types.SimpleNamespace(claims=lambda config: (), plots=lambda config, spec=spec: (spec,))
        with pytest.raises(UserError, match=f"figure {spec['name']}: there is {told}"):
            page.check(asked, base())


def test_a_figure_that_fails_costs_no_other_figure(monkeypatch, caplog):
    monkeypatch.setitem(plots.PLOTS, "broken", plots.Plot(lambda spec, data: 1 / 0, "a caption"))
    assert "loss" in drawn(specs=({"kind": "broken", "name": "mine"}, LOSS))
    assert "figure mine cannot be drawn: ZeroDivisionError: division by zero" in caplog.text


def test_captions_say_which_value_is_shown_and_where_the_others_are():
    found = drawn()
    assert found["by-experts.count"].caption.endswith("At data.samples = 8192; other values: figures 2 and 3.")
    assert "Figure 3 at each value of experts.count" in found["loss-by-experts.count"].caption
    assert found["loss"].caption.endswith("At experts.count = 16; other values: figures 1 and 2.")  # the base has 64
    assert found["training"].caption.endswith("= 8192, experts.count = 16; other values: figures 1 to 3.")
    alone = drawn({"data.samples": (512, 8192)})
    assert "other values" not in alone["loss"].caption and list(alone) == ["loss", "training"]
    many = drawn({"data.samples": (512, 8192), "experts.count": tuple(range(2, 12))})["loss-by-experts.count"]
    assert (
        len(many.drawn.panels) == 2 * 6 and "Left out, and in the table: experts.count = 3, 5, 8, 10." in many.caption
    )


def test_a_figure_at_one_value_of_a_key_is_not_drawn_at_others():
    """Its panels at the others were empty, and pairs could not be drawn at all."""
    pairs = {"kind": "paired", "name": "pairs", "x": "data.samples", "metric": "test/loss", "at": {"experts.count": 4}}
    assert list(drawn(specs=(pairs,))) == ["by-experts.count", "pairs"]


def test_two_keys_that_were_swept_together_get_a_map():
    found = drawn(SWEPT | {"data.fresh": (False, True)})
    fair = found["map-experts.count-data.fresh"].drawn.panels[1]
    assert fair.title == "against the fairest frozen control"
    # By experts, then fresh or not: log 4, log 2, log 1; the fairest is the one with rows from data.
    cells = charts.texts(fair)
    assert cells == [f"{np.log(n):+.2f}{'*' if n > 1 else ''}\ndata" for n in (4, 2, 1)] * 2
    words = found["by-data.fresh"].drawn.panels[0]
    assert charts.labels(words.x) == ["False", "True"]


def test_a_map_is_drawn_against_the_controls_that_it_names():
    axes = {"data.samples": (512, 8192), "experts.count": (4, 8)}
    spec = {"kind": "phase", "name": "map", "x": "data.samples", "y": "experts.count", "against": ("frozen_data",)}
    (panel,) = plots.draw(spec, data(table(axes), axes)).panels
    assert panel.title == "against frozen_data"
    # log(.2 / .05) with 4 experts and log(.2 / .1) with 8.
    assert charts.texts(panel) == [f"{np.log(n):+.2f}*" for n in (4, 4, 2, 2)]


def test_metrics_with_a_log_axis_are_paired_by_their_ratio():
    """A difference of losses, .2 - .1, would be .1."""
    rows, (arm,) = table({"data.samples": (512, 8192)}), ("frozen_data",)
    spec = {"kind": "paired", "name": "ratio", "x": "data.samples", "metric": "test/loss", "arms": (arm,)}
    (panel,) = plots.draw(spec, data(rows, ["data.samples"])).panels
    assert charts.values(panel, ARMS[arm].label) == pytest.approx(np.log([2, 2]), abs=1e-4)
    assert panel.y.label.replace("\n", " ").endswith(f"log({ARMS[arm].label} / learned router), paired")
    both = spec | {"metric": "router/dead", "arms": ("frozen", arm)}
    shares = plots.draw(both, data(rows, ["data.samples"])).panels[0]
    assert shares.y.label.endswith("\narm minus learned router, paired")


@pytest.mark.parametrize(
    ("metric", "kind", "which", "end"),
    (
        ("test/loss", "log ratio", "over", ", which is worse"),
        ("router/params_changed", "difference", "minus", ""),
        ("router/homogeneity", "difference", "minus", ", which is better"),
    ),
)
def test_captions_of_differences_are_of_their_metric(metric, kind, which, end):
    """That of entropies said which router is better above 0 in loss."""
    axes = {"data.samples": (512, 8192), "steps": (1, 2)}
    drawing = data(table(axes, **{"router/homogeneity": 0.5}), axes, own=axes)
    words = (
        f"Mean {kind} of {AXES[metric].label}: each arm {which} the learned router, paired by seed, with 95 % t "
        f"intervals;"
        f" above 0 the arm's is higher{end}."
    )
    pairs = {"kind": "paired", "name": "p", "x": "data.samples", "metric": metric, "at": {"steps": 1}}
    one = automatic_figures.draw_all((pairs,), drawing)[0][-1]
    assert one.caption.startswith(words)
    dear = {
        "kind": "equal_cost",
        "name": "e",
        "x": "data.samples",
        "steps": 1,
        "dear": {512: 2},
        "metrics": (metric, "router/dead"),
    }
    one = automatic_figures.draw_all((dear,), drawing)[0][-1]
    same = words.replace(
        "the learned router",
        "the learned router that trained for more steps, with as many FLOPs as competition at that value",
    )
    assert one.caption.startswith(f"First panel: m{same[1:]} Other panels: means")


def test_pairs_have_no_line_for_an_arm_that_ran_elsewhere_only():
    rows = table({"data.samples": (512, 8192)})
    rows = rows[(rows.arm != "frozen") | (rows["data.samples"] == 512)]
    spec = {"kind": "paired", "name": "pairs", "metric": "test/loss"}
    for samples, lines in ((512, len(LEVELS) - 1), (8192, len(LEVELS) - 2)):
        panel = plots.draw(spec | {"at": {"data.samples": samples}}, data(rows, ["data.samples"])).panels[0]
        assert len(panel.y.ticks) == lines


def test_a_map_of_many_cells_stays_small_and_says_where_the_numbers_are():
    axes = {"data.samples": tuple(range(64, 94)), "experts.count": (4, 8)}
    spec = {"kind": "phase", "name": "map", "x": "data.samples", "y": "experts.count"}
    figure = plots.draw(spec, data(table(axes, {"learned": 0.1, "frozen": 1.0}), axes))
    assert figure.panels[0].width < 600 and not charts.texts(figure.panels[0])
    assert figure.panels[0].title == "against frozen (numbers: see the table)"
    drawing = data(table(axes), axes)
    assert plots.PLOTS["phase"].caption(spec, drawing).startswith("Mean log(control / learned), paired")
    drawing.axes = {**AXES, "test/loss": AXES["test/loss"]._replace(log=False)}
    assert plots.PLOTS["phase"].caption(spec, drawing).startswith("Mean control - learned (nats), paired")


def test_keys_of_the_file_that_points_name_are_shown_by_them():
    methods = {"few": {"experts.count": 4}, "some": {"experts.count": 8}}
    spec = {"kind": "methods", "name": "methods", "methods": methods, "metrics": ("test/loss",)}
    two = {"experts.count": (4, 8)}
    assert not automatic_figures.automatic([spec], data(table(two), two, own=two))
    three = {"experts.count": (4, 8, 16)}  # the user added one
    assert [one["name"] for one in automatic_figures.automatic([spec], data(table(three), three, own=()))] == [
        "by-experts.count"
    ]
    _, missing = automatic_figures.draw_all([spec], data(table({"experts.count": (2,)}), two, own=two))
    assert missing == ["methods"]


def test_arms_stand_beside_each_other_at_a_number():
    """Five at one place hid each other; an eightieth of the axis twice, 16 ** (2 / 80) = 1.0718, is not 430."""
    panel = drawn({"data.samples": (512, 2048, 8192)})["loss"].drawn.panels[0]
    assert panel.x.log and len(panel.series) == len(LEVELS)
    places = np.array([charts.values(panel, label, "position") for label in panel.series])
    for value, there in zip((512, 2048, 8192), places.T, strict=True):
        ends = [value / 1.0718, value / 1.0353, value, value * 1.0353, value * 1.0718]
        assert there == pytest.approx(ends, rel=1e-4)


def test_lines_at_close_numbers_stay_nearer_to_their_own():
    """Four lines, steps of 10 in 1,000: together 4 wide, so 1 apart, where an eightieth of the axis would be 12."""
    found = scales.dodge(panels.Axis(), {value: float(value) for value in range(0, 1001, 10)}, "abcd")
    assert [found[line][20] for line in "abcd"] == pytest.approx([18.5, 19.5, 20.5, 21.5])
    assert scales.dodge(panels.Axis(), {1: 1.0}, "") == {}


def test_no_interval_is_cut_off_where_the_start_is_left_out():
    """Seeds at 1 +- .2 at the end: the interval ends below .8; the axis ends .15 of the span below it, not at .7."""
    rows = pd.concat(
        table({"data.samples": (512,)}).query("step == 0").assign(step=step, **{"router/norm_mean": value})
        for step, value in ((0, 30.0), (10, 3.0), (20, 2.0), (30, 1.0))
    )
    rows.loc[rows.step == 30, "router/norm_mean"] += np.where(rows.seed[rows.step == 30] % 2, 0.2, -0.2)
    found, _ = automatic_figures.draw_all((TRAINING | {"metrics": ("router/norm_mean",)},), data(rows, ()))
    (panel,) = found[-1].drawn.panels
    low = min(row["low"] for row in charts.rows(panel) if row["position"] > 5)
    assert low < 0.8 and panel.y.domain[0] == pytest.approx(low - 0.15 * (3 - low))


def test_arms_stand_beside_each_other_where_values_are_words():
    """Two rates, five arms .12 apart: from -.24 to .24 about 0 and 1."""
    axes = {"rates": ("paper", "tuned")}
    panel = drawn(axes, ())["by-rates"].drawn.panels[0]
    places = [charts.values(panel, label, "position") for label in panel.series]
    assert sorted(first for first, _ in places) == pytest.approx([-0.24, -0.12, 0, 0.12, 0.24])
    assert all(second - first == 1 for first, second in places)


def test_arms_that_ran_at_one_point_stand_behind_a_line_that_says_where():
    """At 8192 alone: behind the axis' end by .14 and .21 of its length, 16 ** .14 = 1.474 and 16 ** .21 = 1.790."""
    axes = {"data.samples": (512, 8192)}
    rows = table(axes)
    rows = rows[~rows.arm.isin(("frozen_data", "oracle")) | (rows["data.samples"] == 8192)]
    found, _ = automatic_figures.draw_all([LOSS], data(rows, axes))
    panel = found[0].drawn.panels[0]
    places = [charts.values(panel, label, "position") for label in panel.series]
    few, alone = np.array(places[:3]), np.ravel(places[3:])
    assert few == pytest.approx(np.outer([1 / 1.0353, 1, 1.0353], [512, 8192]), rel=1e-4)  # 16 ** (1 / 80)
    assert alone == pytest.approx([8192 * 1.474, 8192 * 1.790], rel=1e-3)
    (rule,) = (row["value"] for row in panel.rows["rules"] if row["axis"] == "x")
    assert 8192 < rule < 8192 * 1.474 and panel.x.domain[1] > max(alone)
    assert "8192 only" in charts.texts(panel) and panel.x.label == "training samples"


def test_a_figure_says_its_point_and_its_seeds():
    figures = drawn()
    assert figures["loss"].drawn.title == "experts = 16, n = 4 seeds"
    assert figures["training"].drawn.title == "training samples = 8192, experts = 16, n = 4 seeds"


def test_a_title_says_what_settings_stand_for():
    """Two kinds of blocks were told apart by their number of layers alone."""
    few = LOSS | {"title": "few experts", "at": {"experts.count": 4}}
    found, _ = automatic_figures.draw_all((few,), data(table(SWEPT), SWEPT))
    loss = found[-1]
    assert loss.drawn.title == "few experts, n = 4 seeds"
    assert loss.caption.startswith("few experts. Means over seeds") and "At experts = 4" not in loss.caption
    assert "At experts.count = 4;" in loss.caption


def test_arms_of_the_only_point_stand_beside_each_other():
    panel = drawn({"data.samples": (8192,)})["loss"].drawn.panels[0]
    places = [row["position"] for row in charts.rows(panel)]
    assert len(places) > 3 and len(set(places)) == len(places)
    assert panel.x.label == "arms at training samples = 8192" and not panel.x.ticks


@pytest.mark.parametrize(
    ("values", "log", "places"),
    (
        ((8, 16, 32, 64, 128), True, [8, 16, 32, 64, 128]),
        ((0.5, 1.0, 2.0), False, [0.5, 1, 2]),
        ((0.0, 0.001, 0.01), False, [0, 1, 2]),  # side by side, as words
        ((0.1, 0.5, 0.9, 0.99), False, [0, 1, 2, 3]),  # in logarithms .9 and .99 are 4 % of the axis apart
        ((False, True), False, [0, 1]),
        (("linear", "mlp"), False, [0, 1]),
    ),
)
def test_axes_of_swept_keys(values, log, places):
    axis, positions = scales.sweep_axis("k", values)
    assert list(positions.values()) == places and axis.log == log
    assert axis.domain[0] < min(places) and axis.domain[1] > max(places)


@pytest.mark.parametrize(
    "kind", ({"kind": "paired", "metric": "test/loss"}, {"kind": "curves", "metrics": ("test/loss",)})
)
def test_an_axis_may_count_in_the_unit_of_a_paper(kind):
    """The paper has alpha, 100 times the coefficient: 512 stands where it is, as 51200."""
    spec = kind | {"name": "a", "x": "data.samples", "axis": ("alpha", 100.0)}
    axes = {"data.samples": (512, 2048)}
    (panel,) = plots.draw(spec, data(table(axes), axes)).panels
    assert charts.labels(panel.x) == ["51200", "204800"]
    assert [*panel.x.ticks] == [512, 2048] and panel.x.label == "alpha"


def test_labels_of_a_log_axis_do_not_touch():
    """34 letters wide, 900 stands at 34 x log 9 = 32.4, 3.7 after 700 (28.7); each takes 4, so it has no label."""
    axis, positions = scales.sweep_axis("k", (100, 300, 500, 700, 900, 1000), width=round(34 * scales.LETTER))
    assert charts.labels(axis) == ["100", "300", "500", "700", "1000"] and positions[900] == 900


def test_what_a_log_axis_cuts_off_is_named():
    """The caption said that axes end at .001, which most did not."""
    found = drawn({"data.samples": (512, 8192)})
    assert "below 0.001: oracle (true cluster)" in charts.texts(found["loss"].drawn.panels[0])
    assert not any("0.001" in str(plot.caption) for plot in plots.PLOTS.values())


def test_a_log_axis_goes_below_where_all_means_are():
    """The gradient of fits that converged: its panel ended at .001, above every mean, and had one number.

    Logarithms of seeds -3.5 to -6.5: mean -5, interval 3.182 x 1.291 / 2 = 2.05, so up to 10 ** -2.95; cut .3 decades
    beyond the mean, and a twentieth of the .6 for room.
    """
    rows = table({"data.samples": (512, 8192)}, {"learned": 0.1})
    rows["test/loss"] = 10 ** (-3.5 - rows.seed)
    (panel,) = plots.draw(TRAINING, data(rows, ["data.samples"])).panels
    assert panel.y.domain == pytest.approx((10**-5.33, 10**-4.67)) and not charts.texts(panel)
    assert layers.log_ticks(*panel.y.domain) == [5e-6, 1e-5, 2e-5]


def test_a_log_axis_of_methods_ends_at_the_floor_where_only_an_oracle_is_below():
    spec = {"kind": "methods", "name": "m", "methods": {"all": {"data.samples": 512}}, "metrics": ("test/loss",)}
    (panel,) = plots.draw(spec, data(table({"data.samples": (512,)}), ("data.samples",))).panels
    assert panel.x.domain[0] == pytest.approx(scales.FLOOR)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    (
        (0.003, 90.0, [0.01, 0.1, 1, 10]),
        (0.3, 6.0, [0.5, 1, 2, 5]),
        (0.68, 0.713, [0.68, 0.69, 0.7, 0.71]),  # none but .7 is round in logarithms
    ),
)
def test_a_log_axis_has_several_numbers(low, high, ticks):
    assert layers.log_ticks(low, high) == ticks


def test_methods_are_sorted_best_first_whichever_end_is_better():
    axes = {"experts.count": (4, 8, 16)}
    rows = table(axes, {"learned": 0.1})
    rows["router/homogeneity"] = rows["experts.count"] / 16  # more is better; of the loss, less
    methods = {str(n): {"experts.count": n} for n in axes["experts.count"]}
    for metric, best in (("router/homogeneity", ["16", "8", "4"]), ("test/loss", ["4", "8", "16"])):
        spec = {"kind": "methods", "name": "m", "methods": methods, "metrics": (metric,)}
        panel = plots.draw(spec, data(rows, axes, own=axes)).panels[0]
        assert charts.labels(panel.y) == best


def test_a_method_is_as_high_as_its_arms():
    """Pixels: one arm takes 2 x 9, five arms 6 x 9 = 54, the third of them at 18 + 27."""
    axes = {"experts.count": (4, 8)}
    rows = table(axes)
    rows = rows[(rows["experts.count"] == 4) | (rows.arm == "oracle")]
    methods = {"few": {"experts.count": 4}, "one": {"experts.count": 8}}
    spec = {"kind": "methods", "name": "m", "methods": methods, "metrics": ("test/loss",)}
    (panel,) = plots.draw(spec, data(rows, axes)).panels
    places = [row["position"] for row in charts.rows(panel)]
    assert places == pytest.approx([9, 27, 36, 45, 54, 63])
    assert [*panel.y.ticks] == pytest.approx([9, 45]) and panel.y.domain == pytest.approx((0, 72))


def test_a_method_without_anything_to_learn_is_not_called_untrained():
    axes = {"router.name": ("linear", "oracle")}
    methods = {name: {"router.name": name} for name in axes["router.name"]}
    spec = {"kind": "methods", "name": "m", "methods": methods, "metrics": ("test/loss",)}
    figure = plots.draw(spec, data(table(axes), axes, own=axes))
    words = [*figure.series]
    assert "nothing to learn: fixed rule" in words and "frozen at initialisation" in words


def test_intervals_stay_within_the_bounds_of_their_column():
    rows = table({"data.samples": (512, 8192)}, {"learned": 0.1})
    rows["router/dead"] = np.where(rows.seed == 3, 0.5, 0.0)  # mean .125, t interval [-.27, .52]
    figure = plots.draw(LOSS | {"metrics": ("router/dead",)}, data(rows, ("data.samples",)))
    ends = np.array([[row["low"], row["high"]] for row in charts.rows(figure.panels[0])])
    assert 0 < ends.min() < 0.125 < ends.max() < 1
    summary = statistics.summarise(rows[rows.step == 10], ["data.samples"], AXES).set_index("metric")
    np.testing.assert_allclose(summary.loc["router/dead", ["low", "high"]].to_numpy(float), ends, rtol=1e-4)


def test_an_axis_goes_no_further_than_means_references_and_bounds_need():
    rows = table({"data.samples": (512, 8192)}, {"learned": 0.1})
    rows["router/dead"] = 0.0
    rows["router/entropy_token"] = np.where(rows.seed == 3, 1.0, 0.0)  # mean .25, t interval up to 1.05, in logs to 6
    spec = LOSS | {"metrics": ("router/dead", "router/entropy_token", "router/sparsity")}
    (figure,), _ = automatic_figures.draw_all((spec,), data(rows, ("data.samples",)))
    dead, entropy, sparsity = figure.drawn.panels
    assert -0.01 < dead.y.domain[0] < 0
    assert entropy.y.domain[1] == pytest.approx(0.3875)  # half of the mean beyond it, and room
    # Said where nothing is drawn: in the picture these words lay on the intervals.
    assert "; intervals are cut where an axis ends" in figure.drawn.title and not charts.texts(entropy)
    assert " Intervals are cut where an axis ends." in figure.caption
    assert sparsity.y.domain[0] < 1 and sparsity.y.domain[1] > 64  # one expert and all


@pytest.mark.parametrize(
    ("spread", "words"), ((0.0, "; where all seeds are alike, an interval has no length"), (0.01, ""))
)
def test_a_marker_without_an_interval_is_explained(spread, words):
    """Three fits of three converged: a marker alone looked as if its interval were forgotten."""
    rows = table({"data.samples": (512, 8192)}, {"learned": 0.1})
    rows["router/dead"] = 0.5 + spread * rows.seed
    (one,), _ = automatic_figures.draw_all((LOSS | {"metrics": ("router/dead",)},), data(rows, ("data.samples",)))
    assert one.drawn.title == f"n = 4 seeds{words}"
    (one,), _ = automatic_figures.draw_all(
        (LOSS | {"metrics": ("router/dead",)},), data(rows[rows.seed == 0], ("data.samples",))
    )
    assert one.drawn.title == "n = 1 seed; where one seed ran, there is no interval"
    rows.loc[(rows.seed == 0) & (rows["data.samples"] == 512), "status"] = "diverged"
    (one,), _ = automatic_figures.draw_all((LOSS | {"metrics": ("router/dead",)},), data(rows, ("data.samples",)))
    assert one.drawn.title.startswith("n = 3 to 4 seeds")


def test_a_router_that_stands_still_is_drawn_once():
    rows = table({"data.samples": (512,)}, {"learned": 0.1, "frozen": 1.0})
    rng = np.random.default_rng(0)
    maps = {"learned0(512,)": rng.dirichlet(np.ones(4), (2, 4)), "frozen0(512,)": np.full((2, 4, 4), 0.25)}
    drawing = frame.Data(rows, ["data.samples"], flatten(base()), maps, AXES)
    panels = plots.draw({"kind": "routing", "name": "r", "arms": ("learned", "frozen")}, drawing).panels
    assert charts.labels(panels[0].y) == ["1", "4"]  # clusters, not "0.0 2.5"
    assert [panel.title for panel in panels] == [
        "step 0\n0 % of experts dead", "step 10\n0 % of experts dead", "every step\n0 % of experts dead",
    ]  # fmt: skip


def test_an_arm_of_a_users_file_is_in_figures_and_tables(monkeypatch):
    monkeypatch.setitem(ARMS, "mine", Arm({}, "my own router", "#123456"))
    levels = LEVELS | {"mine": 0.05}
    rows = table({"data.samples": (512, 8192)}, levels)
    drawing = data(rows, ("data.samples",))
    for spec in (LOSS, TRAINING):
        words = [*plots.draw(spec, drawing).series]
        assert "my own router" in words
    summary = statistics.summarise(drawing.last, ["data.samples"], AXES)
    # Mean .05 x 1.03; the deviation of 0, .02, .04, .06 is .0258: t(3) s / 2 = .0411 x .05.
    assert list(points.by_arm(summary, drawing, {})["mine"]) == ["0.0515 [0.0495, 0.0536]"] * 2


def test_an_arm_of_the_users_is_drawn_and_paired_where_a_figure_names_others(monkeypatch):
    monkeypatch.setitem(ARMS, "mine", Arm({}, "my own router", "#123456"))
    rows = table(SWEPT, LEVELS | {"mine": 0.05})
    spec = LOSS | {"arms": ("learned", "frozen")}
    assert "my own router" not in plots.draw(spec, data(rows, SWEPT)).series
    monkeypatch.setattr(plan_arms, "OWN", {"mine"})
    monkeypatch.setattr(swept, "OWN", {"mine"})
    assert [*plots.draw(spec, data(rows, SWEPT)).series][-1] == "my own router"
    maps = {f"{arm}0(512,)": np.full((2, 4, 4), 0.25) for arm in ("learned", "mine")}
    drawing = frame.Data(
        table({"data.samples": (512,)}, LEVELS | {"mine": 0.05}), ["data.samples"], flatten(base()), maps, AXES
    )
    panels = plots.draw({"kind": "routing", "name": "r", "arms": ("learned",)}, drawing).panels
    assert [panel.y.label.partition("\n")[0] for panel in panels] == ["learned router", "my own router"]
    named = plots.draw(LOSS | {"arms": ("learned", "mine")}, data(rows, SWEPT)).series  # whose list is the user's
    assert [*named] == ["learned router", "my own router"]
    middle = plots.draw({"kind": "against", "name": "b", "x": "experts.count"}, data(rows, SWEPT)).panels[1]
    # 16 experts: learned .2, frozen 1, the fairest (frozen_data) .2, mine .05.
    ends = {label: charts.values(middle, label)[-1] for label in middle.series}
    assert ends == pytest.approx(
        {
            "log(fairest frozen control / learned)": 0, "log(learned / mine)": np.log(4),
            "log(frozen / mine)": np.log(20), "log(fairest frozen control / mine)": np.log(4),
        },
        abs=1e-4,
    )  # fmt: skip


def test_an_arm_is_the_users_unless_an_experiment_of_the_package_brings_it(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from routed.plan import experiment\nfrom routed.plan.arms import ARMS, Arm\n"
        "lm = experiment.load('competition_lm')\nARMS['test_of_mine'] = Arm({}, 'mine', '#123456')\n"
        "FIGURES, get_config = lm.FIGURES, lm.get_config\n"
    )
    try:
        experiment_files.load(str(tmp_path / "mine.py"))
        assert "test_of_mine" in plan_arms.OWN and "shared_expert" not in plan_arms.OWN
    finally:
        ARMS.pop("test_of_mine", None)
        plan_arms.OWN.discard("test_of_mine")


def test_columns_of_the_users_get_a_figure(monkeypatch):
    monkeypatch.setitem(METRICS, "router/certainty", Metric(lambda gate: 1.0, Column("certainty")))
    more = {"router/certainty": 0.5, "train/loss_mine": 0.25}
    monkeypatch.setitem(AUXILIARY, "mine", Auxiliary(lambda gate: 0.0, "my loss"))
    for axes, name in ((SWEPT, "own-by-data.samples"), ({"data.samples": (512,)}, "own")):
        drawing = frame.Data(table(axes, **more), [*axes], flatten(base()), {}, problem_of(base()).columns(base()))
        found, _ = automatic_figures.draw_all((LOSS,), drawing)
        assert {one.name: one for one in found}[name].drawn.panels[1].y.label == "auxiliary loss mine"
        pairs = tuple({"kind": "paired", "name": column.replace("/", "."), "metric": column} for column in more)
        assert name not in {one.name for one in automatic_figures.draw_all((LOSS, *pairs), drawing)[0]}


def test_what_needs_no_network_is_drawn_named_and_told():
    """1 is the best constant; of two classes log 2; a 5-gram model has .5 nats."""
    rows = table(SWEPT, {"learned": 0.1, "frozen": 1.0}, **{"eval/ngram": 0.5})
    drawing = data(rows, SWEPT)
    drawing.column = Rows(rows, base(), [*SWEPT], problem_of(base())).column
    for spec in (LOSS, TRAINING, {"kind": "against", "name": "b", "x": "experts.count"}):
        panel = plots.draw(spec, drawing).panels[0]
        assert {"best constant", "5-gram model"} <= {*charts.texts(panel)}
        assert {1.0, 0.5} <= {row["value"] for row in charts.rows(panel, kind="rules")}
        assert panel.y.domain[1] > 1
    constant, counts = arms.behind(drawing)
    assert "the best constant" in constant and "frozen (1.03 against 1 at data.samples = 512" in constant
    assert "learned" not in constant and "frozen (1.03 against 0.5" in counts and "at 6 points" in counts
    classes = override(base(), {"data.name": "images", "loss": "cross_entropy", "data.target": "class"})
    drawing.column = Rows(rows, classes, [*SWEPT], problem_of(classes)).column
    assert curves.simple(rows, drawing) == pytest.approx({"best constant": np.log(2), "5-gram model": 0.5})


def test_values_at_which_a_metric_is_undefined_are_named():
    """At 64 experts there are too few test tokens; all panels of the figure have the same places."""
    rows = table({"data.samples": (512,), "experts.count": (4, 16, 64)})
    rows.loc[rows["experts.count"] == 64, "router/dead"] = np.nan
    chart = plots.draw({"kind": "against", "name": "b", "x": "experts.count"}, data(rows, SWEPT))
    assert (
        "no share of dead experts at experts.count = 64 (undefined: fewer than 100 test tokens an expert)"
        in chart.notes
    )
    assert len({(panel.x.domain, *panel.x.ticks) for panel in chart.panels}) == 1


def test_the_table_of_arms_names_methods_in_their_order_where_they_cover_all_points():
    drawing = data(table({"data.samples": (512, 8192)}, LEVELS), ("data.samples",))
    summary = statistics.summarise(drawing.last, ["data.samples"], AXES)
    methods = {"many": {"data.samples": 8192}, "few": {"data.samples": 512}}
    named = points.by_arm(summary, drawing, methods)
    assert named.columns[0] == "method" and list(named["method"]) == ["many", "few"] and "data.samples" not in named
    plain = points.by_arm(summary, drawing, {"many": methods["many"]})  # nobody's point has no name
    assert list(plain["data.samples"]) == ["512", "8192"] and list(plain["learned"]) == list(named["learned"])[::-1]


WRITE = Writer("gaps_filled", at={"data.samples": 8192}, over=("data.samples",))
CLAIMS = (
    WRITE.order("fair", "learned beats the fairest", "", LEARNED, FAIREST),
    WRITE.order("fixed", "more experts do better", "", LEARNED | {"experts.count": 16}, LEARNED | {"experts.count": 4}),
)


def judged(claims=CLAIMS, axes=SWEPT, own=("data.samples",)):
    rows, config = table(axes), override(base(), {"gate.horizon": 1.0})
    first = page.verdicts.judge(claims, rows, config, list(axes))
    return {record["id"]: record for record in points.add(first, claims, rows, config, list(axes), own)}


def test_lines_of_a_number_under_changed_settings_reproduce_nothing():
    """Lines of a claim are filed as the claim, which is the user's: else they say "reproduced" below it."""
    number = Writer("same", at={"data.samples": 8192}, over=("data.samples",), prefix="chen.").number
    claims, config = (number("n", "the loss", 0.5, uninformed=9.0),), override(base(), {"gate.horizon": 1.0})

    def lines(changes):
        first = page.verdicts.judge(claims, table(SWEPT), config, list(SWEPT))
        filed = [changed.filed(record, changes) for record in first]
        return points.add(filed, claims, table(SWEPT), config, list(SWEPT), ["data.samples"], changes)[0]["points"]

    assert {line["verdict"] for line in lines(["steps=9"])} == {"not comparable"}
    assert "not comparable" not in {line["verdict"] for line in lines([])}


def test_runs_that_a_claim_reads_at_several_values_count_once():
    """No side reads router.init_scale: its runs are the same at each value, and were three verdicts of one set."""
    rows = table({"data.samples": (512, 8192)}, LEVELS)
    rows = pd.concat([rows.assign(**{"router.init_scale": value}) for value in (0.5, 0.9, 0.99)])
    claims, axes = CLAIMS[:1], ["data.samples", "router.init_scale"]
    config = override(base(), {"gate.horizon": 1.0})
    first = page.verdicts.judge(claims, rows, config, axes)
    (record,) = points.add(first, claims, rows, config, axes, ["data.samples"])
    assert [line["point"] for line in record["points"]] == [{"data.samples": 512}, {"data.samples": 8192}]
    values = rows["router.init_scale"].map(str)
    rows["run"] = rows.run.where(rows.arm != "frozen_data", rows.run + values)  # one control reads it
    assert points.tried(claims[0], axes, ["data.samples"], rows) == (*axes,)


def test_a_claim_is_judged_at_the_points_that_ran_or_says_why_it_is_not():
    """Its point of 8,192 samples was replaced by 512 and 2,048; a key that it does not call a nuisance holds."""
    rows, config = table({"data.samples": (512, 2048)}), override(base(), {"data.samples": 512, "gate.horizon": 1.0})
    write = (
        WRITE.order("fair", "learned wins", "", LEARNED, FROZEN),
        WRITE.order("oracle", "o", "", LEARNED, {"arm": "hash"}),
    )
    fixed = write[0].replace(over=())
    asked = Figure("f", claims=lambda config: (*write, fixed))
    claims = points.claims_of(asked, config, rows, ["data.samples"])
    assert claims[0].statement == "learned wins (at data.samples = 512: no run has data.samples = 8192)"
    first, hash_, last = page.verdicts.judge(claims, rows, config, ["data.samples"])
    assert first["verdict"] == "exact" and first["at"] == {"data.samples": 512}
    assert (hash_["verdict"], hash_["text"]) == ("not run", "no run of hash")
    assert (last["verdict"], last["text"]) == ("not run", "no run at data.samples = 8192, only at 512, 2048")
    assert answer.summary([last]).endswith("(no run at data.samples = 8192, only at 512, 2048).")
    whole = table({"data.samples": (512, 8192)})
    assert points.claims_of(asked, config, whole, ["data.samples"]) == (*write, fixed)


def test_every_claim_has_a_line_for_each_point():
    record = judged()["fair"]
    assert record["interval"][0] == pytest.approx(1) and "experts.count" not in record["at"]  # at 16 experts: .2 / .2
    lines = {tuple(line["point"].values()): line for line in record["points"]}
    assert [*lines] == [(n, e) for n in (512, 8192) for e in (4, 8, 16)]
    assert [lines[8192, e]["ours"] for e in (4, 8, 16)] == pytest.approx([4, 2, 1])
    assert [lines[8192, e]["verdict"] for e in (4, 8, 16)] == ["exact", "exact", "inconclusive"]  # seeds are equal
    assert {line["n"] for line in lines.values()} == {4}


def test_the_line_of_a_claims_own_point_is_its_verdict():
    """Judged alone it would be exact; the claim, which was adjusted within its family, is inconclusive."""
    claims, config, axes = CLAIMS[:1], override(base(), {"gate.horizon": 1.0}), {"data.samples": (512, 8192)}
    record = page.verdicts.judge(claims, table(axes), config, list(axes))[0] | {"verdict": "inconclusive"}
    (made,) = points.add([record], claims, table(axes), config, list(axes), [])
    assert [(*line["point"].values(), line["verdict"]) for line in made["points"]] == [
        (512, "exact"), (8192, "inconclusive")
    ]  # fmt: skip


def test_the_terminal_says_of_which_point_a_line_is_and_counts_the_others():
    """The claim is at 8,192 samples, and as no side names experts at the most of them, where .2 / .2 tells nothing."""
    rest = {"gap": [], "shares": [], "behind": [], "by_point": [], "in_short": ""}
    told = answer.as_text({"claims": [judged()["fair"]]} | rest).splitlines()
    assert (
        told[-1].strip()
        == "this is data.samples = 8192, experts.count = 16; at each of 6 points: 4 exact, 2 inconclusive"
    )
    alone = judged(CLAIMS[:1], {"data.samples": (8192,)})["fair"]
    assert "at each of" not in answer.as_text({"claims": [alone]} | rest)


def test_of_very_many_points_some_get_a_line(monkeypatch):
    monkeypatch.setattr(points, "MOST", 3)
    record = judged(CLAIMS[:1])["fair"]
    assert [tuple(line["point"].values()) for line in record["points"]] == [(512, 4), (512, 16), (8192, 16)]
    assert record["points_there"] == 6


def test_a_claim_is_tried_at_nuisance_keys_and_the_users_but_not_at_what_its_sides_fix():
    assert [line["point"] for line in judged()["fixed"]["points"]] == [{"data.samples": 512}, {"data.samples": 8192}]
    claim, both = CLAIMS[0], ("data.samples", "experts.count")
    assert points.tried(claim, both, both, table(SWEPT)) == ("data.samples",)
    assert points.tried(claim.replace(over=()), both, ("data.samples",), table(SWEPT)) == ("experts.count",)
    assert judged(CLAIMS[:1], {"data.samples": (8192,)})["fair"]["points"] == []  # one point needs no line


def test_lines_and_figures_are_on_the_page(tmp_path):
    write = WRITE.order("plain", "learned beats frozen", "", LEARNED, FROZEN)
    part = {
        "name": "n", "question": "q", "gap": [], "shares": [], "gap_at": "", "threats": [], "figures": [],
        "undrawn": ["lost"], "arms": "", "loss": "test/loss", "horizon": 4.0, "summary": "",
        "summary_of": "every point", "config": "", "versions": "", "document": "",
        "claims": [*judged((write,)).values()], "left_out": [], "maps": None, "command": "", "in_short": "Of 1 claim",
        "answer": [], "behind": [], "by_point": [], "loss_definition": "",
    }  # fmt: skip
    page.write_page(tmp_path / "report.html", [part])
    text = (tmp_path / "report.html").read_text()
    assert "at each of 6 points: 6 exact" in text and "data.samples = 512, experts.count = 16" in text
    assert "Not drawn: lost (rows are missing, or the log has an error)." in text


def test_powers_say_their_slopes_and_their_bound():
    """Learned has .1 at both numbers, a slope of 0; 16 times the samples, at a power of -.5, are a quarter."""
    sides = {
        name: {x: {"arm": arm, "metric": "test/loss", "data.samples": x} for x in (512, 8192)}
        for name, arm in (("one", "learned"), ("two", "frozen"))
    }
    spec = {"kind": "powers", "name": "p", "words": "data.samples", "panels": {"loss": sides}, "bound": -0.5}
    rows = table({"data.samples": (512, 8192)})
    (alike,), _ = automatic_figures.draw_all((spec,), data(rows.assign(**{"test/loss": 0.5}), ("data.samples",)))
    assert alike.caption.endswith("Where all seeds are alike, an interval has no length.")
    (panel,) = plots.draw(spec, data(rows, ("data.samples",))).panels
    assert charts.texts(panel)[0].startswith("slope 0.00 [") and "slope -0.5" in charts.texts(panel)
    assert [*panel.series] == ["one", "two"]
    fitted, bound = ([row["y"] for row in panel.rows["lines"] if row["part"] == part] for part in (0, 1))
    assert fitted[0] == pytest.approx(fitted[1]) and bound[1] / bound[0] == pytest.approx(0.25, rel=1e-3)


def test_lines_of_dispatch_have_as_many_clusters_as_their_own_task():
    axes = {"data.clusters": (2, 3)}
    rows = table(axes, {"learned": 0.1, "frozen": 0.2})
    counts = {
        run: np.full((2, n, 8), 1 if run.startswith("learned") else 7)
        for n in (2, 3)
        for run in rows.run[rows["data.clusters"] == n]
    }
    spec = {"kind": "dispatch", "name": "d", "lines": {str(n): {"data.clusters": n} for n in (2, 3)}}
    heat = {f"{run}/counts": value for run, value in counts.items()}
    figure = plots.draw(spec, frame.Data(rows, list(axes), flatten(base()), heat, AXES, own=tuple(axes)))
    assert [charts.labels(panel.y) for panel in figure.panels[::2]] == [["1", "2"], ["1", "2", "3"]]  # fmt: skip
    assert {text for panel in figure.panels for text in charts.texts(panel)} == {"1"}  # of the learned router


def test_a_sample_has_a_row_an_arm_and_the_entropy_of_each_layer():
    """Two tokens, two experts: (1/2, 1/2) and (1, 0) have log 2 / 2 = .35 nats on average. Who kept none has no row."""
    rows = table({}, {"learned": 0.1, "frozen": 0.2, "oracle": 0.1})
    kept = {"learned0()": [[[0.5, 0.5], [1, 0]], [[1, 0], [1, 0]]], "frozen0()": [[[0.5, 0.5]] * 2] * 2}
    heat = {f"{run}/decoder/sample": np.array(probs, np.float16) for run, probs in kept.items()}
    spec = {"kind": "sample", "name": "s", "stack": "decoder"}
    figure = plots.draw(spec, frame.Data(rows, [], flatten(base()), heat, AXES, own=()))
    titles = [panel.title.partition(":\nentropy ")[2] for panel in figure.panels]
    assert titles == ["0.35 nats", "0.00 nats", "0.69 nats", "0.69 nats"] and figure.columns == 2
    experts_down = np.array([[0.5, 1.0], [0.5, 0.0]])
    assert figure.panels[0].rows["images"][0]["url"] == pictures.picture(token_charts.SCHEME.colours(experts_down))
    assert plots.draw(spec, frame.Data(rows, [], flatten(base()), {}, AXES, own=())) is None


@pytest.mark.parametrize(
    ("count", "places"),
    ((64, [1, 16, 32, 48, 64]), (16, [1, 4, 8, 12, 16]), (10, [1, 2, 4, 6, 8, 10]), (4, [1, 2, 3, 4]), (1, [1])),
)
def test_experts_and_tokens_of_a_sample_can_be_counted(count, places):
    """Both axes had numbers at their ends alone."""
    kept = {"learned0()/decoder/sample": np.full((1, count, count), 1 / count, np.float16)}
    rows = table({}, {"learned": 0.1})
    figure = plots.draw(
        {"kind": "sample", "name": "s", "stack": "decoder"}, frame.Data(rows, [], flatten(base()), kept, AXES, own=())
    )
    for axis in (figure.panels[0].x, figure.panels[0].y):
        assert axis.ticks == {place - 1: str(place) for place in places}


@pytest.mark.parametrize(("start", "seeds"), [(30.0, 4), (4.0, 4), (30.0, 1)])
def test_what_was_before_training_takes_no_more_than_half_of_an_axis(start, seeds):
    """Training goes from 3 to 1: a start at 30 is said, and the axis ends .15 of it beyond 2; one at 4 is near."""
    rows = pd.concat(
        table({"data.samples": (512,)}).query("step == 0").assign(step=step, **{"router/norm_mean": value})
        for step, value in ((0, start), (10, 3.0), (20, 2.0), (30, 1.0))
    )
    found, _ = automatic_figures.draw_all(
        (TRAINING | {"metrics": ("router/norm_mean",)},), data(rows[rows.seed < seeds], ())
    )
    (panel,) = found[-1].drawn.panels
    words = charts.texts(panel)
    if start == 30:
        assert panel.y.domain == pytest.approx((0.7, 3.3)) and "before training: 30" in words
    else:
        assert panel.y.domain[1] > 4 and not words


def test_panels_without_marks_are_left_out(monkeypatch):
    """A panel whose means are all NaN has no marks, which Vega-Lite refuses."""
    axis = panels.Axis("x", (0, 1))
    empty, full = panels.Panel(axis, panels.Axis("y")), panels.Panel(axis, panels.Axis("y", (0, 1)))
    full.rule("y", 0.5)
    drawn = [empty, full]
    plot = plots.Plot(lambda spec, data: plots.Chart(list(drawn)), "caption")
    monkeypatch.setitem(plots.PLOTS, "some", plot)
    data = frame.Data(table({}, {"learned": 0.1}), [], flatten(base()), {}, AXES, own=())
    assert plots.draw({"kind": "some", "name": "s"}, data).panels == [full]
    drawn.remove(full)
    assert plots.draw({"kind": "some", "name": "s"}, data) is None


def test_every_kind_is_documented_with_its_keys():
    """docs/figures.md has a line for each kind of the package, with the keys that it needs and may have."""
    lines = (pathlib.Path(__file__).parent.parent / "docs" / "figures.md").read_text().splitlines()
    table = {line.split("`")[1]: line.split("|")[2:4] for line in lines if line.startswith("| `")}
    for kind, plot in plots.PLOTS.items():
        if not plot.draw.__module__.startswith("routed."):  # of an experiment file that another test has loaded
            continue
        for cell, keys in zip(table[kind], (plot.required, plot.optional), strict=True):
            assert cell.strip() == "; ".join(f"`{key}` ({meaning})" for key, meaning in keys.items())
