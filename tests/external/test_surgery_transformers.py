"""Surgery on the real classes of transformers: a router's substitute does what it says, and nothing else changes.

Needs torch==2.13.0 and transformers>=5.18.
"""

import numpy as np
import pytest
import torch

from routed.contracts import UserError
from routed.trace import hooks, surgery, surgery_page, surgery_results
from routed.trace.hooks_replace import choices_of, losses_of, replacing
from routed.trace.kinds import EVERY
from routed.trace.replacements import Linear, Site, linear, shuffled
from routed.trace.sites import linear_weights
from routed.trace.sites import sites_of as every_site
from routed.trace.surgery_jobs import ALL, Job
from tests.external.families import ROWS, SMALL, make

HERE, OTHER = ROWS[:6], ROWS[6:]


def operate(model, out, **more):
    return surgery.surgery(model, HERE, OTHER, out, **{"batch_size": 4, "repair_steps": 0} | more)


def losses(model, replaced):
    modules = hooks.routers_of(model)
    with replacing(model, modules, replaced) as (_, now):
        return losses_of(model, HERE, now, 4)


def weights_of(model):
    return linear_weights(hooks.routers_of(model))


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt_oss", "llama4", "gemma4", "lfm2_moe", "ernie4_5_moe"])
def test_a_router_replaced_by_itself_changes_nothing(name):
    model = make(name)
    expected, trained = losses(model, {}), weights_of(model)
    ids = torch.tensor(np.stack(HERE))
    np.testing.assert_allclose(expected.mean(), model(input_ids=ids, labels=ids).loss.item(), rtol=1e-5)
    np.testing.assert_allclose(
        losses(model, {layer: linear(weights) for layer, weights in trained.items()}), expected, atol=1e-5
    )
    scaled = {layer: linear(weights._replace(kernel=5 * weights.kernel)) for layer, weights in trained.items()}
    assert np.abs(losses(model, scaled) - expected).max() > 1e-2  # which is seen
    if next(iter(trained.values())).bias is not None:  # the bias that chooses is replaced too
        moved = {layer: linear(weights._replace(bias=-weights.bias)) for layer, weights in trained.items()}
        assert np.abs(losses(model, moved) - expected).max() > 1e-2


@pytest.mark.parametrize("name", ["olmoe", "gpt_oss", "deepseek_v3"])
def test_experts_that_are_shuffled_with_their_router_are_the_same_model(name):
    """The oracle of `shuffled`: expert e's weights stand where its scores went."""
    model = make(name)
    if name == "deepseek_v3":  # its groups are of neighbours
        for router in hooks.routers_of(model).values():
            router.module.num_group = router.module.topk_group = 1
    expected, trained = losses(model, {}), weights_of(model)
    replaced = {}
    for layer, weights in trained.items():
        site = Site(8, 2, None, None, None, None, None, weights)
        replaced[layer] = shuffled(site, np.random.default_rng(1))
        cycle = np.random.default_rng(1).permutation(8)
        assert (replaced[layer].start["kernel"][:, np.roll(cycle, -1)] == weights.kernel[:, cycle]).all()
        experts = model.get_submodule(layer.rpartition(".")[0]).experts
        with torch.no_grad():
            for parameter in experts.parameters():
                parameter[np.roll(cycle, -1)] = parameter[cycle].clone()
    assert np.abs(losses(model, {}) - expected).max() > 1e-3
    np.testing.assert_allclose(losses(model, replaced), expected, atol=1e-5)


def output_of(model, replaced, layer):
    """What the router of a place returned for the rows, with these routers in the model."""
    modules = hooks.routers_of(model)
    with replacing(model, modules, replaced) as (_, now), hooks.listening({layer: modules[layer]}) as outputs:
        losses_of(model, HERE[:4], now, 4)
    return outputs[layer]


def sites_of(model):
    modules = hooks.routers_of(model)
    return every_site(model, modules, OTHER, 4, {})


def entropy(scores):
    logs = torch.log_softmax(scores.float(), -1)
    return float(-(logs.exp() * logs).sum(-1).mean())


