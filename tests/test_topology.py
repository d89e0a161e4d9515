"""What a compiled program's text says of chips that are not here, and what is refused before anything is compiled."""

import importlib.metadata
import importlib.util
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from routed.aot import estimate, hlo
from routed.aot import topology as topologies
from routed.aot.estimate import Estimate, _kernel, times_of
from routed.aot.hlo import flops, flops_of_lines
from routed.aot.interconnect import Collective
from routed.aot.topology import CARDS, TARGETS, Topology, topology_of
from routed.contracts import UserError
from routed.engine.compilation import lower_group
from routed.engine.devices import make_mesh
from routed.engine.schedule import Group
from routed.settings.tree import override
from routed.system.chips import CHIPS, chip_of
from routed.training.problem import Cost

#: A TPU's program: two layers of 100 + 50 cycles in a step of 7 more, whose loop has no known end; an evaluation behind
#: it.
PROGRAM = """HloModule tiny

%layer (p: f32[]) -> f32[] {
  %product = bf16[8]{0} fusion(%a), calls=%inner, metadata={op_name="jit(step)/jvp(MoE)/Dense_0/dot_general"}, \
    backend_config={"window_config":{"estimated_cycles":"100"}}
  %choice = f32[8]{0} fusion(%a), calls=%inner, metadata={op_name="jit(step)/MoE.route/div"}, \
    backend_config={"window_config":{"estimated_cycles":"50"}}
}

%inner (p: f32[]) -> f32[] {
}

%below (p: f32[]) -> pred[] {
  %bound = s32[]{:T(128)} constant(2), metadata={op_name="while"}
  ROOT %lt = pred[]{:T(512)} compare(%i, %bound), direction=LT
}

%end (p: f32[]) -> pred[] {
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT
}

%step (p: f32[]) -> f32[] {
  %layers = f32[] while(%a), condition=%below, body=%layer
  %adam = f32[8]{0} fusion(%a), calls=%inner, metadata={op_name="jit(step)/optimiser/mul"}, \
    backend_config={"window_config":{"estimated_cycles":"7"}}
}

ENTRY %main (p: f32[]) -> f32[] {
  %steps = f32[] while(%a), condition=%end, body=%step
  ROOT %seen = f32[8]{0} fusion(%a), calls=%inner, metadata={op_name="jit(step)/evaluation/dot_general"}, \
    backend_config={"window_config":{"estimated_cycles":"1000"}}
}
"""


def test_cycles_by_hand():
    """A layer runs twice, by its condition; the step counts once: 2 x 100, 2 x 50, 7; then 1,000 of an evaluation."""
    module = hlo.Module(PROGRAM)
    step = {("cycles", "products"): 200.0, ("cycles", "routing"): 100.0, ("cycles", "optimiser"): 7.0}
    assert module.loops(hlo.cycles) == [step]
    assert module.total(module.entry, hlo.cycles, strict=False) == step | {
        ("cycles", "evaluation"): 1000.0,
        ("endless",): 1,
    }


def test_what_has_no_estimate_is_counted():
    """XLA writes the largest number of 64 bits."""
    line = (
        '%a = f32[] fusion(%b), calls=%c, backend_config={"window_config":{"estimated_cycles":"9223372036854775807"}}'
    )
    assert hlo.cycles(line) == {("unestimated",): 1.0}


def test_purposes_of_what_the_programs_say():
    """The names of instructions in a program traced here, as the scopes of the code make them."""
    assert hlo.purpose("jit(mapped)/while/body/encoder/blocks/layer_0/self/dot_general") == "attention"
    assert hlo.purpose("jit(mapped)/while/body/encoder/blocks/layer_0/moe/moe.route/router/dot_general") == "routing"
    assert hlo.purpose("jit(mapped)/while/body/moe/gather") == "dispatch"
    assert hlo.purpose("jit(mapped)/vmap(jit(_threefry_fold_in))/add") == "random numbers"
    assert hlo.purpose("jit(mapped)/evaluation/MoE/dot_general") == "evaluation"


