"""Fine-tuning: texts with classes as rows, the head, and what a run begins with that another workdir holds."""

import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed.contracts import TextBatch, UserError
from routed.engine import checkpoint, execution, pretrained, results
from routed.engine.devices import make_mesh
from routed.layer.rule import selection_rule
from routed.metrics.load import dropped
from routed.models.decoder import decoder
from routed.models.transformer_sizes import flops_of_decoder_row
from routed.papers.pham2024 import labelled
from routed.papers.pham2024.classifier import at_best, classifier, flops_of_classifier_row
from routed.plan.arms import ARMS, Arm
from routed.plan.checks import validate
from routed.plan.config import base, problem_of
from routed.plan.runs import plan_runs
from routed.settings.tree import override
from routed.training import text_gates
from tests.test_decoder import TINY, evaluated
from tests.test_text_sources import small_model

TUNED = TINY | {
    "data.name": "labelled", "model": "classifier", "data.eval_rows": 8, "steps": 4, "eval_every": 2, "seeds": 1,
    "arms": ("learned",), "optimizer.name": "adam",
}  # fmt: skip


def settings(**changes):
    return override(base(), TUNED | changes)


def write(folder, **tables):
    """NAME-PART.tsv by name_part, of (text, label)."""
    for name, rows in tables.items():
        lines = ["text\tlabel", *(f"{text}\t{label}" for text, label in rows)]
        (folder / f"{name.replace('_', '-')}.tsv").write_text("\n".join(lines) + "\n", "utf-8")


def run(config, workdir):
    workdir.mkdir(exist_ok=True)
    validate(config)
    runs = plan_runs(config, ({},))
    execution.execute(runs, results.open_workdir(workdir, "tiny", config, ({},)), workdir, make_mesh(config))
    return {run.arm: checkpoint.load_model(workdir / pretrained.MODELS / run.key) for run in runs}


# --- rows ---


def test_a_row_is_its_class_and_its_tokens_behind_pads(tmp_path):
    """Letter a is id 4 and the space 3 (`characters`); what is longer than 8 tokens is cut at its end."""
    write(
        tmp_path,
        t_train=[("ab", "good"), ("abcdefghij", "bad"), ("b", "neutral")],
        t_valid=[("c", "good"), ("c", "bad")],
        t_test=[("d", "bad"), ("d", "good")],
    )
    names = {"data.table": "t", "data.directory": str(tmp_path), "data.labels": ("bad", "good")}
    corpus = labelled.load(settings(**names).data)
    assert corpus.train[0].tolist() == [[1, 0, 0, 0, 0, 0, 4, 5, 3], [0, 4, 5, 6, 7, 8, 9, 10, 11]]
    assert corpus.validation[0][:, 0].tolist() == [1, 0]
    assert corpus.test[0][:, 0].tolist() == [0, 1]
    other = labelled.load(settings(**names | {"data.labels": ("good", "bad")}).data)
    assert other.train[0][:, 0].tolist() == [0, 1]
    config = settings(**names)
    shared = problem_of(config).shared_arrays(config)
    # One good and one bad text of two in training: log 2 for each.
    assert shared["references"]["prior"] == pytest.approx(np.log(2))
    batch = problem_of(config).feed(config, 0)(0, 3)
    assert batch.inputs.shape == (3, 4, 8) and batch.targets.shape == (3, 4, 1)
    assert set(map(tuple, np.concatenate([batch.targets, batch.inputs], -1).reshape(-1, 9).tolist())) == set(
        map(tuple, corpus.train[0].tolist())
    )


def test_a_tenth_of_the_texts_is_held_out_where_no_table_is_and_none_is_trained_on(tmp_path, caplog):
    """200 texts with alternate classes, ten twice: validation and half the test texts have both, no training text."""
    caplog.set_level("INFO", logger="absl")
    word = lambda i: "".join("abcdefghij"[int(digit)] for digit in f"{i:03d}")  # noqa: E731
    rows = [(word(i), ("good", "bad")[i % 2]) for i in range(200)]
    write(
        tmp_path,
        t_train=[*rows, *rows[:10]],
        t_test=[*rows[:30], *((word(i), ("good", "bad")[i % 2]) for i in range(200, 300))],
    )
    config = settings(**{"data.table": "t", "data.directory": str(tmp_path), "data.labels": ("bad", "good")})
    corpus = labelled.load(config.data)
    train, valid, test = (np.concatenate(part) for part in (corpus.train, corpus.validation, corpus.test))
    assert (
        len(train) == 189 and 15 < len(valid) <= 21 and len(test) == 100
    )  # a tenth of 210, but for those that training has too
    texts = {tuple(row[1:]) for row in train}
    assert not texts & {tuple(row[1:]) for row in (*valid, *test)}
    assert all(0 < part[:, 0].mean() < 1 for part in (valid, test, test[::2], test[1::2]))
    assert "texts (test) are left out: a part before it has them too" in caplog.text


