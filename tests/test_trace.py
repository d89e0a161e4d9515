"""Traces: what is written is what is read, bad input is one line, and a capture that was killed goes on."""

import contextvars

import jax.numpy as jnp
import numpy as np
import pytest

from routed import trace
from routed.contracts import UserError
from routed.system import files
from routed.trace import __main__ as command
from routed.trace import hooks
from routed.trace.format import label_names, stripes, token_column

RNG = np.random.default_rng(0)
LAYERS, TOKENS, EXPERTS, K = 3, 40, 6, 2
SCORES = RNG.normal(size=(LAYERS, TOKENS, EXPERTS)).astype(np.float32)
IDS = RNG.integers(0, 9, TOKENS)
ROWS = np.repeat(np.arange(8), 5)
WORDS = np.repeat(["de", "en"], 20)
GIVEN = {"scores": SCORES, "k": K, "token_ids": IDS, "sequence": ROWS, "labels": {"language": WORDS}}


def column(stored, layer, name):
    return np.concatenate([arrays[0] for arrays in stripes(stored, layer, name, size=7)])


def test_what_is_written_is_what_is_read(tmp_path):
    stored = trace.write(tmp_path, **GIVEN, model="small", step=3)
    assert trace.read(tmp_path) == stored and (stored.tokens, stored.experts, stored.k, stored.step) == (
        TOKENS,
        EXPERTS,
        K,
        3,
    )
    for layer in range(LAYERS):
        order = np.argsort(-SCORES[layer], axis=1)[:, :K]
        np.testing.assert_array_equal(column(stored, layer, "expert"), order)
        np.testing.assert_array_equal(column(stored, layer, "scores"), SCORES[layer].astype(np.float16))
    assert stored.columns == ("expert", "scores")  # weights of experts are those of the model, if it says them
    np.testing.assert_array_equal(token_column(stored, "token"), IDS)
    np.testing.assert_array_equal(token_column(stored, "position"), np.tile(np.arange(5), 8))
    assert [label_names(stored, "language")[i] for i in token_column(stored, "language")] == WORDS.tolist()


def test_experts_may_be_given_and_arrays_may_be_those_of_jax(tmp_path):
    chosen = np.array([[[0, 1], [2, -1]]])  # the second token has one expert
    stored = trace.write(tmp_path, experts=jnp.asarray(chosen), kept=chosen >= 0, num_experts=4)
    assert stored.columns == ("expert", "kept") and stored.labels == () and not stored.has_ids
    np.testing.assert_array_equal(column(stored, 0, "expert"), chosen[0])
    np.testing.assert_array_equal(column(stored, 0, "kept"), [[True, True], [True, False]])


def test_scores_beyond_half_precision_are_kept(tmp_path):
    stored = trace.write(tmp_path, scores=SCORES * 1e5, k=1)
    np.testing.assert_array_equal(column(stored, 1, "scores"), SCORES[1] * np.float32(1e5))
    assert "scores" not in trace.write(tmp_path, scores=SCORES, k=1, keep_scores=False).columns


def test_numbers_of_numpy_are_those_of_python(tmp_path):
    stored = trace.write(tmp_path, experts=np.zeros((1, 4, 1), int), num_experts=np.int64(4), step=np.int64(3))
    assert trace.read(tmp_path) == stored and (stored.experts, stored.step, type(stored.step)) == (4, 3, int)


def changed(**changes):
    return GIVEN | changes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "neither scores nor experts"),
        ({"scores": SCORES}, "k, the number of experts of a token, is missing"),
        (changed(k=7), "k=7: must be between 1 and 6 experts"),
        (changed(scores=SCORES[0]), r"scores has shape \[40, 6\]: must be \[layers, tokens, experts\]"),
        (changed(token_ids=IDS[:-1]), r"token_ids has shape \[39\] of int64: must be 40 integers"),
        (changed(experts=np.zeros((2, TOKENS, 1), int), k=1),
         "experts has 2 layers and 40 tokens, scores has 3 and 40"),
        (changed(scores=np.where(np.arange(TOKENS)[:, None] == 5, np.nan, SCORES)),
         "not finite for 1 tokens, the first is token 5"),
        ({"experts": np.full((1, 4, 1), 9), "num_experts": 8}, "token 0 has expert 9, but there are 8 experts"),
        ({"experts": np.full((1, 4, 2), 3), "num_experts": 8}, "layer 0, token 0 has an expert twice"),
        (changed(labels={"language": [*WORDS[:-1], None]}),
         r"labels\['language'\] lacks 1 of 40 rows, the first is token 39"),
        (changed(labels={"language": WORDS[1:]}), r"labels\['language'\] has shape \[39\]"),
        (changed(labels={"token": WORDS}), "'token' is a column of every trace"),
        (changed(labels={"loss": np.zeros(TOKENS)}), "labels are words or integers"),
        (changed(sequence=np.tile([0, 1], 20)), "tokens of a sequence must stand together"),
        ({"experts": [np.array([[40000]])], "num_experts": 50000}, "50,000 experts: a trace holds at most 32,767"),
        (changed(layers=["a"]), "layers names 1 layers, the arrays have 3"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(given, message, tmp_path):
    with pytest.raises(UserError, match=message) as error:
        trace.write(tmp_path / "new", **given)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"no trace in|is half-written"):
        trace.read(tmp_path / "new")


