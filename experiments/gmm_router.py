"""Does learning to route help on mixtures of Gaussians, and how much of the published gap is sharpness?

Question. Dikkala et al. (2023, 3.1-3.2) train a soft mixture of 64 experts on 64 Gaussian clusters, evaluate it at
top-1, and report that the learned router is far better than the same model with its router frozen at initialisation.
The two differ in more than learning. A fresh router is nearly uniform, so the frozen arm also pays for soft training
and hard evaluation. And inputs are clustered as the target is, so k-means may find the partition without a label. This
file repeats the comparison with controls that remove one confound each (routed.plan.arms), and computes the share of
the gap of each confound.

    routed run --config=gmm_router              # the headline
    routed run --config=gmm_router:fig3         # a figure of the paper
    routed run --config=gmm_router:phase,smoke  # any figure, small

Figures: --list. Scales: smoke (half a minute, without oracle and hash), quick (2 minutes), default (2 CPU cores), paper
(hours to days; more seeds, steps and sizes, since the paper states none of them).

From the paper: 64 clusters, 64 experts, 24 dimensions, 10 outputs, depth-3 experts of width 96, linear router, soft in
training, top-1 with weight exactly 1 at evaluation; SGD with momentum 0.9 and rates 1e-2 (experts), 1e-1 (router) for
depth-3 experts; Adam with 3.2e-4 and 3.2e-3 for constant experts.

Rules where the paper is silent. None compares learned with frozen; docs/decisions/dikkala2023.md has their dates.
  separation  the smallest of .5, .75, 1, 1.5, 2 at which the Bayes predictor's loss is below 1 % of the variance
              (seeds 5000-5007: .43, .085, .0098, .00003 at 1.5): c = 1.
  loss        squared norm of the error, as in the paper's theory; reported over the variance, so 1 is trivial.
  targets     v_c ~ N(0, I), w_c ~ N(0, I/d). Weights: lecun normal, biases 0, router without bias.
  batch       32 for depth-3, 64 for constant experts, drawn with replacement: of 32 and 128, the batch with which the
              *oracle* arm fits better in equal time on one exploration seed.
  steps       4,000 for depth-3 experts: ten minutes. 20,000 for constant experts: Adam moves a vector by at most
              3.2e-4 a step, so a target of size 3 needs 10,000.
  decay       0 and 1e-2 (PyTorch's AdamW default), 1e-3 beside it; decoupled, on router and experts.
  tuning      (fig3) .3 to 30 times both rates for each arm, by final test loss on a seed that is never evaluated.
  gate        a verdict stands if it also holds for the curves extrapolated to 4 times the steps.
  effect      smallest effect of interest: a factor 1.1 in loss.

Expected: learned below frozen at top-1 (the paper), most of that from sharpness. Whether learned beats the fairest
frozen control is the open question, and should depend on separation.

Found: docs/results/README.md (fig4 ran once, before k-means was an arm: its fairest was rows from data). Cost on 2
cores: headline about 9 minutes; docs/measurements/figures.md has the other figures.
"""

from __future__ import annotations

from ml_collections import ConfigDict

import routed.papers.dikkala2023  # noqa: F401 (parts of the paper)
import routed.papers.ours  # noqa: F401 (k-means with several starts)
from routed.analysis.claims import FAIREST, FROZEN, LEARNED, Claim, Writer, comparability
from routed.contracts import UserError
from routed.plan import Figure, Point, chain, make_config, product

PAIR = ("learned", "frozen")
CONTROLS = (*PAIR, "frozen_sharp", "frozen_top1", "frozen_data", "frozen_kmeans")
CORE = (*CONTROLS, "oracle")
ALL = (*CORE, "learned_top1", "learned_distance", "hash", "dense_active", "dense_total")
#: Arms that no claim asks about and that need a program each: smoke is mostly compiling, and leaves them out.
BESIDE = ("learned_distance", "oracle", "hash")

#: Further routers that train as they are evaluated (fig3).
TRAINED = ("learned_top1_balanced", "learned_top2", "learned_top2_balanced")

