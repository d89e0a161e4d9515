"""Does a wide ResNet learn from fewer images if the experts of its last layer pick which patches of the map to look at?

Question. Chowdhury et al. (2023, 5.2 and A) replace the last convolution of a 10-layer wide ResNet by a patch-level
mixture with as many weights: each expert takes l of the n patches of the last map. They report more accuracy from
fewer images, less so where objects fill the image (CIFAR-10) than where objects are a small part of it (on
backgrounds, in quadrants), robustness to a spurious attribute, and .58 of the training FLOPs. They compare the mixture
only with the network without it. Here the same mixture also has a router that stays as it began, patches picked at
random, and more and fewer patches a head, up to all of them: how much of the gain is the choice?

    routed run --config=patch_wrn --config.data.directory=DIR           # fig14: CIFAR-10
    routed run --config=patch_wrn:fig15 --config.data.directory=DIR     # on backgrounds
    routed run --config=patch_wrn:fig16 --config.data.directory=DIR     # vehicles among animals
    routed run --config=patch_wrn:patches --config.data.directory=DIR   # l from 1 to n, fig16's data
    routed run --config=patch_wrn:spurious --config.data.directory=DIR  # a misleading colour, fig16's data
    routed run --config=patch_wrn:gate --config.data.directory=DIR      # equation and released code, fig16's data
    routed run --config=patch_wrn:fig10 --config.data.directory=DATA_DIR # CelebA: smiling (fig11, fig12, table2)
    routed run --config=patch_wrn:smoke                                 # artificial images, no files

DIR is the folder with CIFAR-10's binary version, DATA_DIR a data_dir in which TFDS prepared celeb_a. Scales: smoke
(artificial images), default (2 CPU cores: images halved, factor 1), gpu (as they are, factor 4), paper (factor 10).

From the paper: 10 layers; k = 4, patches of one position of the map, l = 16 of 64 (CIFAR); k = 8, patches of a
sixteenth of the map, l = 2 of 16, filters 3 x 3 (CelebA); weights of the router N(0, 1e-4^2); the last block's
shortcut falls away; SGD .1 without momentum, batches of 128, no augmentation. Gates are the released code's: a softmax
over *all* patches, of which the l largest are kept (selection.patch_weights=all). `chosen` is the equation's softmax
over the l chosen patches. fig15 keeps l / n = 1/4, where its released script has 2 of 64.

Rules where they are silent, or where two cores ask for less. None compares learned with another arm; nothing tuned.
  weights     experts have as many as the convolution that they replace, as the paper says: 9 x 64 factor filters of 1
              x 1, in all. The released code has a ninth of that on CIFAR.
  batches     drawn with replacement; 64 at the default scale.
  fewer       the mixture against the network on five times as many images, as the paper says.
  horizon     `gate.horizon` 1: the number of steps belongs to the protocol.
  effect      smallest effect of interest: one point of accuracy. seeds: 600 to 604.

Expected beforehand: the mixture above the network on vehicles, where a quarter of the map decides, about equal on
CIFAR-10; a learned router above a frozen router where the object's place varies; random patches below. Gates: level.

Found: docs/results/README.md, docs/decisions/chowdhury2023.md. Cost: 60 runs a figure of CIFAR-10, 69 minutes planned
for one loaded core (docs/measurements/figures.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from ml_collections import ConfigDict

import routed.papers.chowdhury2023  # noqa: F401 (parts of the paper)
from routed.analysis.claims import FROZEN, LEARNED, Claim, Writer
from routed.plan import Figure, Point, make_config, product

ARMS = ("learned", "frozen", "random_patches", "wide_resnet")
WRN, RANDOM = {"arm": "wide_resnet"}, {"arm": "random_patches"}

#: Filters of the last block for a factor of 1, and weights of a 3 x 3 filter for each channel.
WIDTH, WINDOW = 64, 9

#: Seconds and 10^15 FLOPs of Table 2 by training samples: the network, the mixture.
TABLE2 = {
    4000: (260, 156, 6.0, 3.5),
    8000: (324, 192, 7.5, 4.4),
    12000: (468, 280, 11.0, 6.4),
    16000: (630, 368, 15.0, 8.5),
}

# Rules where the paper is silent, or where two cores ask for less.
# images: of CIFAR-10 and CelebA, halved at the default scale (16 x 16, 32 x 32); l / n stays: 4 of 16 patches for 16 of
#     64. Backgrounds: other images with their 4 x 4 tiles in random order stand in for ImageNet's plants. Each channel
#     normalised.
# filters: 3 x 3 filters see zeros beyond their patch; in the released code they see a neighbour that the expert takes
#     too.
# gate: multiplies an expert's responses; theirs multiplies its input, before a normalisation of its own, which undoes
#     most of it. Here one normalisation comes before all experts and one behind them.
# statistics: of batch normalisation keep .9 a step (theirs: .99), as runs are shorter; evaluation uses them.
# steps: equal for all sizes of the training set, so that sizes differ in nothing else: 600 (theirs: 50 epochs of each).
#     gpu, paper: 50 epochs of the largest.
PROTOCOL = {
    "arms": ARMS, "seed": 600, "seeds": 5, "model": "wide_resnet_moe", "loss": "cross_entropy", "gate.horizon": 1.0,
    "shuffles": 0, "data.name": "scenes", "data.target": "class", "resnet.factor": 1,
    "router.name": "linear", "selection.name": "patch_choice", "selection.eval.name": "patch_choice",
    "selection.patch_weights": "all", "selection.eval.patch_weights": "all", "dispatch": "auto",
    "optimizer.name": "sgd",
    "optimizer.momentum": 0.0, "router.learning_rate": 0.1, "experts.learning_rate": 0.1,
    "transformer.learning_rate": 0.1, "batch_size": 64, "steps": 600, "eval_every": 150,
}  # fmt: skip


def images(scene: str, classes: int, sizes: tuple[int, ...], **changes: object) -> dict[str, object]:
    """CIFAR-10 in scenes: patches of one position, a quarter of which each of four experts takes."""
    return {
        "data.images": "cifar10", "data.scene": scene, "data.clusters": classes, "data.target_dim": classes,
        "data.image_side": 16, "data.samples": sizes[-1], "data.test_samples": 2000, "experts.count": 4,
        "selection.patches": 4, "selection.eval.patches": 4, "experts.width": WINDOW * WIDTH // 4, **changes,
    }  # fmt: skip


def faces(classes: int, sizes: tuple[int, ...]) -> dict[str, object]:
    """CelebA: 16 patches, of which each of eight experts takes two."""
    attributes = ("Smiling", "Eyeglasses")[: classes // 2]
    return images("plain", classes, sizes) | {
        "data.images": "celeba", "data.attributes": attributes, "data.image_side": 32, "experts.count": 8,
        "experts.width": WIDTH // 8, "selection.patches": 2, "selection.eval.patches": 2, "resnet.patch": 2,
        "resnet.filter": 3,
    }  # fmt: skip


#: Training samples at the default scale, and at the others, by figure.
SIZES = {
    "": ((1000, 5000, 20000), (10000, 20000, 30000, 40000, 50000)),
    "fig15": ((1000, 5000, 20000), (10000, 20000, 30000, 40000, 50000)),
    "fig16": ((1000, 5000, 20000), (4000, 8000, 12000, 16000, 20000)),
    "patches": ((5000,), (20000,)),
    "spurious": ((5000,), (20000,)),
    "gate": ((5000,), (20000,)),
    "fig10": ((400, 2000, 10000), (2000, 4000, 6000, 8000, 10000)),
    "fig11": ((400, 2000, 10000), (5000, 10000, 15000, 20000, 25000)),
    "fig12": ((400, 2000, 10000), (4000, 8000, 12000, 16000)),
    "table2": ((4000, 8000, 12000, 16000), (4000, 8000, 12000, 16000)),
}  # fmt: skip


def sizes_of(config: ConfigDict) -> tuple[int, ...]:
    """Training samples that a figure has at its scale."""
    if config.scale == "smoke":
        return (100, 200)
    return SIZES[config.figure][config.scale != "default"]


def is_faces(figure: str) -> bool:
    """Is it one of CelebA's?"""
    return figure in ("fig10", "fig11", "fig12", "table2")


