"""Interactive figures hold what is printed: specs compile; rows are the figure's means, intervals, n and seeds."""

import base64
import io
import json
import re
import types

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import vl_convert
from PIL import Image

from routed.analysis import page, plots
from routed.analysis.plots import automatic_figures, frame, histories, interactive, layers, pictures, rendering
from routed.contracts import Column
from routed.engine.execution import maps_of
from routed.plan.config import base
from routed.settings.tree import flatten, override
from routed.training import text_gates
from tests import charts
from tests.test_figures import AXES, LOSS, SWEPT, TRAINING, data, table

SPECS = {
    "curves": LOSS,
    "training": TRAINING,
    "against": {"kind": "against", "name": "a", "x": "experts.count"},
    "phase": {"kind": "phase", "name": "p", "x": "data.samples", "y": "experts.count"},
    "forest": {"kind": "forest", "name": "f"},
    "gap": {"kind": "gap", "name": "g", "x": "data.samples"},
    "paired": {"kind": "paired", "name": "d", "metric": "test/loss", "x": "data.samples"},
    "methods": {"kind": "methods", "name": "m", "metrics": ("test/loss",),
                "methods": {"it's \\ <b>": {"data.samples": 512}}},
}  # fmt: skip


@pytest.mark.parametrize("kind", SPECS)
def test_every_panel_compiles_and_holds_what_is_printed(kind):
    chart = plots.draw(SPECS[kind], data(table(SWEPT), SWEPT))
    panels = interactive.panels(chart, AXES)
    printed = rendering.printed(chart)
    vl_convert.vegalite_to_vega(json.dumps(printed, allow_nan=False))
    assert panels and len(panels) == len(chart.panels)
    for number, panel in enumerate(panels):
        vl_convert.vegalite_to_vega(json.dumps(panel["spec"], allow_nan=False))
        for name in ("means", "bars", "cells"):
            assert panel["spec"]["datasets"].get(f"{name}0") == printed["datasets"].get(f"{name}{number}")


@pytest.mark.parametrize("kind", SPECS)
def test_files_have_colours_for_both_grounds_and_texts_as_text(kind):
    """Black ink is light on a dark ground; colours of series that are light enough stay."""
    chart = plots.draw(SPECS[kind], data(table(SWEPT), SWEPT))
    light, dark = plots.svg(chart), plots.svg(chart, dark=True)
    assert light == plots.svg(chart) and light != dark and "<text" in light
    assert "#111111" in light and "#111111" not in dark and "#e8e8e6" in dark
    assert plots.png(chart).startswith(b"\x89PNG")


def test_dark_colours_become_lighter_and_light_ones_stay():
    """Black has no light: .62 of the way to white, 158; #56B4E9 has .6 and stays."""
    assert rendering.toned("#000000") == "#9e9e9e" and rendering.toned("#56B4E9") == "#56b4e9"


def test_a_chart_of_a_user_may_be_vega_lite_or_altair(monkeypatch):
    """Altair's charts have `to_dict`."""
    spec = {"data": {"values": [{"a": 1}]}, "mark": "point", "encoding": {"x": {"field": "a", "type": "quantitative"}}}
    for drawn in (spec, types.SimpleNamespace(to_dict=lambda: spec)):
        monkeypatch.setitem(plots.PLOTS, "mine", plots.Plot(lambda spec, data, drawn=drawn: drawn, "Mine."))
        (figure,), _ = automatic_figures.draw_all(({"kind": "mine", "name": "f"},), data(table({}), ()))
        assert "<svg" in plots.svg(figure.drawn) and figure.caption == "Mine."
        (panel,) = interactive.panels(figure.drawn, AXES)
        assert panel["spec"]["width"] == "container" and {one["name"] for one in panel["spec"]["params"]} == {
            "off",
            "seeds",
        }


#: Two steps of the learned router cost what one step of the others does.
EQUAL = {
    "kind": "equal_cost", "name": "e", "x": "data.samples", "steps": 1, "dear": {512: 2, 8192: 2},
    "metrics": ("test/loss", "router/dead"),
}  # fmt: skip


