"""The score card: scores by hand, seeds that follow the code, refusals, the reference, and a small card in full."""

import ast
import hashlib
import inspect
import json
import pathlib
import re
import types

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from sklearn.cluster import KMeans

from routed.contracts import UserError
from routed.engine import compilation, execution
from routed.plan import code, experiment_files
from routed.plan.runs import plan_runs
from routed.routers import ROUTERS
from routed.suite import __main__ as suite_command
from routed.suite import card, measures, probes, reference, run, subject
from routed.system import files
from tests.test_report import HOSTILE

DOCS = pathlib.Path(__file__).parent.parent / "docs" / "suite.md"

#: What a version of the suite stands for: a change of what probes run or how they score is a new version.
DIGESTS = {1: "e0e13c42b3560fec"}
#: And the code that makes scores of rows, but for comments and docstrings: words and settings are in the digest above.
SCORED = {1: "a896079c644207b4"}

ROUTER = '''"""Is the nearest place the right one?"""

import flax.linen as nn

SCALE = 1.0


class DistanceRouter(nn.Module):
    num_experts: int

    @nn.compact
    def __call__(self, x, **context):
        place = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[1], self.num_experts))
        return SCALE * (x @ place - 0.5 * (place**2).sum(0)[None])
'''


@pytest.fixture(autouse=True)
def one_command(monkeypatch):
    """A test is a command: it has loaded no file before, and leaves the routers that there were."""
    monkeypatch.setattr(experiment_files, "LOADED", loaded := {})
    monkeypatch.setattr(code, "LOADED", loaded)
    before = dict(ROUTERS)
    yield loaded
    ROUTERS.clear()
    ROUTERS.update(before)


@pytest.fixture
def saved(tmp_path):
    """Writes a router's file, with a change, and returns its path."""

    def save(change=lambda text: text, name="mine.py"):
        (tmp_path / name).write_text(change(ROUTER))
        return str(tmp_path / name)

    return save


def rows(**columns):
    """Rows of one arm, at one place of seeds 1, 2, ..., at the last evaluation."""
    count = len(next(iter(columns.values())))
    given = {
        "run": [f"r{i}" for i in range(count)],
        "seed": range(1, count + 1),
        "step": 100,
        "point": 0,
        "status": "ok",
    }
    return pd.DataFrame({**given, **{name.replace("__", "/"): values for name, values in columns.items()}})


def test_a_version_is_frozen():
    assert DIGESTS[probes.VERSION] == probes.digest(), (
        "new settings or words of a probe: raise VERSION, add its digest here"
    )
    assert probes.digest(quick=True) != probes.digest()


def test_how_a_version_scores_is_frozen():
    scoring = (
        probes.explained,
        probes.mean_explained,
        probes.relative_to_best,
        probes.experts_used,
        probes.stability,
        probes.rows_at,
    )
    found = hashlib.sha256()
    for function in (*scoring, measures.gradient_signal, measures.common_fraction):
        tree = ast.parse(inspect.getsource(function)).body[0]
        assert isinstance(tree, ast.FunctionDef)
        tree.body = tree.body[1:]  # its docstring
        found.update(ast.unparse(tree).encode())
    assert SCORED[probes.VERSION] == found.hexdigest()[:16], "another way to score: raise VERSION, add both digests"


def test_explained_by_hand():
    """Bayes loss .2: excess .8 is the best constant's, .4 is half way, 0 is Bayes; 1.2 is worse; diverged is 0."""
    table = rows(test__excess=[0.8, 0.4, 0.0, 1.2, 0.1], test__bayes=[0.2] * 5)
    table.loc[4, "status"] = "diverged"
    early = table.assign(step=50, **{"test/excess": 0.0})
    found = probes.explained(pd.concat([early, table]))
    np.testing.assert_allclose(found.to_numpy(), [0, 0.5, 1, 0, 0], atol=1e-12)


def test_a_mean_is_over_points_and_relative_to_what_is_possible():
    """Seed 1: E = .5 and 1; over bests .4 and 1 that is 1.25, cut at 1, and 1."""
    table = rows(test__excess=[0.5, 0.0], test__bayes=[0.0, 0.0]).assign(seed=1, point=[0, 1])
    assert probes.mean_explained(table).tolist() == [0.75]
    assert probes.relative_to_best(0.4, 1.0)(table).tolist() == [1.0]
    assert probes.relative_to_best(1.0, 1.0)(table).tolist() == [0.75]


