"""Settings: overrides keep their types, sweeps are plain data, and no key is dead or hidden."""

import ast
import pathlib
import re

import numpy as np
import pytest

from routed.contracts import UserError
from routed.engine import limits
from routed.layer.auxiliary import AUXILIARY
from routed.layer.rule import selection_rule
from routed.plan.arms import ARMS
from routed.plan.checks import refuse_unread, validate
from routed.plan.config import CHOICES, base, canonical, declared
from routed.plan.experiment import configure, variant
from routed.plan.listing import list_figures
from routed.plan.points import chain, cross, points_of_flags, product
from routed.plan.runs import decisive, groups, identity, plan_runs
from routed.routers import ROUTERS, Router
from routed.settings.setting import Setting
from routed.settings.tree import node_of, override, parse

SOURCE = pathlib.Path(__file__).parent.parent / "src" / "routed"


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("steps", "7", 7),
        ("data.separation", "2", 2.0),
        ("data.fresh", "true", True),
        ("arms", "learned,oracle", ("learned", "oracle")),
        ("tune.multipliers", "(0.1, 1)", (0.1, 1.0)),
        ("shared_streams", "world", ("world",)),
    ],
)
def test_parse_follows_the_declared_type(key, text, value):
    got = parse(base(), key, text)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    ("key", "text", "part"),
    [
        ("experts.cout", "8", "did you mean 'experts.count'"),
        ("steps", "True", "expected int"),
        ("steps", "2.5", "expected int"),
        ("data.fresh", "1", "expected bool"),
        ("data.separation", "wide", "expected float"),
        ("data.separation", "nan", "finite"),
        ("data.separation", "inf", "finite"),
        ("data", "3", "unknown config key"),
    ],
)
def test_parse_refuses(key, text, part):
    with pytest.raises(UserError, match=re.escape(part)):
        parse(base(), key, text)


@pytest.mark.parametrize("changes", [{"steps": True}, {"data.fresh": 1}, {"data.separation": "2"}, {"stepz": 3}])
def test_override_refuses_wrong_types(changes):
    with pytest.raises(UserError):
        override(base(), changes)


def test_override_copies_deeply():
    before = base()
    after = override(before, {"data.samples": 5})
    assert (before.data.samples, after.data.samples) == (8192, 5)


def test_variant():
    figures = ("", "fig3")
    assert variant(None, figures) == ("", "default")
    assert variant("smoke", figures) == ("", "smoke")
    assert variant("fig3", figures) == ("fig3", "default")
    assert variant("fig3,paper", figures) == ("fig3", "paper")
    for wrong in ("fig4", "fig3,huge", "fig3,smoke,x"):
        with pytest.raises(UserError, match="unknown"):
            variant(wrong, figures)

    with pytest.raises(UserError, match=r"the order is FIGURE,SCALE: use fig3,smoke"):
        variant("smoke,fig3", figures)


DELEGATING = '''"""Does it?"""
from routed.plan import experiment, override
from routed.plan.experiment import Figure
gmm = experiment.load("gmm_router")
FIGURES = {"": Figure("all"), "one": Figure("one", changes={"data.samples": 512, "steps": 7})}
get_config = lambda arg=None: override(gmm.get_config(arg), {"name": "mine"})
'''


def test_a_file_that_asks_another_for_its_config_has_figures_of_its_own(tmp_path):
    """Their changes come before those of the scale: smoke has its own steps. Figures of the other file are refused."""
    file = tmp_path / "mine.py"
    file.write_text(DELEGATING)
    module, config = configure(f"{file}:one", [])
    assert (config.name, config.figure, config.data.samples, config.steps) == ("mine", "one", 512, 7)
    assert configure(f"{file}:one,smoke", [])[1].steps == 40
    assert re.search(r"^ +one +one$", list_figures(module, str(file), config), re.MULTILINE)
    for figure in ("fig2a", "fig2a,smoke"):
        with pytest.raises(UserError, match=r"unknown figure 'fig2a'.*; known: one; or a scale: smoke"):
            configure(f"{file}:{figure}", [])