def test_differences_at_equal_cost():
    """Frozen 1.0 over learned .1, at every seed: log 10 = 2.303, paired; below, dead experts of both and dearer."""
    axes = {"data.samples": (512, 8192), "steps": (1, 2)}
    difference, dead = plots.draw(EQUAL, data(table(axes), axes)).panels
    shown = charts.rows(difference, "frozen at initialisation")
    assert [(row["value"], row["at"]) for row in shown] == [
        (pytest.approx(2.303, abs=1e-3), at) for at in ("512", "8192")
    ]
    assert difference.x.domain == dead.x.domain and "learned router, as many FLOPs" in dead.series
    # Another swept key is settled, and pools no seeds; without the reference of equal cost nothing is equal.
    wider = axes | {"data.clusters": (4, 8)}
    (again,) = plots.draw(EQUAL | {"metrics": ("test/loss",)}, data(table(wider), wider)).panels
    assert {row["n"] for row in charts.rows(again)} == {row["n"] for row in shown}
    assert plots.draw(EQUAL | {"dear": {512: 3}}, data(table(axes), axes)) is None


@pytest.mark.parametrize(
    "spec",
    (
        EQUAL,
        LOSS | {"metrics": EQUAL["metrics"]},
        TRAINING | {"metrics": EQUAL["metrics"]},
        {"kind": "series", "name": "s", "lines": {"all": {}}, "metrics": EQUAL["metrics"]},
        {"kind": "methods", "name": "m", "methods": {"all": {}}, "metrics": EQUAL["metrics"]},
    ),
)
def test_what_no_run_has_gets_no_panel_and_is_named(spec):
    """Dead experts are undefined with few test tokens: `flops` had an empty panel, others left theirs out silently."""
    axes = {"data.samples": (512, 8192), "steps": (1, 2)}
    drawing = data(table(axes, **{"router/dead": np.nan}), axes, own=axes)
    drawing.base |= {"data.samples": 512, "steps": 1}
    figure = automatic_figures.draw_all((spec,), drawing)[0][-1]
    assert len(figure.drawn.panels) == 1
    words = "eft out: share of dead experts (undefined: fewer than 100 test tokens an expert)"
    assert f"l{words}" in figure.drawn.title.replace("\n", " ") and f"L{words}." in figure.caption


def test_arms_at_one_value_stand_beside_each_other():
    """Numbers are where they are; one alone has no place: six are 0.6 / 6 = .1 apart, the dearer router last."""
    axes = {"data.samples": (512,), "steps": (1, 2)}
    difference, dead = plots.draw(EQUAL, data(table(axes), axes)).panels
    places = {label: charts.values(dead, label, "position")[0] for label in dead.series}
    assert sorted(places.values()) == pytest.approx([-0.25, -0.15, -0.05, 0.05, 0.15, 0.25])
    assert places["learned router, as many FLOPs"] == pytest.approx(0.25) and charts.labels(dead.x) == ["512"]
    shared = {label: charts.values(difference, label, "position")[0] for label in difference.series}
    assert shared and all(places[label] == pytest.approx(place) for label, place in shared.items())


def test_a_point_tells_value_interval_n_place_and_seeds():
    """Seeds of .1 times 1, 1.02, 1.04, 1.06: geometric mean, .1030. The first of five: 512 / 16 ** .025."""
    chart = plots.draw(
        LOSS | {"metrics": ("test/loss",)}, data(table({"data.samples": (512, 8192)}), ("data.samples",))
    )
    (panel,) = interactive.panels(chart, AXES)
    row = next(row for row in panel["spec"]["datasets"]["means0"] if row["series"] == "learned router")
    assert (round(row["value"], 4), row["n"], row["at"], row["position"]) == (0.103, 4, "512", 477.71)
    assert re.fullmatch(r"0\.103 \[0\.09\d+, 0\.10\d+\]", row["text"])
    seeds = [
        one["value"]
        for one in panel["spec"]["datasets"]["seeds0"]
        if one["series"] == "learned router" and one["at"] == "512"
    ]
    assert seeds == pytest.approx([0.1, 0.102, 0.104, 0.106])
    assert panel["heading"] == "top-1 test loss (1 = trivial)" and "variance of the targets" in panel["definition"]
    assert [one["label"] for one in interactive.legend(chart)][:2] == ["learned router", "frozen at initialisation"]
    assert interactive.has_seeds(chart) and "seeds0" not in rendering.printed(chart)["datasets"]


