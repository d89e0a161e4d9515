"""Every experiment file: its figures, claims and plots fit its config, and it runs end to end."""

import pathlib
import re
from functools import cache

import pytest

from routed.analysis import page
from routed.contracts import UserError
from routed.engine import execution, results
from routed.engine.devices import make_mesh
from routed.engine.rows import plain_value
from routed.plan import experiment
from routed.plan.arms import ARMS, source_of
from routed.plan.checks import PLANNED
from routed.plan.config import problem_of
from routed.plan.experiment import SCALES, figure_of
from routed.plan.runs import plan_runs
from routed.settings.tree import flatten, override, value_of

FILES = sorted(str(p) for p in (pathlib.Path(__file__).parent.parent / "experiments").glob("*.py"))
MODULES = {f: experiment.load(f) for f in FILES}
VARIANTS = [
    (f, figure, scale)
    for f, m in MODULES.items()
    for figure in m.FIGURES
    for scale in getattr(m, "SCALES", SCALES)
    if not (figure and scale == "quick")
]
#: The ids of the claims of every variant: verdicts are cited by them, so none changes.
CLAIM_IDS = {
    name: ids
    for name, *ids in map(
        str.split, (pathlib.Path(__file__).parent / "golden" / "claim_ids.txt").read_text().splitlines()
    )
}


def spec(file, figure, scale):
    return f"{file}:{figure},{scale}" if figure else f"{file}:{scale}"


def test_scale_quick_is_of_the_headline():
    with pytest.raises(UserError, match="gmm_router:fig3,quick: scale quick is of the first figure alone"):
        experiment.configure("gmm_router:fig3,quick", [])


@pytest.mark.parametrize(
    ("file", "figure", "scale"),
    [pytest.param(*one, marks=() if one[-1] in ("smoke", "default") else pytest.mark.slow) for one in VARIANTS],
)
def test_every_variant_is_consistent(file, figure, scale):
    """Equal on the second call, every point valid for every arm, every claim at points and arms that run."""
    module, config = experiment.configure(spec(file, figure, scale), [])
    assert flatten(config) == flatten(module.get_config(f"{figure},{scale}" if figure else scale))
    if scale not in ("smoke", "default"):  # whose tests plan all rates
        config = override(config, {"tune.multipliers": config.tune.multipliers[:1], "tune.router_multipliers": (1.0,)})
    given = {"data.directory": "where the user's text is", "initial.workdir": "where models are to begin with"}
    config = override(config, given | {"seeds": 2})
    sweep = figure_of(module, config).sweep(config)
    runs = plan_runs(config, sweep)  # validates every point and arm
    assert len({r.key for r in runs}) == len(runs)
    columns = {key for point in sweep for key in point if key not in PLANNED}
    rows = {(r.arm, *((k, place[k]) for k in sorted(columns))): r.arm for r in runs for place in r.flat_configs}
    base = flatten(config)

    @cache
    def arms_at(*where):
        """The arms that a claim finds there: an unnamed swept key has its base value, or the largest (`at_base`)."""
        found = [(dict(row[1:]), arm) for row, arm in rows.items() if set(where) <= set(row)]
        for key in sorted(columns - {key for key, _ in where}) if found else ():
            values = {plain_value(place[key]) for place, _ in found}
            own = plain_value(base[key]) if plain_value(base[key]) in values else max(values)
            found = [(place, arm) for place, arm in found if plain_value(place[key]) == own]
        return {arm for _, arm in found}

    ids: dict[str, None] = {}  # in their order
    for claim in figure_of(module, config).claims(config):
        assert claim.id not in ids
        ids[claim.id] = None
        needs = claim.setup.needs if scale != "smoke" else ()  # which has no verdicts
        needed = ({"arm": arm} for need in needs for arm in (need.better, need.worse))
        for side, at in (*claim.reads(), *((side, claim.setup.at) for side in needed)):
            if "value" in side:
                continue
            where = {**at, **{k: v for k, v in side.items() if k not in ("arm", "metric")}}
            assert set(where) <= columns, f"{claim.id}: {set(where) - columns} is not swept"
            arms = arms_at(*where.items())
            assert arms >= ({"frozen_data"} if side["arm"] == "fairest" else {side["arm"]}), claim.id
    assert [*ids] == CLAIM_IDS[pathlib.Path(spec(file, figure, scale)).name]
    page.check(figure_of(module, config), config)
    for plot in figure_of(module, config).plots(config):
        assert {plot.get("x"), plot.get("y")} - {None} <= columns
        assert set(plot.get("metrics", ())) <= set(problem_of(config).columns(config))


