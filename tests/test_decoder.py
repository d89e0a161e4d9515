"""The decoder alone: what it reads, that it sees no future, its sizes; and the text that it continues."""

import functools
import subprocess
import sys
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed.bench import lm, parts
from routed.bench.harness import Baseline, restricted
from routed.contracts import TextBatch, UserError
from routed.engine import limits
from routed.layer.model_losses import balance_pooled
from routed.layer.rule import selection_rule
from routed.layer.selection import SELECTIONS
from routed.metrics.load import load_of
from routed.models.attention import rotated
from routed.models.decoder import decoder
from routed.models.transformer import embedded
from routed.models.transformer_sizes import (
    expert_weights,
    experts_of_token,
    flops_of_decoder_row,
    flops_per_row,
    twin_width,
)
from routed.papers.pham2024.classifier import flops_of_classifier_row
from routed.plan.checks import refuse_unread, validate
from routed.plan.config import base, canonical, problem_of
from routed.settings.tree import node_of, override
from routed.tasks import text
from routed.tasks.text import files, ngram, stream, tokenizers
from routed.tasks.text.corpus import Corpus
from routed.training import objective, program
from routed.training.language import at_best
from tests.parallel_case import loss_and_gradients, make_mesh

TINY = {
    "data.name": "artificial", "data.tokens": "characters", "data.vocabulary": 30, "router.vocabulary": 30,
    "data.languages": ("qaa",), "data.input_length": 8, "model": "decoder",
    "transformer.layers": 2, "transformer.sparse_layers": 2, "transformer.dim": 8, "transformer.heads": 2,
    "transformer.head_dim": 4, "transformer.width": 12, "transformer.buckets": 8, "transformer.max_distance": 16,
    "experts.name": "ffn",
    "experts.width": 6, "experts.count": 4, "selection.name": "top_k", "selection.k": 2, "selection.eval.k": 2,
    "dispatch": "auto", "batch_size": 4,
}  # fmt: skip


def settings(**changes):
    return override(base(), TINY | changes)


def rows(count=4, length=8):
    draw = lambda seed: jax.random.randint(jax.random.key(seed), (count, length), 3, 30)  # noqa: E731
    return TextBatch(draw(1), draw(2), jnp.zeros(count, jnp.int32))


@functools.lru_cache
def ready(changes):
    config = settings(**dict(changes))
    model = decoder(config)
    return config, model, *jax.jit(model.init)(jax.random.key(0), rows())


# --- no token sees a later one ---

FORMS = {
    "buckets": {},
    "rotary, post-norm": {"transformer.positions": "rotary", "transformer.norm": "post"},
    "GLaM": {"transformer.sparse_layers": 1},
    "capacity": {"selection.capacity_factor": 0.75, "selection.group_size": 16},
    "top-1 capacity per token": {
        "selection.k": 1, "selection.renormalise": False, "selection.capacity_factor": 0.5,
        "selection.capacity_rule": "per_token"
    },
    "sigmoid": {"selection.name": "sigmoid"},
    "raw": {"selection.name": "raw"},
    "balancing bias": {"selection.balance_rate": 0.1},
    "within groups of experts": {
        "selection.name": "group_limited", "selection.expert_groups": 2, "selection.groups_kept": 1,
        "selection.balance_rate": 0.1,
    },
    "as many experts as a token likes": {"selection.name": "relu", "dispatch": "dense"},
    "weights of inputs": {"selection.name": "sigmoid_input", "selection.k": 1},
    "a shared expert": {"transformer.shared_expert": True, "selection.k": 1, "selection.renormalise": False},
    "competition": {"selection.name": "compete", "selection.competition_rate": 1.0},
    "competition with capacity": {
        "selection.name": "compete", "selection.competition_rate": 1.0, "selection.capacity_factor": 0.75,
        "selection.group_size": 16,
    },
    "competition of which the router hears alone": {
        "selection.name": "compete", "selection.competition_rate": 1.0, "selection.output_of_winners": False,
        "selection.distillation_target": "shuffled",
    },
    "random winners": {"selection.name": "compete", "selection.competition_rate": 1.0, "selection.winners": "random"},
    "StableMoE, which learns and teaches": {"router.name": "stable", "selection.name": "sigmoid",
                                            "router.experts_per_id": 2},
    "StableMoE, whose table chooses": {
        "router.name": "stable", "selection.name": "sigmoid", "router.experts_per_id": 2, "router.teach_steps": 0,
    },
    "HyperRouter": {"router.name": "hyper"},
    "XMoE": {"router.name": "cosine"},
    "XMoE as Pham et al. coded it": {"router.name": "projected", "router.score": "direction", "router.dim": 4},
    "a hash of the token": {"router.name": "hash_id", "router.frozen": True, "router.experts_per_id": 2},
    "a hash of the bigram": {"router.name": "hash_bigram", "router.frozen": True, "router.experts_per_id": 2},
    "online k-means": {"router.name": "online_kmeans"},
    "self-routing": {"router.name": "self"},
    "layers of their own": {
        "router.layers": ("first=1 router.name=online_kmeans", "last=1 selection.k=1 router.score=distance")
    },
    "noise": {"router.noise": "gaussian", "router.noise_scale": 1.0},
    "SMoE-Dropout, all experts": {"router.frozen": True, "selection.k": 4, "selection.eval.k": 4},
    "steps without winners": {"selection.name": "compete", "selection.competition_rate": 1.0,
                              "selection.winners": "all"},
}  # fmt: skip