#: Training samples by scale.
SAMPLES = {
    "smoke": (64, 256),
    "quick": (512, 2048),
    "default": (512, 2048, 8192),
    "paper": (512, 2048, 8192, 32768, 131072),
}
#: The same for constant experts, whose runs cost a fiftieth.
MANY_SAMPLES = {
    "smoke": (64, 256),
    "default": (256, 1024, 4096, 16384, 65536),
    "paper": (256, 1024, 4096, 16384, 65536, 262144),
}
EXPERTS = {"smoke": (4, 8, 16), "default": (8, 16, 32, 64, 128), "paper": (8, 16, 32, 64, 96, 128)}
SEPARATIONS = {
    "smoke": (0.75, 1.5),
    "default": (0.5, 0.75, 1.0, 1.5, 2.0),
    "paper": (0.5, 0.65, 0.75, 0.85, 1.0, 1.25, 1.5, 2.0, 3.0),
}

# Rules where the paper is silent. None compares learned with frozen.
# samples: 8, 32 and 128 per cluster for depth-3 experts: of the powers of two, the largest with which every arm's
#     training loss falls below .1 in these steps on one exploration seed (256 per cluster did not: frozen .13).
# clusters: k-means of the training inputs (frozen_kmeans; of at most 16,384): scikit-learn's algorithm and tolerance,
#     one start, no labels.
# top-1: frozen_kmeans trains and is evaluated with one expert of weight 1, as frozen_top1. learned_top1 has one expert
#     weighted by its probability (Switch); with weight 1 it would get no gradient. A top-1 step computes a 64th of the
#     experts of a soft mixture. Steps are equal, so top-1 arms are equal to each other in FLOPs
#     (train/experts_per_token), not to soft arms.
PROTOCOL = {
    "arms": CORE,
    "data.samples": 8192, "data.test_samples": 6400,
    "steps": 4000, "eval_every": 1000, "seeds": 3,
}  # fmt: skip


def without_beside(arms: tuple[str, ...]) -> tuple[str, ...]:
    """The arms that a smoke run has."""
    return tuple(arm for arm in arms if arm not in BESIDE)


SCALES = {
    "smoke": lambda config: {
        "data.clusters": 8, "data.dim": 8, "data.spurious_dims": min(config.data.spurious_dims, 24),
        "data.test_samples": 1600, "experts.count": 8, "experts.width": 16,
        "steps": 40, "eval_every": 20, "seeds": 2, "shuffles": 4, "arms": without_beside(config.arms),
        "tune.router_multipliers": config.tune.router_multipliers[-2:],
    },
    "quick": lambda config: {
        "data.clusters": 16, "data.samples": 2048, "experts.count": 16, "experts.width": 32, "steps": 1000,
        "eval_every": 250, "seeds": 5, "arms": CONTROLS,
    },
    "default": lambda config: {},
    "paper": lambda config: {
        "steps": config.steps * 10, "eval_every": config.eval_every * 10, "seeds": max(10, config.seeds),
    },
}  # fmt: skip

# What several figures share.

#: Constant experts: the recipe of the paper, with our batch and steps.
CONSTANT = {
    "experts.name": "constant", "experts.learning_rate": 3.2e-4, "router.learning_rate": 3.2e-3,
    "optimizer.name": "adam", "batch_size": 64, "mesh.runs_per_batch": 64,
    "steps": 20000, "eval_every": 4000, "seeds": 32,
}  # fmt: skip

LOSS = {"kind": "curves", "name": "loss", "x": "data.samples", "metrics": ("test/loss", "test/loss_soft")}
SPARSITY = {
    "kind": "curves", "name": "sparsity", "x": "data.samples",
    "metrics": ("router/sparsity", "router/sparsity_shuffled"), "arms": PAIR,
}  # fmt: skip
GAP = {"kind": "gap", "name": "gap", "x": "data.samples"}
ROUTING = {"kind": "routing", "name": "routing", "arms": PAIR}
TRAINING = {"kind": "training", "name": "training", "metrics": ("train/loss", "test/loss")}
BY_SAMPLES = (LOSS, GAP, SPARSITY, ROUTING, TRAINING)