def test_texts_that_are_left_out_are_counted(tmp_path, caplog):
    """Misspelt, missing and other labels, and texts without a letter for `characters`: no row, each is counted."""
    good = [("ab", "good"), ("ba", "bad"), ("c", "good"), ("d", "bad")]
    lost = [("e", "godo"), ("f", "godo"), ("g", ""), ("  ", "good"), ("?!", "bad"), ("h", "so")]
    write(
        tmp_path,
        t_train=[*good, *good, *lost],
        t_valid=[("x", "good"), ("y", "bad")],
        t_test=[("p", "good"), ("q", "bad")],
    )
    names = {"data.table": "t", "data.directory": str(tmp_path), "data.labels": ("bad", "good")}
    corpus = labelled.load(settings(**names).data)
    assert len(corpus.train[0]) == 8 and (corpus.train[0][:, 1:] > 3).any(1).all()
    assert (
        "t: 6 of 14 texts to train on are left out: 1 without a label, 2 without a word in data.tokens=characters,"
        " 3 of a label that data.labels lacks (most have 'godo')" in caplog.text
    )
    assert "to test on are left out" not in caplog.text
    write(tmp_path, t_test=[("p", "good"), ("q", "bad"), ("r", ""), ("s", ""), ("???", "good")])
    with pytest.raises(
        UserError, match="most of the 5 texts to test on cannot be used: 2 without a label, 1 without a word"
    ):
        labelled.load(settings(**names).data)


@pytest.mark.parametrize(
    "changes, tables, words",
    [
        ({}, {"t_train": [("a", "good"), ("b", "good")], "t_test": [("a", "good")]},
         "all texts to train on have the label 'good'; a classifier needs two"),
        ({}, {"t_train": [("a", "good"), ("b", "so")] * 9, "t_test": [("a", "good")]},
         "no text to train on has the label 'bad' \\(its labels: good, so\\)"),
        ({"data.table": "other"}, {"t_train": [("a", "good")]}, "has no other-train.tsv; there are: t"),
        ({"data.table": "t"}, {"t_train": [("a", "good"), ("b", "bad")] * 10}, "t-test.tsv: missing"),
        ({"data.labels": ("good",)}, {}, "data.labels.*at least two different labels"),
        ({"data.directory": ""}, {}, "data.directory is empty: name the folder with the table t-train.tsv"),
        ({"data.tokens": "train"}, {}, "have the tokens of the text before; name bytes"),
    ],
)  # fmt: skip
def test_bad_tables_are_refused_in_a_line(tmp_path, changes, tables, words):
    write(tmp_path, **tables)
    names = {"data.table": "t", "data.directory": str(tmp_path), "data.labels": ("bad", "good")}
    with pytest.raises(UserError, match=words):
        config = settings(**names | changes)
        validate(config)
        labelled.load(config.data)


# --- the model ---


@pytest.mark.slow
def test_a_classifier_is_the_decoder_with_another_head():
    """Every leaf but the head has its name and shape there; it reads the last token, and so all before it."""
    config = settings(**{"data.labels": ("a", "b", "c")})
    rows = TextBatch(jnp.arange(32).reshape(4, 8) % 27 + 3, jnp.zeros((4, 1), int), jnp.zeros(4, int))
    model = classifier(config)
    params, state = model.init(jax.random.key(0), rows)
    plain, _ = decoder(settings(**{"model": "decoder", "transformer.tied": True})).init(jax.random.key(0), rows)
    forms = jax.tree.map(jnp.shape, {name: own for name, own in params.items() if name != "head"})
    assert forms == jax.tree.map(jnp.shape, plain)
    assert params["head"]["out"]["kernel"].shape == (8, 3)

    read = lambda ids: (  # noqa: E731
        model.apply(params, state, rows._replace(inputs=ids), selection_rule(config.selection), "dense").prediction
    )
    logits = read(rows.inputs)
    assert logits.shape == (4, 1, 3)
    for place in (0, 7):  # the first and the last token both matter, and only to their own row
        moved = read(rows.inputs.at[0, place].set(3 + (rows.inputs[0, place] - 2) % 27)) - logits
        assert np.abs(moved[0]).max() > 1e-5 and np.abs(moved[1:]).max() == 0


