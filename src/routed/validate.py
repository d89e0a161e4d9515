"""What a config may say: one visible table of rules, checked for every point and arm before anything is compiled."""

from __future__ import annotations

import math
from collections import ChainMap

from ml_collections import ConfigDict

from routed.config import NOT_IDENTITY, base, flatten, nearest
from routed.data import TASKS, image_files
from routed.data.text import SOURCES
from routed.dispatch import DISPATCHES, refuse
from routed.experts import ACTIVATIONS, EXPERTS
from routed.models import MODELS
from routed.models.t5 import blocks_of
from routed.routers import FIXED, KINDS, ROUTERS
from routed.run import STREAMS
from routed.selection import SELECTIONS
from routed.words import UserError

#: Tuning seeds start this far behind the evaluation seeds, so the two never meet.
TUNING_OFFSET = 1_000_000


def _at_least(low):
    return lambda v: low <= v < math.inf, f"must be at least {low}"


def _one_of(names):
    return lambda v: v in names, f"must be one of {', '.join(names)}"


#: Every key with its declared value, for names and types.
DECLARED = flatten(base())

#: Selections that a balancing bias can steer.
BIASED = ("top_k", "sigmoid", "sinkhorn")

_FRACTION = (lambda v: 0 <= v < 1, "must be in [0, 1)")
_ABOVE_ZERO = (lambda v: 0 < v < math.inf, "must be positive")
_INT32 = (lambda v: 1 <= v < 2**31, "must be in [1, 2^31)")

