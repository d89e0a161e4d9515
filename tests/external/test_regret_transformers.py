"""Regret, subsets and other models' routers on real classes of transformers, against experts put in by hand.

Needs torch==2.13.0 and transformers 5.
"""

import itertools

import numpy as np
import pytest
import torch
import transformers as hf

from routed.contracts import UserError
from routed.trace import hooks, surgery, surgery_page
from routed.trace.hooks_replace import losses_of, replacing
from routed.trace.kinds import EVERY
from routed.trace.regret import RegretSettings, batches_of, regret_of
from routed.trace.sites import companions_of, sites_of
from routed.trace.surgery_jobs import ALL, Job
from tests.external.families import make

RNG = np.random.default_rng(0)
HERE, OTHER = [*RNG.integers(0, 60, (6, 16))], [*RNG.integers(0, 50, (12, 16))]
SMALL = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None,
    "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip


def model_of(kind="Olmoe", seed=0, **more):
    """A random model whose experts are large enough that it matters which are taken."""
    torch.manual_seed(seed)
    model = getattr(hf, f"{kind}ForCausalLM")(getattr(hf, f"{kind}Config")(**SMALL | more)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.normal_(std=0.3)
    return model


def by_hand(model, block, rows, position, experts):
    """Losses of a whole pass in which the token at a position of each row has these experts, by order of weight."""

    def put(module, args):
        hidden, chosen, weights = args
        chosen = chosen.clone()
        for row in range(len(rows)):
            token = row * rows.shape[1] + position
            order = weights[token].argsort(descending=True)
            chosen[token, order] = torch.tensor(experts)
        return hidden, chosen, weights

    handle = block.experts.register_forward_pre_hook(put)
    try:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(rows), use_cache=False).logits
    finally:
        handle.remove()
    losses = torch.nn.functional.cross_entropy(
        logits[:, position], torch.tensor(rows[:, position + 1]), reduction="none"
    )
    return losses.numpy()


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 1}),
        ("Olmoe", {"num_experts": 5, "num_experts_per_tok": 2}),
        ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("Qwen3Moe", {"num_experts": 6, "num_experts_per_tok": 1, "decoder_sparse_step": 1, "mlp_only_layers": []}),
    ],
)
def test_regret_is_that_of_whole_passes_with_each_choice(kind, more):
    """The oracle: every ordered set of experts of a token, by a whole pass each, with the weights that it has."""
    model, k = model_of(kind, **more), more["num_experts_per_tok"]
    modules = hooks.routers_of(model)
    settings = RegretSettings(tokens=9, batch_size=3, seed=4)
    layer = next(iter(modules))
    site = sites_of(model, modules, OTHER, 4, {})[layer]
    measured = regret_of(model, modules, layer, site, HERE, {}, settings)
    block = model.get_submodule(layer.rpartition(".")[0])
    best, random = [], []
    for where, position in batches_of(len(HERE), len(HERE[0]), settings):
        rows = np.stack([HERE[row] for row in where])
        sets = itertools.permutations(range(site.experts), k)
        losses = np.array([by_hand(model, block, rows, position, experts) for experts in sets])
        best.append(losses.min(0))
        random.append(losses.mean(0))
    np.testing.assert_allclose(measured["best"], np.concatenate(best), atol=1e-5)
    np.testing.assert_allclose(measured["random"], np.concatenate(random), atol=1e-5)
    assert (measured["as_is"] - measured["best"]).max() > 0.01 and measured["refused"].max() == 0
    assert measured["every"].all() and measured["complete"].all() and measured["deviation"].max() < 1e-5


def test_groups_of_experts_that_a_rule_forbids_are_counted(tmp_path):
    """DeepSeek-V3 with two groups of four, of which one is open: of 8 * 7 pairs, 2 * 4 * 3 are within a group."""
    shape = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8}
    groups = {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 0,
    }
    model = model_of("DeepseekV3", **shape | groups)
    modules = hooks.routers_of(model)
    layer = next(iter(modules))
    with torch.no_grad():
        hooks.choice_bias(modules[layer]).normal_(std=0.3)
    site = sites_of(model, modules, OTHER, 4, {})[layer]
    measured = regret_of(model, modules, layer, site, HERE, {}, RegretSettings(6, 3, 0))
    np.testing.assert_allclose(measured["refused"], 1 - 24 / 56)
    assert np.isfinite(measured["sharpened"]).all() and (measured["best"] <= measured["as_is"]).all()