def _smoke(config: ConfigDict) -> dict[str, object]:
    objects = (0, 1, 8, 9)[: config.data.clusters]
    others = {"data.scene": "vehicles", "data.objects": objects} if is_faces(config.figure) else {}
    return others | {
        "data.images": "patterns", "data.image_side": 16 if is_faces(config.figure) else 8, "data.samples": 200,
        "data.test_samples": 40, "batch_size": 16, "steps": 4, "eval_every": 2, "seeds": 2, "experts.width": 8,
        "resnet.patch": config.resnet.patch, "selection.patches": min(2, config.selection.patches),
        "selection.eval.patches": min(2, config.selection.patches), "arms": ("learned", "frozen", "wide_resnet"),
    }  # fmt: skip


def _large(factor: int, test: int):
    """Images as they are, more filters, 50 epochs of the largest size in batches of 128."""

    def changes(config: ConfigDict) -> dict[str, object]:
        largest = SIZES[config.figure][1][-1]
        taken = config.selection.patches * (1 if is_faces(config.figure) else 4)  # of 64 patches, not of 16
        steps = 50 * largest // 128 // 5 * 5
        return {
            "data.image_side": 2 * config.data.image_side, "resnet.factor": factor,
            "experts.width": factor * config.experts.width,
            "resnet.patch": 2 * config.resnet.patch if is_faces(config.figure) else 1, "data.samples": largest,
            "data.test_samples": test, "selection.patches": taken, "selection.eval.patches": taken, "batch_size": 128,
            "steps": steps, "eval_every": steps // 5,
        }  # fmt: skip

    return changes


