"""The files of docs/extending.md are experiments of at most 30 lines, run by their commands, and keep their word."""

import importlib
import json
import pathlib
import re
import shlex
import subprocess
import sys
from collections import ChainMap
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed import experts, routers, tasks
from routed.analysis import page, plots, verdicts
from routed.analysis.claims import KINDS
from routed.contracts import SoftRouting, UserError
from routed.engine import execution, results
from routed.engine.devices import make_mesh
from routed.layer import auxiliary, selection
from routed.layer.rule import selection_rule
from routed.metrics import router as metrics
from routed.models.single_layer import SITE
from routed.plan import arms, experiment, listing, points
from routed.plan.config import CHOICES, canonical, declared, problem_of
from routed.plan.config import traced as every_traced
from routed.plan.runs import plan_runs
from routed.settings.tree import node_of, override, value_of
from routed.tasks import worlds
from routed.training import task_losses
from routed.training.problem import Inputs
from routed.training.program import streams
from tests.patience import PATIENCE

pytestmark = pytest.mark.slow  # processes, or several programs to compile

ROOT = pathlib.Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "extending.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+)\n((?:(?!^## ).*\n)+)", TEXT, re.MULTILINE))

#: Every dict that an example adds to.
TABLES = (
    routers.ROUTERS, tasks.TASKS, experts.EXPERTS, selection.SELECTIONS, auxiliary.AUXILIARY, metrics.METRICS,
    plots.PLOTS, arms.ARMS, task_losses.TASK_LOSSES, KINDS,
)  # fmt: skip

ARMS = ("learned", "frozen", "frozen_sharp", "frozen_data")
TINY = {
    "seeds": 1, "steps": 2, "eval_every": 1, "batch_size": 8, "data.clusters": 4, "data.dim": 3,
    "data.test_samples": 80, "data.samples": 32, "experts.count": 4, "experts.width": 5, "experts.depth": 1,
    "shuffles": 0, "mesh.run": 1, "arms": ARMS,
}  # fmt: skip


@pytest.fixture(autouse=True)
def untouched(monkeypatch, tmp_path):
    """Other tests see the parts that they always saw, in their order; experiments are found from any folder."""
    before = [dict(table) for table in TABLES]
    monkeypatch.chdir(tmp_path)
    yield
    for table, known in zip(TABLES, before, strict=True):
        table.clear()
        table.update(known)


def block(heading):
    """The only Python block of a section."""
    (found,) = re.findall(r"^```python\n(.*?)^```$", SECTIONS[heading], re.MULTILINE | re.DOTALL)
    return found


def command(heading):
    """(FILE, :FIGURE or nothing, sweeps) of the only command line of a section."""
    (line,) = re.findall(r"^    \$P (.*)$", SECTIONS[heading], re.MULTILINE)
    spec, *rest = shlex.split(line)
    file, colon, figure = spec.removeprefix("--config=").partition(":")
    assert all(flag.startswith("--sweep=") for flag in rest)
    return file, colon + figure, [flag.removeprefix("--sweep=") for flag in rest]


def load(heading, path, change=lambda text: text):
    """(module, tiny config) of a section's file."""
    file, figure, _ = command(heading)
    (path / file).write_text(change(block(heading)))
    module, config = experiment.configure(f"{path / file}{figure}", [])
    return module, override(config, TINY)


def train(heading, path, changes=None, sweeps=(), paged=False):
    """(config, table, page if asked) of a section's file, run to the end: the last point, the first plot only."""
    module, config = load(heading, path)
    config, figure, parts = override(config, changes or {}), module.FIGURES[config.figure], []
    module.FIGURES = {config.figure: figure._replace(plots=lambda config: figure.plots(config)[:1])}
    place = {key: value for key, value in figure.sweep(config)[-1].items() if key != "arms"}
    place |= {"data.samples": config.data.samples}
    sweep = points.cross((place,), points.points_of_flags(config, list(sweeps)))
    runs = plan_runs(config, sweep, [flag.partition("=")[0] for flag in sweeps])
    (work := path / "work").mkdir()
    table = results.open_workdir(work, config.name, config, sweep)
    table = execution.execute(runs, table, work, make_mesh(config))
    assert set(table.status) == {"ok"} and set(config.arms) <= set(table.arm)
    if not paged:
        return config, table, None
    made = page.make_part
    with mock.patch.object(page, "make_part", side_effect=lambda *given: parts.append(made(*given)) or parts[0]):
        page.write(work, module, config, table)
    assert (work / "report.html").stat().st_size > 1000
    return config, table, parts[0]


