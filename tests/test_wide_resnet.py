"""Wide ResNets and their mixture on patches, and the scenes and faces that they are trained on."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed.contracts import Batch, UserError
from routed.layer.dispatch import choose
from routed.layer.dispatch.direct import apart, apart_dense
from routed.layer.rule import SelectionRule, selection_rule
from routed.layer.selection import select
from routed.papers.chowdhury2023 import celeba, scenes, wide_resnet
from routed.papers.chowdhury2023.wide_resnet import Convolution, Trunk
from routed.plan import experiment
from routed.plan.checks import validate
from routed.plan.config import canonical
from routed.settings.tree import node_of, override
from routed.tasks import images, worlds
from routed.tasks.image_files import Images, load
from routed.training.samples import experts_per_token
from tests.conftest import build_model

#: Images of 8 x 8 pixels, so a last map of 2 x 2; three experts take two of its four patches.
WIDE = {
    "data.name": "scenes", "data.target": "class", "data.target_dim": 4, "data.clusters": 4, "data.scene": "vehicles",
    "data.image_side": 8, "data.samples": 24, "data.test_samples": 12, "batch_size": 6, "loss": "cross_entropy",
    "model": "wide_resnet_moe", "resnet.factor": 1, "experts.count": 3, "experts.width": 4,
    "selection.name": "patch_choice", "selection.patches": 2, "selection.patch_weights": "all",
    "selection.eval.name": "patch_choice", "selection.eval.patches": 2, "selection.eval.patch_weights": "all",
    "dispatch": "auto", "optimizer.momentum": 0.0, "mesh.run": 1, "seeds": 1, "steps": 2, "eval_every": 1,
    "shuffles": 0,
}  # fmt: skip


@pytest.fixture
def config(small):
    return override(small, WIDE)


def made(config, samples=5):
    """The model of a config, its parameters at the start, and random images."""
    model = build_model(canonical(config))
    x = jax.random.normal(jax.random.key(0), (samples, 8, 8, 3))
    label = jnp.arange(samples) % 4
    batch = Batch(x, jax.nn.one_hot(label, 4), label)
    params, state = jax.jit(model.init)(jax.random.key(1), batch)
    return model, params, state, batch


# --- the experiment ---


def test_the_smaller_side_has_a_fifth_of_the_images():
    """|log(5 ratio)|: 1,000 of 5,000 is 0, 5,000 of 20,000 is log 1.25, 1,000 of 20,000 log 4."""
    fifth = experiment.load("patch_wrn").fifth
    assert fifth((1000, 5000, 20000)) == (1000, 5000)
    assert fifth((4000, 8000, 12000, 16000, 20000)) == (4000, 20000)
    assert fifth((400, 2000, 10000)) == (2000, 10000)  # both pairs are a fifth: the larger
    assert fifth((4000, 8000, 12000, 16000)) == (4000, 16000)  # a quarter is nearest


def test_gates_of_equation_and_code_by_hand():
    """Scores 0, log 2, log 5 of one expert that takes two of three patches: shares 1/8, 2/8, 5/8 over all."""
    scores = jnp.log(jnp.array([[1.0], [2.0], [5.0]]))
    for gate, weights in (("all", [5 / 8, 2 / 8]), ("chosen", [5 / 7, 2 / 7])):
        routing = select(SelectionRule("patch_choice", patches=2, patch_weights=gate, group_size=3), scores)
        np.testing.assert_allclose(sorted(np.ravel(routing.weight), reverse=True)[:2], weights, rtol=1e-5)


# --- models ---


@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_is_that_of_xla(stride):
    x = jax.random.normal(jax.random.key(0), (2, 6, 6, 3))
    part = Convolution(5, 3, stride)
    params = part.init(jax.random.key(1), x)
    kernel = params["params"]["kernel"].reshape(3, 3, 3, 5)
    pad = [(1, 1)] * 2 if stride == 1 else [(0, 1)] * 2  # TensorFlow's "same"
    theirs = jax.lax.conv_general_dilated(x, kernel, (stride,) * 2, pad, dimension_numbers=("NHWC", "HWIO", "NHWC"))
    np.testing.assert_allclose(part.apply(params, x), theirs, rtol=1e-4, atol=1e-4)


def test_experts_side_by_side_compute_what_they_take():
    """Values and gradients are those of every expert on every token, masked."""
    keys = jax.random.split(jax.random.key(0), 3)
    rule = SelectionRule("patch_choice", patches=2, patch_weights="all", group_size=4)
    x, scores, kernel = (jax.random.normal(k, s) for k, s in zip(keys, ((12, 5), (12, 3), (3, 5, 2)), strict=True))

    def loss(compute, kernel, x, scores):
        y = compute(lambda own, rows: jnp.tanh(rows @ own), kernel, x, select(rule, scores))
        return (y**3).sum(), y

    got, expected = (
        jax.jit(jax.value_and_grad(lambda *args, c=c: loss(c, *args), (0, 1, 2), has_aux=True))(kernel, x, scores)
        for c in (apart, apart_dense)
    )
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    assert ((got[0][1] != 0).any(-1).reshape(3, 4, 3).sum(1) == 2).all()  # two of the four tokens of each sample


@pytest.mark.slow
def test_one_expert_on_the_whole_map_is_the_network_without_a_shortcut(config):
    """Filters of 3 x 3 on one patch that is the map, gate 1: the last convolution itself."""
    one = {"experts.count": 1, "experts.width": 64, "resnet.patch": 2, "resnet.filter": 3}
    taken = {
        f"selection.{where}{key}": value
        for where in ("", "eval.")
        for key, value in (("patches", 1), ("patch_weights", "one"))
    }
    config = override(config, one | taken | {"selection.no_gradient": True})
    model, params, state, batch = made(config)
    prediction = model.apply(params, state, batch, selection_rule(config.selection), "auto").prediction
    own = node_of(config).resnet
    x = Trunk(own, False, whole=False).apply(
        {"params": params["trunk"]["trunk"], "batch_stats": state["trunk"]}, batch.x
    )
    kernel = params["experts"]["Convolution_0"]["kernel"][0]
    y = Convolution(64).apply({"params": {"kernel": kernel}}, x)
    head = wide_resnet.Head(own, False, 4)
    theirs = head.apply({"params": params["trunk"]["head"], "batch_stats": state["head"]}, y)
    np.testing.assert_allclose(prediction, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["wide_resnet", "wide_resnet_moe"])
def test_statistics_move_in_training_and_are_used_at_evaluation(config, model):
    config = override(config, {"model": model})
    model, params, state, batch = made(config)
    rule = selection_rule(config.selection)
    trained = model.apply(params, state, batch, rule, "auto", jax.random.key(2))
    looked = model.apply(params, state, batch, rule, "auto")
    np.testing.assert_array_equal(jax.tree.leaves(looked.state)[0], jax.tree.leaves(state)[0])
    # .9 of the old mean, which is 0, and .1 of the batch's, over the first convolution's responses.
    first = (params.get("trunk") or params["experts"])["trunk"]["Convolution_0"]
    mean = Convolution(16).apply({"params": first}, batch.x).mean((0, 1, 2))
    np.testing.assert_allclose(trained.state["trunk"]["Activation_0"]["BatchNorm_0"]["mean"], 0.1 * mean, atol=1e-5)
    alone = model.apply(params, state, jax.tree.map(lambda a: a[:1], batch), rule, "auto")
    np.testing.assert_allclose(alone.prediction, looked.prediction[:1], atol=1e-5)


def test_flops_are_those_of_the_parameters(config):
    """2 x weights x positions of every convolution, and of the mixture what is taken. Map sides 8, 4, 2; factor 1."""
    # First 64 x 27 x 16; block 1: 64 x (144 + 144) x 16; block 2: 16 x (144 + 288 + 16) x 32; block 3: 4 x (288 + 576 +
    # 32) x 64; 256.
    whole = 2 * (64 * 27 * 16 + 64 * 288 * 16 + 16 * 448 * 32 + 4 * 896 * 64 + 64 * 4)
    assert wide_resnet.flops(override(config, {"model": "wide_resnet"}), routed=False) == (whole, 2 * 4 * 576 * 64)
    # The mixture: 3 experts x 64 channels x (2 patches x 4 filters + 4 scores); no shortcut; 12 channels go to the
    # head.
    last = 2 * 3 * 64 * (2 * 4 + 4)
    rest = 2 * (64 * 27 * 16 + 64 * 288 * 16 + 16 * 448 * 32 + 4 * 288 * 64 + 12 * 4)
    assert wide_resnet.flops(config, routed=True) == (rest + last, last)
    assert experts_per_token(config) == 3 * 2 / 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"resnet.patch": 3}, "resnet.patch=3: does not divide the 2 positions of a side of the last map; use 2"),
        ({"selection.patches": 5}, "selection.patches=5: is more than the patches of a sample"),
        ({"selection.name": "soft"}, "selection.name='soft': experts of model='wide_resnet_moe' take patches"),
        ({"router.name": "hyper"}, "router.name='hyper': reads labels or has a state, which a map has not"),
        ({"router.name": "decisive"}, "router.name='decisive': reads labels or has a state"),
        ({"dispatch": "ragged"}, "dispatch='ragged': model='wide_resnet_moe' has 'slots'"),
        ({"data.name": "gmm", "data.target": "constant", "loss": "squared"}, "model='wide_resnet_moe'"),
    ],
)
def test_what_does_not_fit_is_refused(config, changes, words):
    with pytest.raises(UserError, match="config key") as error:
        validate(override(config, changes))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_narrow_experts_compute_every_patch_on_a_cpu():
    """8 experts of 5 neurons on 320 patches, three a patch: 8 x 5 products a number are fewer than 3 x (5 + 16)."""
    told = {"taken": 3.0, "width": 5.0}
    assert choose("patch_choice", 320, 1, 8, True, "cpu", **told)[0] == "dense"
    assert choose("patch_choice", 320, 1, 8, True, "gpu", **told)[0] == "slots"
    assert choose("patch_choice", 320, 1, 8, True, "cpu", taken=3.0, width=50.0)[0] == "slots"


# --- scenes ---


def coloured(count):
    """8 x 8 images, each of one colour: that of its number."""
    x = np.broadcast_to(np.arange(count, dtype=np.uint8)[:, None, None, None] * 10, (count, 8, 8, 3))
    return Images(x, np.arange(count, dtype=np.int32) % 4, x + 1, np.arange(count, dtype=np.int32) % 4)


def world_of(config, monkeypatch):
    """A world of those images, its data node, and its samples' pixels in [0, 255]."""
    load.cache_clear()
    scenes._moments.cache_clear()
    monkeypatch.setattr(scenes, "load", lambda name, directory: coloured(8))
    monkeypatch.setattr(scenes, "_moments", lambda name, directory: (np.zeros(3, np.float32), np.ones(3, np.float32)))
    data = node_of(config).data
    world = worlds.draw_world(scenes.TASK, jax.random.key(0), data, 24)
    world = world._replace(shared=scenes.shared_arrays(data))
    batches = worlds.examples(scenes.TASK, world, 24, data), worlds.test_batch(scenes.TASK, world, data)
    return [(np.rint(np.asarray(b.x) * 255).astype(int), np.asarray(b.cluster)) for b in batches]


