"""What a training step sends, in the compiled program and by the formula, and how long that takes on links."""

import re
import subprocess
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from routed.aot import hlo
from routed.aot.interconnect import SENT, Collective, nodes, torus
from routed.bench.scaling import SMALL, collectives, formula, slots_of, sweep
from routed.contracts import TextBatch, UserError
from routed.engine import compilation, devices
from routed.layer.dispatch.parallel import check
from routed.layer.selection import group_of
from routed.models.transformer_sizes import shared_group, tokens_of
from routed.plan import experiment
from routed.plan.checks import validate
from routed.plan.config import base
from routed.settings.tree import override
from routed.training.text_gates import ALIKE
from routed.training.text_problem import in_blocks
from tests.parallel_case import make_mesh

#: A step that runs a layer three times; an evaluation behind it, which does not count.
PROGRAM = """HloModule tiny, num_partitions=8

%layer (p: f32[]) -> f32[] {
  %exchange = (f32[2,3]{1,0}, f32[2,3]{1,0}) all-to-all(%a, %b), channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}}
}

%under (p: f32[]) -> f32[] {
  %alone = f32[9]{0} all-reduce(%a), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
  ROOT %permute = (s16[6]{0}, s16[6]{0}, u32[], u32[]) collective-permute-start(%a), source_target_pairs={{0,1},{1,0}}
}

%add (p: f32[]) -> f32[] {
}

%step (p: f32[]) -> f32[] {
  %layers = f32[] while(%a), condition=%add, body=%layer, backend_config={"known_trip_count":{"n":"3"}}
  %sum = (f32[5,2]{1,0}, /*index=1*/f32[]) all-reduce(%a, %b), replica_groups=mesh['x'=2,'y'=4] {'y'}, to_apply=%add
  %start = (bf16[4]{0}, bf16[16]{0}) all-gather-start(%a), replica_groups=[2,4]<=[8], dimensions={0}
  %done = bf16[16]{0} all-gather-done(%start)
  %scattered = pred[2]{0} reduce-scatter(%a), replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add
  %wrapped = ((f32[]), f32[], u32[]) async-start(%a), calls=%under
  ROOT %finished = f32[] async-done(%wrapped), calls=%under
}

%evaluate (p: f32[]) -> f32[] {
  %everything = f32[100]{0} all-gather(%a), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
}

ENTRY %main (p: f32[]) -> f32[] {
  %steps = f32[] while(%a), condition=%add, body=%step
  ROOT %seen = f32[] conditional(%a), branch_computations={%add, %evaluate}
}
"""


def test_a_program_by_hand():
    """Three times half of 48 bytes; 44 bytes to 4 as a ring, 2 3/4; 3/4 of 16 x 2; 2 x 3 bools; 6 x 2."""
    assert {f"{c.kind} of {c.devices}": c.sent for c in hlo.collectives_of_step(PROGRAM)} == {
        "all-to-all of 2": 72.0,
        "all-reduce of 4": 66.0,
        "all-gather of 4": 24.0,
        "reduce-scatter of 4": 6.0,
        "collective-permute of 2": 12.0,
    }


@pytest.mark.parametrize(
    ("groups", "devices"),
    [
        ("{{0,2,4},{1,3,5}}", 3),
        ("[2,4]<=[4,2]T(1,0)", 4),
        ("mesh['x'=2,'y'=4] {'x','y'}", 8),
        ("mesh['x'=8] {'x':(2)4}", 4),
        ("mesh['axis_0'=4,'axis_1'=2,'axis_2'=1], device_ids=([2,4]T(1,0)) {'axis_0'}", 4),
    ],
)
def test_devices_of_a_group(groups, devices):
    line = f"  %all = f32[3]{{0}} all-reduce(%a), channel_id=10, replica_groups={groups}, to_apply=%add"
    assert hlo.collective(line).devices == devices


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("all-to-all(", "ragged-all-to-all(", "unknown collective: %exchange"),
        ("replica_groups=[2,4]<=[8]", "replica_groups={}", "unknown groups: %start"),
        ('{"n":"3"}', "{}", "a loop in a step that does not know its turns: %layers"),
        ("body=%step", "body=%add", "0 loops over steps"),
        ("ROOT %seen", "%more = f32[] while(%a), condition=%add, body=%evaluate\n  ROOT %seen", "2 loops over steps"),
    ],
)
def test_what_is_not_understood_is_refused(old, new, complaint):
    with pytest.raises(ValueError, match=complaint):
        hlo.collectives_of_step(PROGRAM.replace(old, new))


