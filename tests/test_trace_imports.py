"""Files of other programs, written here as their sources lay them out, are read as the trace that they hold."""

import base64
import io
import json
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routed import trace
from routed.contracts import UserError
from routed.trace import __main__ as command
from routed.trace.format import label_names, stripes, token_column

RNG = np.random.default_rng(0)
LAYERS, EXPERTS, K = 3, 16, 2
#: Tokens of the prompts and of the answers of two requests.
LENGTHS = ((4, 3), (2, 5))


def draw(tokens):
    """Experts [tokens, layers, k] and token ids [tokens + 1]: the last token of an answer is not routed."""
    experts = RNG.permuted(np.tile(np.arange(EXPERTS), (tokens, LAYERS, 1)), axis=2)[..., :K].astype(np.int16)
    return experts, RNG.integers(0, 50, tokens + 1)


def as_npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return base64.b64encode(stream.getvalue()).decode()


def as_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def column(stored, layer, name):
    return np.concatenate([arrays[0] for arrays in stripes(stored, layer, name)])


def check(stored, requests, with_ids=True):
    """A trace has the routed tokens of all requests, in order."""
    experts = np.concatenate([experts for experts, _ in requests])
    assert (stored.tokens, stored.experts, stored.k) == (len(experts), EXPERTS, K)
    for layer in range(LAYERS):
        np.testing.assert_array_equal(column(stored, layer, "expert"), experts[:, layer])
    lengths = [len(rows) for rows, _ in requests]
    np.testing.assert_array_equal(token_column(stored, "sequence"), np.repeat(np.arange(len(lengths)), lengths))
    np.testing.assert_array_equal(token_column(stored, "position"), np.concatenate([*map(np.arange, lengths)]))
    assert stored.has_ids == with_ids
    if with_ids:
        ids = np.concatenate([ids[:-1] for _, ids in requests])
        np.testing.assert_array_equal(token_column(stored, "token"), ids)


REQUESTS = [draw(prompt + answer - 1) for prompt, answer in LENGTHS]


@pytest.mark.parametrize("layout", ["base64", "lists", "apart"])
def test_answers_of_vllm(tmp_path, layout):
    """Base64 of .npy with the prompt's rows, the same as lists, and version 0.21: the prompt's rows apart."""
    rows = []
    for (experts, ids), (prompt, _) in zip(REQUESTS, LENGTHS, strict=True):
        apart = layout == "apart"
        rows_of_choice = experts[prompt:] if apart else experts
        encoded = as_npy(rows_of_choice) if layout == "base64" else rows_of_choice.tolist()
        choice = {"index": 0, "text": "", "token_ids": ids[prompt:].tolist(), "routed_experts": encoded}
        about = {"prompt_token_ids": ids[:prompt].tolist(), "choices": [choice]}
        rows.append(about | ({"prompt_routed_experts": experts[:prompt].tolist()} if apart else {}))
    file = as_lines(tmp_path / "answers.jsonl", rows)
    check(trace.write(tmp_path / "trace", **trace.read_vllm(file, EXPERTS)), REQUESTS)


def test_several_answers_to_one_prompt_have_its_tokens_once(tmp_path):
    """Two answers of 3 tokens to a prompt of 4 tokens: 6 rows, then 2 rows whose positions begin at 4."""
    (first, ids), (second, other_ids) = draw(6), draw(6)
    second[:4], other_ids[:4] = first[:4], ids[:4]
    choices = [
        {"token_ids": token_ids[4:].tolist(), "routed_experts": as_npy(experts)}
        for experts, token_ids in ((first, ids), (second, other_ids))
    ]
    file = as_lines(tmp_path / "answers.jsonl", [{"prompt_token_ids": ids[:4].tolist(), "choices": choices}])
    stored = trace.write(tmp_path / "trace", **trace.read_vllm(file, EXPERTS))
    np.testing.assert_array_equal(token_column(stored, "position"), [0, 1, 2, 3, 4, 5, 4, 5])
    np.testing.assert_array_equal(token_column(stored, "sequence"), [0] * 6 + [1] * 2)
    np.testing.assert_array_equal(token_column(stored, "token"), [*ids[:6], *other_ids[4:6]])
    np.testing.assert_array_equal(column(stored, 1, "expert"), np.concatenate([first[:, 1], second[4:, 1]]))


def test_dense_layers_of_a_model_of_one_expert_a_token_are_left_out(tmp_path):
    """Llama 4 Maverick: k = 1 and every second layer dense, whose rows engines write as 0."""
    experts = np.array([[[0], [3]], [[0], [0]]])
    file = as_lines(tmp_path / "answers.jsonl", [{"choices": [{"routed_experts": experts.tolist()}]}])
    given = trace.read_vllm(file, EXPERTS)
    assert given["layers"] == ["1"] and given["experts"][0].tolist() == [[3], [0]]
    file = as_lines(tmp_path / "zeros.jsonl", [{"choices": [{"routed_experts": (0 * experts).tolist()}]}])
    with pytest.raises(UserError, match="has expert 0 alone"):
        trace.read_vllm(file, EXPERTS)