def test_a_damaged_or_half_written_trace_is_one_line(tmp_path):
    stored = trace.write(tmp_path, **GIVEN)
    content = stored.path(1).read_bytes()
    stored.path(1).write_bytes(content[:-9])
    with pytest.raises(UserError, match=r"layer_01.parquet is damaged"):
        trace.read(tmp_path)
    stored.path(1).unlink()
    with pytest.raises(UserError, match=r"layer_01.parquet is missing"):
        trace.read(tmp_path)
    trace.write(
        tmp_path / "short",
        **{**GIVEN, "scores": SCORES[:, :5], "token_ids": IDS[:5], "sequence": ROWS[:5], "labels": {}},
    )
    stored.path(1).write_bytes((tmp_path / "short" / "layer_01.parquet").read_bytes())
    with pytest.raises(UserError, match=r"layer_01.parquet has 5 rows, trace.json says 40 tokens"):
        trace.read(tmp_path)
    (tmp_path / "trace.json").unlink()
    with pytest.raises(UserError, match=r"half-written"):
        trace.read(tmp_path)


def test_a_capture_that_was_killed_goes_on_where_it_stopped(tmp_path):
    """Parts joined are the trace that is written at once, and half a part is written anew."""
    whole = trace.write(tmp_path / "whole", **GIVEN)
    cuts = [slice(0, 15), slice(15, 35), slice(35, 40)]

    def part(here):
        labels = {"language": WORDS[here]}
        return {"scores": SCORES[:, here], "k": K, "token_ids": IDS[here], "sequence": ROWS[here], "labels": labels}

    out = tmp_path / "parts"
    trace.append(out, **part(cuts[0]))
    trace.append(out, **part(cuts[1]))
    (out / "parts" / "000001" / "trace.json").unlink()  # killed while it wrote the second
    with pytest.raises(UserError, match="half-written"):
        trace.read(out)
    for here in cuts[trace.parts_of(out) :]:
        trace.append(out, **part(here))
    stored = trace.finish(out)
    assert stored == whole._replace(folder=out) and not (out / "parts").exists()
    for layer in range(LAYERS):
        for name in ("expert", "scores"):
            np.testing.assert_array_equal(column(stored, layer, name), column(whole, layer, name))
    assert label_names(stored, "language") == ["de", "en"]
    np.testing.assert_array_equal(token_column(stored, "language"), token_column(whole, "language"))


def test_parts_are_joined_in_the_precision_that_one_of_them_needs(tmp_path):
    """float16 ends at 65,504: the second part is float32, so the whole is."""
    large = SCORES[:, 20:] * np.float32(1e5)
    trace.append(tmp_path, scores=SCORES[:, :20], k=1)
    trace.append(tmp_path, scores=large, k=1)
    stored = trace.finish(tmp_path)
    whole = column(stored, 2, "scores")
    assert whole.dtype == np.float32
    np.testing.assert_array_equal(whole[:20], SCORES[2, :20].astype(np.float16))
    np.testing.assert_array_equal(whole[20:], large[2])
    np.testing.assert_array_equal(column(stored, 2, "expert")[:, 0], SCORES[2].argmax(1))


def test_parts_of_different_models_are_refused(tmp_path):
    trace.append(tmp_path, experts=np.zeros((1, 4, 1), int), num_experts=4)
    trace.append(tmp_path, experts=np.zeros((1, 4, 1), int), num_experts=5)
    with pytest.raises(UserError, match="is of another model or setting than the first"):
        trace.finish(tmp_path)
    with pytest.raises(UserError, match="nothing was captured"):
        trace.finish(tmp_path / "empty")


def test_experts_of_a_token_go_with_named_routers():
    with pytest.raises(UserError, match="--k=2 goes with --routers"):
        hooks.routers_of(None, "", 2)


def test_a_page_that_cannot_be_written_names_its_option(tmp_path, monkeypatch):
    trace.write(tmp_path / "t", **GIVEN)
    (tmp_path / "file").write_text("")
    command.flags.FLAGS(["trace", f"--out={tmp_path / 'file' / 'page.html'}"])
    monkeypatch.setattr(command.commands, "start", lambda main, parse: main(["trace", "report", str(tmp_path / "t")]))
    try:
        with pytest.raises(UserError, match=r"cannot use .* a folder is needed\): choose another --out"):
            contextvars.copy_context().run(command.run)
    finally:
        command.flags.FLAGS.unparse_flags()


@pytest.mark.parametrize("word", ["capture", "surgery"])
def test_one_process_a_folder(tmp_path, word):
    """Before a model is looked for: the other process may have hours of it behind it."""
    command.flags.FLAGS(["trace", "--model=none", "--text=none", f"--out={tmp_path}"])
    try:
        with files.locked(tmp_path), pytest.raises(UserError, match=r"out .* is in use by process .* another --out"):
            command.main(["trace", word])
    finally:
        command.flags.FLAGS.unparse_flags()