def test_the_formula_by_hand():
    """`SMALL`, 2 x 4 devices, 16 experts, top-2, capacity 1.25.

    Slots: groups of 16 tokens have 1.25 x 2 x 16 / 16 = 2.5 -> 3 places an expert; 16 rows of 32 and of 8 tokens are 32
    + 8 groups, so 40 x 16 x 3 = 1,920 slots a layer, 240 a device. all-to-all: 2 layers a stack x 4 x 240 x 8 x 4 bytes
    = 61,440, 3/4 of it leaves. An expert: 3 x 8 x 12 = 288 weights; 2 stacks x 2 layers x 16 / 4 x 288 x 4 bytes =
    18,432, sent once by each of two. Shared: attention 4 x 8 x 18 in 2 + 2 x 2 layers = 3,456; norms 8 x (2 x 2 + 1 + 3
    x 2 + 1) = 96; routers 4 x 8 x 16 = 512; bias 2 x 32 x 2 = 128; embedding 320 x 8, and logits: 5,120. 9,312 words
    and the loss: 37,252 bytes, 7/4 times sent.
    """
    config = override(base(), SMALL)
    assert [slots_of(config, tokens) for tokens in tokens_of(config)] == [32 * 48, 8 * 48]
    moved = [(one.kind, one.devices, one.bytes) for one in formula(config, 2, 4)]
    assert moved == [("all-to-all", 4, 61440), ("all-reduce", 2, 18432), ("all-reduce", 8, 37252)]
    assert [SENT[kind](size, devices) for kind, devices, size in moved] == [46080, 18432, 65191]
    # bfloat16 halves all but routers, norms, logits and the loss.
    halved = [one.bytes for one in formula(override(config, {"transformer.dtype": "bfloat16"}), 2, 4)]
    assert halved == [30720, 9216, (37252 + 4 * (512 + 96 + 2560) + 4) / 2]
    assert formula(config, 1, 1) == []


@pytest.mark.slow
def test_the_compiled_step_sends_what_the_formula_says_and_nothing_else(tmp_path_factory):
    """On 2 x 4 devices, where all kinds occur; the bench compiles all of MESHES, in half a minute each."""
    cache = tmp_path_factory.getbasetemp() / "text"
    records = collectives(override(base(), SMALL | {"data.cache": str(cache)}), 2, 4)
    assert len(records) == 3
    for record in records:
        assert record["bytes"] == record["formula"], record


@pytest.mark.slow
def test_an_evaluation_gathers_choices_and_no_scores(tmp_path_factory):
    """Every device has all tokens' choices (2 bytes an expert); scores, 16 numbers of 4 bytes, stay where they are.

    Of each block the first tokens' features go to all experts, whose outputs are compared; of all rows one is kept with
    its probabilities (512 tokens of the encoder are 16 rows of 32).
    """
    cache = tmp_path_factory.getbasetemp() / "text"
    config = override(base(), SMALL | {"data.cache": str(cache), "mesh.data": 2, "mesh.expert": 4})
    text = compilation.lower_group(config, 0, 1, devices.make_mesh(config)).record.compile().as_text()
    gathers = [line for line in text.splitlines() if " all-gather(" in line]
    shapes = [re.search(r" = (\w+)\[([\d,]+)\]", line).groups() for line in gathers]
    features = [tuple(map(int, shape.split(","))) for kind, shape in shapes if kind != "s16"]
    limits = {config.transformer.dim: ALIKE, config.experts.count: config.data.input_length}
    assert gathers and all(shape[-2] <= limits[shape[-1]] for shape in features), shapes


def test_validation_rows_that_devices_cannot_share_are_refused(tmp_path_factory):
    """12 rows are one block, which 8 devices cannot share."""
    cache = tmp_path_factory.getbasetemp() / "text"
    changes = SMALL | {"data.cache": str(cache), "data.eval_rows": 12, "mesh.data": 8}
    config = override(base(), changes)
    with pytest.raises(UserError, match=r"data.eval_rows=12: .* 12 rows, of which 8 devices cannot .* of 12; use 8"):
        compilation.lower_group(config, 0, 1, devices.make_mesh(config))


@pytest.mark.parametrize(("rows", "warned"), [(13, True), (12, False), (3, False)])
def test_rows_that_make_many_small_blocks_are_named(caplog, rows, warned):
    """Batches of 8: 13 rows are 13 blocks of one, 12 are two of 6, 3 are one."""
    config = override(base(), SMALL | {"batch_size": 8})
    ids = jnp.zeros((rows, 4), int)
    blocks = in_blocks(config, TextBatch(ids, ids, jnp.zeros(rows, int)), "test")
    assert len(blocks.inputs) == {13: 13, 12: 2, 3: 1}[rows]
    said = "the test text gives 13 rows, evaluated in blocks of 1; data.eval_rows=8 is faster"
    assert (said in caplog.text) == warned


