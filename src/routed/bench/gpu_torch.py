"""Torch's grouped product in the table of `bench gpu`: the same layer, routing and check, in a process without JAX.

Needs torch in the same environment; JAX is imported by neighbours, and asks for no device here.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from typing import Any

import numpy as np

from routed.bench import gpu_cells, gpu_layers
from routed.bench.gpu_cells import MOST, SECONDS, Cell, accept
from routed.bench.gpu_layers import SAMPLE, SHAPES, TINY_SHAPES, Shape
from routed.contracts import UserError
from routed.system.chips import chip_of
from routed.system.machine import Rates

#: Column of the table.
COLUMN = "torch"


def load_torch() -> tuple[Any, Any]:
    """Imports torch; returns it and its grouped product.

    Raises:
      UserError: names what is missing.
    """
    if importlib.util.find_spec("torch") is None:
        raise UserError("torch is not installed: pip install torch (2.8 or newer, for CUDA)")
    import torch

    product = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if product is None:
        raise UserError(f"torch {torch.__version__} has no grouped product: pip install 'torch>=2.8'")
    return torch, product


class TorchLayer:
    """A layer of a shape, with weights [E, f, d] and [E, d, f], and the routing of a load."""

    def __init__(self, shape: Shape, load: str):
        self.shape, (self.torch, self.product) = shape, load_torch()
        torch = self.torch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(0)
        wide, narrow = (shape.experts, shape.hidden, shape.dim), (shape.experts, shape.dim, shape.hidden)
        self.weights = [self.normal(*wide, scale=shape.dim**-0.5) for _ in range(shape.matrices - 1)]
        self.weights.append(self.normal(*narrow, scale=shape.hidden**-0.5))
        self.x = self.normal(shape.tokens, shape.dim)
        self.cotangent = self.normal(shape.tokens, shape.dim).detach()
        self.expert, self.weight = (torch.as_tensor(a, device=self.device) for a in gpu_layers.draw(shape, load))
        self.weight.requires_grad_()

    def normal(self, *axes: int, scale: float = 1.0) -> Any:
        """Draws a bfloat16 array that needs a gradient."""
        return (scale * self.torch.randn(axes, device=self.device)).bfloat16().requires_grad_()

    def apply(self) -> Any:
        """Returns the outputs [T, D]: rows sorted by expert, grouped products, and a weighted sum."""
        torch, flat = self.torch, self.expert.reshape(-1).long()
        order = torch.argsort(flat, stable=True)
        token = order // self.shape.k
        ends = torch.cumsum(torch.bincount(flat, minlength=self.shape.experts), 0).to(torch.int32)

        def product(rows, weights):
            return self.product(rows, weights.transpose(-2, -1), offs=ends)

        hidden = self.hidden([product(self.x[token], weights) for weights in self.weights[:-1]])
        outputs = product(hidden, self.weights[-1]) * self.weight.reshape(-1)[order, None].to(hidden.dtype)
        return torch.zeros_like(self.x).index_add(0, token, outputs)

    def hidden(self, products: list[Any]) -> Any:
        """Applies the activation to the products with the first matrices."""
        if self.shape.gated:
            return products[0] * self.torch.nn.functional.silu(products[1])
        return self.torch.relu(products[0])

    def run(self, way: str, cotangent: Any = None) -> tuple[Any, ...]:
        """Returns outputs, and both ways the gradients of weights, tokens and the assignments' weights."""
        if way == "forward":
            with self.torch.no_grad():
                return (self.apply(),)
        outputs = self.apply()
        inputs = [*self.weights, self.x, self.weight]
        gradients = self.torch.autograd.grad(outputs, inputs, self.cotangent if cotangent is None else cotangent)
        return (outputs, *gradients)

    def oracle(self, way: str, tokens: Any, cotangent: Any) -> tuple[Any, ...]:
        """Returns the same of sampled tokens: every expert on each of them, one after another in float32."""
        torch = self.torch
        x, weight = (a[tokens].detach().float().requires_grad_() for a in (self.x, self.weight))
        weights = [w.detach().float().requires_grad_() for w in self.weights]
        total = torch.zeros_like(x)
        for expert in range(self.shape.experts):
            share = torch.where(self.expert[tokens] == expert, weight, 0.0).sum(1, keepdim=True)
            hidden = self.hidden([x @ matrix[expert].T for matrix in weights[:-1]])
            total = total + share * (hidden @ weights[-1][expert].T)
        if way == "forward":
            return (total.detach(),)
        return (total.detach(), *torch.autograd.grad(total, [*weights, x, weight], cotangent[tokens].float()))

    def check(self, way: str) -> float:
        """Returns the distance from the oracle on sampled tokens.

        Raises:
          UserError: they differ.
        """
        torch, count = self.torch, min(SAMPLE, self.shape.tokens // 4)
        tokens = np.random.default_rng(1).choice(self.shape.tokens, count, replace=False)
        tokens = torch.as_tensor(tokens, device=self.device)
        cotangent = torch.zeros_like(self.cotangent).index_copy(0, tokens, self.cotangent[tokens])
        results, per_token = list(self.run(way, cotangent)), (0, -2, -1) if way == "both" else (0,)
        for index in per_token:
            results[index] = results[index][tokens]
        pairs = zip(results, self.oracle(way, tokens, cotangent), strict=True)
        return accept(max(float(((a.float() - b).norm() / b.norm()).detach()) for a, b in pairs))

    def seconds(self, way: str, count: int) -> float:
        """Runs a way `count` times; returns the seconds of one."""
        started = time.perf_counter()
        for _ in range(count):
            self.run(way)
        self.wait()
        return (time.perf_counter() - started) / count

    def wait(self) -> None:
        """Waits for the device."""
        if self.device == "cuda":
            self.torch.cuda.synchronize()


def measure(cell: Cell, rounds: int) -> dict[str, Any]:
    """Compares a cell with the oracle and times it.

    Raises:
      UserError: torch is missing, or its values are wrong.
    """
    torch, _ = load_torch()
    on_gpu = torch.cuda.is_available()
    shape = (SHAPES if on_gpu else TINY_SHAPES)[cell.shape]
    layer = TorchLayer(shape, cell.load)
    distance, temporary = layer.check(cell.way), None
    if on_gpu:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    layer.wait()
    count = max(1, min(MOST, round(SECONDS / layer.seconds(cell.way, 1))))
    times = [layer.seconds(cell.way, count) for _ in range(rounds)]
    record: dict[str, Any] = {"ms": 1e3 * statistics.median(times), "fastest_ms": 1e3 * min(times)}
    if on_gpu:
        temporary = torch.cuda.max_memory_allocated() - before
    record |= {"distance": distance, "temporary_bytes": temporary, "torch": torch.__version__}
    record["tflops"] = gpu_layers.flops_of(shape, cell.way) / record["ms"] / 1e9
    if on_gpu and (chip := chip_of(torch.cuda.get_device_name())):
        least = gpu_cells.floor_of(cell, shape, Rates(chip.peak, chip.bandwidth))
        record |= least | {"over_floor": record["ms"] / least["floor_ms"]}
    return gpu_cells.about(cell, shape) | record