def test_sweeps_are_products_and_chains():
    samples, rates = product(data__samples=(1, 2)), product(rates=("paper",))
    assert chain(samples, rates) == ({"data.samples": 1}, {"data.samples": 2}, {"rates": "paper"})
    assert cross(samples, rates) == ({"data.samples": 1, "rates": "paper"}, {"data.samples": 2, "rates": "paper"})
    assert points_of_flags(base(), ["data.dim=1,2", "steps=500"]) == (
        {"data.dim": 1, "steps": 500},
        {"data.dim": 2, "steps": 500},
    )
    pairs = points_of_flags(base(), ["tune.multipliers=(1,3),(1,10)"])
    assert pairs == ({"tune.multipliers": (1.0, 3.0)}, {"tune.multipliers": (1.0, 10.0)})
    for flag in ("seeds=2,4", "arms=learned,frozen"):
        with pytest.raises(UserError, match="is no setting of a point; use --config"):
            points_of_flags(base(), [flag])


@pytest.mark.parametrize(
    "setting",
    [4.0, Setting(None, "a"), Setting([1], "a"), Setting(np.float32(1), "a"), Setting(((1, 2), (3, 4)), "a"),
     Setting((1, "a"), "a"), Setting(1, "a", lambda value: True)],
)  # fmt: skip
def test_a_declaration_that_no_command_could_read_is_refused(setting, monkeypatch):
    monkeypatch.setitem(ROUTERS, "mine", Router(lambda own, experts: None, settings={"odd": setting}))
    with pytest.raises(UserError, match=r"the declaration of router.odd: write Setting\(default, 'meaning', allowed\)"):
        declared()


def test_names_that_are_one_text_are_refused(monkeypatch):
    monkeypatch.setitem(ROUTERS, "mine", Router(lambda own, experts: None, reads="score"))
    with pytest.raises(UserError, match=r"router.name=mine: reads='score' is a text; write a tuple: \('score',\)"):
        declared()


def test_a_setting_that_all_arms_set_themselves_is_refused(small):
    balanced = override(small, {"arms": ("learned_top2", "learned_top2_balanced"), "selection.k": 3})
    with pytest.raises(UserError, match=r"selection\.k does not reach learned_top2, learned_top2_balanced"):
        plan_runs(balanced, ({},), ["selection.k"])


def test_traced_points_share_a_group_and_static_ones_do_not(small):
    runs = plan_runs(small, product(data__samples=(8, 32), router__learning_rate=(0.1, 0.2)))
    assert len(runs) == 2 * 2 * 2 * 2  # samples x rates x arms x seeds
    assert len(groups(runs)) == 1
    assert len(groups(plan_runs(small, product(experts__count=(2, 4))))) == 2


def test_identity_covers_what_matters_and_nothing_else(small):
    key = identity(decisive(small), "learned", 0, False)
    assert identity(decisive(override(small, {"seeds": 9, "mesh.runs_per_batch": 2})), "learned", 0, False) == key
    for change in ({"steps": 40}, {"data.separation": 2.0}, {"router.frozen": True}):
        assert identity(decisive(override(small, change)), "learned", 0, False) != key
    assert identity(decisive(small), "learned", 1, False) != key
    held = override(small, {"shared_streams": ("world",)})
    assert identity(decisive(held), "learned", 0, False) != identity(
        decisive(override(held, {"seed": 3})), "learned", 0, False
    )


def test_matched_arms_bring_their_source_and_tuning_is_equal(small):
    tuned = override(small, {"arms": ("frozen_sharp",), "rates": "tuned"})
    runs = plan_runs(tuned, ())
    assert {r.arm for r in runs} == {"frozen_sharp", "learned"}
    count = {arm: sum(r.tuning for r in runs if r.arm == arm) for arm in ("frozen_sharp", "learned")}
    assert count == {"frozen_sharp": 3, "learned": 3}  # one seed x three multipliers each
    assert not {r.seed for r in runs if r.tuning} & {r.seed for r in runs if not r.tuning}


