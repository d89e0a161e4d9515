"""Tasks of patches that are routed alone: the theory's patterns and collages of digits, by hand and by law."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed.contracts import UserError
from routed.papers.chowdhury2023 import classes, generated
from routed.plan.checks import validate
from routed.settings.tree import override
from routed.tasks import TASKS, images, worlds
from routed.tasks.image_files import load
from tests.test_images import SPLITS, idx

SIGN = {
    "data.target": "sign",
    "data.target_dim": 1,
    "loss": "logistic",
    "experts.name": "linear",
    "router.name": "linear",
}


def drawn(config, pool):
    """Data node, world and test samples, compiled as a whole."""
    task, data = TASKS[config.data.name], config.data
    shared = task.shared(data)

    @jax.jit
    def make(key, shared):
        world = worlds.draw_world(task, key, data, pool)._replace(shared=shared)
        return world, worlds.test_batch(task, world, data), worlds.examples(task, world, pool, data)

    return *make(jax.random.key(3), shared), data


# --- several classes ---

FOUR = {"data.name": "generated_classes", "data.target": "class", "data.target_dim": 4, "loss": "cross_entropy",
        "data.pattern_sets": 4, "data.dim": 12, "data.positions": 3, "data.test_samples": 400,
        "data.samples": 40}  # fmt: skip


def test_patterns_of_classes_by_hand(small):
    """delta_d = 0: o_i = e_i, and q = +-2 delta_r m + rest, m = (e_1 + .. + e_4) / 2: .6 and .8 of delta_r = .3.

    delta_d = .75: a = .5, 1 + 3 * .75 = 3.25, so b = (1.802776 - .5) / 4 = .325694.
    """
    axes = classes.Axes(jnp.eye(12)[:4], jnp.eye(12)[4:8])
    data = override(small, SIGN | FOUR | {"data.delta_d": 0.0, "data.delta_r": 0.3, "data.spread": 0.0}).data
    np.testing.assert_allclose(classes.patterns(axes, data), np.eye(12)[:4], atol=1e-6)
    drawn_batch = classes.draw(axes, None, jax.random.key(0), 40, data)
    x, cluster = np.asarray(drawn_batch.x), np.asarray(drawn_batch.cluster)
    assert (drawn_batch.y.argmax(1) == cluster.min(1)).all() and ((cluster < 4).sum(1) == 1).all()
    for j, sign in enumerate((1, -1, 1, -1)):
        q = 0.3 * sign * np.eye(12)[:4].sum(0) + 0.8 * np.eye(12)[4 + j]
        np.testing.assert_allclose(x[cluster == 4 + j], np.tile(q, ((cluster == 4 + j).sum(), 1)), atol=1e-6)
    close = override(small, SIGN | FOUR | {"data.delta_d": 0.75, "data.delta_r": 0.3}).data
    o = classes.patterns(axes, close)
    np.testing.assert_allclose(o[0, :4], [0.825694, 0.325694, 0.325694, 0.325694], rtol=1e-5)
    np.testing.assert_allclose(o @ o.T, 0.25 * np.eye(4) + 0.75, atol=1e-6)


def test_pairs_of_classes_by_hand():
    """Two patches, scores of four experts summed to 3, 7, 1, 5: class 1 has 7 - 3, class 2 3 - 7, class 4 1 - 5."""
    scores = jnp.tile(jnp.array([[1.0, 3, 0, 2], [2, 4, 1, 3]]), (3, 1))
    prediction = classes.summed(scores, 3)
    assert prediction.tolist() == [[3, 7, 1, 5]] * 3
    assert classes.pairwise(prediction, jnp.eye(4)[jnp.array([0, 1, 3])]).tolist() == [4, -4, -4]


# --- generated ---


def theory(small, **changes):
    """a = sqrt((1 - .28) / 2) = .6, b = sqrt((1 + .28) / 2) = .8; delta_r = .48 is at most a and above 1.28 / 4."""
    values = {"data.name": "generated", "data.dim": 12, "data.positions": 5, "data.delta_d": -0.28,
              "data.delta_r": 0.48,
              "data.confusing_patches": 2, "data.test_samples": 500, "data.samples": 40}  # fmt: skip
    return override(small, SIGN | values | changes)


def test_patterns_by_hand(small):
    """o = .6 m +- .8 v. Leaning ones have +- .48 / .8 = .6 of v, the rest +- .48 / .6 = .8 of m; own axes .8 and .6."""
    data = theory(small).data
    m, v, *own = np.eye(12, dtype=np.float32)[:10]
    axes = generated.Axes(jnp.array(m), jnp.array(v), jnp.array(own))
    np.testing.assert_allclose(generated.discriminative(axes, data), [0.6 * m + 0.8 * v, 0.6 * m - 0.8 * v], atol=1e-6)
    expected = [0.6 * v, -0.6 * v, 0.8 * m, -0.8 * m] * 2
    np.testing.assert_allclose(generated.in_plane(axes, data), expected, atol=1e-6)
    exact = override(theory(small), {"data.spread": 0.0}).data
    one = jax.jit(lambda key: generated.draw(axes, None, key, 50, exact))(jax.random.key(0))
    for j, rest in enumerate([0.8, 0.8, 0.6, 0.6] * 2):
        found = np.asarray(one.x)[one.cluster == 2 + j]
        assert len(found) and abs(found - (expected[j] + rest * own[j])).max() < 1e-6


def test_the_law_of_generated_samples(small):
    world, test, _, data = drawn(theory(small), 40)[0:4]
    o = np.asarray(generated.discriminative(world.fixed, data))
    x, cluster, y = (np.asarray(a) for a in (test.x, test.cluster, test.y))
    assert o[0] @ o[1] == pytest.approx(-0.28, abs=1e-5)
    np.testing.assert_allclose(np.linalg.norm(x, axis=-1), 1, atol=1e-5)
    # One pattern decides, where it is is chance, and the classes are as many.
    decides = cluster < 2
    assert (decides.sum(1) == 1).all() and (cluster[decides] == (y[:, 0] < 0)).all() and y.sum() == 0
    assert np.bincount(decides.argmax(1), minlength=5).min() > 70  # 100 each, deviation 9
    np.testing.assert_allclose(x[decides], o[cluster[decides]], atol=1e-6)
    # Every other patch has products +-.48 with both, of opposite signs in exactly `confusing` patches: l* = 3.
    products = x[~decides] @ o.T
    np.testing.assert_allclose(abs(products), 0.48, atol=1e-5)
    confusing = (abs(x @ (o[0] - o[1])) > (1 + 0.28) / 2) & ~decides
    assert (confusing.sum(1) == 2).all()
    assert np.bincount(cluster[~decides] - 2, minlength=8).min() > 200  # 250 each, deviation 14
    # A set lies in a ball of diameter sqrt((1 - .48^2) / (12 x 64)) = .03166, and fills some of it.
    for j in range(8):
        mine = x[cluster == 2 + j]
        widest = np.linalg.norm(mine[:, None] - mine[None], axis=-1).max()
        assert 0.5 * 0.03166 < widest <= 0.03166


@pytest.mark.parametrize("name", ["generated", "collages"])
def test_a_larger_pool_keeps_the_samples_of_a_smaller_one(small, name, digits):
    config = theory(small) if name == "generated" else collage(small, digits)
    (few, _, first, _), (many, *_) = drawn(config, 8), drawn(config, 16)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b[:8], atol=1e-6), few.train, many.train)
    assert first.x.shape[:2] == (8, config.data.positions)


# --- collages ---

#: Training and test images of each of five classes.
COUNTS = {"train": (3, 1, 2, 4, 2), "t10k": (2, 1, 3, 1, 2)}


@pytest.fixture
def digits(tmp_path):
    """IDX images that tell split, class and number: pixels 100 x split + 10 x class + number, 3 x 3, shuffled."""
    write_digits(tmp_path)
    return str(tmp_path)


def write_digits(folder, shape=(3, 3), counts=COUNTS):
    load.cache_clear()
    images.digest_of_files.cache_clear()
    for part, split in enumerate(SPLITS):
        found = [(c, 100 * part + 10 * c + i) for c, many in enumerate(counts[split]) for i in range(many)]
        y, value = np.random.default_rng(part).permutation(np.array(found, np.uint8)).T
        x = np.broadcast_to(value[:, None, None], (len(value), *shape)).copy()
        for what, array in (("images", x), ("labels", y.copy())):
            (folder / f"{split}-{what}-idx{array.ndim}-ubyte").write_bytes(idx(array))


def collage(small, folder, **changes):
    """Class 3 against class 0; class 4 is left out."""
    values = {"data.name": "collages", "data.images": "idx", "data.directory": folder, "data.positions": 9,
              "data.test_samples": 400,
              "data.discriminative": (3, 0), "data.irrelevant": (1, 2)}  # fmt: skip
    return override(small, SIGN | values | {"data.samples": 400} | changes)


def test_collages_by_hand(small, digits):
    """All pixels of a patch say which digit it is: 21 is number 1 of class 2, for training; 121 the same for tests."""
    _, test, train, _ = drawn(collage(small, digits), 400)
    for part, batch in ((0, train), (1, test)):
        x, cluster = np.asarray(batch.x) * 255, np.asarray(batch.cluster)
        assert x.shape == (400, 9, 9) and np.ptp(x, axis=-1).max() == 0
        code = x[:, :, 0].round().astype(int) - 100 * part
        np.testing.assert_array_equal(code // 10, np.array([3, 0, 1, 2])[cluster])
        # Every digit of the four classes occurs, and no other: none of the other split, of which there are others.
        numbers = COUNTS[SPLITS[part]]
        assert set(np.unique(code)) == {10 * c + i for c in (3, 0, 1, 2) for i in range(numbers[c])}
        decides = cluster < 2
        assert (decides.sum(1) == 1).all()
        assert batch.y[:, 0].tolist() == [1, -1] * 200 == np.where((cluster == 0).any(1), 1, -1).tolist()
        assert np.bincount(decides.argmax(1), minlength=9).min() > 20  # 44 each, deviation 6
        assert (
            abs((cluster == 2).sum() - 1600) < 150
        )  # of 3,200 irrelevant digits half are of either class, deviation 28


def test_a_digit_goes_with_the_label_in_training_and_with_the_other_in_tests(small, digits):
    """90 % of 400 samples (deviation 1.5 %) pair class 1 with 1, class 4 with -1; 10 % of tests. The rest: class 2."""
    changes = {"data.irrelevant": (1, 2, 4), "data.spurious_fraction": 0.9, "data.misleading": (1, 4)}
    _, test, train, _ = drawn(collage(small, digits, **changes), 400)
    for part, batch, share in ((0, train, 0.9), (1, test, 0.1)):
        code, cluster = np.asarray(batch.x)[:, :, 0] * 255, np.asarray(batch.cluster)
        of_class = (code.round().astype(int) - 100 * part) // 10
        np.testing.assert_array_equal(of_class, np.array([3, 0, 2, 1, 4])[cluster])
        misleads, y = cluster >= 3, np.asarray(batch.y)[:, 0]
        assert (misleads.sum(1) == 1).all() and ((cluster < 2).sum(1) == 1).all()
        goes = (of_class == np.where(y > 0, 1, 4)[:, None])[misleads]
        for label in (1, -1):
            assert abs(goes[y == label].mean() - share) < 0.08
        # Where it is says nothing of where the other is: each distance of 1 to 8 places, around the corner, as often.
        distance = (misleads.argmax(1) - (cluster < 2).argmax(1)) % 9
        assert (np.bincount(distance, minlength=9)[1:] > 25).all()  # 50 each, deviation 6.6


def test_places_and_scaling_of_collages(small, digits):
    """The first and last of 9 places are left out; 9 equal pixels of a patch of length 1 are 1/3 each."""
    _, test, *_ = drawn(collage(small, digits, **{"data.places": "inner", "data.scaling": "unit"}), 8)
    assert sorted(set(np.asarray(test.cluster < 2).argmax(1))) == [1, 2, 3, 4, 5, 6, 7]
    np.testing.assert_allclose(np.asarray(test.x)[test.cluster != 1], 1 / 3, rtol=1e-5)
    black = drawn(collage(small, digits, **{"data.scaling": "unit"}), 400)[2]
    assert jnp.isfinite(black.x).all() and float(black.x.min()) == 0.0  # number 0 of class 0, for training


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data.pattern_sets": 6}, "data.pattern_sets=6: must be a multiple of 4"),
        ({"data.dim": 10}, r"data.dim=10: 2 \+ data.pattern_sets=8 axes, and one direction more, need 11"),
        ({"data.delta_r": 0.61}, r"data.delta_r=0.61: must be at most sqrt\(\(1 - \|data.delta_d\|\) / 2\) = 0.6"),
        ({"data.delta_r": 0.32}, r"data.delta_r=0.32: patches confuse only above \(1 - data.delta_d\) / 4 = 0.32"),
        ({"data.confusing_patches": 5}, "data.confusing_patches=5: must be below data.positions=5"),
        ({"data.delta_d": 1.0}, r"data.delta_d=1.0: must be in \(-1, 1\)"),
        ({"data.test_samples": 401}, "data.test_samples=401: must be a multiple of 10, the number of clusters"),
    ],
)
def test_impossible_patterns_are_refused_by_name(small, changes, words):
    validate(config := theory(small))
    with pytest.raises(UserError, match=words):
        validate(override(config, changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data.positions": 15}, "data.positions=15: a collage is a square of patches; use 9 or 16"),
        ({"data.positions": 1, "data.places": "inner"}, "data.places='inner': no place of data.positions=1 is left"),
        ({"data.irrelevant": ()}, r"data.irrelevant=\(\): must be different classes, from 0 on, at least one"),
        ({"data.irrelevant": (1, 3)}, "class 3 is in data.discriminative too; leave it out of one"),
        ({"data.discriminative": (3, 3)}, "must be two different classes"),
        ({"data.directory": ""}, "data.directory is empty: name the folder"),
        (
            {"data.spurious_fraction": 0.9, "data.misleading": (1, 3)},
            r"data.misleading=\(1, 3\): class 3 is in data.discriminative too",
        ),
        (
            {"data.spurious_fraction": 0.9, "data.misleading": (1, 2)},
            r"data.irrelevant=\(1, 2\): all of them are in data.misleading",
        ),
        (
            {"data.spurious_fraction": 0.9, "data.positions": 1},
            "data.spurious_fraction=0.9: a digit that misleads needs a place of its own",
        ),
    ],
)
def test_impossible_collages_are_refused_by_name(small, digits, changes, words):
    validate(config := collage(small, digits))
    with pytest.raises(UserError, match=words):
        validate(override(config, changes))


def test_digits_that_cannot_make_collages_are_refused_in_a_line(small, tmp_path, digits):
    with pytest.raises(
        UserError, match=r"data.irrelevant=\(1, 5\): the images have no class 5, only 0 to 4; leave it out"
    ):
        drawn(collage(small, digits, **{"data.irrelevant": (1, 5)}), 8)
    write_digits(tmp_path, counts=COUNTS | {"t10k": (2, 1, 0, 1, 2)})
    with pytest.raises(
        UserError, match=r"t10k-labels-idx1-ubyte: no image of class 2, expected images of all 5 classes"
    ):
        drawn(collage(small, digits), 8)
    write_digits(tmp_path, shape=(3, 2))
    with pytest.raises(UserError, match=r"data.images='idx': its images are 3 x 2 pixels, and patches are square"):
        drawn(collage(small, digits), 8)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"\0\0\x0d\x03" + bytes(12))
    load.cache_clear()
    with pytest.raises(UserError, match="train-images-idx3-ubyte: starts with 00000d03, expected 00000803"):
        drawn(collage(small, digits), 8)