SCALES = {"smoke": _smoke, "default": lambda config: {}, "gpu": _large(4, 2000), "paper": _large(10, 4000)}


def by_size(config: ConfigDict) -> tuple[Point, ...]:
    """The training set grows."""
    return product(data__samples=sizes_of(config))


def fifth(sizes: tuple[int, ...]) -> tuple[int, int]:
    """Returns the two sizes whose ratio is nearest to a fifth; of equally near ones the largest two."""
    pairs = [(few, many) for many in sizes for few in sizes if few < many]
    return max(pairs, key=lambda pair: (-abs(math.log(5 * pair[0] / pair[1])), pair))


def by_gate(config: ConfigDict) -> tuple[Point, ...]:
    """Returns the gate of the released code and that of the paper's equation."""
    size = {"data.samples": sizes_of(config)[-1]}
    return tuple(
        size | {"selection.patch_weights": gate, "selection.eval.patch_weights": gate} for gate in ("all", "chosen")
    )


def by_colour(config: ConfigDict) -> tuple[Point, ...]:
    """... once without and once with a spurious attribute."""
    return product(data__samples=sizes_of(config), data__spurious_fraction=(0.0, 0.95))


def taken(config: ConfigDict) -> tuple[int, ...]:
    """Patches that an expert takes: of a small map, or of one with 64."""
    return {"smoke": (2, 4), "default": (1, 2, 4, 8, 16)}.get(config.scale, (1, 4, 16, 64))


def by_patches(config: ConfigDict) -> tuple[Point, ...]:
    """Experts take one patch and, at the end, all; what has no router does so once."""
    whole = {"arms": tuple(arm for arm in config.arms if arm != "wide_resnet")}
    points = [{"selection.patches": n, "selection.eval.patches": n} | whole for n in taken(config)]
    points[-1] |= {"arms": config.arms}
    return tuple({"data.samples": sizes_of(config)[-1]} | point for point in points)


def writers(config: ConfigDict, same: bool) -> tuple[Writer, Writer]:
    """Of the paper's claims and of ours, as differences in accuracy. `same`: are the data the paper's?"""
    where = (
        "stand_in" if config.scale == "smoke" or not same else "scaled" if config.scale != "paper" else "gaps_filled"
    )
    paper = Writer(where, "test/accuracy", unit="difference", prefix="chowdhury.")
    return paper, paper._replace(prefix="routed.wrn.")


def controls(ours: Writer, arms: tuple[str, ...], id: str, at: Mapping[str, object]) -> Iterator[Claim]:
    """What of a gain is choosing: the same mixture with routers that do not."""
    order = ours._replace(at=at).order
    yield order(f"{id}.frozen", "a router that learns beats one that stays as it began", "not asked", FROZEN, LEARNED)
    if "random_patches" in arms:
        yield order(f"{id}.random", "a router that learns beats patches picked and weighed at random", "not asked",
                    RANDOM, LEARNED)  # fmt: skip
        yield order(
            f"{id}.architecture",
            "the mixture on patches picked and weighed at random beats the network",
            "not asked",
            WRN,
            RANDOM,
        )


