"""`bench gpu` without a GPU: floors by hand, every part at tiny sizes; failures and missing times are named.

Its table of layers: test_gpu_table.py.
"""

import json
import math
import sys
from types import SimpleNamespace

import jax
import pytest

from routed.bench import dispatch, gpu, gpu_parts, harness
from routed.bench.__main__ import main
from routed.contracts import UserError
from routed.system import machine
from routed.system.machine import Floor, Rates, floor

CASE = {"tokens": 16, "k": 2, "dim": 8, "hidden": 4, "experts": 3, "load": "random"}
#: FLOP/s that make milliseconds of millions, and a memory that is never the bound.
ROUND = Rates({"bfloat16": 1e9, "float32": 1e9}, 1e15)


def test_work_of_a_layer_by_hand():
    """A token: 2 experts x 2 x 8 x 4 and a router of 8 x 3 products; an expert: 64 weights, 2 bytes, moved 3 times."""
    assert dispatch.flops_of(CASE) == 3 * 2 * 16 * (128 + 24)
    assert dispatch.flops_of(CASE, "dense_ffn") == 3 * 2 * 16 * 128
    assert dispatch.bytes_of(CASE, 2) == 2 * (64 * (2 * 3 + 3) + 3 * 16 * 8)
    assert dispatch.bytes_of(CASE, 2, "dense_ffn") == 2 * (64 * (2 * 2 + 2) + 3 * 16 * 8)
    assert dispatch.bytes_of(CASE | {"load": "one"}, 2) == 2 * (64 * (2 * 2 + 3) + 3 * 16 * 8)


def test_a_floor_is_the_larger_of_work_and_traffic(monkeypatch):
    rates = Rates({"bfloat16": 1e12, "float32": 5e11}, 1e9)
    assert floor(rates, 2e9, 1e6, "bfloat16") == Floor(pytest.approx(2e-3), "FLOPs")
    assert floor(rates, 2e9, 1e6, "float32") == Floor(pytest.approx(4e-3), "FLOPs")
    assert floor(rates, 2e9, 1e7, "bfloat16") == Floor(pytest.approx(1e-2), "bytes")
    # The large table on an H200: 26.4 TFLOP at 989 TFLOP/s; 13.7 GB at 4.8 TB/s would be 2.9 ms.
    monkeypatch.setattr(machine, "platform", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind="NVIDIA H200")])
    case = {"tokens": 65536, "dim": 2048, "hidden": 8192, "experts": 64, "k": 2, "load": "random"}
    peaks = machine.rates.__wrapped__()
    assert floor(peaks, dispatch.flops_of(case), dispatch.bytes_of(case, 2), "bfloat16") == Floor(
        pytest.approx(0.02673, rel=1e-3), "FLOPs"
    )
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind="NVIDIA B300")])
    with pytest.raises(UserError, match=r"no rates of 'NVIDIA B300' are known \(v4, .*h200 are\): add it to CHIPS"):
        machine.rates.__wrapped__()


@pytest.fixture
def measured(monkeypatch):
    """The records of a part's cases, at rates that are round."""
    for module in (gpu_parts, harness):
        monkeypatch.setattr(module, "rates", lambda: ROUND)
    return lambda part, *cases: [*gpu_parts.records(part, [*cases], 1)]


@pytest.mark.slow
def test_batches_at_tiny_sizes(measured, monkeypatch):
    """2,176 parameters, 1,536 multiply data; 32 samples: 64 (3 x 2,176 - 1,536) FLOPs. Adam moves 40 bytes of each."""
    one, all_at_once = measured("batching", "constant, 256 runs: map", "constant, 256 runs: vmap")
    assert one["floor_ms"] == all_at_once["floor_ms"] == pytest.approx(0.319488)
    assert (one["batching"], all_at_once["batching"], one["auto"]) == ("map", "vmap", "map")
    assert one["runs"] == 2 and one["over_floor"] == pytest.approx(one["ms_per_run_step"] / one["floor_ms"])
    monkeypatch.setattr(harness, "rates", lambda: ROUND._replace(bandwidth=1e6))
    (slow,) = measured("batching", "constant, 256 runs: map")
    assert slow["bound"] == "bytes" and slow["floor_ms"] == pytest.approx(87.04, rel=1e-2)


