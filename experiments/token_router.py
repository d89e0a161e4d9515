"""Does learning to route pay on tokens, and how little learning is enough?

On Gaussian clusters a frozen router with k-means centres is a strong control; DeepSeek-V4 hashes the token id in its
first three sparse layers. Here a decoder with four sparse layers trains on text with routers that learn, hash, cluster,
stay random, or are absent. Data, experts and initial weights are the same.

    routed run --config=token_router --config.data.directory=DIR            # eight ways to route, paired by seed
    routed run --config=token_router:layers --config.data.directory=DIR     # a hash in the first or last n layers
    routed run --config=token_router:settles --config.data.directory=DIR    # the router frozen early
    routed run --config=token_router:tables --config.data.directory=DIR     # the hash with other tables
    routed run --config=token_router:kmeans --config.data.directory=DIR     # k-means fitted later, and as sharp
    routed run --config=token_router:balance --config.data.directory=DIR    # what balance costs
    routed run --config=token_router:grow --config.data.directory=DIR       # against experts, tokens (:finer: k)
    routed run --config=token_router:testbed        # balancing on text of separable domains: method, scope, capacity
    routed run --config=token_router:setting --config.data.directory=DIR    # how the setting was found

DIR holds train.txt, valid.txt and test.txt, as text8 is laid out.

Rules, fixed before any evaluation seed of the headline ran:
  setting   the steps are the fewest of `setting`'s one seed (9100) at which (a) every sparse arm beats an interpolated
            5-gram of the training text, (b) the learned router beats the dense twin of equal FLOPs by .05 nats, and (c)
            two ways to route differ by .02 nats. Found: 8,000 of 12,000 steps: there a hash has 1.485 nats, learned
            1.518, frozen 1.527, the 5-gram 1.537, the dense twin 1.603.
  balance   every sparse arm has the same balancing bias; a hash does not heed it, wide scores of k-means hardly.
  rates     each arm has its own best of three factors on all rates and, where a router has parameters that learn,
            three on the router's rate: the lowest validation loss of a seed that no figure evaluates, in a quarter of
            the steps, as 30 tuning runs of all steps would be a third of the work.
  margin    .02 nats; where a hash replaces layers, .01. Equal steps are equal FLOPs but for a router's product, 4 %.
  gate      no verdict on a claim unless both arms beat the 5-gram (a slope: at its largest number; a rank: never).
  text      8 % of the test rows that ran stand word for word in the training text (signatures of letters).
  layers    the order of losses is predicted from what a hash adds (`KNOWN`), the best first: first 4, last 3, first 3,
            last 2, first 2, last 1, first 1, none. Supported by a rank correlation whose interval is above .5.
  seeds     9100 explores; 9400 to 9407 are the headline's, 9500 to 9503 those of kmeans, 9200 to 9203 those of the
            other figures (at shared rates; token_choices.py ran learned, frozen, hash before).

Expected (before any run): hash, learned and k-means within .05 nats of each other, frozen .02 behind, the dense twin
last; a hash in the first two layers costs less than .01; a router frozen at a tenth of the steps is as good as one that
learns on. Each further table of the hash is ahead (table 0 was seen). K-means fitted at a quarter, as sharp, is within
.01 of learning. Found on the testbed: the learned router misses the dialects (.04 of 2.08 nats; their oracle is .114
ahead); balancing gains .017, capacity 1.25 costs .03 to .08.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from jaxtyping import Float
from ml_collections import ConfigDict
from scipy.stats import rankdata

import routed.papers.ours  # noqa: F401 (parts of our own questions)
from routed.analysis import digits, statistics
from routed.analysis.claims import KINDS, LEARNED, Claim, Reading, Side, Stakes, TwoSides, Writer, comparability
from routed.analysis.claims.preconditions import obstacle
from routed.analysis.claims.rules import ONE_SEED, UNKNOWN_TAIL, effect_text, inconclusive, verdict_of, verdict_within
from routed.analysis.paired_values import Rows, ends
from routed.analysis.plots import PLOTS, Axis, Chart, Data, Panel, Plot, Series
from routed.analysis.plots import Point as Mark
from routed.analysis.plots.scales import set_value_axes
from routed.contracts import SHARE, Column
from routed.papers.draws import SEEDS, all_then_resampled, estimate_of_draws, p_beyond
from routed.plan import Figure, Point, make_config, product
from routed.plan.arms import ARMS, REFERENCE
from routed.plan.experiment import Scales

#: The ways to route; the first is the reference.
WAYS = (
    "learned", "hash_token", "kmeans_fitted", "kmeans_online", "self_routed", "frozen", "frozen_as_sharp",
    "decoder_active",
)  # fmt: skip
#: Learned routers and their controls with parameters.
PAIR = ("learned", "frozen")

_SELECTION = {"name": "top_k", "k": 2, "renormalise": True}

# The decoder of competition_lm with a layer more, twice the experts, and a balancing bias.
PROTOCOL = {
    "arms": WAYS, "seed": 9200, "seeds": 8, "model": "decoder",
    "data.name": "files", "data.tokens": "characters", "data.vocabulary": 30, "data.input_length": 128,
    "data.eval_rows": 1024, "router.vocabulary": 30, "router.experts_per_id": 2,
    "transformer.layers": 4, "transformer.sparse_layers": 4, "transformer.dim": 64, "transformer.heads": 4,
    "transformer.head_dim": 16, "transformer.ffn": "ffn", "transformer.width": 64,
    "experts.name": "mlp", "experts.depth": 2, "experts.width": 64, "experts.count": 32, "dispatch": "auto",
    **{f"selection.{node}{key}": value for node in ("", "eval.") for key, value in _SELECTION.items()},
    "selection.balance_rate": 1e-2, "optimizer.name": "adam", "optimizer.schedule": "linear", "optimizer.warmup": 200,
    "router.learning_rate": 9e-3, "experts.learning_rate": 9e-3, "transformer.learning_rate": 9e-3,
    "rates": "tuned", "tune.multipliers": (1 / 3, 1.0, 3.0), "tune.router_multipliers": (0.3, 1.0, 3.0),
    "tune.steps": 2000, "batch_size": 8, "steps": 8000, "eval_every": 2000, "checkpoint.every": 500,
    "mesh.runs_per_batch": 2,  # on two cores: one each
}  # fmt: skip

#: Of every figure but the headline: fewer seeds, and the rates that are the best for plain top-2 in competition_lm.
FEW = {"seeds": 4, "rates": "paper"}

SCALES: Scales = {
    "smoke": lambda config: {
        "data.name": "artificial", "data.languages": ("qaa",), "data.input_length": 16, "data.eval_rows": 16,
        "batch_size": 4, "transformer.dim": 8, "transformer.head_dim": 4, "transformer.heads": 2,
        "transformer.width": 8, "experts.count": 4, "experts.width": 8, "steps": 20, "eval_every": 10,
        "checkpoint.every": 5 if config.checkpoint.every else 0, "seeds": 2, "mesh.runs_per_batch": 4,
        "rates": "paper",
    },
    "default": lambda config: {},
    "gpu": lambda config: {
        "transformer.layers": 8, "transformer.sparse_layers": 8, "transformer.dim": 256, "transformer.heads": 8,
        "transformer.head_dim": 32, "transformer.width": 256, "experts.width": 256, "data.input_length": 512,
        "batch_size": 48, "steps": 20000, "tune.steps": 5000, "eval_every": 2500, "transformer.dtype": "bfloat16",
        "router.learning_rate": 1e-3, "experts.learning_rate": 1e-3, "transformer.learning_rate": 1e-3,
        "optimizer.warmup": 1000,
    },
}  # fmt: skip

#: Nats.
MARGIN = 0.02
LAYERS_MARGIN = 0.01


def writer(config: ConfigDict, at: Point | None = None, effect: float = MARGIN) -> Writer:
    """Returns a writer of claims about the last test loss, in nats."""
    return Writer(comparability(config), "test/loss", at or {}, "difference", "routed.tokens.", effect=effect)


def ends_of(rows: Rows, side: Side, at: Mapping[str, Any], claim: Claim) -> pd.DataFrame:
    """Returns the claim's metric of a side at a point by seed: the last value, `now`, and the extrapolated, `later`."""
    return ends(rows.history(side, at, claim.setup.metric), rows.config.gate.horizon, logs=False)


