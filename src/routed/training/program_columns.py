"""Columns that the training program adds to those of any problem."""

from __future__ import annotations

from routed.contracts import AT_LEAST_0, SHARE, Column
from routed.layer.auxiliary import AUXILIARY

#: name -> column.
PROGRAM = {
    "train/steps": Column(
        "steps until the run stopped",
        "Optimiser steps after which the run stopped by itself, or all of them.",
        AT_LEAST_0,
    ),
    "train/stopped": Column(
        "share of runs that stopped", "Share of runs that ended by a rule of the config before their last step.", SHARE
    ),
    "train/rate_scale": Column(
        "multiplier of all rates",
        "The factor on all learning rates that tuning chose for the run, or 1.",
        AT_LEAST_0,
        log=True,
    ),
} | {
    f"train/coefficient_{name}": Column(
        f"coefficient losses.{name}",
        f"What losses.{name} has become where losses.{loss.steered_by} steers it.",
        AT_LEAST_0,
        log=True,
    )
    for name, loss in AUXILIARY.items()
    if loss.adapted is not None
}
