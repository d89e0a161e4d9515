"""How good is a decoder's choice of experts, and how many experts does its text need?

Question. `routed trace surgery` asks released models; here are the decoders of token_router, over seeds and routers.

    routed run --config=token_choices:smoke
    routed run --config=token_choices --config.data.directory=DIR    # as token_router

Losses are of the test rows, in nats a token. Experts are counted, and routers repaired, on the validation rows.

Kept experts: every sparse layer keeps a share of its experts, and its router chooses among them. The kept experts are
those that the validation text chooses most often, random ones, or those that a router with weights N(0, 1) chooses most
often on the same features (means of three draws).

Regret: in one layer one token gets other experts, with the weights of its chosen ones. Its regret is the loss of its
own next token, minus the least loss of all choices that are tried: all ordered sets of k experts if there are at most
`MOST`, else all exchanges of one chosen expert. Other routers choose for this token alone. A repair trains the router
of one layer once on the validation rows: Adam with the loss of the text, `REPAIR` standard deviations a step, falling.

Expected: the most chosen experts lose less than random ones; the learned router's regret is below that of random
choices, and within .02 nats of that of a table by token id.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray, Scalar
from ml_collections import ConfigDict

import routed.papers.ours  # noqa: F401 (parts of our own questions)
from routed.analysis import statistics
from routed.analysis.claims import Claim
from routed.analysis.plots import PLOTS, Axis, Chart, Data, Panel, Plot, Point, Series
from routed.analysis.plots.frame import COLOURS, arms_of, seeds_of, series_of
from routed.analysis.plots.scales import set_value_axes
from routed.contracts import AT_LEAST_0, Column
from routed.layer.moe import CONTROL
from routed.layer.rule import selection_rule
from routed.layer.selection import SELECTIONS
from routed.metrics.router import chosen
from routed.models.decoder import DECODERS
from routed.models.language_model import path_of
from routed.models.model import Outputs
from routed.plan import Figure, experiment, make_config
from routed.plan.arms import ARMS
from routed.settings.setting import COUNT, Setting, refuse
from routed.training.probes import PROBES, Evaluation, Probe
from routed.training.text_problem import TextProblem, in_blocks, target_logits

tokens = experiment.load("token_router")

#: A decoder whose evaluations measure other choices too.
MODEL, STACK = "decoder_choices", "decoder"


def check(config: ConfigDict) -> None:
    """Refuses selections by which a token has not k experts: there is no other choice of k to try."""
    DECODERS["decoder"].check(config)
    name = selection_rule(config.selection, evaluation=True).name
    if "k" not in SELECTIONS[name].reads or SELECTIONS[name].forward is not None:
        refuse("selection.eval.name", name, f"{MODEL} tries other choices of k experts; use top_k")


DECODERS[MODEL] = DECODERS["decoder"]._replace(
    settings={"regret_tokens": Setting(64, "test tokens that try other experts in each sparse layer", COUNT)},
    check=check,
)
#: Shares of the experts that are kept, by the end of their columns' names.
SHARES = {"12": 0.125, "25": 0.25, "50": 0.5}
#: Ways to choose the kept experts, by their columns' names.
WAYS = {"most": "the most chosen", "chance": "random", "untrained": "an untrained router's"}
#: Draws of random experts and of untrained routers; random choices of a token; hashes of its id.
DRAWS, RANDOM, HASHES = 3, 8, 3
#: Ordered sets of experts up to which a token tries them all.
MOST = 256
#: Added to the score of an expert that must not be chosen.
DROPPED = -1e9
#: Factor on the scores of the sharpened router; steps of a repair, in standard deviations of the weights.
SHARPENED, REPAIR = 2.0, 0.02
#: Routers whose regret is measured, by the end of their columns' names.
ROUTERS = {
    "": "the router", "_table": "a table by token id", "_hash": "a hash of the token id", "_random": "random choices",
    "_sharpened": "the router, sharpened", "_repaired": "the router, repaired",
}  # fmt: skip
#: Nats.
MARGIN = 0.02


class Sample(NamedTuple):
    """Sampled tokens of a block, one a row: their positions in the block, ids, scores [S, B, E], experts [S, B, k]."""

    block: Any
    position: Int[Array, " B"]
    ids: Int[Array, " B"]
    scores: Float[Array, "S B E"]
    experts: Int[Array, "S B k"]
    loss: Float[Array, " B"]


def run(evaluation: Evaluation, block: Any, params: Any = None, **control: Array) -> Outputs:
    """Applies the model as evaluations do; `control` are variables of the sparse layers, [S, ...]."""
    problem, state = evaluation.problem, evaluation.state
    if control:
        nested: Any = control
        for name in reversed(path_of(problem.config, STACK)):
            nested = {name: nested}
        state = state | {CONTROL: nested}
    rule, dispatch = problem.evaluation_rule()
    given = evaluation.params if params is None else params
    return problem.model.apply(given, state, block, rule, dispatch, step=evaluation.step)


def loss_on(evaluation: Evaluation, rows: Any, params: Any = None, **control: Array) -> Scalar:
    """Returns the mean loss of blocks of rows in nats a token."""
    problem, config = evaluation.problem, evaluation.inputs.config
    return jax.lax.map(lambda b: problem.task_loss(config, run(evaluation, b, params, **control), b)[1], rows).mean()


def count(evaluation: Evaluation, rows: Any, key: PRNGKeyArray) -> tuple[Float[Array, "S V E"], Float[Array, "R S E"]]:
    """Counts the choices by token id on blocks of rows, and those of untrained routers on the same features."""
    config = evaluation.problem.config
    shape = config.transformer.sparse_layers, config.data.vocabulary, config.experts.count
    kernels = jax.random.normal(key, (DRAWS, shape[0], config.transformer.dim, shape[2]))

    def add(sums, block):
        site = run(evaluation, block).sites[STACK]
        experts = jax.vmap(chosen)(site.routing)
        hits = jax.nn.one_hot(experts, shape[2]).sum(2)
        drawn = jax.lax.top_k(jnp.einsum("std,rsde->rste", site.features, kernels), experts.shape[-1])[1]
        by_id = sums[0].at[:, block.inputs.reshape(-1)].add(hits)
        return (by_id, sums[1] + jax.nn.one_hot(drawn, shape[2]).sum((2, 3))), None

    return jax.lax.scan(add, (jnp.zeros(shape), jnp.zeros((DRAWS, shape[0], shape[2]))), rows)[0]


def kept(counts: Float[Array, "... E"], share: float) -> Float[Array, "... E"]:
    """Returns what to add to scores so that a share of the experts is kept, those with the largest counts."""
    experts = counts.shape[-1]
    rank = jnp.argsort(jnp.argsort(-counts, axis=-1), axis=-1)
    return jnp.where(rank < max(1, round(share * experts)), 0.0, DROPPED)


def repaired(evaluation: Evaluation, rows: Any, layer: Array) -> Any:
    """Returns the parameters with the router of one layer trained once more on blocks of rows, and all else fixed.

    Adam with the loss of the text alone; its steps are `REPAIR` standard deviations of each parameter, and fall to 0.
    """
    problem, config, params = evaluation.problem, evaluation.inputs.config, evaluation.params
    routers = params["router"][STACK]
    size = jax.tree.map(lambda a: REPAIR * a[layer].std(), routers)
    adam = optax.scale_by_adam()
    last = len(jax.tree.leaves(rows)[0])

    def with_router(router: Any) -> Any:
        stacked = jax.tree.map(lambda a, b: a.at[layer].set(b), routers, router)
        return params | {"router": params["router"] | {STACK: stacked}}

    def step(now, given):
        block, number = given

        def loss(router: Any) -> Scalar:
            return problem.task_loss(config, run(evaluation, block, with_router(router)), block)[1]

        updates, moments = adam.update(jax.grad(loss)(now[0]), now[1])
        rate = 1 - number / last
        return (jax.tree.map(lambda a, u, s: a - rate * s * u, now[0], updates, size), moments), None

    start = jax.tree.map(lambda a: a[layer], routers)
    (router, _), _ = jax.lax.scan(step, (start, adam.init(start)), (rows, jnp.arange(last)))
    return with_router(router)


def order(experts: Int[Array, "... k"], count: int) -> Int[Array, "... E"]:
    """Returns all experts, first those of a choice in its order, then the others by their numbers."""

    def of_token(chosen: Int[Array, " k"]) -> Int[Array, " E"]:
        same = chosen[None] == jnp.arange(count)[:, None]
        return jnp.argsort(jnp.where(same.any(1), same.argmax(1), len(chosen) + jnp.arange(count)))

    return jnp.vectorize(of_token, signature="(k)->(e)")(experts)


def tries(experts: Int[Array, "B k"], count: int) -> Int[Array, "B A k"]:
    """Returns the choices of k experts that tokens try instead of their own: all, or all exchanges of one expert."""
    k = experts.shape[1]
    if math.perm(count, k) <= MOST:
        sets = np.array([*itertools.permutations(range(count), k)])
        return jnp.broadcast_to(sets, (len(experts), *sets.shape))
    rest = order(experts, count)[:, k:]
    slots, numbers = np.divmod(np.arange(k * (count - k)), count - k)
    exchanged = jnp.repeat(experts[:, None], len(slots), 1)
    return exchanged.at[:, np.arange(len(slots)), slots].set(rest[:, numbers])


def swapped(scores: Float[Array, "B E"], experts: Int[Array, "B k"], tried: Int[Array, "B A k"]) -> dict[str, Array]:
    """Returns the control [B, A, E] under which tokens choose other experts with the weights of the chosen ones.

    The i-th other expert gets the score of the i-th chosen expert, and the rest of the experts the rest of the scores.
    """
    count = scores.shape[-1]
    ranked = jnp.take_along_axis(scores, order(experts, count), -1)[:, None]
    ranks = jnp.argsort(order(tried, count), axis=-1)
    given = jnp.take_along_axis(jnp.broadcast_to(ranked, ranks.shape), ranks, -1)
    return {"offset": given - scores[:, None], "choice": jnp.where(ranks < experts.shape[1], 0.0, DROPPED)}


def losses_with(evaluation: Evaluation, tokens: Sample, layer: Array, control: dict[str, Array]) -> Float[Array, "B A"]:
    """Returns the losses of the tokens with a control [B, A, E] of their scores in one layer."""
    layers, size = tokens.scores.shape[0], tokens.block.inputs.size

    def loss(given: dict[str, Array]) -> Array:
        whole = {
            name: jnp.zeros((layers, size, some.shape[-1])).at[layer, tokens.position].set(some)
            for name, some in given.items()
        }
        return nats(run(evaluation, tokens.block, **whole).prediction, tokens.block, tokens.position)

    return jax.lax.map(loss, jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), control)).T


def nats(logits: Float[Array, "B L V"], block: Any, position: Int[Array, " B"]) -> Float[Array, " B"]:
    """Returns the losses of the next tokens at these positions of a block."""
    return (jax.nn.logsumexp(logits, axis=-1) - target_logits(logits, block.targets)).reshape(-1)[position]


def sample(evaluation: Evaluation, block: Any, key: PRNGKeyArray) -> Sample:
    """Draws one token of each row of a block, with its scores and experts in every layer."""
    rows, length = block.inputs.shape
    position = jnp.arange(rows) * length + jax.random.randint(key, (rows,), 1, length)
    outputs = run(evaluation, block)
    routing = outputs.sites[STACK].routing
    scores, experts = routing.scores[:, position], jax.vmap(chosen)(routing)[:, position]
    ranks = jnp.argsort(-jnp.take_along_axis(scores, experts, -1), axis=-1)
    experts = jnp.take_along_axis(experts, ranks, -1)
    ids, loss = block.inputs.reshape(-1)[position], nats(outputs.prediction, block, position)
    return Sample(block, position, ids, scores, experts, loss)


def regret_in(
    evaluation: Evaluation, tokens: Sample, layer: Array, by_id: Float[Array, "V E"], params: Any, key: PRNGKeyArray
) -> dict[str, Scalar]:
    """Returns the mean regrets of a layer's router and of others on sampled tokens; `params` have a repaired router."""
    scores, experts = tokens.scores[layer], tokens.experts[layer]
    (batch, k), (vocabulary, total) = experts.shape, by_id.shape
    keys = jax.random.split(key)
    some = tries(experts, total)
    by_chance = jnp.argsort(jax.random.uniform(keys[0], (batch, RANDOM, total)))[..., :k]
    table = jax.lax.top_k(by_id + by_id.sum(0, keepdims=True) / jnp.maximum(by_id.sum(), 1), k)[1][tokens.ids][:, None]
    hashes = jnp.argsort(jax.random.uniform(keys[1], (vocabulary, HASHES, total)))[..., :k][tokens.ids]
    forced = losses_with(
        evaluation, tokens, layer, swapped(scores, experts, jnp.concatenate([some, by_chance, table, hashes], 1))
    )
    _, *parts = jnp.split(forced, np.cumsum([some.shape[1], RANDOM, 1]).tolist(), axis=1)
    new = run(evaluation, tokens.block, params).sites[STACK].routing.scores[layer, tokens.position]
    free = jnp.stack([SHARPENED * scores, new], 1) - scores[:, None]
    sharpened, after = losses_with(evaluation, tokens, layer, {"offset": free, "choice": jnp.zeros_like(free)}).T
    losses = {"": tokens.loss, "_sharpened": sharpened, "_repaired": after}
    least = jnp.minimum(forced.min(1), jnp.stack([*losses.values()]).min(0))
    losses |= {name: part.mean(1) for name, part in zip(("_random", "_table", "_hash"), parts, strict=True)}
    return {f"regret{name}": (value - least).mean() for name, value in losses.items()}


