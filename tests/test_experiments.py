"""Every experiment file: its figures, claims and plots fit its config, and it runs end to end."""

import pathlib

import pytest

from routed import execute, experiment, plots, points, report, results
from routed.arms import ARMS, LABELS, MATCHED
from routed.config import PLANNED, SCALES, flatten, override
from routed.layout import make_mesh

FILES = sorted(str(p) for p in (pathlib.Path(__file__).parent.parent / "experiments").glob("*.py"))
MODULES = {f: experiment.load(f) for f in FILES}
VARIANTS = [
    (f, figure, scale) for f, m in MODULES.items() for figure in m.FIGURES for scale in getattr(m, "SCALES", SCALES)
]


def spec(file, figure, scale):
    return f"{file}:{figure},{scale}" if figure else f"{file}:{scale}"


@pytest.mark.parametrize(("file", "figure", "scale"), VARIANTS)
def test_every_variant_is_consistent(file, figure, scale):
    """Equal on the second call, every point valid for every arm, every claim at points and arms that run."""
    module, config = experiment.configure(spec(file, figure, scale), [])
    assert flatten(config) == flatten(module.get_config(f"{figure},{scale}" if figure else scale))
    config = override(config, {"data.directory": "where the user's text is", "seeds": 2})
    sweep = module.get_sweep(config)
    runs = points.plan(config, sweep)  # validates every point and arm
    assert len({r.key for r in runs}) == len(runs)
    columns = {key for point in sweep for key in point if key not in PLANNED}
    rows = [{**{k: flatten(r.config)[k] for k in columns}, "arm": r.arm} for r in runs]
    ids = set()
    for claim in module.get_claims(config):
        assert claim.id not in ids
        ids.add(claim.id)
        for side in (claim.lower, claim.higher):
            if not side or "value" in side:
                continue
            where = claim.at | {k: v for k, v in side.items() if k not in ("arm", "metric")}
            assert set(where) <= columns, f"{claim.id}: {set(where) - columns} is not swept"
            arms = {row["arm"] for row in rows if all(row[k] == v for k, v in where.items())}
            assert arms >= ({"frozen_data"} if side["arm"] == "fairest" else {side["arm"]}), claim.id
    for plot in module.get_plots(config):
        assert plot["kind"] in plots.KINDS
        assert {plot.get("x"), plot.get("y")} - {None} <= columns
        assert set(plot.get("metrics", ())) <= set(plots.AXES)


def test_every_arm_is_declared_and_drawn():
    assert set(LABELS) == set(ARMS)
    assert {m.source for m in MATCHED.values()} | set(MATCHED) <= set(ARMS)


#: Two steps of each figure that exercises something of its own.
ENDS = [(f, g) for f in FILES for g in ("", "fig2b", "fig4", "spurious") if g in experiment.load(f).FIGURES]


@pytest.mark.parametrize(("file", "figure"), ENDS)
def test_two_steps_end_to_end(file, figure, tmp_path, tmp_path_factory):
    module, config = experiment.configure(spec(file, figure, "smoke"), [])
    few = {"steps": 2, "eval_every": 1, "checkpoint.every": 0, "seeds": 1, "tune.multipliers": (1.0,)}
    few |= {"data.test_samples": 80, "data.cache": str(tmp_path_factory.getbasetemp() / "text")}
    config = override(config, few)
    sweep = module.get_sweep(config)
    if config.name == "router_zoo":  # some of its methods, as every router and selection has tests of its own
        sweep = sweep[::4]
    else:  # arms have tests of their own too: what is new is the data and the points
        arms = (
            ("learned", "frozen", "dense_active")
            if config.name == "gmm_router" and not figure
            else ("learned", "frozen")
        )
        sweep = tuple(point | {"arms": arms} for point in sweep[-2:])
    runs = points.plan(config, sweep)
    table = results.open_workdir(tmp_path, file, config, sweep)
    table = execute.execute(runs, table, tmp_path, make_mesh(config))
    assert set(table.run) == {r.key for r in runs} and set(table.status) <= {"ok", "tuning"}
    text = report.write(tmp_path, module, config, table)
    assert text and (tmp_path / "report.html").stat().st_size > 10_000
