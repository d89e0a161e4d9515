"""The table of `bench gpu` at tiny sizes: loads and floors by hand, every column against the oracle, wrong values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed.bench import gpu_cells, gpu_layers, gpu_torch, products
from routed.bench.gpu_cells import Cell, Layer
from routed.bench.gpu_layers import SHAPES, TINY_SHAPES, Shape, draw
from routed.bench.gpu_table import Shares, aims, as_table
from routed.contracts import UserError
from routed.kernels import megablox
from routed.kernels.grouped import product_of
from routed.system.chips import CHIPS
from routed.system.machine import Rates

TINY = TINY_SHAPES["qwen3"]


def test_zipf_draws_by_hand():
    """First choices of 4 experts: 1, 1/2, 1/3, 1/4 over 25/12: .48, .24, .16, .12. Behind 0 comes 1 in 6 of 13."""
    experts, weights = draw(Shape(100_000, 1, 1, 4, 2), "zipf")
    assert np.bincount(experts[:, 0]) / 1e5 == pytest.approx([0.48, 0.24, 0.16, 0.12], abs=0.005)
    behind = experts[experts[:, 0] == 0, 1]  # 1/2, 1/3, 1/4: 6, 4, 3 of 13
    assert np.bincount(behind) / len(behind) == pytest.approx([0, 6 / 13, 4 / 13, 3 / 13], abs=0.008)
    assert (experts[:, 0] != experts[:, 1]).all() and weights.sum(1) == pytest.approx(np.ones(100_000))
    assert (draw(TINY, "zipf")[0] == draw(TINY, "zipf")[0]).all()


@pytest.mark.parametrize("name", SHAPES)
def test_a_balanced_load_has_as_many_tokens_for_each_expert(name):
    shape = SHAPES[name]
    experts, _ = draw(shape, "balanced")
    assert (np.bincount(experts.ravel()) == shape.tokens * shape.k // shape.experts).all()
    assert (np.diff(np.sort(experts, 1)) > 0).all()


def test_floors_by_hand():
    """2 x 32,768 x 2 x 3 x 4,096 x 14,336 = 23.09 TFLOP: 23.35 ms at 989 TFLOP/s. Weights 2.82 GB: .84 ms at 3.35 TB/s.

    Eight tokens of the Qwen shape are bound by weights: 128 x 3 x 2,048 x 768 x 2 bytes.
    """
    peaks = Rates(CHIPS["h100"].peak, CHIPS["h100"].bandwidth)
    assert gpu_layers.flops_of(SHAPES["mixtral"], "forward") == 2 * 32768 * 2 * 3 * 4096 * 14336
    assert gpu_cells.floor_of(Cell("mixtral", "zipf", "forward", "ragged"), SHAPES["mixtral"], peaks) == {
        "floor_ms": pytest.approx(23.35, rel=1e-3),
        "bound": "FLOPs",
    }
    few = SHAPES["qwen3"]._replace(tokens=8)
    least = 2 * (128 * 3 * 2048 * 768 + 2 * 8 * 2048)
    assert (
        gpu_layers.bytes_of(few, "forward") == least and gpu_layers.flops_of(few, "both") == 6 * 8 * 8 * 3 * 2048 * 768
    )
    floor = gpu_cells.floor_of(Cell("qwen3", "zipf", "forward", "ragged"), few, peaks)
    assert floor == {"floor_ms": pytest.approx(1e3 * least / 3.35e12), "bound": "bytes"}


@pytest.mark.slow
@pytest.mark.parametrize("load", gpu_layers.LOADS)
@pytest.mark.parametrize("column", ["ragged", "slots", "ragged_dot"])
@pytest.mark.parametrize("name", ["qwen3", "ours"])
def test_a_column_is_the_oracle(name, column, load):
    """Outputs, and gradients of weights, tokens and the assignments' weights; bfloat16 is .003 to .01 away."""
    layer = Layer(TINY_SHAPES[name], column)
    assert layer.check("both", load) < 0.015 and layer.check("forward", load) < 0.015


@pytest.mark.slow
def test_kernels_that_are_wrong_are_refused(monkeypatch):
    """JAX's kernels with products of jax.lax in their place; then with a tenth too much in the gradient of weights."""
    wrong = [1.0]

    def outer(rows, columns, sizes):
        return wrong[0] * megablox.outer(rows, columns, sizes)

    def put(product):
        gpu_cells._layers.clear()
        monkeypatch.setitem(products.PRODUCTS, "mosaic", products.Product(product, lambda ahead: None))

    monkeypatch.setattr(gpu_cells, "DENSE", 10.0)
    put(product_of(megablox.product, outer))
    cell = Cell("qwen3", "zipf", "both", "mosaic")
    right = gpu_cells.measure(cell, 1)
    assert right["distance"] < 0.015 and right["ms"] > 0 and right["tflops"] > 0 and right["temporary_bytes"] > 0
    wrong[0] = 1.1
    put(product_of(megablox.product, outer))
    with pytest.raises(UserError, match=r"wrong: distance 0\.(09|10)\d* from the oracle, at most 0.03 is right"):
        gpu_cells.measure(cell, 1)
    assert gpu_cells.measure(cell._replace(way="forward"), 1)["distance"] < 0.015
    with pytest.raises(UserError, match="wrong: distance nan"):
        gpu_cells.accept(float("nan"))