def unless_turned(record: dict[str, Any], later: str, text: str, rows: Rows) -> dict[str, Any]:
    """Returns the record, inconclusive if the extrapolated values have another verdict, `later`, or are unknown."""
    if not np.isfinite(record["later"]).all():
        return inconclusive(record, UNKNOWN_TAIL)
    if later == record["verdict"] or record["verdict"] == "inconclusive":
        return record
    ahead = f"at {rows.config.gate.horizon:g} times the steps, if the curves go on as they end: {text}"
    return inconclusive(record, f"{record['verdict']} now, but could turn; {ahead}")


@dataclasses.dataclass(frozen=True)
class Slope(TwoSides):
    """The lead of `lower` over `higher` grows with a number: a slope by seed against its logarithm to base 2.

    `points` holds the numbers, the largest last, each with the settings of both sides there.
    """

    kind: ClassVar[str] = "slope"

    points: tuple[tuple[float, Point], ...]

    def reads(self) -> list[Reading]:
        """Returns both sides at every number."""
        return [(side, {**self.setup.at, **point}) for _, point in self.points for side in self.sides()]

    def stakes(self, verdict: str, rows: Rows) -> Stakes:
        """Returns both sides everywhere; both are competent at the largest number."""
        reads, (*_, (_, last)) = tuple(self.reads()), self.points
        return Stakes(reads, reads, tuple(((side, {**self.setup.at, **last}),) for side in self.sides()))

    def obstacle(self, rows: Rows) -> str | None:
        """Returns the reason why the sides at the largest number decide nothing; smaller ones may well be poor."""
        (*_, last), needs = self.points, self.setup.needs
        return obstacle([(side, {**self.setup.at, **last[1]}) for side in self.sides()], self.setup.at, needs, rows)

    def judge(self, rows: Rows) -> dict[str, Any]:
        """Returns the mean slope over the seeds that ran at every number: supported if its interval lies above 0."""
        leads = {}
        for number, point in self.points:
            low, high = (ends_of(rows, side, {**self.setup.at, **point}, self) for side in self.sides())
            leads[number] = high - low
        table = pd.concat(leads, axis=1).dropna(subset=[(number, "now") for number in leads])
        if not len(table) or len(leads) < 2:
            return {}
        now, later = (table.xs(when, axis=1, level=1) for when in ("now", "later"))
        slopes, slopes_later = (
            np.polyfit(np.log2(now.columns.to_numpy(float)), part.to_numpy(float).T, 1)[0] for part in (now, later)
        )
        estimate, ahead = statistics.estimate(slopes), statistics.estimate(slopes_later)
        means = ", ".join(f"{lead:+.4f} at {number:g}" for number, lead in now.mean().items())
        record: dict[str, Any] = {"ours": estimate.mean, "interval": [estimate.low, estimate.high], "n": estimate.n}
        record["text"] = f"lead {means}; slope by doubling, {effect_text('difference', estimate)}"
        if estimate.n < 2:
            return inconclusive(record, ONE_SEED)
        record |= {"verdict": verdict_of(estimate), "p": statistics.p_value(slopes), "later": [*ahead[:3]]}
        return unless_turned(record, verdict_of(ahead), effect_text("difference", ahead), rows)