def test_a_chat_without_ids_has_one_prompt(tmp_path):
    """Two answers of 3 tokens to a prompt of 4, which `usage` counts: 6 rows, then 2."""
    choices = [{"message": {}, "routed_experts": as_npy(draw(6)[0])} for _ in range(2)]
    file = as_lines(tmp_path / "answers.jsonl", [{"choices": choices, "usage": {"prompt_tokens": 4}}])
    np.testing.assert_array_equal(trace.read_vllm(file, EXPERTS)["sequence"], [0] * 6 + [1] * 2)


def test_choices_of_several_prompts_are_all_taken(tmp_path):
    """Prompts of 2 and 3 tokens in one request; `usage` counts the tokens of both."""
    answers = [draw(4), draw(6)]
    choices = [
        {"prompt_token_ids": ids[:n].tolist(), "token_ids": ids[n:].tolist(), "routed_experts": as_npy(experts)}
        for (experts, ids), n in zip(answers, (2, 3), strict=True)
    ]
    file = as_lines(tmp_path / "answers.jsonl", [{"choices": choices, "usage": {"prompt_tokens": 5}}])
    stored = trace.write(tmp_path / "trace", **trace.read_vllm(file, EXPERTS))
    check(stored, answers)


@pytest.mark.parametrize("layout", ["ids", "logprobs", "chat"])
def test_answers_of_sglang(tmp_path, layout):
    """Base64 of flat int32 without a shape; layer 1 is dense, so its rows are 0 and it is left out."""
    rows = []
    for (experts, ids), (prompt, answer) in zip(REQUESTS, LENGTHS, strict=True):
        with_dense = np.insert(experts, 1, 0, axis=1)
        encoded = base64.b64encode(with_dense.astype(np.int32).tobytes()).decode()
        counts = {"prompt_tokens": prompt, "completion_tokens": answer}
        about = counts | {"routed_experts": encoded}
        if layout == "ids":
            parts = {"input_ids": ids[:prompt].tolist(), "output_ids": ids[prompt:].tolist()}
            rows.append({"text": "", "meta_info": about} | parts)
        elif layout == "logprobs":
            pairs = {"input": ids[:prompt], "output": ids[prompt:]}
            logprobs = {f"{name}_token_logprobs": [[-1.0, int(i), None] for i in some] for name, some in pairs.items()}
            rows.append({"text": "", "meta_info": about | logprobs})
        else:
            rows.append({"usage": counts, "choices": [{"sglext": {"routed_experts": encoded}}]})
    file = as_lines(tmp_path / "answers.jsonl", rows)
    stored = trace.write(tmp_path / "trace", **trace.read_sglang(file, EXPERTS, K))
    check(stored, REQUESTS, with_ids=layout != "chat")
    assert stored.layers == ("0", "2", "3")


def test_lines_of_olmoe(tmp_path):
    """`exp_ids` are [tokens, k, layers]; every token is routed."""
    rows = [
        {"input_ids": ids[:-1].tolist(), "predicted_token_ids": [], "exp_ids": experts.swapaxes(1, 2).tolist()}
        for experts, ids in REQUESTS
    ]
    file = as_lines(tmp_path / "c4_results.jsonl", rows)
    check(trace.write(tmp_path / "trace", **trace.read_olmoe(file, EXPERTS)), REQUESTS)


