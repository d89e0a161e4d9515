"""Columns of `bench gpu` by other libraries, at tiny sizes on a CPU, against the oracle (pip install tokamax torch)."""

import sys

import pytest

from routed.bench import gpu_layers
from routed.bench.gpu_cells import Layer
from routed.bench.gpu_layers import TINY_SHAPES
from routed.bench.gpu_torch import TorchLayer


@pytest.mark.parametrize("load", gpu_layers.LOADS)
@pytest.mark.parametrize("name", ["qwen3", "ours"])
def test_torch_is_the_oracle(name, load):
    layer = TorchLayer(TINY_SHAPES[name], load)
    assert layer.check("both") < 0.015 and layer.check("forward") < 0.015


@pytest.mark.parametrize("load", gpu_layers.LOADS)
@pytest.mark.parametrize("name", ["qwen3", "ours"])
def test_tokamax_is_the_oracle(name, load, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench"])  # tokamax reads flags
    layer = Layer(TINY_SHAPES[name], "tokamax")
    assert layer.check("both", load) < 0.015 and layer.check("forward", load) < 0.015
