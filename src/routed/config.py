"""Every setting, declared once: the base config, what may vary inside one compiled program, and overrides.

An experiment file starts from `base()` and changes values; it may not add keys, so a misspelt key is always an error.
"""

from __future__ import annotations

import difflib
import math
from typing import Any

from ml_collections import ConfigDict

from routed.words import UserError

#: The only settings that may differ between runs of one compiled program. All others are static: a new value of one
#: costs a compile. Every run also carries its own `seed`.
TRACED = (
    "data.separation",
    "data.samples",
    "data.alpha_low",
    "data.alpha_high",
    "data.beta_low",
    "data.beta_high",
    "data.gamma_low",
    "data.gamma_high",
    "data.patch_noise",
    "data.input_scale",
    "router.frozen",
    "router.from_data",
    "router.entropy",
    "router.init_scale",
    "router.learning_rate",
    "experts.learning_rate",
    "optimizer.weight_decay",
    "optimizer.rate_scale",
)

#: Settings that do not change what a finished run computed: how many runs there are, where they run, how they are judged.
NOT_IDENTITY = (
    "name",
    "figure",
    "scale",
    "seed",
    "seeds",
    "arms",
    "gate.train_loss",
    "gate.plateau",
    "mesh.run",
    "mesh.data",
    "mesh.expert",
    "mesh.batching",
    "mesh.runs_per_batch",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.final",
    "data.directory",  # text and images are known by their digest, wherever they lie
    "data.cache",
)

#: What a point may say of how it is run: which arms, and how many seeds. No column of the results.
PLANNED = ("arms", "seeds")

#: Scales of an experiment file that declares no SCALES of its own.
SCALES = ("smoke", "default", "paper")