def correlation(a: Float[np.ndarray, "*B N"], b: Float[np.ndarray, "*B N"]) -> Float[np.ndarray, "*B"]:
    """Returns Spearman's rank correlation, equal values with their mean rank; NaN where all values are equal."""
    x, y = (rankdata(values, axis=-1) - (values.shape[-1] + 1) / 2 for values in (a, b))
    with np.errstate(invalid="ignore"):
        return np.asarray((x * y).sum(-1) / np.sqrt((x**2).sum(-1) * (y**2).sum(-1)))


@dataclasses.dataclass(frozen=True)
class Ranked(Claim):
    """The order of sides by scores that were written down before is their order by a metric of which less is better.

    A score is the mean over `scores[name]`, by probe.
    """

    kind: ClassVar[str] = "ranked"

    named: Mapping[str, Side]
    scores: Mapping[str, Mapping[str, float]]
    least: float

    def sides(self) -> tuple[Side, ...]:
        """Returns all sides."""
        return tuple(self.named.values())

    def stakes(self, verdict: str, rows: Rows) -> Stakes:
        """Returns all sides: a diverged run of any, or a better rate, could change the order; none has to be good."""
        reads = tuple(self.reads())
        return Stakes(reads, reads, ())

    def obstacle(self, rows: Rows) -> str | None:
        """Returns None: poor sides are part of an order."""
        return None

    def judge(self, rows: Rows) -> dict[str, Any]:
        """Returns the rank correlation, and of several probes those without which it is as high."""
        values = {name: ends_of(rows, side, self.setup.at, self) for name, side in self.named.items()}
        present = [name for name in self.named if len(values[name])]
        if len(present) < 2:
            return {}
        table = pd.concat({name: values[name] for name in present}, axis=1).dropna(
            subset=[(name, "now") for name in present]
        )  # seeds that all sides have: means over different seeds would rank the seeds
        losses, losses_later = (table.xs(when, axis=1, level=1).mean().to_numpy() for when in ("now", "later"))
        probes = [*self.scores[present[0]]]
        scores = np.array([[self.scores[name][probe] for probe in probes] for name in present])
        draws = all_then_resampled(len(present))
        ranks, ranks_later = (correlation(scores.mean(1)[draws], -part[draws]) for part in (losses, losses_later))
        estimate, ahead = (estimate_of_draws(part, len(present)) for part in (ranks, ranks_later))
        record: dict[str, Any] = {"ours": estimate.mean, "interval": [estimate.low, estimate.high], "n": len(present)}
        effect = f"rank correlation {digits.with_interval(estimate[:3])} over {len(present)} sides, {len(table)} seeds"
        if len(probes) > 1:
            without = [float(correlation(np.delete(scores, i, 1).mean(1), -losses)) for i in range(len(probes))]
            idle = [probe for probe, value in zip(probes, without, strict=True) if value >= estimate.mean - 1e-9]
            needless = f"as high without any one of {', '.join(idle)}" if idle else "lower without any probe"
            effect = f"{needless}; {effect}"
        record["text"] = effect
        if len(present) < len(self.named) or len(present) < SEEDS:
            return inconclusive(record, f"{len(present)} of {len(self.named)} sides have run")
        if len(table) < 2:
            return inconclusive(record, ONE_SEED if len(table) else "no seed that all sides have")
        verdict, p = verdict_within(estimate, self.least, 1.0), p_beyond(ranks, self.least, len(present))
        reason = "" if verdict == "supported" else f"asked for an interval above {self.least:g}"
        record |= {"verdict": verdict, "reason": reason, "p": p, "later": [*ahead[:3]], "alike": False}
        text = f"rank correlation {digits.with_interval(ahead[:3])}"
        return unless_turned(record, verdict_within(ahead, self.least, 1.0), text, rows)


