"""Settings: overrides keep their types, sweeps are plain data, and no key is dead or hidden."""

import pathlib
import re

import pytest

from routed.config import TRACED, base, flatten, override, parse, variant
from routed.points import chain, cross, decisive, from_flag, groups, identity, plan, product
from routed.validate import validate
from routed.words import UserError

SOURCE = pathlib.Path(__file__).parent.parent / "src" / "routed"


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("steps", "7", 7),
        ("data.separation", "2", 2.0),
        ("data.fresh", "true", True),
        ("arms", "learned,oracle", ("learned", "oracle")),
        ("tune.multipliers", "(0.1, 1)", (0.1, 1.0)),
        ("held", "world", ("world",)),
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


def test_sweeps_are_products_and_chains():
    samples, rates = product(data__samples=(1, 2)), product(rates=("paper",))
    assert chain(samples, rates) == ({"data.samples": 1}, {"data.samples": 2}, {"rates": "paper"})
    assert cross(samples, rates) == ({"data.samples": 1, "rates": "paper"}, {"data.samples": 2, "rates": "paper"})
    assert from_flag(base(), ["seeds=1,2", "steps=500"]) == ({"seeds": 1, "steps": 500}, {"seeds": 2, "steps": 500})


def test_traced_points_share_a_group_and_static_ones_do_not(small):
    runs = plan(small, product(data__samples=(8, 32), router__learning_rate=(0.1, 0.2)))
    assert len(runs) == 2 * 2 * 2 * 2  # samples x rates x arms x seeds
    assert len(groups(runs)) == 1
    assert len(groups(plan(small, product(experts__count=(2, 4))))) == 2


def test_identity_covers_what_matters_and_nothing_else(small):
    key = identity(decisive(small), "learned", 0, False)
    assert identity(decisive(override(small, {"seeds": 9, "mesh.runs_per_batch": 2})), "learned", 0, False) == key
    for change in ({"steps": 40}, {"data.separation": 2.0}, {"router.frozen": True}):
        assert identity(decisive(override(small, change)), "learned", 0, False) != key
    assert identity(decisive(small), "learned", 1, False) != key
    held = override(small, {"held": ("world",)})
    assert identity(decisive(held), "learned", 0, False) != identity(
        decisive(override(held, {"seed": 3})), "learned", 0, False
    )


def test_matched_arms_bring_their_source_and_tuning_is_equal(small):
    tuned = override(small, {"arms": ("frozen_sharp",), "rates": "tuned"})
    runs = plan(tuned, ())
    assert {r.arm for r in runs} == {"frozen_sharp", "learned"}
    count = {arm: sum(r.tuning for r in runs if r.arm == arm) for arm in ("frozen_sharp", "learned")}
    assert count == {"frozen_sharp": 3, "learned": 3}  # one seed x three multipliers each
    assert not {r.seed for r in runs if r.tuning} & {r.seed for r in runs if not r.tuning}


def test_points_written_differently_share_their_sources(small):
    """The second point is the first one spelt out, without the arm that its sharpened router needs."""
    sweep = ({"arms": ("learned",)}, {"data.samples": small.data.samples, "arms": ("frozen_sharp",)})
    runs = plan(small, sweep)
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
            "selection.name='soft' takes no bias; use one of top_k, raw, sigmoid, sinkhorn or 0",
        ),
        ({"selection.group_size": 3}, "selection.group_size=3: must divide batch_size=8"),
        ({"selection.capacity_factor": -1.0}, "selection.capacity_factor=-1.0: must be at least 0"),
        ({"selection.eval.name": "expert_choice"}, "must be one of soft, top_k, raw, sigmoid"),
        ({"router.name": "hash_id"}, "have no token ids; use 'hash'"),
        ({"router.name": "conv", "router.window": 2}, "router.window=2: must divide the 3 positions"),
        ({"router.name": "hash", "router.from_data": True}, "router.name='hash' has no rows to fill"),
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
    text = "\n".join(p.read_text() for p in SOURCE.rglob("*.py") if p.name not in ("config.py", "validate.py"))
    # Read as attributes below, or (the last) by validate alone; listed here to keep the pattern strict.
    report_only = {"seeds", "arms", "selection.no_gradient"}
    for key in flatten(base()):
        last = key.rsplit(".", 1)[-1]
        read = (
            rf"\[\"{re.escape(key)}\"\]"
            if key in TRACED
            else rf"(?:config|settled|data|selection|rule|router|experts|o|t|transformer|tune|gate|mesh|losses|checkpoint|optimizer|stop)\.{last}\b"
        )
        either = re.search(read, text) or re.search(rf"\w\.{re.escape(key)}\b", text)
        assert either or key in report_only, key
    assert not re.search(r"\b(config|c|cfg)\.get\(", text)