FAIR = "learned beats the fairest frozen control (sharpened, trained top-1, rows from data, or k-means)"


def all_arms(config: ConfigDict) -> tuple[str, ...]:
    """Every arm that a scale has."""
    return {"smoke": without_beside(ALL), "quick": CONTROLS}.get(config.scale, ALL)


def samples_sweep(config: ConfigDict) -> tuple[Point, ...]:
    """Loss against samples; arms that cost more than they tell run at the largest size only."""
    *smaller, largest = SAMPLES[config.scale]
    return chain(
        product(data__samples=smaller, arms=(CONTROLS,)), product(data__samples=(largest,), arms=(all_arms(config),))
    )


def writer(config: ConfigDict, prefix: str, samples: dict[str, tuple[int, ...]] = SAMPLES) -> Writer:
    """A writer of claims at the most samples of a scale, tried at the others too."""
    most = {"data.samples": samples[config.scale][-1]}
    return Writer(comparability(config), at=most, prefix=prefix, over=("data.samples",))


def frozen_claim(write: Writer) -> Claim:
    """The paper's main claim."""
    return write.order("frozen", "learned beats frozen at top-1", "far better", LEARNED, FROZEN)


def dense_claims(write: Writer) -> tuple[Claim, ...]:
    """Where the mixture stands between the two dense nets."""
    active, total = {"arm": "dense_active"}, {"arm": "dense_total"}
    return (
        write.order("dense-active", "learned beats the dense net of one expert", "better", LEARNED, active),
        write.order("dense-total", "the dense net of all parameters wins", "slightly better", total, LEARNED),
    )


def falling_claim(write: Writer, samples: tuple[int, ...]) -> Claim:
    """The loss at the most samples is below that at the fewest."""
    most, fewest = ({**LEARNED, **write.at, "data.samples": n} for n in (samples[-1], samples[0]))
    return write.order("falls", "the loss falls as samples grow", "tends to 0", most, fewest, at={})


def sparsity_claim(write: Writer) -> Claim:
    """The router sends a cluster to fewer experts than chance."""
    return write.order(
        "sparsity", "clusters go to fewer experts than with a shuffled router",
        "learned tends to 1, shuffled stays high",
        LEARNED | {"metric": "router/sparsity"}, LEARNED | {"metric": "router/sparsity_shuffled"},
    )  # fmt: skip


def one_expert_claim(write: Writer) -> Claim:
    """The router sends a cluster to about one expert."""
    statement, limit = "a cluster uses fewer than 1.5 experts", {"value": 1.5}
    return write.order("one-expert", statement, "learned tends to 1", LEARNED, limit, metric="router/sparsity")


def fair_claims(write: Writer) -> tuple[Claim, ...]:
    """Our own questions: how much of the gap remains without the confounds."""
    write = write._replace(prefix="routed.gmm.")
    sharpening = "sharpening the frozen router lowers its top-1 loss"
    soft = "learned beats frozen when both are evaluated as they were trained (soft)"
    return (
        write.order("fair", FAIR, "not asked", LEARNED, FAIREST),
        write.order("sharpness", sharpening, "not asked", {"arm": "frozen_sharp"}, FROZEN),
        write.order("fair-soft", soft, "not asked", LEARNED, FROZEN, metric="test/loss_soft"),
    )


def top1_claim(write: Writer, balanced: bool = False) -> Claim:
    """Returns the claim at equal training FLOPs: both sides train one expert per token, one side its router too."""
    write, kmeans = write._replace(prefix="routed.gmm.", over=()), {"arm": "frozen_kmeans"}
    statement = "with both trained top-1, {} beats k-means of the inputs, frozen and without labels"
    if balanced:
        arm = {"arm": "learned_top1_balanced"}
        return write.order("top1-balanced", statement.format("learned and balanced"), "not asked", arm, kmeans)
    return write.order("top1", statement.format("learned"), "not asked", {"arm": "learned_top1"}, kmeans)


# The headline: depth-3 experts, all arms.


