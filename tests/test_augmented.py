"""Images that are turned, cropped and blurred, or flipped and moved, anew in each step."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from routed.contracts import UserError
from routed.papers.chen2022 import augmented
from routed.plan.checks import validate
from routed.settings.tree import override
from routed.tasks import TASKS, worlds
from tests.test_networks import IMAGES


def data(**changes):
    chosen = {"images": "patterns", "directory": "", "clusters": 10, "image_side": 16, "blur": "all", "fresh": True}
    chosen |= {"epochs": False, "full_batch": False, "samples": 32, "test_samples": 40}
    return types.SimpleNamespace(**chosen | changes)


def world_of(name, node):
    task = TASKS[name]
    return task, worlds.draw_world(task, jax.random.key(0), node, 32)._replace(shared=task.shared(node))


def test_turned_images_are_pillows():
    """Rotation by the nearest pixel, crop to 24, bilinear resize; Pillow rounds to whole levels twice."""
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    turned = Image.fromarray(pixels).rotate(30)
    ours = augmented.turned_and_cropped(jnp.asarray(np.stack([pixels] * 2) / 255), jnp.array([False, True]))
    for image, own in zip((Image.fromarray(pixels), turned), ours, strict=True):
        cropped = image.crop((4, 4, 28, 28))
        theirs = cropped.resize((32, 32), Image.Resampling.BILINEAR)
        np.testing.assert_allclose(own * 255, np.asarray(theirs), atol=1.01)


def test_a_blur_by_hand():
    """A point: e^-.5 = .6065 beside 1 in a row of 3 (sum 2.2131); a column of 7 has e^-2, e^-4.5 too (sum 2.5059)."""
    x = jnp.zeros((2, 9, 9, 1)).at[:, 4, 4].set(1.0)
    y = augmented.blurred(x, jnp.array([1.0, augmented.SHARP]))
    row, column = np.exp([-0.5, 0, -0.5]) / 2.2131, np.exp(-0.5 * np.arange(-3, 4) ** 2.0) / 2.50588
    np.testing.assert_allclose(y[0, 1:8, 3:6, 0], column[:, None] * row[None], rtol=1e-3)
    np.testing.assert_array_equal(y[1], x[1])


def test_an_image_moves_and_what_comes_in_is_black():
    x = jnp.arange(1.0, 65).reshape(1, 8, 8, 1)
    y = augmented.moved(x, jnp.array([[1, -1]]))[0, :, :, 0]  # down by 1, left by 1
    np.testing.assert_array_equal(y[1:, :7], x[0, :7, 1:, 0])
    assert not y[0].any() and not y[:, 7].any()


@pytest.mark.parametrize("name", ["rotated", "augmented"])
def test_batches_are_a_function_of_seed_and_step(name):
    task, world = world_of(name, node := data())
    batch = jax.jit(lambda step: worlds.train_batch(task, world, jax.random.key(1), 8, node, step))
    first, again, later = batch(0), batch(0), batch(1)
    np.testing.assert_array_equal(first.x, again.x)
    assert not np.array_equal(first.x, later.x)


def test_tests_take_each_image_as_it_is_and_turned():
    task, world = world_of("rotated", node := data())
    test = worlds.test_batch(task, world, node)
    # Images in turn by class, each twice: clusters 2 class + turned are 0 to 19, twice; the label is the second part.
    assert test.cluster.tolist() == [*range(20)] * 2 and test.y.argmax(1).tolist() == [0, 1] * 20
    members = task.groupings(world, node)
    assert (test.y.argmax(1) == members["turned"][test.cluster].argmax(1)).all()
    assert members["class"][test.cluster].argmax(1).tolist() == [c for _ in range(2) for c in range(10) for _ in "ab"]


def test_blur_of_training_images_only():
    _, world = world_of("rotated", data(blur="training"))
    assert (world.test.sigma == augmented.SHARP).all() and (world.train.sigma > 1).all()
    assert (world_of("rotated", data(blur="none"))[1].train.sigma == augmented.SHARP).all()
    assert (world_of("rotated", data())[1].test.sigma > 1).all()


def test_tests_of_classes_are_images_as_they_are():
    task, world = world_of("augmented", node := data(image_side=8))
    test, shared = worlds.test_batch(task, world, node), world.shared
    pixels = (shared.pixels[2000] / 255 - shared.mean) / shared.std  # the first of 500 behind 2,000 for training
    np.testing.assert_allclose(test.x[0], pixels.reshape(8, 2, 8, 2, 3).mean((1, 3)), rtol=1e-3, atol=1e-4)
    assert test.cluster.tolist() == [*range(10)] * 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"router.window": 3}, "router.window=3: must divide the 8 pixels of a side of an image"),
        ({"data.target_dim": 3}, "data.target_dim=3: .* set data.target_dim=2"),
        ({"data.test_samples": 30}, "data.test_samples=30: must be a multiple of 20"),
        ({"data.blur": "some"}, "data.blur='some': must be one of all, training, none"),
        (
            {"experts.name": "cnn"},
            "experts.name='cnn': computes on patches, the tokens of data.name='rotated' are images",
        ),
    ],
)
def test_impossible_settings_are_refused(small, changes, words):
    with pytest.raises(UserError, match=words):
        validate(override(small, IMAGES | changes))


def test_images_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match=r"data.image_side=7: must divide the 16 pixels of a side"):
        augmented.counts(data(image_side=7))
    with pytest.raises(UserError, match=r"data.clusters=4: .* have 10 classes; set data.clusters=10"):
        augmented.counts(data(clusters=4))


@pytest.mark.parametrize(("small", "side"), [(29, 32), (7, 8), (14, 16), (4, 4)])
def test_enlarged_is_bilinear(small, side):
    x = jax.random.normal(jax.random.key(small), (2, small, small, 3))
    expected = jax.image.resize(x, (2, side, side, 3), "bilinear", precision=jax.lax.Precision.HIGHEST)
    np.testing.assert_allclose(augmented.enlarged(x, side), expected, atol=2e-6)