#: key -> (is it possible?, what to do).
RULES = {
    "seed": (lambda v: 0 <= v < TUNING_OFFSET, f"must be in [0, {TUNING_OFFSET})"),
    "seeds": (lambda v: 1 <= v <= 10_000, "must be in [1, 10000]"),  # more would take minutes to plan
    "held": (lambda v: set(v) <= set(STREAMS), f"must name streams: {', '.join(STREAMS)}"),
    "steps": _INT32,
    "eval_every": _INT32,
    "batch_size": _at_least(1),
    "arms": (lambda v: len(v) >= 1, "must name at least one arm"),
    "rates": _one_of(("paper", "tuned")),
    "model": _one_of(MODELS),
    "data.name": _one_of(ChainMap(TASKS, SOURCES)),  # live: users add tasks
    "data.images": (
        lambda v: v in image_files.KINDS or (v.startswith("tfds:") and v != "tfds:"),
        f"must be one of {', '.join(image_files.KINDS)}, tfds:NAME",
    ),
    "data.temperature": _ABOVE_ZERO,
    "data.vocabulary": _INT32,
    "data.input_length": _at_least(8),
    "data.noise_density": (lambda v: 0 < v < 1, "must be in (0, 1)"),
    "data.mean_span": _at_least(1),
    "data.damaged": _one_of(("skip", "refuse")),
    "data.eval_rows": _at_least(1),
    "data.clusters": _at_least(2),
    "data.dim": _at_least(1),
    "data.spurious_dims": _at_least(0),
    "data.rank": _at_least(1),
    "data.noise": _ABOVE_ZERO,
    "data.radius": (lambda v: 0 < v < 1, "must be in (0, 1)"),
    "data.positions": _at_least(1),
    "data.target_dim": _at_least(1),
    "data.separation": _ABOVE_ZERO,
    "data.samples": _INT32,
    "data.test_samples": _at_least(1),
    "router.name": _one_of(ROUTERS),
    "router.depth": _at_least(1),
    "router.width": _at_least(1),
    "router.window": _at_least(1),
    "router.dim": _at_least(1),
    "router.vocabulary": _at_least(1),
    "router.choices": _at_least(1),
    "router.noise": _one_of(KINDS),
    "router.noise_scale": _at_least(0),
    "router.entropy": _at_least(0),
    "router.init_scale": _at_least(0),
    "router.learning_rate": _at_least(0),
    "transformer.layers": _at_least(1),
    "transformer.sparse_layers": _at_least(0),
    "transformer.dim": _at_least(1),
    "transformer.heads": _at_least(1),
    "transformer.head_dim": _at_least(1),
    "transformer.ffn": _one_of(("ffn", "gated_ffn")),
    "transformer.width": _at_least(1),
    "transformer.buckets": (lambda v: v >= 4 and v % 4 == 0, "must be a multiple of 4"),
    "transformer.max_distance": _at_least(2),
    "transformer.init_scale": _ABOVE_ZERO,
    "transformer.dtype": _one_of(("float32", "bfloat16")),
    "experts.name": _one_of(EXPERTS),
    "experts.count": _at_least(1),
    "experts.depth": _at_least(1),
    "experts.width": _at_least(1),
    "experts.activation": _one_of(ACTIVATIONS),
    "experts.learning_rate": _at_least(0),
    "selection.name": _one_of(SELECTIONS),
    "selection.k": _at_least(1),
    "selection.capacity_factor": _at_least(0),
    "selection.capacity_rule": _one_of(("per_assignment", "per_token")),
    "selection.min_capacity": _at_least(1),
    "selection.group_size": _at_least(0),
    "selection.priority": _one_of(("position", "score", "causal")),
    "selection.balance_rate": _at_least(0),
    # Not the others: they would route a test sample by its neighbours in the batch.
    "selection.eval.name": _one_of(("soft", "top_k", "sigmoid")),
    "selection.eval.k": _at_least(1),
    "selection.eval.capacity_factor": _at_least(0),
    "dispatch": _one_of(("auto", *DISPATCHES)),
    "losses.balance": _at_least(0),
    "losses.balance_scope": _one_of(("batch", "group")),
    "losses.importance": _at_least(0),
    "losses.z": _at_least(0),
    "losses.entropy": _at_least(0),
    "losses.logits_z": _at_least(0),
    "optimizer.name": _one_of(("sgd", "adam", "adafactor")),
    "optimizer.schedule": _one_of(("constant", "linear", "rsqrt")),
    "optimizer.warmup": _at_least(0),
    "optimizer.clip": _at_least(0),
    "optimizer.momentum": _FRACTION,
    "optimizer.b1": _FRACTION,
    "optimizer.b2": _FRACTION,
    "optimizer.eps": _ABOVE_ZERO,
    "optimizer.weight_decay": _at_least(0),
    "optimizer.rate_scale": _ABOVE_ZERO,
    "tune.multipliers": (lambda v: len(v) >= 1 and all(m > 0 for m in v), "must be positive numbers"),
    "tune.seeds": _at_least(1),
    "gate.train_loss": _at_least(0),
    "gate.plateau": _at_least(0),
    "mesh.run": _at_least(0),
    "mesh.data": _at_least(1),
    "mesh.expert": _at_least(1),
    "checkpoint.every": _at_least(0),
    "checkpoint.keep": _at_least(1),
    "mesh.batching": _one_of(("auto", "map", "vmap")),
    "mesh.runs_per_batch": _at_least(1),
}


