"""Images: files in their real formats, the pairs made of them, and the router that sees them."""

import gzip
import io
import json
import pathlib
import shutil
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed.contracts import UserError
from routed.engine.compilation import stack_traced
from routed.layer.rule import selection_rule
from routed.metrics import router as weights
from routed.plan.checks import validate
from routed.plan.config import base, problem_of, traced
from routed.routers.features import Convolutions
from routed.settings.tree import override
from routed.tasks import image_files, images, worlds
from routed.tasks.image_files import Images, digest, load
from routed.training import program, samples
from tests.conftest import build_model

RNG = np.random.default_rng(0)
SPLITS = ("train", "t10k")


def pictures(count, *shape):
    return RNG.integers(0, 256, (count, *shape), dtype=np.uint8)


@pytest.fixture(autouse=True)
def forget():
    """Files change under the same name here."""
    for cached in (load, images._shared, images.digest_of_files):
        cached.cache_clear()


# --- readers ---


def idx(array, type=8):
    header = bytes((0, 0, type, array.ndim)) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return header + array.tobytes()


def write_idx(folder, names="{}-{}-idx{}-ubyte", pack=bytes):
    """Six training and three test images of three classes; returns what was written."""
    written = []
    for split, count in zip(SPLITS, (6, 3), strict=True):
        x, y = pictures(count, 5, 4), np.arange(count, dtype=np.uint8) % 3
        for what, array in (("images", x), ("labels", y)):
            (folder / names.format(split, what, array.ndim)).write_bytes(pack(idx(array)))
        written += [x[..., None], y]
    return written