def headline_claims(config: ConfigDict) -> tuple[Claim, ...]:
    """The orders of Fig. 3a, and our own questions."""
    write = writer(config, "dikkala.fig3a.")
    # Scale quick leaves their arms out.
    dense, top1 = ((), ()) if config.scale == "quick" else (dense_claims(write), (top1_claim(write),))
    return (frozen_claim(write), *dense, *fair_claims(write), *top1)


HEADLINE = Figure(
    "loss against samples with depth-3 experts, all arms",
    sweep=samples_sweep,
    claims=headline_claims,
    plots=lambda config: BY_SAMPLES,
)

# Fig. 2: constant experts.


def fig2a_claims(config: ConfigDict) -> tuple[Claim, ...]:
    """The loss tends to 0, and our own questions."""
    write = writer(config, "dikkala.fig2a.", MANY_SAMPLES)
    statement = "the loss at the most samples is below .05"
    low = write.order("near-zero", statement, "tends to 0", LEARNED, {"value": 0.05})
    return (falling_claim(write, MANY_SAMPLES[config.scale]), low, *fair_claims(write))


FIG2A = Figure(
    "loss against samples with constant experts",
    CONSTANT,
    sweep=lambda config: product(data__samples=MANY_SAMPLES[config.scale]),
    claims=fig2a_claims,
    plots=lambda config: BY_SAMPLES,
)


def fig2b_claims(config: ConfigDict) -> tuple[Claim, ...]:
    """The loss is near 0 as soon as there are as many experts as clusters."""
    write = Writer(comparability(config), prefix="dikkala.fig2b.")
    limit, half, full = {"value": 0.05}, config.data.clusters // 2, config.data.clusters
    few = "with half as many experts as clusters the loss stays above .05"
    enough = "with as many experts as clusters the loss is below .05"
    return (
        write.order("too-few", few, "above 0", limit, LEARNED, at={"experts.count": half}),
        write.order("enough", enough, "near 0 at e = k", LEARNED, limit, at={"experts.count": full}),
    )


FIG2B = Figure(
    "loss against the number of constant experts, on fresh samples",
    CONSTANT | {"arms": PAIR, "data.fresh": True, "data.test_samples": 12800},
    sweep=lambda config: product(experts__count=EXPERTS[config.scale]),
    claims=fig2b_claims,
    plots=lambda config: (LOSS | {"x": "experts.count"}, SPARSITY | {"x": "experts.count"}, TRAINING, ROUTING),
)


def fig2c_claims(config: ConfigDict) -> tuple[Claim, ...]:
    """The router sends each cluster to one expert."""
    write = writer(config, "dikkala.fig2c.", MANY_SAMPLES)
    return (sparsity_claim(write), one_expert_claim(write))


FIG2C = Figure(
    "how many constant experts a cluster uses, against samples",
    CONSTANT | {"arms": PAIR},
    sweep=lambda config: product(data__samples=MANY_SAMPLES[config.scale]),
    claims=fig2c_claims,
    plots=lambda config: (SPARSITY, TRAINING, ROUTING),
)

# Fig. 3: depth-3 experts, the constant target.


def fig3_sweep(config: ConfigDict) -> tuple[Point, ...]:
    """Returns the headline's points with more training rules; rates are tuned per arm at the largest size only."""
    *smaller, largest = SAMPLES[config.scale]
    more = TRAINED[:1] if config.scale == "smoke" else TRAINED
    return chain(
        product(rates=("paper",), data__samples=smaller, arms=(CONTROLS,)),
        product(rates=("paper",), data__samples=(largest,), arms=((*all_arms(config), *more),)),
        product(rates=("tuned",), data__samples=(largest,)),
    )


def fig3_claims(config: ConfigDict) -> tuple[Claim, ...]:
    """Loss (a), sparsity (b), and our own questions, one of them once more with tuned rates."""
    a = writer(config, "dikkala.fig3a.")
    a = a._replace(at={**a.at, "rates": "paper"}, over=("data.samples", "rates"))
    b, tuned = a._replace(prefix="dikkala.fig3b."), a._replace(prefix="routed.gmm.", at={**a.at, "rates": "tuned"})
    fair_tuned = tuned.order("fair-tuned", f"with rates tuned per arm, {FAIR}", "not asked", LEARNED, FAIREST)
    loss = (frozen_claim(a), *dense_claims(a), falling_claim(a, SAMPLES[config.scale]))
    return (
        *loss,
        sparsity_claim(b),
        one_expert_claim(b),
        *fair_claims(a),
        fair_tuned,
        top1_claim(a),
        top1_claim(a, balanced=True),
    )