def test_replacements_do_what_their_words_say():
    model = make("olmoe")
    sites = sites_of(model)
    layer, site = next(iter(sites.items()))
    alone = [name for name in EVERY if name not in ("checkpoint", "seed")]
    replaced = {name: EVERY[name].make(site, np.random.default_rng(0)) for name in alone}
    outputs = {name: output_of(model, {layer: router}, layer) for name, router in replaced.items()}
    trained = torch.log_softmax(torch.tensor(site.scores), -1)
    wanted = float(-(trained.exp() * trained).sum(-1).mean())
    for name in ("noise", "random"):
        assert entropy(outputs[name].scores) == pytest.approx(
            wanted, rel=0.15
        )  # 64 tokens, not those it was made as sharp on
    weights = outputs["uniform"].weights
    np.testing.assert_allclose(weights, 1 / 8, rtol=0.02)
    loads = np.bincount(outputs["uniform"].experts.flatten(), minlength=8)
    assert loads.min() > 0.5 * loads.mean()  # 256 choices, 32 an expert, deviation 4
    assert (
        outputs["top1"].experts.shape == (64, 1)
        and (outputs["top1"].experts[:, 0] == outputs["trained"].experts[:, 0]).all()
    )
    np.testing.assert_allclose(
        outputs["layer"].scores,
        torch.as_tensor(outputs["trained"].features) @ torch.tensor(site.next_layer.kernel),
        atol=1e-4,
    )


def test_a_table_names_the_experts_that_other_text_chose_most():
    model = make("olmoe")
    modules = hooks.routers_of(model)
    layer = next(iter(modules))
    ids, experts = np.concatenate(OTHER), []
    with hooks.listening(modules) as outputs, torch.no_grad():
        for row in OTHER:
            model(input_ids=torch.tensor(row[None]))
            experts.append(outputs[layer].experts.numpy())
    counts = np.zeros((300, 8))
    np.add.at(counts, (ids[:, None], np.concatenate(experts)), 1)
    load = counts.sum(0) / counts.sum()
    site = sites_of(model)[layer]
    result = output_of(model, {layer: EVERY["table"].make(site, np.random.default_rng(0))}, layer)
    here = np.concatenate(HERE[:4])
    assert 0 < np.isin(here, ids).mean() < 1  # some are unseen, which get the loads alone
    for token, chosen in zip(here, result.experts.numpy(), strict=True):
        assert set(chosen) == set(np.argsort(-(counts[token] + load))[:4])


def test_a_repair_trains_the_router_alone_and_nothing_stays(tmp_path):
    model = make("olmoe")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    needs = [parameter.requires_grad for parameter in model.parameters()]
    result = operate(model, tmp_path, replace=["random", "table", "noise"], repair_steps=30, repair_rate=0.1)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [parameter.requires_grad for parameter in model.parameters()] == needs and not model.training
    assert Job(ALL, "noise", 0, 30) not in result.losses and not result.reasons
    for layer in (ALL, *result.layers):
        assert Job(layer, "trained", 0, 30) in result.losses
    rows = [*OTHER]  # it learns the text that it is repaired on
    on_other = surgery.surgery(
        model, rows, rows, tmp_path / "other", replace=["random"], repair_steps=30, repair_rate=0.1, batch_size=4
    )
    assert on_other.losses[Job(ALL, "random", 0, 30)].mean() < on_other.losses[Job(ALL, "random")].mean() - 1e-3


def test_what_has_no_gradient_is_said(tmp_path):
    result = operate(make("mixtral"), tmp_path, replace=["top1", "noise"], repair_steps=2)
    assert "there is no gradient to repair it by" in result.reasons[Job(ALL, "top1", 0, 2)]
    assert any(
        "one expert a token, repaired, anywhere: its weights are the same" in text
        for text in surgery_results.unsaid(result, surgery_results.table(result), surgery_results.regret_table(result))
    )