def test_panels_of_a_map_share_a_scale_around_no_effect():
    """Largest gap: log(1 / .05) = 3.0 of frozen over learned at 4 experts, of the fairest control 1.39; all above 0."""
    chart = plots.draw(SPECS["phase"], data(table(SWEPT), SWEPT))
    scales = [panel.scheme.domain for panel in chart.panels]
    assert len(scales) == 2 and all(scale == pytest.approx((-np.log(20), np.log(20))) for scale in scales)


def test_too_many_seeds_are_left_out(monkeypatch):
    monkeypatch.setattr(layers, "MOST_SEEDS", 3)
    (panel,) = interactive.panels(plots.draw(TRAINING, data(table(SWEPT), SWEPT)), AXES)
    assert "seeds0" not in panel["spec"]["datasets"]


def maps(evaluations=3, rows=4, experts=4, load=True):
    """A router that ends with its clusters at the experts 3, 1, 0, 2 and nothing for one of them when `dead`."""
    seen = table({"data.samples": (512,)}, {"learned": 0.1})
    seen = seen[seen.seed == 0].assign(run="r")
    values = np.full((evaluations, rows, experts), 0.05)
    values[-1, np.arange(4), [3, 1, 0, 2]] = 0.85
    arrays = {"r": values} | (
        {"r/load": np.array([[0.25] * 4] * (evaluations - 1) + [[0.4, 0.6, 0.0, 0.0]])} if load else {}
    )
    seen = seen[seen.step.isin([0, 10])]
    return frame.Data(seen, ["data.samples"], flatten(base()), arrays, AXES)


def test_maps_are_those_of_the_base_seed():
    """An arm of two seeds has the maps of the config's seed 0; without that seed, those of the least."""
    drawing = maps()
    both = pd.concat([drawing.table, drawing.table.assign(run="s", seed=1)], ignore_index=True)
    arrays = {**drawing.heatmaps, "s": 1 - drawing.heatmaps["r"]}
    for rows, run in ((both, "r"), (both[both.seed == 1], "s")):
        (history,) = histories.histories(frame.Data(rows, ["data.samples"], flatten(base()), arrays, AXES))
        np.testing.assert_array_equal(history.values, arrays[run])


def test_maps_over_training_survive_their_packing():
    drawing = maps(evaluations=2)
    (history,) = histories.histories(drawing)
    packed = histories.as_json([history])
    (entry,) = packed["entries"]
    values = np.frombuffer(base64.b64decode(entry["values"]), "<u2").reshape(entry["shape"]) / 65535
    np.testing.assert_allclose(values, history.values, atol=1e-5)
    assert entry["steps"] == [0, 10] and packed["row"] == "cluster" and entry["exact"]
    assert np.array(entry["load"])[-1].tolist() == [1.6, 2.4, 0, 0]  # 4 experts times the share
    rows, columns = entry["order"]
    assert [int(values[-1][row].argmax()) for row in rows] == columns
    assert not histories.as_json([]) and not next(histories.histories(maps(2, load=False))).exact


def test_maps_are_thinned_evenly_to_their_room(monkeypatch):
    monkeypatch.setattr(histories, "MOST", 3 * 16)
    values = np.tile(np.eye(4), (9, 1, 1))
    course = table({"data.samples": (512,)}).head(1)
    one = histories.History("a", "cluster", list("1234"), [*range(0, 90, 10)], values, values.mean(1), True, course)
    (entry,) = histories.as_json([one])["entries"]
    assert entry["steps"] == [0, 40, 80] and entry["shape"] == [3, 4, 4]


