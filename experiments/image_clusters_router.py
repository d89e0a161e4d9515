r"""Does a router that has to learn to see help, when the image tells only which function the experts should compute?

Question. Dikkala et al. (2023, 3.4) pair every CIFAR-100 image with a random vector v; the target is w_i^T v, where i
is the class of the image. A convolutional router sees the image, 200 experts see v and the router's penultimate
features. The loss is .55 with a learned router and .80 with a frozen router; the scale is not stated. Images are the
paper's only real data beside text: clusters are classes, which the router has to recognise first.

    routed run --config=image_clusters_router --config.data.directory=DIR  # CIFAR-10
    routed run --config=image_clusters_router:fashion --config.data.directory=DIR
    routed run --config=image_clusters_router:cifar100 --config.data.directory=DIR
    routed run --config=image_clusters_router:cifar100 --config.data.directory=DATA_DIR \
        --config.data.images=tfds:cifar100                                 # from TFDS
    routed run --config=image_clusters_router:smoke                        # artificial images, no files

DIR is the folder with the files: the binary version of CIFAR-10 or CIFAR-100, the four IDX files of Fashion-MNIST.
Scales: smoke (half a minute; artificial images, without the oracle), default (2 CPU cores; cifar100 rather a GPU),
paper (ten times the steps, 10 seeds, four times the filters).

From the paper: pairs (image, v), y = w_i^T v, a CNN router on the image, depth-3 experts on v and the CNN's
penultimate layer, 200 experts for 100 classes, so 2 a class elsewhere; width 96 as in its other experiments; soft in
training, top-1 with weight exactly 1 at evaluation. A frozen router keeps its convolutions and its scores.

Rules where the paper is silent. None compares learned with frozen. Measured on exploration seed 5000;
docs/decisions/dikkala2023.md has the measurements and a first version.
  steps       6,000: 10 minutes a figure.
  gate        a verdict stands if it also holds for the curves extrapolated to 4 times the steps.
  effect      smallest effect of interest: a factor 1.1 in loss. seeds: 100 to 104.

Beware. A random CNN says nearly the same of all images: its features are positive means. At top-1 the frozen router
sends both sets to few experts (largest load 12.7 of 20), and both losses are above 1, where the paper has .80. So
compare the soft losses, the arm that is trained top-1, and `hash`, whose experts see v only.

Expected: learned below frozen, on Fashion-MNIST by more, as its classes are easier to recognise; both far above the
oracle.

Found (docs/results/without_page.md): all orders are inconclusive, as the learned router's loss still falls. On
Fashion-MNIST it is 2.0 times better at top-1 than the fairest frozen control after 6,000 steps and 2.5 times after
24,000; on CIFAR-10 no better. Cost on 2 cores: 10 minutes a figure, fashion 7.
"""

from __future__ import annotations

from ml_collections import ConfigDict

import routed.papers.dikkala2023  # noqa: F401 (parts of the paper)
from routed.analysis.claims import FAIREST, FROZEN, LEARNED, Claim, Writer
from routed.plan import Figure, Point, make_config, product

# Rules where the paper is silent, measured on exploration seed 5000. None compares learned with frozen.
# v: 24 numbers, N(0, I), the dimension of the paper's other tasks; w_i ~ N(0, I/24). A new vector whenever an image is
#     drawn (data.fresh): with one vector an image all arms learn the vectors by heart.
# loss: squared error over the variance of y, so 1 is trivial. Test images: the same number of each class.
# images: each channel minus its mean, over its standard deviation, of the training set; not augmented.
# CNN: 3 layers of 3 x 3 filters with stride 2 and ReLU, 16, 32, 64 of them, and their mean over positions; no
#     normalisation. He-normal weights.
# batch: 32, as for depth-3 experts elsewhere, drawn with replacement.
# rates: Adam, with which the oracle fits better than with the paper's two recipes. Of 1e-3, 3e-3 and 1e-2 for router
#     and experts, the rate with which the training losses of learned, frozen and frozen_top1 are *all* lowest after
#     6,000 steps: 3e-3, for all arms; falling to 0 at the end, so that no arm is judged by its last batch.
PROTOCOL = {
    "arms": ("learned", "frozen", "frozen_sharp", "frozen_top1", "frozen_data", "frozen_kmeans", "oracle", "hash"),
    "data.name": "images", "data.target": "linear", "data.target_dim": 1, "data.fresh": True,
    "router.name": "cnn", "router.depth": 3, "router.width": 16,  # convolutions, filters of the first
    "optimizer.name": "adam", "optimizer.schedule": "linear",
    "router.learning_rate": 3e-3, "experts.learning_rate": 3e-3,
    "steps": 6000, "eval_every": 1500, "seed": 100, "seeds": 5,
}  # fmt: skip