def evaluate(evaluation: Evaluation) -> dict[str, Array]:
    """Returns the losses with kept experts, and the regrets of every layer."""
    problem, shared = evaluation.problem, evaluation.inputs.shared
    config = problem.config
    other, test = (in_blocks(config, shared[name], name) for name in ("validation", "test"))
    keys = jax.random.split(jax.random.fold_in(evaluation.inputs.keys["noise"], 2**28), 4)
    by_id, untrained = count(evaluation, other, keys[0])
    by_chance = jax.random.uniform(keys[1], untrained.shape)
    every = jnp.concatenate([by_id.sum(1)[None], by_chance, untrained])
    offsets = jnp.stack([kept(every, share) for share in SHARES.values()])
    losses = jax.lax.map(
        lambda offset: loss_on(evaluation, test, offset=offset[:, None]), offsets.reshape(-1, *every.shape[1:])
    )
    lost = losses.reshape(len(SHARES), -1) - loss_on(evaluation, test)
    ways = {"most": lost[:, 0], "chance": lost[:, 1 : 1 + DRAWS].mean(1), "untrained": lost[:, 1 + DRAWS :].mean(1)}
    metrics = {f"test/kept_{way}{end}": row[i] for way, row in ways.items() for i, end in enumerate(SHARES)}

    last = len(shared["test"].inputs) - 1
    numbers = np.linspace(0, last, min(config.regret_tokens, last + 1)).round().astype(int)
    rows = in_blocks(config, jax.tree.map(lambda a: a[numbers], shared["test"]), "test")

    def of_layer(layer: Array) -> dict[str, Array]:
        params = repaired(evaluation, other, layer)

        def of_block(given: Any) -> dict[str, Array]:
            block, number = given
            drawn = sample(evaluation, block, jax.random.fold_in(keys[2], number))
            return regret_in(evaluation, drawn, layer, by_id[layer], params, jax.random.fold_in(keys[3], number))

        means = jax.lax.map(of_block, (rows, jnp.arange(len(rows.inputs))))
        return jax.tree.map(lambda a: a.mean(0), means)

    regrets = jax.lax.map(of_layer, jnp.arange(config.transformer.sparse_layers))
    return metrics | {f"{STACK}/{name}": values for name, values in regrets.items()}