#: In these forms an evaluation computes otherwise than training: state, a draw, or a contest.
EVALUATED = ("balanc", "within", "compet", "winners", "learns and teaches", "online", "their own", "noise")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "training"),
    [*((form, True) for form in FORMS), *((form, False) for form in FORMS if any(word in form for word in EVALUATED))],
)
def test_a_later_character_changes_no_earlier_logit(form, training):
    config, model, params, state = ready(tuple(FORMS[form].items()))
    before, place = rows(), 5
    after = before._replace(inputs=before.inputs.at[:, place].set((before.inputs[:, place] + 1) % 27 + 3))
    key = jax.random.key(1) if training else None

    @jax.jit
    def logits(batch):
        return model.apply(params, state, batch, selection_rule(config.selection), config.dispatch, key).prediction

    one, other = logits(before), logits(after)
    # Rows share their groups: of a queue with too few places the first row's tokens come first, so it alone sees
    # nothing of the others.
    np.testing.assert_array_equal(one[0, :place], other[0, :place])
    assert (one[:, place:] != other[:, place:]).any(-1).all()
    if not config.selection.capacity_factor:
        np.testing.assert_array_equal(one[:, :place], other[:, :place])
    last = logits(before._replace(inputs=before.inputs.at[-1, place].set(after.inputs[-1, place])))
    np.testing.assert_array_equal(one[:-1], last[:-1])  # ... and those before the last row nothing of it
    np.testing.assert_array_equal(one[-1, :place], last[-1, :place])


@pytest.mark.parametrize(
    ("key", "read", "unread"),
    [
        ("transformer.width", {"transformer.sparse_layers": 1}, {}),  # TINY has two layers, both of them sparse
        ("transformer.width", {"model": "decoder", "transformer.sparse_layers": 0}, {"model": "decoder_active"}),
        ("transformer.ffn", {"model": "decoder_active"}, {}),
        ("transformer.buckets", {}, {"transformer.positions": "rotary"}),
        ("transformer.max_distance", {}, {"transformer.positions": "rotary"}),
        ("transformer.tied", {}, {"data.name": "labelled", "model": "classifier"}),
    ],
)
def test_what_no_layer_reads_is_refused(key, read, unread):
    refuse_unread([key], [settings(**read)])
    with pytest.raises(UserError, match=f"{key}: nothing in this plan reads it.* it is read"):
        refuse_unread([key], [settings(**unread)])


@pytest.mark.parametrize("selection", [name for name, one in SELECTIONS.items() if one.sees_others or not one.sparse])
def test_selections_that_see_the_future_are_refused(selection):
    with pytest.raises(UserError, match=f"selection.name='{selection}'"):
        validate(settings(**{"selection.name": selection, "dispatch": "dense"}))


@pytest.mark.parametrize("selection", [name for name, one in SELECTIONS.items() if one.sees_others])
def test_evaluations_that_see_the_future_are_refused(selection):
    """Also of a selection that sees its own sample only: in a decoder that is the future."""
    with pytest.raises(UserError, match=f"selection.eval.name='{selection}': would route a token by later ones"):
        validate(settings(**{"selection.eval.name": selection}))


