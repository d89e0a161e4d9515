"""Captures of models of transformers: killed ones, other weights, other versions, and models that are refused.

Needs torch==2.13.0 and transformers>=5.18.
"""

import numpy as np
import pytest
import torch
import transformers
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeTop2Router
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersTop1Router

from routed import trace
from routed.contracts import UserError
from routed.trace import hooks, model_inputs
from routed.trace.capture import capture
from routed.trace.model_inputs import BYTES, rows_of
from routed.trace.readers import ROUTERS, choices_in
from tests.external.families import ROWS, make
from tests.external.test_families_transformers import column


def test_a_killed_capture_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("routed.trace.capture.PART", 64)  # a batch a part
    model = make("olmoe")
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


def test_a_capture_of_other_weights_is_another(tmp_path):
    model = make("olmoe")
    (stored,) = capture(model, ROWS, tmp_path, name="m")
    assert capture(model, ROWS, tmp_path, name="m") == [stored]
    pattern = r"model\.layers\.[0-9]+\.mlp\.gate"
    with pytest.raises(UserError, match="holds a capture with k=0, now 4"):
        capture(model, ROWS, tmp_path, name="m", routers=pattern, k=4)
    with pytest.raises(UserError, match=r"--k=2: model.layers.0.mlp.gate gives a token 4 experts"):
        capture(model, ROWS, tmp_path / "two", routers=pattern, k=2)
    # A later checkpoint of the same name, whose routers learned, or all but these.
    for changed in (model.get_submodule(stored.layers[1]).weight, model.get_input_embeddings().weight):
        with torch.no_grad():
            changed[0, 0] += 1
        with pytest.raises(UserError, match="holds a capture with weights="):
            capture(model, ROWS, tmp_path, name="m")
        with torch.no_grad():
            changed[0, 0] -= 1


def test_named_routers_are_read_as_the_model_reads_them(tmp_path):
    """GLM4 has sigmoids, groups and a bias: the k highest softmax probabilities would be other experts."""
    model = make("glm4_moe")
    (own,) = capture(model, ROWS, tmp_path / "own")
    (named,) = capture(model, ROWS, tmp_path / "named", routers=r"model\.layers\.[0-9]+\.mlp\.gate", k=3)
    for name in ("expert", "weight", "scores"):
        np.testing.assert_array_equal(column(named, 0, name), column(own, 0, name))
    highest = np.sort(column(own, 0, "scores").argsort(1)[:, -3:])
    assert (np.sort(column(own, 0, "expert")) != highest).any(1).mean() > 0.1


class Gated(transformers.PreTrainedModel):
    """A model whose gate is a linear map on [batch, positions, features], as remote code has it."""

    config_class = transformers.PretrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.embedding, self.gate = torch.nn.Embedding(300, 16), torch.nn.Linear(16, 8)
        self.post_init()

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, **more):
        return (self.gate(self.embedding(input_ids)),)


def test_a_gate_on_batch_and_positions(tmp_path):
    torch.manual_seed(0)
    model = Gated(transformers.PretrainedConfig(is_encoder_decoder=False))
    (stored,) = capture(model, ROWS, tmp_path, routers="gate", k=2)
    scores = model(torch.tensor(np.stack(ROWS)))[0].reshape(192, 8).detach()
    np.testing.assert_array_equal(column(stored, 0, "expert"), scores.topk(2).indices)
    np.testing.assert_allclose(column(stored, 0, "weight"), scores.softmax(-1).topk(2).values, atol=1e-6)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_choices_are_known_by_type_and_shape(order):
    scores, weights, experts = torch.randn(5, 6), torch.rand(5, 2), torch.randint(6, (5, 2))
    parts = [(scores, weights, experts)[i] for i in order]
    assert all(a.equal(b) for a, b in zip(choices_in(parts, scores), (experts, weights), strict=True))
    assert choices_in([scores, weights]) is None and choices_in([experts.float(), scores]) is None
    alike = torch.rand(5, 6), torch.rand(5, 6).argsort(1)  # every expert is chosen
    assert choices_in([scores, *alike], scores)[1] is not scores
    with pytest.raises(UserError, match="returns 2 tensors that may be weights"):
        choices_in([weights, weights + 1, experts], scores)