def test_experts_in_use_by_hand():
    """All 16 alike: 1. One: 0. Four of 16 alike: (4 - 1) / 15 = .2."""
    table = rows(router__hard_entropy_load=np.log([16.0, 1.0, 4.0]))
    np.testing.assert_allclose(probes.experts_used(table), [1, 0, 0.2], atol=1e-12)


def test_kept_choices_are_of_the_second_half():
    """Churn .9 at steps up to 200 of 400 does not count; then .2 and .4: 1 - .3."""
    table = pd.concat(
        [rows(router__churn=[churn]).assign(step=step) for step, churn in ((200, 0.9), (300, 0.2), (400, 0.4))]
    )
    assert probes.stability(table).tolist() == pytest.approx([0.7])


def test_what_eight_vectors_explain():
    """By k-means of 32 targets; and of groups, by drawing targets as the task does."""
    random, shares, grouped = np.random.default_rng(0), [], []
    for _ in range(30):
        targets = random.normal(size=(32, 10))
        spread = ((targets - targets.mean(0)) ** 2).sum()
        shares.append(1 - KMeans(8, n_init=5, random_state=0).fit(targets).inertia_ / spread)
        targets = np.sqrt(0.9) * np.tile(random.normal(size=(8, 10)), (4, 1)) + np.sqrt(0.1) * targets
        inside = targets.reshape(4, 8, 10)
        inside = ((inside - inside.mean(0)) ** 2).sum()
        grouped.append(1 - inside / ((targets - targets.mean(0)) ** 2).sum())
    assert np.mean(shares) == pytest.approx(probes.EIGHT_OF_32, abs=0.01)
    assert np.mean(grouped) == pytest.approx(probes.EIGHT_GROUPS, abs=0.01)
    assert (
        pytest.approx((0.9 * 7 / 8 + 0.1 * (1 / 4 - 1 / 32)) / (0.9 * 7 / 8 + 0.1 * 31 / 32), abs=5e-4)
        == probes.EIGHT_GROUPS
    )


def test_what_gradients_have_in_common_by_hand():
    """Equal: (4 - 2) / 1 / 2 = 1. Right angles: 2 - 2 = 0. Opposite: cut at 0. (2, 0) and (1, 0): (9 - 5) / 5 = .8."""
    pairs = {1.0: [[1, 0], [1, 0]], 0.0: [[1, 0], [0, 1]], 0.8: [[2, 0], [1, 0]]}
    for expected, pair in pairs.items():
        assert float(measures.common_fraction(jnp.array(pair, jnp.float32))) == pytest.approx(expected)
    for nothing in ([[1, 0], [-1, 0]], [[0, 0], [0, 0]]):
        assert float(measures.common_fraction(jnp.array(nothing, jnp.float32))) == 0


def test_seeds_follow_the_text_of_the_file_and_nothing_else(saved, one_command):
    """The file's name changes no seed; a constant, docstring, comment and setting do: a router can read them."""

    def found(change=lambda text: text, file="mine.py"):
        one_command.clear()
        return subject.find(f"{saved(change, file)}:DistanceRouter", [], quick=True)

    plain, renamed = found(), found(file="other.py")
    edits = [
        found(lambda text: text.replace("SCALE = 1.0", "SCALE = 1.5")),
        found(lambda text: text.replace("right one?", "best?")),
        found(lambda text: text + "# 0.7, 0.2"),
    ]
    scaled = subject.find("linear", ["router.bias=true"], quick=True)
    written = {
        subject.find("linear", [f"router.init_scale={one}"], quick=True).config.seed for one in ("2", "2.0", "2.00")
    }
    assert len(written) == 1 and subject.find("linear", ["router.init_scale=1"], quick=True).given == ()
    assert renamed.config.seed == plain.config.seed
    assert len({plain.config.seed, *(one.config.seed for one in edits)}) == 4
    assert edits[0].code != plain.code == edits[1].code == edits[2].code
    assert scaled.config.seed != subject.find("linear", [], quick=True).config.seed
    assert subject.SEEDS[0] <= plain.config.seed < subject.SEEDS[1]


