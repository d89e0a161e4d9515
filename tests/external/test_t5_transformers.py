"""Our T5 against that of `transformers` in PyTorch: same weights in, same logits and loss gradients out.

`python -m tests.external.test_t5_transformers` prints the numbers that tests/test_t5.py holds.
"""

import numpy as np
import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Attention

from routed.models.attention import relative_buckets
from tests.test_t5 import PINNED, VARIANTS, made, pinned_case, shown


def theirs(config, params):
    """The model of transformers with our weights."""
    t = config.transformer
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=config.data.vocabulary, d_model=t.dim, d_kv=t.head_dim, d_ff=t.width, num_layers=t.layers,
            num_decoder_layers=t.layers, num_heads=t.heads, relative_attention_num_buckets=t.buckets,
            relative_attention_max_distance=t.max_distance, dropout_rate=0.0, pad_token_id=0, decoder_start_token_id=0,
            feed_forward_proj="gated-gelu" if t.ffn == "gated_ffn" else "relu", tie_word_embeddings=t.tied,
            use_cache=False,
        )
    ).eval()  # fmt: skip
    if not t.tied:  # releases differ in whether the setting unties the weights, or only the scale of the logits
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    tensors = dict(model.named_parameters())

    def put(name, value):
        assert tensors[name].shape == value.shape, name
        tensors.pop(name).data = torch.tensor(np.asarray(value))

    own = params["experts"]
    put("shared.weight", own["embedding"])
    if not t.tied:
        put("lm_head.weight", own["head"]["kernel"].T)
    for stack in ("encoder", "decoder"):
        put(f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", own[stack]["bias"]["table"])
        put(f"{stack}.final_layer_norm.weight", own[stack]["norm"]["scale"])
        layers = own[stack]["blocks"]["layer_0"]
        parts = [("self", "SelfAttention"), ("feed", "DenseReluDense")]
        if stack == "decoder":
            parts.insert(1, ("cross", "EncDecAttention"))
        for i in range(t.layers):
            for j, (part, name) in enumerate(parts):
                at = f"{stack}.block.{i}.layer.{j}"
                put(f"{at}.layer_norm.weight", layers[f"{part}_norm"]["scale"][i])
                if part == "feed":
                    names = (
                        {"in": "wi_1", "gate": "wi_0", "out": "wo"}
                        if t.ffn == "gated_ffn"
                        else {"in": "wi", "out": "wo"}
                    )
                else:
                    names = {"query": "q", "key": "k", "value": "v", "out": "o"}
                ours = layers["ffn" if part == "feed" else part]
                for mine, other in names.items():
                    put(f"{at}.{name}.{other}.weight", ours[mine]["kernel"][i].T)
    assert not tensors
    return model


def logits_of(variant):
    config, batch = pinned_case(variant)
    model = theirs(config, made(config, batch))
    inputs, targets = (torch.tensor(np.asarray(a)).long() for a in (batch.inputs, batch.targets))
    return model(input_ids=inputs, labels=targets).logits.detach().numpy()


@pytest.mark.parametrize("variant", VARIANTS)
def test_same_logits(variant):
    found = shown(variant)
    np.testing.assert_allclose(found, logits_of(variant), atol=1e-5)
    np.testing.assert_allclose(logits_of(variant)[0, :, :3], PINNED[variant], atol=1e-5)


@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (16, 64), (8, 20), (32, 100)])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_same_buckets(buckets, furthest, bidirectional):
    distance = torch.arange(300)[None, :] - torch.arange(300)[:, None]
    expected = T5Attention._relative_position_bucket(distance, bidirectional, buckets, furthest)
    ours = relative_buckets(-distance.numpy(), buckets=buckets, max_distance=furthest, bidirectional=bidirectional)
    np.testing.assert_array_equal(ours, expected)


if __name__ == "__main__":
    for variant in VARIANTS:
        print(f"{variant!r}: {np.round(logits_of(variant)[0, :, :3], 6).tolist()},")