KINDS |= {kind.kind: kind for kind in (Slope, Ranked)}


def claim_ways(config: ConfigDict) -> Iterator[Claim]:
    """Returns an order and an equivalence of the learned router with each other way to route."""
    write = writer(config)
    for arm in (arm for arm in config.arms if arm != "learned"):
        name, side = arm.replace("_", "-"), {"arm": arm}
        yield write.order(name, f"learning to route has a lower loss than {arm}", "not asked", LEARNED, side)
        yield write.null(f"{name}.same", f"learned and {arm} differ by less than {MARGIN} nats", "not asked", LEARNED,
                         side)  # fmt: skip


PAIRED = {"kind": "paired", "name": "loss", "metric": "test/loss"}
TRAINING = (
    {"kind": "training", "name": "training", "metrics": ("train/loss", "eval/loss", "test/loss")},
    {"kind": "training", "name": "routers", "metrics": ("router/mi_token", "router/churn", "router/load_max")},
)
WAYS_FIGURE = Figure(
    "eight ways to route tokens, each at its own best rates", {"seed": 9400},
    claims=lambda config: tuple(claim_ways(config)),
    plots=lambda config: (PAIRED, *TRAINING),
)  # fmt: skip

SETTING = Figure(
    "exploration: the fewest steps at which this setting can tell routers apart",
    {
        "arms": ("learned", "hash_token", "frozen", "decoder_active"),
        "seed": 9100,
        "seeds": 1,
        "rates": "paper",
        "steps": 12000,
        "eval_every": 1000,
    },
    plots=lambda config: TRAINING,
)