def evaluated(config, validation, test):
    """A new model, and what an evaluation says of it."""
    problem = problem_of(config).build(config, 0, None)
    shared = {"validation": validation, "test": test, "references": {}}
    inputs = program.Inputs(program.streams(0, config), node_of(config), (), shared)

    @jax.jit
    def seen():
        params, state = problem.init(inputs)
        memory = problem.remember(params, state)
        return params, state, problem.evaluate(inputs, params, state, jnp.int32(0), memory)

    return problem, *seen()


@pytest.mark.slow
def test_the_entropy_of_test_tokens_has_its_mean_and_deviation_by_layer():
    """The test rows count, which pass in two blocks; validation rows and the deviation of the blocks' means do not."""
    config = settings()
    test = jax.tree.map(lambda *both: jnp.concatenate(both), rows(), rows()._replace(inputs=rows().targets))
    problem, params, state, seen = evaluated(config, rows(), test)
    (site,) = problem.model.apply(
        params, state, test, selection_rule(config.selection, evaluation=True), config.dispatch
    ).sites.values()
    scores = np.asarray(site.routing.scores, np.float64)
    probs = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    entropy = -(probs * np.log(probs)).sum(-1)
    assert entropy.shape == (2, 8 * 8)  # layers, tokens
    np.testing.assert_allclose(seen["decoder/entropy_test"], entropy.mean(1), rtol=1e-5)
    np.testing.assert_allclose(seen["decoder/entropy_test_std"], entropy.std(1), rtol=1e-3)
    assert (np.abs(seen["decoder/entropy_test"] - seen["decoder/entropy_token"]) > 1e-3).all()


@pytest.mark.parametrize("model", ["decoder", "decoder_active"])
def test_the_cost_counts_the_parameters_of_a_mixture_and_of_its_twin(model):
    config = canonical(settings(model=model))
    params, _ = jax.eval_shape(problem_of(config).models[model].build(config, None).init, jax.random.key(0), rows())
    assert problem_of(config).cost(config).parameters() == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert limits.bytes_of_run(config) > 0  # a run of it is traced


@pytest.mark.slow
def test_where_outputs_choose_at_an_evaluation_they_are_what_is_counted():
    """The experts that computed, not those of highest score; no part of the churn is the router's."""
    config = settings(**{"selection.name": "compete", "selection.eval.name": "compete", "selection.eval.k": 2})
    batch = rows()
    problem, params, state, seen = evaluated(config, batch, batch)
    rule = selection_rule(config.selection, evaluation=True)
    (site,) = problem.model.apply(params, state, batch, rule, config.dispatch).sites.values()
    computed = jnp.sort(site.routing.expert.reshape(2, -1, 2))
    np.testing.assert_array_equal(jnp.sort(seen["decoder/choices"]), computed)
    assert (computed != jnp.sort(jax.lax.top_k(site.routing.scores, 2)[1])).any()
    assert (seen["decoder/stale"] == -1).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", ["buckets", "rotary, post-norm", "competition", "a hash of the bigram", "self-routing"]
)
def test_a_mesh_gives_the_numbers_of_one_device(form):
    config = settings(**FORMS[form] | {"selection.group_size": 8, "selection.capacity_factor": 0.75, "batch_size": 8})
    expected, found = (loss_and_gradients(decoder, config, rows(8), mesh) for mesh in (None, make_mesh(2, 4)))
    chex.assert_trees_all_close(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("changes", "most"), [({"transformer.remat": True}, 1e-5), ({"transformer.dtype": "bfloat16"}, 0.1)]
)
def test_cheaper_ways_to_compute_give_nearly_the_same(changes, most):
    config, model, params, state = ready(())
    other = settings(**changes)
    logits = [
        jax.jit(lambda m=m, c=c: m.apply(params, state, rows(), selection_rule(c.selection), "dense").prediction)()
        for m, c in ((model, config), (decoder(other), other))
    ]
    np.testing.assert_allclose(*logits, atol=most, rtol=0)
    assert most == 1e-5 or (logits[0] != logits[1]).any()


def test_an_embedding_sums_its_gradients_in_float32():
    """4,096 occurrences of one token, each with gradient 1. In bfloat16, which has 8 digits, 256 + 1 is 256."""
    ids = jnp.zeros((8, 512), int)
    gradient = jax.grad(lambda table: embedded(table, ids).astype(jnp.float32).sum())(jnp.ones((3, 2), jnp.bfloat16))
    assert gradient.dtype == jnp.bfloat16 and gradient.tolist() == [[4096, 4096], [0, 0], [0, 0]]


