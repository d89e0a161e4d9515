"""The scores of a router: the output of the last linear map of its forward pass, which can be read and replaced.

The module's own code makes choices of the scores, whatever its class: softmax or sigmoid, bias, groups, norm, scaling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode


class LinearMap(NamedTuple):
    """A linear map: its input [T, D], weight [E, D], offset [E] or None, and its output [T, E]."""

    features: Any
    weight: Any
    offset: Any
    scores: Any


#: Router -> its linear map with replaced scores, while they are replaced.
REPLACED: dict[Any, LinearMap] = {}


class _Maps(TorchFunctionMode):
    """Records the linear maps of a forward pass, replaces the output of one, and the values of other tensors."""

    def __init__(self, index: int = -1, make: Callable[[LinearMap], Any] | None = None, values: Sequence[Any] = ()):
        super().__init__()
        self.maps: list[LinearMap] = []
        self.index, self.make, self.values = index, make, values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for old, new in self.values:
            args = tuple(new if arg is old else arg for arg in args)
        result = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear:
            self.maps.append(_map_of(result, *args, **(kwargs or {})))
            if self.make is not None and len(self.maps) - 1 == self.index:
                scores = self.make(self.maps[-1])
                result = scores.reshape(result.shape).to(result.dtype)
                self.maps[-1] = self.maps[-1]._replace(scores=flat(result))
        return result


def _map_of(result: Any, input: Any, weight: Any, bias: Any = None) -> LinearMap:
    return LinearMap(flat(input), weight, bias, flat(result))


def flat(tensor: Any) -> Any:
    """Returns a tensor of [..., N] as [T, N]."""
    return tensor.reshape(-1, tensor.shape[-1])


def _maps_of(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[LinearMap]:
    with _Maps() as recorded:
        module.forward(*args, **kwargs)
    return recorded.maps


def map_of(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LinearMap | None:
    """Returns the linear map that gives a router's scores for these arguments; None if its scores come from none."""
    if module in REPLACED:
        return REPLACED[module]
    maps = _maps_of(module, args, kwargs)
    return maps[-1] if maps else None


def output_with(
    module: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    make: Callable[[LinearMap], Any],
    values: Sequence[tuple[Any, Any]] = (),
) -> Any:
    """Returns the router's output for other scores: `make` returns them [T, E] from the map with the trained ones.

    `values` are pairs of a tensor that the router reads and the tensor to read instead.
    Returns None if the scores come from no linear map.
    """
    last = len(_maps_of(module, args, kwargs)) - 1
    if last < 0:
        return None
    with _Maps(last, make, values) as recorded:
        output = module.forward(*args, **kwargs)
    REPLACED[module] = recorded.maps[last]
    return output
