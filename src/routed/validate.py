"""What a config may say: each key by the table of `routed.rules`, then together; checked for every point and arm before compiling."""

from __future__ import annotations

import math

from ml_collections import ConfigDict

from routed.config import NOT_IDENTITY, PLANNED, base, flatten, nearest
from routed.data import TASKS
from routed.data.text import SOURCES
from routed.dispatch import refuse
from routed.experts import EXPERTS
from routed.losses import TASK_LOSSES
from routed.models.sizes import blocks_of, is_sparse, shared_group, tokens_of, whole_groups
from routed.routers import FIXED
from routed.rules import RULES, TUNING_OFFSET
from routed.selection import groupless, rule_of
from routed.words import UserError

#: Every key with its declared value, for names and types.
DECLARED = flatten(base())

#: Selections that a balancing bias can steer.
BIASED = ("top_k", "raw", "sigmoid", "sinkhorn")


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
    _validate_patches(config)
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


def _validate_patches(config: ConfigDict) -> None:
    """Patches, their labels and losses, and what only experts on patches have."""
    data, outputs = config.data, TASKS[config.data.name].outputs(config.data)
    needed = TASK_LOSSES[config.loss][1]
    if (needed is None) == (data.name == "patches") or (needed is not None and (needed == 1) != (outputs == 1)):
        fitting = ("logistic" if outputs == 1 else "cross_entropy") if data.name == "patches" else "squared"
        raise UserError(
            f"config key loss={config.loss!r}: does not fit data.target={data.target!r} of data.name={data.name!r}; use {fitting!r}"
        )
    if data.whole and (data.fresh or config.batch_size != data.samples):
        raise UserError(
            f"config key data.whole=True: needs data.fresh=false and batch_size={config.batch_size} equal to"
            f" data.samples={data.samples}"
        )
    if config.optimizer.normalise != "none" and config.model != "moe":
        raise UserError(
            f"config key optimizer.normalise={config.optimizer.normalise!r}: model={config.model!r} has no experts; set 'none'"
        )
    fits = ("cnn", "constant") if data.name == "patches" else tuple(name for name in EXPERTS if name != "cnn")
    if config.model in ("moe", "dense_expert") and config.experts.name not in fits:
        raise UserError(
            f"config key experts.name={config.experts.name!r}: not for samples of data.name={data.name!r}; use one of"
            f" {', '.join(fits)}"
        )
    if data.name != "patches":
        return
    for name in ("alpha", "beta", "gamma"):
        low, high = data[f"{name}_low"], data[f"{name}_high"]
        if low > high:
            raise UserError(f"config keys data.{name}_low={low}, data.{name}_high={high}: the first must not be larger")
    if 2 * data.clusters > data.dim:
        raise UserError(
            f"config key data.dim={data.dim}: 2 data.clusters = {2 * data.clusters} orthogonal signals need as many"
        )
    if data.noise_outside and data.dim == 2 * data.clusters:
        raise UserError(
            f"config key data.noise_outside=True: data.dim={data.dim} leaves no room outside of the signals"
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
        ("data.whole", config.data.whole, "a batch is a part of the text"),
        ("stop.rise", config.stop.rise > 0, "a language model trains to its last step"),
        (
            "optimizer.normalise",
            config.optimizer.normalise != "none",
            "its experts stand in several layers; use 'none'",
        ),
        ("loss", config.loss != "squared", "its loss is the cross entropy of tokens; leave it"),
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
        raise UserError(
            f"config key batch_size={config.batch_size}: {devices} devices cannot share it; use a multiple of {devices}"
        )
    if (
        is_sparse(config)
        and not groupless(rule_of(config.selection))
        and not whole_groups(config, config.selection.group_size, devices)
    ):
        raise UserError(
            f"config key selection.group_size={config.selection.group_size}: {devices} devices cannot share its groups of"
            f" {' and '.join(map(str, tokens_of(config)))} tokens (encoder, decoder); use"
            f" selection.group_size={shared_group(config, devices)}"
        )
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
    for key in sorted({key for point in sweep for key in point} & set(NOT_IDENTITY) - set(PLANNED)):
        raise UserError(
            f"sweep key {key}: cannot be swept, as it does not tell points apart; set it with --config.{key}=VALUE"
        )