@pytest.mark.parametrize(("buckets", "distance"), [(256, 128), (32, 16), (32, 8)])
def test_buckets_that_would_not_grow_with_distance_are_refused(buckets, distance):
    """Half of the buckets hold one distance each; the logarithm of what is beyond would be of 1 or less."""
    changes = {"transformer.buckets": buckets, "transformer.max_distance": distance}
    with pytest.raises(UserError, match=f"transformer.max_distance={distance}: the nearest {buckets // 2} of"):
        validate(settings(**changes))
    validate(settings(**changes, **{"transformer.positions": "rotary"}))


# --- sizes and positions ---


def test_flops_by_hand():
    """A layer: attention 2 x 8 x (8 x 16 + 64) = 3,072 a row of 8; router 8 x 4, two experts of 2 x 8 x 6: 224 a token.

    Two layers: 6,144 + 2 x 224 x 8 = 9,728; logits 8 x 8 x 30 = 1,920: 11,648; training does 6 times as many FLOPs.
    GLaM's dense layer has 2 x 8 x 12 = 192 (its ffn is not gated): 32 a token less.
    """
    both = {"transformer.ffn": "ffn"}
    assert flops_of_decoder_row(settings(**both)) == 6 * 11_648
    assert flops_of_decoder_row(settings(**both, **{"transformer.sparse_layers": 1})) == 6 * (11_648 - 32 * 8)
    twin = flops_of_decoder_row(settings(**both, model="decoder_active"))
    assert twin / flops_of_decoder_row(settings(**both)) == pytest.approx(1, abs=0.03)


def test_blocks_of_switch_and_glam():
    def sites(**changes):
        return ready(tuple(changes.items()))[2]["router"]["decoder"]["router"]["kernel"].shape

    assert sites() == (2, 8, 4)  # every layer
    assert sites(**{"transformer.sparse_layers": 1}) == (1, 8, 4)  # every second


def test_rotary_products_depend_on_distance_alone():
    q, k = (jnp.tile(jax.random.normal(jax.random.key(seed), (1, 1, 6)), (1, 9, 1)) for seed in (0, 1))
    scores = (rotated(q) @ rotated(k).transpose(0, 2, 1))[0]
    for ahead in (-3, 0, 4):
        np.testing.assert_allclose(jnp.diagonal(scores, ahead), scores[max(-ahead, 0), max(ahead, 0)], rtol=1e-5)
    assert not np.allclose(scores[0, 1], scores[0, 2], rtol=1e-2)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"transformer.positions": "rotary", "transformer.head_dim": 3}, r"transformer.head_dim=3: must be even"),
        (
            {"selection.capacity_factor": 0.75, "selection.priority": "score"},
            r"selection.priority='score': a decoder queues its tokens in their order \(causal\); use causal",
        ),
        (
            {"selection.eval.name": "soft", "dispatch": "slots"},
            "selection.eval.name='soft': dispatch 'slots' needs a sp",
        ),
        (
            {"selection.eval.capacity_factor": 1.0, "mesh.data": 2},
            r"selection.group_size=0: 2 devices cannot share its groups of 32 tokens a step; use .*group_size=16",
        ),
    ],
)
def test_settings_that_a_decoder_cannot_have(changes, refusal):
    with pytest.raises(UserError, match=refusal):
        validate(settings(**changes))


@pytest.mark.slow
def test_cores_that_share_the_steps_of_the_bench_have_its_numbers(monkeypatch):
    monkeypatch.setitem(lm.SHAPES, "least", lm._shape(8, 2, 8, 4, 30))
    alone, shared = (lm.training_of("least", "smoe", mesh) for mesh in (None, make_mesh(2, 1)))
    assert alone.config.dispatch == "auto"
    (one, *_), (other, *_) = (program.run(5) for program in (alone, shared))
    chex.assert_trees_all_close(one, other, atol=1e-4)