def test_networks_by_hand():
    """8 chips are 4 x 2: two links at 50 GB/s; 6 hops a call. A quarter of an all-to-all crosses the 2 middle links.

    256 chips close their rings, 16 x 16: twice the links. 16 GPUs: a ring in each node, then an eighth from node to
    node.
    """
    one = Collective("all-reduce", 8, 8e9, 3)
    assert torus(one, axes=2, closes=256) == pytest.approx(14e9 / 100e9 + 3 * 6e-6)
    swap = Collective("all-to-all", 8, 8e9, 0)
    assert torus(swap, axes=2, closes=256) == pytest.approx(8e9 / 4 * 4 / 50e9)
    assert torus(swap._replace(devices=256), axes=2, closes=256) == pytest.approx(8e9 / 4 * 16 / 100e9)
    assert torus(swap._replace(devices=2), axes=2, closes=256) == pytest.approx(8e9 / 2 / 50e9)
    assert nodes(one, call=0.0) == pytest.approx(14e9 / 450e9)
    assert nodes(one._replace(devices=16), call=1e-3) == pytest.approx(14e9 / 450e9 + 1e9 / 50e9 + 3e-3)
    assert nodes(one._replace(stride=8), call=0.0) == pytest.approx(14e9 / 50e9)  # one GPU in each node
    assert nodes(swap._replace(devices=16)) == pytest.approx(8e9 * 7 / 16 / 450e9 + 8e9 / 2 / 50e9)


def test_groups_that_chips_can_share():
    """`paper`: 65,536 and 14,592 = 2^8 3 19 tokens. 64 chips have 1,024 and 228 each, 8 chips 8,192 and 1,824."""
    config = experiment.configure("experiments/t5_mc4.py:fig5,paper", [])[1]
    assert {chips: shared_group(tokens_of(config), 4096, chips) for chips in (1, 8, 64, 128)} == {
        1: 4096,
        8: 1824,
        64: 228,
        128: 114,
    }
    mesh = make_mesh(2, 4)
    for tokens in tokens_of(config):
        check(mesh, 64, tokens, group_of(1824, tokens))
    with pytest.raises(UserError, match="14592 tokens make 4 groups, no multiple of 8 devices"):
        check(mesh, 64, 14592, group_of(4096, 14592))
    spread = override(config, {"data.directory": "x", "mesh.data": 2, "mesh.expert": 4})
    with pytest.raises(
        UserError, match=r"group_size=4096: 8 .* groups of 65536 and 14592 .* use selection.group_size=1824"
    ):
        validate(spread)
    validate(override(spread, {"selection.group_size": 1824}))
    dropless = {"selection.capacity_factor": 0.0, "selection.eval.capacity_factor": 0.0}
    validate(override(spread, dropless | {"selection.group_size": 0}))  # each device its own
    with pytest.raises(UserError, match="batch_size=1: 8 devices cannot share it; use a multiple of 8"):
        validate(override(spread, {"batch_size": 1}))
    # 16,384 rows: groups of 4,096 would be 456 in the decoder, which 256 chips cannot share; the next divisor, 3,648,
    # gives 512.
    assert shared_group(tokens_of(override(config, {"batch_size": 16384})), 4096, 256) == 3648  # of which 14,592 is 4


def test_shares_of_linear(monkeypatch):
    rates = {1: 100.0, 2: 180.0, 4: 300.0, 8: 280.0}

    def run(command, **_):
        devices = next(n for n in rates if f"runs_per_hour({n}, 5)" in command[-1])
        return SimpleNamespace(stdout=f"a warning\n{rates[devices]}\n")

    monkeypatch.setattr(subprocess, "run", run)
    assert [record["share_of_linear"] for record in sweep(5)] == [1.0, 0.9, 0.75, 0.35]


@pytest.mark.slow
def test_a_process_of_the_sweep_keeps_to_its_cores():
    """.06 ms a step of a run, 4,000 steps: 15,000 runs an hour."""
    code = (
        "import os, jax; from types import SimpleNamespace; from routed.bench import scaling;"
        " scaling.Batch = lambda *_: SimpleNamespace(train=lambda: None, step=lambda: 0.06e-3);"
        " print(scaling.runs_per_hour(1, 3), jax.device_count(), len(os.sched_getaffinity(0)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [float(word) for word in done.stdout.split()] == [pytest.approx(15000), 1, 1]
