"""libtpu and CUDA's compilers themselves: programs of the product, compiled for chips that are not here.

In an environment of its own, as they bring 440 MB:

    pip install -e '.[test]' 'libtpu==0.0.42.*'
    pip install --no-deps jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2 nvidia-cuda-nvcc-cu12
    pytest -n0 tests/external/test_compilers.py
"""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from routed.aot import hlo
from routed.aot.dry_run import describe
from routed.aot.estimate import measure
from routed.aot.hlo import flops_of_lines
from routed.aot.topology import topology_of
from routed.bench import gpu_cells, gpu_layers, products
from routed.bench.gpu_cells import Cell
from routed.engine.devices import make_mesh
from routed.engine.execution import make_groups
from routed.kernels import megablox
from routed.papers.chen2022.networks import ResNet18
from routed.plan import experiment
from routed.plan.runs import plan_runs
from routed.settings.tree import override
from routed.system.platform import tracing_for

SLICES = ("v5e:2x4", "v4:2x2x1", "v5p:2x2x1", "v6e:2x2", "h200:8", "h100:8x2", "a100:8")


@pytest.fixture(autouse=True, scope="module")
def uncached():
    """The cache of this suite was opened before `topology_of` could turn caches off."""
    compilation_cache.reset_cache()


@pytest.mark.parametrize("name", SLICES)
def test_a_small_group_is_compiled_sized_and_priced(small, name):
    there = topology_of(name)
    config = override(small, {"mesh.run": 0, "arms": ("learned",), "seeds": 1})
    text = describe(plan_runs(config, ({},)), make_mesh(config, there.devices), there)
    assert "fits: a device holds" in text and "collectives of a step: none" in text and "dollars" in text
    assert ("no cycles" in text) == (there.target.clock == 0)


def test_a_mesh_of_8_x_8_on_4_x_4_x_4_chips(small):
    mesh = make_mesh(override(small, {"mesh.data": 8, "mesh.expert": 8}), topology_of("v5p:4x4x4").devices)
    assert dict(mesh.shape) == {"run": 1, "data": 8, "expert": 8} and len({*mesh.devices.flat}) == 64


def test_a_program_that_does_not_fit_says_what_to_change(small):
    """A million samples through four experts of 2,000 units in float32: 34 GB, where a v5e has 17."""
    there = topology_of("v5e:2x2")
    config = override(
        small, {"mesh.run": 0, "arms": ("learned",), "seeds": 1, "batch_size": 2**20, "experts.width": 2_000}
    )
    text = describe(plan_runs(config, ({},)), make_mesh(config, there.devices), there)
    assert "does not fit: needs " in text and "or lower batch_size" in text


@pytest.mark.parametrize("name", SLICES[:1])
def test_flops_of_the_text_are_those_that_the_compiler_counts(small, name):
    """Products with batches, windows with holes on a TPU, and their gradients; no loops, which it counts once."""
    here = jax.sharding.SingleDeviceSharding(topology_of(name).devices[0])
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=here) for shape in ((8, 256, 384), (8, 384, 640))]
    loss = jax.grad(lambda x, w: jnp.tanh(jnp.einsum("bik,bkj->bij", x, w)).sum(), argnums=(0, 1))
    compiled = jax.jit(loss).lower(*shapes).compile()
    module = hlo.Module(compiled.as_text())
    count = module.total(module.entry, flops_of_lines(module))[("flops",)]
    assert count == 3 * 2 * 8 * 256 * 384 * 640  # forward, and the gradients of both
    assert compiled.cost_analysis()["flops"] == pytest.approx(count, rel=0.01)