def column(table, name, **where):
    """The values of a column by step; `where`: arm, and swept keys with `__` for the dot."""
    for key, value in where.items():
        table = table[table[key.replace("__", ".")] == value]
    assert len(table) == 3  # one run, three evaluations
    return table.sort_values("step")[name].to_numpy()


def started(config, traced=None):
    """(problem, inputs, params, state) of a run at step 0, with traced settings as given."""
    config = canonical(config)
    problem = problem_of(config).build(config, config.data.samples, None)
    values = {key: jnp.asarray(value) for key, value in (every_traced(config) | (traced or {})).items()}
    keys, run = streams(0, config), node_of(config, values)
    inputs = Inputs(keys, run, jax.jit(lambda: problem.draw_world(keys, run))(), ())
    return problem, inputs, *jax.jit(lambda: problem.init(inputs))()


def scores_of(config, traced=None, step=0):
    """(scores on the test tokens, parameters of the router) at step 0."""
    problem, inputs, params, state = started(config, traced)
    test = worlds.test_batch(tasks.TASKS[config.data.name], inputs.world, inputs.config.data)
    scores = jax.jit(lambda: problem.model.scores(params, state, SITE, test.tokens[None], test, step)[0])()
    return scores, params["router"]


@pytest.mark.parametrize("heading", SECTIONS)
def test_a_section_has_one_file_of_at_most_30_lines_and_its_command(heading):
    lines = [line for line in block(heading).splitlines() if line.strip()]
    assert len(lines) <= 30 and max(map(len, lines)) <= 125
    assert lines[0].startswith('"""') and lines[0].endswith('?"""')
    file, _, _ = command(heading)
    assert f'"name": "{file.removesuffix(".py")}"' in block(heading) or f'make_config("{file[:-3]}"' in block(heading)


#: Prints the names in dicts, `module.NAME`, before a paper adds to them.
NAMES_IN = """
import importlib, json, sys
dicts = [name.rpartition(".") for name in sys.argv[1:]]
print(json.dumps([[*getattr(importlib.import_module(module), name)] for module, _, name in dicts]))
"""


def test_the_table_of_parts_has_their_names():
    rows = re.findall(r"^\| [^|]+ \| `(routed[\w.]+)` \| [^|]+ \| ([^|]+) \|$", TEXT, re.MULTILINE)
    line = [sys.executable, "-c", NAMES_IN, *(name for name, _ in rows)]
    found = json.loads(subprocess.run(line, capture_output=True, text=True, check=True, timeout=PATIENCE).stdout)
    expected = [", ".join(f"`{name}`" for name in names) for names in found]
    told = [names if names.startswith("`") else expected[i] for i, (_, names) in enumerate(rows)]
    assert told == expected and len(rows) == 21
    named = {id(choice.parts) for choice in CHOICES.values() if not isinstance(choice.parts, ChainMap)}
    tables = [getattr(importlib.import_module(m), n) for m, _, n in (name.rpartition(".") for name, _ in rows)]
    assert named - {*map(id, tables)} == {id(CHOICES["data.name"].parts), id(CHOICES["model"].parts)}  # tasks and texts


def test_there_are_fourteen_sections():
    assert len(SECTIONS) == 14 and TEXT.count("```python") == 14