@pytest.mark.slow
def test_the_t5_at_tiny_sizes(measured):
    """8 rows of 64 and 14 tokens."""
    (record,) = measured("t5", "gpu, auto")
    assert record["tokens"] == 8 * (64 + 14) and record["steps"] == 2
    assert record["tokens_per_second"] * record["seconds_per_step"] == pytest.approx(624)
    assert record["mfu"] == pytest.approx(1 / record["over_floor"])  # bound by FLOPs, and all types at one rate
    assert 0 < record["flops_share"] < 2


@pytest.mark.slow
def test_a_sweep_at_tiny_sizes(measured):
    """40 steps and evaluations at 0, 20 and 40."""
    (record,) = measured("sweep", "headline")
    hours = (40 * record["ms_per_run_step"] + 3 * record["ms_evaluation"] / record["runs"]) / 3.6e6
    assert record["runs_per_hour"] == pytest.approx(1 / hours)
    assert record["most_runs_per_hour"] == pytest.approx(3.6e6 / 40 / record["floor_ms"])
    assert record["program"].startswith("learned/frozen") and record["floor_ms"] > 0


def raising(error):
    def case(rounds):
        raise error

    return case


def test_every_failure_is_one_line_with_what_to_do(monkeypatch):
    """What a user can mend leaves the process as it was; after anything else the rest is for another one."""
    errors = {
        "refused": UserError("dispatch 'x' is dense; use 'slots'"),
        "memory": jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nwhile trying to allocate"),
        "lowering": NotImplementedError("Unsupported lowering\nfor x"),
        "other": ZeroDivisionError("why?"),
    }
    part = gpu_parts.Part(
        1, {n: raising(e) for n, e in errors.items()} | {"good": lambda rounds: {"n": rounds}}, 1, "halve", "set"
    )
    monkeypatch.setitem(gpu_parts.PARTS, "p", part)

    def run(*cases):
        return [{k: r[k] for k in r if k != "seconds"} for r in gpu_parts.records("p", [*cases], 3)]

    refused = {
        "part": "p",
        "case": "refused",
        "failed": "dispatch 'x' is dense; use 'slots'",
        "do": "what the line says",
    }
    assert run("refused", "good") == [refused, {"part": "p", "case": "good", "n": 3}]
    (memory,), (lowering,), (other,) = (run(case, "good") for case in ("memory", "lowering", "other"))
    assert memory["failed"] == "JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate"
    assert (memory["do"], lowering["do"]) == ("halve", "set") and other["do"].startswith("a fault of the bench")


#: Stands for the process of a part: case `dies` takes it down, `fails` ends it behind its record, `hangs` hangs.
STAND_IN = """
import json, sys, time
for case in CASES:
    if case == "dies":
        sys.exit("CHECK failed: boom")
    if case == "hangs":
        time.sleep(60)
    print("noise")
    print(json.dumps({"part": "p", "case": case} | ({"failed": "x"} if case == "fails" else {})), flush=True)
    if case == "fails":
        break
"""


@pytest.fixture
def stand_ins(monkeypatch):
    """Parts whose cases are these."""

    def set_parts(patience=math.inf, **cases):
        parts = {name: gpu_parts.Part(1.5, dict.fromkeys(each), patience) for name, each in cases.items()}
        monkeypatch.setattr(gpu, "PARTS", parts)
        monkeypatch.setattr(gpu, "part_of", parts.get)
        monkeypatch.setattr(
            gpu, "command", lambda part, cases, *_: [sys.executable, "-c", f"CASES = {cases}{STAND_IN}"]
        )

    return set_parts


def test_a_case_that_dies_is_named_and_the_others_go_on(stand_ins):
    stand_ins(p=("a", "fails", "dies", "b"), q=("dies",))
    records = [*gpu.bench(3)]
    assert [(r["part"], r["case"], r.get("failed")) for r in records[:-1]] == [
        ("p", "a", None), ("p", "fails", "x"), ("p", "dies", "its process ended with 1: CHECK failed: boom"),
        ("p", "b", None), ("q", "dies", "its process ended with 1: CHECK failed: boom"),
    ]  # fmt: skip
    assert records[2]["do"] == "see above; alone: python -m routed.bench.gpu_parts p"
    assert records[-1]["failed"] == ["p: fails", "p: dies", "q: dies"] and records[-1]["left_out"] == []