@pytest.mark.slow
def test_competing_layers_of_the_bench_teach_their_routers(monkeypatch):
    """What the bench minimises is the text's loss and, of each layer, what the router learns of the contest."""
    monkeypatch.setitem(lm.SHAPES, "least", lm._shape(8, 2, 8, 4, 30))
    trained = lm.training_of("least", "compete_1")
    params, layer, _ = trained.state
    batch, rule = trained._batch(8), selection_rule(trained.config.selection)
    outputs = trained.model.apply(params, layer, batch, rule, trained.config.dispatch, jax.random.key(0))
    nats = -jax.nn.log_softmax(outputs.prediction)[*np.indices(batch.targets.shape), batch.targets].mean()
    taught = float(objective.selection_loss(rule, outputs.sites))
    assert float(trained._loss(params, layer, batch)[0] - nats) == pytest.approx(taught, rel=1e-4) and taught > 0


@pytest.mark.slow
def test_the_bench_alone_knows_competing_layers():
    """A process of the bench loads their paper itself; here conftest.py has loaded all of them."""
    code = "from routed.bench import lm; print(lm.config_of('tiny', 'compete_1').selection.competition_rate)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1.0\n"


def test_a_part_of_the_cases_of_a_bench_is_chosen_by_their_names():
    cases = {("tiny", "smoe"): 1, ("tiny", "dense"): 2, ("small", "smoe"): 3}
    assert restricted(cases, "") == cases and restricted(cases, "tiny (smoe|all)") == {("tiny", "smoe"): 1}
    with pytest.raises(UserError, match="--only=huge: no case; there are tiny smoe, tiny dense, small smoe"):
        restricted(cases, "huge")


def test_the_bench_reads_baselines_and_its_dense_decoder_has_the_size_of_its_peer():
    """Three layers of width 96: attention 4 x 96^2, an FFN with biases 2 x 96^2: PyTorch's has as many products."""
    command = f"{sys.executable} -c \"print('tiny smoe s per step: 0.60 tokens per s: 6800')\""
    assert Baseline(command, lm.LINES).run() == {"tiny smoe": (0.6, 6800)}
    ours = {
        ("tiny", kind): {"seconds_per_step": seconds, "floor_seconds": 0.1}
        for kind, seconds in (("smoe", 0.25), ("smoe, shared", 0.2))
    }
    assert lm.beside("tiny smoe", 0.5, 6400.0, ours) == {
        **{"shape": "tiny", "kind": "baseline smoe", "seconds_per_step": 0.5, "tokens_per_second": 6400},
        **{"floor_seconds": 0.1, "mfu": 0.2, "ours_over_baseline": 0.5, "shared_over_baseline": 0.4},
    }
    assert "mfu" not in lm.beside("tiny rnn", 0.5, 6400.0, ours)
    with pytest.raises(UserError, match="expected lines `SHAPE KIND s per step"):
        Baseline(f"{sys.executable} -c 1", lm.LINES).run()
    dense, sparse = (lm.config_of("default", kind) for kind in ("dense", "smoe"))
    length, dim = 256, 96
    attention, ffn = 2 * dim * (2 * length * dim + length**2), 2 * dim**2 * length
    assert flops_of_decoder_row(dense) == 6 * (3 * (attention + ffn) + length * dim * 30)
    # Experts with biases, two of them, and the router.
    more = flops_of_decoder_row(sparse) - flops_of_decoder_row(dense)
    assert more == 6 * 3 * length * (2 * dim**2 + 4 * dim + 16 * dim)
    # Its twin has as many, but for less than half a hidden unit a layer.
    twin = flops_of_decoder_row(lm.config_of("default", "twin")) - flops_of_decoder_row(dense)
    assert abs(twin - more) <= 6 * 3 * length * dim


def test_a_counted_table_leaves_the_noise_of_its_router_alone(tmp_path):
    config = settings(
        **{
            "router.name": "hash_id",
            "router.experts_per_id": 2,
            "router.noise": "learned",
            "router.noise_in_weights": True,
            "data.cache": str(tmp_path),
        }
    )
    table, problem = jnp.arange(60.0).reshape(30, 2), problem_of(config).build(config, 0, None)
    inputs = program.Inputs(
        program.streams(0, config),
        node_of(config),
        (),
        {"validation": rows(), "table": {"decoder": {"routers_0": table}}},
    )
    router = jax.jit(lambda: problem.init(inputs)[0]["router"]["decoder"])()
    assert (router["router"]["table"] == table[None]).all() and router["noise"]["kernel"].shape == (2, 8, 4)