@pytest.mark.parametrize("heading", SECTIONS)
def test_the_command_line_of_a_section_plans_its_sweep(heading, tmp_path):
    """At all points of its figure, on a small scale; every value that is swept makes runs of its own."""
    file, figure, flags = command(heading)
    (tmp_path / file).write_text(block(heading))
    scaled = f"{tmp_path / file}{figure}{',' if figure else ':'}smoke"
    module, config = experiment.configure(scaled, ["seeds=1"])
    arms = ("learned", "frozen") if "frozen" in config.arms else config.arms
    pairs = tuple(point | {"arms": arms} for point in experiment.figure_of(module, config).sweep(config))
    runs = plan_runs(
        config, points.cross(pairs, points.points_of_flags(config, flags)), [flag.partition("=")[0] for flag in flags]
    )
    for key, _, values in (flag.partition("=") for flag in flags):
        last = {run.key: value_of(run.config, key) for run in runs if run.arm == arms[-1]}
        assert {*values.split(",")} == {value if isinstance(value, str) else f"{value:g}" for value in last.values()}
    assert runs and config.steps < experiment.configure(f"{tmp_path / file}{figure}", [])[1].steps


def listed(config, key):
    """The line of a setting in --list=settings."""
    lines = listing.list_settings(config, plan_runs(config, ({},))).splitlines()
    return next((line for line in lines if line.startswith(f"{key} =")), "")


def test_a_router_with_a_setting(tmp_path):
    _, config = load("A router with a setting", tmp_path)
    linear, direction = (override(config, {"router.name": "linear"}), override(config, {"router.power": 1.0}))
    np.testing.assert_allclose(scores_of(override(config, {"router.power": 0.0}))[0], scores_of(linear)[0], rtol=1e-5)
    assert not np.allclose(scores_of(direction)[0], scores_of(linear)[0])
    assert listed(config, "router.power").startswith("router.power = 1.0  of a token's length, which the token")
    assert listed(config, "router.power").endswith("Read by: router.name=shortened")


ROUTERS = ("A router with a setting", "A router with state", "A router that uses the training step")


@pytest.mark.parametrize("heading", ROUTERS)
def test_controls_act_on_routers_of_ones_own(heading, tmp_path):
    _, config = load(heading, tmp_path)
    plain, _ = scores_of(config)
    louder, _ = scores_of(config, {"router.init_scale": 3.0})
    np.testing.assert_allclose(louder, 3 * plain, rtol=1e-4, atol=1e-5)
    informed, params = scores_of(config, {"router.init_from_data": True})
    _, inputs, _, _ = started(config)
    task = tasks.TASKS[config.data.name]
    rows = worlds.examples(task, inputs.world, config.experts.count, inputs.config.data).tokens
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True) if heading == ROUTERS[0] else rows
    np.testing.assert_allclose(params["kernel"], rows.T, rtol=1e-5)
    assert not np.allclose(informed, plain)
    problem, inputs, params, state = started(config, {"router.initial_entropy": jnp.float32(0.5)})
    seen = jax.jit(lambda: problem.evaluate(inputs, params, state, jnp.int32(config.steps), ()))()
    assert float(seen["router/entropy_token_train"]) == pytest.approx(0.5, abs=1e-3)  # the scores are sharpened


def test_a_task_loss(tmp_path):
    """Errors .5 and 3: .5^2 / 2 and 3 - 1/2. Both losses are trained on, and differ."""
    _, table, _ = train("A task loss", tmp_path, sweeps=["loss=squared,huber"])
    value = task_losses.TASK_LOSSES["huber"].value(jnp.array([[0.5, 3.0]]), jnp.zeros((1, 2)))
    np.testing.assert_allclose(value, [0.125 + 2.5])
    losses = [column(table, "test/loss_soft", arm="learned", loss=loss) for loss in ("squared", "huber")]
    assert (losses[0] != losses[1]).all()


def test_a_router_with_state_moves_in_training_and_stays_when_frozen(tmp_path):
    _, table, _ = train("A router with state", tmp_path)
    for arm in ARMS:
        assert column(table, "router/params_changed", arm=arm).tolist() == [0, arm == "learned", arm == "learned"]
        assert np.ptp(column(table, "router/norm_mean", arm=arm)) < 1e-6  # of the start, which gets no gradient
        assert (len(set(column(table, "router/entropy_token", arm=arm))) == 1) == (arm != "learned")