def validate(config: ConfigDict) -> None:
    """Refuses impossible values, and what an experiment file declared that the base config does not.

    Raises:
      UserError: names the key, its value and what it must be.
    """
    flat = flatten(config)
    for key, value in flat.items():
        if key not in DECLARED:
            raise UserError(f"unknown config key {key!r}{nearest(key, DECLARED)}: an experiment may add no key")
        if type(value) is not type(DECLARED[key]):
            raise UserError(
                f"config key {key}={value!r}: expected {type(DECLARED[key]).__name__}, got {type(value).__name__}"
            )
    for key, (possible, mend) in RULES.items():
        if not possible(flat[key]):
            raise UserError(f"config key {key}={flat[key]!r}: {mend}")
    for key in ("selection.k", "selection.eval.k"):
        if flat[key] > config.experts.count:
            raise UserError(
                f"config key {key}={flat[key]}: more than experts.count={config.experts.count}; lower {key}"
            )
    if config.seed + config.seeds > TUNING_OFFSET:
        raise UserError(
            f"config key seeds={config.seeds}: seed + seeds must be at most {TUNING_OFFSET}, where the tuning seeds start"
        )
    if config.router.entropy > 0 and config.router.entropy >= math.log(config.experts.count):
        raise UserError(
            f"config key router.entropy={config.router.entropy}: must be below ln(experts.count)={math.log(config.experts.count):.4g}"
        )
    if config.model == "moe" and (reason := refuse(config.dispatch, config.selection.name)):
        raise UserError(f"config key dispatch={config.dispatch!r}: {reason}")
    if config.selection.balance_rate and config.selection.name not in BIASED:
        raise UserError(
            f"config key selection.balance_rate={config.selection.balance_rate}: selection.name={config.selection.name!r}"
            f" takes no bias; use one of {', '.join(BIASED)} or 0"
        )
    if config.steps % config.eval_every:
        raise UserError(f"config key eval_every={config.eval_every}: must divide steps={config.steps}")
    if config.checkpoint.every and config.eval_every % config.checkpoint.every:
        raise UserError(
            f"config key checkpoint.every={config.checkpoint.every}: must divide eval_every={config.eval_every}"
        )
    if config.data.name in SOURCES:
        _validate_text(config)
    else:
        _validate_samples(config)
    if (
        config.selection.k == 1
        and config.selection.renormalise
        and config.selection.name in ("top_k", "sigmoid", "sinkhorn")
        and not (config.router.frozen or config.selection.no_gradient)
    ):
        raise UserError(
            "config key selection.renormalise=True: with selection.k=1 the router gets no gradient, an accidental frozen"
            " router; set selection.renormalise=false or router.frozen=true (if it is meant: selection.no_gradient=true)"
        )


def _validate_samples(config: ConfigDict) -> None:
    task, data = TASKS[config.data.name], config.data
    if data.target not in task.targets:
        raise UserError(
            f"config key data.target={data.target!r}: data.name={data.name!r} has the targets {', '.join(task.targets)}"
        )
    if data.name == "dictionary" and data.rank > data.clusters:
        raise UserError(f"config key data.rank={data.rank}: a sample has at most data.clusters={data.clusters} atoms")
    if data.name == "subspaces" and data.rank > data.dim:
        raise UserError(f"config key data.rank={data.rank}: a subspace has at most data.dim={data.dim} dimensions")
    if data.target_dim != task.outputs(data):
        raise UserError(
            f"config key data.target_dim={data.target_dim}: the target {data.target!r} of data.name={data.name!r} has"
            f" another number of outputs; set data.target_dim={task.outputs(data)}"
        )
    for model, needs, met in (
        ("kmeans", "data.target='input'", data.target == "input"),
        ("two_experts", "data.name='two_gaussians'", data.name == "two_gaussians"),
    ):
        if config.model == model and not met:
            raise UserError(f"config key model={model!r}: its theorem is about {needs}; set that")
    if data.name == "two_gaussians" and data.dim < 2:
        raise UserError(f"config key data.dim={data.dim}: data.name='two_gaussians' needs at least 2")
    size = config.selection.group_size
    if size and config.batch_size % size:
        raise UserError(f"config key selection.group_size={size}: must divide batch_size={config.batch_size}")
    if config.router.from_data and config.router.name in FIXED:
        raise UserError(
            f"config key router.from_data=True: router.name={config.router.name!r} has no rows to fill with examples; drop"
            " the arm frozen_data"
        )
    if config.router.name == "hash_id":
        raise UserError(
            f"config key router.name='hash_id': the samples of data.name={config.data.name!r} have no token ids; use 'hash'"
        )
    _validate_images(config)
    if config.router.name == "conv" and (positions := task.dims(data)) % config.router.window:
        raise UserError(
            f"config key router.window={config.router.window}: must divide the {positions} positions of a sample"
        )
    if data.test_samples % (clusters := task.labels(data)):
        made = f"data.clusters={data.clusters}"
        made = made if clusters == data.clusters else f"{clusters}, the combinations that {made} make"
        raise UserError(f"config key data.test_samples={data.test_samples}: must be a multiple of {made}")
    if config.mesh.data * config.mesh.expert > 1:
        raise UserError(
            f"config keys mesh.data={config.mesh.data}, mesh.expert={config.mesh.expert}: the runs of"
            f" data.name={config.data.name!r} are small and are shared out whole; use mesh.run"
        )
    if config.checkpoint.final:
        raise UserError(
            f"config key checkpoint.final=True: runs of data.name={config.data.name!r} keep rows, no parameters; set it to false"
        )