def test_points_written_differently_share_their_sources(small):
    """The second point is the first one spelt out, without the arm that its sharpened router needs."""
    sweep = ({"arms": ("learned",)}, {"data.samples": small.data.samples, "arms": ("frozen_sharp",)})
    runs = plan_runs(small, sweep)
    keys = {run.key for run in runs}
    assert len(runs) == 4 and all(set(run.needs) <= keys for run in runs)
    assert all(len(run.needs) == (run.arm == "frozen_sharp") for run in runs)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"dispatch": "ragged"},
            "dispatch='ragged': dispatch 'ragged' needs a sparse selection; with selection 'soft' use 'dense'",
        ),
        (
            {"selection.balance_rate": 0.1},
            "selection.name='soft' takes no bias; use one of top_k, sigmoid, group_limited, sigmoid_input, raw, "
            "compete or 0",
        ),
        ({"selection.name": "sinkhorn", "selection.balance_rate": 0.1}, "selection.name='sinkhorn' takes no bias"),
        ({"selection.group_size": 3}, "selection.group_size=3: must divide batch_size=8"),
        ({"selection.capacity_factor": -1.0}, "selection.capacity_factor=-1.0: must be at least 0"),
        ({"selection.eval.name": "expert_choice"}, "by its neighbours; must be one of soft, top_k, sigmoid"),
        ({"router.name": "hash_id"}, "needs token_id, which data.name='gmm' does not have; use one of linear, mlp"),
        ({"router.name": "conv", "router.window": 2}, "router.window=2: must divide the 3 positions"),
        ({"selection.name": "sigmoid"}, "the router gets no gradient, an accidental frozen router"),
        ({"experts.activation": "swish"}, "experts.activation='swish': must be one of relu, gelu"),
    ],
)
def test_impossible_layers_are_refused(small, changes, words):
    with pytest.raises(UserError, match=re.escape(words)):
        validate(override(small, changes))


def test_a_router_without_gradient_can_be_meant(small):
    for said in ({"selection.no_gradient": True}, {"router.frozen": True}, {"selection.renormalise": False}):
        validate(override(small, {"selection.name": "top_k"} | said))


def test_every_key_is_read_somewhere_and_none_is_hidden():
    """A key that nothing reads misleads; a key with a default in the code cannot be set from the command line."""
    text = "\n".join(p.read_text() for p in SOURCE.rglob("*.py"))
    for key in declared():
        last = key.rsplit(".", 1)[-1]
        assert re.search(rf"\.{last}\b|\[f?\".*{last}|\[\"{last}\"\]|_(low|high)\b", text), key
    assert not re.search(r"\b(config|c|cfg)\.get\(", text)


def test_a_run_has_the_settings_of_its_parts_and_no_others(small):
    """What no part reads is not there, and code that reads it anyway fails by its name."""
    read = canonical(small)
    assert "radius" not in read.data and "vocabulary" not in read.data and "transformer" not in read
    assert "router" not in canonical(override(small, {"model": "dense_active"}))
    with pytest.raises(UserError, match=r"'radius' is read, but no part of this run declares it: add it to `settings`"):
        node_of(read).data.radius  # noqa: B018


def test_a_setting_that_came_late_is_in_the_identity_of_those_who_set_it(small):
    """Runs that were kept before there was such a setting are those of its default."""
    config = override(small, {"selection.capacity_factor": 1.0})
    assert "capacity_multiple" not in decisive(config)
    assert '"selection.capacity_multiple": 4' in decisive(override(config, {"selection.capacity_multiple": 4}))
    assert selection_rule(override(config, {"selection.capacity_multiple": 4}).selection).capacity_multiple == 4