def claims_of(id: str, label: str, same: bool):
    """The mixture above the network at every size, and on a fifth of the images that the network has."""

    def claims(config: ConfigDict) -> tuple[Claim, ...]:
        paper, ours = writers(config, same)
        sizes = sizes_of(config)
        most = {"data.samples": sizes[-1]}
        orders = [
            paper.order(
                f"{id}.N{n}", f"{label}, {n} images: WRN-pMoE above WRN", "above", WRN, LEARNED, at={"data.samples": n}
            )
            for n in sizes
        ]
        orders += [paper.beside(f"{id}.{name}", f"{label}: accuracy of {name}, all images", "not readable", side,
                                at=most) for name, side in (("wrn", WRN), ("pmoe", LEARNED))]  # fmt: skip
        few, many = fifth(sizes)
        fewer = f"{label}: WRN-pMoE with {few} images above WRN with {many}"
        asked = "less than a fifth of the samples for 86 %" if id == "fig10" else "fewer samples"
        orders.append(paper.order(f"{id}.fewer", fewer, asked, WRN | {"data.samples": many},
                                  LEARNED | {"data.samples": few}))  # fmt: skip
        return (*orders, *controls(ours, config.arms, id, most))

    return claims


def claims_of_colour(id: str, label: str, same: bool):
    """Both below what they are without the spurious attribute, and the mixture above the network with it."""

    def claims(config: ConfigDict) -> tuple[Claim, ...]:
        paper, ours = writers(config, same)
        write = paper if id.startswith("fig") else ours
        at: Point = {"data.samples": sizes_of(config)[-1]}
        without, misled = {"data.spurious_fraction": 0.0}, {"data.spurious_fraction": 0.95}
        order, also = write._replace(at=at).order, ours._replace(at=at | misled)
        return (
            order(f"{id}.mixture", f"{label}, misled: WRN-pMoE above WRN", "above", WRN, LEARNED, at=at | misled),
            order(f"{id}.wrn", f"{label}: WRN is worse where it is misled", "below", WRN | misled, WRN | without),
            order(
                f"{id}.pmoe",
                f"{label}: WRN-pMoE is worse where it is misled",
                "below",
                LEARNED | misled,
                LEARNED | without,
            ),
            *controls(also, config.arms, id, at | misled),
        )

    return claims


def claims_of_patches(config: ConfigDict) -> tuple[Claim, ...]:
    """Fewer patches against all, and learned against not at each number."""
    _, ours = writers(config, same=False)
    few, every = ({"selection.patches": n} for n in (config.selection.patches, taken(config)[-1]))
    orders = [
        ours.order("patches.fewer", "experts that take some patches beat those that take all", "not asked",
                   LEARNED | every, LEARNED | few),
        ours.order("patches.all", "experts on all patches beat the network without a mixture", "not asked", WRN,
                   LEARNED, at=every),
    ]  # fmt: skip
    return tuple(orders) + tuple(
        ours.order(f"patches.l{n}", f"l = {n}: a router that learns beats one that does not", "not asked", FROZEN,
                   LEARNED, at={"selection.patches": n})
        for n in taken(config)[:-1]
    )  # fmt: skip


def claims_of_gate(config: ConfigDict) -> tuple[Claim, ...]:
    """Returns the order of the two gates, and at each gate the mixture against the network and its frozen self."""
    _, ours = writers(config, same=False)
    code, equation = ({"selection.patch_weights": gate} for gate in ("all", "chosen"))
    orders = [
        ours.order("gate.equation", "a softmax over the l chosen patches (equation) beats one over all (released code)",
                   "not asked", LEARNED | code, LEARNED | equation),
    ]  # fmt: skip
    for name, gate, range_of in (("code", code, "over all patches"), ("chosen", equation, "over the chosen patches")):
        order = ours._replace(at=gate).order
        orders += [
            order(f"gate.{name}.mixture", f"softmax {range_of}: WRN-pMoE above WRN", "above", WRN, LEARNED),
            order(f"gate.{name}.frozen", f"softmax {range_of}: a router that learns beats one that does not",
                  "not asked", FROZEN, LEARNED),
        ]  # fmt: skip
    return tuple(orders)


