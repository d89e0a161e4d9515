"""Families of transformers: a trace is what the experts received, and own scores put back change nothing.

Needs torch==2.13.0 and transformers>=5.18. `python -m tests.external.test_families_transformers` writes the table of
families into docs/traces.md.
"""

import contextlib
import pathlib
import re

import numpy as np
import pytest
import torch

from routed.contracts import UserError
from routed.trace import hooks
from routed.trace.capture import capture
from routed.trace.format import stripes
from routed.trace.hooks_replace import check_rules, replacing
from routed.trace.replacements import Router
from tests.external.families import CAUSAL, FAMILIES, NO_SURGERY, ROWS, SPECIAL, inputs_of, make

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "traces.md"
TABLE = re.compile(r"(?<=\n)\| model \| routers \| surgery \|\n(\|.*\n)*")


def column(stored, layer, name):
    return np.concatenate([arrays[0] for arrays in stripes(stored, layer, name)])


@contextlib.contextmanager
def experts_received(model, family):
    """Yields a dict that gets, for each router, the list of weights [T, E] that its experts were given.

    It looks at the calls of the experts themselves (Llama 4: at scaled inputs; JetMoE: at the rows of tokens).
    """
    received, tokens, undo = {}, {}, []
    routers = hooks.routers_of(model)

    def dense(name, experts, weights):
        table = torch.zeros(len(experts), weights_of(routers[name].module).shape[0])
        received.setdefault(name, []).append(table.scatter_(1, experts, weights.float()).numpy())

    def watch(name, module):
        inside, _, _ = name.rpartition(".")
        block = model.get_submodule(inside)

        def called(part, args):
            if family in ("switch", "nllb"):  # a mask [T, 1, E] or [T, E], and probabilities
                _, mask, weights = args
                weights = weights * mask.reshape(len(weights), -1) if family == "switch" else weights
                received.setdefault(name, []).append(weights.float().numpy())
            elif family == "llama4":  # inputs of all tokens for the first expert, for the second, ...
                scaled, x = args[0].reshape(8, -1, args[0].shape[-1]).float(), tokens[name].float()
                column = x.abs().argmax(1)
                rows = torch.arange(len(x))
                received.setdefault(name, []).append((scaled[:, rows, column] / x[rows, column]).T.numpy())
            elif family == "jetmoe":  # the tokens of the first expert, of the second, ...
                inputs, sizes = args
                parts = torch.split(inputs, sizes)
                seen = [(tokens[name][:, None] == part[None]).all(-1).any(1) for part in parts]
                received.setdefault(name, []).append(torch.stack(seen, 1).float().numpy())
            else:
                dense(name, args[1], args[2])

        experts = block.input_linear if family == "jetmoe" else block.experts
        undo.append(experts.register_forward_pre_hook(called))
        undo.append(module.register_forward_pre_hook(
            lambda part, args: tokens.__setitem__(name, args[0].reshape(-1, args[0].shape[-1]))
        ))  # fmt: skip

    for name, router in routers.items():
        watch(name, router.module)
    yield received
    for handle in undo:
        handle.remove()