def test_a_killed_surgery_goes_on(tmp_path, monkeypatch):
    model = make("olmoe")
    more = {"replace": ["noise", "shuffled"], "repair_steps": 2, "draws": 2}
    whole = operate(model, tmp_path / "whole", **more)
    run, calls = surgery.losses_of, []

    def dies(*given):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return run(*given)

    monkeypatch.setattr(surgery, "losses_of", dies)
    with pytest.raises(KeyboardInterrupt):
        operate(model, tmp_path / "killed", **more)
    again = operate(model, tmp_path / "killed", **more)
    assert len(calls) == 5 + len(whole.losses) - 4  # four jobs were done
    assert again.losses.keys() == whole.losses.keys()
    for job, result in whole.losses.items():
        np.testing.assert_array_equal(again.losses[job], result)
    with pytest.raises(UserError, match="holds a surgery with seed=0, now 1: choose another --out"):
        operate(model, tmp_path / "killed", seed=1, **more)
    (tmp_path / "killed" / "jobs" / "all-noise-0-0.npz").write_bytes(b"PK\x03\x04")
    with pytest.raises(UserError, match=r"all-noise-0-0.npz is damaged"):
        operate(model, tmp_path / "killed", **more)


def test_another_checkpoint_and_models_that_cannot_be_operated(tmp_path):
    model, twin = make("olmoe"), make("olmoe")
    same = operate(model, tmp_path / "same", replace=["checkpoint"], repair_steps=0, checkpoint=twin)
    assert same.reasons == {job: surgery.NO_EFFECT for job in same.reasons} and Job(ALL, "checkpoint") in same.reasons
    with torch.no_grad():  # a checkpoint that is nearly the same has a loss that is nearly the same
        for router in hooks.routers_of(twin).values():
            router.module.weight.mul_(1 + 1e-5)
    result = operate(model, tmp_path / "twin", replace=["checkpoint"], checkpoint=twin)
    as_is = result.losses[Job(ALL, "")]
    np.testing.assert_allclose(result.losses[Job(ALL, "checkpoint")], as_is, atol=1e-5)
    for more in ({"replace": ["checkpoint"]}, {"replace": ["noise"], "checkpoint": twin}):
        with pytest.raises(UserError, match=r"--replace=checkpoint needs --router_from, and --router_from needs it"):
            operate(model, tmp_path / "none", **more)
    with pytest.raises(UserError, match=r"the text has token id 300, the model knows 300: use its own tokenizer"):
        surgery.surgery(model, [np.array([1, 300])], OTHER, tmp_path / "d")
    with pytest.raises(UserError, match="is an encoder-decoder"):
        operate(make("switch"), tmp_path / "a")
    with pytest.raises(UserError, match=r"--replace=nothing: no such replacement; known: noise, uniform"):
        operate(model, tmp_path / "b", replace=["nothing"])
    with pytest.raises(UserError, match="a row of other text"):
        surgery.surgery(model, HERE, [], tmp_path / "c")


