"""Settings of wide ResNets, and the columns of their cost."""

from __future__ import annotations

from routed.contracts import AT_LEAST_0, Column
from routed.settings.setting import FRACTION, Allowed, Setting, at_least, one_of

SETTINGS: dict[str, Setting] = {
    "resnet.factor": Setting(10, "widening factor: a block has 16, 32 and 64 filters times this", at_least(1)),
    "resnet.norm": Setting(
        "batch", "what is normalised: channels over a batch, or groups of 8 of a sample", one_of(("batch", "group"))
    ),
    "resnet.momentum": Setting(0.9, "what the statistics of a batch normalisation keep in a step", FRACTION),
}
#: Settings of the mixture alone.
PATCHES: dict[str, Setting] = {
    "resnet.patch": Setting(1, "positions of a side of a patch of the last map", at_least(1)),
    "resnet.filter": Setting(
        1,
        "positions of a side of an expert's filters: 1, or 3, which see their patch only",
        Allowed(lambda v: v in (1, 3), lambda: "must be 1 or 3"),
    ),
}
COLUMNS: dict[str, Column] = {
    "model/flops": Column(
        "FLOPs a sample, forward",
        log=True,
        bounds=AT_LEAST_0,
        definition="FLOPs of the products and convolutions of one sample, forward, by their sizes.",
    ),
    "model/flops_last": Column(
        "FLOPs a sample of the last convolution\nor of the mixture, forward",
        log=True,
        bounds=AT_LEAST_0,
        definition="The part of these that the last convolution has, or the mixture in its place.",
    ),
    "model/train_flops": Column(
        "FLOPs of the whole training",
        log=True,
        bounds=AT_LEAST_0,
        definition="Three times the FLOPs of a forward pass, of all samples of the training.",
    ),
    "model/parameters": Column(
        "parameters that are trained",
        log=True,
        bounds=AT_LEAST_0,
        definition="Trained numbers of the model, of all of its experts.",
    ),
}
