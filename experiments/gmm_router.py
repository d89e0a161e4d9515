"""Does learning to route help on mixtures of Gaussians, and how much of the published gap is sharpness?

Question. Dikkala et al. (2023, 3.1-3.2) train a soft mixture of 64 experts on 64 Gaussian clusters, evaluate it at top-1,
and find the learned router far better than the same model with its router frozen at initialisation. The two differ in
more than what the router learned: a fresh router is nearly uniform, so its arm also pays for being trained soft and
evaluated hard. This file repeats the comparison with controls that remove one confound each (routed.arms), and says
how much of the gap each explains.

    python -m routed.main --config=experiments/gmm_router.py              # the headline
    python -m routed.main --config=experiments/gmm_router.py:fig3         # a figure of the paper
    python -m routed.main --config=experiments/gmm_router.py:phase,smoke  # any figure, small

Figures. (none): depth-3 experts, loss against samples, all arms.
fig2a/b/c: constant experts; loss against samples, loss against experts on fresh samples, sparsity. fig3, fig4: depth-3
experts; constant and linear target. spurious: 216 more dimensions that say nothing. norms: uniformity of the router's
norms. phase: separation x samples. sensitivity: one choice of ours changed at a time. Scales: smoke (seconds), default
(2 CPU cores), paper (hours to days; more seeds, steps and sizes, since the paper states none of them).

From the paper: 64 clusters, 64 experts, 24 dimensions, 10 outputs, depth-3 experts of width 96, linear router, soft in
training, top-1 with weight exactly 1 at evaluation; SGD with momentum 0.9 and rates 1e-2 (experts), 1e-1 (router) for
depth-3 experts; Adam with 3.2e-4 and 3.2e-3 for constant ones.

Rules where the paper is silent. None looks at learned against frozen; BUILD_NOTES.md says which were set when.
  separation  the smallest of .5, .75, 1, 1.5, 2 at which the Bayes predictor's loss is below 1 % of the variance
              (seeds 5000-5007: .43, .085, .0098, .00003 at 1.5): c = 1.
  loss        squared norm of the error, as in the paper's theory; reported over the variance, so 1 is trivial.
  targets     v_c ~ N(0, I), w_c ~ N(0, I/d). Weights: lecun normal, biases 0, router without bias.
  batch       32 for depth-3, 64 for constant experts, drawn with replacement: of 32 and 128, the one with which the
              *oracle* arm fits better in equal time on one exploration seed.
  steps       4,000 for depth-3: what fits ten minutes. 20,000 for constant experts: Adam moves a vector by at most 3.2e-4
              a step, so a target of size 3 needs 10,000.
  samples     8, 32 and 128 per cluster for depth-3: of the powers of two, the largest with which every arm's training
              loss falls below the gate in these steps on one exploration seed (256 per cluster did not: frozen .13).
  decay       0 and 1e-2 (PyTorch's AdamW default), 1e-3 beside it; decoupled, on router and experts.
  tuning      (fig3) 3 multipliers of both rates for each arm, by final test loss on a seed that is never evaluated.
  gate        every arm of a verdict has a training loss below .1, or one that moved by under 2 % in the last chunk.
  effect      smallest effect of interest: a factor 1.1 in loss.

Expected: learned below frozen at top-1 (the paper), most of that from sharpness; whether learned beats the fairest frozen
control is the open question, and should depend on separation.

Cost on 2 cores: headline 5 minutes; see BUILD_NOTES.md for the others.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from routed.claims import Claim
from routed.config import base, variant
from routed.points import Point, chain, product

FIGURES = ("", "fig2a", "fig2b", "fig2c", "fig3", "fig4", "spurious", "norms", "phase", "sensitivity")

CONTROLS = ("learned", "frozen", "frozen_sharp", "frozen_top1", "frozen_data")
CORE = (*CONTROLS, "oracle")
ALL = (*CORE, "hash", "dense_active", "dense_total")

ARMS = {
    "fig2a": CORE,
    "fig2b": ("learned", "frozen"),
    "fig2c": ("learned", "frozen"),
    "spurious": ("learned", "frozen"),
    "norms": ("learned", "frozen"),
    "phase": CONTROLS,
    "sensitivity": CONTROLS,
}

#: Training samples by scale.
SAMPLES = {"smoke": (64, 256), "default": (512, 2048, 8192), "paper": (512, 2048, 8192, 32768, 131072)}
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


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of FIGURE[,SCALE]."""
    figure, scale = variant(arg, FIGURES)
    c = base()
    with c.unlocked():
        c.name, c.figure, c.scale = "gmm_router", figure, scale
        c.arms = ARMS.get(figure, CORE)
        c.seeds = 10 if figure in ("fig3", "fig4", "norms", "spurious") else 3
        c.steps, c.eval_every = 4000, 500
        constant = figure in ("fig2a", "fig2b", "fig2c")
        if constant:
            c.experts.name, c.optimizer.name = "constant", "adam"
            c.router.learning_rate, c.experts.learning_rate = 3.2e-3, 3.2e-4
            c.batch_size, c.steps, c.eval_every, c.seeds = 64, 20000, 4000, 32
            c.mesh.runs_per_batch = 64
        c.data.fresh = figure == "fig2b"
        c.data.test_samples = 12800 if figure == "fig2b" else 6400
        if figure == "fig4":
            c.data.target, c.data.target_dim = "linear", 1
        if figure == "spurious":
            c.data.spurious_dims = 216
        c.data.samples = 8192
        if scale == "paper":
            c.steps, c.eval_every, c.seeds = c.steps * 10, c.eval_every * 10, max(10, c.seeds)
        if scale == "smoke":
            c.data.clusters, c.data.dim, c.data.test_samples, c.experts.count, c.experts.width = 8, 8, 1600, 8, 16
            c.data.spurious_dims = min(c.data.spurious_dims, 24)
            c.steps, c.eval_every, c.seeds = 40, 20, 2
    return c.lock()