@pytest.mark.parametrize(("experts", "scale"), [(64, 1.0), (128, 0.3)])
def test_ties_of_bfloat16_go_where_the_model_sends_them(experts, scale):
    """Switch and NLLB choose by probabilities in bfloat16; these are equal for several experts now and then."""
    torch.manual_seed(0)
    x = torch.randn(8, 512, 32).bfloat16()
    config = transformers.SwitchTransformersConfig(d_model=32, num_experts=experts, expert_capacity=10**6)
    router = SwitchTransformersTop1Router(config).eval()
    torch.nn.init.normal_(router.classifier.weight, 0, scale / 32**0.5)
    mask, *rest = router(x)
    output = ROUTERS["SwitchTransformersTop1Router"](router, (mask, *rest))
    assert output.experts[:, 0].equal(mask.reshape(-1, experts).argmax(-1)) and output.kept.all()
    assert not output.experts[:, 0].equal(output.scores.argmax(-1))  # which the highest logits are not
    dropped = ROUTERS["SwitchTransformersTop1Router"](router, (torch.zeros_like(mask), *rest))
    assert dropped.experts.equal(output.experts) and not dropped.kept.any()
    config = transformers.NllbMoeConfig(
        d_model=32, num_experts=experts, expert_capacity=10**6, moe_eval_capacity_token_fraction=1.0
    )
    router = NllbMoeTop2Router(config).eval()
    torch.nn.init.normal_(router.classifier.weight, 0, scale / 32**0.5)
    mask, weights, logits = router(x.reshape(-1, 32))
    output = ROUTERS["NllbMoeTop2Router"](router, (mask, weights, logits))
    assert output.experts[:, 0].equal(mask.argmax(-1))
    assert torch.zeros_like(weights).scatter(1, output.experts, output.weights).equal(weights)


@pytest.mark.parametrize("version", ["4.57.6", "5.17.0", "6.0.0"])
def test_another_version_of_transformers_is_refused(version, monkeypatch, tmp_path):
    model = make("olmoe")
    monkeypatch.setattr("transformers.__version__", version)
    needed = rf"transformers {version}: routers are read in versions >=5.18,<6: pip install 'transformers>=5.18,<6'"
    for refused in (lambda: capture(model, ROWS, tmp_path), lambda: model_inputs.load("anything")):
        with pytest.raises(UserError, match=needed):
            refused()


def test_a_folder_without_tokenizer_names_the_way_out(tmp_path):
    for family in ("mixtral", "olmoe"):  # of the second transformers makes a tokenizer without words
        folder = tmp_path / family
        make(family).save_pretrained(folder)
        with pytest.raises(UserError, match=r"--model=.* has no tokenizer that can be read .*--tokens=bytes"):
            model_inputs.load(str(folder))
    with pytest.raises(UserError, match=r"--tokens=\S*n\\xf6ne has no tokenizer that can be read"):
        model_inputs.load(str(folder), str(tmp_path / "n\xf6ne"))


def test_weights_that_a_checkpoint_lacks_are_refused(tmp_path):
    """transformers fills them with random numbers, whose routing would be nobody's."""
    model = make("qwen3_vl_moe")  # found by its own class: no causal model has this config
    weights = model.state_dict()
    del weights["model.language_model.layers.1.mlp.gate.weight"]
    model.save_pretrained(tmp_path, state_dict=weights)
    refusal = r"--model=.* lacks 1 weights of .*, the first is model.language_model.layers.1.mlp.gate.weight"
    with pytest.raises(UserError, match=refusal):
        model_inputs.load(str(tmp_path), BYTES)
    model.save_pretrained(tmp_path)
    loaded, _ = model_inputs.load(str(tmp_path), BYTES)
    assert type(loaded) is type(model)


class Unknown(torch.nn.Module):
    def __init__(self):
        super().__init__()
        parts = {"gate_proj": 8, "shared_expert_gate": 1, "gate": 6}  # a dense layer has the first
        self.layers = torch.nn.ModuleList(
            [torch.nn.ModuleDict({name: torch.nn.Linear(4, size) for name, size in parts.items()}) for _ in range(2)]
        )


def test_an_unknown_architecture_says_how_to_name_its_routers():
    with pytest.raises(
        UserError, match=r"Unknown has no router that is known .*--routers=REGEX --k=K; perhaps layers\.\[0-9\]\+\.gate"
    ):
        hooks.routers_of(Unknown())
    with pytest.raises(UserError, match="no module of Unknown is named nothing"):
        hooks.routers_of(Unknown(), "nothing", 2)
    with pytest.raises(UserError, match="--k=7: a token has at most all experts of its router, 6"):
        hooks.routers_of(Unknown(), "layers.[0-9]+.gate", 7)
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
    with pytest.raises(UserError, match=r"fr.txt: No such file"):
        rows_of([fr], BYTES, 4)


def test_the_command_captures_a_folder_of_a_model(tmp_path, monkeypatch):
    from routed.trace import __main__ as command

    make("olmoe").save_pretrained(tmp_path / "model")
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
        capture(make("olmoe"), [np.array([1, 999999])], tmp_path)
