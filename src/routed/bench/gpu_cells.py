"""Cells of the table of `bench gpu`: compiled, compared with the oracle on sampled tokens, and then timed.

Programs that are compared are those that are timed: the cotangent is zero except for the sampled tokens, so that also
the gradients of weights belong to these tokens alone.
"""

from __future__ import annotations

import functools
import time
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from routed.aot import hlo
from routed.aot.topology import topology_of
from routed.bench import gpu_layers as layers
from routed.bench.gpu_layers import COLUMNS, DENSE_FFN, LOADS, SAMPLE, SHAPES, TINY_SHAPES, Shape
from routed.bench.harness import Case, Work, seconds_of, timed
from routed.bench.products import PRODUCTS, set_flags
from routed.contracts import UserError
from routed.engine.compilation import compile_lowered
from routed.system.machine import Rates, floor
from routed.system.platform import platform, tracing_for

#: Forward alone, and forward with all gradients.
WAYS = ("both", "forward")
#: Largest distance from the oracle, as a share of the norm: bfloat16 has 8 bits.
CLOSE = 0.03
#: A program with more times the FLOPs of its assignments is not timed: it multiplies rows with experts of others.
DENSE = 2.0
#: Seconds of a timed call, and the most times that the program runs in it.
SECONDS, MOST = 0.15, 50
#: The layer that several seeds train at once: as small as the layers of sweeps.
SEED_SHAPE, SEEDS = Shape(8192, 1024, 2048, 16, 2, gated=False), 8
TINY_SEED_SHAPE = Shape(64, 16, 16, 4, 2, gated=False)
#: Number of cores of a Hopper, which JAX's kernels ask a device for.
CORES = 132


class Cell(NamedTuple):
    """A cell of the table."""

    shape: str
    load: str
    way: str
    column: str

    @property
    def name(self) -> str:
        """Name of its case."""
        return f"{self.shape} {self.load} {self.way}: {self.column}"


def cells_of(columns: tuple[str, ...] = COLUMNS) -> list[Cell]:
    """Returns the cells, the most important first; a dense FFN has no load."""
    return [
        Cell(shape, load, way, column)
        for column in columns
        for shape in SHAPES
        for way in WAYS
        for load in (LOADS[:1] if column == DENSE_FFN else LOADS)
    ]


def about(cell: Cell, shape: Shape) -> dict[str, Any]:
    """Returns the columns that name a cell."""
    return cell._asdict() | shape._asdict()


def require(column: str, ahead: bool = False) -> None:
    """Refuses a column that cannot run here.

    Raises:
      UserError: names the reason and the mend.
    """
    if column in PRODUCTS and (reason := PRODUCTS[column].missing(ahead)):
        raise UserError(reason)