# A hash in some layers


#: I(expert; token id) in nats of each layer's learned router, and of a hash, in tuning runs of the headline (seed
#: 1009400, 2,000 steps, rates of this figure): what a hash adds to a layer is their difference.
KNOWN, OF_HASH = (1.669, 1.243, 1.126, 0.994), 2.655
#: The least rank correlation of an order that was written down with the measured one.
LEAST = 0.5


def hashed(config: ConfigDict) -> dict[str, Point]:
    """Returns the points with a hash in the first n layers, and in the last n, by name."""
    count = config.transformer.sparse_layers
    texts = {f"{end} {n}": (f"{end}={n} router.name=hash_id",) for end in ("first", "last") for n in range(1, count)}
    whole = {f"first {count}": (f"first={count} router.name=hash_id",)}
    return {"none": {"router.layers": ()}} | {
        name: {"router.layers": layers} for name, layers in (texts | whole).items()
    }


def claim_layers(config: ConfigDict) -> Iterator[Claim]:
    """Returns an equivalence with routers that all learn for each choice of hashed layers, and an order."""
    none, *others = hashed(config).items()
    for name, point in others:
        id, side = name.replace(" ", "-"), LEARNED | point
        write = writer(config, effect=LAYERS_MARGIN)
        statement = f"a hash in the {name} layers changes the loss by less than {LAYERS_MARGIN} nats"
        yield write.null(f"layers.{id}", statement, "not asked", side, LEARNED | none[1])
    if config.transformer.sparse_layers == len(KNOWN):
        named = {name: LEARNED | point for name, point in hashed(config).items()}
        missing = [OF_HASH - known for known in KNOWN]
        added = {"none": 0.0}
        for name, n in ((name, int(name.split()[1])) for name in named if name != "none"):
            added[name] = sum(missing[:n] if name.startswith("first") else missing[-n:])
        yield writer(config).ranked(
            "layers.order", "the less the learned routers of hashed layers know of the token, the more a hash gains",
            "not asked", named, {name: {"added": value} for name, value in added.items()}, LEAST,
        )  # fmt: skip


# Tables of the hash

TABLES = (0, 1, 2, 3)


def claim_tables(config: ConfigDict) -> Iterator[Claim]:
    """Returns the order of a hash and the learned router for each table, and the equivalence of tables."""
    hashes = {table: {"arm": "hash_token", "router.table_seed": table} for table in TABLES}
    for table, side in hashes.items():
        statement = f"a hash of the token by table {table} has a lower loss than a learned router"
        yield writer(config).order(
            f"tables.{table}", statement, "not asked", side, LEARNED | {"router.table_seed": table}
        )
    for table in TABLES[1:]:
        statement = f"tables {table} and 0 of the hash differ by less than {MARGIN} nats"
        yield writer(config).null(f"tables.{table}.same", statement, "not asked", hashes[table], hashes[0])


TABLES_FIGURE = Figure(
    "the hash of the token with four balanced tables", FEW | {"arms": ("learned", "hash_token")},
    sweep=lambda config: product(router__table_seed=TABLES), claims=lambda config: tuple(claim_tables(config)),
    plots=lambda config: ({"kind": "paired", "name": "tables", "metric": "test/loss", "x": "router.table_seed"},),
)  # fmt: skip

# K-means

#: The share of training behind which k-means is fitted, by scale.
FITS = {"smoke": (0.0, 0.5), "default": (0.0, 0.25), "gpu": (0.0, 0.5)}
CLUSTERED = ("kmeans_fitted", "kmeans_as_sharp")


def claim_kmeans(config: ConfigDict) -> Iterator[Claim]:
    """Returns an order and an equivalence of the learned router with k-means of each moment and sharpness."""
    for share, arm in itertools.product(FITS[config.scale], CLUSTERED):
        id, point, side = f"kmeans.{arm.removeprefix('kmeans_')}.{share:g}", {"router.fit_at": share}, {"arm": arm}
        write, name = writer(config, point), f"{ARMS[arm].label}, fitted at {share:.0%} of training"
        yield write.order(id, f"learning to route has a lower loss than {name}", "not asked", LEARNED, side)
        yield write.null(f"{id}.same", f"learned and {name}: less than {MARGIN} nats apart", "not asked", LEARNED, side)


