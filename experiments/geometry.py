"""When does gradient routing earn its place, against k-means of the inputs that nobody trains?

Question. Where inputs are clustered as the target is, k-means of the training inputs, without labels and frozen, finds the partition
that a router needs. Where they are clustered by something else as well, it finds that too, or instead, and only a gradient knows which
of the two matters. Here an input has two independent mixtures of Gaussians in orthogonal subspaces (routed.tasks.crossed): 16 relevant
clusters, each with a vector as its target, and 16 irrelevant ones. A share s of the squared distances between clusters lies in the
irrelevant ones, from 0 (a Gaussian mixture) to 1 (the input says nothing of the target, and no router can help). From which share on
does learning beat clustering?

    python -m routed.main --config=experiments/geometry.py            # the loss ratio against the share, all arms
    python -m routed.main --config=experiments/geometry.py:map        # share x samples x separation
    python -m routed.main --config=experiments/geometry.py:overlap    # the same where clusters overlap
    python -m routed.main --config=experiments/geometry.py:rates      # does it depend on the router's rate?

Fixed beforehand, on seeds that are never evaluated (700 on, 7000 on), by rules that do not look at k-means against learned:
  task        16 + 16 clusters in 8 + 8 dimensions, 16 experts: constants, so that the partition decides. With an expert for each of the
              256 combinations no partition would have to choose. All that depends on s is where the distances lie: noise, the
              constellation of either mixture, the number of dimensions and the variance of the inputs do not.
  separation  the smallest of 1, 1.5, 2, 2.5, 3 at which the Bayes predictor's loss is below 2 % at s = .5 (seeds 7000-7003: .35, .087,
              .018, .003, .0004): 2.
  high share  the largest of .1, .2, ... at which that loss is below 10 % (.075 at .7, .17 at .8): .7. Beyond it what is relevant is
              hardly visible to anybody; the curves are shown to 1.
  samples     4,096: 256 a cluster.
  rates       Adam, 3e-3 for routers and 3e-2 for experts: of 3e-4 to 3e-2 times 3e-3 to 1e-1 the pair with the lowest soft training loss
              of `learned` after 4,000 steps, a geometric mean over s = 0, .35 and .7 (seeds 700-703: .028; with the router's ten times
              the experts', as in Fig. 2a of Dikkala et al. 2023, .170). Both are inside of the grid. Only learned routers gain from it:
              the loss of k-means differs by less than 5 % over the rates tried. The figure `rates` changes the router's.
  steps       8,000, twice those after which a further 4,000 change the test loss of `learned` and of k-means by less than 1 % on those
              seeds (.0611 to .0607, .202 to .203; `learned_distance` .060 to .049).
  seeds       0 to 9, 10 at every point.

Rules. The sign of log(k-means / learned), top-1 test loss paired by seed, changes if it is below 0 at s = 0 and above 0 at s = .7, each at
p < .01 (t tests; adjusted by Holm's method over the figure), and the mean curve changes sign once between. Where: the first s at which
the mean comes above 0, by lines between the shares, with a 95 % bootstrap interval over seeds. If k-means does not win at s = 0, or
learned not at .7, that is the answer.

overlap: written after `map` had run on seeds 0 to 9, before any run of its own seeds, 100 to 119. In the map k-means is ahead at s = 0 where
clusters overlap, at separation 1 only, and learning is at s = .5 (-.32 -+ .25 and .32 -+ .21 in logs at 4,096 samples). The same rules, with
.5 for the high share, which is where the map's ratio is largest, and 20 seeds: the deviation there is .3, so both ends are at four standard errors.
It was .41 at s = 0, whose end stayed open, so once more by the same rules with 60 seeds, 2000 to 2059 (`--config.seed=2000 --config.seeds=60`),
written before any of them ran: a mean of -.2 is then at 3.8 standard errors. Whatever comes out is the answer; there is no fourth try.

Controls: the fair frozen ones of routed.plan.arms, `learned_distance`, which scores as k-means does, `oracle` (the relevant cluster) and
`oracle_irrelevant` (the other, as surely): what a perfect partition by the wrong structure is worth.

Found (seeds 0-9): no change of sign from 0 to .7. At s = .7 learning wins 4.7-fold [3.3, 6.8], and its mean is ahead at every share below
1, where there is nothing to learn and it loses by a tenth. At s = 0 the two cannot be told apart (.022 against .030, geometric means; ratio
1.4 [.25, 7.5]), as either may find all clusters or merge some: the deviation of the log ratio is 2.4, so that a factor 2 would take some
140 seeds. K-means follows the relevant clusters up to s = .2 (adjusted mutual information .97) and the irrelevant ones from .7 on (.06
against .89). rates: from 3e-4 to 3e-2 s = 0 is as open, mean log ratios from -.7 to +.6, each -+ 1.6 to 2; at s = .3 learning is ahead at all
but the least, and at .7 1.9- to 6.1-fold at each. map: at separation 1.5 and more learning is behind by more
than its interval at one of 60 points, 1,024 samples at separation 3 and s = 0, where k-means solves the task in most seeds (-13 in logs [-23, -3]).
overlap (seeds 100 to 119): at s = 0 learning has 1.22 [1.01, 1.47] of k-means' loss, p = .11 where .01 was asked for, at s = .5 k-means 1.59 [1.31, 1.92]
of learning's; the mean changes sign at s = .27 [.22, .33], of a router that scores by distance at .16 [0, .22]. With 60 fresh seeds (2000 to 2059) the change
of sign is supported, each end at p < .01: k-means has .68 [.61, .76] of the learned loss at s = 0, learning wins 1.38-fold [1.26, 1.52] at .5, and the mean
changes sign at .26 [.23, .29] (by distance at .14 [.06, .20], .85 and 1.68-fold, which longer training could turn). So a gradient earns its place from a
quarter of irrelevant structure on, and clustering wins a third of the loss where there is none. Slower experts may be what k-means gains from: with the rates 3e-3 and 3e-2 (router) learning had .13 at
s = 0 on the exploration seeds, k-means .03. K-means has one start (k-means++), and with more would be better at low shares.

Cost on one core that others used too: 26 minutes; map and rates: see --dry_run.
"""

