"""The layer's rules against transformers' modules, with copied weights: outputs, drops, gradients, balance loss.

Needs torch==2.13.0 and transformers>=5.18.
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
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

from routed.layer.dispatch import dense
from routed.layer.model_losses import balance_pooled
from routed.layer.model_rules import scaled_inputs
from routed.layer.rule import SelectionRule
from routed.layer.selection import select
from routed.metrics.load import load
from tests.external.families import DEEPSEEK, SMALL

TOKENS, EXPERTS = 40, 8


def grouped(affinity, scaling):
    return FrozenConfigDict({"expert_groups": 4, "groups_kept": 2, "affinity": affinity, "scaling": scaling})


#: name -> (module, our rule)
CASES = {
    "mixtral": (
        lambda: MixtralSparseMoeBlock(hf.MixtralConfig(**SMALL, num_local_experts=EXPERTS, num_experts_per_tok=2)),
        SelectionRule(k=2, renormalise=True),
    ),
    "olmoe": (lambda: OlmoeSparseMoeBlock(hf.OlmoeConfig(**SMALL, num_experts=EXPERTS, num_experts_per_tok=4)),
              SelectionRule(k=4)),
    "qwen3": (
        lambda: Qwen3MoeSparseMoeBlock(
            hf.Qwen3MoeConfig(**SMALL, num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=16,
                              norm_topk_prob=True)
        ),
        SelectionRule(k=2, renormalise=True),
    ),
    "deepseek_v2": (
        lambda: DeepseekV2Moe(hf.DeepseekV2Config(**DEEPSEEK, topk_method="group_limited_greedy",
                                                  routed_scaling_factor=2.0)),
        SelectionRule("group_limited", k=3, settings=grouped("softmax", 2.0)),
    ),
    "deepseek_v3": (
        lambda: DeepseekV3MoE(hf.DeepseekV3Config(**DEEPSEEK, routed_scaling_factor=2.5)),
        SelectionRule("group_limited", k=3, renormalise=True, settings=grouped("sigmoid", 2.5)),
    ),
    "gpt_oss": (
        lambda: GptOssMLP(hf.GptOssConfig(**SMALL, head_dim=8, num_local_experts=EXPERTS, num_experts_per_tok=2)),
        SelectionRule(k=2, renormalise=True),
    ),
    "llama4": (
        lambda: Llama4TextMoe(hf.Llama4TextConfig(**SMALL, num_local_experts=EXPERTS, num_experts_per_tok=1)),
        SelectionRule("sigmoid", k=1),
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


def as_ours(layer, x, kernel, pull):
    """(outputs, kept [T, k], gradients to x and the router's kernel [E, D]) of ours, by tokens and scores."""
    y, pulled, routing = jax.vjp(lambda x, kernel: layer(x, x @ kernel.T), x, kernel, has_aux=True)
    return y, np.asarray(routing.kept).reshape(len(x), -1), *pulled(pull)


def close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        scale = float(np.abs(array(other)).max())
        np.testing.assert_allclose(one / scale, array(other) / scale, atol=1e-5)


def relu_experts(params, x):
    return jax.nn.relu(x @ params["up"]) @ params["down"]


def test_switch_with_its_drops():
    """A queue of 3 places for each sequence of 20: round(1.2 * 20 / 8)."""
    torch.manual_seed(1)
    config = hf.SwitchTransformersConfig(d_model=32, d_ff=24, num_experts=EXPERTS, expert_capacity=3, router_bias=False)
    module = SwitchTransformersSparseMLP(config).float().eval()
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.normal_(std=0.3)
    x = torch.randn(2, TOKENS // 2, 32, requires_grad=True)
    pull = torch.randn(TOKENS, 32)
    theirs = module(x).reshape(TOKENS, -1)
    (theirs * pull).sum().backward()
    mask = module.router(x)[0].reshape(TOKENS, EXPERTS).any(-1)
    each = [module.experts[f"expert_{i}"] for i in range(EXPERTS)]
    params = {
        "up": jnp.stack([array(one.wi.weight).T for one in each]),
        "down": jnp.stack([array(one.wo.weight).T for one in each]),
    }
    rule = SelectionRule(k=1, capacity_factor=1.2, capacity_rule="per_token", group_size=TOKENS // 2)

    def layer(x, scores):
        routing = select(rule, scores)
        return dense(relu_experts, params, x, routing), routing

    kernel = module.router.classifier.weight
    y, kept, to_x, to_router = as_ours(layer, array(x).reshape(TOKENS, -1), array(kernel), array(pull))
    np.testing.assert_array_equal(kept[:, 0], mask.numpy())
    assert 0.1 < (~kept).mean() < 0.6
    close((y, to_x, to_router), (theirs, x.grad.reshape(TOKENS, -1), kernel.grad))


def vmoe(x, kernel, params, k, factor, priority):
    """(outputs, kept [T, k]) by V-MoE's rule, token by token, as google-research/vmoe has it (vmoe/moe.py, 1030c71).

    Weights are softmax probabilities over all experts; places ceil(factor k T / E), rounded up to a multiple of 4. All
    first choices come before second ones; with batch priority the tokens of the largest first weight come first within
    a choice.
    """
    gates = (x @ kernel.T).softmax(-1)
    weights, experts = gates.topk(k)
    places = -(-int(np.ceil(factor * k * len(x) / EXPERTS)) // 4) * 4
    order = (-weights[:, 0]).argsort(stable=True).tolist() if priority else range(len(x))
    used, kept, y = [0] * EXPERTS, np.zeros((len(x), k), bool), [torch.zeros(x.shape[1]) for _ in x]
    for choice in range(k):
        for token in order:
            expert = int(experts[token, choice])
            used[expert] += 1
            if used[expert] <= places:
                kept[token, choice] = True
                hidden = torch.relu(x[token] @ params["up"][expert]) @ params["down"][expert]
                y[token] = y[token] + weights[token, choice] * hidden
    return torch.stack(y), kept


@pytest.mark.parametrize("priority", [False, True])
def test_vmoe_with_its_drops(priority):
    torch.manual_seed(2)
    x, kernel = torch.randn(TOKENS, 32, requires_grad=True), (0.3 * torch.randn(EXPERTS, 32)).requires_grad_()
    params = {"up": 0.3 * torch.randn(EXPERTS, 32, 24), "down": 0.3 * torch.randn(EXPERTS, 24, 32)}
    pull = torch.randn(TOKENS, 32)
    theirs, places = vmoe(x, kernel, params, 2, 0.5, priority)  # 5 places, 8 with the multiple
    (theirs * pull).sum().backward()
    rule = SelectionRule(k=2, capacity_factor=0.5, capacity_multiple=4, priority="score" if priority else "position")
    copied = {name: array(value) for name, value in params.items()}

    def layer(x, scores):
        routing = select(rule, scores)
        return dense(relu_experts, copied, x, routing), routing

    y, kept, to_x, to_router = as_ours(layer, array(x), array(kernel), array(pull))
    np.testing.assert_array_equal(kept, places)
    assert 0.05 < (~kept).mean() < 0.5
    close((y, to_x, to_router), (theirs, x.grad, kernel.grad))