def base() -> ConfigDict:
    """The base config. A new experiment changes these values and adds no key."""
    c = ConfigDict()
    c.name = ""  # of the experiment; names the default workdir
    c.figure = ""  # of the experiment; empty for its headline
    c.scale = "default"  # smoke | default | paper, or what the file declares
    c.seed = 0  # base seed; run i of a point uses seed + i
    c.seeds = 3  # runs of each point and arm
    c.held = ()  # streams of world, init, order, noise that all seeds share (taken from the base seed)
    c.steps = 4000  # optimiser steps
    c.eval_every = 500  # steps between evaluations; divides steps
    c.batch_size = 32  # training tokens per step
    c.arms = ("learned", "frozen")  # names in routed.arms.ARMS
    c.rates = "paper"  # paper: the rates below; tuned: times the best of tune.multipliers, per arm
    c.loss = "squared"  # in routed.losses.TASK_LOSSES, of tasks of samples
    c.model = "moe"  # in routed.models.MODELS: moe | dense_active (FLOPs of one routed token) | dense_total (parameters of the
    # whole layer) | dense_expert | kmeans, two_experts (theory: without a router and rules of selection).
    # A text task (data.name) makes it a T5 of `transformer`, a task of samples one layer.

    c.data = ConfigDict()
    c.data.name = "gmm"  # in routed.data.TASKS
    c.data.clusters = 64  # Gaussians, subspaces, atoms, equally likely; images: classes
    c.data.dim = 24  # dimensions in which the clusters differ; images: numbers of the vector beside an image
    c.data.spurious_dims = 0  # further dimensions, the same for every cluster
    c.data.target = "constant"  # one of the task's targets
    c.data.target_dim = 10  # outputs of that target
    c.data.rank = 8  # subspaces: their dimension; dictionary: atoms of a sample
    c.data.noise = 0.1  # standard deviation around a subspace (within it: 1), or of the two_gaussians
    # patches: one each of a feature, a centre and a false feature, whose strengths are uniform between these; the rest is noise.
    c.data.patches = 4
    c.data.alpha_low, c.data.alpha_high = 0.5, 2.0  # of the feature
    c.data.beta_low, c.data.beta_high = 1.0, 2.0  # of the centre
    c.data.gamma_low, c.data.gamma_high = 0.5, 3.0  # of the false feature
    c.data.patch_noise = 1.0  # sigma: noise patches are N(0, sigma^2 / dim), of norm sigma or so
    c.data.noise_outside = False  # they are orthogonal to all signals, of norm sigma
    c.data.input_scale = 1.0  # times the samples
    c.data.radius = 0.9  # two_gaussians: no sample is further from its mean, which is at distance 1 from 0
    c.data.positions = 1  # sequence: tokens of a sample
    c.data.separation = 1.0  # c: min over pairs of |mu_i - mu_j| / (sigma sqrt(dim)), sigma = 1
    c.data.samples = 8192  # training samples, drawn with replacement in batches
    c.data.fresh = False  # every batch is new: samples is not used
    c.data.whole = False  # every batch is all of the samples: batch_size of them
    c.data.test_samples = 6400  # the same number from each cluster; 100 per expert make `dead` defined
    c.data.images = "generated"  # of images: idx (MNIST, Fashion-MNIST) | cifar10 | cifar100 | tfds:NAME | generated
    # Of text (data.name mc4_jsonl, tfds, generated); a row is one training example of one language.
    c.data.directory = ""  # mc4_jsonl, images: the folder of their files; tfds: TFDS's data_dir
    c.data.languages = ()  # codes; empty: all that are there
    c.data.temperature = 1.0  # a language is drawn in proportion to its text to the power 1 / temperature
    c.data.tokens = "train"  # a SentencePiece model file | train: one fitted to the training text | bytes
    c.data.vocabulary = 2048  # token ids, sentinels (the highest ones) included
    c.data.input_length = 128  # encoder tokens of a row; the length of the target follows from it
    c.data.noise_density = 0.15  # share of the tokens that are cut out
    c.data.mean_span = 3.0  # mean length of what is cut out at one place
    c.data.damaged = "skip"  # a truncated shard: skip what is missing, with a warning that counts, or refuse
    c.data.eval_rows = 512  # validation rows, spread evenly over the languages
    c.data.cache = ""  # folder of tokenised text and trained tokenizers; empty: ~/.cache/routed

    c.router = ConfigDict()
    c.router.name = "linear"  # in routed.routers.ROUTERS
    c.router.depth = 2  # layers of the mlp router, scores included; convolutions of the cnn router
    c.router.width = 64  # hidden units of the mlp router; filters of the cnn router's first convolution
    c.router.window = 1  # of the conv router: positions along each axis
    c.router.dim = 16  # of the cosine router: dimensions of the down-projection
    c.router.vocabulary = 32128  # of the hash_id router: token ids, and
    c.router.choices = 1  # ... experts of each
    c.router.noise = (
        "none"  # none | uniform | gaussian | learned (both N(0, 1) times a scale) | jitter of the router's input
    )
    c.router.noise_scale = 1.0  # of uniform, gaussian and jitter
    c.router.noise_in_weights = False  # noise reaches the combine weights too, not only the choice
    c.router.noise_at_eval = False  # also when test samples are routed
    c.router.frozen = False  # parameters stay bit for bit what they were at step 0
    c.router.from_data = False  # rows are training examples (Dikkala et al., Theorem 2)
    c.router.entropy = 0.0  # nats; > 0: initial weights are scaled until the mean per-token entropy is this
    c.router.init_scale = 1.0  # times lecun_normal
    c.router.bias = False  # of linear, mlp and conv: a score of each expert for every token, 0 at the start
    c.router.learning_rate = 0.1

    c.router.stop_gradient = False  # what the router learns does not reach the layers below it

    c.transformer = ConfigDict()  # of model t5
    c.transformer.layers = 2  # of the encoder, and as many of the decoder
    c.transformer.sparse_layers = 1  # of them in each stack, spaced equally
    c.transformer.dim = 32
    c.transformer.heads = 4
    c.transformer.head_dim = 16
    c.transformer.ffn = "gated_ffn"  # ffn | gated_ffn, of the dense layers; activation: experts.activation
    c.transformer.width = 128  # hidden units of the dense layers' FFN
    c.transformer.tied = False  # logits through the embedding
    c.transformer.buckets = 32  # of relative positions
    c.transformer.max_distance = 128  # positions further apart share a bucket
    c.transformer.init_scale = 1.0  # variance of every weight matrix, times T5's
    c.transformer.remat = False  # compute activations again instead of keeping them
    c.transformer.dtype = "float32"  # float32 | bfloat16, of products; routers and softmax are float32 always

    c.experts = ConfigDict()
    c.experts.name = "mlp"  # in routed.experts.EXPERTS
    c.experts.count = 64
    c.experts.depth = 3  # weight layers of an mlp
    c.experts.width = 96  # hidden units of an mlp, ffn; filters of a cnn, for each output
    c.experts.activation = "relu"  # of mlp, cnn, ffn; in routed.experts.ACTIVATIONS
    c.experts.bias = False  # of a cnn
    c.experts.init = "lecun"  # of a cnn: N(0, 1 / dim), no bias | uniform: on +- 1 / sqrt(dim), biases too
    c.experts.init_scale = 1.0  # times that
    c.experts.learning_rate = 0.01

    c.selection = ConfigDict()
    c.selection.name = "soft"  # in routed.selection.SELECTIONS; the rule of training
    c.selection.k = 1  # experts per token of top_k
    c.selection.renormalise = (
        True  # top_k weights sum to 1 (k = 1: exactly 1), else they are full-softmax probabilities
    )
    c.selection.no_gradient = False  # says that a learned router without gradient (k = 1 renormalised) is meant
    c.selection.capacity_factor = 0.0  # 0: dropless; else a queue has this many times its fair share of places
    c.selection.capacity_rule = "per_assignment"  # ceil(factor k T / E), or per_token: round(factor T / E)
    c.selection.min_capacity = 1  # places in a queue, at least
    c.selection.group_size = 0  # tokens that queue together; divides the batch; 0: all
    # Who gets a place: position: the first in the batch; score: the highest weight; causal: the first in the batch with all
    # its choices. Decoders are causal always.
    c.selection.priority = "position"
    c.selection.balance_rate = 0.0  # step of a bias that balances the load and only chooses; 0: no bias
    c.selection.eval = ConfigDict()  # the rule of evaluation, where it differs
    c.selection.eval.name = "top_k"
    c.selection.eval.k = 1
    c.selection.eval.renormalise = True
    c.selection.eval.capacity_factor = 0.0
    c.dispatch = "dense"  # in routed.dispatch.DISPATCHES, or auto

    c.losses = ConfigDict()  # coefficients of auxiliary losses; a fixed or frozen router has none
    c.losses.balance = 0.0  # E sum_e load_e mean-probability_e: 1 at uniform
    c.losses.balance_of = "probabilities"  # probabilities | scores: mean-score_e stands in their place
    c.losses.balance_scope = "batch"  # batch | group: over which tokens load and probability are taken
    c.losses.importance = 0.0  # squared variation of the experts' summed probabilities
    c.losses.z = 0.0  # mean squared log-partition
    c.losses.entropy = 0.0  # mean per-token entropy; positive sharpens
    c.losses.logits_z = 0.0  # of a language model: mean squared log-partition of its logits

    c.optimizer = ConfigDict()
    c.optimizer.name = "sgd"  # sgd | adam | adafactor
    c.optimizer.momentum = 0.9  # of sgd
    c.optimizer.b1 = 0.9  # of adam
    c.optimizer.b2 = 0.999
    c.optimizer.eps = 1e-8
    c.optimizer.weight_decay = 0.0  # decoupled: times the learning rate; on router and experts
    c.optimizer.l2 = 0.0  # coupled weight decay: times the weights, added to the gradient
    # none | expert: an expert's gradient is divided by its norm | expert_sum: by the sum of the norms of its tensors | tensor:
    # each of its tensors by its own.
    c.optimizer.normalise = "none"
    c.optimizer.rate_scale = 1.0  # times both learning rates
    c.optimizer.schedule = "constant"  # constant | linear: to 0 at the end | rsqrt: times sqrt(warmup / step)
    c.optimizer.warmup = 0  # steps in which the rates grow linearly from 0; the schedule comes after them
    c.optimizer.clip = 0.0  # largest global norm of the gradient, without the router's where it is frozen; 0: none

    c.stop = ConfigDict()  # a run takes no further step when its training loss is above the lowest so far
    c.stop.rise = 0.0  # ... by more than this (0: it never stops), or
    c.stop.floor = 0.0  # ... and is at most this
    c.stop.after = 0  # steps before which it goes on

    c.shuffles = 32  # draws of the shuffled-router baseline at an evaluation; 0: none

    c.tune = ConfigDict()  # read when rates is tuned: the same budget for every arm
    c.tune.multipliers = (0.3, 1.0, 3.0)  # candidates for optimizer.rate_scale; lowest final test/loss wins
    c.tune.seeds = 1  # tuning seeds, never evaluated: seed + 1,000,000 + i

    c.gate = ConfigDict()  # convergence gate: no verdict unless every arm it compares passes
    c.gate.train_loss = 0.1  # normalised training loss (as trained) below this, or
    # it beats a bigram model on the validation text (language models, whose loss has no trivial scale), or
    c.gate.plateau = 0.02  # it moved by less than this share between the last two evaluations

    c.mesh = ConfigDict()
    c.mesh.run = 0  # devices that share the runs; 0: all (on a CPU, one per core)
    c.mesh.data = 1  # devices that share the rows of one run's batch, and
    c.mesh.expert = 1  # ... its experts: with data x expert > 1, runs come one after the other
    c.mesh.batching = "auto"  # map (one run after the other) | vmap | auto: map on CPU, vmap elsewhere
    c.mesh.runs_per_batch = 16  # runs that advance together, at most: the unit of a checkpoint

    c.checkpoint = ConfigDict()
    c.checkpoint.every = 0  # steps between checkpoints of unfinished runs; divides eval_every; 0: eval_every
    c.checkpoint.keep = 2  # the last ones that are kept, beside the one with the lowest validation loss
    c.checkpoint.final = False  # keep the parameters of finished runs, under models/
    return c.lock()