from __future__ import annotations

from ml_collections import ConfigDict

import routed.papers.ours  # noqa: F401 (parts of our questions)
from routed.analysis.claims import FAIREST, LEARNED, Along, Claim, Writer, comparability
from routed.plan import Figure, Point, make_config, product
from routed.plan.experiment import Scales

KMEANS, DISTANCE = {"arm": "frozen_kmeans"}, {"arm": "learned_distance"}
ARMS = (
    "learned", "frozen", "frozen_sharp", "frozen_top1", "frozen_data", "frozen_kmeans", "frozen_nearest", "learned_distance",
    "oracle", "oracle_irrelevant",
)  # fmt: skip
#: Where the question is asked with fewer arms.
FEW = ("learned", "frozen_kmeans", "learned_distance")

#: The share at which learning is claimed to win.
HIGH = 0.7
SHARES = {
    "smoke": (0.0, HIGH, 1.0),
    "default": (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, HIGH, 0.8, 0.9, 1.0),
    "paper": (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, HIGH, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0),
}  # fmt: skip
#: Of the map.
COARSE = {
    "smoke": (0.0, HIGH),
    "default": (0.0, 0.15, 0.3, 0.5, HIGH),
    "paper": (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, HIGH),
}
SAMPLES = {"smoke": (256, 512), "default": (256, 1024, 4096, 16384), "paper": (256, 1024, 4096, 16384, 65536)}
SEPARATIONS = {"smoke": (1.5, 2.0), "default": (1.0, 1.5, 2.0, 3.0), "paper": (0.75, 1.0, 1.5, 2.0, 3.0, 4.0)}
RATES = {"smoke": (3e-3, 3e-2), "default": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2), "paper": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)}