@pytest.mark.slow
def test_the_program_of_a_layer_has_these_purposes(small):
    lowered = lower_group(small, small.data.samples, 1, make_mesh(override(small, {"mesh.run": 1})))
    text = "".join(one.compile().as_text() for one in (lowered.advance, lowered.record))
    names = set(hlo.re.findall(r'op_name="([^"]*)"', text))
    assert {"routing", "products", "optimiser", "evaluation", "random numbers", "dispatch"} <= {
        *map(hlo.purpose, names)
    }


def test_a_kernel_by_hand():
    """197 TFLOP at half the peak: two seconds. 4,096 x 4,096 bfloat16 in and out with few FLOPs: 64 MiB at 819 GB/s."""
    here = Topology("v5e:1x1", TARGETS["v5e"], 1, [None])
    line = "%k = bf16[4096,4096]{1,0} custom-call(%a), operand_layout_constraints={bf16[4096,4096]{1,0}}, "
    line += 'metadata={}, "cost_estimate":{"flops":"FLOPS"'
    assert _kernel(line.replace("FLOPS", "197000000000000"), here) == {("kernels",): pytest.approx(2.0)}
    assert _kernel(line.replace("FLOPS", "1"), here) == {("kernels",): pytest.approx(2**26 / 819e9)}
    assert _kernel("%k = f32[] add(%a, %b)", here) == {}


PLANNED = Estimate(1.0, 0.0, 0.0, 4e12, 1e12, {"products": 1e6, "other": 0.5e6}, 1e-3, 3e6, 0, 0, [])


def seconds(monkeypatch, small, chip, planned=PLANNED):
    """Of 10 runs in batches of 8, of 5 tokens and 1.97e9 FLOPs a step, on 8 chips."""
    monkeypatch.setattr(
        estimate, "problem_of", lambda config: SimpleNamespace(cost=lambda config: Cost(5, 1.97e9, 1e12))
    )
    group, mesh = (
        Group("a group", [SimpleNamespace(config=small)] * 10, 0, 8, None),
        Mesh(np.array(jax.devices()), ("run",)),
    )
    return times_of(planned, group, mesh, 8190.0, Topology("eight", TARGETS[chip], 8, jax.devices()))


def test_seconds_by_hand(small, monkeypatch):
    """1.5 M cycles at 1.5 GHz and 1 ms of kernels are 2 ms a step.

    10 runs in batches of 8 are two batches of 20 steps and 3 evaluations of 3 M cycles, 2 ms each: 2 x (20 x 2 + 3 x 2)
    ms. 8 x 1.97e9 FLOPs on 8 chips take 10 us at the peak, .5 % of the step; but a batch has 3 places of padding.
    """
    spent = seconds(monkeypatch, small, "v5e")
    assert spent.step == pytest.approx(2e-3) and spent.hours * 3600 == pytest.approx(0.092)
    assert (
        spent.roofline == pytest.approx(1e-5) and spent.bound == "FLOPs" and spent.mfu == pytest.approx(0.005 * 5 / 8)
    )
    assert spent.tokens == pytest.approx(5 * 5 / 2e-3)
    moved = seconds(monkeypatch, small, "v5e", PLANNED._replace(collectives=[Collective("all-reduce", 8, 1e9, 1)]))
    assert moved.collectives > 0.005 and moved.step == pytest.approx(2e-3 + moved.collectives)


def test_seconds_of_a_gpu_are_those_of_its_products_at_the_peak(small, monkeypatch):
    """TF32 at 495 TFLOP/s: 4 TFLOP a step take 8.08 ms, 1 TFLOP of evaluations 2.02: 2 x (20 x 8.08 + 3 x 2.02) ms."""
    spent = seconds(monkeypatch, small, "h100")
    assert spent.step == pytest.approx(4 / 495) and spent.hours * 3600 == pytest.approx(2 * (20 * 4 + 3) / 495)


SHAPES = {"a": (4, 64, 100), "b": (4, 100, 300), "x": (2, 5, 5, 3), "w": (3, 3, 3, 8), "y": (2, 5, 5, 8)}