def test_a_router_is_not_told_the_cluster(saved):
    """One that looks for it finds nothing; one that asks for it has no card; an oracle, which is built in, has it."""
    curious = "x @ place - 0.5 * (place**2).sum(0)[None] + (1 / 0 if 'cluster' in context else 0)"
    looks = saved(lambda text: text.replace("x @ place - 0.5 * (place**2).sum(0)[None]", curious))
    subject.find(f"{looks}:DistanceRouter", [], quick=True)
    text = "\nfrom routed.routers import ROUTERS, Router\n"
    text += 'ROUTERS["told"] = Router(lambda own, experts: DistanceRouter(experts), needs=("cluster",))\n'
    with pytest.raises(UserError, match="told: needs cluster, the answer of nearly all probes"):
        subject.find(f"{saved(lambda router: router + text)}:told", [], quick=True)


@pytest.mark.parametrize("replaced", ["linear = DistanceRouter", "class linear(DistanceRouter):\n    pass"])
def test_a_router_does_not_take_the_name_of_a_built_in_one(saved, replaced):
    path = saved(lambda text: f"{text}\n\n{replaced}\n")
    with pytest.raises(UserError, match="linear is a built-in router, which scores are measured against: give yours"):
        subject.find(f"{path}:linear", [], quick=True)
    path = saved(lambda text: text + '\nfrom routed.routers import ROUTERS\nROUTERS["linear"] = ROUTERS["hash"]\n')
    with pytest.raises(UserError, match="linear is a built-in router"):
        subject.find(f"{path}:DistanceRouter", [], quick=True)


def test_a_file_with_one_router_needs_no_name(saved):
    assert subject.find(saved(), [], quick=True).name == "DistanceRouter"
    two = saved(lambda text: text + "\nclass Other(DistanceRouter):\n    pass\n")
    with pytest.raises(UserError, match=r"which router\? say .*mine.py:NAME; it has DistanceRouter, Other"):
        subject.find(two, [], quick=True)


def test_what_is_put_into_the_table_is_found(saved):
    text = "\nfrom routed.routers import ROUTERS, Router\n"
    text += 'ROUTERS["near"] = Router(lambda own, experts: DistanceRouter(experts))\n'
    path = saved(lambda router: router + text)
    assert subject.find(f"{path}:near", [], quick=True).name == "near"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "Distance",
            lambda text: text,
            r"has no Distance \(did you mean 'DistanceRouter'\?\); its routers: DistanceRouter",
        ),
        ("SCALE", lambda text: text, "is no router but of the type float: name a key of ROUTERS"),
        ("nn", lambda text: text, "is no router but of the type module"),
        ("DistanceRouter", lambda text: text + "1 / 0\n", "the file does not import: ZeroDivisionError"),
        (
            "DistanceRouter",
            lambda text: text.replace("self.num_experts)", "5)"),
            r"with 8 experts makes float32\[6, 5\]; it must return",
        ),
        (
            "DistanceRouter",
            lambda text: text.replace("x @ place", "x.T @ x"),
            "the router fails with 5 experts on tokens",
        ),
        ("DistanceRouter", lambda text: text.replace(", **context", ""), "unexpected keyword argument 'step'"),
        ("DistanceRouter", lambda text: text.replace("return ", "return 1 < "), r"makes bool\[6, 5\]"),
        (
            "DistanceRouter",
            lambda text: text.replace("num_experts: int", "num_experts: int\n    width: int"),
            "the router fails.*width",
        ),
    ],
)
def test_what_is_no_router_is_refused_in_one_line(saved, name, change, message):
    path = saved(change)
    with pytest.raises(UserError, match=message) as caught:
        subject.find(f"{path}:{name}", [], quick=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "given", "message"),
    [
        ("nowhere.py:Mine", [], "nowhere.py: no such file"),
        ("linaer", [], "linaer: no built-in router.*did you mean 'linear'"),
        ("cnn", [], "routes images, the tokens of data.name='gmm' are rows"),
        ("linear", ["steps=5"], "--config.steps=5: a card has settings of its router only"),
        ("linear", ["router.frozen=true"], "settings of its router only"),
        ("linear", ["router.dim=3"], "config key router.dim: nothing in this plan reads it"),
    ],
)
def test_what_names_no_card_is_refused(spec, given, message):
    with pytest.raises(UserError, match=message):
        subject.find(spec, given, quick=True)