PROBES["choices"] = Probe(
    TextProblem,
    applies=lambda problem: problem.config.model == MODEL,
    evaluate=evaluate,
    columns={
        f"test/kept_{way}{end}": Column(
            f"nats lost with {share:.1%} of the experts:\n{label}",
            f"Test loss if every sparse layer keeps {share:.1%} of its experts ({label}), minus that with all.",
        )
        for way, label in WAYS.items()
        for end, share in SHARES.items()
    }
    | {
        f"router/regret{name}": Column(
            f"regret (nats): {label}",
            f"Mean loss of test tokens whose experts in one layer are chosen by {label}, minus the least loss of all"
            " choices that are tried.",
            AT_LEAST_0,
        )
        for name, label in ROUTERS.items()
    },
)


def draw(spec: dict[str, Any], data: Data) -> Chart | None:
    """Returns a panel of kept experts for each arm, and a panel of the regrets of all arms."""
    rows = data.at_point(data.last, spec)
    rows = rows[(rows.status == "ok") & rows["router/regret"].notna()] if "router/regret" in rows else rows[:0]
    arms = arms_of(spec, rows)
    if not arms:
        return None

    def point(arm: str, column: str, position: float) -> Point:
        of_arm = rows[rows.arm == arm]
        return Point(position, statistics.estimate(of_arm[column]), seeds=seeds_of(of_arm, column))

    panels = []
    for arm in arms:
        x = Axis(
            "share of the experts that is kept", (0.1, 0.62), True, {share: f"{share:.3g}" for share in SHARES.values()}
        )
        panel = Panel(x, Axis(), ARMS[arm].label)
        for (way, label), colour in zip(WAYS.items(), COLOURS, strict=False):
            points = [point(arm, f"test/kept_{way}{end}", share) for end, share in SHARES.items()]
            panel.means(Series(f"kept: {label}", colour, "triangle-up"), points, joined=True)
        panel.rule("y", 0)
        panels.append(panel)
    chart = Chart(panels, columns=3)
    set_value_axes(chart, panels, Column(""), "nats lost, test loss")
    lines = Axis("", (-0.5, len(ROUTERS) - 0.5), ticks=dict(enumerate(ROUTERS.values())), reverse=True, all_labels=True)
    regrets = Panel(Axis(), lines, "regret of a choice in one layer", horizontal=True, width=300, height=230)
    for number, arm in enumerate(arms):
        shift = 0.18 * (number - (len(arms) - 1) / 2)
        points = [point(arm, f"router/regret{end}", line + shift) for line, end in enumerate(ROUTERS)]
        regrets.means(series_of(arm), points)
    set_value_axes(chart, [regrets], Column(""), "nats above the best choice, mean over layers")
    chart.panels.append(regrets)
    return chart


