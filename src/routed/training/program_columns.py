"""Columns that the training program adds to those of any problem."""

from __future__ import annotations

from routed.contracts import AT_LEAST_0, SHARE, Column
from routed.layer.auxiliary import AUXILIARY

#: name -> column.
PROGRAM = {
    "train/steps": Column(
        "steps until the run stopped",
        bounds=AT_LEAST_0,
        definition="Optimiser steps after which the run stopped by itself, or all of them.",
    ),
    "train/stopped": Column(
        "share of runs that stopped",
        bounds=SHARE,
        definition="Share of runs that ended by a rule of the config before their last step.",
    ),
    "train/rate_scale": Column(
        "multiplier of all rates",
        log=True,
        bounds=AT_LEAST_0,
        definition="The factor on all learning rates that tuning chose for the run, or 1.",
    ),
} | {
    f"train/coefficient_{name}": Column(
        f"coefficient losses.{name}",
        log=True,
        bounds=AT_LEAST_0,
        definition=f"What losses.{name} has become where losses.{loss.steered_by} steers it.",
    )
    for name, loss in AUXILIARY.items()
    if loss.adapted is not None
}