class Layer:
    """A layer of one shape and column: its inputs, and its programs, compiled when they are asked for."""

    def __init__(self, shape: Shape, column: str):
        self.shape, self.column = shape, column
        self.inputs = _inputs(shape, column)
        self.programs: dict[str, tuple[Any, float]] = {}
        self.outputs: dict[str, Any] = {}  # shapes

    def program(self, way: str) -> tuple[Any, float]:
        """Returns a compiled program and the seconds that it took."""
        if way not in self.programs:
            started = time.perf_counter()
            lowered = lower(self.shape, self.column, way, layers.shapes_of(self.shape, self.column))
            self.outputs[way] = lowered.out_info
            self.programs[way] = compile_lowered(lowered), time.perf_counter() - started
        return self.programs[way]

    def arguments(self, load: str, sampled: np.ndarray | None = None) -> tuple[Any, ...]:
        """Returns the arguments of a program; with `sampled` tokens other cotangents are zero."""
        params, x, cotangent = self.inputs
        expert, weight = map(jnp.asarray, layers.draw(self.shape, load))
        if sampled is not None:
            mask = jnp.zeros(len(x), bool).at[sampled].set(True)
            cotangent = jnp.where(mask[:, None], cotangent, 0)
        return params, x, weight, expert, cotangent

    def check(self, way: str, load: str) -> float:
        """Runs a program, and the oracle on some of its tokens; returns their distance.

        Raises:
          UserError: they differ.
        """
        tokens = np.random.default_rng(1).choice(self.shape.tokens, min(SAMPLE, self.shape.tokens // 4), replace=False)
        arguments = self.arguments(load, tokens)
        params, x, weight, expert, cotangent = arguments
        program, _ = self.program(way)
        outputs = program(self.empty(way), *arguments)
        computed = layers.within_capacity(self.shape, self.column, expert)
        weight = weight * computed
        expected = _expected(self.shape, way)(params, x[tokens], weight[tokens], expert[tokens], cotangent[tokens])
        if way == "forward":
            return accept(float(_distance(outputs[tokens], expected)))
        y, (of_params, of_x, of_weight) = outputs
        mine = y[tokens], (of_params, of_x[tokens], (of_weight * computed)[tokens])
        expected = expected[0], (*expected[1][:2], expected[1][2] * computed[tokens])
        return accept(float(_distance(mine, expected)))

    def empty(self, way: str) -> Any:
        """Returns zeros in the shapes of a program's outputs."""
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self.outputs[way])

    def caller(self, way: str, load: str) -> Any:
        """Returns a function that runs a program a few times, and gives the seconds of one."""
        program, arguments = self.program(way)[0], self.arguments(load)
        old, count = self.empty(way), 1

        def run() -> Any:
            nonlocal old
            for _ in range(count):
                old = program(old, *arguments)
            return old

        run()
        count = max(1, min(MOST, round(SECONDS / seconds_of(run)[1])))
        return lambda: seconds_of(run)[1] / count


def accept(distance: float) -> float:
    """Returns the distance from the oracle.

    Raises:
      UserError: it is too large.
    """
    if not distance < CLOSE:
        raise UserError(f"wrong: distance {distance:.3g} from the oracle, at most {CLOSE} is right")
    return distance


def lower(shape: Shape, column: str, way: str, shapes: tuple[Any, ...]) -> Any:
    """Lowers a program of a layer; its first argument are old outputs, of which it takes the memory."""
    set_flags(column)
    run = jax.jit(_way(layers.function_of(shape, column), way))  # traced once
    old = jax.eval_shape(run, *shapes)
    sharding = shapes[1].sharding
    old = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), old)
    return jax.jit(lambda old, *inputs: run(*inputs), donate_argnums=0, keep_unused=True).lower(old, *shapes)


def _way(apply: Any, way: str) -> Any:
    return layers.both_ways(apply) if way == "both" else lambda *inputs: apply(*inputs[:4])


_distance = jax.jit(layers.distance)


@functools.cache
def _expected(shape: Shape, way: str) -> Any:
    return jax.jit(_way(functools.partial(layers.oracle, shape), way))


def _inputs(shape: Shape, column: str) -> tuple[Any, Any, Any]:
    """Draws params, tokens and cotangents; weights have the scale 1 / sqrt(inputs)."""
    params, x, *_ = layers.shapes_of(shape, column)
    leaves, structure = jax.tree.flatten((params, x, x))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    arrays = []
    for key, leaf in zip(keys, leaves, strict=True):
        scale = leaf.shape[-2] ** -0.5 if leaf.shape != x.shape else 1.0
        arrays.append(_normal(leaf.shape)(key) * jnp.bfloat16(scale))
    return jax.tree.unflatten(structure, arrays)


@functools.cache
def _normal(axes: tuple[int, ...]) -> Any:
    return jax.jit(lambda key: jax.random.normal(key, axes, jnp.bfloat16))


#: The layer of the cell before: two would need twice the memory.
_layers: dict[tuple[Shape, str], Layer] = {}


def _layer(shape: Shape, column: str) -> Layer:
    if (shape, column) not in _layers:
        _layers.clear()
        _layers[shape, column] = Layer(shape, column)
    return _layers[shape, column]


def flops_share(program: Any, asked: float) -> float:
    """Returns the FLOPs of a program's products over those asked; loops without a known end count once."""
    module = hlo.Module(program.as_text())
    sums = module.total(module.entry, hlo.flops_of_lines(module), strict=False)
    return sums.get(("flops",), 0.0) / asked


