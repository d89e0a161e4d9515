"""Rows of packed documents: no token sees another document's, and none is predicted across."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed.contracts import TextBatch, UserError
from routed.layer.rule import selection_rule
from routed.models.decoder import decoder, same_document
from routed.plan.checks import validate
from routed.plan.config import base, problem_of
from routed.settings.tree import node_of, override
from routed.tasks.text import CONTINUED, ngram_loss
from routed.tasks.text.spans import END
from routed.training import program
from tests.parallel_case import loss_and_gradients, make_mesh
from tests.test_decoder import TINY

PACKED = TINY | {"data.packing": "documents", "data.languages": ("qaa", "qab"), "data.eval_rows": 12}


def settings(**changes):
    return override(base(), PACKED | changes)


def rows(count=4, length=8, end=3):
    """Random rows, whose token at `end` ends their first document."""
    draw = lambda seed: jax.random.randint(jax.random.key(seed), (count, length), 3, 30)  # noqa: E731
    return TextBatch(draw(1).at[:, end].set(END), draw(2), jnp.zeros(count, jnp.int32))


def test_an_end_is_its_documents_last():
    seen = same_document(jnp.array([[5, END, END, 6]]))[0]
    assert seen.tolist() == [[True, True, False, False]] * 2 + [
        [False, False, True, False],
        [False, False, False, True],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("form", [{}, {"transformer.positions": "rotary", "transformer.norm": "post"}])
def test_a_document_is_as_if_it_stood_alone(form):
    """Its logits do not hear of the document before; a stream's do. Rotary and bucketed positions know distances."""
    batch, place = rows(), 1
    other = batch._replace(inputs=batch.inputs.at[:, place].set((batch.inputs[:, place] + 1) % 27 + 3))
    for packing in ("documents", "stream"):
        config = settings(**form | {"data.packing": packing})
        model = decoder(config)
        params, state = jax.jit(model.init)(jax.random.key(0), batch)
        read = jax.jit(
            lambda b, m=model, c=config, p=params, s=state: (
                m.apply(p, s, b, selection_rule(c.selection), c.dispatch).prediction
            )
        )
        one, moved = read(batch), read(other)
        assert (one[:, place:4] != moved[:, place:4]).any(-1).all()
        changed = (one[:, 4:] != moved[:, 4:]).any()
        assert changed == (packing == "stream")
    alone = batch._replace(inputs=jnp.concatenate([batch.inputs[:, 4:], batch.inputs[:, :4]], 1))
    config = settings(**form)
    model = decoder(config)
    params, state = jax.jit(model.init)(jax.random.key(0), batch)
    read = jax.jit(
        lambda b: model.apply(params, state, b, selection_rule(config.selection), config.dispatch).prediction
    )
    np.testing.assert_allclose(read(batch)[:, 4:], read(alone)[:, :4], atol=2e-5)


@pytest.mark.slow
def test_what_follows_an_end_does_not_count():
    """In training, in evaluation, in the 5-gram: targets behind an END may be anything."""
    config = settings()
    problem = problem_of(config).build(config, 0, None)
    batch = rows(6)
    other = batch._replace(targets=batch.targets.at[:, 3].set((batch.targets[:, 3] + 1) % 27 + 3))
    shared = {"validation": batch, "test": batch, "references": {}}
    inputs = program.Inputs(program.streams(0, config), node_of(config), (), shared)
    params, state = problem.init(inputs)
    outputs = problem.model.apply(params, state, batch, selection_rule(config.selection), "dense")
    # Of 8 targets in each of 6 rows 7 count; the mean over these, by hand.
    nats = (
        jax.nn.logsumexp(outputs.prediction, -1)
        - jnp.take_along_axis(outputs.prediction, batch.targets[..., None], -1)[..., 0]
    )
    mean = np.delete(np.asarray(nats), 3, axis=1).mean()
    square = np.delete(np.asarray(jax.nn.logsumexp(outputs.prediction, -1)) ** 2, 3, axis=1).mean()
    with_z = override(config, {"losses.logits_z": 0.5})
    for one in (batch, other):
        assert problem.task_loss(config, outputs, one)[0] == pytest.approx(mean, rel=1e-6)
        assert problem.task_loss(with_z, outputs, one)[0] == pytest.approx(mean + 0.5 * square, rel=1e-6)
        moment = inputs._replace(shared=shared | {"validation": one, "test": one})
        memory = problem.remember(params, state)
        evaluate = partial(problem.evaluate, moment, params, state, jnp.int32(0), memory)
        seen = jax.jit(evaluate)()
        assert seen["eval/loss"] == pytest.approx(mean, rel=1e-5)
        assert seen["test/loss"] == pytest.approx(mean, rel=1e-5)
        assert seen["language/loss"][0] == pytest.approx(mean, rel=1e-5)
    text, counted = [np.arange(3, 30)], np.asarray(batch.inputs) != END
    losses = {
        ngram_loss(text, np.asarray(b.inputs), np.asarray(b.targets), 30, counted=counted) for b in (batch, other)
    }
    assert len(losses) == 1


def test_documents_end_and_streams_do_not(tmp_path):
    """Artificial documents: as many ENDs as there are documents, and nothing else is other."""
    flat = {}
    for packing in ("documents", "stream"):
        config = settings(**{"data.packing": packing, "data.cache": str(tmp_path)})
        corpus = CONTINUED.load(config.data)
        flat[packing] = np.concatenate([rows[:, :-1].reshape(-1) for rows in corpus.train])
    assert (flat["stream"] != END).all()
    count = (flat["documents"] == END).sum()
    assert count > 100
    kept = flat["documents"][flat["documents"] != END]
    assert len(kept) + count == len(flat["documents"]) and (kept[:5000] == flat["stream"][:5000]).all()


def test_plain_files_have_no_documents():
    with pytest.raises(UserError, match=r"data.packing='documents': plain files are one text each"):
        validate(settings(**{"data.name": "files", "data.directory": "somewhere"}))


@pytest.mark.slow
def test_devices_that_share_packed_rows_give_the_numbers_of_one():
    config = settings(**{"batch_size": 8, "selection.group_size": 8})
    expected, found = (loss_and_gradients(decoder, config, rows(8), mesh) for mesh in (None, make_mesh(2, 4)))
    chex.assert_trees_all_close(found, expected, rtol=2e-5, atol=2e-6)