FIG3 = Figure(
    "loss and sparsity against samples with depth-3 experts, constant target; also with tuned rates",
    {"seeds": 10, "tune.multipliers": (0.3, 1.0, 3.0, 10.0, 30.0)},
    sweep=fig3_sweep,
    claims=fig3_claims,
    plots=lambda config: BY_SAMPLES,
)

# Fig. 4: depth-3 experts, a linear target.


def fig4_claims(config: ConfigDict) -> tuple[Claim, ...]:
    """Loss (a), sparsity (b), and our own questions; Fig. 4 has no dense nets."""
    a, b = writer(config, "dikkala.fig4a."), writer(config, "dikkala.fig4b.")
    return (frozen_claim(a), falling_claim(a, SAMPLES[config.scale]), sparsity_claim(b), *fair_claims(a))


FIG4 = Figure(
    "loss and sparsity against samples with depth-3 experts, linear target",
    {"data.target": "linear", "data.target_dim": 1, "seeds": 10},
    sweep=samples_sweep,
    claims=fig4_claims,
    plots=lambda config: BY_SAMPLES,
)

# Dimensions that say nothing.


def spurious_sweep(config: ConfigDict) -> tuple[Point, ...]:
    """Decays at the largest size; the frozen router, which no decay reaches, without decay only."""
    largest = SAMPLES[config.scale][-1:]
    return chain(
        product(optimizer__weight_decay=(0.0,), data__samples=largest),
        product(optimizer__weight_decay=(1e-3, 1e-2), data__samples=largest, arms=(("learned",),)),
    )


def spurious_claims(config: ConfigDict) -> tuple[Claim, ...]:
    """The paper's shares with and without decay, and that the loss stays."""
    size = {"data.samples": SAMPLES[config.scale][-1]}
    off, on = size | {"optimizer.weight_decay": 0.0}, size | {"optimizer.weight_decay": 1e-2}
    write = Writer(comparability(config), "router/signal_share", at=off, prefix="dikkala.spurious.")
    ours = write._replace(prefix="routed.spurious.")
    share = f"share of the router's squared norm on the {config.data.dim} informative dimensions"
    same = "weight decay does not change the loss by a factor 1.1"
    return (
        write.number("loss", "test loss without weight decay", 0.01, metric="test/loss"),
        write.number("share", share, 0.84, rivals=(0.9,)),
        write.number("share-decay", "the same with weight decay", 0.9, at=on, rivals=(0.84,)),
        write.order("decay-helps", "weight decay raises the share", ".84 to .9", LEARNED | off, LEARNED | on, at={}),
        write.null("no-loss", same, "no loss in performance", LEARNED | off, LEARNED | on, at={}, metric="test/loss"),
        ours.order("learned", "the share is larger than the frozen router's", "not asked", FROZEN, LEARNED),
    )


SHARE = {
    "kind": "curves", "name": "share", "x": "optimizer.weight_decay",
    "metrics": ("router/signal_share", "test/loss"),
}  # fmt: skip

SPURIOUS = Figure(
    "share of the router's norm on the informative dimensions, against weight decay",
    {"arms": PAIR, "data.spurious_dims": 216, "seeds": 10},
    sweep=spurious_sweep,
    claims=spurious_claims,
    plots=lambda config: (SHARE, TRAINING),
)

# The norms of the router's rows.


def norms_claims(config: ConfigDict) -> tuple[Claim, ...]:
    """The paper's number, and that an untrained router has it too."""
    write = writer(config, "")._replace(metric="router/norm_ratio")
    alike = "the ratio is within a factor 1.1 of the untrained router's, so it cannot tell"
    return (
        write.number("dikkala.norm-uniformity", "E|w|^2 / (E|w|)^2 of the learned router", 1.025),
        write.null("routed.norms.discriminates-not", alike, "not asked", LEARNED, FROZEN),
    )