def test_flops_of_a_classifier_row():
    """The decoder's without its logits (6 x 8 tokens x 8 x 30), and the head's: 6 (8 x 8 + 8 x 2)."""
    config = settings()
    more = flops_of_classifier_row(config) - flops_of_decoder_row(override(config, {"model": "decoder"}))
    assert more == 6 * (8 * 8 + 8 * 2) - 6 * 8 * 8 * 30


@pytest.mark.slow
def test_no_metric_of_a_router_counts_pads(monkeypatch):
    """Rows of 1, 3, 8, 5 tokens behind pads: numbers are of these 17, in two unlike blocks; likeness of 4 each."""
    monkeypatch.setattr(text_gates, "ALIKE", 4)
    config = settings(**{"batch_size": 2, "trace.every": 1})
    lengths = jnp.array([1, 3, 8, 5])
    ids = jnp.where(jnp.arange(8)[None] >= 8 - lengths[:, None], jnp.arange(32).reshape(4, 8) % 27 + 3, 0)
    batch = TextBatch(ids, jnp.zeros((4, 1), int), jnp.zeros(4, int))
    problem, params, state, seen = evaluated(config, batch, batch)
    real = np.asarray(ids != 0).reshape(-1)
    found = problem.model.apply(
        params, state, batch, selection_rule(config.selection, evaluation=True), config.dispatch
    )
    routing = found.sites["decoder"].routing
    probs = np.asarray(jax.nn.softmax(routing.scores), np.float64)[:, real]
    entropy = -(probs * np.log(probs)).sum(-1)
    load = np.stack([np.bincount(one[real].reshape(-1), minlength=4) for one in routing.expert.reshape(2, 32, 2)])
    np.testing.assert_allclose(seen["decoder/load"], load / 34, rtol=1e-6)
    np.testing.assert_allclose(seen["decoder/load_max"], 4 * load.max(1) / 34, rtol=1e-6)
    np.testing.assert_allclose(seen["decoder/entropy_token"], entropy.mean(1), rtol=1e-5)
    np.testing.assert_allclose(seen["decoder/entropy_test"], entropy.mean(1), rtol=1e-5)
    np.testing.assert_allclose(seen["decoder/entropy_test_std"], entropy.std(1), rtol=1e-3)
    np.testing.assert_allclose(seen["decoder/maps"][:, 0], probs.mean(1), rtol=1e-5)
    assert ((np.asarray(seen["decoder/choices"]) == -1) == ~real[:, None]).all()
    assert ((np.asarray(seen["decoder/stale"]) == -1) == ~real[:, None]).all()
    outputs = np.asarray(problem.model.responses(params, "decoder", found.sites["decoder"].features), np.float64)
    unit = outputs / np.linalg.norm(outputs, axis=-1, keepdims=True)
    cosine = (np.einsum("steo,stfo->st", unit, unit) - 4) / 12  # of 4 x 3 pairs
    blocks = [cosine[:, part][:, real[part]][:, :4].mean(1) for part in (slice(16), slice(16, 32))]
    np.testing.assert_allclose(seen["decoder/alike"], np.mean(blocks, 0), rtol=1e-4)


def test_drops_of_real_tokens_weigh_by_their_number():
    """4 and 13 real tokens in two blocks of 16, of whose queues each has its own drops: a mean over 17 tokens."""
    config = settings(**{"batch_size": 2, "selection.eval.capacity_factor": 0.75})
    real = jnp.arange(8)[None] >= 8 - jnp.array([1, 3, 8, 5])[:, None]
    ids = jnp.where(real, jnp.arange(32).reshape(4, 8) % 27 + 3, 0)
    batch = TextBatch(ids, jnp.zeros((4, 1), int), jnp.zeros(4, int))
    problem, params, state, seen = evaluated(config, batch, batch)
    rule, lost = selection_rule(config.selection, evaluation=True), []

    @jax.jit
    def routed(block):
        return problem.model.apply(params, state, block, rule, config.dispatch).sites["decoder"].routing

    for part in (slice(2), slice(2, 4)):
        block, mask = jax.tree.map(lambda a, part=part: a[part], batch), real[part].reshape(-1)
        lost.append(mask.sum() * jax.vmap(partial(dropped, mask=mask))(routed(block)))
    assert float(jnp.abs(lost[0] / 4 - lost[1] / 13).max()) > 0.01  # blocks differ
    np.testing.assert_allclose(seen["decoder/dropped"], sum(lost) / 17, rtol=1e-5)