KMEANS = Figure(
    "k-means of hidden states fitted later, and as sharp as the learned router",
    {"arms": ("learned", *CLUSTERED), "seed": 9500, "seeds": 4, "eval_every": 500},
    sweep=lambda config: product(router__fit_at=FITS[config.scale]), claims=lambda config: tuple(claim_kmeans(config)),
    plots=lambda config: (PAIRED | {"name": "kmeans", "x": "router.fit_at"},),
)  # fmt: skip

LAYERS = Figure(
    "a hash of the token in the first n and the last n layers", FEW | {"arms": ("learned",)},
    sweep=lambda config: tuple(hashed(config).values()), claims=lambda config: tuple(claim_layers(config)),
    plots=lambda config: (
        {"kind": "methods", "name": "layers", "methods": hashed(config), "metrics": ("test/loss", "router/mi_token")},
    ),
)  # fmt: skip

# The router frozen early

FREEZE = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0)


def claim_settles(config: ConfigDict) -> Iterator[Claim]:
    """Returns an equivalence of each early end of learning with learning to the end."""
    end = LEARNED | {"router.freeze_at": 1.0}
    for share in FREEZE[:-1]:
        early = LEARNED | {"router.freeze_at": share}
        statement = f"a router frozen at {share:.0%} of training changes the loss by less than {MARGIN} nats"
        yield writer(config).null(f"settles.{share:g}", statement, "not asked", early, end)


SETTLES = Figure(
    "the router frozen at a share of training", FEW | {"arms": ("learned",)},
    sweep=lambda config: product(router__freeze_at=FREEZE), claims=lambda config: tuple(claim_settles(config)),
    plots=lambda config: (
        {"kind": "curves", "name": "settles", "x": "router.freeze_at", "metrics": ("test/loss", "router/mi_token")},
    ),
)  # fmt: skip

# Balance

RATES = (0.0, 1e-3, 1e-2, 1e-1)


def claim_balance(config: ConfigDict) -> Iterator[Claim]:
    """Returns, for learned and frozen routers, the order of the protocol's balancing rate and none."""
    usual, none = {"selection.balance_rate": 1e-2}, {"selection.balance_rate": 0.0}
    for arm in PAIR:
        side = {"arm": arm}
        statement = f"{arm}: a balancing bias lowers the loss"
        yield writer(config).order(f"balance.{arm}", statement, "not asked", side | usual, side | none)


BALANCE = Figure(
    "what balance costs: the rate of the balancing bias", FEW | {"arms": PAIR},
    sweep=lambda config: product(selection__balance_rate=RATES), claims=lambda config: tuple(claim_balance(config)),
    plots=lambda config: (
        {"kind": "curves", "name": "balance", "x": "selection.balance_rate",
         "metrics": ("test/loss", "router/mi_token", "router/load_max")},
    ),
)  # fmt: skip

# Experts and granularity

# A hash of 27 characters fills at most 54 experts, so the hash is one of bigrams here.
COUNTS = {"smoke": (2, 4), "default": (8, 32, 128), "gpu": (8, 32, 128)}