def get_sweep(config: ConfigDict) -> tuple[Point, ...]:
    """The points of the figure."""
    samples = SAMPLES[config.scale]
    largest = samples[-1]
    match config.figure:
        case "fig2a" | "fig2c":
            return product(data__samples=MANY_SAMPLES[config.scale])
        case "fig2b":
            return product(experts__count=EXPERTS[config.scale])
        case "fig3":  # rates tuned for each arm at the largest size only
            return chain(
                product(rates=("paper",), data__samples=samples[:-1]),
                product(rates=("paper",), data__samples=(largest,), arms=(ALL,)),
                product(rates=("tuned",), data__samples=(largest,)),
            )
        case "spurious":
            return chain(
                product(optimizer__weight_decay=(0.0,), data__samples=(largest,)),
                product(optimizer__weight_decay=(1e-3, 1e-2), data__samples=(largest,), arms=(("learned",),)),
            )
        case "norms":
            return product(data__samples=(largest,))
        case "phase":
            return product(data__separation=SEPARATIONS[config.scale], data__samples=samples)
        case "sensitivity":
            return tuple({"data.samples": largest} | change for change in _nuisances(config))
    # The headline and fig4: arms that cost more than they tell run at the largest size only.
    return chain(product(data__samples=samples[:-1]), product(data__samples=(largest,), arms=(ALL,)))


