"""Can a router find the atoms when every sample is a sum of two clusters?

Question. Dikkala et al. (2023, 3.6 and C.3) add up samples of r of c Gaussians ("atoms") and ask for a linear function
that depends on these atoms. This is their negative result: the mixture is about as good as a dense net, and its router
is no sparser than its shuffled self. The paper contradicts itself: Section 3.6 prints a target from the centres (sum_i
w_i^T mu_i), .19 against .03, and .03 also with a frozen router; C.3 prints (w_i + w_j)^T x, dense .043, mixture .041,
and .19 for a dense net of one layer. Which reading reproduces?

    routed run --config=dictionary_router           # c = 32 and 128, the target of C.3
    routed run --config=dictionary_router:readings  # all three targets, r = 2 and 3
    routed run --config=dictionary_router:separation

From the paper: d = 32 (not restated for c = 128), r = 2, 32 linear experts, a dense net of 2 layers with ReLU, one of
1 layer. The paper does not state the scale of its MSE; ours is over the target's variance.

Rules where the paper is silent, fixed on seeds from 5000 on; none compares learned with frozen.
  separation  c = 1 between atoms, as in experiments/gmm_router.py (pairs are closer: the Bayes loss is .05 at c = 32).
              The figure `separation` shows other values.
  weights     w_i ~ N(0, I/32); the atoms' samples have covariance I. Samples are fresh in every batch of 64.
  rates       Adam with 10 times the paper's rates of Fig. 2: of 3 and 10 the better factor for the dense net (.43, .41
              at c = 32).
  dense       dense_total, the parameters of the whole layer in 2 layers; dense_expert, one linear map.
  sparsity    the paper's four: over pairs (router/sparsity), shuffled, over all samples (router/experts_used), with
              one atom fixed (router/sparsity_by_atom). Test samples come from all 496 pairs, or from 512 random pairs.
  steps       12,000, as for experiments/sequence_router.py.

Smoke (half a minute) has 4 and 6 atoms, neither dense_active nor frozen_kmeans, and at 6 atoms neither frozen_top1 nor
dense_expert.

Cost on 2 free cores: 5 minutes, separation 2, readings 5 to 6 (readings by --dry_run).

Found (docs/results/dikkala2023.md; readings and separation: docs/results/without_page.md): one linear map is twice as
bad, as in the paper. The dense net is a little better than the mixture, and the learned router is sparser than its
shuffled self, against the paper, in every reading and at every separation. Frozen is as good as learned (3.6) where
labels come from atoms. Routers that collapse, at rates of 1 and 3, come nearer to the paper's sparsities, and do not
reach them.
"""

from __future__ import annotations

from ml_collections import ConfigDict

import routed.papers.dikkala2023  # noqa: F401 (parts of the paper)
from routed.analysis.claims import FAIREST, FROZEN, LEARNED, Claim, Writer, comparability
from routed.plan import Figure, Point, make_config, product

PAIR = ("learned", "frozen")
CONTROLS = ("frozen_sharp", "frozen_top1", "frozen_data", "frozen_kmeans")
ALL = (*PAIR, *CONTROLS, "dense_active", "dense_total", "dense_expert")
DENSE, ONE_MAP = {"arm": "dense_total"}, {"arm": "dense_expert"}
ATOMS = {"smoke": (4, 6), "default": (32, 128), "paper": (32, 128)}
#: Test samples: the same number of every combination of 2 (of 3) atoms that is judged.
SAMPLES = {4: 480, 6: 480, 32: 7936, 128: 8192}

LOSSES = ("test/loss_soft", "test/loss")
#: The paper's four sparsities, and the learned router's as sides of claims.
SPARSITIES = ("router/sparsity", "router/sparsity_shuffled", "router/sparsity_by_atom", "router/experts_used")
SPARSITY, SHUFFLED, BY_ATOM, USED = (LEARNED | {"metric": metric} for metric in SPARSITIES)