def test_prototypes_follow_the_means_of_their_tokens(tmp_path):
    """One step by hand, on a training batch; an evaluation leaves them where they are."""
    _, config = load("A router with state", tmp_path)
    problem, inputs, params, state = started(config)
    batch = problem.batch(inputs, (), jnp.int32(0))
    rule = selection_rule(inputs.config.selection)
    after, still = (
        jax.jit(lambda key=key: problem.model.apply(params, state, batch, rule, "dense", key, 0).state)()
        for key in (jax.random.key(0), None)
    )
    x, start = np.asarray(batch.x), np.asarray(params["router"]["kernel"])
    nearest = ((x[:, :, None] - start[None]) ** 2).sum(1).argmin(1)
    expected = np.zeros_like(start)
    for expert in set(nearest.tolist()):
        expected[:, expert] = config.router.rate * (x[nearest == expert].mean(0) - start[:, expert])
    np.testing.assert_allclose(after["prototypes"]["router"]["moved"], expected, atol=1e-6)
    np.testing.assert_array_equal(still["prototypes"]["router"]["moved"], 0)
    assert np.abs(expected).max() > 0.01


def test_a_router_that_uses_the_training_step(tmp_path):
    config, table, _ = train("A router that uses the training step", tmp_path, {"router.halvings": 2.0})
    entropy = column(table, "router/entropy_token", arm="frozen")
    assert entropy[0] > entropy[1] > entropy[2]  # the same weights
    assert column(table, "router/params_changed", arm="frozen").tolist() == [0, 0, 0]
    for steps in (config.steps, 10 * config.steps):  # a run of any length ends as sharp
        longer = override(config, {"steps": steps})
        np.testing.assert_allclose(scores_of(longer, step=steps)[0], 4 * scores_of(config)[0], rtol=1e-6)


def test_a_task_with_settings(tmp_path):
    config, table, _ = train("A task with settings", tmp_path, sweeps=["data.gap=0.5,2"])
    losses = [column(table, "test/loss", arm="learned", data__gap=gap) for gap in (0.5, 2.0)]
    assert (losses[0] != losses[1]).all()
    np.testing.assert_array_equal(table["test/bayes"], 0)
    for gap in (0.5, 2.0):
        data = node_of(config, {"data.gap": gap}).data
        world = worlds.draw_world(tasks.TASKS["shells"], jax.random.key(0), data, 8)
        test = worlds.test_batch(tasks.TASKS["shells"], world, data)
        further = np.linalg.norm(test.x, axis=1) - np.linalg.norm(world.test[1], axis=1)
        np.testing.assert_allclose(further, gap * np.asarray(test.cluster), atol=1e-4)


def test_a_task_with_classes(tmp_path):
    changes = {"arms": ("learned", "frozen"), "data.samples": 2000, "batch_size": 32}
    changes |= {"experts.learning_rate": 0.1, "steps": 400, "eval_every": 200}
    config, table, part = train("A task with classes", tmp_path, changes, paged=True)
    right = {arm: column(table, "test/accuracy", arm=arm) for arm in config.arms}
    assert right["learned"][0] < 0.5 < right["learned"][2] <= 1, right  # four classes: chance is 1/4
    assert right["learned"][0] == right["frozen"][0]
    assert "test/loss_soft" not in table and "test/bayes" not in table
    (figure,) = part["figures"]
    assert [panel.y.label for panel in figure["drawn"].panels] == ["test accuracy", "training loss (nats per sample)"]
    labels = worlds.test_batch(tasks.TASKS["rules"], started(config)[1].world, node_of(config).data).y
    assert labels.shape == (80, 4) and set(np.asarray(labels).sum(1)) == {1} and np.asarray(labels).any(0).all()


