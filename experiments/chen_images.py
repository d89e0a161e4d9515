"""Do the clusters in rotated images make a mixture of networks better than one, and does that take a learned gate?

Question. Chen et al. (2022, 6.2 and A.3, Table 2) train a CNN, MobileNetV2 and ResNet18, and mixtures of four of each.
On CIFAR-10 a mixture is as good as one network. On CIFAR-10-Rotate (was the image turned by 30 degrees?) it is better
by 3 to 4 points, as classes are clusters of that task. The mixture has four times the parameters, and only its experts
learn by normalised gradients. How much of the gain is the gate?

    routed run --config=chen_images --config.data.directory=DIR           # Table 2, as printed
    routed run --config=chen_images:released --config.data.directory=DIR  # its rotated half, as released
    routed run --config=chen_images:gates --config.data.directory=DIR     # ResNet18, rotated: the gate
    routed run --config=chen_images:fig6 --config.data.directory=DIR      # examples
    routed run --config=chen_images:fig7 --config.data.directory=DIR      # maps of embeddings
    routed run --config=chen_images:smoke                                 # artificial images, the CNN only

DIR is the folder with CIFAR-10's binary version. Scales: smoke; default (2 CPU cores: 16 x 16 pixels, a quarter of the
CNN's and MobileNetV2's width, an eighth of ResNet18's, 600 batches of 64 from all 50,000 images); gpu (32 x 32 pixels,
half of the paper's widths, 20 epochs); paper (its sizes).

From the paper: four experts, top-1, gate of 4 x 4 windows summed over positions that starts at 0, noise uniform on
[0, 1] on the choice, normalised gradients for experts and SGD for the gate, momentum .9, weight decay 5e-4, the rates;
images cropped to 24 x 24, resized and blurred (rotated), flips and crops (CIFAR-10); label of a rotated image: rotated
or not. `released` (PRESETS): softmax twice, noise in the gate's weight, a bias of the gate, balance .01, blur on
training images only, gradients divided by the sum of their tensors' norms, constant rates.

Rules where both are silent, or where ours differ. None compares learned with another arm; seeds from 9000 on were
for exploration only.
  verdicts    none that more steps might turn (gate.horizon), but at scale paper, whose steps belong to the protocol.
  effect      smallest effect of interest: one point of accuracy. seeds: 5000 to 5004.

Our own arms: k-means and hash of the gate's inputs, true class (classes 0, 1, 8, 9 on one expert, then pairs), true
turn (the label itself, so a ceiling and no control), one network with the experts' optimiser, one of twice the width
(four times the weights and FLOPs), an ensemble of four.

Expected: the mixture of four above one on rotated images where both learn by normalised gradients; the ensemble at
least as good as the mixture; k-means about as good as learned.

Found at the default scale (docs/results/chen2022.md): after .8 epochs one network is ahead everywhere. A learned gate
is no better than a frozen gate or the true class, and the average of four networks is best. Cost at the default scale
on 2 free cores: Table 2 20 minutes, released 9, gates 30, fig7 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ml_collections import ConfigDict

import routed.papers.chen2022  # noqa: F401 (parts of the paper)
from routed.analysis.claims import FAIREST, FROZEN, LEARNED, Claim, Measured, Writer
from routed.plan import Figure, Point, make_config
from routed.plan.arms import ARMS, Arm
from routed.plan.experiment import Scales

#: Samples are sorted by expert, as a copy of a network for each sample would cost more than its products.
_BY_CLUSTER = {"router.frozen": True, "router.name": "oracle"}
ARMS["oracle_class"] = Arm(_BY_CLUSTER | {"router.label_digit": 1}, "oracle (true class)", "#000000")
ARMS["oracle_turn"] = Arm(_BY_CLUSTER, "oracle (the label: turned or not)", "#A6761D")
ARMS["hash_images"] = Arm({"router.frozen": True, "router.name": "hash"}, "hash of the image", "#56B4E9")
ARMS["kmeans_images"] = Arm(
    {
        "router.frozen": True, "router.score": "distance", "router.init_from_data": True,
        "router.init_rows": "clusters",
        "selection.renormalise": True, "selection.eval.renormalise": True,
    },
    "frozen k-means of windows", "#5A2A00", fair=True,
)  # fmt: skip

#: What the paper prints, and what its released code does (ResNet18 and MobileNetV2 on rotated images).
PRESETS: dict[str, Point] = {
    "paper": {
        "loss": "cross_entropy", "router.noise_in_weights": False, "router.bias": False, "losses.balance": 1e-3,
        "data.blur": "all", "optimizer.normalise": "expert", "optimizer.schedule": "cosine",
    },
    "released": {
        "loss": "softmax_cross_entropy", "router.noise_in_weights": True, "router.bias": True, "losses.balance": 1e-2,
        "data.blur": "training", "optimizer.normalise": "expert_sum", "optimizer.schedule": "constant",
    },
}  # fmt: skip

NETWORKS = {"cnn": "conv_net", "mobilenet": "mobilenet_v2", "resnet18": "resnet18"}
#: Filters of the first convolution: paper, and 2 CPU cores.
WIDTHS = {"conv_net": (64, 16), "mobilenet_v2": (32, 8), "resnet18": (64, 8)}
#: Rates of experts and single models on CIFAR-10 and on rotated images, as printed.
PRINTED = {"conv_net": (0.01, 0.01), "mobilenet_v2": (0.1, 0.01), "resnet18": (0.1, 0.01)}
#: ... and where steps are few, on either: of experts, of single models.
RATES = {"conv_net": (0.01, 0.03), "mobilenet_v2": (0.01, 0.01), "resnet18": (0.01, 0.01)}
CIFAR, ROTATED = "augmented", "rotated"

#: Table 2: accuracy in % and standard deviation over ten runs, single and mixture.
TABLE2 = {
    ("cnn", CIFAR): ((80.68, 0.45), (80.31, 0.62)), ("cnn", ROTATED): ((76.78, 1.79), (79.60, 1.25)),
    ("mobilenet", CIFAR): ((92.45, 0.25), (92.23, 0.72)), ("mobilenet", ROTATED): ((85.76, 2.91), (89.85, 2.54)),
    ("resnet18", CIFAR): ((95.51, 0.31), (95.32, 0.68)), ("resnet18", ROTATED): ((88.23, 0.96), (92.60, 2.01)),
}  # fmt: skip
#: Epochs, by data: paper; and of the released code, by network.
EPOCHS = {CIFAR: 200, ROTATED: 50}
RELEASED_EPOCHS = {"mobilenet_v2": 30, "resnet18": 10}

SINGLE: Point = {"arms": ("dense_expert",), "optimizer.normalise": "none"}

# Rules where paper and code are silent, or where ours differ. None compares learned with another arm; seeds from
# 9000 on were for exploration only.
# norm: groups of up to 8 channels of an image in place of batch normalisation, whose statistics would depend on the
#     gate. So no number of Table 2 is of the same setting (docs/decisions/chen2022.md).
# batches: any training images, each drawn and changed anew, in place of epochs; 64 images at the default scale
#     (released: 128).
# rates: experts, single: as printed at scale paper. Below it RATES: of .01, .03, .1 and .3 the rate with the lowest
#     test loss after 300 steps on rotated images, seed 9000, of the mixture and of the single network alike;
#     MobileNetV2: as printed for these. The gate: 1e-4 for 64 windows; with fewer windows, whose sums are smaller,
#     times the squared ratio.
# schedule: none is stated: cosine to 0, as the code says of theirs (over 200 epochs, of which it trains 10 or 30:
#     constant).
# balance: 1e-3 E sum_e (share of samples x mean probability).
# test: the first 1,000 test images in turn by class (rotated: 500 images, each both ways); the last evaluation, not the
#     best.
# gates: the paper's gate starts at 0, so frozen it sends a training sample anywhere and every test sample to expert 1.
#     Fair controls need a gate with information, so `gates` starts it at random, too.
PROTOCOL = PRESETS["paper"] | {
    "arms": ("learned",), "seed": 5000, "seeds": 5, "shuffles": 0,
    "data.name": ROTATED, "data.images": "cifar10", "data.clusters": 10, "data.target": "class", "data.target_dim": 2,
    "data.image_side": 16, "data.samples": 4096, "data.fresh": True, "data.test_samples": 1000, "batch_size": 64,
    "steps": 600, "eval_every": 150, "router.name": "conv", "router.window": 4, "router.noise": "uniform",
    "router.init_scale": 0.0, "router.learning_rate": 1e-4 * 16,
    "experts.name": "resnet18", "experts.count": 4, "experts.width": 8, "experts.learning_rate": RATES["resnet18"][0],
    "selection.name": "top_k", "selection.k": 1, "selection.renormalise": False,
    "selection.eval.name": "top_k", "selection.eval.k": 1, "selection.eval.renormalise": False, "dispatch": "ragged",
    "optimizer.name": "sgd", "optimizer.momentum": 0.9, "optimizer.l2": 5e-4,
}  # fmt: skip


def _large(width: float, epochs: float):
    """Images as they are; widths and epochs as shares of the paper's, so steps and rates come with the points."""

    def changes(config: ConfigDict) -> dict[str, object]:
        return {
            "data.image_side": 32, "experts.width": round(64 * width), "batch_size": 128, "router.learning_rate": 1e-4,
            "data.samples": 16384, "data.test_samples": 10000, "steps": steps_of(epochs),
            "eval_every": steps_of(epochs) // 5, "seeds": 10 if width == 1 else 5,
        }  # fmt: skip

    return changes