@pytest.mark.parametrize("quick", [False, True])
def test_every_point_is_planned_and_every_probe_has_its_rows(quick):
    """Tuning seeds are never evaluated; learned and frozen have the same seeds."""
    found = subject.find("linear", [], quick)
    runs = plan_runs(found.config, probes.sweep(quick))
    evaluated, tuned = ({run.seed for run in runs if run.tuning == tuning} for tuning in (False, True))
    assert len(evaluated) == (3 if quick else 5) and not evaluated & tuned and len(tuned) == (0 if quick else 2)
    sides = (probes.LEARNED, probes.SELF)
    by_arm = [{(run.seed, json.dumps(run.points)) for run in runs if run.arm == arm} for arm in sides]
    assert by_arm[0] == by_arm[1] and {run.arm for run in runs} == {*sides}
    for probe in probes.chosen(quick):
        assert (probe.score is None) == (not probe.points)


def test_a_router_that_cannot_learn_is_its_own_frozen_self():
    found = subject.find("hash", [], quick=True)
    assert {run.arm for run in plan_runs(found.config, probes.sweep(True))} == {"frozen"}


def made(values, suite=None, name="mine", learns=True):
    """A whole card whose probes all have these values by seed; its frozen self has half of them."""
    halves = [value / 2 for value in values]
    told = lambda those, low=0.0: run._interval(those, low=low)  # noqa: E731
    one = {
        "score": told(values), "frozen": told(halves), "gain": told(halves, -1.0) if learns else None,
        "seeds": list(values), "seeds_frozen": halves,
    }  # fmt: skip
    measured = {
        "gradient": {"score": told(values), "seeds": list(values)},
        "cost": {"score": told([0.5]), "seeds": [0.5]},
    }
    return {
        "suite": suite or run.identity(False), "router": {"name": name, "settings": [], "code": {}, "learns": learns},
        "seeds": [7, 8, 9], "tuning": {"seeds": [1], "multipliers": [1.0, 3.0]},
        "probes": {probe.name: measured.get(probe.name, one) for probe in probes.PROBES},
        "cost": {"flops": 2.0, "flops_linear": 1.0, "seconds": 2e-3, "seconds_linear": 1e-3},
        "settings": {}, "versions": {"routed": "0", "jax": "0", "python": "0"}, "commit": "c", "machine": "m",
    }  # fmt: skip


def test_the_reference_is_added_to_and_drops_other_versions(tmp_path):
    file = tmp_path / "reference.json"
    reference.add(made([0.5, 0.6, 0.7], name="linear"), file)
    reference.add(made([0.1, 0.2, 0.3], name="hash", learns=False), file)
    known = reference.read(file)
    assert [*known["routers"]] == ["hash", "linear"] and known["routers"]["linear"]["probes"]["samples"]["seeds"] == [
        0.5,
        0.6,
        0.7,
    ]
    reference.add(made([0.4, 0.5, 0.6], {"version": 2, "digest": "d", "quick": False}, "mlp"), file)
    assert [*reference.read(file)["routers"]] == ["mlp"]
    file.write_text('{"routers": 3}')
    with pytest.raises(UserError, match="is damaged"):
        reference.read(file)


def test_a_card_whose_runs_diverged_begins_with_that_and_ends_with_3(monkeypatch):
    lost = made([0.5, 0.6, 0.7]) | {"diverged": "2 of 6 runs diverged"}
    assert card.as_text(lost, {"suite": lost["suite"], "routers": {}}).startswith("2 of 6 runs diverged\n")
    monkeypatch.setattr(suite_command, "_card", lambda *given: lost)
    for flag in ("REFERENCE", "QUICK", "WORKDIR"):
        monkeypatch.setattr(suite_command, flag, types.SimpleNamespace(value=None))
    with pytest.raises(SystemExit) as ended:
        suite_command.main(["suite", "linear"])
    assert ended.value.code == 3


def test_the_name_of_a_router_stays_a_text_on_its_page():
    page = card.page(made([0.5, 0.6, 0.7], name=HOSTILE), {"suite": run.identity(False), "routers": {}}, HOSTILE)
    assert "<script>$x" not in page and "{{7*7}}" in page