def test_an_expert(tmp_path):
    config, _, _ = train("An expert", tmp_path)
    problem, _, params, _ = started(override(config, {"experts.rank": 5}))
    shapes = {name: one["kernel"].shape for name, one in params["experts"].items()}
    assert sorted(shapes.values()) == [(4, 3, 5), (4, 3, 10), (4, 5, 10)]  # four experts
    x = jnp.array([[1.0, 2.0, -1.0]])
    one, two = (problem.model.responses(params, SITE, factor * x[None]) for factor in (1.0, 2.0))
    zero = problem.model.responses(params, SITE, 0 * x[None])  # biases are 0
    assert np.abs(zero).max() == 0 and np.abs(two - 2 * one).max() > 0.1  # quadratic, no linear map


def test_a_selection(tmp_path):
    sweeps = ["selection.name=soft,above", "selection.floor=0,0.24", "selection.eval.floor=0,0.24"]
    changes = {"arms": ("learned", "frozen"), "selection.eval.name": "above"}
    _, table, _ = train("A selection", tmp_path, changes, sweeps)
    exactly = table[table["selection.eval.floor"] == 0]
    for arm in ("learned", "frozen"):
        soft, none, some = (
            column(exactly, "train/loss", arm=arm, selection__name=name, selection__floor=floor)[1:]
            for name, floor in (("soft", 0.0), ("above", 0.0), ("above", 0.24))
        )
        np.testing.assert_allclose(none, soft, rtol=1e-5)
        assert (np.abs(some - soft) > 1e-4).all()
    # A traced setting of `selection.eval` differs between the runs of one program.
    trained = table[(table.arm == "learned") & (table["selection.name"] == "above") & (table["selection.floor"] == 0)]
    exact, cut = (column(trained, "test/loss", selection__eval__floor=floor) for floor in (0.0, 0.24))
    np.testing.assert_allclose(exact, column(trained, "test/loss_soft", selection__eval__floor=0.0), rtol=1e-5)
    assert (np.abs(cut - exact) > 1e-4).all()
    node = node_of(experiment.configure(str(tmp_path / "my_selection.py"), ["selection.floor=0.25"])[1])
    probs, mask = jnp.array([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6]]), jnp.array([True, False])
    routing = selection.select(selection_rule(node.selection), jnp.log(probs), mask=mask)
    assert isinstance(routing, SoftRouting)
    np.testing.assert_allclose(routing.weight, [[2 / 3, 1 / 3, 0], [0, 0, 0]], rtol=1e-5)


def test_a_selection_on_text(tmp_path):
    """Two steps of its own arm; a weight below the floor is left out."""
    file, _, _ = command("A selection on text")
    (tmp_path / file).write_text(block("A selection on text"))
    module, config = experiment.configure(
        f"{tmp_path / file}:smoke", ["steps=2", "eval_every=1", "checkpoint.every=0", "seeds=1", "arms=floored"]
    )
    runs = plan_runs(config, module.FIGURES[""].sweep(config))
    (work := tmp_path / "work").mkdir()
    table = execution.execute(runs, results.open_workdir(work, config.name, config, ({},)), work, make_mesh(config))
    assert set(table.arm) == {"floored"} and set(table.status) == {"ok"}
    assert [claim.id for claim in module.FIGURES[""].claims(config)] == ["mine.floored"]
    arm = experiment.configure(
        str(tmp_path / file), ["selection.name=floored", "selection.renormalise=true", "selection.floor=0.25"]
    )[1]
    routing = selection.select(
        selection_rule(node_of(arm).selection), jnp.log(jnp.array([[0.6, 0.3, 0.1], [0.6, 0.1, 0.0]]))
    )
    assert routing.kept.tolist() == [True, True, True, False]  # 2/3, 1/3 and 6/7, 1/7


def test_an_arm(tmp_path):
    changes = {"arms": ("learned", "frozen", "frozen_loud", "learned_cosine")}
    config, table, part = train("An arm", tmp_path, changes | {"data.test_samples": 80}, paged=True)
    _, whole = experiment.configure(str(tmp_path / "my_arm.py"), [])
    names = {run.arm: run.config.router.name for run in plan_runs(whole, ({},))}
    assert (names["frozen_loud"], names["learned_cosine"], names["learned"]) == ("linear", "cosine", "linear")
    norm = {arm: column(table, "router/norm_mean", arm=arm) for arm in config.arms}
    np.testing.assert_allclose(norm["frozen_loud"], 10 * norm["frozen"], rtol=1e-5)
    assert column(table, "router/params_changed", arm="frozen_loud").tolist() == [0, 0, 0]
    assert "frozen, weights times 10" in part["figures"][0]["drawn"].series
    assert "frozen_loud" in arms.fair_arms()


