"""Traces of the real classes of transformers, with random weights of small configs: they hold what was computed.

Needs torch==2.13.0 and transformers 5.
"""

import numpy as np
import pytest
import torch
import transformers as hf

from routed import trace
from routed.contracts import UserError
from routed.trace import hooks
from routed.trace.capture import capture
from routed.trace.format import stripes, token_column
from routed.trace.model_inputs import BYTES, rows_of

SMALL = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
DEEPSEEK = SMALL | {
    "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 0, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4, "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SMALL, num_local_experts=8, num_experts_per_tok=2)),
    "olmoe": lambda: hf.OlmoeForCausalLM(hf.OlmoeConfig(**SMALL, num_experts=8, num_experts_per_tok=4)),
    "qwen2": lambda: hf.Qwen2MoeForCausalLM(
        hf.Qwen2MoeConfig(**SMALL, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16,
                          shared_expert_intermediate_size=16)
    ),
    "qwen3": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**SMALL, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8)
    ),
    "deepseek_v2": lambda: hf.DeepseekV2ForCausalLM(
        hf.DeepseekV2Config(**DEEPSEEK, topk_method="group_limited_greedy", routed_scaling_factor=2.0)
    ),
    "deepseek_v3": lambda: hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**DEEPSEEK)),
    "gpt_oss": lambda: hf.GptOssForCausalLM(hf.GptOssConfig(**SMALL, head_dim=8, num_local_experts=8,
        num_experts_per_tok=2)),
    "llama4": lambda: hf.Llama4ForCausalLM(
        hf.Llama4TextConfig(
            **SMALL, head_dim=8, num_local_experts=8, num_experts_per_tok=1, interleave_moe_layer_step=1,
            intermediate_size_mlp=24, attention_chunk_size=64, pad_token_id=0,
        )
    ),
    "switch": lambda: hf.SwitchTransformersForConditionalGeneration(
        hf.SwitchTransformersConfig(
            vocab_size=300, d_model=32, d_kv=8, d_ff=24, num_heads=4, num_layers=2, num_decoder_layers=2, num_experts=8,
            expert_capacity=3, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, decoder_start_token_id=0,
        )
    ),
    "nllb": lambda: hf.NllbMoeForConditionalGeneration(
        hf.NllbMoeConfig(
            vocab_size=300, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=24, decoder_ffn_dim=24,
            encoder_attention_heads=4, decoder_attention_heads=4, num_experts=8, encoder_sparse_step=2,
            decoder_sparse_step=2, expert_capacity=6, moe_eval_capacity_token_fraction=0.1, max_position_embeddings=64,
        )
    ),
}  # fmt: skip
ROWS = [*np.random.default_rng(0).integers(3, 290, (12, 16))]


def model_of(name):
    torch.manual_seed(0)
    model = MODELS[name]().float().eval()
    with torch.no_grad():  # routers may begin at 0
        for part, _ in hooks.routers_of(model).values():
            for parameter in part.parameters():
                parameter.normal_(std=0.5)
    return model


def column(stored, layer, name):
    return np.concatenate([arrays[0] for arrays in stripes(stored, layer, name)])


@pytest.mark.parametrize("name", MODELS)
def test_a_trace_holds_what_the_model_computed(name, tmp_path):
    model = model_of(name)
    traces = capture(model, ROWS, tmp_path, batch_size=4, name=name)
    assert len(traces) == 1 + model.config.is_encoder_decoder
    outputs = {}
    routers = hooks.routers_of(model)
    handles = [
        module.register_forward_hook(
            lambda module, given, output, part=part: outputs.setdefault(part, []).append((given[0], output))
        )
        for part, (module, _) in routers.items()
    ]
    with torch.no_grad():
        for first in range(0, len(ROWS), 4):
            ids = torch.tensor(np.stack(ROWS[first : first + 4]))
            model(input_ids=ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}))
    for handle in handles:
        handle.remove()
    for stored in traces:
        assert stored.tokens == 192 and np.array_equal(token_column(stored, "token"), np.concatenate(ROWS))
        for layer, part in enumerate(stored.layers):
            module = routers[part][0]
            weight = getattr(module, "classifier", module).weight
            bias = getattr(getattr(module, "classifier", module), "bias", None)
            features = torch.cat([given.reshape(-1, given.shape[-1]) for given, _ in outputs[part]])
            scores = torch.nn.functional.linear(features, weight, bias).detach().numpy()
            np.testing.assert_allclose(column(stored, layer, "scores"), scores, rtol=2e-3, atol=2e-3)
            experts, weights = column(stored, layer, "expert"), column(stored, layer, "weight")
            dense = np.zeros_like(scores)
            kept = column(stored, layer, "kept") if "kept" in stored.columns else np.ones_like(experts, bool)
            np.put_along_axis(dense, experts.astype(int), np.where(kept, weights, 0), 1)
            np.testing.assert_allclose(dense, combined(name, outputs[part], scores), atol=1e-5)
            assert name == "nllb" or (np.diff(weights, axis=1) <= 1e-6).all()
            if name == "switch":
                assert 0 < (~kept).mean() < 1


def combined(name, outputs, scores):
    """The weight of every expert [T, E] that the experts of the model are given, from the router's own output."""
    outputs = [output for _, output in outputs]
    if name == "llama4":
        return torch.cat([weights for weights, _ in outputs]).numpy()
    if name == "nllb":
        return torch.cat([weights for _, weights, _ in outputs]).numpy()
    if name == "switch":
        return torch.cat([(mask * weight).reshape(-1, scores.shape[1]) for mask, weight, _ in outputs]).numpy()
    dense = np.zeros_like(scores)
    indices, weights = (torch.cat([output[i] for output in outputs]).numpy() for i in (2, 1))
    np.put_along_axis(dense, indices, weights, 1)
    return dense