def test_identity_ignores_what_is_not_read(small):
    """Another part's setting orphans nothing; one whose condition does not hold counts as its default."""
    key = decisive(canonical(small))
    for change in (
        {"data.radius": 0.5},
        {"transformer.dim": 8},
        {"stop.floor": 0.3},
        {"tune.seeds": 5},
        {"optimizer.b1": 0.5},
    ):
        assert decisive(canonical(override(small, change))) == key
    for change in ({"data.dim": 5}, {"stop.rise": 0.3}, {"rates": "tuned"}, {"optimizer.name": "adam"}):
        assert decisive(canonical(override(small, change))) != key


def test_a_point_that_an_arm_does_not_read_is_the_same_run(small):
    """The dense arm has rows at both points, from one run a seed."""
    sweep = ({"router.init_scale": 1.0}, {"router.init_scale": 3.0})
    runs = plan_runs(override(small, {"arms": ("learned", "dense_total")}), sweep)
    assert {arm: sum(run.arm == arm for run in runs) for arm in ("learned", "dense_total")} == {
        "learned": 4,
        "dense_total": 2,
    }
    assert all(run.points == sweep for run in runs if run.arm == "dense_total")


@pytest.mark.parametrize(
    ("changed", "sweep", "words"),
    [
        (("data.radius",), (), "data.radius: nothing in this plan reads it, .* it is read by data.name=two_gaussians"),
        ((), ({"data.radius": 0.3}, {"data.radius": 0.5}), "data.radius: nothing in this plan reads it"),
        (("stop.floor",), (), "stop.floor: nothing .* read where stop.rise > 0"),
        (("selection.capacity_rule",), (), "where a capacity factor is above 0"),
        (("transformer.dim",), (), "transformer.dim: nothing .* model=moe .encoder_decoder"),
    ],
)
def test_what_nothing_reads_can_neither_be_set_nor_swept(small, changed, sweep, words):
    with pytest.raises(UserError, match=words):
        plan_runs(small, sweep, changed)


def test_noise_on_a_choice_that_nobody_makes_is_refused(small):
    """The soft selection of training weighs all experts by plain scores; a noisy top-1 evaluation does choose."""
    noisy = {"router.noise": "gaussian"}
    with pytest.raises(UserError, match=r"router\.noise='gaussian': selection\.name='soft' has no choice to change"):
        validate(override(small, noisy))
    for mend in (
        {"router.noise_in_weights": True},
        {"router.noise_at_eval": True},
        {"selection.name": "top_k", "selection.k": 2},
    ):
        validate(override(small, noisy | mend))


def test_noise_at_evaluation_is_of_samples(small):
    """Text is evaluated without it."""
    noisy = override(small, {"router.noise": "gaussian", "router.noise_at_eval": True})
    refuse_unread(["router.noise_at_eval"], [noisy])
    with pytest.raises(UserError, match=r"router\.noise_at_eval: nothing .*, where data are samples"):
        refuse_unread(["router.noise_at_eval"], [override(noisy, {"data.name": "artificial"})])


def test_a_balance_of_sigmoids_has_a_scope(small):
    """Read by either balance loss; over all layers together only the first is taken."""
    scoped = override(small, {"losses.balance_scope": "group"})
    assert canonical(scoped).losses.balance_scope == "batch"
    for name in ("losses.balance", "losses.balance_sigmoid"):
        assert canonical(override(scoped, {name: 0.1})).losses.balance_scope == "group"
    pooled = {"losses.balance_scope": "layers"}
    AUXILIARY["balance"].check(override(small, pooled | {"losses.balance": 0.1, "losses.balance_sigmoid": 0.1}))
    with pytest.raises(UserError, match=r"losses\.balance_scope='layers': is a scope of losses\.balance, which is 0"):
        AUXILIARY["balance"].check(override(small, pooled | {"losses.balance_sigmoid": 0.1}))
    with pytest.raises(
        UserError, match=r"losses\.balance_scope='group': all tokens are one group: set selection.group_"
    ):
        AUXILIARY["balance"].check(override(scoped, {"losses.balance": 0.1}))