def test_an_auxiliary_loss(tmp_path):
    changes = {"losses.discord_ramp": 0.5, "arms": ("learned", "frozen")}
    config, table, _ = train("An auxiliary loss", tmp_path, changes, ["losses.discord=0,1"])
    off, on = (column(table, "router/norm_mean", arm="learned", losses__discord=weight) for weight in (0.0, 1.0))
    assert off[0] == on[0] and off[1] == pytest.approx(on[1], rel=1e-6)  # the ramp is 0 at the first step
    assert abs(off[2] - on[2]) > 1e-5
    frozen = [column(table, "test/loss", arm="frozen", losses__discord=weight) for weight in (0.0, 1.0)]
    np.testing.assert_allclose(*frozen, rtol=1e-6)
    _, config = experiment.configure(str(tmp_path / "my_loss.py"), [])
    text = listed(config, "losses.discord")
    assert text.startswith("losses.discord = 0.1 (default 0.0)  coefficient of an auxiliary loss: variance of the")
    assert listed(config, "losses.discord_ramp").endswith("; must be positive; traced. Read by: loss discord")


def test_an_auxiliary_loss_by_hand(tmp_path):
    _, config = load("An auxiliary loss", tmp_path)
    probs, outputs = jnp.array([[0.5, 0.5], [1.0, 0.0]]), jnp.array([[[0.0], [2.0]], [[5.0], [7.0]]])
    routing = SoftRouting(jnp.log(probs), probs)
    for step, expected in ((0, 0.0), (250, 0.25), (500, 0.5), (5000, 0.5)):  # variances 1 and 0; a tenth of the steps
        total, values = auxiliary.auxiliary(
            routing, {"discord": 2.0}, losses=node_of(config).losses, responses=lambda: outputs, step=step, steps=5000
        )
        assert float(values["discord"]) == pytest.approx(expected) and float(total) == pytest.approx(2 * expected)


def test_a_claim(tmp_path):
    """The point that ran has numbers of both sides; the other has none, and one seed gives no verdict."""
    _, config = load("A claim", tmp_path)
    assert [claim.id for claim in experiment.figure_of(*load("A claim", tmp_path)).claims(config)] == [
        "mine.kmeans.512", "mine.kmeans.2048"
    ]  # fmt: skip
    changes = {"arms": ("learned", "frozen_kmeans"), "data.samples": 2048}
    _, table, part = train("A claim", tmp_path, changes, paged=True)
    missing, there = part["claims"]
    assert missing["verdict"] == "not run" and missing["statement"].startswith("512 samples")
    last = table[table.step == table.step.max()].set_index("arm")["test/loss"]
    assert there["n"] == 1 and f"learned {last['learned']:.3g} against frozen_kmeans" in there["text"]


def test_a_kind_of_claim(tmp_path):
    """The interval of the mean decides against the claim's own field."""
    config, table, part = train("A kind of claim", tmp_path, {"arms": ("learned",), "seeds": 3}, paged=True)
    (record,) = part["claims"]
    last = table[table.step == table.step.max()]["test/loss"]
    assert (record["kind"], record["n"], record["p"]) == ("below", 3, None)
    assert record["ours"] == pytest.approx(last.mean())
    (claim,) = experiment.figure_of(*load("A kind of claim", tmp_path)).claims(config)
    low, high = (end / 1000 for end in record["interval"])
    better = table.assign(**{"test/loss": table["test/loss"] / 1000})  # these few steps are no better than a constant
    limits = {low - 1: "opposite", (low + high) / 2: "inconclusive", high + 1: "supported"}
    for limit, verdict in limits.items():
        assert verdicts.judge((claim.replace(limit=limit),), better, config, [])[0]["verdict"] == verdict