PLOTS["choices"] = Plot(
    draw,
    "Means over seeds with 95 % t intervals. First: the test loss with a share of each layer's experts, minus the test"
    " loss with all. Last: the loss of a token whose experts in one layer are chosen in this way, minus the least loss"
    " of all choices that are tried.",
    optional={"arms": "arms that are drawn"},
)


def claim(config: ConfigDict) -> Iterator[Claim]:
    """Returns claims about kept experts and regrets, within the learned arm's runs and against the frozen router."""
    write = tokens.writer(config)._replace(prefix="routed.choices.")
    side = lambda metric, arm="learned": {"arm": arm, "metric": metric}  # noqa: E731
    regret = side("router/regret")
    yield write.order("kept", "25 % kept: the most chosen experts lose less than random ones", "not asked",
                      side("test/kept_most25"), side("test/kept_chance25"))  # fmt: skip
    yield write.order("random", "the learned router has less regret than random choices", "not asked", regret,
                      side("router/regret_random"))  # fmt: skip
    yield write.null("table", f"the regrets of the learned router and of a table differ by less than {MARGIN} nats",
                     "not asked", regret, side("router/regret_table"))  # fmt: skip
    yield write.order("frozen", "a learned router has less regret than a frozen one", "not asked", regret,
                      side("router/regret", "frozen"))  # fmt: skip


FIGURES = {
    "": Figure(
        "fewer experts, and other experts for one token",
        tokens.FEW | {"arms": ("learned", "frozen", "hash_token"), "model": MODEL},
        claims=lambda config: tuple(claim(config)),
        plots=lambda config: ({"kind": "choices", "name": "choices"}, tokens.PAIRED),
    )
}


def measured_at_the_ends(changes: dict[str, Any]) -> dict[str, Any]:
    """Returns the changes of a scale with evaluations before and after training alone."""
    return changes | {"eval_every": changes.get("steps", tokens.PROTOCOL["steps"])}


SCALES = {name: lambda config, of=of: measured_at_the_ends(of(config)) for name, of in tokens.SCALES.items()}


def get_config(arg: str | None = None) -> Any:
    """Returns the config of FIGURE[,SCALE]."""
    return make_config("token_choices", arg, FIGURES, tokens.PROTOCOL, SCALES)
