"""Folders of traces that are damaged, edited or from a stranger: their numbers are right, or one line says why not."""

import inspect
import json
import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from absl import logging as log
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from routed import trace
from routed.contracts import UserError
from routed.trace import analysis, counts, features, report
from tests import damage

RNG = np.random.default_rng(0)
LAYERS, TOKENS, EXPERTS, K = 2, 60, 4, 2
SCORES = RNG.normal(size=(LAYERS, TOKENS, EXPERTS)).astype(np.float32)
ROWS = np.repeat(np.arange(12), 5)
FEATURES = features.Features(
    np.arange(0, TOKENS, 6),
    [RNG.normal(size=(10, 3)).astype(np.float32)] * LAYERS,
    [RNG.normal(size=(3, EXPERTS)).astype(np.float32)] * LAYERS,
)
GIVEN = {
    "scores": SCORES,
    "experts": np.argsort(-SCORES)[..., :K],
    "weights": np.full((*SCORES.shape[:2], K), 0.5),
    "token_ids": RNG.integers(0, 9, TOKENS),
    "sequence": ROWS,
    "labels": {"language": np.where(ROWS % 2, "de", "en")},
    "features": FEATURES,
}
#: What stands in a field instead of its value.
ODD = [*damage.ODD]
ODD += [["expert"], ["language", "language"], ["sequence"], ["a", "a"], ["a", "b", "c"]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A trace of today, and the same without digests, as older programs wrote it."""
    folder = tmp_path_factory.mktemp("traces")
    trace.write(folder / "new", **GIVEN)
    shutil.copytree(folder / "new", folder / "old")
    edit(folder / "old", lambda content: content.pop("digests"))
    return folder


def edit(folder, change):
    content = json.loads((folder / "trace.json").read_text())
    change(content)
    (folder / "trace.json").write_text(json.dumps(content))


def change_column(folder, name, column, change):
    table = pq.read_table(folder / name)
    values = change(table.column(column))
    index = table.column_names.index(column)
    pq.write_table(table.set_column(index, column, values), folder / name)


def numbers_of(folder):
    analysed = analysis.analyse([trace.read(folder)])
    report.findings(analysed)
    return analysed.table


FILES = ["trace.json", "tokens.parquet", "layer_00.parquet", "layer_01.parquet", "features_00.npz"]


def damage_trace(data, folder):
    """Changes bytes, a field or a column of a trace."""
    kind = data.draw(st.sampled_from([*damage.BYTES, "field", "column", "drop", "npz"]))
    if kind in damage.BYTES:
        damage.damage_bytes(data, folder / data.draw(st.sampled_from(FILES)), kind)
    elif kind == "field":
        damage.damage_field(data, folder / "trace.json", ODD)
    elif kind == "npz":
        arrays = dict(np.load(folder / "features_00.npz"))
        array = data.draw(st.sampled_from(sorted(arrays)))
        odd = [np.array(np.nan), np.zeros((3, 3)), np.full(10, -1), np.arange(10) + 10**6, np.full((10, 3), np.inf)]
        arrays[array] = data.draw(st.sampled_from(odd))
        np.savez(folder / "features_00.npz", **arrays)
    else:
        name = data.draw(st.sampled_from(FILES[1:4]))
        column = data.draw(st.sampled_from(pq.read_schema(folder / name).names))
        if kind == "drop":
            pq.write_table(pq.read_table(folder / name).drop_columns([column]), folder / name)
        else:
            odd = [-1, 4, 100, -32768, 2**62, -(2**63), None, float("nan"), float("inf"), -1.5, 1e38, "x", "\x01", True]
            value = data.draw(st.sampled_from(odd))
            change_column(folder, name, column, lambda old: pa.array([value] * TOKENS))


@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), age=st.sampled_from(["new", "old"]))
@pytest.mark.slow
def test_no_damage_ends_in_a_traceback(whole, tmp_path, data, age):
    folder = tmp_path / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole / age, folder)
    damage_trace(data, folder)
    try:
        numbers_of(folder)
    except UserError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("name", FILES[1:])
def test_a_bit_that_flipped_is_said(whole, tmp_path, name):
    """Parquet has no checks of its own: without digests 18 of 48 such files made a page with other numbers."""
    shutil.copytree(whole / "new", tmp_path / "t")
    content = bytearray((tmp_path / "t" / name).read_bytes())
    content[100] ^= 1
    (tmp_path / "t" / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name} (has changed since it was written|is damaged)"):
        trace.read(tmp_path / "t")


def test_files_of_two_layers_exchanged_are_said(whole, tmp_path):
    shutil.copytree(whole / "new", tmp_path / "t")
    os.rename(tmp_path / "t/layer_00.parquet", tmp_path / "t/x")
    os.rename(tmp_path / "t/layer_01.parquet", tmp_path / "t/layer_00.parquet")
    os.rename(tmp_path / "t/x", tmp_path / "t/layer_01.parquet")
    with pytest.raises(UserError, match=r"layer_00\.parquet has changed since it was written"):
        trace.read(tmp_path / "t")


def test_a_trace_of_an_older_program_is_read_and_says_so(whole, caplog):
    log.use_python_logging(quiet=True)
    with caplog.at_level("INFO", logger="absl"):
        old = numbers_of(whole / "old")
    assert "has no digests, since an older program wrote it: its values are looked at instead" in caplog.text
    assert old.equals(numbers_of(whole / "new"))


@pytest.mark.parametrize(
    ("name", "column", "value", "message"),
    [
        ("layer_00.parquet", "expert_0", 4, "expert 4, but there are 4 experts|an expert is beyond -1 to 3"),
        ("layer_00.parquet", "expert_0", -2, "an expert is beyond -1 to 3"),
        ("layer_00.parquet", "weight_0", float("nan"), "weights .*must be finite"),
        ("layer_00.parquet", "weight_0", -2e30, "weights .*must be finite, at most 1e\\+30"),
        ("layer_01.parquet", "scores_0", float("inf"), "scores of layer 1 are not finite"),
        ("layer_00.parquet", "scores_0", "1", "column 'scores_0' has the type string"),
        ("layer_00.parquet", "expert_0", None, "type null"),
        ("tokens.parquet", "token", -1, "token: -1 is negative"),
        ("tokens.parquet", "position", -5, "position: -5 is negative"),
    ],
)
def test_a_value_that_cannot_be_is_named(whole, tmp_path, name, column, value, message):
    """In a trace without digests, in whose file one column has another value."""
    shutil.copytree(whole / "old", tmp_path / "t")
    change_column(tmp_path / "t", name, column, lambda old: pa.array([value] * TOKENS))
    with pytest.raises(UserError, match=message) as error:
        trace.read(tmp_path / "t")
    assert name in str(error.value)


def test_an_expert_twice_and_sequences_apart_are_named(whole, tmp_path):
    shutil.copytree(whole / "old", tmp_path / "t")
    experts = pq.read_table(tmp_path / "t/layer_00.parquet").column("expert_0")
    change_column(tmp_path / "t", "layer_00.parquet", "expert_1", lambda old: experts)
    with pytest.raises(UserError, match="layer 0, token 0 has an expert twice"):
        trace.read(tmp_path / "t")
    shutil.copytree(whole / "old", tmp_path / "u")
    change_column(tmp_path / "u", "tokens.parquet", "sequence", lambda old: pa.array(np.tile([0, 1], TOKENS // 2)))
    with pytest.raises(UserError, match="tokens of a sequence must stand together"):
        trace.read(tmp_path / "u")


def test_labels_of_another_program_may_be_plain_texts(whole, tmp_path):
    shutil.copytree(whole / "old", tmp_path / "t")
    change_column(tmp_path / "t", "tokens.parquet", "language", lambda old: old.cast(pa.string()))
    kept = numbers_of(tmp_path / "t").set_index(["layer", "number"]).value
    table = numbers_of(whole / "old").set_index(["layer", "number"]).value
    np.testing.assert_allclose(kept[:, "mi.language"], table[:, "mi.language"], rtol=1e-6)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("k", 1, "has other columns than trace.json says, such as 'expert_1'"),
        ("experts", 16, "such as 'scores_10'"),
        ("experts", 10**9, "experts=1000000000: must be between 1 and 32767"),
        ("k", 10**9, "k=1000000000: must be between 1 and 4"),
        ("layers", ["a"], "features_01.npz has changed|layer_01.parquet has changed"),
        ("layers", ["a", "a"], "two have the name 'a'"),
        ("held", ["expert"], "such as 'scores_0'"),
        ("has_ids", False, "such as 'token'"),
        ("has_features", 1, "has_features=1: must be true or false"),
        ("format", 2, "has format 2, this program reads 1"),
    ],
)
def test_a_field_that_the_files_contradict_is_named(whole, tmp_path, field, value, message):
    shutil.copytree(whole / "new", tmp_path / "t")
    edit(tmp_path / "t", lambda content: content.update({field: value}))
    with pytest.raises(UserError, match=message):
        trace.read(tmp_path / "t")


def test_tables_that_cannot_fit_into_memory_are_left_out_or_refused(tmp_path, monkeypatch):
    """12 sequences x 300^2 pairs of experts are 1,080,000 cells; the table of ids has 2 halves x ids x 300."""
    chosen = np.stack([np.zeros((1, TOKENS), int), np.full((1, TOKENS), 299)], -1)
    stored = trace.write(tmp_path, experts=chosen, num_experts=300, sequence=ROWS, token_ids=np.arange(TOKENS))
    for cells, counted in ((1_080_000, True), (1_079_999, False)):
        monkeypatch.setattr(counts, "PAIRS", cells)
        assert ("pairs" in set(analysis.analyse([stored]).table.number)) == counted
    cells = 2 * TOKENS * 300
    monkeypatch.setattr(counts, "MOST_CELLS", cells - 1)
    with pytest.raises(UserError, match=f"tables of 300 experts have {cells:,} cells"):
        analysis.analyse([stored])


def test_many_assignments_have_one_shuffle(whole, monkeypatch):
    """The information is the same; its value by chance is that of one shuffle instead of four."""
    tables = []
    for many in (0, 10**9):
        monkeypatch.setattr(counts, "MANY", many)
        tables.append(numbers_of(whole / "new").set_index(["layer", "number"]).loc["0"])
    assert tables[0].value.equals(tables[1].value)
    assert tables[0].chance["mi.token"] == pytest.approx(tables[1].chance["mi.token"], rel=0.5)
    assert tables[0].chance["mi.token"] != tables[1].chance["mi.token"]


def one_layer(**changes):
    return {"experts": np.zeros((2, 4, 1), int), "num_experts": 4} | changes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (one_layer(token_ids=np.full(4, 2**63 + 5, np.uint64)), "token_ids: 9223372036854775813 cannot be stored"),
        (one_layer(position=np.full(4, 2**40)), "position: 1099511627776 cannot be stored; the largest is 2,147"),
        (one_layer(position=np.full(4, -3)), "position: -3 is negative"),
        (one_layer(sequence=np.full(4, 2**63 + 5, np.uint64)), "sequence: 9223372036854775813 cannot be stored"),
        (one_layer(num_experts=4.7), "num_experts=4.7: must be a whole number"),
        (one_layer(step=1.9), "step=1.9: must be a whole number"),
        (one_layer(step=float("nan")), "step=nan: must be a whole number"),
        (one_layer(weights=np.full((2, 4, 1), np.nan)), r"token 0 has weights \[nan\]: must be finite"),
        (one_layer(weights=np.full((2, 4, 1), -np.inf)), "must be finite, at most"),
        (one_layer(weights=np.full((2, 4, 1), "x")), "weights of layer 0 are <U1: must be real"),
        (one_layer(kept=np.full((2, 4, 1), 0.3)), "kept of layer 0 is float64"),
        (one_layer(kept=np.full((2, 4, 1), 2)), "with other values than True and False"),
        (one_layer(layers=["a", "a"]), "layers: two have the name 'a'"),
        (one_layer(layers=[None, "a"]), "layers=None: must be a text"),
        (one_layer(labels={3: np.zeros(4, int)}), "labels=3: must be a text"),
        (one_layer(labels={"": np.zeros(4, int)}), "labels: a name is empty"),
        (one_layer(labels={"a": np.array([b"a"] * 4)}), "labels are words or integers"),
        (one_layer(labels={"a": np.array(["\ud800"] * 4)}), r"U\+D800, which no page can show"),
        (one_layer(labels={"a": np.array(["", "b", "b", "b"])}), "has an empty value: give such tokens another one"),
        (one_layer(source=b"x"), "source=b'x': must be a text"),
        (one_layer(k=1.0), "k=1.0: must be a whole number"),
        (one_layer(k=True), "k=True: must be a whole number"),
        ({"scores": SCORES.astype(complex), "k": 1}, "scores of layer 0 are complex128: must be real"),
        ({"scores": SCORES.astype(object), "k": 1}, "scores of layer 0 are object"),
        ({"scores": SCORES.astype(float) * 1e39, "k": 1}, "scores of layer 0 are not finite"),
        ({"scores": np.where(np.arange(4) > 2, -np.inf, SCORES), "k": 1}, "give experts .* instead of scores"),
        ({"scores": [None, *SCORES], "k": 1}, r"scores\[0\] is None, .* leave such layers out.*layers=\['1', '2'\]"),
    ],
)  # fmt: skip
def test_what_a_trace_cannot_store_is_refused(tmp_path, given, message):
    with pytest.raises(UserError, match=message) as error:
        inspect.unwrap(trace.write)(tmp_path, **given)  # without the types that the tests check
    assert "\n" not in str(error.value)


def test_experts_in_ascending_order_have_no_first_expert(tmp_path):
    """Megatron writes ascending experts. Weights say which is first; 60 tokens are too few to conclude it."""
    chosen = np.sort(RNG.permuted(np.tile(np.arange(8), (2, 200, 1)), axis=2)[..., :2], axis=2)
    weights = RNG.random(chosen.shape)
    given = {"num_experts": 8, "sequence": np.arange(200) // 5}
    for name, more, some, known in (("a", {}, 200, False), ("b", {"weights": weights}, 200, True), ("c", {}, 60, True)):
        arrays = {key: array[:, :some] for key, array in ({"experts": chosen} | more).items()}
        stored = trace.write(tmp_path / name, **arrays, **(given | {"sequence": given["sequence"][:some]}))
        assert ("next" in set(analysis.analyse([stored]).table.number)) == known