def test_a_metric_column_and_a_plot(tmp_path):
    config, table, part = train("A metric column and a plot", tmp_path, paged=True)
    values = table["router/certainty"]
    assert (values > 1 / config.experts.count).all() and (values < 1).all() and values.nunique() > 2
    assert "router/certainty" in set(part["table"].metric)
    figure, automatic = part["figures"]
    (panel,) = figure["drawn"].panels
    assert automatic["name"] == "own" and panel.x.label == "largest probability of a token, mean"
    assert panel.y.label == "top-1 test loss (1 = trivial)"
    drawn = sorted(row["x"] for row in panel.rows["dots"])
    np.testing.assert_allclose(drawn, sorted(values[table.step == 2]), rtol=1e-4)
    assert figure["caption"].startswith("A point is a run")
    assert {file.name for file in (tmp_path / "work" / "figures").glob("[!.]*")} == {
        f"{name}.{kind}" for name in ("certainty", "own") for kind in ("svg", "png")
    }


def unread(text):
    """The file of a router that reads `strength`, which it does not declare."""
    return text.replace("own.power", "own.strength")


def test_a_setting_that_is_read_and_not_declared_is_named(tmp_path):
    _, config = load("A router with a setting", tmp_path, unread)
    with pytest.raises(UserError, match=r"'strength' is read, but no part of this run declares it.*power"):
        problem_of(config).build(canonical(config), 8, None)


def test_a_selection_that_reads_what_it_does_not_declare_is_named(tmp_path):
    _, config = load("A selection", tmp_path, lambda text: text.replace("settings.floor", "settings.flor"))
    with pytest.raises(UserError, match=r"'flor' is read.*floor"):
        started_and_applied(config)


def started_and_applied(config):
    problem, inputs, params, state = started(config)
    batch = problem.batch(inputs, (), jnp.int32(0))
    return problem.model.apply(
        params, state, batch, selection_rule(inputs.config.selection), "dense", jax.random.key(0), 0
    )


@pytest.mark.parametrize(
    ("heading", "old", "new", "message"),
    [
        ("A router with a setting", "at_least(0))", "at_least(0), traced=True)", "router.power"),
        ("An expert", "at_least(1))", "at_least(1), traced=True)", "experts.rank"),
        (
            "A router with a setting",
            '"power": Setting(1.0',
            '"width": Setting(1.0',
            "router.width: two parts declare it",
        ),
        ("A router with a setting", "ROUTERS[", "ROUTER[", "'ROUTER' is not defined"),
    ],
)
def test_a_mistake_in_a_declaration_is_named(heading, old, new, message, tmp_path):
    assert old in block(heading)
    with pytest.raises(UserError, match=message):
        load(heading, tmp_path, lambda text: text.replace(old, new))


def test_values_of_a_setting_of_a_new_router_are_checked(tmp_path):
    heading = "A router with a setting"
    _, config = load(heading, tmp_path)
    with pytest.raises(UserError, match=r"router.power=-1.0: must be at least 0"):
        plan_runs(override(config, {"router.power": -1.0}), ({},))
    with pytest.raises(UserError, match=r"nothing in this plan reads it.*router.name=shortened"):
        plan_runs(override(config, {"router.name": "linear"}), ({},), ["router.power"])
    line = "    from_examples=kernel_from_examples,\n"
    _, config = load(heading, tmp_path, lambda text: text.replace(line, line + '    uses=("router.nme",),\n'))
    with pytest.raises(
        UserError, match=r"uses the choice 'router.nme', which does not exist \(did you mean 'router.na"
    ):
        plan_runs(config, ({},))


def test_a_part_that_is_taken_away_leaves_no_setting(tmp_path):
    """What is declared follows the tables, whatever stood in them before."""
    for name in ("power", "strength"):
        load("A router with a setting", tmp_path, lambda text, name=name: text.replace("power", name))
        assert f"router.{name}" in declared()
        del routers.ROUTERS["shortened"]
        assert f"router.{name}" not in declared()