def test_a_shared_expert_computes_every_token_too():
    config = settings(**{"transformer.shared_expert": True, "selection.k": 1, "selection.renormalise": False})
    assert experts_of_token(config) == 2
    assert flops_of_decoder_row(config) == flops_of_decoder_row(config, 1)  # which counts it by itself


@pytest.mark.parametrize("flops", [flops_of_decoder_row, flops_per_row, flops_of_classifier_row])
def test_flops_of_large_models_whose_experts_go_by_steps(flops):
    """Attention of 8 layers: 8 x 2 x 1024 x (1024 x 2 x 512 + 512 x 512) = 2 x 10^10 products a row; no int32."""
    large = {"dim": 1024, "heads": 16, "head_dim": 64, "width": 4096, "layers": 8, "sparse_layers": 8}
    config = settings(
        **{f"transformer.{name}": size for name, size in large.items()},
        **{"data.input_length": 512, "data.vocabulary": 40_000},
    )
    for changes in (
        {},
        {
            "transformer.dim": 4096,
            "transformer.width": 16384,
            "transformer.layers": 32,
            "transformer.sparse_layers": 16,
        },
    ):
        config = override(config, changes)  # dense layers: 16 x 2 x 4096 x 16384 = 2^31
        assert float(jax.jit(partial(flops, config))(jnp.float32(3))) == pytest.approx(flops(config, 3))
    assert flops(config, 3) > 8 * 6 * 2**31


# --- text ---


def toy(train, validation, test=()):
    def flat(numbers):
        return (np.lib.stride_tricks.sliding_window_view(np.array(numbers, np.uint16), 3)[::2],)

    return Corpus(("a",), flat(train), flat(validation), 40, "", tokenizers.CHARACTERS, flat(test) if test else ())


def test_rows_are_contiguous_and_overlap_by_what_is_read_first():
    config = settings(**{"data.input_length": 2, "data.eval_rows": 9})
    held = [
        b.inputs.tolist() for b in stream.held_out(stream.CONTINUED, toy(range(9), range(9), range(20, 29)), config)
    ]
    assert held == [[[0, 1], [2, 3], [4, 5], [6, 7]], [[20, 21], [22, 23], [24, 25], [26, 27]]]
    validation, tested = stream.held_out(stream.CONTINUED, toy(range(9), range(9)), config)
    assert validation.targets.tolist() == [[1, 2], [5, 6]] and tested.targets.tolist() == [[3, 4], [7, 8]]
    with pytest.raises(UserError, match="validation text of a is a single row"):
        stream.held_out(stream.CONTINUED, toy(range(9), range(3)), config)


def test_an_epoch_has_every_row_once():
    config = settings(**{"data.input_length": 2, "batch_size": 2})
    make = stream.batch_function(stream.CONTINUED, toy(range(9), range(9)), config, 0, slice(None))
    seen = np.concatenate([make(step).inputs for step in range(2)])
    assert sorted(seen.tolist()) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_letters_are_those_of_text8():
    assert tokenizers.letters("Über 12 Äpfel,\n don't! ") == "uber one two apfel don t "
    (ids,) = tokenizers.encode(tokenizers.CHARACTERS, ["A z"])
    assert ids.tolist() == [4, 3, 29, 3] and tokenizers.decode(tokenizers.CHARACTERS, ids) == "a z "
    assert tokenizers.letters("数字") == " "


def test_ngram_by_hand():
    """Text 0 1 0 1 1, vocabulary 2; asked: 0 -> 1, then 1 -> 0.

    Single tokens: n = (2, 3), 2 kinds: p = ((2 + 2 / 2) / 7, (3 + 1) / 7) = (3/7, 4/7). After 0: 1 twice, one kind: (2
    + 4/7) / 3 = 6/7. After 1: 0 once and 1 once, two kinds: (1 + 2 x 3/7) / 4 = 13/28. After 0 1: the same two, (1 + 2
    x 13/28) / 4 = 27/56.
    """
    text_of = [np.array([0, 1, 0, 1, 1])]
    asked = np.array([[0, 1]]), np.array([[1, 0]])
    for order, second in ((1, 3 / 7), (2, 13 / 28), (3, 27 / 56), (5, 27 / 56)):
        first = 4 / 7 if order == 1 else 6 / 7
        expected = -(np.log(first) + np.log(second)) / 2
        assert ngram.ngram_loss(text_of, *asked, vocabulary=2, order=order) == pytest.approx(expected), order