def claims_of_table(config: ConfigDict) -> tuple[Claim, ...]:
    """FLOPs of the training; seconds are no column of a result (`python -m routed.bench patches` measures them)."""
    paper, _ = writers(config, same=config.scale != "smoke")
    write = paper._replace(metric="model/train_flops", unit="ratio")
    claims = []
    for size, n in zip(sizes_of(config), TABLE2, strict=False):
        at = {"data.samples": size}
        for name, side, value in (("wrn", WRN, TABLE2[n][2]), ("pmoe", LEARNED, TABLE2[n][3])):
            seconds, share = TABLE2[n][name == "pmoe"], sizes_of(config)[-1] / size  # every size trains as the largest
            statement = f"training FLOPs of {name}, {n} images, 50 epochs ({seconds} s on their GPU), times {share:g}"
            claims.append(write.beside(f"table2.{name}.{n}", statement, share * value * 1e15, side, at=at))
    most = {"data.samples": sizes_of(config)[-1]}
    claims.append(
        write.order("table2.fewer", "WRN-pMoE takes fewer FLOPs than WRN", ".57 to .59", LEARNED, WRN, at=most)
    )
    return tuple(claims)


TRAINING = {"kind": "training", "name": "training", "metrics": ("train/loss", "test/loss", "test/accuracy")}


def plots(x: str, *metrics: str) -> Callable[[ConfigDict], tuple[dict, ...]]:
    """Metrics by a key, and the training."""
    return lambda config: ({"kind": "curves", "name": "accuracy", "x": x, "metrics": metrics}, TRAINING)


PLOTS_BY_SIZE = plots("data.samples", "test/accuracy", "test/loss")
PLOTS_BY_COLOUR = plots("data.spurious_fraction", "test/accuracy")


def _of_cifar(figure: str, line: str, scene: str, classes: int) -> Figure:
    id, label = (figure or "fig14"), line.partition(":")[0]
    return Figure(
        line, images(scene, classes, SIZES[figure][0]), by_size, claims_of(id, label, figure != "fig15"), PLOTS_BY_SIZE
    )


VEHICLES = images("vehicles", 4, (5000,))

FIGURES = {
    "": _of_cifar("", "CIFAR-10: accuracy by training images (Fig. 14)", "plain", 10),
    "fig15": _of_cifar("fig15", "CIFAR-10 on backgrounds: accuracy by training images (Fig. 15)", "backgrounds", 10),
    "fig16": _of_cifar("fig16", "vehicles among animals: accuracy by training images (Fig. 16)", "vehicles", 4),
    "patches": Figure("vehicles among animals: accuracy by patches that an expert takes", VEHICLES, by_patches,
                      claims_of_patches, plots("selection.patches", "test/accuracy", "model/flops")),
    "spurious": Figure(
        "vehicles among animals of a misleading colour", VEHICLES, by_colour,
        claims_of_colour("spurious", "vehicles, colour of the scene", same=False), PLOTS_BY_COLOUR,
    ),
    "gate": Figure("vehicles among animals: softmax over all patches or over the chosen ones",
                   VEHICLES | {"arms": ("learned", "frozen", "wide_resnet")}, by_gate, claims_of_gate,
                   plots("selection.patch_weights", "test/accuracy")),
    "fig10": Figure("CelebA, smiling (Fig. 10)", faces(2, SIZES["fig10"][0]), by_size,
                    claims_of("fig10", "CelebA, smiling", same=True), PLOTS_BY_SIZE),
    "fig11": Figure(
        "CelebA, smiling, hair that misleads (Fig. 11)", faces(2, SIZES["fig11"][0]), by_colour,
        claims_of_colour("fig11", "CelebA, smiling", same=True), PLOTS_BY_COLOUR,
    ),
    "fig12": Figure("CelebA, smiling and eyeglasses (Fig. 12)", faces(4, SIZES["fig12"][0]), by_size,
                    claims_of("fig12", "CelebA, four classes", same=True), PLOTS_BY_SIZE),
    "table2": Figure("CelebA, four classes: FLOPs of the training (Table 2)", faces(4, SIZES["table2"][0]), by_size,
                     claims_of_table, PLOTS_BY_SIZE),
}  # fmt: skip


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of FIGURE[,SCALE]."""
    return make_config("patch_wrn", arg, FIGURES, PROTOCOL, SCALES)