PROTOCOL = {
    "arms": (*PAIR, "dense_total", "dense_expert"),
    "data.name": "dictionary", "data.clusters": 32, "data.dim": 32, "data.rank": 2,
    "data.target": "cross", "data.target_dim": 1, "data.fresh": True, "data.test_samples": 7936,
    "experts.count": 32, "experts.name": "mlp", "experts.depth": 1,
    "optimizer.name": "adam", "router.learning_rate": 3.2e-2, "experts.learning_rate": 3.2e-3,
    "batch_size": 64, "steps": 12000, "eval_every": 1000, "seeds": 10,
}  # fmt: skip

SCALES = {
    "smoke": lambda config: {
        "data.clusters": 4, "data.dim": 4, "data.test_samples": 480, "experts.count": 4,
        "steps": 40, "eval_every": 20, "seeds": 2, "shuffles": 4,
    },
    "default": lambda config: {},
    "paper": lambda config: {"steps": 120000, "eval_every": 10000, "seeds": 32},
}  # fmt: skip

TRAINING = {"kind": "training", "name": "training", "metrics": ("train/loss", "test/loss_soft", "router/sparsity")}


def plots(x: str) -> tuple[dict, ...]:
    """Losses and the four sparsities against `x`."""
    return (
        {"kind": "curves", "name": "loss", "x": x, "metrics": LOSSES},
        {"kind": "curves", "name": "sparsity", "x": x, "metrics": SPARSITIES, "arms": PAIR},
        {"kind": "gap", "name": "gap", "x": x},
        TRAINING,
    )


# C.3: 32 and 128 atoms.


def few_and_many(config: ConfigDict) -> tuple[Point, ...]:
    """Few and many atoms, with their test samples."""
    return tuple({"data.clusters": c, "data.test_samples": SAMPLES[c]} for c in ATOMS[config.scale])


def atoms_sweep(config: ConfigDict) -> tuple[Point, ...]:
    """Returns the points of C.3; a smoke run leaves out arms that no claim at a point needs."""
    few, many = few_and_many(config)
    if config.scale != "smoke":
        return few, many
    idle = ({"dense_active", "frozen_kmeans"}, {"dense_active", "frozen_kmeans", "frozen_top1", "dense_expert"})
    arms_at_few, arms_at_many = (tuple(arm for arm in ALL if arm not in names) for names in idle)
    return few | {"arms": arms_at_few}, many | {"arms": arms_at_many}


def atoms_claims(config: ConfigDict) -> tuple[Claim, ...]:
    """The paper's orders and numbers at few and at many atoms (32 and 128 but for smoke), and the fairest control."""
    few, many = few_and_many(config)
    c32 = Writer(comparability(config), "test/loss_soft", few, prefix="dikkala.dict-c32.")
    c128 = c32._replace(at=many, prefix="dikkala.dict-c128.")
    ours = c32._replace(metric="test/loss", prefix="routed.dictionary.")
    sparsity, shuffled, by_atom, used = SPARSITIES
    least, most = (f"{point['data.clusters']} atoms" for point in (few, many))
    return (
        c32.null("dense", f"{least}: learned and dense are about equal", ".041 and .043", LEARNED, DENSE),
        c32.order("shallow", f"{least}: one linear map is worse", ".19 against .041", LEARNED, ONE_MAP),
        c32.null("shuffled", f"{least}: as sparse as shuffled", "4.5 and 4.5", SPARSITY, SHUFFLED),
        c32.order("atom", f"{least}: fixing an atom narrows the choice of experts", "6.4 against 8.1", BY_ATOM, USED),
        c32.beside("moe-mse", f"{least}: loss of the mixture", 0.041),
        c32.beside("dense-mse", f"{least}: loss of the dense net", 0.043, DENSE),
        c32.beside("shallow-mse", f"{least}: loss of one linear map", 0.19, ONE_MAP),
        c32.number("sparsity", f"{least}: sparsity over pairs", 4.5, metric=sparsity),
        c32.number("sparsity-shuffled", f"{least}: the same, shuffled", 4.5, metric=shuffled),
        c32.number("sparsity-all", f"{least}: experts used over all pairs", 8.1, metric=used),
        c32.number("sparsity-atom", f"{least}: sparsity with one atom fixed", 6.4, metric=by_atom),
        c128.order("dense", f"{most}: learned beats dense", ".23 against .26", LEARNED, DENSE),
        c128.order("frozen", f"{most}: learned beats frozen", ".23 against .38", LEARNED, FROZEN),
        c128.null("shuffled", f"{most}: as sparse as shuffled", "3.01 and 3.01", SPARSITY, SHUFFLED),
        c128.beside("moe-mse", f"{most}: loss of the mixture", 0.23),
        c128.beside("dense-mse", f"{most}: loss of the dense net", 0.26, DENSE),
        c128.beside("frozen-mse", f"{most}: loss with a frozen router", 0.38, FROZEN),
        c128.number("sparsity", f"{most}: sparsity over pairs", 3.01, metric=sparsity),
        c128.number("sparsity-shuffled", f"{most}: the same, shuffled", 3.01, metric=shuffled),
        ours.order("fair", f"{least}: learned beats the fairest frozen control, top-1", "not asked", LEARNED, FAIREST),
    )