def test_dropless_gradients_on_a_tpu_cost_what_their_assignments_cost():
    """4,096 rows, 512 x 512 and 16 experts: forward, rows and weights are 3 x 2 x 4,096 x 512 x 512, three kernels."""
    there = topology_of("v5e:2x2")
    mesh = jax.sharding.Mesh(there.devices[:1], ("run",))
    here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def shape(*axes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(axes, dtype, sharding=here)

    def gradients(x, w, sizes, g):
        out = megablox.product(x, w, sizes, transposed=False)
        return out, megablox.product(g, w, sizes, transposed=True), megablox.outer(x, g, sizes)

    arguments = shape(4096, 512), shape(16, 512, 512), shape(16, dtype=jnp.int32), shape(4096, 512)
    with tracing_for(mesh):
        text = jax.jit(gradients).lower(*arguments).compile().as_text()
    module = hlo.Module(text)
    asked = 3 * 2 * 4096 * 512 * 512
    assert asked <= module.total(module.entry, flops_of_lines(module))[("flops",)] <= 2 * asked
    assert text.count("tpu_custom_call") >= 3


def test_the_steps_loop_is_found_where_nothing_is_estimated(small):
    """On a GPU small products become sums inside of fusions: the loop over steps is known by its optimiser."""
    there = topology_of("h200:8")
    config = override(small, {"mesh.run": 0, "arms": ("learned",), "seeds": 1})
    mesh = make_mesh(config, there.devices)
    (group,) = make_groups(plan_runs(config, ({},)), mesh, there.memory(mesh))
    estimate, spent = measure(group, mesh, there)
    assert estimate.endless == 0 and spent.step > 0


def test_networks_are_compiled_where_products_are_grouped():
    """Four ResNet18, dropless: their convolutions are no layers that a TPU's grouped products could run."""
    there = topology_of("v5e:2x4")
    _, config = experiment.configure("chen_images:smoke", [])
    config = override(config, {"mesh.run": 1, "arms": ("learned",), "experts.name": "resnet18", "data.target_dim": 2})
    assert "fits: a device holds" in describe(plan_runs(config, ({},)), make_mesh(config, there.devices[:1]), there)


def test_networks_of_several_seeds_are_compiled_for_a_gpu():
    """The gradient of a product with every second position of images, of two seeds, ended this process (jax 0.10.2)."""
    mesh = jax.sharding.Mesh(topology_of("h100:1").devices, ("run",))
    here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    net, images = ResNet18(16), jnp.zeros((64, 16, 16, 3))

    def gradient(key, images):
        params = net.init(key, images)
        return jax.grad(lambda params: (net.apply(params, images) ** 2).sum())(params)

    keys, images = jax.random.split(jax.random.key(0), 2), jnp.stack([images, images])
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here) for a in (keys, images)]
    with tracing_for(mesh):
        assert jax.jit(jax.vmap(gradient)).lower(*shapes).compile().as_text()


@pytest.mark.parametrize("name", ["v5e:2x4", "h100:8"])
def test_a_contest_of_experts_over_a_mesh_is_compiled_and_its_collectives_are_known(name):
    there = topology_of(name)
    _, config = experiment.configure("competition_lm:smoke", [])
    changes = {"batch_size": 8, "selection.group_size": 16, "mesh.data": 2, "mesh.expert": 4, "seeds": 1}
    config = override(config, changes | {"arms": ("compete_shuffled",)})
    text = describe(plan_runs(config, ({},)), make_mesh(config, there.devices), there)
    assert "fits: a device holds" in text and "all-to-all of 4" in text


@pytest.mark.parametrize("name", ["v5e:2x4", "h100:8"])
def test_dropless_experts_of_devices_that_share_rows_are_compiled(name):
    """Every device has all experts and runs its rows through them, as one device would: only gradients travel."""
    there = topology_of(name)
    _, config = experiment.configure("competition_lm:smoke", [])
    config = override(config, {"batch_size": 8, "mesh.data": 8, "seeds": 1, "arms": ("learned",)})
    text = describe(plan_runs(config, ({},)), make_mesh(config, there.devices), there)
    assert "fits: a device holds" in text and "all-reduce of 8" in text and "all-to-all" not in text


@pytest.mark.parametrize("way", gpu_cells.WAYS)
@pytest.mark.parametrize("column", gpu_layers.COLUMNS)
@pytest.mark.parametrize("name", ["h100:1", "h200:1"])
def test_cells_of_the_table_are_compiled_for_a_gpu(name, column, way):
    """Mixtral's layer: FLOPs of the assignments, a quarter more of slots; no turn of a loop, and no kernel, counts.

    XLA's `ragged_dot` multiplies each row with all eight experts: a GPU refuses it as dense.
    """
    if reason := column in products.PRODUCTS and products.PRODUCTS[column].missing(True):
        pytest.skip(reason)
    try:
        record = gpu_cells.plan(Cell("mixtral", "balanced", way, column), name)
    except ExceptionGroup as error:  # tokamax asks the first device of this machine for its kind
        pytest.skip(str(error))
    expected = {"dense_ffn": 1, "ragged": 1 / 8, "slots": 1.25, "mosaic": 0, "ragged_dot": 8}
    assert record["flops_share"] == pytest.approx(expected.get(column, 0), rel=0.01)
    assert record["floor_ms"] == pytest.approx(70.04 if way == "both" else 23.35, rel=1e-3)
    assert 0 < record["temporary_bytes"] < 80e9 or column == "ragged_dot"