def steps_of(epochs: float, images: float = 50000, batch: int = 128) -> int:
    """Steps of so many epochs, a multiple of 5."""
    return max(5, int(epochs * images / batch) // 5 * 5)


SCALES: Scales = {
    "smoke": lambda config: {
        "data.images": "patterns", "data.image_side": 8, "data.samples": 128, "data.test_samples": 40, "batch_size": 16,
        "steps": 4, "eval_every": 2, "seeds": 2, "experts.name": "conv_net", "experts.width": 4,
    },
    "default": lambda config: {},
    "gpu": _large(0.5, 20),
    "paper": lambda config: {
        **_large(1, 50)(config), "gate.horizon": 1.0,
        **({"steps": steps_of(50, 1e5), "eval_every": steps_of(50, 1e5) // 5} if config.figure == "gates" else {}),
    },
}  # fmt: skip


def trained(config: ConfigDict, network: str, data: str, single: bool, released: bool) -> Point:
    """A network of an expert's size, as expert or alone, on a data set."""
    point: Point = {"experts.name": network, "data.name": data, "data.target_dim": 2 if data == ROTATED else 10}
    widths = {"default": WIDTHS[network][1], "gpu": WIDTHS[network][0] // 2, "paper": WIDTHS[network][0]}
    point |= {
        "experts.width": widths.get(config.scale, config.experts.width),
        "experts.learning_rate": RATES[network][single],
    }
    if config.scale == "paper":
        epochs = RELEASED_EPOCHS[network] if released else EPOCHS[data]
        steps = steps_of(epochs, 100000 if data == ROTATED else 50000)
        point |= {"experts.learning_rate": PRINTED[network][data == ROTATED], "steps": steps, "eval_every": steps // 5}
    return point | (SINGLE if single else {})


class Cell(NamedTuple):
    """A number of Table 2: its network and data, alone or as expert, and its point."""

    name: str
    data: str
    single: bool
    point: Point

    @property
    def label(self) -> str:
        kind = "one network" if self.single else "mixture"
        return f"{self.name} on {'CIFAR-10' if self.data == CIFAR else 'rotated images'}, {kind}"

    @property
    def where(self) -> Point:
        """The values of swept keys."""
        return {key: value for key, value in self.point.items() if key != "arms"}

    @property
    def side(self) -> Point:
        """What claims call its runs: a mixture and its single model differ in more swept keys than the arm."""
        return {"arm": "dense_expert" if self.single else "learned"} | self.where


def cells(config: ConfigDict, released: bool = False) -> list[Cell]:
    """Returns the numbers of Table 2 that a figure and a scale have, each single model before its mixture."""
    names = NETWORKS if config.scale != "smoke" else {"cnn": "conv_net"}
    if released and config.scale != "smoke":
        names = {name: network for name, network in NETWORKS.items() if network in RELEASED_EPOCHS}
    return [
        Cell(name, data, single, trained(config, network, data, single, released and config.scale != "smoke"))
        for data in ((ROTATED,) if released else (CIFAR, ROTATED))
        for name, network in names.items()
        for single in (True, False)
    ]


def writers(config: ConfigDict) -> tuple[Writer, Writer]:
    """Of the paper's claims and of ours, as differences in accuracy."""
    where = {"smoke": "stand_in", "paper": "gaps_filled"}.get(config.scale, "scaled")
    paper = Writer(where, "test/accuracy", unit="difference", prefix="chen.table2.")
    return paper, paper._replace(prefix="routed.images.")


def claim_cells(config: ConfigDict, released: bool) -> Iterator[Claim]:
    """Numbers and orders of Table 2; Welch's test where sizes are the paper's."""
    paper, _ = writers(config)
    end, rows = ".released" if released else "", cells(config, released)
    for single, mixture in zip(rows[::2], rows[1::2], strict=True):
        id = f"{'cifar10' if single.data == CIFAR else 'rotate'}.{single.name}"
        numbers = TABLE2[single.name, single.data]
        for cell, kind, (mean, std) in zip((single, mixture), ("single", "moe"), numbers, strict=True):
            measured = Measured(mean / 100, std / 100, 10)
            write = paper.number if config.scale == "paper" else paper.beside
            value = measured if config.scale == "paper" else mean / 100
            yield write(f"{id}-{kind}{end}", f"{cell.label}: accuracy", value, cell.side)
        reported = f"{numbers[0][0]} and {numbers[1][0]} %"
        where = f"{single.name} on {'CIFAR-10' if single.data == CIFAR else 'rotated images'}"
        if single.data == CIFAR:
            yield paper.null(
                f"{id}.order", f"{where}: a mixture is as good as one network", reported, single.side, mixture.side
            )
        else:
            yield paper.order(
                f"{id}.order{end}", f"{where}: a mixture beats one network", reported, single.side, mixture.side
            )


def plots_of_cells(config: ConfigDict, released: bool) -> tuple[dict, ...]:
    """Accuracy by network and data; training and dispatch of the last mixture."""
    rows = cells(config, released)
    methods = {cell.label: cell.where for cell in rows}
    last = rows[-1]
    return (
        {"kind": "methods", "name": "table2", "methods": methods, "metrics": ("test/accuracy", "test/loss")},
        {
            "kind": "training",
            "name": "training",
            "metrics": ("train/loss", "test/loss", "test/accuracy"),
            "at": last.where,
        },
        {"kind": "dispatch", "name": "dispatch", "lines": {f"{last.name}, rotated": last.where}},
    )


def _of_cells(line: str, released: bool, changes: Point) -> Figure:
    return Figure(
        line,
        changes=changes,
        sweep=lambda config: tuple(cell.point for cell in cells(config, released)),
        claims=lambda config: tuple(claim_cells(config, released)),
        plots=lambda config: plots_of_cells(config, released),
    )


# Our own question: what is the gate worth?

FIXED = ("frozen_sharp", "frozen_data", "kmeans_images", "hash_images", "oracle_class", "oracle_turn")


def gates(config: ConfigDict) -> dict[str, Point]:
    """Returns the points of the gates: four networks under every gate, their average, one network, and a wider one."""
    width = config.experts.width
    drawn = {"router.init_scale": 1.0}
    points: dict[str, Point] = {
        "gate from random": drawn | {"arms": ("learned", "frozen", *FIXED)},
        "gate from 0, and none": {"arms": ("learned", "frozen", "ensemble")},
        "one, plain gradients": SINGLE,
        "one, normalised": {"experts.count": 1},
        "one, twice as wide": {"experts.count": 1, "experts.width": 2 * width},
    }
    if config.scale == "smoke":
        points["gate from random"]["arms"] = ("learned", "frozen", "frozen_data")
    return points


def where(config: ConfigDict, point: Point) -> Point:
    """A point of `gates` with all that they sweep."""
    swept = ("router.init_scale", "experts.count", "experts.width", "optimizer.normalise")
    flat = {"router.init_scale": config.router.init_scale, "experts.count": config.experts.count}
    flat |= {"experts.width": config.experts.width, "optimizer.normalise": config.optimizer.normalise}
    return {key: point.get(key, flat[key]) for key in swept}


def claims_of_gates(config: ConfigDict) -> tuple[Claim, ...]:
    """Does the gain need a learned gate, four networks, their weights, or the optimiser?"""
    _, ours = writers(config)
    ours = ours._replace(prefix="routed.images.gates.")
    drawn, paper, plain, normalising, wide = (where(config, point) for point in gates(config).values())
    single, normalised, wider = {"arm": "dense_expert"} | plain, LEARNED | normalising, LEARNED | wide
    mixture, ensemble, order = LEARNED | drawn, {"arm": "ensemble"} | paper, ours._replace(at=drawn).order
    follows = {"metric": "router/ami_by_class"}
    claims = [
        ours.order("zero", "the mixture of the paper beats one network", "88.2 and 92.6 %", single, LEARNED | paper),
        ours.order("optimiser", "normalised gradients make one network better", "not asked", single, normalised),
        ours.order("four", "the mixture beats one network trained as its experts are", "not asked", normalised,
                   LEARNED | paper),
        order("frozen", "a gate that learns beats one that stays as it began", "not asked", FROZEN, LEARNED),
        order("fair", "a gate that learns beats the fairest frozen control", "not asked", FAIREST, LEARNED),
        ours.order("wide", "the mixture beats one network with as many weights", "not asked", wider, mixture),
        ours.order("ensemble", "the mixture beats the average of four networks", "not asked", ensemble, mixture),
        order("follows", "experts follow classes more than those of a frozen gate", "frogs in one, ships in the other",
              FROZEN | follows, LEARNED | follows, metric="router/ami_by_class"),
    ]  # fmt: skip
    if config.scale != "smoke":
        claims += [
            order("hash", "a gate that learns beats a hash of the image", "not asked", {"arm": "hash_images"}, LEARNED),
            order(
                "class", "the true class as gate beats the learned one", "not asked", LEARNED, {"arm": "oracle_class"}
            ),
        ]
    return tuple(claims)


def plots_of_gates(config: ConfigDict) -> tuple[dict, ...]:
    """Accuracy by gate, training, and which class goes to which expert."""
    methods = {label: where(config, point) for label, point in gates(config).items()}
    drawn = methods["gate from random"]
    return (
        {"kind": "methods", "name": "gates", "methods": methods, "metrics": ("test/accuracy", "router/ami_by_class")},
        {"kind": "training", "name": "training", "metrics": ("test/accuracy", "router/ami_by_class"), "at": drawn},
        {"kind": "dispatch", "name": "dispatch", "lines": dict(list(methods.items())[:2])},
    )


# Pictures


def pictures(config: ConfigDict) -> dict[str, Point]:
    """Mixtures of ResNet18 on both data sets (smoke: of the CNN)."""
    mixtures = [cell for cell in cells(config) if not cell.single and cell.name in ("resnet18", "cnn")]
    chosen = {cell.data: cell.point for cell in mixtures}  # the last of each: ResNet18 where the scale has it
    return {"CIFAR-10": chosen[CIFAR], "rotated": chosen[ROTATED]}


def plots_of_fig7(config: ConfigDict) -> tuple[dict, ...]:
    """Cars; turned images; frogs and ships among these."""
    cifar, rotated = pictures(config).values()
    panels = {
        "CIFAR-10, car": (cifar, 1, {1: "car"}),
        "rotated, label 1": (rotated, 1, {2 * 6 + 1: "frog", 2 * 8 + 1: "ship"}),
    }
    return (
        {"kind": "latent", "name": "fig7", "panels": panels},
        {"kind": "dispatch", "name": "dispatch", "lines": pictures(config)},
    )


CELLS = _of_cells("Table 2: networks and mixtures on CIFAR-10 and rotated images", released=False, changes={})

FIGURES = {
    "": CELLS,
    "table2": CELLS,
    "released": _of_cells("Table 2 on rotated images, protocol of the released code", released=True,
                          changes=PRESETS["released"]),
    "gates": Figure(
        "what is the gate of the mixture worth on rotated images?",
        sweep=lambda config: tuple(gates(config).values()),
        claims=claims_of_gates,
        plots=plots_of_gates,
    ),
    "fig6": Figure(
        "Fig. 6: images of both data sets, as they are trained on",
        changes={"seeds": 1, "experts.name": "conv_net", "steps": 4, "eval_every": 2},
        sweep=lambda config: ({"data.name": CIFAR, "data.target_dim": 10},
                              {"data.name": ROTATED, "data.target_dim": 2}),
        plots=lambda config: (
            {"kind": "examples", "name": "fig6", "lines": {
                "CIFAR-10": {"data.name": CIFAR, "data.target_dim": 10},
                "each image as it is and turned": {"data.name": ROTATED, "data.target_dim": 2},
            }},
        ),
    ),
    "fig7": Figure(
        "Fig. 7: t-SNE of experts' embeddings of cars and of turned images",
        changes={"seeds": 1, "experts.embeddings": True},
        sweep=lambda config: tuple(pictures(config).values()),
        plots=plots_of_fig7,
    ),
}  # fmt: skip


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of FIGURE[,SCALE]."""
    return make_config("chen_images", arg, FIGURES, PROTOCOL, SCALES)