def test_a_router_whose_rule_is_the_models_own(tmp_path):
    """Scores alone are returned: the model takes its experts behind them."""

    class Mixture(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.sizes = torch.nn.Linear(32, 8, bias=False), torch.arange(8.0)

        def forward(self, x):
            weights, experts = self.gate(x).softmax(-1).topk(2)
            return x + (weights * self.sizes[experts]).sum(-1, keepdim=True)

    model = make("olmoe")
    for layer in model.model.layers:
        layer.mlp = Mixture()
    pattern = r"model\.layers\.[0-9]+\.mlp\.gate"
    result = operate(model, tmp_path, replace=["noise", "top1"], routers=pattern, k=2)
    assert np.abs(result.losses[Job(ALL, "noise")] - result.losses[Job(ALL, "")]).max() > 1e-5
    assert "the model takes its k experts behind it" in result.reasons[Job(ALL, "top1")]


def test_a_router_that_nobody_reads_is_refused(tmp_path):
    """The block takes its experts from elsewhere: a replaced router would change nothing, and have a worth of 0."""

    class Mixture(torch.nn.Module):
        def __init__(self, gate):
            super().__init__()
            self.gate = gate

        def forward(self, x):
            self.gate(x)
            return x

    model = make("olmoe")
    for layer in model.model.layers:
        layer.mlp = Mixture(torch.nn.Linear(32, 8, bias=False))
    with pytest.raises(UserError, match=r"model.layers.0.mlp.gate: its choices stay the same with the scores of other"):
        operate(model, tmp_path, replace=["noise"], routers=r"model\.layers\.[0-9]+\.mlp\.gate", k=2)


def test_the_command_operates_and_writes_a_page(tmp_path, monkeypatch):
    from routed.trace import __main__ as command

    make("olmoe").save_pretrained(tmp_path / "model")
    (tmp_path / "de.txt").write_text("Wer viel fragt, geht viel irr. " * 20)
    (tmp_path / "brief.txt").write_text("Wer viel fragt. ")
    lines = []
    monkeypatch.setattr(command.files, "tell", lines.append)
    asked = [
        f"--model={tmp_path / 'model'}",
        f"--out={tmp_path / 'out'}",
        "--tokens=bytes",
        "--length=16",
        "--repair_steps=2",
    ]
    try:
        command.flags.FLAGS(["trace", *asked, f"--text={tmp_path / 'de.txt'}", f"--router_from={tmp_path / 'model'}"])
        command.main(["trace", "surgery"])
        assert lines[0].startswith("As it is, the model has a loss of ") and "in every layer" in lines[0]
        page = (tmp_path / "out" / "surgery.html").read_text()
        assert (
            "noise, as sharp as trained" in page
            and "another checkpoint&#39;s router" in page
            and page.count("<svg") == 5
        )
        assert len((tmp_path / "out" / "surgery.csv").read_text().splitlines()) == 2 + 3 * (10 + 9) + 9
        command.flags.FLAGS["text"].unparse()
        command.flags.FLAGS(["trace", *asked, f"--text={tmp_path / 'brief.txt'}"])
        with pytest.raises(UserError, match="brief has one row, which cannot be halved"):
            command.main(["trace", "surgery"])
        command.flags.FLAGS["model"].unparse()
        with pytest.raises(UserError, match="--model is missing"):
            command.main(["trace", "surgery"])
    finally:
        command.flags.FLAGS.unparse_flags()


def test_findings_and_the_page_of_one_layer(tmp_path):
    import transformers as hf

    torch.manual_seed(0)
    model = hf.OlmoeForCausalLM(
        hf.OlmoeConfig(**SMALL | {"num_hidden_layers": 1}, num_experts=8, num_experts_per_tok=2)
    ).eval()
    result = operate(model, tmp_path, replace=["noise", "layer"])
    assert "no other layer has a router" in result.reasons[Job(ALL, "layer")]
    replaced = surgery_page.report(result, tmp_path)
    assert (tmp_path / "surgery.html").exists() and replaced["worth"].reason.str.len().gt(0).sum() == 2


def test_a_linear_of_a_site_of_another_width_is_refused_in_words():
    site = Site(8, 2, None, None, np.zeros((4, 32)), None, None, None, checkpoint=Linear(np.zeros((16, 8)), None, None))
    assert EVERY["checkpoint"].make(site, np.random.default_rng(0)) == "its weights have shape [16, 8], not [32, 8]"


def test_uniform_breaks_ties_in_bfloat16_beside_a_mean_far_from_0():
    """Neighbours of -4 are .03 away in bfloat16, where smaller noise vanished: two experts had all tokens."""
    model = make("gpt_oss").to(torch.bfloat16)
    modules = hooks.routers_of(model)
    with torch.no_grad():
        for router in modules.values():
            router.module.bias.fill_(-4)
    sites = every_site(model, modules, HERE, 4, {})
    routers = {name: EVERY["uniform"].make(site, np.random.default_rng(0)) for name, site in sites.items()}
    outputs, _ = choices_of(model, modules, routers, HERE[0])
    name = next(iter(modules))
    load = np.bincount(outputs[name].experts.numpy().ravel(), minlength=sites[name].experts)
    assert load.max() < load.sum() / 2