def test_dead_experts_are_marked_in_the_map():
    """At the end two of four have no load; by the best match's order they are experts 2 and 3 (from 0)."""
    chart = plots.draw({"kind": "routing", "name": "r", "arms": ("learned",)}, maps(2))
    first, last = ([row["x"] for row in panel.rows.get("texts", ())] for panel in chart.panels)
    assert len(first) == 0 and len(last) == 2
    columns = histories.diagonal(next(histories.histories(maps(2))).values[-1])[1]
    assert {int(columns[int(x)]) for x in last} == {2, 3}


def test_a_cell_has_the_colour_of_its_scheme():
    """Vega's own way from white to orange goes through green, which a reader takes for a value above 0."""
    scheme = pictures.Scheme("redblue", (-4.0, 4.0))
    spec = {"data": {"values": [{"v": -0.6}]}, "mark": "rect", "encoding": {"color": scheme.channel("v")}}
    red, green, blue, _ = scheme.colours(np.array(-0.6)).tolist()
    assert f'fill="rgb({red}, {green}, {blue})"' in vl_convert.vegalite_to_svg(json.dumps(spec))


def test_a_picture_is_its_matrix():
    """Two cells: the ends of the scale, and nothing where a value is missing."""
    scheme = pictures.Scheme("blues", (1, 100), log=True)
    assert scheme.colours(np.array([[1.0, 100.0, np.nan]])).tolist() == [
        [[247, 251, 255, 255], [8, 48, 107, 255], [247, 251, 255, 0]]
    ]
    assert not scheme.is_dark(1.0) and scheme.is_dark(100.0)
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    png = pictures.encode(pixels)
    for content in (png, pictures.recompressed(png)):
        assert np.asarray(Image.open(io.BytesIO(content))).tolist() == pixels.tolist()


def part(name, maps=None):
    figure = {"panels": [{"spec": "x" * 86}], "svg": "s" * 100}  # 100 bytes as JSON
    return {"name": name, "figures": [figure], "maps": maps, "summary": "t" * 100, "left_out": []}


def test_what_is_too_large_for_a_page_is_left_out_and_named(monkeypatch):
    """Each part has 100 bytes of prints, of tables and of panels."""
    assert len(json.dumps(part("a")["figures"][0]["panels"])) == 100
    for size, gone in (
        (1000, ([], [])),
        (1001, ([], ["printed pictures"])),
        (1101, (["printed pictures"], ["printed pictures"])),
        (1400, (["printed pictures", "the table of every metric"], ["printed pictures", "the table of every metric"])),
        (1401, (["printed pictures", "the table of every metric"],
                ["printed pictures", "the table of every metric", "maps over training"])),
    ):  # fmt: skip
        two = [part("a"), part("b", {"entries": "m" * 500})]
        monkeypatch.setattr(page, "LARGEST", 1000)
        page.fit(two, size)
        assert ([*two[0]["left_out"]], [*two[1]["left_out"]]) == gone
    page.fit(two, 9999)
    assert not two[0]["figures"] and two[0]["left_out"][-1] == "figures"


def test_the_library_is_made_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    made = []
    monkeypatch.setattr(
        interactive.vl_convert, "javascript_bundle", lambda snippet: made.append(snippet) or "a</script>b"
    )
    interactive.library.cache_clear()
    assert [interactive.library(), interactive.library.__wrapped__()] == ["a<\\/script>b"] * 2 and len(made) == 1
    monkeypatch.setenv("HOME", "/dev/null")  # nothing can be kept there
    assert interactive.library.__wrapped__() == "a<\\/script>b" and len(made) == 2
    interactive.library.cache_clear()


def test_what_is_kept_of_a_run_for_its_maps():
    """Of 2 clusters of 4 assignments each, 6 went to the first expert: a load of .75, .25, 0."""
    counts = np.array([[[4.0, 0, 0], [2, 2, 0]]])
    history = {
        "probs": np.full((1, 2, 3), 1 / 3),
        "counts": counts,
        "encoder/maps": np.ones((1, 1, 2, 3)),
        "encoder/choices": counts,
    }
    found = maps_of(history)
    assert found.keys() == {"", "load", "encoder/maps"} and found[""].dtype == np.float16
    assert found["load"].tolist() == [[0.75, 0.25, 0.0]]