@pytest.mark.parametrize("figure", ["table9", "table2", "table4", "table5"])
def test_bits_of_pieces_stand_beside_no_bits_per_character(figure):
    """The paper's numbers stand beside those of bytes; of pieces its orders are asked alone."""
    file = next(f for f in FILES if f.endswith("competition_lm.py"))

    def asked(tokens):
        module, config = experiment.configure(f"{file}:{figure},smoke", [f"data.tokens={tokens}"])
        return [
            (claim.id, claim.kind)
            for claim in figure_of(module, config).claims(config)
            if claim.setup.metric == "test/bits"
        ]

    of_bytes = asked("bytes")
    assert {"order", "beside"} == {kind for _, kind in of_bytes}
    assert asked("train") == [one for one in of_bytes if one[1] != "beside"]


@pytest.mark.parametrize(("file", "figure", "scale"), [one for one in VARIANTS if one[-1] == "default"])
def test_a_figure_names_what_its_points_compute(file, figure, scale):
    """Else --config.steps=N would hold at every point, and steps of equal FLOPs or half the steps would be no more."""
    module, config = experiment.configure(spec(file, figure, scale), [])
    asked = figure_of(module, config)

    def values(points, key):
        return {point[key] for point in points if key in point}

    usual, keys = asked.sweep(config), ("steps", "eval_every", "batch_size")
    changed = {key: asked.sweep(override(config, {key: 2 * value_of(config, key)})) for key in keys}
    assert set(asked.computed) & set(keys) == {
        key for key, points in changed.items() if values(points, key) != values(usual, key)
    }


def test_every_arm_is_declared_and_drawn():
    assert all(arm.label and re.fullmatch("#[0-9A-F]{6}", arm.colour) for arm in ARMS.values())
    assert {source for name in ARMS if (source := source_of(name))} <= set(ARMS)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_every_arm_of_a_default_headline_can_be_traced(file):
    """From the start to the first evaluation, by shapes, on the data of a smoke run: others have few arms."""
    module, config = experiment.configure(file, [])
    data = flatten(experiment.configure(spec(file, "", "smoke"), [])[1]).items()
    small = {key: value for key, value in data if key.startswith("data.") or key == "router.vocabulary"}
    config = override(config, small | {"seeds": 1, "rates": "paper", "data.samples": config.data.samples})
    assert execution.make_groups(plan_runs(config, figure_of(module, config).sweep(config)), make_mesh(config))


#: Two steps of each file but gmm_router, whose smoke figure test_stored has whole, and of models of several depths on
#: one page.
ENDS = [(f, "") for f in FILES if not f.endswith("/gmm_router.py")]
ENDS += [(f, "table2") for f in FILES if f.endswith("competition_lm.py")]


#: Where another point is the same program of another shape, so that its own tests (of the task, and of plans) say all
#: about it.
ONE_POINT = (
    "card_predicts", "chen_text", "cluster_cnn", "competition_theory", "dictionary_router", "gmm_causes",
    "sequence_router", "theory_two_gaussians",
)  # fmt: skip


#: What a file has of its own among arms.
ARMS_OF = {
    ("patch_wrn", ""): ("learned", "wide_resnet"),
    ("competition_gmm", ""): ("learned", "compete"),
    ("competition_lm", ""): ("learned", "compete"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("file", "figure"), ENDS)
def test_two_steps_end_to_end(file, figure, tmp_path, tmp_path_factory):
    module, config = experiment.configure(spec(file, figure, "smoke"), [])
    few = {"steps": 2, "eval_every": 1, "checkpoint.every": 0, "seeds": 1, "tune.multipliers": (1.0,)}
    few |= {"data.test_samples": 240, "data.cache": str(tmp_path_factory.getbasetemp() / "text")}
    config = override(config, few)
    sweep = figure_of(module, config).sweep(config)
    if config.name != "router_zoo":  # arms have tests of their own too: what is new is the data and the points
        arms = ARMS_OF.get((config.name, figure), ("learned", "frozen"))
        sweep = tuple(point | {"arms": arms} for point in sweep[-2:])
        if config.name in ONE_POINT:
            sweep = sweep[-1:]
    else:
        sweep = sweep[2:]  # without soft and noisy gates
    runs = plan_runs(config, sweep)
    table = results.open_workdir(tmp_path, file, config, sweep)
    table = execution.execute(runs, table, tmp_path, make_mesh(config))
    assert set(table.run) == {r.key for r in runs} and set(table.status) <= {"ok", "tuning"}
    text = page.write(tmp_path, module, config, table)
    html = (tmp_path / "report.html").read_text()
    # Texts with classes are compared where they are tested, all others where they are validated.
    compared = "test/loss" if config.name == "competition_tuning" else problem_of(config).loss
    assert text and len(html) > 10_000
    assert re.search(f">{compared}<span [^<]+</span></span> of every arm at every point", html)