@pytest.mark.parametrize("vocabulary", [3, 10**4, 10**6, 2**31])
def test_ngrams_of_any_vocabulary(vocabulary):
    """Five of 10,000 ids are no 63-bit number, nor are three of 2^31: each p is that of counts by tuples of tokens."""
    random = np.random.default_rng(0)
    apart = (vocabulary - 1) // 2 * np.arange(3)  # three ids, the last of them the largest
    text, rows = apart[random.integers(0, 3, 60)], apart[random.integers(0, 3, (4, 8))]
    grams = [tuple(text[i : i + n]) for n in range(1, 6) for i in range(len(text) - n + 1)]

    def p(token, context):
        shorter = p(token, context[1:]) if context else 1 / vocabulary
        after = [gram for gram in grams if gram[:-1] == context]
        kinds = len(set(after))
        return (after.count((*context, token)) + kinds * shorter) / (len(after) + kinds) if after else shorter

    expected = [-np.log(p(row[i], tuple(row[max(0, i - 4) : i]))) for row in rows for i in range(1, 8)]
    loss = ngram.ngram_loss([text[:25], text[25:]], rows[:, :-1], rows[:, 1:], vocabulary)
    assert loss != pytest.approx(np.mean(expected))  # no gram goes across two texts
    assert ngram.ngram_loss([text], rows[:, :-1], rows[:, 1:], vocabulary) == pytest.approx(np.mean(expected))


def test_ngram_counts_all_parts_of_a_text_that_is_too_long(monkeypatch):
    """Four tokens of 0 0 0 0 1 1 1 1 in two pieces: 0 0 and 1 1, so p(1) = (2 + 2 / 2) / 6 = 1/2, not of 0 0 0 0."""
    monkeypatch.setattr(ngram, "COUNTED", 4)
    monkeypatch.setattr(ngram, "PIECES", 2)
    loss = ngram.ngram_loss([np.repeat([0, 1], 4)], np.array([[0]]), np.array([[1]]), vocabulary=2, order=1)
    assert loss == pytest.approx(np.log(2))


def test_the_test_is_taken_at_the_best_validation():
    history = {"eval/loss": np.array([3.0, 1.0, np.nan, 2.0]), "test/loss": np.log(np.array([8.0, 4.0, 1.0, 2.0]))}
    found = at_best(history)
    np.testing.assert_allclose(found["test/bits"], [3, 2, 2, 2])
    np.testing.assert_allclose(found["test/perplexity"], [8, 4, 4, 4])


def plain(folder, **texts):
    for name, content in texts.items():
        (folder / f"{name}.txt").write_bytes(content)
    files = {"data.name": "files", "data.directory": str(folder), "data.languages": ()}
    return settings(**files | {"data.cache": str(folder / "cache")})


def test_plain_files_by_split(tmp_path):
    config = plain(
        tmp_path, train=b"the cat sat on", valid=b"a mat, in 1 hat", test="d\u00e9j\u00e0 vu, he said".encode()
    )
    found = stream.CONTINUED.load(config.data)
    assert [len(one) for one in (found.train[0], found.validation[0], found.test[0])] == [1, 2, 1]
    assert tokenizers.decode(found.tokenizer, found.test[0][0]) == "deja vu h"
    (tmp_path / "test.txt").unlink()
    with pytest.raises(UserError, match=r"no test.txt in it; data.name=files reads train.txt, valid.txt, test.txt"):
        text.load(config.data)


@pytest.mark.parametrize(
    ("valid", "test", "told"),
    [
        (b"d e f g h ", b"i j k l m ", []),
        (b"a b c a c ", b"i j k l m ", [("valid", "train")]),  # a copy
        (b"a c ", b"i j k l m ", [("valid", "train")]),  # its tail
        (b"d e f g h ", b"d e ", [("test", "valid")]),  # its head
        (b"a b c a c c ", b"a b c a c ", [("train", "valid"), ("test", "train"), ("test", "valid")]),
        (b"a b a ", b"c a ", []),
    ],
)
def test_a_text_that_is_held_out_and_seen_is_told_of(valid, test, told, tmp_path, caplog):
    files.files(plain(tmp_path, train=b"a b c a c ", valid=valid, test=test).data)
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == len(told)
    assert all(
        f"all of {part}.txt is in {whole}.txt too" in one for one, (part, whole) in zip(found, told, strict=True)
    )


