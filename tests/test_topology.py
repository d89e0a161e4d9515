"""What a compiled program's text says of chips that are not here, and what is refused before anything is compiled."""

import importlib.metadata
import importlib.util
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from routed.contracts import UserError
from routed.engine import hlo, topology
from routed.engine.compilation import lower_group
from routed.engine.devices import make_mesh
from routed.engine.schedule import Group
from routed.engine.topology import Estimate, Topology, _kernel, seconds_of, topology_of
from routed.settings.tree import override
from routed.system.chips import CHIPS, chip_of
from routed.system.interconnect import Collective

#: A TPU's program: two layers of 100 + 50 cycles in a step of 7 more, whose loop has no known end; an evaluation behind it.
PROGRAM = """HloModule tiny

%layer (p: f32[]) -> f32[] {
  %product = bf16[8]{0} fusion(%a), calls=%inner, metadata={op_name="jit(step)/jvp(MoE)/Dense_0/dot_general"}, backend_config={"window_config":{"estimated_cycles":"100"}}
  %choice = f32[8]{0} fusion(%a), calls=%inner, metadata={op_name="jit(step)/MoE._route/div"}, backend_config={"window_config":{"estimated_cycles":"50"}}
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
  %adam = f32[8]{0} fusion(%a), calls=%inner, metadata={op_name="jit(step)/optimiser/mul"}, backend_config={"window_config":{"estimated_cycles":"7"}}
}

ENTRY %main (p: f32[]) -> f32[] {
  %steps = f32[] while(%a), condition=%end, body=%step
  ROOT %seen = f32[8]{0} fusion(%a), calls=%inner, metadata={op_name="jit(step)/evaluation/dot_general"}, backend_config={"window_config":{"estimated_cycles":"1000"}}
}
"""


def test_cycles_by_hand():
    """A layer runs twice, as its condition says, the step is counted once: 2 x 100, 2 x 50 and 7; then 1,000 of an evaluation."""
    module = hlo.Module(PROGRAM)
    step = {("cycles", "products"): 200.0, ("cycles", "routing"): 100.0, ("cycles", "optimiser"): 7.0}
    assert module.loops(hlo.cycles) == [step]
    assert module.within(module.entry, hlo.cycles, strict=False) == step | {("cycles", "evaluation"): 1000.0}


def test_what_has_no_estimate_is_counted():
    """XLA writes the largest number of 64 bits."""
    line = (
        '%a = f32[] fusion(%b), calls=%c, backend_config={"window_config":{"estimated_cycles":"9223372036854775807"}}'
    )
    assert hlo.cycles(line) == {("unestimated",): 1.0}


def test_purposes_of_what_the_programs_say():
    """The names of instructions in a program traced here, as the scopes of the code make them."""
    assert hlo.purpose("jit(mapped)/while/body/encoder/blocks/layer_0/self/dot_general") == "attention"
    assert hlo.purpose("jit(mapped)/while/body/encoder/blocks/layer_0/moe/moe._route/router/dot_general") == "routing"
    assert hlo.purpose("jit(mapped)/while/body/moe/gather") == "dispatch"
    assert hlo.purpose("jit(mapped)/vmap(jit(_threefry_fold_in))/add") == "random numbers"
    assert hlo.purpose("jit(mapped)/evaluation/MoE/dot_general") == "evaluation"


def test_the_program_of_a_layer_has_these_purposes(small):
    lowered = lower_group(small, small.data.samples, 1, make_mesh(override(small, {"mesh.run": 1})))
    names = set(hlo.re.findall(r'op_name="([^"]*)"', lowered.advance.compile().as_text()))
    assert {"routing", "products", "optimiser", "evaluation", "random numbers", "dispatch"} <= {
        *map(hlo.purpose, names)
    }


def test_a_kernel_by_hand():
    """197 TFLOP at half the peak: two seconds. 4,096 x 4,096 bfloat16 in and out with few FLOPs: 64 MiB at 819 GB/s."""
    here = Topology("v5e:1x1", CHIPS["v5e"], 1, [None])
    line = '%k = bf16[4096,4096]{1,0} custom-call(%a), operand_layout_constraints={bf16[4096,4096]{1,0}}, metadata={}, "cost_estimate":{"flops":"FLOPS"'
    assert _kernel(line.replace("FLOPS", "197000000000000"), here) == {("kernels",): pytest.approx(2.0)}
    assert _kernel(line.replace("FLOPS", "1"), here) == {("kernels",): pytest.approx(2**26 / 819e9)}
    assert _kernel("%k = f32[] add(%a, %b)", here) == {}


def test_seconds_by_hand(small, monkeypatch):
    """1.5 M cycles at 1.5 GHz and 1 ms of kernels are 2 ms; 10 runs in batches of 8 are two batches of 20 steps and 3 evaluations
    of 3 M cycles, 2 ms each: 2 x (20 x 2 + 3 x 2) ms. 8 x 1.97e9 FLOPs on 8 chips take 10 us at the peak, .5 % of the step."""
    chip, mesh = CHIPS["v5e"], Mesh(np.array(jax.devices()), ("run",))
    there = Topology("v5e:2x4", chip, 8, jax.devices())
    monkeypatch.setattr(topology, "problem_of", lambda config: SimpleNamespace(cost=lambda config: (5, 1.97e9)))
    group = Group("a group", [SimpleNamespace(config=small)] * 10, 0, 8)
    estimate = Estimate(1.0, 0.0, 0.0, {"products": 1e6, "other": 0.5e6}, 1e-3, 3e6, 0, [])
    spent = seconds_of(estimate, group, mesh, 8190.0, there)
    assert spent.step == pytest.approx(2e-3) and spent.hours * 3600 == pytest.approx(0.092)
    assert spent.roofline == pytest.approx(1e-5) and spent.bound == "FLOPs" and spent.mfu == pytest.approx(0.005)
    assert spent.tokens == pytest.approx(5 * 8 / 2e-3)
    moved = seconds_of(
        estimate._replace(collectives=[Collective("all-reduce", 8, 1e9, 1)]),
        group,
        mesh,
        8190.0,
        there,
    )
    assert moved.collectives > 0.005 and moved.step == pytest.approx(2e-3 + moved.collectives)


@pytest.mark.parametrize("text", ["v9:2x2", "v5e", "v5e:8", "h100:axb", ""])
def test_what_is_no_topology_is_refused(text):
    with pytest.raises(
        UserError, match=r"--topology=.*: unknown; name a chip of v4, v5e, v5p, v6e and a shape, such as v5e:2x4"
    ):
        topology_of(text)


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