def _nuisances(config: ConfigDict) -> tuple[Point, ...]:
    """One choice of ours changed at a time; the first point is the protocol itself."""
    steps = config.steps
    return (
        {},
        {"steps": steps // 2},
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


def get_claims(config: ConfigDict) -> tuple[Claim, ...]:
    """What the figure can say about the paper's claims, and about our own questions (ids `routed.*`)."""
    size = {"data.samples": get_sweep(config)[-1].get("data.samples", config.data.samples)}
    if config.figure == "fig3":
        size |= {"rates": "paper"}
    learned, frozen, fairest = {"arm": "learned"}, {"arm": "frozen"}, {"arm": "fairest"}
    paper = "gaps_filled" if config.scale != "smoke" else "scaled"

    def order(id, statement, paper_says, lower, higher, at=None, metric="test/loss"):
        return Claim("order", id, statement, paper_says, paper, metric, lower, higher, size if at is None else at)

    def number(id, statement, value, metric, at):
        return Claim("number", id, statement, value, paper, metric, learned, {}, at)

    fair = (
        order(
            "routed.gmm.fair",
            "learned beats the fairest frozen control (sharpened, trained top-1, or rows from data)",
            "not asked",
            learned,
            fairest,
        ),
        order(
            "routed.gmm.sharpness",
            "sharpening the frozen router lowers its top-1 loss",
            "not asked",
            {"arm": "frozen_sharp"},
            frozen,
        ),
        order(
            "routed.gmm.fair-soft",
            "learned beats frozen when both are evaluated as they were trained (soft)",
            "not asked",
            learned,
            frozen,
            metric="test/loss_soft",
        ),
    )
    specialise = (
        order(
            "sparsity",
            "clusters go to fewer experts than with a shuffled router",
            "learned tends to 1, shuffled stays high",
            learned | {"metric": "router/sparsity"},
            learned | {"metric": "router/sparsity_shuffled"},
        ),
        order(
            "one-expert",
            "a cluster uses fewer than 1.5 experts",
            "learned tends to 1",
            learned,
            {"value": 1.5},
            metric="router/sparsity",
        ),
    )

    published = (
        order("frozen", "learned beats frozen at top-1", "far better", learned, frozen),
        *(
            order(
                "dense-active", "learned beats the dense net of one expert", "better", learned, {"arm": "dense_active"}
            ),
            order(
                "dense-total",
                "the dense net of all parameters wins",
                "slightly better",
                {"arm": "dense_total"},
                learned,
            ),
        )[: 0 if config.figure == "fig4" else 2],  # Fig. 4 has no dense nets
    )
    tuned = fair[0]._replace(
        id="routed.gmm.fair-tuned",
        statement=f"with rates tuned per arm, {fair[0].statement}",
        at=size | {"rates": "tuned"},
    )

    def named(prefix, claims):
        return tuple(claim._replace(id=f"{prefix}.{claim.id}") for claim in claims)

    def falls(id, samples):
        ends = [learned | size | {"data.samples": n} for n in (samples[-1], samples[0])]
        return order(id, "the loss falls as samples grow", "tends to 0", *ends, at={})

    match config.figure:
        case "fig2a":
            return (
                falls("dikkala.fig2a.falls", MANY_SAMPLES[config.scale]),
                order(
                    "dikkala.fig2a.near-zero",
                    "the loss at the most samples is below .05",
                    "tends to 0",
                    learned,
                    {"value": 0.05},
                ),
                *fair,
            )
        case "fig2b":
            half, full = config.data.clusters // 2, config.data.clusters
            return (
                order(
                    "dikkala.fig2b.too-few",
                    "with half as many experts as clusters the loss stays above .05",
                    "above 0",
                    {"value": 0.05},
                    learned,
                    {"experts.count": half},
                ),
                order(
                    "dikkala.fig2b.enough",
                    "with as many experts as clusters the loss is below .05",
                    "near 0 at e = k",
                    learned,
                    {"value": 0.05},
                    {"experts.count": full},
                ),
            )
        case "fig2c":
            return named("dikkala.fig2c", specialise)
        case "fig3" | "fig4":
            return (
                *named(f"dikkala.{config.figure}a", published),
                falls(f"dikkala.{config.figure}a.falls", SAMPLES[config.scale]),
                *named(f"dikkala.{config.figure}b", specialise if config.figure == "fig3" else specialise[:1]),
                *fair,
                *((tuned,) if config.figure == "fig3" else ()),
            )
        case "spurious":
            off, on = size | {"optimizer.weight_decay": 0.0}, size | {"optimizer.weight_decay": 1e-2}
            return (
                number("dikkala.spurious.loss", "test loss without weight decay", 0.01, "test/loss", off),
                number(
                    "dikkala.spurious.share",
                    "share of the router's squared norm on the 24 informative dimensions",
                    0.84,
                    "router/signal_share",
                    off,
                ),
                number("dikkala.spurious.share-decay", "the same with weight decay", 0.9, "router/signal_share", on),
                order(
                    "dikkala.spurious.decay-helps",
                    "weight decay raises the share",
                    ".84 to .9",
                    learned | off,
                    learned | on,
                    {},
                    "router/signal_share",
                ),
                Claim(
                    "null",
                    "dikkala.spurious.no-loss",
                    "weight decay does not change the loss by a factor 1.1",
                    "no loss in performance",
                    paper,
                    "test/loss",
                    learned | off,
                    learned | on,
                    {},
                ),
                order(
                    "routed.spurious.learned",
                    "the share is larger than the frozen router's",
                    "not asked",
                    frozen,
                    learned,
                    off,
                    "router/signal_share",
                ),
            )
        case "norms":
            return (
                number(
                    "dikkala.norm-uniformity",
                    "E|w|^2 / (E|w|)^2 of the learned router",
                    1.025,
                    "router/norm_ratio",
                    size,
                ),
                Claim(
                    "null",
                    "routed.norms.discriminates-not",
                    "the ratio is within a factor 1.1 of the untrained router's, so it cannot tell",
                    "not asked",
                    paper,
                    "router/norm_ratio",
                    learned,
                    frozen,
                    size,
                ),
            )
        case "phase":
            return tuple(
                claim._replace(
                    id=f"{claim.id}.c{c:g}",
                    statement=f"at separation {c:g}: {claim.statement}",
                    at=size | {"data.separation": c},
                )
                for c in SEPARATIONS[config.scale]
                for claim in fair[:1]
            )
        case "sensitivity":
            return tuple(claim._replace(at=get_sweep(config)[0]) for claim in fair)
    return (*named("dikkala.fig3a", published), *fair)


def get_plots(config: ConfigDict) -> tuple[dict, ...]:
    """What the report draws; see routed.plots for the kinds."""
    x = "data.samples"
    loss = {"kind": "curves", "name": "loss", "x": x, "metrics": ("test/loss", "test/loss_soft")}
    sparsity = {
        "kind": "curves",
        "name": "sparsity",
        "x": x,
        "metrics": ("router/sparsity", "router/sparsity_shuffled"),
        "arms": ("learned", "frozen"),
    }
    training = {"kind": "training", "name": "training", "metrics": ("train/loss", "test/loss")}
    gap, routing = (
        {"kind": "gap", "name": "gap", "x": x},
        {"kind": "routing", "name": "routing", "arms": ("learned", "frozen")},
    )
    match config.figure:
        case "fig2b":
            return (loss | {"x": "experts.count"}, sparsity | {"x": "experts.count"}, training, routing)
        case "fig2c":
            return (sparsity, training, routing)
        case "spurious":
            return (
                {
                    "kind": "curves",
                    "name": "share",
                    "x": "optimizer.weight_decay",
                    "metrics": ("router/signal_share", "test/loss"),
                },
                training,
            )
        case "norms":
            return (
                {"kind": "training", "name": "norms", "metrics": ("router/norm_ratio", "router/norm_mean")},
                routing,
            )
        case "phase":
            return ({"kind": "phase", "name": "phase", "x": x, "y": "data.separation"}, training)
        case "sensitivity":
            return ({"kind": "forest", "name": "sensitivity"},)
    return (loss, gap, sparsity, routing, training)