def measure(cell: Cell, rounds: int) -> dict[str, Any]:
    """Compares a cell with the oracle and times it.

    Raises:
      UserError: the column is missing, its values are wrong, or it computes a multiple of the FLOPs.
    """
    require(cell.column)
    shape = (TINY_SHAPES if platform() == "cpu" else SHAPES)[cell.shape]
    layer = _layer(shape, cell.column)
    program, seconds = layer.program(cell.way)
    asked, share = layers.flops_of(shape, cell.way), None
    if cell.column not in (DENSE_FFN, "slots"):
        share = flops_share(program, asked)
        if share > DENSE:
            raise UserError(f"dense: its program computes {share:.3g} times the FLOPs of the assignments")
    distance = None if cell.column == DENSE_FFN else layer.check(cell.way, cell.load)
    expert = jnp.asarray(layers.draw(shape, cell.load)[0])
    more = {"distance": distance, "flops_share": share, "compile_seconds": round(seconds, 1)}
    more |= {"dropped": 1 - float(layers.within_capacity(shape, cell.column, expert).mean())}
    more |= {"temporary_bytes": program.memory_analysis().temp_size_in_bytes}
    work = Work(asked, layers.bytes_of(shape, cell.way, cell.column), "bfloat16")
    (record,) = timed([Case(about(cell, shape) | more, {"ms": layer.caller(cell.way, cell.load)}, work)], rounds)
    return record | {"tflops": asked / record["ms"] / 1e9}


def plan(cell: Cell, topology: str, rounds: int = 1) -> dict[str, Any]:
    """Compiles a cell for a GPU that is not here; returns its memory, FLOPs and floor. Runs nothing, in any round."""
    require(cell.column, ahead=True)
    shape, target = SHAPES[cell.shape], topology_of(topology)
    mesh = jax.sharding.Mesh(np.array(target.devices[:1]), ("run",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), layers.shapes_of(shape, cell.column)
    )
    started = time.perf_counter()
    device = mock.Mock(core_count=CORES, device_kind=target.name, compute_capability="9.0")
    with tracing_for(mesh), mock.patch.object(jax, "devices", lambda *_: [device]):
        program = lower(shape, cell.column, cell.way, shapes).compile()
    more = {"compile_seconds": round(time.perf_counter() - started, 1)}
    more |= {"temporary_bytes": program.memory_analysis().temp_size_in_bytes}
    asked = layers.flops_of(shape, cell.way)
    more |= {"flops_share": flops_share(program, asked)}
    return about(cell, shape) | more | floor_of(cell, shape, target.rates)


def floor_of(cell: Cell, shape: Shape, rates: Rates) -> dict[str, Any]:
    """Returns the least milliseconds of a cell at some rates, and their bound."""
    least = floor(rates, layers.flops_of(shape, cell.way), layers.bytes_of(shape, cell.way, cell.column), "bfloat16")
    return {"floor_ms": 1e3 * least.seconds, "bound": least.bound}


def seeds(column: str, rounds: int) -> dict[str, Any]:
    """Times a layer's both ways of eight seeds under vmap, against eight in turn."""
    require(column)
    shape = TINY_SEED_SHAPE if platform() == "cpu" else SEED_SHAPE
    both = layers.both_ways(layers.function_of(shape, column))
    inputs = Layer(shape, column).arguments("zipf")
    many = jax.tree.map(lambda a: jnp.stack([a] * SEEDS), inputs)
    set_flags(column)
    single = compile_lowered(jax.jit(both).lower(*inputs))
    together = compile_lowered(jax.jit(jax.vmap(both)).lower(*many))

    def in_turn() -> Any:
        return [single(*inputs) for _ in range(SEEDS)][-1]

    ways = {"in_turn": in_turn, "vmap": lambda: together(*many)}
    for run in ways.values():
        jax.block_until_ready(run())  # the first call touches the memory
    cases = [Case({}, {"ms": functools.partial(_seconds, run)}) for run in ways.values()]
    turns, vmapped = (record["ms"] for record in timed(cases, 3 * rounds))
    named = {"column": column, **shape._asdict(), "seeds": SEEDS, "ms_in_turn": turns, "ms_vmap": vmapped}
    return named | {"vmap_over_in_turn": vmapped / turns}


def _seconds(run: Any) -> float:
    return seconds_of(run)[1]
