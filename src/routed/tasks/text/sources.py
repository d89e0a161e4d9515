"""Sources of text, by the config key `data.name`, and the settings of any text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from routed.contracts import TextBatch, UserError
from routed.settings.setting import COUNT, POSITIVE, Setting, accept, at_least, between, one_of, refuse
from routed.tasks.text.artificial import artificial
from routed.tasks.text.documents import Source
from routed.tasks.text.files import files
from routed.tasks.text.mc4 import mc4_jsonl, tfds


class TextSource(NamedTuple):
    """A source of text; routers get the features of a hidden layer.

    `floors(data, rows)` are lower bounds of the loss, for models with different knowledge: columns `eval/NAME`.
    """

    open: Callable[[Any], Source]
    about: Callable[[Any], str]  # end of the sentence that describes the data
    tokens: str = "hidden"
    provides: frozenset[str] = frozenset({"token_id", "previous_id", "cluster"})
    settings: Mapping[str, Setting] = {}
    reads: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    check: Callable[[ConfigDict], None] = accept
    floors: Callable[[Any, TextBatch], Mapping[str, float]] | None = None


#: Settings of the node `data` for any text; a row is one training example of one language.
SHARED: dict[str, Setting] = {
    "languages": Setting((), "codes of the languages; empty: all that are there"),
    "temperature": Setting(1.0, "a language is drawn in proportion to its text to the power 1 / temperature", POSITIVE),
    "tokens": Setting(
        "train",
        "a SentencePiece model file; train: one fitted to the training text; bytes; or characters: a to z and the "
        "space, as in text8",
    ),
    "vocabulary": Setting(2048, "token ids, sentinels (the highest ones) included", COUNT),
    "input_length": Setting(
        128, "encoder tokens of a row, from which the target's length follows (a decoder predicts as many)", at_least(8)
    ),
    "noise_density": Setting(0.15, "share of the tokens that are cut out", between(0, 1)),
    "mean_span": Setting(3.0, "mean length of what is cut out at one place", at_least(1)),
    "damaged": Setting(
        "skip", "a truncated shard: skip what is missing and count it, or refuse", one_of(("skip", "refuse"))
    ),
    "eval_rows": Setting(
        512, "validation rows (a decoder: as many test rows), spread evenly over the languages", at_least(1)
    ),
    "cache": Setting("", "folder of tokenised text and trained tokenizers; empty: ~/.cache/routed", identity=False),
}


def _check(config: ConfigDict) -> None:
    if not config.data.directory:
        raise UserError(
            f"config key data.directory is empty: name the folder with the text of data.name={config.data.name!r}"
        )


def _check_files(config: ConfigDict) -> None:
    _check(config)
    if config.data.get("packing", "stream") != "stream":  # a T5 packs nothing
        refuse("data.packing", config.data.packing, "plain files are one text each, without documents; use stream")


def _stand_in(data: ConfigDict) -> str:
    return "; a stand-in unless that is mC4 itself"


#: name -> source.
SOURCES: dict[str, TextSource] = {
    "mc4_jsonl": TextSource(mc4_jsonl, _stand_in, reads=("directory",), check=_check),
    "tfds": TextSource(tfds, _stand_in, reads=("directory",), check=_check),
    "files": TextSource(files, lambda data: ", plain files", reads=("directory",), check=_check_files),
    "artificial": TextSource(artificial, lambda data: ", artificial languages"),
}