def test_a_file_of_another_encoding_is_named(tmp_path):
    config = plain(tmp_path, train=b"caf\xe9 " * 9, valid=b"a b" * 9, test=b"a b" * 9)
    with pytest.raises(UserError, match=r"train.txt is not UTF-8"):
        stream.CONTINUED.load(config.data)


def test_pieces_end_behind_a_space(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIECE", 4)
    (tmp_path / "train.txt").write_bytes("ab cdefgh i\u00e9\u00e9\u00e9".encode())
    assert list(files._pieces(tmp_path / "train.txt")) == ["ab ", "cdefgh ", "i\u00e9\u00e9\u00e9"]


# --- settings of published models ---


def test_a_shared_expert_is_in_every_sparse_layer():
    """It is the trunk's: one expert more a layer in FLOPs and weights; without its parameters the loss differs."""
    config, model, params, state = ready((("transformer.shared_expert", True),))
    plain = ready(())[2]
    moe = params["trunk"]["decoder"]["blocks"]["layer_0"]["moe"]
    assert set(moe) == {"shared"} and set(params["router"]["decoder"]) == {"router"}
    count = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))  # noqa: E731
    one = expert_weights(config)
    assert count(params) - count(plain) == 2 * one
    assert flops_of_decoder_row(config) - flops_of_decoder_row(settings()) == 6 * 8 * 2 * one  # 8 tokens, 2 layers
    twin = override(config, {"model": "decoder_active"})
    # Weights of a router 8 x 4, of 2 experts or 3 of 2 x 8 x 6 = 96, over those of a hidden unit of a gated FFN, 3 x 8.
    assert twin_width(override(settings(), {"model": "decoder_active"})) == round((32 + 2 * 96) / 24)
    assert twin_width(twin) == round((32 + 3 * 96) / 24)
    run = jax.jit(
        lambda params: model.apply(params, state, rows(), selection_rule(config.selection), "dense").prediction
    )
    without = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.zeros_like(leaf) if "shared" in jax.tree_util.keystr(path) else leaf, params
    )
    assert (run(params) != run(without)).any()


@pytest.mark.slow
def test_the_balance_loss_may_be_of_all_layers_together():
    """Against the pooled loss of the two layers' own probabilities and loads; other losses stay means over layers."""
    config, model, params, state = ready(())
    asked = override(config, {"losses.balance": 0.5, "losses.z": 0.1, "losses.balance_scope": "layers"})
    problem = problem_of(asked).build(asked, 0, None)
    outputs = jax.jit(lambda: model.apply(params, state, rows(), selection_rule(config.selection), "dense"))()
    routing = outputs.sites["decoder"].routing
    load = jnp.stack([load_of(jax.tree.map(lambda a, i=i: a[i], routing))[0] for i in range(2)])
    expected = 0.5 * balance_pooled(jax.nn.softmax(routing.scores), load)
    z = (jax.nn.logsumexp(routing.scores, axis=-1) ** 2).mean()

    def of(frozen=False, **changes):
        node = node_of(override(asked, changes), {"router.frozen": jnp.array(frozen)})
        total, _ = objective._auxiliary(problem, node, outputs.sites, params, 0, {}, jnp.array(frozen))
        return float(total)

    assert of() == pytest.approx(float(expected + 0.1 * z), rel=1e-5)
    assert abs(of(**{"losses.balance_scope": "batch"}) - of()) > 1e-4
    assert of(frozen=True) == 0


@pytest.mark.slow
def test_the_parts_of_the_bench_have_the_products_of_a_step(monkeypatch):
    """All products but those of causality's hidden half: 3 passes x 3 layers x 2 x 2 x 4 rows x 16 x 16 / 2 x 8."""
    monkeypatch.setitem(lm.SHAPES, "least", lm._shape(8, 2, 16, 4, 30))
    training = lm.training_of("least", "smoe")
    listed = {name: part for name, part in parts.parts_of(training).items() if not name.startswith("of it")}
    assert training.flops - sum(part.times * part.work.flops for part in listed.values()) == 147_456
    monkeypatch.setattr(lm, "training_of", lambda *_: training)
    monkeypatch.setattr(parts, "parts_of", lambda _: dict([*listed.items()][-2:]))
    record, *_ = parts.bench(1, "least smoe")
    assert record["part"] == "step" and 0 < record["ms"] < 1e3