def test_tests_are_read_at_the_best_validation():
    """Validation is best at the second evaluation, and a loss that is no number is not."""
    history = {
        "eval/loss": np.array([0.7, 0.5, np.nan, 0.6]),
        "test/loss": np.array([0.9, 0.8, 0.1, 0.2]),
        "test/accuracy": np.array([0.5, 0.6, 0.9, 0.8]),
    }
    assert at_best(history)["test/accuracy"].tolist() == [0.5, 0.6, 0.6, 0.6]
    assert at_best(history)["test/loss"].tolist() == [0.9, 0.8, 0.8, 0.8]


# --- what a run begins with ---

LANGUAGE = {"model": "decoder", "data.name": "artificial", "data.languages": ("qaa",), "checkpoint.final": True}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The models of a decoder, and their workdir."""
    workdir = tmp_path_factory.mktemp("trained")
    cache = {"data.cache": str(tmp_path_factory.getbasetemp() / "text")}
    return workdir, run(settings(**LANGUAGE | cache | {"arms": ("learned", "frozen")}), workdir)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
def test_a_run_begins_with_the_model_of_its_arm(trained, tmp_path):
    """With rates of 0 it ends with it, and the arms' models differ. Only `train=experts+head` moves in its phase."""
    workdir, models = trained
    rates = dict.fromkeys(("router.learning_rate", "experts.learning_rate", "transformer.learning_rate"), 0.0)
    begins = {"initial.workdir": str(workdir), "checkpoint.final": True}
    still = run(settings(**begins | rates | {"arms": ("learned", "frozen")}), tmp_path / "still")

    def same(one, other, groups):
        return {
            name
            for name in groups
            if all(
                np.array_equal(a, b)
                for a, b in zip(jax.tree.leaves(one[name]), jax.tree.leaves(other[name]), strict=True)
            )
        }

    for arm in ("learned", "frozen"):
        models[arm]["trunk"].pop("head", None)  # its logits
        assert same(still[arm], models[arm], ("router", "experts", "trunk")) == {"router", "experts", "trunk"}
    tuned = run(settings(**begins | {"phases": ("train=experts+head",)}), tmp_path / "tuned")["learned"]
    assert same(tuned, still["learned"], tuned.keys() - {"state"}) == {"router", "trunk"}
    assert same(models["learned"], models["frozen"], ("router", "experts", "trunk")) == set()
    other = run(settings(**begins | rates | {"initial.arm": "learned", "arms": ("frozen",)}), tmp_path / "other")
    assert same(other["frozen"], models["learned"], ("router",)) == {"router"}


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    "changes, words",
    [
        ({"data.vocabulary": 260, "data.tokens": "bytes"},
         "has data.tokens='characters' \\(here 'bytes'\\), data.vocabulary=30 \\(here 260\\); set them alike"),
        ({"transformer.dim": 16}, "has transformer.dim=8 \\(here 16\\); set them alike"),
        ({"arms": ("xmoe",)},
         "no model of the arm xmoe with seed 0 in it; there are: frozen of seed 0, learned of seed 0"),
        ({"seed": 5}, "no model of the arm learned with seed 5"),
        ({"initial.workdir": "nowhere"},
         "'nowhere': no such folder; name the workdir of a run with --config.checkpoint.final=true"),
        ({"initial.workdir": "."}, "'.': no models in it; run its command again with --config.checkpoint.final=true"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_fit_is_refused_before_anything_runs(trained, tmp_path, changes, words):
    config = settings(**{"initial.workdir": str(trained[0])} | changes)
    with pytest.raises(UserError, match=words):
        run(config, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
def test_a_model_of_pieces_that_its_text_was_cut_into_can_be_tuned(tmp_path):
    """Its workdir keeps them, and says so; whatever file has them, they are the same, and others are not."""
    pieces = {"data.tokens": "train", "data.vocabulary": 60, "data.cache": str(tmp_path / "cache")}
    base = tmp_path / "base"
    run(settings(**LANGUAGE | pieces), base)
    (kept,) = (base / "pieces").iterdir()
    tuned = pieces | {"initial.workdir": str(base), "checkpoint.final": True}
    with pytest.raises(
        UserError, match=r"data.tokens='train': texts with classes .* keeps that of its text: pieces/\*"
    ):
        validate(settings(**tuned))
    with pytest.raises(
        UserError, match=f"data.tokens='train' .here 'characters'.; set them alike, data.tokens={kept}$"
    ):
        pretrained.check(plan_runs(settings(**tuned | {"data.tokens": "characters"}), ({},)))
    for file in (kept, shutil.copy(kept, tmp_path / "copy.model")):
        config = settings(**tuned | {"data.tokens": str(file)})
        validate(config)
        pretrained.check(plan_runs(config, ({},)))
    shutil.rmtree(tmp_path / "cache")
    assert run(config, tmp_path / "tuned").keys() == {"learned"}
    other = small_model(tmp_path, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    with pytest.raises(UserError, match=f"has data.pieces='pieces/.* set them alike, data.tokens={kept}$"):
        pretrained.check(plan_runs(settings(**tuned | {"data.tokens": str(other)}), ({},)))


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
def test_a_model_that_goes_on_under_another_rule_says_so(trained, caplog):
    """Once for all runs of an arm; the same rule, and what only says how it is trained, are no reason."""
    began = {"initial.workdir": str(trained[0]), "arms": ("learned", "frozen"), "selection.balance_rate": 1e-3}
    pretrained.check(plan_runs(settings(**began), ({},)))
    assert not caplog.text
    pretrained.check(
        plan_runs(settings(**began | {"selection.k": 1, "selection.renormalise": False}), ({}, {"batch_size": 2}))
    )
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and (
        "models of the arm learned have selection.k=2 (here 1), selection.renormalise=True (here False): they go on"
        in told[0]
    )


def test_a_scale_of_rates_that_tuning_replaces_is_refused(small, monkeypatch):
    with pytest.raises(UserError, match=r"optimizer\.rate_scale=0\.1: rates=tuned chooses it; set tune\.multipliers"):
        plan_runs(override(small, {"rates": "tuned", "optimizer.rate_scale": 0.1}), ({},))
    monkeypatch.setitem(ARMS, "fast", Arm({"optimizer.rate_scale": 10.0}, "faster", "#000000"))
    with pytest.raises(UserError, match=r"optimizer\.rate_scale=10\.0: rates=tuned chooses it"):
        plan_runs(override(small, {"rates": "tuned", "arms": ("learned", "fast")}), ({},))


def test_runs_that_all_begin_untrained_say_so(caplog):
    """Also where an arm does not; a decoder, which cannot begin with anything, says nothing."""
    pretrained.check(plan_runs(settings(), ({},)))
    assert "initial.workdir is empty: every run begins untrained" in caplog.text
    caplog.clear()
    pretrained.check(plan_runs(settings(**LANGUAGE), ({},)))
    assert not caplog.text


def test_a_workdir_whose_runs_began_with_other_models_is_refused(tmp_path, monkeypatch):
    """The same models, or none left, are no reason; models trained in another way are; so is a damaged note."""
    runs, held = plan_runs(settings(**{"initial.workdir": "base"}), ({},)), {"name": "a"}

    def model(run):
        if not held["name"]:
            raise UserError("no models in it")
        return tmp_path / "base" / held["name"]

    monkeypatch.setattr(pretrained, "_model_path", model)
    monkeypatch.setattr(pretrained.checkpoint, "digest_of", lambda path: held.get("digest", ""))
    for held["name"] in ("a", "a", ""):
        pretrained.record_models(tmp_path, runs)
    held["name"] = "b"
    with pytest.raises(
        UserError, match=r"initial.workdir='base': holds other models than those that runs in .* began with"
    ):
        pretrained.record_models(tmp_path, runs)
    held |= {"name": "a", "digest": "of other text"}
    with pytest.raises(UserError, match="holds other models"):
        pretrained.record_models(tmp_path, runs)
    (tmp_path / "initial.json").write_text("[1")
    with pytest.raises(UserError, match=r"initial.json is damaged .*nobody knows which models"):
        pretrained.record_models(tmp_path, runs)