def test_tries_that_would_get_other_weights_are_refused():
    """LongCat chooses with a bias, and its weights are a softmax over all experts: tried ones would sum to 1."""
    model = make("longcat_flash")
    modules = hooks.routers_of(model)
    layer = next(iter(modules))
    site = sites_of(model, modules, OTHER, 4, {})[layer]
    with pytest.raises(UserError, match="do not get the weights of the chosen ones"):
        regret_of(model, modules, layer, site, HERE, {}, RegretSettings(6, 3, 0))


def losses(model, replaced):
    modules = hooks.routers_of(model)
    with replacing(model, modules, replaced) as (_, now):
        return losses_of(model, HERE, now, 4)


def test_an_equal_model_is_a_companion_that_changes_nothing_and_its_repaired_router_is_tried():
    model = model_of(num_experts=8, num_experts_per_tok=2)
    modules = hooks.routers_of(model)
    given = companions_of(model, modules, model_of(num_experts=8, num_experts_per_tok=2), OTHER, batch_size=4)
    sites = {
        name: site._replace(companion=given[name]) for name, site in sites_of(model, modules, OTHER, 4, {}).items()
    }
    routers = {name: EVERY["seed"].make(site, RNG) for name, site in sites.items()}
    np.testing.assert_allclose(losses(model, routers), losses(model, {}), atol=1e-5)
    name, site = next(iter(sites.items()))
    order = np.roll(np.arange(8), 1)
    with torch.no_grad():  # another model with the same routers, whose experts have other numbers
        twin = model_of(num_experts=8, num_experts_per_tok=2)
        twin.get_submodule(name).weight.copy_(twin.get_submodule(name).weight[order].clone())
    theirs = companions_of(model, modules, twin, OTHER, batch_size=4)[name]
    np.testing.assert_allclose(theirs.weights.kernel, site.trained.kernel, atol=1e-6)
    settings = RegretSettings(6, 3, 0)
    same = regret_of(model, modules, name, site, HERE, {"kernel": site.trained.kernel}, settings)
    np.testing.assert_allclose(same["repaired"], same["as_is"], atol=1e-5)
    others = regret_of(model, modules, name, site, HERE, {"kernel": -site.trained.kernel}, settings)
    assert np.abs(others["repaired"] - same["as_is"]).max() > 1e-3


@pytest.mark.parametrize("share", [12, 25, 50])
def test_dropped_experts_get_no_token_and_the_kept_ones_are_those_chosen_most(share):
    model = model_of(num_experts=8, num_experts_per_tok=2)
    modules = hooks.routers_of(model)
    layer, site = next(iter(sites_of(model, modules, OTHER, 4, {}).items()))
    router, kept = EVERY[f"most{share}"].make(site, RNG), round(share / 100 * 8)
    with replacing(model, modules, {layer: router}) as (_, now), hooks.listening(modules) as outputs:
        losses_of(model, HERE, now, 8)
    assert set(np.unique(outputs[layer].experts)) <= set(np.argsort(-site.counts[-1])[:kept])
    assert outputs[layer].experts.shape[1] == min(2, kept)


def test_a_surgery_with_all_of_it(tmp_path):
    model, other = (
        model_of(num_experts=8, num_experts_per_tok=2),
        model_of(seed=1, num_experts=8, num_experts_per_tok=2),
    )
    more = {"repair_steps": [2, 4], "draws": 2, "regret_tokens": 8, "batch_size": 4, "checkpoint": other}
    replace = ["noise", "kmeans", "seed", "subsets"]
    result = surgery.surgery(model, HERE, OTHER, tmp_path, replace=replace, **more)
    assert not result.reasons and {job.draw for job in result.losses if job.repair_steps == 2} == {0, 1}
    assert {job.repair_steps for job in result.losses if job.layer != ALL} == {0, 4}
    assert Job(ALL, "untrained25", 1) in result.losses
    tables = surgery_page.report(result, tmp_path)
    page = (tmp_path / "surgery.html").read_text()
    assert page.count("<svg") == 5 and "how many experts" in page and (tmp_path / "regret.csv").exists()
    assert any("12.5 %" in text for text in tables["findings"])
    again = surgery.surgery(model, HERE, OTHER, tmp_path, replace=replace, **more)
    for layer, read in again.regret.items():
        np.testing.assert_array_equal(read["best"], result.regret[layer]["best"])
    assert np.isfinite(result.regret[result.layers[0]]["repaired"]).all()
