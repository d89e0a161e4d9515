"""Epochs of batches without replacement, runs that stop behind one, and a router that is trained before its experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed.contracts import UserError
from routed.papers.chowdhury2023.separate import apart, linear
from routed.plan.checks import validate
from routed.plan.config import base, canonical, traced
from routed.settings.tree import node_of, override
from routed.tasks import TASKS, worlds
from routed.training import sample_problem
from routed.training.phases import active_phase, phases_of
from routed.training.program import advance, make_program, start
from routed.training.samples import SAMPLES
from routed.training.task_losses import correct
from tests.test_patch_moe import PATCHES
from tests.test_run import SMALL, train

#: 24 samples, four batches of 6 an epoch.
EPOCHS = PATCHES | {"data.epochs": True}
#: The router first, for two epochs, then its experts.
FIRST = EPOCHS | {
    "phases": ("epochs=2 train=router loss=scores", "train=experts"), "experts.count": 2,
    "selection.patch_weights": "one",
    "selection.eval.patch_weights": "one", "steps": 40, "eval_every": 40,
}  # fmt: skip


@pytest.fixture(scope="module")
def config():
    return override(override(base(), SMALL), EPOCHS)


def test_an_epoch_has_every_sample_once():
    """Of a pool of 9 the first 6 are samples, also where their number is traced."""
    orders = [jax.jit(worlds.shuffle, static_argnums=1)(jax.random.key(seed), 9, 6) for seed in range(4)]
    assert all(sorted(order[:6].tolist()) == list(range(6)) for order in orders)
    assert len({tuple(order.tolist()) for order in orders}) > 1


@pytest.mark.parametrize("count", [1, 512, 600])
def test_an_order_does_not_depend_on_the_pool(count):
    """It is as large as the largest sample number of a sweep or part: 100,000 take 17 bits, which left 600 ties."""
    one, other = (worlds.shuffle(jax.random.key(0), pool, count)[:count] for pool in (600, 100_000))
    np.testing.assert_array_equal(one, other)
    assert sorted(one.tolist()) == list(range(count))


@pytest.mark.slow
def test_batches_of_an_epoch_share_no_sample(config):
    task, data = TASKS["generated"], node_of(config).data
    world = worlds.draw_world(task, jax.random.key(0), data, 24)
    batches = [worlds.train_batch(task, world, jax.random.key(1), 6, data, step).x for step in range(8)]
    first, second = (np.concatenate(batches[i : i + 4]).reshape(24, -1) for i in (0, 4))
    everything = np.unique(np.asarray(world.train.x).reshape(24, -1), axis=0)
    for epoch in (first, second):
        np.testing.assert_array_equal(np.unique(epoch, axis=0), everything)
    assert (first != second).any()


@pytest.mark.parametrize(
    ("changes", "steps", "stopped"),
    [
        ({"stop.epochs": 3}, 12, 1),  # 3 epochs of 24 / 6 steps
        ({"stop.epochs": 3, "data.samples": 12}, 6, 1),
        ({"stop.epochs": 11}, 40, 0),  # of which 40 steps have ten
        ({"stop.errors": True, "losses.threshold": 1e6}, 40, 0),  # every sample of label 1 is wrong
    ],
)
def test_a_run_stops_behind_an_epoch(config, changes, steps, stopped, tmp_path):
    rows = train(override(config, changes | {"steps": 40, "eval_every": 20, "arms": ("cnn",)}), ({},), tmp_path)
    ends = rows[rows.step == 40]
    assert set(ends["train/steps"]) == {steps} and set(ends["train/stopped"]) == {stopped}


def test_a_run_stops_when_no_sample_was_wrong(config, tmp_path):
    """Samples that lie apart by their patterns are learned long before the end, and the run takes whole epochs."""
    changes = {
        "stop.errors": True,
        "experts.width": 40,
        "experts.learning_rate": 1.0,
        "steps": 4000,
        "eval_every": 4000,
        "arms": ("cnn",),
    }
    end = train(override(config, changes), ({},), tmp_path).iloc[-1]
    assert end["train/stopped"] == 1 and 0 < end["train/steps"] < 4000 and end["train/steps"] % 4 == 0


@pytest.mark.parametrize(("phases", "steps"), [((), 4), (FIRST["phases"], 12), (("until=10 train=router", ""), 16)])
def test_the_first_whole_epoch_of_the_last_phase_may_be_the_last(config, monkeypatch, phases, steps):
    """All samples are right: one epoch of 4 steps; behind two epochs of the router; not one that began in it."""
    monkeypatch.setattr(sample_problem, "correct", lambda prediction, y, threshold: jnp.ones(len(y), bool))
    config = canonical(override(config, FIRST | {"stop.errors": True, "phases": phases}))
    program, seed = make_program(config, SAMPLES.build(config, 24)), 0
    values = {key: jnp.asarray(value) for key, value in traced(config).items()}
    world, run = jax.jit(lambda: start(program, seed, values))()
    assert jax.jit(lambda run: advance(program, 40, seed, values, world, run))(run)["taken"] == steps


@pytest.mark.slow
def test_epochs_of_the_last_phase_count(config, tmp_path):
    """Two epochs of the router, three of the experts: 5 x 4 steps; experts rest in the first 8, then the router."""
    rows = train(
        override(config, FIRST | {"stop.epochs": 3, "arms": ("separate",), "steps": 440, "eval_every": 440}),
        ({},),
        tmp_path,
    )
    assert rows["train/steps"].iloc[-1] == (100 + 3) * 4  # the arm's own phases
    assert rows["patches/expert_steps"].iloc[-1] == 3 * 4
    phases = phases_of(override(config, FIRST))
    at = [int(active_phase(phases, jnp.int32(step), jax.random.key(0), 4)) for step in (0, 7, 8, 39)]
    assert at == [0, 0, 1, 1]


@pytest.mark.slow
def test_a_router_that_is_trained_first_adds_up_what_tells_classes_apart(config):
    """Whole epochs of a linear loss: w_1 = w_1(0) + rate x steps x mean(y sum_j x_j), and w_2 the same with a minus."""
    config = canonical(override(config, FIRST | {"router.learning_rate": 0.1, "steps": 9, "eval_every": 9}))
    program = make_program(config, SAMPLES.build(config, 24))
    values = {key: jnp.asarray(value) for key, value in traced(config).items()}
    world, run = start(program, 3, values)
    before, after = run["params"], jax.jit(lambda r: advance(program, 8, 3, values, world, r))(run)["params"]
    samples = worlds.examples(TASKS["generated"], world, 24, config.data)
    mean = (samples.y * samples.x.sum(1)).mean(0)
    moved = after["router"]["kernel"] - before["router"]["kernel"]
    np.testing.assert_allclose(moved, 0.1 * 8 * jnp.stack([mean, -mean], 1), rtol=1e-4, atol=1e-5)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), before["experts"], after["experts"]))


def test_losses_of_scores_by_hand():
    """Two samples of two patches, three experts: 1 - 2 + 3 = 2 and 0 - 1 + 0 = -1; 4 - 0 - 0 = 4 and 1 - 1 + 1 = 1."""
    scores = jnp.array([[1.0, 2, 3], [0, 1, 0], [4, 0, 0], [1, 1, 1]])
    f = apart(scores, 2)
    assert f.tolist() == [[1.0], [5.0]]
    assert linear(f, jnp.array([[1.0], [-1.0]])).tolist() == [-1.0, 5.0]


def test_the_threshold_of_accuracy():
    """.3 is of label 1 at threshold 0, of label -1 at .5; .5 itself is never right."""
    f, y = jnp.array([[0.3], [0.3], [0.5], [-1.0]]), jnp.array([[1.0], [-1.0], [1.0], [-1.0]])
    assert correct(f, y).tolist() == [True, False, True, True]
    assert correct(f, y, 0.5).tolist() == [False, True, False, True]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data.samples": 20}, "data.epochs=True: needs .* data.samples=20 a multiple of batch_size=6"),
        ({"data.fresh": True}, "data.epochs=True: needs data.fresh=false"),
        ({"phases": ("epochs=4 train=router", "train=experts"), "steps": 16},
         "phases: .*epochs=4 of data.samples=24 must be fewer than steps=16"),
        ({"phases": ("epochs=1",)}, "no phase covers all of the last steps"),
        ({"phases": ("epochs=1 train=router loss=scores", "train=experts"), "model": "patch_cnn"},
         "trains a router, and model='patch_cnn' has none"),
        ({"phases": ("until=1 train=router", "train=experts"), "model": "patch_cnn"},
         "phases=.*: trains a router, and model='patch_cnn' has none"),
        ({"loss": "scores", "experts.count": 1}, "loss='scores': sets experts apart, and experts.count=1"),
        (FIRST | {"stop.rise": 0.02}, "stop.rise=0.02: compares all losses, and a phase has another loss"),
        ({"model": "ensemble", "stop.errors": True}, "stop.errors=True: counts the wrong samples of one model"),
    ],
)  # fmt: skip
def test_impossible_epochs_are_refused_by_name(config, changes, words):
    validate(config)
    with pytest.raises(UserError, match=words):
        validate(override(config, {"steps": 40, "eval_every": 2} | changes))


def test_wrong_samples_of_no_sign_are_refused(config):
    words = "stop.errors=True: counts wrong signs, and loss='squared' has none"
    squared = {
        "data.name": "gmm",
        "model": "moe",
        "loss": "squared",
        "data.target": "constant",
        "data.target_dim": 2,
        "selection.name": "soft",
    }
    with pytest.raises(UserError, match=words):
        validate(override(config, squared | {"selection.eval.name": "top_k", "stop.errors": True}))