@pytest.mark.parametrize("with_scores", [True, False])
def test_a_folder_of_megatron(tmp_path, with_scores):
    """Two ranks of two steps; rank 2 repeats rank 1; a layer of the block mtp is left out; scores are bfloat16."""
    scores = RNG.integers(-100, 100, (2, 2, LAYERS, 5, EXPERTS)).astype(np.float32)  # exact in bfloat16
    experts = np.sort(np.argsort(-scores, axis=-1, kind="stable")[..., :K], axis=-1)
    for rank in (0, 1, 2):
        source, offset, lines, binary = min(rank, 1), 0, [], b""
        for step in range(2):
            for layer in range(LAYERS):
                bits = (scores[source, step, layer].view(np.uint32) >> 16).astype("<u2").tobytes()
                row = {"step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer + 1, "rank": rank}
                row |= {"num_tokens": 5, "topk": K, "top_indices": experts[source, step, layer].tolist()}
                if with_scores:
                    row |= {"logit_offset": offset, "logit_bytes": len(bits), "logit_shape": [5, EXPERTS]}
                lines.append(row)
                binary, offset = binary + bits, offset + len(bits)
            lines.append(lines[-1] | {"block": "mtp", "mtp_idx": 0, "layer": 1})
        as_lines(tmp_path / f"router_trace_rank{rank}.jsonl", lines)
        (tmp_path / f"logits_rank{rank}.bin").write_bytes(binary)
    stored = trace.write(tmp_path / "trace", **trace.read_megatron(tmp_path, None if with_scores else EXPERTS))
    assert (stored.layers, stored.tokens, stored.has_sequences) == (("1", "2", "3"), 20, False)
    for layer in range(LAYERS):
        np.testing.assert_array_equal(column(stored, layer, "expert"), experts[:, :, layer].reshape(20, K))
        if with_scores:
            np.testing.assert_array_equal(column(stored, layer, "scores"), scores[:, :, layer].reshape(20, EXPERTS))


def as_safetensors(path, tensors):
    """8 bytes with the length of the header, the header of JSON, the numbers."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (kind, array) in tensors.items():
        content = array.tobytes()
        ends = [len(data), len(data) + len(content)]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": ends}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_router_logits_in_safetensors(tmp_path):
    """Layers by the number in their names (2 before 10); bfloat16; a batch of two rows, the first padded at its left.

    The tokens are (0, 1), (0, 2), (1, 0), (1, 1), (1, 2) of [batch, positions].
    """
    scores = RNG.integers(-100, 100, (2, 6, EXPERTS)).astype(np.float32)
    bits = (scores.view(np.uint32) >> 16).astype("<u2")
    ids, mask = np.arange(6).reshape(2, 3), np.array([[0, 1, 1], [1, 1, 1]])
    tensors = {"router_logits.10": ("BF16", bits[1]), "router_logits.2": ("F32", scores[0])}
    tensors |= {"input_ids": ("I64", ids), "attention_mask": ("I64", mask)}
    file = as_safetensors(tmp_path / "router.safetensors", tensors)
    stored = trace.write(tmp_path / "trace", **trace.read_hf(file, K))
    assert stored.layers == ("router_logits.2", "router_logits.10")
    for layer in range(2):
        np.testing.assert_array_equal(column(stored, layer, "scores"), scores[layer, 1:])
    np.testing.assert_array_equal(token_column(stored, "token"), [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(token_column(stored, "sequence"), [0, 0, 1, 1, 1])
    np.testing.assert_array_equal(token_column(stored, "position"), [0, 1, 0, 1, 2])


def test_router_logits_that_are_probabilities_are_refused(tmp_path):
    shares = np.full((4, 8), 1 / 8, np.float32)
    file = as_safetensors(tmp_path / "router.safetensors", {"0": ("F32", shares)})
    with pytest.raises(UserError, match="rows of layer 0 sum to 1: give logits"):
        trace.read_hf(file, K)


def test_files_of_torch_name_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UserError, match=r"pip install -e '.\[torch\]', or save it as safetensors"):
        trace.read_hf(tmp_path / "router.pt", K)


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_import_of_an_export_is_the_identity(data, tmp_path_factory):
    """Whatever a trace holds: the description and every column are the same."""
    folder = tmp_path_factory.mktemp("identity")
    layers, tokens, k = (data.draw(st.integers(1, high)) for high in (3, 12, 4))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    shape = (layers, tokens, k)
    experts = random.permuted(np.tile(np.arange(8), (layers, tokens, 1)), axis=2)[..., :k]
    experts[random.random(shape) < 0.2] = -1
    optional = {
        "weights": random.random(shape, np.float32),
        "kept": random.random(shape) < 0.5,
        "scores": random.normal(size=(layers, tokens, 8)).astype(np.float16),
        "token_ids": random.integers(0, 9, tokens),
        "sequence": np.sort(random.integers(0, 3, tokens)),
        "position": random.integers(0, 9, tokens),
        "labels": {"language": random.choice(["de", "ünï"], tokens)},
        "step": 7,
    }
    given = {name: optional[name] for name in data.draw(st.sets(st.sampled_from(sorted(optional))))}
    before = trace.write(folder / "a", experts=experts, num_experts=8, model="m", **given)
    trace.export(before, folder / "a.npz")
    after = trace.write(folder / "b", **trace.read_npz(folder / "a.npz"))
    assert after == before._replace(folder=after.folder)
    for layer in range(layers):
        for name in before.columns:
            np.testing.assert_array_equal(column(after, layer, name), column(before, layer, name))
    for name in ("sequence", "position", *(["token"] if before.has_ids else []), *before.labels):
        np.testing.assert_array_equal(token_column(after, name), token_column(before, name))
    for label in before.labels:
        assert label_names(after, label) == label_names(before, label)


ROW = {"input_ids": [1, 2], "exp_ids": [[[0], [1]], [[2], [3]]]}


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("olmoe", [ROW | {"exp_ids": [[[0], [1]]]}], "line 1: 2 input_ids, 1 exp_ids"),
        ("olmoe", [ROW | {"exp_ids": [[0, 1], [2]]}], "rows of different lengths"),
        ("olmoe", [ROW | {"exp_ids": [[[0], [70000]]] * 2}], "expert 70000"),
        ("olmoe", [ROW, 3], "is no object of JSON"),
        ("olmoe", [{}], "input_ids and exp_ids are needed"),
        ("olmoe", [ROW, ROW | {"exp_ids": [[[0]], [[2]]]}], "one file is of one model"),
        ("vllm", [{"id": 1}], "neither choices nor outputs"),
        ("vllm", [{"choices": [{"routed_experts": None}]}], "start the engine with --enable-return-routed-experts"),
        ("vllm", [{"choices": [{"routed_experts": "AAAA"}]}], "no .npy file in base64"),
        ("vllm", [{"choices": []}], "has no token with experts: keep answers"),
        ("vllm", [{"choices": [{"prompt_token_ids": 7, "routed_experts": [[[1]]]}]}], "must be a list of integers"),
        ("vllm", [{"choices": [{"routed_experts": [[[1]]]}] * 2}], "several choices and no ids of the prompt"),
        ("olmoe", [ROW | {"input_ids": 5}], "must be a list of integers"),
        ("vllm", [{"prompt_token_ids": [1], "choices": [{"token_ids": [2] * 5, "routed_experts": [[[0, 1]]]}]}],
         "1 rows of experts for 6 tokens"),
        ("sglang", [{"meta_info": {"prompt_tokens": 2, "completion_tokens": 1}}], "routed_experts"),
        ("sglang", [{"meta_info": {"prompt_tokens": 2, "completion_tokens": 2, "routed_experts": "AAAAAA=="}}],
         "1 experts are no whole layers of 3 tokens with k=2"),
    ],
)  # fmt: skip
def test_a_file_of_another_form_is_one_line(tmp_path, name, rows, message):
    file = as_lines(tmp_path / "file.jsonl", rows)
    given = {"k": K} if name == "sglang" else {}
    with pytest.raises(UserError, match=message) as error:
        trace.FORMATS[name](file, num_experts=EXPERTS, **given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", trace.FORMATS)
@pytest.mark.parametrize("content", [b"", b"\x00" * 30, b"[1", b"{" * 3000, b"\xff\xfe"])
def test_no_file_ends_in_a_traceback(tmp_path, name, content):
    """A file that is empty or of anything else, and one that is not there."""
    (tmp_path / "router_trace_rank0.jsonl").write_bytes(content)
    file = tmp_path / ("x.safetensors" if name == "hf" else "x.jsonl")
    file.write_bytes(content)
    needed = {"k": K} if name in ("sglang", "hf") else {}
    needed |= {} if name in ("hf", "npz") else {"num_experts": EXPERTS}
    for path in (tmp_path if name == "megatron" else file, tmp_path / "none.safetensors"):
        with pytest.raises(UserError):
            trace.FORMATS[name](path, **needed)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["import", "olmo", "x", "--out=y"], "did you mean 'olmoe'"),
        (["import", "olmoe", "x"], "--out is missing"),
        (["import", "olmoe", "x", "--out=y"], "--experts is missing: files of olmoe do not say it"),
        (["import", "npz", "x", "--out=y", "--k=2"], "--k=2: files of npz say it themselves"),
        (["import", "npz", "x", "--out=y", "--length=2"], "--length has no effect with import"),
        (["report", "x", "--k=7"], "--k has no effect with report"),
        (["export", "x", "--out=y", "--vocabulary=bytes"], "--vocabulary has no effect with export"),
        (["export", "x"], "usage: routed trace report"),
    ],
)
def test_commands_that_cannot_be_meant_are_refused(words, message):
    rest = command.flags.FLAGS(["trace", *words], known_only=True)
    try:
        with pytest.raises(UserError, match=message):
            command.main(rest)
    finally:
        command.flags.FLAGS.unparse_flags()


def test_import_and_export_by_the_command(tmp_path):
    file = as_lines(tmp_path / "c4.jsonl", [ROW])
    for words in (["import", "olmoe", str(file), f"--out={tmp_path}/t", "--experts=4", "--model=m"],
                  ["export", f"{tmp_path}/t", f"--out={tmp_path}/t.npz"],
                  ["import", "npz", f"{tmp_path}/t.npz", f"--out={tmp_path}/u"]):  # fmt: skip
        try:
            command.main(command.flags.FLAGS(["trace", *words]))
        finally:
            command.flags.FLAGS.unparse_flags()
    stored = trace.read(tmp_path / "u")
    assert (stored.model, stored.experts, stored.tokens, stored.has_ids) == ("m", 4, 2, True)