def _validate_images(config: ConfigDict) -> None:
    """Of the settings only: classes and shapes are looked at when the files are read."""
    images, router = config.data.name == "images", config.router.name
    if images and config.data.images != "generated" and not config.data.directory:
        raise UserError(
            f"config key data.directory is empty: name the folder with the files of data.images={config.data.images!r}"
        )
    if images and router != "cnn" and router not in FIXED:
        raise UserError(
            f"config key router.name={router!r}: images (data.name='images') are routed by 'cnn', or without learning by"
            " 'hash', 'oracle' or 'random'"
        )
    if router == "cnn" and not images:
        raise UserError(
            f"config key router.name='cnn': the samples of data.name={config.data.name!r} are no images; use 'mlp'"
        )


def _validate_text(config: ConfigDict) -> None:
    if config.data.name != "generated" and not config.data.directory:
        raise UserError(
            f"config key data.directory is empty: name the folder with the text of data.name={config.data.name!r}"
        )
    blocks_of(config)  # refuses sparse layers that cannot be spaced equally
    for key, value, why in (
        ("router.from_data", config.router.from_data, "rows of text are no rows of a router"),
        ("router.entropy", config.router.entropy > 0, "the routers of a language model are not scaled"),
        ("router.name", config.router.name in ("oracle", "conv", "cnn"), "text has neither clusters nor windows"),
        (
            "selection.name",
            config.selection.name == "soft",
            "every expert on every token is no sparse model; use top_k",
        ),
        (
            "selection.name",
            config.selection.name in ("expert_choice", "sinkhorn"),
            "it routes a token of the decoder by later ones; use top_k or sigmoid",
        ),
        (
            "model",
            config.model == "moe" and not config.transformer.sparse_layers,
            "there is no sparse layer; set transformer.sparse_layers",
        ),
        ("model", config.model == "dense_expert", "a transformer is more than its experts; use dense_active"),
    ):
        if value:
            raise UserError(f"config key {key}={flatten(config)[key]!r}: not for data.name={config.data.name!r}: {why}")
    if config.router.name == "hash_id" and (
        config.router.vocabulary != config.data.vocabulary or config.router.choices != config.selection.k
    ):
        raise UserError(
            f"config keys router.vocabulary={config.router.vocabulary}, router.choices={config.router.choices}: must be"
            f" data.vocabulary={config.data.vocabulary} and selection.k={config.selection.k}"
        )
    devices = config.mesh.data * config.mesh.expert
    if config.batch_size % devices:
        raise UserError(f"config key batch_size={config.batch_size}: {devices} devices cannot share it; use a multiple")
    if config.experts.count % config.mesh.expert:
        fits = max(n for n in range(1, config.mesh.expert + 1) if config.experts.count % n == 0)
        raise UserError(
            f"config key mesh.expert={config.mesh.expert}: does not divide experts.count={config.experts.count}; use {fits}"
        )


def validate_sweep(sweep: tuple[dict, ...]) -> None:
    """Refuses to sweep what does not tell runs apart: their rows would be the same.

    Raises:
      UserError: names the key.
    """
    for key in sorted({key for point in sweep for key in point} & set(NOT_IDENTITY) - {"arms"}):
        raise UserError(
            f"sweep key {key}: cannot be swept, as it does not tell points apart; set it with --config.{key}=VALUE"
        )
