"""The layer's rules against transformers' own modules, with copied weights: outputs and gradients, and the pooled balance loss.

Needs torch==2.13.0 and transformers 5.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers as hf
from ml_collections import FrozenConfigDict
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from routed.layer.dispatch import dense
from routed.layer.model_losses import balance_pooled
from routed.layer.model_rules import scaled_inputs
from routed.layer.rule import Rule
from routed.layer.selection import select
from routed.metrics.load import load
from tests.external.test_trace_transformers import DEEPSEEK, SMALL

TOKENS, EXPERTS = 40, 8


def grouped(affinity, scaling):
    return FrozenConfigDict({"expert_groups": 4, "groups_kept": 2, "affinity": affinity, "scaling": scaling})


#: name -> (module, our rule)
CASES = {
    "mixtral": (
        lambda: MixtralSparseMoeBlock(hf.MixtralConfig(**SMALL, num_local_experts=EXPERTS, num_experts_per_tok=2)),
        Rule(k=2, renormalise=True),
    ),
    "olmoe": (lambda: OlmoeSparseMoeBlock(hf.OlmoeConfig(**SMALL, num_experts=EXPERTS, num_experts_per_tok=4)), Rule(k=4)),
    "qwen3": (
        lambda: Qwen3MoeSparseMoeBlock(
            hf.Qwen3MoeConfig(**SMALL, num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True)
        ),
        Rule(k=2, renormalise=True),
    ),
    "deepseek_v2": (
        lambda: DeepseekV2Moe(hf.DeepseekV2Config(**DEEPSEEK, topk_method="group_limited_greedy", routed_scaling_factor=2.0)),
        Rule("group_limited", k=3, own=grouped("softmax", 2.0)),
    ),
    "deepseek_v3": (
        lambda: DeepseekV3MoE(hf.DeepseekV3Config(**DEEPSEEK, routed_scaling_factor=2.5)),
        Rule("group_limited", k=3, renormalise=True, own=grouped("sigmoid", 2.5)),
    ),
    "gpt_oss": (
        lambda: GptOssMLP(hf.GptOssConfig(**SMALL, head_dim=8, num_local_experts=EXPERTS, num_experts_per_tok=2)),
        Rule(k=2, renormalise=True),
    ),
    "llama4": (
        lambda: Llama4TextMoe(hf.Llama4TextConfig(**SMALL, num_local_experts=EXPERTS, num_experts_per_tok=1)),
        Rule("sigmoid", k=1),
    ),
}  # fmt: skip


def made(name):
    torch.manual_seed(0)
    module = CASES[name][0]().float().eval()
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.normal_(std=0.3)
    return module


def array(tensor):
    return jnp.asarray(tensor.detach().numpy())


def expert_of(name):
    """One expert as a function of its copied parameters and tokens."""

    def gated(params, x):
        gate, up = jnp.split(x @ params["gate_up"], 2, -1)
        return (jax.nn.silu(gate) * up) @ params["down"]

    def gpt_oss(params, x):
        both = x @ params["gate_up"] + params["gate_up_bias"][None]
        gate, up = jnp.minimum(both[..., ::2], 7.0), jnp.clip(both[..., 1::2], -7.0, 7.0)
        return ((up + 1) * gate * jax.nn.sigmoid(1.702 * gate)) @ params["down"] + params["down_bias"][None]

    return gpt_oss if name == "gpt_oss" else gated


def copied(name, module):
    """Parameters of our experts [E, in, out], and those of the shared one or None."""
    experts = module.experts
    gate_up, down = array(experts.gate_up_proj), array(experts.down_proj)
    if name not in ("gpt_oss", "llama4"):
        gate_up, down = gate_up.swapaxes(1, 2), down.swapaxes(1, 2)
    params = {"gate_up": gate_up, "down": down}
    if name == "gpt_oss":
        params |= {"gate_up_bias": array(experts.gate_up_proj_bias), "down_bias": array(experts.down_proj_bias)}
    shared = getattr(module, "shared_experts", getattr(module, "shared_expert", None))
    if shared is not None:
        both = jnp.concatenate([array(shared.gate_proj.weight), array(shared.up_proj.weight)])
        shared = {"gate_up": both.T, "down": array(shared.down_proj.weight).T}
    return params, shared


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_transformers(name):
    module, rule, expert = made(name), CASES[name][1], expert_of(name)
    router = getattr(module, "gate", getattr(module, "router", None))
    params, shared = copied(name, module)
    offset = getattr(router, "bias", None) if name == "gpt_oss" else None
    bias = getattr(router, "e_score_correction_bias", None)
    x = torch.randn(1, TOKENS, SMALL["hidden_size"], requires_grad=True)
    pull = torch.randn(TOKENS, SMALL["hidden_size"])

    def ours(x, kernel):
        scores = x @ kernel.T + (0 if offset is None else array(offset)[None])
        routing = select(rule, scores, bias=None if bias is None else array(bias))
        common = 0 if shared is None else expert(shared, x)
        if name == "llama4":
            x, routing = scaled_inputs(x, routing)
        return dense(expert, params, x, routing) + common

    theirs = module(x)
    theirs = (theirs[0] if isinstance(theirs, tuple) else theirs).reshape(TOKENS, -1)
    (theirs * pull).sum().backward()
    y, pulled = jax.vjp(ours, array(x)[0], array(router.weight))
    to_x, to_router = pulled(array(pull))
    scale = float(np.abs(array(theirs)).max())
    np.testing.assert_allclose(y / scale, array(theirs) / scale, atol=1e-5)
    for gradient, tensor in ((to_x, x.grad[0]), (to_router, router.weight.grad)):
        scale = float(np.abs(array(tensor)).max())
        np.testing.assert_allclose(gradient / scale, array(tensor) / scale, atol=1e-5)


def test_the_pooled_balance_loss_is_that_of_transformers():
    logits = [torch.randn(30, EXPERTS) * 2 for _ in range(3)]
    theirs = load_balancing_loss_func(tuple(logits), EXPERTS, 2)
    scores = jnp.stack([array(one) for one in logits])
    loads = jnp.stack([load(jax.lax.top_k(one, 2)[1], EXPERTS) for one in scores])
    assert 2 * float(balance_pooled(jax.nn.softmax(scores), loads)) == pytest.approx(float(theirs), rel=1e-5)