def test_a_card_of_another_version_or_a_quick_one_is_not_compared():
    known = {"suite": run.identity(False), "routers": {"linear": made([0.5, 0.6, 0.7])}}
    assert reference.comparable(made([0.5, 0.6, 0.7]), known) == ""
    other = made([0.5, 0.6, 0.7], {"version": 9, "digest": "d", "quick": False})
    assert "version 9 (d), the reference of version 1" in reference.comparable(other, known)
    assert "not comparable" in reference.comparable(
        made([0.5, 0.6, 0.7], {"version": 1, "digest": "d", "quick": True}), known
    )
    page = card.page(other, known, "mine.py:Mine")
    assert "they are not compared" in page and "best of the reference" not in page


def test_a_page_says_what_the_numbers_say():
    """.6 against .3 by the same seeds, gain [.18, .42]; it is above .1, .11, .12, and not told apart from itself."""
    mine = made([0.5, 0.6, 0.7])
    known = {
        "suite": run.identity(False),
        "routers": {"linear": made([0.1, 0.11, 0.12], name="linear"), "mlp": made([0.5, 0.6, 0.7], name="mlp")},
    }
    words = card.sentences(mine, card.neighbours_of(mine, known))
    assert (
        words[0].startswith("Learning helps in 12 of 12 probes") and "scores higher in separation, samples" in words[1]
    )
    assert words[1].endswith("lower in none; the two are not told apart in none.") and "cost" not in words[1]
    page = card.page(mine, known, "mine.py:Mine")
    assert "of 13 such comparisons of equal routers one in 20 does" in page  # all probes but cost
    assert "0.60" in page and "this card: above" in page and "mlp 0.60" in page and "routed suite mine.py:Mine" in page
    assert all(probe.means in page or probe.means.replace("'", "&#39;") in page for probe in probes.PROBES)
    assert "http:" not in page and "https:" not in page
    text = card.as_text(mine, known)
    assert "separation   0.60 [" in text and "+0.30 [" in text


def test_a_probe_that_does_not_apply_has_no_score():
    """A router without a gradient has no signal in it: 0 was its lowest score, which is no weakness."""
    mine, known = made([0.5, 0.6, 0.7]), {"suite": run.identity(False), "routers": {"linear": made([0.1, 0.2, 0.3])}}
    mine["probes"]["gradient"] = {"score": run._interval([]), "seeds": []}
    known["routers"]["linear"]["router"]["name"] = "linear"
    words = " ".join(card.sentences(mine, card.neighbours_of(mine, known)))
    assert "so gradient does not apply" in words and "gradient (" not in words
    found, text = card.page(mine, known, "mine.py:Mine"), card.as_text(mine, known)
    assert (
        card.NOTHING in found
        and f"gradient     {card.NOTHING}" in text
        and "gradient" not in reference.against(mine, known["routers"]["linear"])
    )
    assert found.count('class="dot" cx') == len(probes.PROBES)  # one of them in the key


def test_a_gradient_is_looked_for_in_scores(saved):
    moved = saved(lambda text: text.replace("return SCALE", "import jax\n        return jax.lax.stop_gradient(SCALE)"))
    held = saved(
        lambda text: text.replace("return SCALE *", "import jax\n        return jax.lax.stop_gradient"), "held.py"
    )
    assert subject.has_gradient(subject.find(moved, [], quick=True).config)
    assert not subject.has_gradient(subject.find(held, [], quick=True).config)


def test_intervals_of_a_score_and_of_its_gain_agree():
    """Seeds 1, 1, .94: .98 - 4.303 x .0346 / sqrt(3) = .894, cut at 1; the gain over .32 is within .574 and .746."""
    score, gain = run._interval([1.0, 1.0, 0.94]), run._interval([0.68, 0.68, 0.62], low=-1.0)
    assert (score["low"], score["high"]) == pytest.approx((0.894, 1.0), abs=1e-3)
    assert (gain["low"] + 0.32, gain["high"] + 0.32) == pytest.approx((0.894, 1.066), abs=1e-3)


def test_a_built_in_router_stands_beside_its_namesake_only_if_that_is_another():
    known = {"suite": run.identity(False), "routers": {"linear": made([0.1, 0.11, 0.12], name="linear")}}
    assert "this card: " not in card.page(made([0.5, 0.6, 0.7], name="linear"), known, "linear")
    other = made([0.5, 0.6, 0.7], name="linear")
    other["router"]["settings"] = ["router.bias=true"]
    assert "this card: above" in card.page(other, known, "linear")


