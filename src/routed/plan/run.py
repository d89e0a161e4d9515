"""One run of a plan: an arm with a seed, at every point at which the run is the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

#: Dotted config keys and values.
Point = dict[str, Any]


class Run(NamedTuple):
    """One arm with one seed, at every point at which it is the same run.

    `key` is a hash of everything that decides its result, and `config` has the settings that its parts read. `needs`
    are the keys of the runs that must be finished before it starts: its tuning runs, and the source of a matched or
    transplanted arm. `flat_configs` are the whole configs at its `points`. `transplant` is the run whose trained router
    it gets.
    """

    key: str
    points: tuple[Point, ...]
    arm: str
    seed: int
    tuning: bool
    config: ConfigDict
    needs: tuple[str, ...]
    flat_configs: tuple[Mapping[str, Any], ...]
    transplant: str | None = None