def flatten(config: ConfigDict) -> dict[str, Any]:
    """Dotted keys and values, in declared order."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            flat |= {f"{key}.{inner}": leaf for inner, leaf in flatten(value).items()}
        else:
            flat[key] = value
    return flat


def nearest(name: str, known) -> str:
    """A hint for a misspelt name, empty when nothing is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def parse(config: ConfigDict, key: str, text: str) -> Any:
    """The value of `key` written as `text`, by the type of the declared value.

    Raises:
      UserError: unknown key or wrong type.
    """
    current = _declared(config, key)
    if not isinstance(current, tuple):
        return _convert(key, current, text)
    kind = current[0] if current else ""
    return tuple(_convert(key, kind, part.strip(" '\"()")) for part in text.split(",") if part.strip(" '\"()"))


def override(config: ConfigDict, changes: dict[str, Any]) -> ConfigDict:
    """A locked copy of `config` with dotted `changes` applied; types must match (an int may stand for a float).

    Raises:
      UserError: unknown key or wrong type; a bool is no int.
    """
    config = config.copy_and_resolve_references()  # deep: nested nodes are not shared
    for key, value in changes.items():
        current = _declared(config, key)
        if isinstance(current, float) and type(value) is int:
            value = float(value)
        if isinstance(current, tuple) and isinstance(value, list):
            value = tuple(value)
        if type(value) is not type(current):
            raise UserError(
                f"config key {key}={value!r}: expected {type(current).__name__}, got {type(value).__name__}"
            )
        *path, last = key.split(".")
        node = config
        for part in path:
            node = node[part]
        node[last] = value
    return config.lock()