def test_a_workdir_of_another_card_is_refused(tmp_path, saved):
    one = subject.find("linear", [], quick=True)
    run._claim(tmp_path / "w", one, True)
    run._claim(tmp_path / "w", one, True)  # the same one goes on
    with pytest.raises(UserError, match="holds a card of suite="):
        run._claim(tmp_path / "w", one, False)
    with pytest.raises(UserError, match="holds a card of router=linear, this command makes one of router=mlp"):
        run._claim(tmp_path / "w", subject.find("mlp", [], quick=True), True)
    run._claim(tmp_path / "v", subject.find(saved(), [], quick=True), True)
    edited = subject.find(saved(lambda text: text.replace("SCALE = 1.0", "SCALE = 2.0")), [], quick=True)
    with pytest.raises(UserError, match="is of other code of DistanceRouter, whose seeds are others"):
        run._claim(tmp_path / "v", edited, True)
    files.write(tmp_path / "w" / run.MARK, "3")
    with pytest.raises(UserError, match="is damaged"):
        run._claim(tmp_path / "w", one, True)


def test_folders_are_named_by_the_router():
    assert subject.folder_name("there/my_router.py:Near", [], False) == "suite-my_router-Near"
    assert subject.folder_name("linear", ["router.bias=true"], True) == "suite-linear-quick-router.bias=true"


def test_the_document_says_of_each_probe_what_the_page_says():
    text = " ".join(DOCS.read_text("utf-8").split())
    for probe in probes.PROBES:
        for words in (f"### {probe.name}: {probe.question}", probe.definition, probe.means, probe.means_not):
            assert words in text, words


def test_the_router_of_the_document_is_one(tmp_path):
    (block,) = re.findall(r"^```python\n(.*?)^```$", DOCS.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "my_router.py").write_text(block)
    assert subject.find(f"{tmp_path / 'my_router.py'}:DistanceRouter", [], quick=True).name == "DistanceRouter"


@pytest.mark.parametrize("name", ["shortened", "prototypes", "cooling"])
def test_the_routers_of_extending_have_cards(name, tmp_path):
    """Whole experiment files: with settings, with state, and one that uses the step."""
    blocks = re.findall(
        r"^```python\n(.*?)^```$", DOCS.with_name("extending.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    (block,) = (block for block in blocks if f'ROUTERS["{name}"]' in block)
    (tmp_path / "mine.py").write_text(block)
    assert subject.find(f"{tmp_path / 'mine.py'}:{name}", [], quick=True).code


@pytest.mark.slow
def test_a_small_card_from_end_to_end(tmp_path, saved, monkeypatch):
    """A few probes, tiny: it is written, made again without running anything, and needs no seed but its own."""
    small = {"steps": 60, "eval_every": 20, "seeds": 2, "data.test_samples": 160, "data.samples": 64, "mesh.run": 1}
    monkeypatch.setattr(
        probes, "PROBES", tuple(p for p in probes.PROBES if p.name in ("samples", "stability", "gradient", "cost"))
    )
    monkeypatch.setattr(probes, "QUICK", probes.QUICK | small)
    monkeypatch.setattr(measures, "SIZE", (32, 8, 4))
    monkeypatch.setattr(compilation, "BRIEF", 5e10)  # with little effort, as a command compiles it
    found = subject.find(saved(), [], quick=True)
    first = run.make(found, True, tmp_path / "w")
    assert [*first["probes"]] == ["samples", "stability", "gradient", "cost"]
    assert (
        first["probes"]["samples"]["gain"]["n"] == 2
        and len(first["probes"]["samples"]["points"]) == 4
        and first["probes"]["stability"]["frozen"]["mean"] == 1
    )
    assert 0 < first["probes"]["gradient"]["score"]["mean"] <= 1 and 0 < first["probes"]["cost"]["score"]["mean"] <= 1
    assert first["seeds"] == [found.config.seed, found.config.seed + 1] and first["router"]["code"]
    monkeypatch.setattr(execution, "_run", lambda *given: pytest.fail("it ran again"))
    again = run.make(found, True, tmp_path / "w")
    assert (
        again["probes"] == first["probes"]
        and json.loads((tmp_path / "w" / "card.json").read_text())["seeds"] == first["seeds"]
    )
    assert "not comparable" in card.page(again, reference.read(), "mine.py")