PROTOCOL = {
    "arms": ARMS,
    "data.name": "crossed", "data.clusters": 16, "data.dim": 8, "data.separation": 2.0, "data.share": HIGH,
    "data.samples": 4096, "data.test_samples": 2560,
    "experts.name": "constant", "experts.count": 16,
    "optimizer.name": "adam", "router.learning_rate": 3e-3, "experts.learning_rate": 3e-2,
    "batch_size": 64, "steps": 8000, "eval_every": 2000, "seeds": 10, "mesh.runs_per_batch": 64,
}  # fmt: skip

SCALES: Scales = {
    "smoke": lambda config: {
        "data.clusters": 4, "data.dim": 4, "data.samples": 512, "data.test_samples": 320, "experts.count": 4,
        "steps": 40, "eval_every": 20, "seeds": 2, "shuffles": 0, "arms": FEW[:2],
    },
    "default": lambda config: {},
    "paper": lambda config: {"steps": config.steps * 5, "eval_every": config.eval_every * 5, "seeds": max(32, config.seeds)},
}  # fmt: skip


def writer(config: ConfigDict, **changes) -> Writer:
    """A writer of this file's claims."""
    return Writer(comparability(config, "same"), prefix="routed.geometry.", **changes)


def sides(write: Writer, most: float = HIGH) -> tuple[Claim, ...]:
    """The pre-registered change of sign: both of its ends by themselves."""
    low, high = ({**write.at, "data.share": share} for share in (0.0, most))
    return (
        write.order("kmeans-wins-low", "without irrelevant clusters k-means of the inputs beats the learned router", "not asked",
                    KMEANS, LEARNED, at=low, alpha=0.01),
        write.order("learned-wins-high", f"at a share of {most:g} the learned router beats k-means of the inputs", "not asked",
                    LEARNED, KMEANS, at=high, alpha=0.01),
    )  # fmt: skip


def where(
    write: Writer, shares: tuple[float, ...], id: str = "crossing", side: dict = LEARNED, most: float = HIGH
) -> Claim:
    """The share from which on learning wins."""
    along = Along("data.share", tuple(share for share in shares if share <= most))
    arm = "the learned router" if side is LEARNED else "the learned router that scores by distance"
    statement = f"from some share between 0 and {most:g} on, {arm} beats k-means of the inputs, which wins before"
    return write.crossing(id, statement, "not asked", side, KMEANS, along, alpha=0.01)


# The headline: all arms against the share.


def claims(config: ConfigDict) -> tuple[Claim, ...]:
    """The change of sign, the fairest control at both of its ends, and the router that scores as k-means does."""
    write, shares = writer(config), SHARES[config.scale]
    if config.scale == "smoke":
        return (*sides(write), where(write, shares))
    fair = "learned beats the fairest frozen control at a share of"
    return (
        *sides(write),
        where(write, shares),
        where(write, shares, "crossing-distance", DISTANCE),
        *(
            write.order(f"fair-{name}", f"{fair} {share:g}", "not asked", LEARNED, FAIREST, at={"data.share": share})
            for name, share in (("low", 0.0), ("high", HIGH))
        ),
    )


LOSSES = ("test/loss", "test/loss_soft")
FOLLOWED = ("router/ami_by_relevant", "router/ami_by_irrelevant")
RATIO = {
    "kind": "paired", "name": "ratio", "x": "data.share", "metric": "test/loss",
    "arms": ("frozen_kmeans", "frozen_nearest", "learned_distance"),
}  # fmt: skip
TRAINING = {"kind": "training", "name": "training", "metrics": ("train/loss", *LOSSES)}

HEADLINE = Figure(
    "the loss of k-means over that of the learned router against the share of irrelevant structure, all arms",
    sweep=lambda config: product(data__share=SHARES[config.scale]),
    claims=claims,
    plots=lambda config: (
        RATIO,
        {"kind": "curves", "name": "loss", "x": "data.share", "metrics": LOSSES},
        {"kind": "curves", "name": "followed", "x": "data.share", "metrics": FOLLOWED, "arms": (*FEW, "frozen_top1")},
        TRAINING,
    ),
)