def test_an_arm_that_is_another_one_here_is_not_compared_with_it(small, caplog):
    """Competition under a command that lets all compete, by selection or by phase; a router frozen for all arms."""
    small = override(small, {"selection.k": 2, "selection.eval.k": 2})
    same = {"selection.name": "compete", "arms": ("learned", "compete")}
    with pytest.raises(UserError, match=r"the arm compete is learned here, as both have the same selection.name"):
        plan_runs(override(small, same), (), ["arms"])
    phased = {"phases": ("selection.name=compete",), "arms": ("compete", "learned"), "seeds": 1}
    assert [run.arm for run in plan_runs(override(small, phased), ())] == ["learned"]
    assert "the arm compete is left out: it is learned here" in caplog.text
    frozen = {"router.frozen": True, "arms": ("frozen", "learned", "frozen_sharp"), "seeds": 1}
    assert {run.arm for run in plan_runs(override(small, frozen), ())} == {
        "learned",
        "frozen_sharp",
    }  # of its own sharpness
    half = {"phases": ("until=50% selection.name=compete", "train=router"), "arms": ("learned", "compete"), "seeds": 1}
    assert len(plan_runs(override(small, half), ())) == 2


def test_a_selection_of_training_alone_is_said(small, caplog):
    config = override(small, {"selection.name": "top_k", "selection.k": 2, "selection.eval.k": 1, "arms": ("frozen",)})
    said = "selection.k=2 is of training; evaluations have selection.eval.k=1: set both"
    plan_runs(config, (), ["selection.k", "selection.eval.k"])
    plan_runs(config, ())  # as the file has it
    assert said not in caplog.text
    plan_runs(config, (), ["selection.k"])
    assert said in caplog.text


def test_an_arm_by_its_words_and_a_scale_as_a_figure_are_hinted_at(small):
    with pytest.raises(UserError, match=r"unknown arm 'competition' \(did you mean 'compete'\?\)"):
        plan_runs(override(small, {"arms": ("competition",)}), ())
    with pytest.raises(UserError, match=r"unknown figure 'tiny'.*known: one; or a scale: smoke, big"):
        variant("tiny", {"one": None}, ("smoke", "big"))


def test_two_parts_may_not_declare_a_key_differently(monkeypatch):
    part = ROUTERS["linear"]._replace(settings={"window": Setting(9, "something else")})
    monkeypatch.setitem(ROUTERS, "other", part)
    with pytest.raises(TypeError, match=r"router\.window: two parts declare it"):
        declared()


def test_a_noisy_choice_has_a_soft_mixture(small):
    """The noise moves choices alone; the soft mixture, which `test/loss_soft` evaluates, has none."""
    config = canonical(override(small, {"router.noise": "uniform"}))
    assert limits.bytes_of_run(config) > 0


def test_no_part_is_known_by_its_name():
    """Code compares what parts say of themselves; a name is a key of a table, and a word in its own file."""
    names = {name for choice in CHOICES.values() for name in choice.parts} | set(ARMS) | set(AUXILIARY)
    chosen = {key.rpartition(".")[2] for key in CHOICES} | {"arm", "selection", "router"}
    found = []
    for path in SOURCE.rglob("*.py"):
        if "bench" in path.parts:  # where names are those of its own cases
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Compare) or not isinstance(
                node.ops[0], ast.Eq | ast.NotEq | ast.In | ast.NotIn
            ):
                continue
            left = getattr(node.left, "attr", getattr(node.left, "id", ""))
            words = {
                one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)
            }
            if left in chosen and words & names:
                found.append(f"{path.relative_to(SOURCE)}:{node.lineno} {words & names}")
    assert not found


def test_a_run_that_takes_values_of_another_is_another_run_for_each_of_these():
    keys = {identity("{}", "frozen_sharp", 0, False, source) for source in ("", "one run", "another run")}
    assert len(keys) == 3