SCALES = {
    "smoke": lambda config: {
        "data.images": "patterns", "data.clusters": 10, "data.dim": 8,
        "data.samples": 1000, "data.test_samples": 200,
        "router.depth": 2, "router.width": 4, "experts.count": 10, "experts.width": 16,
        "steps": 20, "eval_every": 10, "seeds": 2, "shuffles": 4,
        # No claim needs the oracle or this of several controls, each a program of its own, and a smoke run is mostly
        # compiling.
        "arms": tuple(arm for arm in config.arms if arm not in ("oracle", "frozen_kmeans")),
    },
    "default": lambda config: {},
    "paper": lambda config: {
        "steps": config.steps * 10, "eval_every": config.eval_every * 10, "seeds": 10, "router.width": 64,
    },
}  # fmt: skip


def image_set(images: str, classes: int, samples: int) -> dict[str, object]:
    """What an image set changes, from its number of classes and of training images."""
    return {
        "data.images": images,
        "data.clusters": classes,
        "data.samples": samples,
        "data.test_samples": min(200 * classes, 10000),  # at most each test image once
        "experts.count": 2 * classes,
    }


def sweep(config: ConfigDict) -> tuple[Point, ...]:
    """One point: all training images."""
    return product(data__samples=(config.data.samples,))


def claims(config: ConfigDict) -> tuple[Claim, ...]:
    """The paper's comparison and its two numbers, and our own questions (ids `routed.*`)."""
    # Other images than the paper's stand in for them; at the smoke scale all figures have artificial ones.
    where = "gaps_filled" if config.figure == "cifar100" and config.scale != "smoke" else "stand_in"
    paper = Writer(where, at={"data.samples": config.data.samples}, prefix="dikkala.cifar100.")
    ours = paper._replace(prefix="routed.images.")
    fair = "learned beats the fairest frozen control (sharpened, trained top-1, rows from data, or k-means of features)"
    sharpening = "sharpening the frozen router lowers its top-1 loss"
    soft = "learned beats frozen when both are evaluated as they were trained (soft)"
    trivial = "learned at top-1 beats the best constant prediction"
    sparse = "classes go to fewer experts than with a shuffled router"
    sparsity, shuffled = (LEARNED | {"metric": f"router/{name}"} for name in ("sparsity", "sparsity_shuffled"))
    return (
        paper.order("frozen", "learned beats frozen at top-1", ".55 against .80", LEARNED, FROZEN),
        paper.beside("learned-loss", "loss of the learned router", 0.55),
        paper.beside("frozen-loss", "loss of the frozen router", 0.80, FROZEN),
        ours.order("fair", fair, "not asked", LEARNED, FAIREST),
        ours.order("sharpness", sharpening, "not asked", {"arm": "frozen_sharp"}, FROZEN),
        ours.order("fair-soft", soft, "not asked", LEARNED, FROZEN, metric="test/loss_soft"),
        ours.order("hash", "learned beats a fixed hash of the image", "not asked", LEARNED, {"arm": "hash"}),
        ours.order("trivial", trivial, "not asked", LEARNED, {"value": 1.0}),
        ours.order("sparsity", sparse, "not asked", sparsity, shuffled),
    )


def plots(config: ConfigDict) -> tuple[dict, ...]:
    """Losses, the gap, training, and what the router does."""
    x = "data.samples"
    return (
        {"kind": "curves", "name": "loss", "x": x, "metrics": ("test/loss", "test/loss_soft")},
        {"kind": "gap", "name": "gap", "x": x},
        {"kind": "training", "name": "training", "metrics": ("train/loss", "test/loss", "test/loss_soft")},
        {"kind": "routing", "name": "routing", "arms": ("learned", "frozen")},
    )


# The figures differ in nothing but their images.
FIGURES = {
    "": Figure("CIFAR-10", image_set("cifar10", 10, 50000), sweep, claims, plots),
    "fashion": Figure("Fashion-MNIST", image_set("idx", 10, 60000), sweep, claims, plots),
    "cifar100": Figure("CIFAR-100, the paper's images", image_set("cifar100", 100, 50000), sweep, claims, plots),
}


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of FIGURE[,SCALE]."""
    return make_config("image_clusters_router", arg, FIGURES, PROTOCOL, SCALES)