NORMS = Figure(
    "uniformity of the router's norms, learned and frozen",
    {"arms": PAIR, "seeds": 10},
    sweep=lambda config: product(data__samples=SAMPLES[config.scale][-1:]),
    claims=norms_claims,
    plots=lambda config: (TRAINING | {"name": "norms", "metrics": ("router/norm_ratio", "router/norm_mean")}, ROUTING),
)

# Rates of router and experts tuned apart.

#: Ratios of the router's to the experts' rate from .01 to 100 (the paper's: 10). Seeds that no other figure evaluates.
APART = {
    "arms": ("learned", "learned_distance", "learned_kmeans", "frozen_kmeans", "frozen_kmeans_5"),
    "rates": "tuned", "tune.router_multipliers": (0.001, 0.01, 0.1, 1.0, 10.0), "seed": 9000, "seeds": 10,
}  # fmt: skip


def rates_sweep(config: ConfigDict) -> tuple[Point, ...]:
    """Returns the sizes."""
    return product(data__samples={"smoke": (64, 256)}.get(config.scale, (8192, 16384)))


def rates_claims(config: ConfigDict) -> tuple[Claim, ...]:
    """Returns learned routers against k-means, each at its own best pair of rates; at the largest size, and both."""
    sizes = {point["data.samples"] for point in rates_sweep(config)}
    prefix = f"routed.rates.{config.experts.name}."
    write = Writer(comparability(config), at={"data.samples": max(sizes)}, prefix=prefix, over=("data.samples",))
    kmeans, best = {"arm": "frozen_kmeans"}, {"arm": "frozen_kmeans_5"}
    versus = "beats k-means of the inputs (best of 5 starts), each at its own best rates"
    distance = {"arm": "learned_distance"}
    beside = write.order("distance", f"learned, with distances, {versus}", "not asked", distance, best)
    return (
        write.order("learned", f"learned {versus}", "not asked", LEARNED, best),
        *([beside] if "learned_distance" in config.arms else []),
        write.order("from-kmeans", f"learned from k-means {versus}", "not asked", {"arm": "learned_kmeans"}, best),
        write.order("starts", "k-means with 5 starts beats k-means with one", "not asked", best, kmeans),
    )


RATES_FIGURE = Figure(
    "learned against k-means with rates of router and experts tuned apart, depth-3 experts",
    APART | {"tune.multipliers": (0.3, 1.0, 3.0, 10.0, 30.0)},
    sweep=rates_sweep,
    claims=rates_claims,
    plots=lambda config: (LOSS, TRAINING),
)
RATES_CONSTANT = Figure(
    "the same with constant experts",
    CONSTANT | APART | {"tune.multipliers": (1.0, 3.0, 10.0, 30.0, 100.0)},
    sweep=rates_sweep,
    claims=rates_claims,
    plots=lambda config: (LOSS, TRAINING),
)

# Remark 1: mixture and dense nets against width.


def width_sweep(config: ConfigDict) -> tuple[Point, ...]:
    """Returns widths of the experts' hidden layers; the dense nets have the parameters of such a mixture."""
    return product(experts__width=(2, 16) if config.scale == "smoke" else (2, 8, 32, 96))


def width_claims(config: ConfigDict) -> tuple[Claim, ...]:
    """Returns the orders of Remark 1 at the narrowest and at the widest models, and ours beside them."""
    narrow, *_, wide = (point["experts.width"] for point in width_sweep(config))
    active, total = {"arm": "dense_active"}, {"arm": "dense_total"}
    under = Writer(comparability(config), at={"experts.width": narrow}, prefix="dikkala.remark1.")
    over, clear = under._replace(at={"experts.width": wide}), "a clear advantage, whatever the router learns"
    ours, expert = "routed.gmm.width.", "beats the dense net of one expert"
    return (
        under.order("under.learned", f"width {narrow}: learned {expert}", clear, LEARNED, active),
        under.order("under.frozen", f"width {narrow}: frozen {expert}", clear, FROZEN, active),
        over.order("over.total", f"width {wide}: the dense net of all parameters beats learned",
                   "the largest dense net outperforms", total, LEARNED),
        under._replace(prefix=ours).order("under.total", f"width {narrow}: learned beats the dense net of all weights",
                                          "not asked", LEARNED, total),
        over._replace(prefix=ours).order("over.active", f"width {wide}: learned {expert}", "the benefit goes away",
                                         LEARNED, active),
    )  # fmt: skip