@pytest.mark.slow
def test_vehicles_are_in_one_quadrant_among_others(config, monkeypatch):
    """Classes 0 and 2 are told, 1 and 3 fill: image i has the colour 10 i (tests 10 i + 1) and the class i % 4."""
    config = override(config, {"data.objects": (0, 2), "data.clusters": 2, "data.target_dim": 2})
    for tests, (x, label) in enumerate(world_of(config, monkeypatch)):
        quadrants = x.reshape(-1, 2, 4, 2, 4, 3).swapaxes(2, 3).reshape(-1, 4, 48)
        assert (quadrants == quadrants[:, :, :1]).all()  # each of one image
        number, rest = np.divmod(quadrants[:, :, 0], 10)
        assert (rest == tests).all()
        told = np.isin(number % 4, (0, 2))
        assert (told.sum(1) == 1).all() and ((number[told] % 4) // 2 == label).all()
        assert tests or len(set(told.argmax(1))) == 4  # anywhere
    assert (label == np.arange(12) % 2).all()  # test images in turn


def test_an_object_is_anywhere_on_the_tiles_of_another_image(config, monkeypatch):
    config = override(config, {"data.scene": "backgrounds"})
    (x, label), _ = world_of(config, monkeypatch)
    number = x[..., 0] // 10
    for one, own in zip(number, label, strict=True):
        values, counts = np.unique(one, return_counts=True)
        assert len(values) <= 2 and own in values % 4
        if len(values) == 2:  # 16 of the 64 pixels are the object's, in a square
            rows, columns = np.nonzero(one == values[counts.argmin()])
            assert counts.min() == 16 and np.ptp(rows) == np.ptp(columns) == 3


def test_colours_agree_in_training_and_mislead_in_tests(config, monkeypatch):
    """share s = .75 of training samples are of their class's colour, and of test samples of another's."""
    config = override(config, {"data.scene": "plain", "data.spurious_fraction": 0.75, "data.test_samples": 400})
    data, drawn = node_of(config).data, {}
    monkeypatch.setattr(scenes, "load", lambda name, directory: coloured(8))
    for name, key in (("train", jax.random.key(1)), ("test", None)):
        drawn[name] = scenes.draw((), key, jax.random.key(2), 400, data).colour
    assert abs((drawn["train"] == 0).mean() - 0.75) < 0.07 and abs((drawn["test"] == 0).mean() - 0.25) < 0.07
    plain, tinted = (jnp.full((4, 8, 8, 3), 0.5) + t for t in (0, scenes._tints(4)[:, None, None]))
    assert (
        jnp.abs(tinted - plain).max() == pytest.approx(scenes.TINT)
        and len({*map(tuple, scenes._tints(4).round(3).tolist())}) == 4
    )


def test_wrong_scenes_are_refused(config, monkeypatch):
    monkeypatch.setattr(scenes, "load", lambda name, directory: coloured(8))
    for changes, words in (
        ({"data.objects": (0, 9), "data.clusters": 2}, "data.objects=(0, 9): the images have no class 9"),
        ({"data.objects": (0, 1, 2, 3)}, "no class is left to fill"),
        ({"data.clusters": 3}, "set data.clusters=4"),
        ({"data.image_side": 6}, "data.image_side=6: must divide the 8 pixels"),
    ):
        with pytest.raises(UserError) as error:
            scenes.source(node_of(override(config, changes)).data)
        assert words in str(error.value)
    with pytest.raises(UserError, match=r"use data\.name=scenes"):
        images.check_directory(override(config, {"data.name": "images", "data.images": "celeba"}))


# --- faces ---


def prepare_faces(folder):
    """CelebA as TFDS prepares it, 64 and 32 flat faces: face i has pixels i, and the bits of i as attributes."""
    tfds = pytest.importorskip("tensorflow_datasets")
    picture = pytest.importorskip("PIL.Image")
    names = ("Smiling", "Eyeglasses", "Black_Hair", "Blond_Hair")

    class CelebA(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("2.1.0")
        name = "celeb_a"
        __module__ = "celeb_a"  # of no package, else TFDS wants importlib_resources, which it does not install

        def _info(self):
            features = {
                "image": tfds.features.Image(shape=(70, 66, 3)),
                "attributes": {name: np.bool_ for name in names},
            }
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(64), "test": self._generate_examples(32)}

        def _generate_examples(self, count):
            for i in range(count):
                picture.fromarray(np.full((70, 66, 3), i, np.uint8)).save(png := io.BytesIO(), "png")
                png.seek(0)
                yield i, {"image": png, "attributes": {name: bool(i >> b & 1) for b, name in enumerate(names)}}

    CelebA(data_dir=str(folder), file_format="array_record").download_and_prepare()


def test_faces_of_tfds(tmp_path):
    prepare_faces(tmp_path)
    celeba.load.cache_clear()
    found = celeba.load(str(tmp_path), ("Smiling", "Eyeglasses"), 0.0)
    assert found.train_x.shape == (64, 64, 64, 3) and len(found.test_y) == 32
    number = found.train_x[:, 5, 7, 1]
    np.testing.assert_array_equal(found.train_y, number % 4)  # the two lowest bits
    np.testing.assert_array_equal(np.sort(number), np.arange(64))
    misled = celeba.load(str(tmp_path), ("Smiling",), 2 / 3)
    # Of 64 faces 8 have the hair that goes with their class, and 8 the other: 8 and 4 are kept. Of 32 faces 4 and 4: 2
    # and 4.
    for y, x, share in ((misled.train_y, misled.train_x, 2 / 3), (misled.test_y, misled.test_x, 1 / 3)):
        number = x[:, 0, 0, 0].astype(int)
        black, blond = number >> 2 & 1, number >> 3 & 1
        assert (black + blond == 1).all() and (y == number % 2).all()
        assert (black[y == 1].mean(), blond[y == 0].mean()) == pytest.approx((share, share))
    with pytest.raises(UserError, match="has no attribute Hat"):
        celeba.load(str(tmp_path), ("Hat",), 0.0)
    with pytest.raises(UserError, match=r"no celeb_a/VERSION/dataset_info\.json in it"):
        celeba.load(str(tmp_path / "elsewhere"), ("Smiling",), 0.0)


def test_a_face_is_the_mean_of_its_middle_square():
    face = np.zeros((128, 200, 3), np.uint8)
    face[:, 36:164] = np.arange(128, dtype=np.uint8)[
        :, None, None
    ]  # rows 0, 1 -> mean .5, rounded to even 0; 2, 3 -> 2.5 -> 2
    small = celeba.cut(face)
    assert small.shape == (64, 64, 3) and small[:3, 0, 0].tolist() == [0, 2, 4] and (small == small[:, :1]).all()
