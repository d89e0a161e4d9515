"""Router logits that torch and safetensors saved: read as the model returned them."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from routed import trace
from routed.contracts import UserError
from routed.trace.format import stripes, token_column

EXPERTS, K = 8, 2


def logits(seed, kind=torch.bfloat16):
    return torch.randn((6, EXPERTS), generator=torch.Generator().manual_seed(seed)).to(kind)


def check(stored, layers, kept):
    assert stored.k == K and stored.experts == EXPERTS
    for layer, scores in enumerate(layers):
        read = np.concatenate([arrays[0] for arrays in stripes(stored, layer, "scores")])
        np.testing.assert_allclose(read, scores.float().numpy()[kept], rtol=1e-3)


def test_a_tuple_of_torch_with_a_dense_layer_and_padding(tmp_path):
    """Layer 0 is dense (None); position 0 of row 0 is padding."""
    layers = (None, logits(1), logits(2))
    beside = {"input_ids": torch.arange(6).reshape(2, 3), "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}
    torch.save({"router_logits": layers} | beside, tmp_path / "r.pt")
    stored = trace.write(tmp_path / "t", **trace.read_hf(tmp_path / "r.pt", K))
    assert stored.layers == ("1", "2")
    check(stored, layers[1:], slice(1, None))
    np.testing.assert_array_equal(token_column(stored, "token"), [1, 2, 3, 4, 5])
    torch.save(layers, tmp_path / "plain.pt")
    alone = trace.write(tmp_path / "u", **trace.read_hf(tmp_path / "plain.pt", K))
    check(alone, layers[1:], slice(None))
    assert not alone.has_ids and not alone.has_sequences


def test_safetensors_of_the_library_are_the_same(tmp_path):
    layers = [logits(1), logits(2, torch.float32)]
    save_file({f"layer_{i}": scores for i, scores in enumerate(layers)}, tmp_path / "r.safetensors")
    check(trace.write(tmp_path / "t", **trace.read_hf(tmp_path / "r.safetensors", K)), layers, slice(None))


def test_a_file_that_runs_code_is_refused(tmp_path):
    torch.save({"router_logits": np.vectorize(abs)}, tmp_path / "r.pt")
    with pytest.raises(UserError, match="cannot be read as tensors"):
        trace.read_hf(tmp_path / "r.pt", K)