WIDTH = Figure(
    "Remark 1: mixture and dense nets against width, under- and over-parameterised",
    {"arms": (*PAIR, "dense_active", "dense_total"), "data.samples": 1024, "rates": "tuned", "seed": 450, "seeds": 10,
     "tune.multipliers": (0.3, 1.0, 3.0, 10.0, 30.0)},
    sweep=width_sweep,
    claims=width_claims,
    plots=lambda config: (LOSS | {"x": "experts.width"}, TRAINING),
)  # fmt: skip

# Separation x samples.


def phase_claims(config: ConfigDict) -> tuple[Claim, ...]:
    """Learned against the fairest control at each separation."""
    write = writer(config, "routed.gmm.")
    return tuple(
        write.order(f"fair.c{c:g}", f"at separation {c:g}: {FAIR}", "not asked", LEARNED, FAIREST,
                    at={**write.at, "data.separation": c})
        for c in SEPARATIONS[config.scale]
    )  # fmt: skip


PHASE = Figure(
    "where learning helps: separation x samples",
    {"arms": CONTROLS},
    sweep=lambda config: product(data__separation=SEPARATIONS[config.scale], data__samples=SAMPLES[config.scale]),
    claims=phase_claims,
    plots=lambda config: ({"kind": "phase", "name": "phase", "x": "data.samples", "y": "data.separation"}, TRAINING),
)

# One choice of ours changed at a time.


def sensitivity_sweep(config: ConfigDict) -> tuple[Point, ...]:
    """One change a point; the first point is the protocol itself."""
    changes: tuple[Point, ...] = (
        {},
        {"steps": config.steps // 2},
        {"batch_size": config.batch_size // 4},
        {"batch_size": config.batch_size * 2},
        {"data.separation": 0.75},
        {"data.separation": 1.5},
        {"router.init_scale": 0.3},
        {"router.init_scale": 3.0},
        {"optimizer.rate_scale": 0.3},
        {"optimizer.rate_scale": 3.0},
        {"router.learning_rate": config.experts.learning_rate},
    )
    return tuple({"data.samples": SAMPLES[config.scale][-1]} | change for change in changes)


def sensitivity_claims(config: ConfigDict) -> tuple[Claim, ...]:
    """Our own questions at the protocol, tried with every change."""
    changed = {key for point in sensitivity_sweep(config) for key in point}
    return fair_claims(writer(config, "")._replace(over=tuple(sorted(changed))))


SENSITIVITY = Figure(
    "the gaps with one choice of ours changed at a time",
    {"arms": CONTROLS},
    sweep=sensitivity_sweep,
    claims=sensitivity_claims,
    plots=lambda config: ({"kind": "forest", "name": "sensitivity"},),
    computed=("steps", "batch_size"),
)

FIGURES = {
    "": HEADLINE, "fig2a": FIG2A, "fig2b": FIG2B, "fig2c": FIG2C, "fig3": FIG3, "fig4": FIG4,
    "spurious": SPURIOUS, "norms": NORMS, "rates": RATES_FIGURE, "rates_constant": RATES_CONSTANT,
    "width": WIDTH, "phase": PHASE, "sensitivity": SENSITIVITY,
}  # fmt: skip


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of FIGURE[,SCALE]."""
    config = make_config("gmm_router", arg, FIGURES, PROTOCOL, SCALES)
    if config.figure and config.scale == "quick":
        raise UserError(
            f"gmm_router:{config.figure},quick: scale quick is of the first figure alone; use smoke or default"
        )
    return config