def test_a_killed_capture_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("routed.trace.capture.PART", 64)  # a batch a part
    model = model_of("olmoe")
    (whole,) = capture(model, ROWS, tmp_path / "whole", batch_size=4)
    calls, run = [], model.forward

    def dies(*given, **named):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return run(*given, **named)

    monkeypatch.setattr(model, "forward", dies)
    with pytest.raises(KeyboardInterrupt):
        capture(model, ROWS, tmp_path / "killed", batch_size=4)
    assert trace.parts_of(tmp_path / "killed") == 2
    with pytest.raises(UserError, match="holds a capture with"):
        capture(model, ROWS[:-1], tmp_path / "killed", batch_size=4)
    (stored,) = capture(model, ROWS, tmp_path / "killed", batch_size=4)
    assert len(calls) == 4  # one batch was left
    for layer in range(2):
        np.testing.assert_array_equal(column(stored, layer, "expert"), column(whole, layer, "expert"))
    assert capture(model, ROWS, tmp_path / "killed", batch_size=4) == [stored] and len(calls) == 4


def test_a_capture_of_another_k_or_other_weights_is_another(tmp_path):
    model, named = model_of("olmoe"), {"routers": r"model\.layers\.[0-9]+\.mlp\.gate", "k": 2}
    (stored,) = capture(model, ROWS, tmp_path, name="m", **named)
    assert capture(model, ROWS, tmp_path, name="m", **named) == [stored]
    with pytest.raises(UserError, match="holds a capture with k=2, now 4"):
        capture(model, ROWS, tmp_path, name="m", **named | {"k": 4})
    # A later checkpoint of the same name, whose routers learned, or all but these.
    for changed in (model.get_submodule(stored.layers[1]).weight, model.get_input_embeddings().weight):
        with torch.no_grad():
            changed[0, 0] += 1
        with pytest.raises(UserError, match="holds a capture with weights="):
            capture(model, ROWS, tmp_path, name="m", **named)
        with torch.no_grad():
            changed[0, 0] -= 1


class Unknown(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.ModuleDict({"gate": torch.nn.Linear(4, 6)}) for _ in range(2)])


def test_an_unknown_architecture_says_how_to_name_its_routers():
    with pytest.raises(
        UserError, match=r"Unknown has no router that is known .*--routers=REGEX --k=K; perhaps layers\.\[0-9\]\+\.gate"
    ):
        hooks.routers_of(Unknown())
    with pytest.raises(UserError, match="no module of Unknown is named nothing"):
        hooks.routers_of(Unknown(), "nothing", 2)
    for refused in (
        lambda: hooks.routers_of(Unknown(), "layers.[0-9]+.gate", 7),
        lambda: hooks.plain(7)(None, torch.ones(1, 6)),
    ):
        with pytest.raises(UserError, match="--k=7: a token has at most all experts of its router, 6"):
            refused()
    with pytest.raises(UserError, match="needs --k"):
        hooks.routers_of(Unknown(), "layers.[0-9]+.gate")
    model = Unknown()
    stored = hooks.routers_of(model, r"layers\.[0-9]+\.gate", 2)
    assert [*stored] == ["layers.0.gate", "layers.1.gate"]
    x = torch.randn(5, 4)
    with hooks.listening(stored) as outputs:
        scores = model.layers[0]["gate"](x)
    expected = scores.softmax(-1).topk(2)
    assert torch.equal(outputs["layers.0.gate"].experts, expected.indices) and torch.equal(
        outputs["layers.0.gate"].weights, expected.values
    )


def test_text_is_cut_into_rows_by_file(tmp_path):
    (tmp_path / "de.txt").write_text("abcdefgh")
    (tmp_path / "en.txt").write_text("xyz")
    de, en, fr = (str(tmp_path / f"{name}.txt") for name in ("de", "en", "fr"))
    rows, names = rows_of([de, en], BYTES, 3)
    assert [row.tolist() for row in rows] == [[97, 98, 99], [100, 101, 102], [120, 121, 122]] and names == [
        "de",
        "de",
        "en",
    ]
    with pytest.raises(UserError, match=r"en.txt has 3 tokens, less than one row"):
        rows_of([en], BYTES, 4)
    with pytest.raises(UserError, match=r"--text=.*fr.txt: No such file"):
        rows_of([fr], BYTES, 4)


def test_the_command_captures_a_folder_of_a_model(tmp_path, monkeypatch):
    from routed.trace import __main__ as command

    model_of("olmoe").save_pretrained(tmp_path / "model")
    (tmp_path / "de.txt").write_text("Wer viel fragt, geht viel irr. " * 20)
    lines = []
    monkeypatch.setattr(command.files, "tell", lines.append)
    command.flags.FLAGS([
        "trace", f"--model={tmp_path / 'model'}", f"--text={tmp_path / 'de.txt'}", f"--out={tmp_path / 'out'}",
        "--tokens=bytes", "--length=16",
    ])  # fmt: skip
    command.main(["trace", "capture"])
    stored = trace.read(tmp_path / "out")
    assert lines[0].startswith("wrote ") and stored.tokens == 38 * 16 and stored.labels == ("file",)
    command.flags.FLAGS.unparse_flags()


def test_ids_of_another_tokenizer_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"the text has token id 999999, the model knows .*: use its own tokenizer"):
        capture(model_of("olmoe"), [np.array([1, 999999])], tmp_path)