def weights_of(module):
    return next(tensor for name, tensor in module.named_parameters() if name.endswith("weight") and tensor.ndim == 2)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_trace_is_what_the_experts_received(family, kind, tmp_path):
    model = make(family, TYPES[kind])
    with experts_received(model, family) as received:
        traces = capture(model, ROWS, tmp_path, batch_size=4)
    assert len(traces) == 1 + model.config.is_encoder_decoder
    for stored in traces:
        assert stored.tokens == 192
        for layer, name in enumerate(stored.layers):
            experts, weights = column(stored, layer, "expert").astype(int), column(stored, layer, "weight")
            kept = column(stored, layer, "kept") if "kept" in stored.columns else np.ones_like(experts, bool)
            given = np.concatenate(received[name])
            table = np.zeros_like(given)
            np.put_along_axis(table, experts, np.where(kept, 1 if family == "jetmoe" else weights, 0), 1)
            close = 1e-2 if family == "llama4" and kind == "bfloat16" else 1e-6  # inputs are scaled in bfloat16
            np.testing.assert_allclose(table, given, atol=close)
            assert 0 < (given != 0).mean() < 1 and (family == "nllb" or (np.diff(weights, axis=1) <= 0).all())
            if family == "jetmoe":
                np.testing.assert_allclose(weights.sum(1), 1, atol=1e-2)
            if family == "switch":
                assert 0 < (~kept).mean() < 1


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_the_linear_map_of_the_features(family):
    model = make(family)
    routers = hooks.routers_of(model)
    with hooks.listening(routers) as outputs, torch.no_grad():
        model(**inputs_of(model, ROWS[:2]))
    for name, output in outputs.items():
        weight, offset = output.linear
        scores = torch.nn.functional.linear(output.features.float(), weight.float(), offset)
        np.testing.assert_allclose(output.scores.float(), scores.detach(), atol=1e-5)
        kernel, bias = hooks.weights_of(routers[name].module)
        np.testing.assert_array_equal(kernel, weight.detach().T)
        assert (bias is None) == (offset is None)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in SPECIAL])
def test_padded_batches(family):
    """Rows of one batch are padded left; the choices of every token, padding too, are those that the experts got."""
    model = make(family)
    mask = torch.ones((3, 16), dtype=torch.long)
    mask[0, :5] = mask[1, :2] = 0
    with (
        experts_received(model, family) as received,
        hooks.listening(hooks.routers_of(model)) as outputs,
        torch.no_grad(),
    ):
        model(**inputs_of(model, ROWS[:3]), attention_mask=mask)
    for name, output in outputs.items():
        table = torch.zeros(48, output.scores.shape[-1]).scatter_(1, output.experts, output.weights.float())
        np.testing.assert_array_equal(table, received[name][0])


def logits_with(model, make_router):
    """The model's logits with these routers, by name of the module."""
    modules = hooks.routers_of(model)
    replaced = {name: make_router(router) for name, router in modules.items()}
    inputs = inputs_of(model, ROWS[:4])
    with replacing(model, modules, replaced) as (_, now), torch.no_grad():
        now |= {"ids": inputs["input_ids"].reshape(-1), "batch": 0}
        return model(**inputs).logits.float()


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("family", CAUSAL)
def test_own_scores_put_back_change_nothing_and_others_do(family, kind):
    def router(place, turn):
        bias = hooks.choice_bias(place)
        own = None if bias is None else bias.float().flatten().numpy()
        return Router(lambda params, batch: batch.scores.roll(turn, 1), bias=own)

    model = make(family, TYPES[kind])
    with torch.no_grad():
        expected = model(**inputs_of(model, ROWS[:4])).logits.float()
    assert logits_with(model, lambda place: router(place, 0)).equal(expected)
    assert not logits_with(model, lambda place: router(place, 1)).allclose(expected, atol=1e-2)
    check_rules(model, hooks.routers_of(model), ROWS[0])


def test_a_hash_is_no_router_to_replace():
    model = make("deepseek_v4")
    with pytest.raises(UserError, match=r"layers.0.mlp.gate: its choices stay the same with the scores of other exp"):
        check_rules(model, hooks.routers_of(model), ROWS[0])


def table():
    """The table of families in docs/traces.md: class, names of the routers, surgery."""
    lines = ["| model | routers | surgery |", "|---|---|---|"]
    for family in FAMILIES:
        model = make(family)
        names = dict.fromkeys(re.sub(r"[.][0-9]+[.]", ".N.", name) for name in hooks.routers_of(model))
        surgery = "first layers are hashes" if family in NO_SURGERY else "yes" if family in CAUSAL else "no next token"
        lines.append(f"| `{type(model).__name__}` | {', '.join(f'`{name}`' for name in names)} | {surgery} |")
    return "\n".join(lines) + "\n"


def test_the_document_has_the_families():
    assert TABLE.search(DOCUMENT.read_text()).group() == table()


if __name__ == "__main__":
    DOCUMENT.write_text(TABLE.sub(lambda _: table(), DOCUMENT.read_text()))
