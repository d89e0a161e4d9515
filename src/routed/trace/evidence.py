"""The layers where a number is told from chance, and the layers whose experts follow a token's code."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from routed.analysis.wording import listed
from routed.trace import information
from routed.trace.numbers import LEVEL
from routed.trace.tokens import Conditional, Tokens

#: Permutations of the labels of sequences. The value is compared with them where sequences are few.
PERMUTATIONS = 199
#: Experts with this share of the largest possible information follow a code; with less they follow the code weakly.
FOLLOWS = 0.1
#: A token id names the label if the id leaves less than this share of the label's entropy.
NAMED = 0.05
#: Normal quantile of the ends of an interval.
QUANTILE = float(stats.norm.ppf((1 + LEVEL) / 2))


def told(table: pd.DataFrame, groups: int, limits: Mapping[tuple[str, str], float]) -> list[bool | None]:
    """Returns for each row (a layer and a number) True if its value is told from chance, None without an interval.

    The value lies above chance by t standard errors of the bootstrap, with groups - 1 degrees of freedom and a level
    of 2.5 % that is divided by the number of layers (Bonferroni). It is also above its limit in `limits`, by (layer,
    number): the 97.5 percentile of permutations.
    """
    error = (table.high - table.low).to_numpy() / (2 * QUANTILE)
    beyond = (table.value - table.chance).to_numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        sure = stats.t.sf(beyond / error, max(groups - 1, 1)) < (1 - LEVEL) / 2 / table.layer.nunique()
    limit = [limits.get(key, -np.inf) for key in zip(table.layer, table.number, strict=True)]
    above = sure & (table.value.to_numpy() > np.fmax(limit, table.chance.to_numpy()) + 1e-6)  # more than rounding
    judged = (table.low.notna() & table.chance.notna()).to_numpy()
    return [bool(yes) if can else None for yes, can in zip(above, judged, strict=True)]


def limit_of_permutations(load: np.ndarray, tokens: Tokens, name: str, seed: int = 0) -> float:
    """Returns the 97.5 percentile of I(expert; label) over permutations of a label among sequences.

    `load` [G, E] counts assignments by group. -inf unless each group is one sequence and each sequence has one label:
    with more sequences the bootstrap alone is right, with fewer its intervals are too short.
    """
    labels = tokens.by_sequence.get(name)
    if labels is None or tokens.sequences != tokens.groups:
        return -np.inf
    starts = np.flatnonzero(np.diff(tokens.sequence, prepend=-1))
    by_sequence, random = load[tokens.group[starts]].astype(float), np.random.default_rng(seed)
    one_hot = (labels[:, None] == np.arange(tokens.counts[name])).astype(float)
    draws = [information.mutual(random.permutation(one_hot).T @ by_sequence) for _ in range(PERMUTATIONS)]
    return float(np.quantile(draws, (1 + LEVEL) / 2))


def left_by_ids(tokens: Tokens, conditional: Conditional | None, name: str) -> float:
    """Returns H(label | token id) in nats, plug-in, on the tokens of `conditional`; NaN without."""
    if conditional is None:
        return float("nan")
    both, ids = (np.bincount(codes) for codes in (conditional.pairs[name][0], conditional.token))
    return information.entropy(both) - information.entropy(ids)


class Followed(NamedTuple):
    """One number over layers: arrays [L] of its value, its chance, and the largest value that is possible.

    `is_told` is by layer; None if the trace has no intervals.
    """

    value: np.ndarray
    chance: np.ndarray
    most: np.ndarray
    hash: np.ndarray
    is_told: np.ndarray | None

    @property
    def beyond(self) -> np.ndarray:
        """Values minus chance, at least 0."""
        return np.maximum(self.value - self.chance, 0)

    @property
    def share(self) -> np.ndarray:
        """Values minus chance, over the largest possible value minus chance."""
        return np.clip(self.beyond / np.maximum(self.most - self.chance, 1e-9), 0, 1)

    @property
    def strong(self) -> np.ndarray:
        """Layers that follow: told from chance, and at least `FOLLOWS` of what is possible."""
        return np.flatnonzero(self.sure & (self.share >= FOLLOWS))

    @property
    def weak(self) -> np.ndarray:
        """Layers that are told from chance and have less than `FOLLOWS` of what is possible."""
        return np.flatnonzero(self.sure & (self.share < FOLLOWS))

    @property
    def untold(self) -> np.ndarray:
        """Layers that are not told from chance."""
        return np.flatnonzero(~self.sure)

    @property
    def top(self) -> int:
        """The layer with the largest value beyond chance: of the strong layers, else of the weak ones, else of all."""
        chosen = next(filter(len, (self.strong, self.weak)), np.arange(len(self.value)))
        return int(chosen[self.beyond[chosen].argmax()])

    @property
    def sure(self) -> np.ndarray:
        """`is_told`; no layer is told from chance if the trace has no intervals."""
        return np.zeros(len(self.value), bool) if self.is_told is None else self.is_told


def followed(table: pd.DataFrame, number: str, most: np.ndarray | float = np.inf) -> Followed | None:
    """Returns a number over layers; None if the trace does not have it."""
    rows = table[table.number == number]
    if not len(rows):
        return None
    can = rows.told.notna().all()
    value, chance, hashed = (rows[column].to_numpy(float) for column in ("value", "chance", "hash"))
    limit = np.broadcast_to(np.asarray(most, float), value.shape)
    return Followed(value, chance, limit, hashed, np.array([*rows.told], bool) if can else None)


def short_names(layers: Sequence[str]) -> list[str]:
    """Returns names of layers as a sentence needs them: the number, if names differ in one number alone.

    model.layers.3.mlp.gate and model.layers.4.mlp.gate are 3 and 4.
    """
    parts = [re.split(r"(\d+)", name) for name in layers]
    if len(layers) < 2 or len({len(split) for split in parts}) > 1:
        return [*layers]
    differing = [i for i in range(len(parts[0])) if len({split[i] for split in parts}) > 1]
    if len(differing) != 1 or not differing[0] % 2:
        return [*layers]
    return [split[differing[0]] for split in parts]


def among(indices: Sequence[int], names: Sequence[str]) -> str:
    """Returns "layer 3", "layers 2 and 3", "layers 0 to 4 and 7" or "all 4 layers"."""
    if len(indices) == len(names) > 1:
        return f"all {len(names)} layers" if len(names) > 2 else "both layers"
    return f"layer{'s' if len(indices) > 1 else ''} {listed(indices, names.__getitem__)}"