@pytest.mark.slow
def test_what_has_no_time_left_says_so(stand_ins, monkeypatch):
    stand_ins(p=("a", "hangs", "b"), q=("c",))
    monkeypatch.setattr(gpu, "BUDGET", 4.0)
    records = [*gpu.bench(3)]
    assert [r["case"] for r in records[:-1]] == ["a", "hangs", "b", "c"] and "left_out" not in records[0] | records[3]
    words = r"the 2 s that the budget had for this part are over; alone: python -m routed.bench.gpu_parts p 'hangs'"
    assert records[1]["left_out"] == words and records[-1]["left_out"] == ["p: hangs", "p: b"]
    assert 2 < records[-1]["seconds"] < 4
    monkeypatch.setattr(gpu, "BUDGET", 1.6)
    assert [*gpu.bench(3)][-1]["left_out"] == ["p: a", "p: hangs", "p: b"]


@pytest.mark.slow
def test_a_case_that_hangs_costs_its_patience_and_its_column_comes_last(stand_ins):
    """A process starts within a second; `hangs` prints nothing, then the other cell of its column runs behind b."""
    stand_ins(patience=3.0, p=("a: x", "hangs", "b: y"), q=("dies", "a: dies", "b: y"))
    records = [*gpu.bench(3)]
    assert [(r["case"], r.get("failed")) for r in records[:2]] == [
        ("a: x", None),
        ("hangs", "nothing came for 3 s: nothing was said"),
    ]
    assert [r["case"] for r in records[2:-1]] == ["b: y", "dies", "b: y", "a: dies"]


def test_the_budget_is_under_eight_minutes_and_all_of_it_is_shared_out():
    assert sum(part.seconds for part in gpu_parts.PARTS.values()) <= gpu.BUDGET < 480


@pytest.fixture
def flags(monkeypatch, tmp_path):
    """Sets the flags of the command; returns its file."""
    file = tmp_path / "records.json"

    def set_flags(baseline=None, topology=None):
        for flag, value in (
            ("JSON", str(file)),
            ("ROUNDS", 3),
            ("BASELINE", baseline),
            ("TOPOLOGY", topology),
            ("ONLY", ""),
        ):
            monkeypatch.setattr(f"routed.bench.__main__.{flag}", SimpleNamespace(value=value))
        return file

    return set_flags


def test_a_baseline_of_a_bench_without_one_is_refused(flags):
    flags("echo 1")
    with pytest.raises(UserError, match="--baseline: bench gpu has none; gmm, t5, lm, patches compare"):
        main(["bench", "gpu"])


def test_a_topology_is_one_of_a_gpu_and_of_this_bench(flags):
    flags(topology="h100:1")
    with pytest.raises(UserError, match="--topology=h100:1: bench trace has none; gpu compiles for another machine"):
        main(["bench", "trace"])
    flags(topology="h1:1")
    with pytest.raises(UserError, match="--topology=h1:1: unknown"):
        main(["bench", "gpu"])


def test_records_are_written_as_they_come(flags, monkeypatch):
    """A bench that is killed leaves its measurements, with the machine, the versions and the commit."""

    def bench(rounds):
        yield {"a": 1}
        raise KeyboardInterrupt

    file = flags()
    monkeypatch.setattr("routed.bench.__main__.BENCHES", {"gpu": SimpleNamespace(bench=bench)})
    with pytest.raises(KeyboardInterrupt):
        main(["bench", "gpu"])
    written = json.loads(file.read_text())
    assert written["records"] == [{"a": 1}] and (written["bench"], written["rounds"]) == ("gpu", 3)
    assert {"machine", "versions", "commit"} <= written.keys() and written["versions"]["jax"] == jax.__version__


@pytest.mark.slow
def test_the_command(monkeypatch):
    """The real processes, of one case that is measured and one that cannot be."""
    names = ["mixtral balanced forward: dense_ffn", "mixtral balanced forward: mosaic"]
    parts = {"table": gpu_parts.PARTS["table"]._replace(cases={name: gpu_parts.CELLS[name] for name in names})}
    monkeypatch.setattr(gpu_parts, "PARTS", parts)
    monkeypatch.setattr(gpu, "PARTS", parts)
    dense, kernels, summary = gpu.bench(1)
    assert dense["ms"] > dense["floor_ms"] > 0 and dense["of_dense"] == 1
    assert kernels["failed"] == "cpu is no Hopper, for which these kernels of JAX are"
    assert summary["failed"] == ["table: mixtral balanced forward: mosaic"] and summary["reached"] is None