CROSS = Figure(
    "C.3: loss and four sparsities with 32 and 128 atoms",
    {"arms": ALL},
    sweep=atoms_sweep,
    claims=atoms_claims,
    plots=lambda config: plots("data.clusters"),
)

# Which of the printed targets reproduces?


def readings_sweep(config: ConfigDict) -> tuple[Point, ...]:
    """The three targets, for sums of 2 and of 3 atoms."""
    samples = {2: config.data.test_samples, 3: 480 if config.scale == "smoke" else 8192}
    return tuple(
        {"data.target": target, "data.rank": rank, "data.test_samples": samples[rank]}
        for rank in samples
        for target in ("cross", "atoms", "centres")
    )


def readings_claims(config: ConfigDict) -> tuple[Claim, ...]:
    """The paper's three statements, for each reading."""
    claims: list[Claim] = []
    for point in readings_sweep(config):
        target, rank = point["data.target"], point["data.rank"]
        name, label = f"{target}.r{rank}", f"target {target}, {rank} atoms"
        write = Writer(comparability(config), "test/loss_soft", point, prefix="dikkala.dict-main.")
        claims += [
            write.order(f"dense.{name}", f"{label}: learned beats dense (.19 against .03)", "yes", LEARNED, DENSE),
            write.order(f"shallow.{name}", f"{label}: learned beats one linear map (.19 against .041)", "yes",
                        LEARNED, ONE_MAP),
            write.null(f"frozen.{name}", f"{label}: frozen has the loss of learned (.03)", "equal", FROZEN, LEARNED),
        ]  # fmt: skip
    return tuple(claims)


def readings_plots(config: ConfigDict) -> tuple[dict, ...]:
    """Every reading, on the losses and the sparsity."""
    methods = {f"{point['data.target']}, {point['data.rank']} atoms": point for point in readings_sweep(config)}
    metrics = (*LOSSES, *SPARSITIES[:2])
    return ({"kind": "methods", "name": "readings", "methods": methods, "metrics": metrics}, TRAINING)


READINGS = Figure(
    "all three targets that the paper prints, with sums of 2 and of 3 atoms",
    sweep=readings_sweep,
    claims=readings_claims,
    plots=readings_plots,
)

# The separation of the atoms.

SEPARATIONS = (0.5, 1.0, 2.0, 4.0)


def separation_claims(config: ConfigDict) -> tuple[Claim, ...]:
    """Whether the router is sparser than shuffled, at each separation."""
    write = Writer(comparability(config), "test/loss_soft", prefix="routed.dictionary.")
    return tuple(
        write.order(f"c{c:g}", f"separation {c:g}: sparser than shuffled", "4.5 against 4.5", SPARSITY, SHUFFLED,
                    at={"data.separation": c})
        for c in SEPARATIONS
    )  # fmt: skip


SEPARATION = Figure(
    "loss and four sparsities against the separation of the atoms",
    sweep=lambda config: product(data__separation=SEPARATIONS),
    claims=separation_claims,
    plots=lambda config: plots("data.separation"),
)

FIGURES = {"": CROSS, "readings": READINGS, "separation": SEPARATION}


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of FIGURE[,SCALE]."""
    return make_config("dictionary_router", arg, FIGURES, PROTOCOL, SCALES)