@pytest.mark.slow
def test_a_cell_by_hand():
    """128 tokens, top-3 of 8, three matrices of 16 x 16: 6 x 128 x 3 x 3 x 256 FLOPs both ways; 8 x 1.25 x 48 slots."""
    record = gpu_cells.measure(Cell("qwen3", "zipf", "both", "slots"), 1)
    assert record["tflops"] == pytest.approx(6 * 128 * 3 * 3 * 256 / record["ms"] / 1e9)
    experts, _ = draw(TINY, "zipf")
    counts = np.bincount(experts.ravel(), minlength=8)  # 60 places: 1.25 x 128 x 3 / 8
    assert record["dropped"] == pytest.approx(np.maximum(counts - 60, 0).sum() / 384) and record["dropped"] > 0
    with pytest.raises(UserError, match="dense: its program computes 8 times the FLOPs of the assignments"):
        gpu_cells.measure(Cell("qwen3", "zipf", "both", "ragged_dot"), 1)


def test_a_column_that_cannot_run_says_why(monkeypatch):
    def reason(column):
        with pytest.raises(UserError) as error:
            gpu_cells.measure(Cell("qwen3", "zipf", "both", column), 1)
        return str(error.value)

    monkeypatch.setattr(products.importlib.util, "find_spec", lambda name: None)
    assert reason("mosaic") == "cpu is no Hopper, for which these kernels of JAX are"
    assert reason("triton").startswith(f"jax {jax.__version__} has no Triton lowering of ragged_dot")
    assert reason("tokamax") == "tokamax is not installed: pip install tokamax"
    with pytest.raises(UserError, match="torch is not installed: pip install torch"):
        gpu_torch.measure(Cell("qwen3", "zipf", "both", "torch"), 1)


@pytest.mark.slow
def test_seeds_are_one_program(monkeypatch):
    """Products of several seeds are folded into more experts; eight in turn, and all at once, are timed."""
    product = product_of(megablox.product, megablox.outer)
    monkeypatch.setitem(products.PRODUCTS, "mosaic", products.Product(product, lambda ahead: None))
    record = gpu_cells.seeds("mosaic", 1)
    assert record["vmap_over_in_turn"] == record["ms_vmap"] / record["ms_in_turn"] > 0 and record["seeds"] == 8


@pytest.mark.slow
def test_the_kernels_lower_for_a_gpu(monkeypatch):
    """Three products forward, six back; only a GPU's driver, or its compiler, goes further."""
    device = jax.devices()[0]
    monkeypatch.setattr(
        jax, "devices", lambda *_: [type("Gpu", (), {"core_count": 132, "platform": device.platform})()]
    )
    shape = SHAPES["mixtral"]
    both = gpu_layers.both_ways(gpu_layers.function_of(shape, "mosaic"))
    traced = jax.jit(both).trace(*gpu_layers.shapes_of(shape, "mosaic"))
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("custom_call @mosaic_gpu") == 9


RECORDS = [
    {"shape": "ours", "load": "balanced", "way": "both", "column": "dense_ffn", "ms": 40.0, "tflops": 660.0},
    {"shape": "ours", "load": "balanced", "way": "both", "column": "ragged", "ms": 50.0, "tflops": 528.0},
    {"shape": "ours", "load": "zipf", "way": "both", "column": "ragged", "ms": 80.0, "tflops": 330.0},
    {"shape": "ours", "load": "zipf", "way": "both", "column": "tokamax", "failed": "tokamax is not installed"},
]


def test_the_table_has_shares_of_the_dense_ffn_and_reasons():
    """40 of 50 and of 80 ms; at least .7 of the dense FFN at one of four shapes."""
    shares, named = Shares(), [{"part": "table", "case": Cell(*[*r.values()][:4]).name, **r} for r in RECORDS]
    records = [shares.add(record) for record in named]
    assert [record.get("of_dense") for record in records] == [1.0, 0.8, 0.5, None]
    assert aims(records) == {
        "best_of_ours": {"ours": 0.8},
        "reached": None,
        "seeds_vmap_over_in_turn": {},
        "seeds_reached": None,
    }
    every = [records[1] | {"shape": name} for name in SHAPES] + [{"column": "ragged", "vmap_over_in_turn": 1.2}]
    assert aims(every)["reached"] is True and aims(every)["seeds_reached"] is False
    lines = as_table(records).splitlines()
    row = next(line for line in lines if line.startswith("| ours | zipf | both |"))
    assert row.startswith("| ours | zipf | both | 660 (100%) | 330 (50%) |") and "| [1] |" in row
    assert lines[-1] == "[1] tokamax is not installed" and len(lines) == 2 + 4 * 2 * 2 + 3


def test_the_most_important_cells_come_first():
    names = [cell.name for cell in gpu_cells.cells_of()]
    assert names[0] == "mixtral balanced both: dense_ffn" and names[8] == "mixtral balanced both: ragged"
    assert len({*names}) == len(names) == 4 * 2 + 6 * 4 * 2 * 2


def test_sampled_tokens_alone_have_a_cotangent():
    cotangent = Layer(TINY, "ragged").arguments("zipf", np.array([3, 5]))[4]
    assert set(np.flatnonzero(jnp.abs(cotangent).sum(1))) == {3, 5}