def write_cifar(folder, kind):
    """Two images a class in each file."""
    folder.mkdir(parents=True, exist_ok=True)
    names, classes = (
        ([f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"], 10)
        if kind == "cifar10"
        else (["train", "test"], 100)
    )
    written = []
    for name in names:
        y = RNG.permutation(np.arange(2 * classes, dtype=np.uint8) % classes)
        x = pictures(len(y), 32, 32, 3)
        coarse = [y[:, None] // 5] if kind == "cifar100" else []
        planes = [x[..., c].reshape(len(x), -1) for c in range(3)]  # red, green, blue; rows from the top
        (folder / f"{name}.bin").write_bytes(np.concatenate([*coarse, y[:, None], *planes], 1).tobytes())
        written.append((x, y))
    return [np.concatenate(parts) for part in (written[:-1], written[-1:]) for parts in zip(*part, strict=True)]


def same(loaded, written):
    for ours, theirs in zip(loaded, written, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert [a.dtype for a in loaded] == [np.uint8, np.int32] * 2


@pytest.mark.parametrize(
    ("names", "pack"),
    [("{}-{}-idx{}-ubyte", bytes), ("{}-{}-idx{}-ubyte.gz", gzip.compress), ("{}-{}.idx{}-ubyte", bytes),
     ("{}-{}.idx{}-ubyte.gz", bytes)],
)  # fmt: skip
def test_idx(tmp_path, names, pack):
    written = write_idx(tmp_path, names, pack)
    same(load("idx", str(tmp_path)), written)


@pytest.mark.parametrize(("kind", "nested"), [("cifar10", "cifar-10-batches-bin"), ("cifar100", "cifar-100-binary")])
def test_cifar_binary(tmp_path, kind, nested):
    written = write_cifar(tmp_path / nested, kind)
    same(load(kind, str(tmp_path / nested)), written)
    same(load(kind, str(tmp_path)), written)


def test_generated_images_have_every_class_and_can_be_told_apart():
    made = load("patterns", "")
    assert made.train_x.shape == (2000, 16, 16, 3) and np.bincount(made.test_y).tolist() == [50] * 10
    flat = made.train_x.reshape(2000, -1).astype(float)
    means = np.stack([flat[made.train_y == c].mean(0) for c in range(10)])
    tests = made.test_x.reshape(500, -1)
    nearest = ((tests[:, None] - means[None]) ** 2).sum(-1).argmin(1)
    assert (nearest == made.test_y).mean() > 0.6
    assert digest(made) == digest(load.__wrapped__("patterns", "elsewhere"))  # no clock, no folder


def damaged(path, change):
    path.write_bytes(change(path.read_bytes()))


IDX_DAMAGE = {
    "a missing file": (
        lambda f: (f / "t10k-labels-idx1-ubyte").unlink(),
        r"data\.directory=.*: no file t10k-labels-idx1-ubyte in it; put the four IDX files of MNIST",
    ),
    "another magic number": (
        lambda f: damaged(f / "train-images-idx3-ubyte", lambda b: b"\0\0\x0d\x03" + b[4:]),
        r"train-images-idx3-ubyte: starts with 00000d03, expected 00000803 .*; fetch again the four",
    ),
    "labels as images": (
        lambda f: shutil.copy(f / "train-labels-idx1-ubyte", f / "train-images-idx3-ubyte"),
        r"train-images-idx3-ubyte: starts with 00000801, expected 00000803",
    ),
    "an empty file": (
        lambda f: (f / "train-images-idx3-ubyte").write_bytes(b""),
        r"train-images-idx3-ubyte: starts with nothing, expected 00000803",
    ),
    "a truncated file": (
        lambda f: damaged(f / "train-images-idx3-ubyte", lambda b: b[:-1]),
        r"train-images-idx3-ubyte: 135 bytes, expected 136 as its header says \(6, 5, 4\)",
    ),
    "a number of images with the highest bit": (
        lambda f: damaged(f / "train-images-idx3-ubyte", lambda b: b[:4] + b"\xff" * 4 + b[8:]),
        r"expected 85899345916 as its header says \(4294967295, 5, 4\)",
    ),
    "a file that is too long": (
        lambda f: damaged(f / "t10k-labels-idx1-ubyte", lambda b: b + b"\0"),
        r"t10k-labels-idx1-ubyte: 12 bytes, expected 11 as its header says \(3,\)",
    ),
    "a truncated gzip": (
        lambda f: damaged(f / "train-images-idx3-ubyte", lambda b: gzip.compress(b)[:-9]),
        r"train-images-idx3-ubyte: damaged gzip, expected a whole one",
    ),
    "fewer labels than images": (
        lambda f: (f / "train-labels-idx1-ubyte").write_bytes(idx(np.arange(5, dtype=np.uint8))),
        r"train-labels-idx1-ubyte: 5 labels, expected 6 as .*train-images-idx3-ubyte has images",
    ),
    "a class without images": (
        lambda f: (f / "train-labels-idx1-ubyte").write_bytes(idx(np.array([0, 1, 3, 0, 1, 3], np.uint8))),
        r"train-labels-idx1-ubyte: no image of class 2, expected images of all 4 classes \(1 have none\)",
    ),
    "a label that training does not have": (
        lambda f: (f / "t10k-labels-idx1-ubyte").write_bytes(idx(np.array([0, 1, 7], np.uint8))),
        r"t10k-labels-idx1-ubyte: label 7, expected 0 to 2",
    ),
    "test images of another size": (
        lambda f: (f / "t10k-images-idx3-ubyte").write_bytes(idx(pictures(3, 4, 5))),
        r"t10k-labels-idx1-ubyte: the images beside it are \(4, 5, 1\), those of .* are \(5, 4, 1\)",
    ),
}


@pytest.mark.parametrize("name", IDX_DAMAGE)
def test_idx_errors(tmp_path, name):
    write_idx(tmp_path)
    damage, message = IDX_DAMAGE[name]
    damage(tmp_path)
    with pytest.raises(UserError, match=message):
        load("idx", str(tmp_path))


CIFAR_DAMAGE = [
    ("cifar10", "data_batch_3.bin", lambda b: b[:-1], r"data_batch_3\.bin: 61459 bytes, expected a multiple of 3073"),
    ("cifar10", "test_batch.bin", lambda b: b"", r"test_batch\.bin: 0 bytes, expected a multiple of 3073"),
    (
        "cifar10",
        "test_batch.bin",
        lambda b: b"\x0a" + b[1:],
        r"test_batch\.bin: label 10, expected 0 to 9; fetch again",
    ),
    ("cifar10", "test_batch.bin", lambda b: b[:3073], r"test_batch\.bin: no image of class \d, .* all 10 classes \(9"),
    ("cifar100", "train.bin", lambda b: b[:2] + b[3:], r"train\.bin: \d+ bytes, expected a multiple of 3074"),
    ("cifar100", "train.bin", lambda b: b[:1] + b"\x64" + b[2:], r"train\.bin: label 100, expected 0 to 99"),
]


@pytest.mark.parametrize(("kind", "file", "change", "message"), CIFAR_DAMAGE)
def test_cifar_errors(tmp_path, kind, file, change, message):
    write_cifar(tmp_path, kind)
    damaged(tmp_path / file, change)
    with pytest.raises(UserError, match=message):
        load(kind, str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "first"), [("cifar10", "data_batch_1.bin"), ("cifar100", "train.bin"), ("idx", "train-images-idx3-ubyte")]
)
def test_an_empty_folder_says_what_to_fetch(tmp_path, kind, first):
    with pytest.raises(UserError, match=rf"no file {first} in it; put the .* there, or name their folder"):
        load(kind, str(tmp_path))


def prepare(folder):
    """A small data set as TFDS prepares it."""
    tfds = pytest.importorskip("tensorflow_datasets")
    picture = pytest.importorskip("PIL.Image")
    x, y = pictures(9, 4, 4, 3), np.arange(9) % 3

    class Tiny(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.2.0")
        name = "tiny"
        __module__ = "tiny"  # of no package, else TFDS wants importlib_resources, which it does not install

        def _info(self):
            features = {"image": tfds.features.Image(shape=(4, 4, 3)), "label": tfds.features.ClassLabel(num_classes=3)}
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(range(6)), "test": self._generate_examples(range(6, 9))}

        def _generate_examples(self, which):
            for i in which:
                picture.fromarray(x[i]).save(png := io.BytesIO(), "png")
                png.seek(0)
                yield i, {"image": png, "label": int(y[i])}

    builder = Tiny(data_dir=str(folder), file_format="array_record")
    builder.download_and_prepare()
    return x, y


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    return folder, *prepare(folder)


def test_tfds(prepared):
    folder, x, y = prepared
    loaded = load("tfds:tiny", str(folder))
    assert loaded.train_x.shape == (6, 4, 4, 3) and len(loaded.test_y) == 3
    written = {image.tobytes(): label for image, label in zip(x, y, strict=True)}  # TFDS shuffles
    for images_, labels in ((loaded.train_x, loaded.train_y), (loaded.test_x, loaded.test_y)):
        assert [written[image.tobytes()] for image in images_] == labels.tolist()


def test_tfds_errors(tmp_path, prepared):
    with pytest.raises(UserError, match=r"no tiny/VERSION/dataset_info\.json in it; name the data_dir of a TFDS"):
        load("tfds:tiny", str(tmp_path))
    copy = shutil.copytree(prepared[0], tmp_path / "copy")
    info = next(copy.rglob("dataset_info.json"))
    original = info.read_text()
    info.write_text(json.dumps(json.loads(original) | {"fileFormat": "tfrecord"}))
    with pytest.raises(
        UserError, match=r"prepared as tfrecord; convert it .*convert_format .*--out_file_format=array_record"
    ):
        load("tfds:tiny", str(copy))
    described = json.loads(original)
    info.write_text(json.dumps(described | {"splits": [s for s in described["splits"] if s["name"] == "train"]}))
    with pytest.raises(UserError, match=r"has the splits train, expected train and test"):
        load("tfds:tiny", str(copy))
    info.write_text(original)
    file = next(copy.rglob("tiny-test.array_record*"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2 - 50 : len(content) // 2 + 50] = b"x" * 100
    file.write_bytes(bytes(content))
    with pytest.raises(UserError, match=r"split test cannot be read .*; prepare the data set again"):
        load("tfds:tiny", str(copy))
    file.unlink()
    with pytest.raises(UserError, match=r"1 shards of test missing, expected all, first .*tiny-test"):
        load("tfds:tiny", str(copy))


def test_the_digest_changes_with_every_array_and_not_with_the_file(tmp_path):
    write_idx(tmp_path)
    loaded = load("idx", str(tmp_path))
    packed = tmp_path / "packed"
    packed.mkdir()
    for file in tmp_path.glob("*-ubyte"):
        (packed / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
    assert digest(load("idx", str(packed))) == digest(loaded)
    for i, array in enumerate(loaded):
        changed = array.copy()
        changed.reshape(-1)[-1] ^= 1
        assert digest(loaded._replace(**{Images._fields[i]: changed})) != digest(loaded)
    turned = loaded._replace(train_x=loaded.train_x.reshape(6, 4, 5, 1))
    assert digest(turned) != digest(loaded)


# --- pairs ---


@pytest.fixture
def config(small, tmp_path):
    """Uneven classes: four training and three test images of 0, one fewer of 1, and so on."""
    for split, most in zip(SPLITS, (4, 3), strict=True):
        y = RNG.permutation(np.repeat(np.arange(2), (most, most - 1))).astype(np.uint8)
        (tmp_path / f"{split}-images-idx3-ubyte").write_bytes(idx(pictures(len(y), 6, 5)))
        (tmp_path / f"{split}-labels-idx1-ubyte").write_bytes(idx(y))
    changes = {
        "data.name": "images", "data.images": "idx", "data.directory": str(tmp_path), "data.target": "linear",
        "data.clusters": 2, "data.target_dim": 1, "data.test_samples": 6, "router.name": "cnn", "router.width": 3,
    }  # fmt: skip
    return override(small, changes)


def world_of(config, seed=0, pool=32):
    drawn = worlds.draw_world(images.TASK, jax.random.key(seed), config.data, pool)
    return drawn._replace(shared=jax.tree.map(jnp.asarray, images.shared_arrays(config.data)))


def traced_of(config):
    return jax.tree.map(lambda a: jnp.asarray(a[0]), stack_traced([traced(config)]))


def test_a_batch_by_hand(config):
    loaded, world = load("idx", config.data.directory), world_of(config)
    mean, std = (loaded.train_x / 255).mean(), (loaded.train_x / 255).std()
    batch = worlds.train_batch(images.TASK, world, jax.random.key(1), 20, config.data)
    for i in range(20):
        x = np.rint(((np.asarray(batch.x[i]) * std) + mean) * 255)
        place = next(j for j, image in enumerate(loaded.train_x) if (image == x).all())
        assert batch.cluster[i] == loaded.train_y[place]
        assert float(batch.y[i, 0]) == pytest.approx(
            np.dot(np.asarray(world.fixed)[loaded.train_y[place]], np.asarray(batch.side[i])), abs=1e-5
        )
    np.testing.assert_array_equal(images.TASK.bayes(world, batch, config.data), batch.y)


def test_every_channel_is_normalised_on_its_own():
    pixels = pictures(2500, 3, 3, 2)
    pixels[..., 1] //= 3
    mean, std = images.moments(pixels)
    np.testing.assert_allclose(mean, (pixels / 255).mean((0, 1, 2)), rtol=1e-5)
    np.testing.assert_allclose(std, (pixels / 255).std((0, 1, 2)), rtol=1e-5)
    assert images.moments(np.full((4, 2, 2, 1), 7, np.uint8))[1] == 1


def test_test_samples_take_every_class_equally_often_and_no_image_before_its_turn(config):
    world = world_of(config)
    batch = worlds.test_batch(images.TASK, world, config.data)
    assert batch.cluster.tolist() == [0, 1, 0, 1, 0, 1]
    loaded = load("idx", config.data.directory)
    shown = np.asarray(world.shared.pixels)[np.asarray(world.test.image)]
    rows = [next(j for j, image in enumerate(loaded.test_x) if (image == one).all()) for one in shown]
    assert len(set(rows[:4])) == 4 and rows[4:] == rows[:2]  # two images of each class, then again
    assert not np.allclose(batch.side[0], batch.side[4])


def test_a_trace_knows_the_classes_of_the_test_images(config):
    """Three images of each of two classes, in turn."""
    known = samples.traced(config)["choices"]
    assert known["labels"]["cluster"].tolist() == [0, 1] * 3 and known["sequence"].tolist() == [*range(6)]


def test_training_images_come_in_random_order_each_once_before_any_again(config):
    orders = [np.asarray(world_of(config, seed, 14).train.image) for seed in (0, 1)]
    for order in orders:
        assert sorted(order[:7]) == list(range(7)) and (order[7:] == order[:7]).all()
    assert (orders[0] != orders[1]).any()


def test_a_larger_pool_keeps_the_samples_of_a_smaller_one(config):
    few, many = world_of(config, 3, 9), world_of(config, 3, 21)
    np.testing.assert_array_equal(few.train.image, many.train.image[:9])
    np.testing.assert_array_equal(few.train.vector, many.train.vector[:9])
    np.testing.assert_array_equal(few.test.vector, many.test.vector)


def test_fresh_samples_are_training_images_with_new_vectors(config):
    config = override(config, {"data.fresh": True})
    world = world_of(config)
    keys = jax.random.split(jax.random.key(5), 2)
    a, b = (images.TASK.draw(world.fixed, key, key, 200, config.data) for key in keys)
    assert set(a.image.tolist()) == set(range(7)) and (a.image != b.image).any()
    assert len(np.unique(np.asarray(a.vector), axis=0)) == 200


def test_variance_is_that_of_the_target(config):
    config = override(config, {"data.test_samples": 20000})
    world = world_of(config)
    y = np.asarray(worlds.test_batch(images.TASK, world, config.data).y)
    assert float(images.TASK.variance(world, config.data)) == pytest.approx((y**2).mean(), rel=0.03)


# --- the router ---


def test_convolutions_are_those_of_flax_and_blocks_change_nothing():
    x = jax.random.normal(jax.random.key(0), (150, 7, 6, 3))
    features = Convolutions(2, 4)
    params, apply = jax.jit(features.init)(jax.random.key(1), x)["params"], jax.jit(features.apply)
    expected = x
    for layer in range(2):
        kernel = params[f"kernel_{layer}"]
        conv = nn.Conv(kernel.shape[1], (3, 3), (2, 2), padding=[(0, 2 if n % 2 else 1) for n in expected.shape[1:3]])
        weights = kernel.reshape(3, 3, expected.shape[-1], -1)
        expected = nn.relu(conv.apply({"params": {"kernel": weights, "bias": params[f"bias_{layer}"]}}, expected))
    ours = apply({"params": params}, x)
    assert ours.shape == (150, 8)
    np.testing.assert_allclose(ours, expected.mean((1, 2)), atol=1e-5)
    np.testing.assert_allclose(ours[:40], apply({"params": params}, x[:40]), atol=1e-6)


def test_experts_see_the_vector_and_the_features_the_router_the_image_only(config):
    world, model = world_of(config), build_model(config)
    batch = worlds.test_batch(images.TASK, world, config.data)
    params, state = jax.jit(model.init)(jax.random.key(0), batch)
    assert weights.first_layer(params["router"]) is None
    assert (
        params["experts"]["Dense_0"]["kernel"].shape[1] == 3 + 6
    )  # the vector, and twice the filters of the first layer

    @jax.jit
    def found(params, batch):
        y, sites, _ = model.apply(params, state, batch, selection_rule(config.selection), "dense", None)
        return y, sites["layer"].routing.scores

    def outputs(params, batch):
        return jax.tree.map(np.asarray, found(params, batch))

    y, scores = outputs(params, batch)
    moved_y, moved_scores = outputs(params, batch._replace(side=batch.side + 1))
    np.testing.assert_array_equal(moved_scores, scores)
    assert (moved_y != y).all()
    other = batch._replace(x=batch.x[::-1])
    assert (outputs(params, other)[0] != y).any()
    blind = jax.tree.map(jnp.zeros_like, params["router"]["features"])
    params = params | {"router": params["router"] | {"features": blind}}
    for a, b in zip(outputs(params, other), outputs(params, batch), strict=True):
        np.testing.assert_array_equal(a, b)  # without features nothing is left of the image


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_router_keeps_its_convolutions_bit_for_bit(config, frozen):
    config = override(config, {"router.frozen": frozen, "optimizer.weight_decay": 0.1, "steps": 4, "eval_every": 4})
    one, shared = program.make_program(config, samples.build(config, 8)), images.shared_arrays(config.data)
    shared, traced = jax.tree.map(jnp.asarray, shared), traced_of(config)
    world, before = jax.jit(partial(program.start, one))(0, traced, shared)
    after = jax.jit(partial(program.advance, one))(4, 0, traced, world, before, (), shared)
    after = jax.jit(partial(program.record, one))(0, traced, world, after, shared)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), before["params"], after["params"])
    features = jax.tree.leaves(same["router"]["features"])
    assert len(features) == 4 and all(features) is frozen and same["router"]["kernel"] is frozen
    assert not any(jax.tree.leaves(same["experts"]))
    assert float(after["history"]["router/params_changed"][1]) == (not frozen)


def test_arms_without_features_see_the_vector_only(config):
    for name in ("oracle", "hash"):
        model = build_model(override(config, {"router.name": name}))
        batch = worlds.test_batch(images.TASK, world_of(config), config.data)
        params, _ = jax.eval_shape(model.init, jax.random.key(0), batch)
        assert params["experts"]["Dense_0"]["kernel"].shape[1] == 3


# --- settings ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.images": "png"}, r"data\.images='png': must be one of idx, cifar10, cifar100, patterns, tfds:NAME"),
        ({"data.images": "tfds:"}, r"data\.images='tfds:'"),
        ({"data.directory": ""}, r"data\.directory is empty: name the folder with the files of data\.images='idx'"),
        (
            {"router.name": "linear"},
            r"router\.name='linear': .* the tokens of .* are images; use one of conv, cnn, hash",
        ),
        (
            {"data.name": "gmm"},
            r"router\.name='cnn': routes images, the tokens of data\.name='gmm' are rows; use one of linear",
        ),
        ({"data.target": "constant"}, r"data\.name='images' has the targets linear"),
    ],
)
def test_settings_that_do_not_fit(config, changes, message):
    validate(config)
    with pytest.raises(UserError, match=message):
        validate(override(config, changes))


def test_the_number_of_classes_is_checked_when_files_are_read(config):
    config = override(config, {"data.clusters": 3})
    validate(config)  # reads no file
    for asked in (problem_of(config).shared_arrays, problem_of(config).digest):
        with pytest.raises(UserError, match=r"data\.clusters=3: .* have 2 classes; set data\.clusters=2"):
            asked(config)


def test_config_json_names_the_images_by_their_content(config, tmp_path):
    said = problem_of(config).digest(config)
    assert said == f"images idx {digest(load('idx', config.data.directory))}"
    for file in (elsewhere := tmp_path / "copy", pathlib.Path(config.data.directory)):
        elsewhere.mkdir(exist_ok=True)
        for part in file.glob("*-ubyte"):
            shutil.copy(part, elsewhere / part.name)
    moved = override(config, {"data.directory": str(elsewhere)})
    assert problem_of(moved).digest(moved) == said
    assert problem_of(base()).digest(base()) == "generated from the seed"
    assert [name for name, one in image_files.SETS.items() if not one.files] == ["patterns"]


def test_images_of_another_type_are_refused(monkeypatch):
    """NaN among them would be no number of 0 to 255."""
    part = image_files.Split(np.full((2, 4, 4, 1), np.nan), np.arange(2), "mine")
    monkeypatch.setitem(image_files.SETS, "own", image_files.ImageSet(lambda folder: (part, part, 2)))
    with pytest.raises(UserError, match="mine: pixels of type float64, expected uint8, from 0 to 255"):
        load("own", "")