def test_sparse_layers_end_their_share_of_the_layers():
    config = override(base(), {"transformer.layers": 6, "transformer.sparse_layers": 2})
    assert [text_gates.layer_of(config, sparse) for sparse in (0, 1)] == [2, 5]


def test_maps_of_languages_are_rows_of_probabilities():
    """One layer, 2 languages, 2 experts: the first language's tokens gave 3 and 1 in sum, the second has none."""
    blocks = {
        "probs": jnp.array([[[[2.0, 1.0], [0.0, 0.0]]], [[[1.0, 0.0], [0.0, 0.0]]]]), "token": jnp.zeros((2, 1)),
        "dropped": jnp.array([[1.0], [0.0]]), "alike": jnp.array([[0.2], [0.4]]),
        "choices": jnp.array([[[[0], [0]]], [[[0], [1]]]]),
        "stale": jnp.zeros((2, 1, 2, 1), int), "sample": jnp.array([[[[0.75, 0.25]]], [[[0.0, 1.0]]]]),
    }  # fmt: skip
    found = text_gates.summary(blocks)
    assert found["sample"].tolist() == [[[0.75, 0.25]]]  # of the first block
    assert found["dropped"].tolist() == [0.25]  # 1 of 4 tokens
    np.testing.assert_allclose(found["alike"], [0.3])  # of both blocks
    assert found["maps"].tolist() == [[[0.75, 0.25], [0.0, 0.0]]] and found["load"].tolist() == [[0.75, 0.25]]


def test_a_language_model_has_a_map_for_each_layer():
    seen = table({"data.samples": (512,)}, {"learned": 0.1})
    seen = seen[seen.seed == 0].assign(
        run="r",
        **{"eval/loss/de": 1.0, "eval/loss/en": 1.0, "router/dead/encoder_1": 0.5, "router/dead/encoder_11": 0.0},
        **{"router/load_max/encoder_1": 2.0, "router/load_max/encoder_11": 1.0},
        **{"router/load_max/encoder_5": np.nan},  # of a model at another point
    )
    arrays = {"r/encoder/maps": np.full((2, 2, 2, 4), 0.25), "r/encoder/load": np.full((2, 2, 4), 0.25)}
    found = [*histories.histories(frame.Data(seen, ["data.samples"], flatten(base()), arrays, AXES))]
    assert [one.label for one in found] == ["learned router, encoder layer 2", "learned router, encoder layer 12"]
    assert found[0].rows == ["de", "en"] and found[0].row == "language" and found[0].values.shape == (2, 2, 4)
    assert [one.course["router/dead"].iloc[-1] for one in found] == [0.5, 0.0]


def test_an_expert_at_the_limit_is_not_dead():
    """1 % of a fair load of 8 experts is .00125, as 2 of 1,600 assignments are, in single precision too."""
    assert histories.dead_at(np.array([2 / 1600, 1 / 1600] + [0.1665] * 6)).tolist() == [False, True] + [False] * 6


def test_a_metric_in_the_table_of_all_has_its_definition_and_names_are_no_markup():
    """Of a layer's column that of all layers; a swept word is text."""
    columns = {"router/dead": Column("dead", definition="Fewer than <1 %>.")}
    names = {"arm": "learned", "mean": 0.1, "std": 0.0, "low": 0.0, "high": 0.2, "n": 2}
    summary = pd.DataFrame([names | {"metric": one, "data.name": "<b>"} for one in ("router/dead/encoder_1", "other")])
    made = page._wide(summary, ["data.name"], columns)
    assert 'router/dead/encoder_1<span role="tooltip">Fewer than &lt;1 %&gt;.</span>' in made
    assert "&lt;b&gt;" in made and "<b>" not in made and ">other<" in made


def test_a_box_for_seeds_is_there_only_where_they_are(monkeypatch):
    chart = plots.draw(
        LOSS | {"metrics": ("test/loss",)}, data(table({"data.samples": (512, 8192)}), ("data.samples",))
    )
    assert interactive.has_seeds(chart)
    monkeypatch.setattr(interactive, "MOST_SEEDS", 1)
    assert not interactive.has_seeds(chart)