def variant(arg: str | None, figures, scales: tuple[str, ...] = SCALES) -> tuple[str, str]:
    """Splits the part behind `FILE:` into figure and scale: FIGURE, FIGURE,SCALE or SCALE alone.

    Raises:
      UserError: unknown figure or scale.
    """
    parts = [part for part in (arg or "").split(",") if part]
    if len(parts) == 1 and parts[0] in scales:
        parts = ["", parts[0]]
    if len(parts) > 2:
        raise UserError(f"--config=...:{arg}: unknown form; expected FILE[:FIGURE[,SCALE]]")
    figure, scale = parts + ["", "default"][len(parts) :]
    if figure not in figures:
        known = ", ".join(f for f in figures if f)
        raise UserError(
            f"--config=...:{arg}: unknown figure {figure!r}{nearest(figure, [*figures, *scales])}; known: {known}"
        )
    if scale not in scales:
        raise UserError(
            f"--config=...:{arg}: unknown scale {scale!r}{nearest(scale or '', scales)}; known: {', '.join(scales)}"
        )
    return figure, scale


def _declared(config: ConfigDict, key: str) -> Any:
    flat = flatten(config)
    if key not in flat:
        raise UserError(f"unknown config key {key!r}{nearest(key, flat)}")
    return flat[key]


def _convert(key: str, current: Any, text: str) -> Any:
    """`text` as the type of `current`."""
    if isinstance(current, bool):
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise UserError(f"config key {key}={text}: expected bool (true or false)")
    try:
        value = type(current)(text)
    except ValueError:
        raise UserError(f"config key {key}={text}: expected {type(current).__name__}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"config key {key}={text}: expected a finite number")
    return value