@pytest.mark.parametrize(
    ("line", "count"),
    [
        # 4 x 64 x 300 results of 100 products and sums: 15.36 M
        ("%p = f32[4,64,300]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}",
         15.36e6),
        # the same as a TPU writes it: a window of 4 at strides of 3 over 4 places with 3 holes between: 4 places of it
        # hold anything
        ("%p = f32[4,64,300]{2,1,0} convolution(%a, %b), window={size=4 stride=3 lhs_dilate=4}, "
         "dim_labels=0bf_0io->0bf", 15.36e6),
        ('%p = f32[64,300]{1,0} custom-call(%l, %r), custom_call_target="__cublas$gemm", '
         'backend_config={"gemm_backend_config":'
         '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}', 3.84e6),
        # 2 images of 5 x 5, windows of 3 x 3 padded by 1: of 5 places two miss one of 3, so 13 x 13 pairs; x 2 x 2 x 3
        # x 8
        ("%p = f32[2,5,5,8]{3,2,1,0} convolution(%x, %w), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f",
         16224),
        ('%p = (f32[3,3,3,8]{3,2,1,0}, u8[0]{0}) custom-call(%x, %y), window={size=3x3 pad=1_1x1_1}, '
         'dim_labels=b01f_01io->b01f,'
         ' custom_call_target="__cudnn$convBackwardFilter"', 16224),
        ('%p = (f32[2,5,5,3]{3,2,1,0}, u8[0]{0}) custom-call(%y, %w), window={size=3x3 pad=1_1x1_1}, '
         'dim_labels=b01f_01io->b01f,'
         ' custom_call_target="__cudnn$convBackwardInput"', 16224),
        ('%p = f32[8] custom-call(%a), "cost_estimate":{"flops":"77"', 77),
        ("%p = f32[4,64,100] add(%a, %a)", 0),
    ],
)  # fmt: skip
def test_flops_by_hand(line, count):
    assert flops(line, SHAPES | {"l": (64, 100), "r": (100, 300)}) == count


def test_flops_of_a_program_made_here():
    """Seven turns of a product of 8 x 16 with 16 x 16: 7 x 2 x 8 x 16 x 16, through names that the compiler gave."""
    weights = jax.numpy.ones((16, 16))
    turned = jax.jit(lambda x: jax.lax.fori_loop(0, 7, lambda i, y: jax.numpy.tanh(y @ weights), x))
    module = hlo.Module(
        turned.lower(jax.numpy.ones((8, 16))).compile({"xla_cpu_experimental_ynn_fusion_type": ""}).as_text()
    )
    assert module.total(module.entry, flops_of_lines(module)) == {("flops",): 7 * 2 * 8 * 16 * 16}


@pytest.mark.parametrize("text", ["v9:2x2", "v5e", "v5e:8", "h100:axb", "h100:0", "h100:8x2x2", "h100", ""])
def test_what_is_no_topology_is_refused(text):
    with pytest.raises(
        UserError,
        match=r"--topology=.*: unknown; name a TPU of v4, v5e, v5p, v6e and a shape, .*, or a GPU of a100, h100, "
        r"h200 with how many",
    ):
        topology_of(text)


def test_every_gpu_has_a_card():
    assert CARDS.keys() == {name for name, target in TARGETS.items() if not target.clock}


def test_a_compiler_for_gpus_that_is_missing_or_of_another_release_is_named(monkeypatch):
    versions = {}

    def version(package):
        if package not in versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(topologies.importlib.metadata, "version", version)
    with pytest.raises(
        UserError, match=r"needs jax-cuda12-plugin .*: pip install --no-deps jax-cuda12-plugin==[\d.]+ jax-cuda12-pjrt"
    ):
        topology_of("h200:8")
    versions |= {"jax-cuda12-plugin": jax.__version__, "jax-cuda12-pjrt": "0.0.1"}
    with pytest.raises(UserError, match=r"jax-cuda12-pjrt 0\.0\.1 is not the one for jax"):
        topology_of("h200:8")


def test_libtpu_that_is_missing_or_of_another_release_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs libtpu \(200 MB\): pip install 'libtpu==[\d.]+\*'$"):
        topology_of("v5e:2x4")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.1")
    with pytest.raises(UserError, match=r"libtpu 0\.0\.1 is not the one for jax"):
        topology_of("v5e:2x4")


def test_chips_by_the_name_that_jax_gives_them():
    assert chip_of("TPU v5 lite") is CHIPS["v5e"] and chip_of("TPU v5") is CHIPS["v5p"] and chip_of("cpu") is None
    assert chip_of("NVIDIA H200") is CHIPS["h200"]