# Samples x separation.


def map_sweep(config: ConfigDict) -> tuple[Point, ...]:
    """Every combination."""
    grid = {"data__separation": SEPARATIONS[config.scale], "data__samples": SAMPLES[config.scale]}
    return product(data__share=COARSE[config.scale], **grid)


def map_claims(config: ConfigDict) -> tuple[Claim, ...]:
    """The change of sign at the protocol's samples and separation, and (in its list of points) at all others."""
    size = {"data.samples": SAMPLES[config.scale][-2], "data.separation": 2.0}
    write = writer(config, at=size, over=("data.samples", "data.separation"))
    return (*sides(write), where(write, COARSE[config.scale]))


def map_plots(config: ConfigDict) -> tuple[dict, ...]:
    """Samples x separation at each share."""
    axes = {
        "kind": "phase",
        "x": "data.samples",
        "y": "data.separation",
        "against": ("frozen_kmeans", "learned_distance"),
    }
    shares = COARSE[config.scale]
    return (
        *({**axes, "name": f"map-s{share:g}", "at": {"data.share": share}} for share in shares),
        TRAINING,
    )


MAP = Figure(
    "where learning beats k-means: share x samples x separation",
    {"arms": FEW},
    sweep=map_sweep,
    claims=map_claims,
    plots=map_plots,
)

# Clusters that overlap.

#: The largest share of these.
MIDDLE = 0.5


def overlap_shares(config: ConfigDict) -> tuple[float, ...]:
    """Shares to the middle."""
    return (0.0, MIDDLE) if config.scale == "smoke" else (0.0, 0.1, 0.2, 0.3, 0.4, MIDDLE)


def overlap_claims(config: ConfigDict) -> tuple[Claim, ...]:
    """The change of sign at separation 1, for both learned routers."""
    write, shares = writer(config)._replace(prefix="routed.geometry.overlap."), overlap_shares(config)
    told = (*sides(write, MIDDLE), where(write, shares, most=MIDDLE))
    return told if config.scale == "smoke" else (*told, where(write, shares, "crossing-distance", DISTANCE, MIDDLE))


OVERLAP = Figure(
    "the change of sign where clusters overlap: separation 1",
    {"arms": FEW, "data.separation": 1.0, "seed": 100, "seeds": 20},
    sweep=lambda config: product(data__share=overlap_shares(config)),
    claims=overlap_claims,
    plots=lambda config: (
        RATIO | {"arms": FEW[1:]},
        {"kind": "curves", "name": "followed", "x": "data.share", "metrics": FOLLOWED, "arms": FEW},
        TRAINING,
    ),
)

# The router's rate.


def rates_sweep(config: ConfigDict) -> tuple[Point, ...]:
    """Rates of the learned routers at the map's shares; k-means, which reads none, once a share."""
    return product(data__share=COARSE[config.scale], router__learning_rate=RATES[config.scale])


def rates_claims(config: ConfigDict) -> tuple[Claim, ...]:
    """The change of sign at the protocol's rate, and at all others."""
    write = writer(config, at={"router.learning_rate": config.router.learning_rate}, over=("router.learning_rate",))
    return (*sides(write), where(write, COARSE[config.scale]))


RATE = Figure(
    "the change of sign at other rates of the router",
    {"arms": FEW},
    sweep=rates_sweep,
    claims=rates_claims,
    plots=lambda config: (
        {"kind": "phase", "name": "rates", "x": "data.share", "y": "router.learning_rate",
         "against": ("frozen_kmeans", "learned_distance")},
        TRAINING,
    ),
)  # fmt: skip

FIGURES = {"": HEADLINE, "map": MAP, "overlap": OVERLAP, "rates": RATE}


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of FIGURE[,SCALE]."""
    return make_config("geometry", arg, FIGURES, PROTOCOL, SCALES)