def grow(config: ConfigDict) -> dict[str, dict[float, Point]]:
    """Returns what grows -> number -> its point: experts; k, of as many weights and FLOPs; training tokens."""
    k, steps, of_k = config.selection.k, config.steps, ("selection.k", "selection.eval.k", "router.experts_per_id")
    finer: dict[float, Point] = {
        k * part: {"experts.count": config.experts.count * part, "experts.width": config.experts.width // part}
        | dict.fromkeys(of_k, k * part)
        for part in (2, 4)
    }
    shorter: dict[float, Point] = {}
    for number in (steps // 4, steps // 2):
        shorter[number] = {"steps": number, "eval_every": number // (1 if number % 2 else 2)}
    return {
        "experts": {count: {"experts.count": count} for count in COUNTS[config.scale]},
        "granularity": {k: {}} | finer,
        "tokens": shorter | {steps: {}},
    }


def claim_grow(config: ConfigDict, *names: str) -> Iterator[Claim]:
    """Returns the order of a hash and the learned router at each point, and the slope of the lead of a hash."""
    hashes, per_step = {"arm": "hash_bigram"}, config.batch_size * config.data.input_length
    for name in names:
        points = grow(config)[name]
        for number, point in points.items():
            if point:
                yield writer(config, point).order(
                    f"grow.{name}={number}", f"{name} {number}: a hash has a lower loss than learning to route",
                    "not asked", hashes, LEARNED,
                )  # fmt: skip
        numbers = {number * per_step if name == "tokens" else number: point for number, point in points.items()}
        yield writer(config).slope(f"grow.{name}", f"the lead of a hash over learning to route grows with {name}",
                                   "not asked", hashes, LEARNED, tuple(numbers.items()))  # fmt: skip


def figure_of(axes: Mapping[str, str], *computed: str) -> Figure:
    """Returns the figure of what grows -> its key. The usual point is one of experts, so others share its runs."""
    return Figure(
        f"learned and hash of bigrams against {' and '.join(axes)}", FEW | {"arms": ("learned", "hash_bigram")},
        sweep=lambda config: tuple(
            point for name in axes for point in grow(config)[name].values() if point or "experts" not in axes
        ),
        claims=lambda config: tuple(claim_grow(config, *axes)),
        plots=lambda config: tuple(PAIRED | {"name": name, "x": x} for name, x in axes.items()),
        computed=computed,
    )  # fmt: skip


# Two figures, as each ends within three hours of two cores.
GROW = figure_of({"experts": "experts.count", "tokens": "steps"}, "steps")
FINER = figure_of(
    {"granularity": "selection.k"},
    "experts.count", "experts.width", "selection.k", "selection.eval.k", "router.experts_per_id",
)  # fmt: skip

# Text of separable domains

#: Dialects that share all words (t5_dialects), read by a decoder; the oracle of the dialect is the ceiling.
DOMAINS = {
    "arms": ("learned", "oracle_dialect"), "data.name": "dialects", "data.tokens": "bytes", "data.vocabulary": 288,
    "data.dialects": 8, "data.words": 32, "data.input_length": 32, "data.eval_rows": 512, "batch_size": 32,
    "transformer.layers": 2, "transformer.sparse_layers": 2, "experts.count": 16, "steps": 3000, "eval_every": 500,
    "selection.balance_rate": 0.0, "optimizer.warmup": 100,
}  # fmt: skip
NO_BALANCE = {
    "losses.balance": 0.0, "losses.balance_scope": "batch", "losses.z": 0.0, "selection.balance_rate": 0.0,
    "selection.group_size": 0,
}  # fmt: skip
CAPACITIES = (0.0, 1.25)


def methods(config: ConfigDict) -> dict[str, Point]:
    """Returns ways to balance by name: method and scope of balancing."""
    loss: Point = {"losses.balance": 1e-2}
    sequence: Point = {"losses.balance_scope": "group", "selection.group_size": config.data.input_length}
    changes: dict[str, Point] = {
        "none": {}, "loss, batch": loss, "loss, sequence": loss | sequence,
        "loss, layers": loss | {"losses.balance_scope": "layers"}, "bias": {"selection.balance_rate": 1e-2},
        "z": {"losses.z": 1e-3},
    }  # fmt: skip
    return {name: NO_BALANCE | some for name, some in changes.items()}


def queue(factor: float) -> Point:
    """Returns a capacity factor of training and evaluation."""
    return {"selection.capacity_factor": factor, "selection.eval.capacity_factor": factor}


def testbed(config: ConfigDict) -> tuple[Point, ...]:
    """Returns all methods at all capacities; the oracle, which nothing balances, runs at the first method alone."""
    points = [method | queue(factor) for method in methods(config).values() for factor in CAPACITIES]
    return tuple(point if NO_BALANCE.items() <= point.items() else point | {"arms": ("learned",)} for point in points)


def claim_testbed(config: ConfigDict) -> Iterator[Claim]:
    """Returns the ceiling's order, and of each method an order and an equivalence with no balancing, dropless."""
    (_, first), *named = methods(config).items()
    none, write = first | queue(0.0), writer(config)
    yield write.order("testbed.ceiling", "an oracle of the domain has a lower loss than a learned router", "not asked",
                      {"arm": "oracle_dialect"}, LEARNED, at=none)  # fmt: skip
    for name, method in named:
        id, side = name.replace(", ", "-"), LEARNED | method | queue(0.0)
        yield write.order(f"testbed.{id}", f"{name}: balancing lowers the loss", "not asked", side, LEARNED | none)
        yield write.null(f"testbed.{id}.same", f"{name}: balancing moves the loss by less than {MARGIN} nats",
                         "not asked", side, LEARNED | none)  # fmt: skip


def variance(spec: dict[str, Any], data: Data) -> Chart | None:
    """Returns the shares of the variance over the settings of `factors` (name -> points), by seed, of each metric."""
    (first, rows_of), (second, columns_of) = spec["factors"].items()
    panels = []
    for metric in (metric for metric in spec["metrics"] if metric in data.last):
        cells = [[data.at(row | column) for column in columns_of.values()] for row in rows_of.values()]
        series = [[cell[(cell.arm == REFERENCE) & (cell.status == "ok")].set_index("seed")[metric] for cell in row]
                  for row in cells]  # fmt: skip
        table = pd.concat([cell for row in series for cell in row], axis=1).dropna().to_numpy()
        values = table.reshape(-1, len(rows_of), len(columns_of))  # [seeds, first, second]
        less = values - values.mean((1, 2), keepdims=True)
        parts = [less.mean(2).var(1), less.mean(1).var(1)]
        parts = [*parts, less.var((1, 2)) - sum(parts)]
        labels = dict(enumerate((first, second, "both together, and noise")))
        lines = Axis("", (-0.5, 2.5), ticks=labels, reverse=True, all_labels=True)
        panel = Panel(Axis(), lines, " ".join(data.axes[metric].label.split()), horizontal=True, width=220, height=90)
        shares = [part / np.maximum(less.var((1, 2)), 1e-30) for part in parts]
        panel.means(Series("share of the variance"), [
            Mark(float(i), statistics.estimate(share, bounds=(0.0, 1.0))) for i, share in enumerate(shares)
        ])  # fmt: skip
        panels.append(panel)
    chart = Chart(panels, columns=3, legend=False)
    set_value_axes(chart, panels, Column("", bounds=SHARE), "share of the variance over settings")
    return chart if panels else None


PLOTS["variance"] = Plot(
    variance,
    "Variance of a metric of the learned router over all settings of one seed, in parts: means over seeds with 95 % t"
    " intervals.",
    required={"metrics": "columns, a panel each", "factors": "two factors: name -> (name -> point)"},
    axes=lambda spec, data: data.swept,
)


def plots_testbed(config: ConfigDict) -> tuple[dict[str, Any], ...]:
    """Returns the figures of the testbed."""
    metrics = ("test/loss", "router/mi_language", "router/load_max")
    free = {name: method | queue(0.0) for name, method in methods(config).items()}
    factors = {"method and scope": methods(config), "capacity": {str(factor): queue(factor) for factor in CAPACITIES}}
    return (
        {"kind": "methods", "name": "methods", "methods": free, "metrics": (*metrics, "test/accuracy")},
        {"kind": "variance", "name": "variance", "metrics": metrics, "factors": factors},
    )


TESTBED = Figure(
    "balancing on text of separable domains: method, scope and capacity", FEW | DOMAINS, sweep=testbed,
    claims=lambda config: tuple(claim_testbed(config)), plots=plots_testbed,
)  # fmt: skip

FIGURES = {
    "": WAYS_FIGURE, "setting": SETTING, "layers": LAYERS, "settles": SETTLES, "balance": BALANCE, "grow": GROW,
    "finer": FINER, "testbed": TESTBED, "tables": TABLES_FIGURE, "kmeans": KMEANS,
}  # fmt: skip


def get_config(arg: str | None = None) -> Any:
    """Returns the config of FIGURE[,SCALE]."""
    return make_config("token_router", arg, FIGURES, PROTOCOL, SCALES)
