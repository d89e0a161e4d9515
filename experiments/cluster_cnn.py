"""Why do experts specialise, and is it the clusters that make a mixture better than one model?

Question. Chen et al. (2022) build data with cluster structure. The label of a sample is a signal in one of its
patches, the cluster decides the signal, and another cluster's signal with a random sign stands beside it. No sum of a
function over patches, so no two-layer CNN of any width, gets more than 87.5 % right (Theorem 4.1). A mixture of eight
small CNNs with cubic filters, trained by Algorithm 1, gets nearly all right: each expert serves one cluster, and the
router finds the clusters. A mixture of linear experts, which could represent the labels, stays at 93 % with experts
that serve all clusters.

    routed run --config=cluster_cnn              # Tables 1, 3, 4 to 6, 9, protocol of the released code
    routed run --config=cluster_cnn:printed      # ... the protocol as the paper prints it
    routed run --config=cluster_cnn:activations  # Tables 7 and 8
    routed run --config=cluster_cnn:signals      # Figures 3, 4 and 5, the lemmas
    routed run --config=cluster_cnn:picture      # Figure 1
    routed run --config=cluster_cnn:factors      # what makes linear experts fail?
    routed run --config=cluster_cnn:techniques   # noise, normalised gradients, an ensemble
    routed run --config=cluster_cnn:sizes        # experts and filters of Theorem 4.2

Scales: smoke (half a minute; of the tables only setting 3, without models of 512 filters), default, paper.

Two protocols (PRESETS below; every option is a config key). The paper prints one, its released code runs another, and
its tables are the code's: inputs times 10, two logits, softmax applied twice (so the loss is at least .3133), the
noisy score itself as the gate, biases, an early stop, noise also on test samples, one data set for all seeds.

Rules where both are silent, set on seeds from 5000 on.
  steps       500 (released: 501, at most), single models 800 (801). printed: see STEPS.
  data        a data set of our own for each setting, by the same law; test clusters are equally frequent.
  balance     Table 9 has no formula: the released code's term, 1e-4 E^2 mean_e(load_e mean score_e).
  picture     the data of their notebook (noise outside of the signals, norm 3, feature strength 1), 1,024 of the test
              samples.
  horizon     1: no verdict asks about longer training, as the number of steps belongs to the protocol.

Cost on 2 free cores, minutes: headline 16, printed 25, activations 7, signals 3.5, picture .5, factors 17. Beside other
work: techniques 9, sizes 19. A mixture takes 3 seconds a seed, a single model of 128 filters 7, of 512 a minute.

Found (docs/results/chen2022.md, without_page.md): 14 of 16 numbers of Table 3's mixtures are reproduced, 1 of 4 of
Table 9, 6 of 18 of Tables 7 and 8 (7 are open), all orders and Theorem 4.1. As printed, linear experts do better than
in the tables: 96 to 98 % instead of 88 to 96. Of 7 points that linear experts lack in setting 1 the second softmax
takes about 5, the scale 4, the gate 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from ml_collections import ConfigDict

import routed.papers.chen2022  # noqa: F401 (parts of the paper)
from routed.analysis.claims import LEARNED, Claim, Measured, Precondition, Writer, comparability
from routed.plan import Figure, Point, make_config

#: What the paper prints (`paper`) and what its released code does; sigma_0 of the former is not stated.
PRESETS: dict[str, Point] = {
    "paper": {
        "data.target": "sign", "data.target_dim": 1, "experts.width": 16, "loss": "logistic", "data.input_scale": 1.0,
        "selection.name": "top_k", "selection.eval.name": "top_k", "router.noise_in_weights": False,
        "router.noise_at_eval": False, "experts.bias": False, "experts.init": "lecun",
        "experts.init_scale": 1e-3 * math.sqrt(50), "optimizer.normalise": "expert",
        "stop.rise": 0.0, "stop.floor": 0.0, "shared_streams": (),
    },
    "released": {
        "data.target": "class", "data.target_dim": 2, "experts.width": 8, "loss": "softmax_cross_entropy",
        "data.input_scale": 10.0, "selection.name": "raw", "selection.eval.name": "raw",
        "router.noise_in_weights": True, "router.noise_at_eval": True,
        "experts.bias": True, "experts.init": "uniform", "experts.init_scale": 1e-3,
        "optimizer.normalise": "expert_sum", "stop.rise": 0.02, "stop.floor": 0.314, "shared_streams": ("world",),
    },
}  # fmt: skip

#: Strengths of feature and false feature, and the noise; beta is U(1, 2) in all. Alpha and gamma agree in 3, 4 and
#: verify.
SETTINGS: dict[str, Point] = {
    "1": {"data.alpha_low": 0.5, "data.gamma_low": 0.5, "data.gamma_high": 3.0, "data.patch_noise": 1.0},
    "2": {"data.alpha_low": 0.5, "data.gamma_low": 0.5, "data.gamma_high": 3.0, "data.patch_noise": 2.0},
    "3": {"data.alpha_low": 0.5, "data.gamma_low": 0.5, "data.gamma_high": 2.0, "data.patch_noise": 1.0},
    "4": {"data.alpha_low": 0.5, "data.gamma_low": 0.5, "data.gamma_high": 2.0, "data.patch_noise": 2.0},
    "verify": {"data.alpha_low": 1.0, "data.gamma_low": 1.0, "data.gamma_high": 2.0, "data.patch_noise": 1.0},
}
TABLE3 = ("1", "2", "3", "4")
#: Filters of the single models.
FILTERS = (128, 512)
CUBIC, LINEAR = {"experts.activation": "cubic"}, {"experts.activation": "linear"}

# Rule of single models, set on seeds from 5000 on.
# single: the released code's: Adam on the cross entropy (no double softmax), PyTorch's initial weights, coupled weight
#     decay.
PROTOCOL = PRESETS["released"] | {
    "arms": ("learned",), "seeds": 10, "gate.horizon": 1.0, "shuffles": 0,
    "data.name": "patches", "data.clusters": 4, "data.dim": 50, "data.full_batch": True,
    "data.samples": 16000, "data.test_samples": 16000, "batch_size": 16000, "steps": 500, "eval_every": 100,
    "router.name": "conv", "router.noise": "uniform", "router.init_scale": 0.0, "router.learning_rate": 0.1,
    "experts.name": "cnn", "experts.count": 8, "experts.activation": "cubic", "experts.learning_rate": 1e-3,
    "selection.renormalise": False, "selection.eval.renormalise": False, "losses.balance_of": "scores",
    "optimizer.momentum": 0.0, "dispatch": "ragged",
}  # fmt: skip

SCALES = {
    "smoke": lambda config: {
        "data.samples": 400, "data.test_samples": 400, "batch_size": 400, "steps": 10, "eval_every": 5, "seeds": 2
    },
    "default": lambda config: {},
    "paper": lambda config: {} if config.figure == "picture" else {"seeds": 10},  # a map needs no ten runs
}  # fmt: skip

ACCURACY, ENTROPY, LOSS = CURVES = ("test/accuracy", "train/dispatch_entropy", "train/loss")
SINGLE_MODEL = {"arm": "dense_expert"}


def writers(config: ConfigDict) -> tuple[Writer, Writer]:
    """Of numbers, and of orders, whose sides are compared by their difference."""
    numbers = Writer(comparability(config), ACCURACY)
    return numbers, numbers._replace(unit="difference")


def over_runs(mean: float, std: float) -> Measured:
    """Returns a mean over the paper's ten runs, with the deviation of Welch's test (their code divides by ten)."""
    return Measured(mean, std * math.sqrt(10 / 9), 10)


def table3(config: ConfigDict) -> tuple[str, ...]:
    """The settings that a scale has; for a smoke run one that Theorem 4.1 is about."""
    return ("3",) if config.scale == "smoke" else TABLE3


def filters_of(config: ConfigDict) -> tuple[int, ...]:
    """The sizes of single models that a scale has."""
    return FILTERS[:1] if config.scale == "smoke" else FILTERS


def mixtures(settings: Iterable[str]) -> dict[str, Point]:
    """Mixtures of non-linear and of linear experts, by name."""
    kinds = {"non-linear": CUBIC, "linear": LINEAR}
    return {f"{name}, setting {s}": SETTINGS[s] | experts for s in settings for name, experts in kinds.items()}


def single(config: ConfigDict, setting: str, activation: str, filters: int) -> Point:
    """A single model of the released code: `filters` in all, half for each class.

    Three runs below the paper's scale.
    """
    small = (
        {"steps": config.steps, "eval_every": config.eval_every, "stop.min_steps": 0} if config.scale == "smoke" else {}
    )
    return SETTINGS[setting] | {
        "arms": ("dense_expert",), "experts.activation": activation, "experts.width": filters // 2,
        "loss": "cross_entropy", "experts.init_scale": 1.0,
        "experts.learning_rate": 3e-3 if activation == "linear" else 1e-2, "optimizer.name": "adam",
        "optimizer.normalise": "none", "optimizer.l2": 5e-4, "stop.floor": 0.0, "stop.min_steps": 500, "steps": 800,
        "eval_every": 100, "seeds": config.seeds if config.scale == "paper" else min(3, config.seeds),
    } | small  # fmt: skip


def claim_bound(config: ConfigDict, id: str, label: str, at: Point) -> Claim:
    """Theorem 4.1, where alpha and gamma have the same law."""
    _, orders = writers(config)
    statement = f"{label}: at most 87.5 % right"
    return orders.order(f"chen.theorem41.{id}", statement, "theorem", SINGLE_MODEL, {"value": 0.875}, at=at)


# Tables 1, 3 and 9

Table = Mapping[tuple[str, str], tuple[float, float, float, float]]
#: Table 3: accuracy in % and dispatch entropy with their (population) standard deviations over ten runs.
MOE = {
    ("1", "linear"): (92.99, 2.11, 1.300, 0.044), ("1", "cubic"): (99.46, 0.55, 0.098, 0.087),
    ("2", "linear"): (88.48, 1.96, 1.294, 0.036), ("2", "cubic"): (98.09, 1.27, 0.171, 0.103),
    ("3", "linear"): (95.93, 1.34, 1.160, 0.100), ("3", "cubic"): (99.99, 0.02, 0.008, 0.011),
    ("4", "linear"): (93.30, 1.48, 1.160, 0.155), ("4", "cubic"): (98.92, 1.18, 0.089, 0.120),
}  # fmt: skip
#: What the outputs of their released notebooks say where they differ from Table 3, in its form.
NOTEBOOK = {("2", "linear"): (89.49, 1.35, 1.262, 0.095), ("2", "cubic"): (98.10, 1.56, 0.183, 0.144)}
#: Tables 1 and 3: accuracy in % of single models, one run each, with 128 and 512 filters.
SINGLE = {
    ("1", "linear"): (68.71, 67.63), ("1", "cubic"): (79.48, 78.18), ("2", "linear"): (60.59, 63.04),
    ("2", "cubic"): (72.29, 52.09), ("3", "linear"): (74.81, 74.54), ("3", "cubic"): (72.69, 67.78),
    ("4", "linear"): (74.63, 72.98), ("4", "cubic"): (68.60, 61.65),
}  # fmt: skip
#: Table 9: accuracy of the linear mixture with a balance loss. Theirs: 1e-4 E^2 mean_e = 1e-4 E sum_e; ours: E sum_e.
TABLE9 = {"1": (93.81, 1.02), "2": (89.20, 2.20), "3": (95.12, 0.58), "4": (92.50, 1.55)}
BALANCED, UNBALANCED = {"losses.balance": 1e-4}, {"losses.balance": 0.0}


def rows(config: ConfigDict) -> dict[str, Point]:
    """The rows of the tables, by name."""
    settings = table3(config)
    balanced = {f"linear, balanced, setting {s}": SETTINGS[s] | LINEAR | BALANCED for s in settings}
    singles = {
        f"single {activation}, {filters} filters, setting {s}": single(config, s, activation, filters)
        for s in settings
        for activation in ("linear", "cubic")
        for filters in filters_of(config)
    }
    return mixtures(settings) | balanced | singles


def claim_mixtures(config: ConfigDict, s: str, at: Point, entropy: str) -> Iterator[Claim]:
    """Table 3's mixtures of setting `s`, also against the notebook. `at` is what other rows have another value of."""
    _, orders = writers(config)
    yield from claim_numbers(config, s, at, entropy, "table3", MOE)
    yield from claim_numbers(config, s, at, entropy, "notebook", NOTEBOOK)
    order, linear, cubic = orders._replace(at=SETTINGS[s] | at).order, LEARNED | LINEAR, LEARNED | CUBIC
    statement = f"setting {s}: non-linear experts beat linear ones"
    yield order(f"chen.table3.s{s}.accuracy", statement, "99 against 93 %", linear, cubic)
    statement = f"setting {s}: non-linear experts divide the clusters, linear ones do not"
    yield order(f"chen.table3.s{s}.entropy", statement, "below .2 against above 1.1", cubic, linear, metric=entropy)


def claim_numbers(config: ConfigDict, s: str, at: Point, entropy: str, source: str, table: Table) -> Iterator[Claim]:
    """Accuracy and entropy of setting `s` against those numbers that a source has of it."""
    numbers, _ = writers(config)
    for name, experts in (("nonlinear", CUBIC), ("linear", LINEAR)):
        if (s, experts["experts.activation"]) not in table:
            continue
        accuracy, accuracy_std, spread, spread_std = table[s, experts["experts.activation"]]
        suffix = "" if source == "table3" else f" ({source})"
        label, write = f"setting {s}, mixture of {name} experts", numbers._replace(at=SETTINGS[s] | experts | at)
        id = f"chen.{source}.s{s}.moe-{name}"
        yield write.number(
            f"{id}.accuracy", f"{label}: accuracy{suffix}", over_runs(accuracy / 100, accuracy_std / 100)
        )
        yield write.number(
            f"{id}.entropy", f"{label}: dispatch entropy{suffix}", over_runs(spread, spread_std), metric=entropy
        )


def claim_singles(config: ConfigDict, s: str) -> Iterator[Claim]:
    """Single models of setting `s`: their numbers, Theorem 4.1, and the mixture beside them."""
    numbers, orders = writers(config)
    for activation in ("linear", "cubic"):
        for filters, accuracy in zip(filters_of(config), SINGLE[s, activation], strict=False):
            at = SETTINGS[s] | {"experts.activation": activation, "experts.width": filters // 2}
            label, id = f"setting {s}, single {activation} model of {filters} filters", f"{activation}-{filters}"
            number = numbers._replace(at=at).number
            yield number(f"chen.table3.s{s}.single-{id}", f"{label}: accuracy", accuracy / 100, SINGLE_MODEL)
            if s in ("3", "4"):
                yield claim_bound(config, f"s{s}.{id}", label, at)
    mixture = LEARNED | CUBIC | {"experts.width": config.experts.width} | UNBALANCED
    statement = f"setting {s}: the mixture beats a single cubic model of as many filters"
    model = SINGLE_MODEL | CUBIC | {"experts.width": 64}
    yield orders.order(f"chen.table1.s{s}.mixture", statement, "99 against 79 %", model, mixture, at=SETTINGS[s])


def claim_balance(config: ConfigDict, s: str) -> Iterator[Claim]:
    """Table 9 in setting `s`."""
    numbers, orders = writers(config)
    mean, std = TABLE9[s]
    statement, at = f"setting {s}, linear experts with a balance loss: accuracy", SETTINGS[s] | LINEAR | BALANCED
    yield numbers.number(f"chen.table9.s{s}", statement, over_runs(mean / 100, std / 100), at=at)
    statement = f"setting {s}: balancing does not make linear experts as good as non-linear ones"
    order = orders._replace(at=SETTINGS[s] | {"experts.width": config.experts.width}).order
    linear, cubic = LEARNED | LINEAR | BALANCED, LEARNED | CUBIC | UNBALANCED
    yield order(f"chen.table9.s{s}.order", statement, "94 against 99 %", linear, cubic)


def claim_tables(config: ConfigDict) -> Iterator[Claim]:
    """Every number of the tables, and the orders that the paper draws from them."""
    at = {"experts.width": config.experts.width} | UNBALANCED
    for s in table3(config):
        yield from claim_mixtures(config, s, at, ENTROPY)
        yield from claim_singles(config, s)
        yield from claim_balance(config, s)


def draw_tables(config: ConfigDict, methods: dict[str, Point], entropy: str) -> tuple[dict, ...]:
    """The rows beside each other, where the first setting's samples go, and how the mixtures train."""
    settings = table3(config)
    return (
        {"kind": "methods", "name": "table3", "methods": methods, "metrics": (ACCURACY, entropy)},
        {"kind": "dispatch", "name": "dispatch", "lines": mixtures(settings[:1])},
        {"kind": "series", "name": "training", "lines": mixtures(settings), "metrics": CURVES},
    )


HEADLINE = Figure(
    "Tables 1, 3, 4 to 6 and 9: mixtures and single models in four settings, protocol of the released code",
    sweep=lambda config: tuple(rows(config).values()),
    claims=lambda config: tuple(claim_tables(config)),
    plots=lambda config: draw_tables(config, rows(config), ENTROPY),
)


# The protocol as printed

#: Steps of the printed protocol, whose inputs are ten times smaller: by then the test accuracy of linear experts, the
#: slower ones, has stopped changing (by less than .004 over the next 1,600 steps, in all settings, on seed 5000).
STEPS = 6400

PRINTED = Figure(
    "Table 3's mixtures, the protocol as the paper prints it",
    changes=PRESETS["paper"] | {"steps": STEPS, "eval_every": STEPS // 20, "seeds": 5},
    sweep=lambda config: tuple(mixtures(table3(config)).values()),
    claims=lambda config: tuple(
        claim.replace(id=f"{claim.id}.printed")
        for s in table3(config)
        for claim in claim_mixtures(config, s, {}, "router/dispatch_entropy")
    ),
    plots=lambda config: draw_tables(config, mixtures(table3(config)), "router/dispatch_entropy"),
)


# Tables 7 and 8

#: Tables 7 (verify) and 8 (settings 1 and 2): accuracy in % of single models with 128 filters.
TABLES7AND8 = {
    "linear": (74.81, 68.71, 60.59), "cubic": (72.69, 79.48, 72.29), "relu": (73.45, 72.28, 80.12),
    "celu": (76.91, 81.75, 78.99), "gelu": (74.01, 79.04, 82.01), "tanh": (74.76, 81.72, 81.03),
}  # fmt: skip
DATA = ("verify", "1", "2")


def models(config: ConfigDict) -> dict[str, Point]:
    """The single models of the tables, by name."""
    return {f"{name}, data {s}": single(config, s, name, 128) for s in DATA for name in TABLES7AND8}


def claim_activations(config: ConfigDict) -> Iterator[Claim]:
    """Tables 7 and 8, and Theorem 4.1 for each activation on data where alpha and gamma agree."""
    numbers, _ = writers(config)
    for name, values in TABLES7AND8.items():
        for s, value in zip(DATA, values, strict=True):
            label, at = f"data {s}, single {name} model of 128 filters", SETTINGS[s] | {"experts.activation": name}
            id = f"chen.table7.{name}" if s == "verify" else f"chen.table8.{name}.s{s}"
            yield numbers.number(id, f"{label}: accuracy", value / 100, SINGLE_MODEL, at=at)
            if s == "verify":
                yield claim_bound(config, f"verify.{name}", label, at)


ACTIVATIONS = Figure(
    "Tables 7 and 8: single models with six activations",
    sweep=lambda config: tuple(models(config).values()),
    claims=lambda config: tuple(claim_activations(config)),
    plots=lambda config: (
        {"kind": "methods", "name": "activations", "methods": models(config), "metrics": (ACCURACY, LOSS)},
    ),
)


# Figures 3, 4 and 5, the lemmas


def claim_signals(config: ConfigDict) -> tuple[Claim, ...]:
    """What Figs. 3 to 5 say in words, and the lemmas."""
    order = Writer(comparability(config), "signals/expert_feature", SETTINGS["1"] | CUBIC, "difference").order
    names = ("expert_centre", "router_feature", "router_centre")
    centre, router_feature, router_centre = (LEARNED | {"metric": f"signals/{name}"} for name in names)
    return (
        order("chen.fig4.one-feature", "a non-linear expert has less of a second feature than a linear one",
              "Figs. 4 and 5", LEARNED | CUBIC, LEARNED | LINEAR, metric="signals/expert_others", at=SETTINGS["1"]),
        order("chen.fig4.no-centre", "a non-linear expert aligns with its feature more than with any centre",
              "Figs. 4 and 5", centre, LEARNED),
        order("chen.fig4.router", "the router of non-linear experts aligns with centres more than with features",
              "Figs. 4 and 5", router_feature, router_centre, metric="signals/router_centre"),
        order("chen.fig5.router", "the router of linear experts aligns with features more than with centres",
              "Figs. 4 and 5", router_centre, router_feature, metric="signals/router_feature",
              at=SETTINGS["1"] | LINEAR),
        *(
            order(f"chen.fig3.s{s}", f"setting {s}: the entropy of non-linear experts ends below that of linear ones",
                  "below .3 against above 1.1", LEARNED | CUBIC, LEARNED | LINEAR, metric=ENTROPY, at=SETTINGS[s])
            for s in ("1", "2")
        ),
        order("chen.lemma51", "routing moves at most E^2 times as far as scores (Lemma 5.1)",
              "lemma", LEARNED, {"value": 1.0}, metric="theory/lemma51"),
        order("chen.theorem42.groups",
              "experts serve the cluster that their initial filters favour more often than by chance (1/4)",
              "theorem", {"value": 0.25}, LEARNED, metric="router/group_hit"),
    )  # fmt: skip


def draw_signals(config: ConfigDict) -> tuple[dict, ...]:
    """Entropy in both settings; in setting 1 products with signals, alignment and what the lemmas bound."""
    lines = dict(zip(("non-linear", "linear"), mixtures(("1",)).values(), strict=True))
    experts = ("signals/expert_feature", "signals/expert_others", "signals/expert_centre")
    alignment = (*experts, "signals/router_feature", "signals/router_centre", "router/group_hit")
    lemmas = ("theory/lemma51", "theory/lemma_c4", "theory/row_sum")
    return (
        {"kind": "series", "name": "figure3", "lines": mixtures(("1", "2")), "metrics": CURVES},
        {"kind": "products", "name": "figures4and5", "lines": lines},
        {"kind": "series", "name": "alignment", "lines": lines, "metrics": alignment},
        {"kind": "series", "name": "lemmas", "lines": lines, "metrics": lemmas},
    )


SIGNALS = Figure(
    "Figs. 3, 4 and 5, the lemmas: what experts and router align with over training",
    changes={"eval_every": 25, "stop.rise": 0.0, "seed": 40},  # a claim came after seeds 0 to 9 were seen
    sweep=lambda config: tuple(mixtures(("1", "2")).values()),
    claims=claim_signals,
    plots=draw_signals,
)


# Figure 1

PICTURES: dict[str, Point] = {
    f"{name} experts": {
        "data.alpha_low": 1.0, "data.alpha_high": 1.0, "data.beta_low": 1.2,
        "data.gamma_low": 1.0, "data.gamma_high": 2.0,
    } | experts
    for name, experts in (("non-linear", CUBIC), ("linear", LINEAR))
}  # fmt: skip

PICTURE = Figure(
    "Fig. 1: a map of the samples and where the router sends them",
    changes={
        "experts.count": 4, "experts.width": 10, "data.noise_outside": True, "data.patch_noise": 3.0,
        "data.samples": 1600, "data.test_samples": 1600, "batch_size": 1600, "stop.rise": 0.0, "seeds": 3,
    },
    sweep=lambda config: tuple(PICTURES.values()),
    plots=lambda config: (
        {"kind": "embedding", "name": "figure1", "lines": PICTURES},
        {"kind": "dispatch", "name": "dispatch", "lines": PICTURES},
    ),
)  # fmt: skip


# Our own question: what makes linear experts fail?

#: Gate, loss and scale, with what goes with each.
GATES: dict[str, Point] = {
    "score as gate": {"selection.name": "raw", "selection.eval.name": "raw", "router.noise_in_weights": True},
    "softmax gate": {"selection.name": "top_k", "selection.eval.name": "top_k", "router.noise_in_weights": False},
}
LOSSES: dict[str, Point] = {
    "softmax twice": {"loss": "softmax_cross_entropy", "stop.floor": 0.314},
    "softmax once": {"loss": "cross_entropy", "stop.floor": 0.0},
}


def cells(config: ConfigDict) -> dict[str, Point]:
    """Every gate, loss and scale, in setting 1; the smaller scale takes as many steps as the printed protocol."""
    longer = {} if config.scale == "smoke" else {"steps": STEPS, "eval_every": STEPS // 4}
    return {
        f"{gate}, {loss}, inputs x {scale:g}": GATES[gate] | LOSSES[loss] | {"data.input_scale": scale} | steps
        for gate in GATES
        for loss in LOSSES
        for scale, steps in ((10.0, {}), (1.0, longer))
    }


def combinations(config: ConfigDict) -> dict[str, Point]:
    """Every cell with linear and with cubic experts."""
    kinds = {"linear": LINEAR, "cubic": CUBIC}
    return {f"{kind}: {label}": cell | kinds[kind] for label, cell in cells(config).items() for kind in kinds}


def claim_factors(config: ConfigDict) -> Iterator[Claim]:
    """Does one change to the released protocol let linear experts learn? Are non-linear ones better in every cell?"""
    _, orders = writers(config)
    released = {"selection.name": "raw", "loss": "softmax_cross_entropy", "data.input_scale": 10.0}
    for name, key, value, change in (
        ("gate", "selection.name", "top_k", "a softmax gate"), ("loss", "loss", "cross_entropy", "softmax once"),
        ("scale", "data.input_scale", 1.0, "inputs as printed"),
    ):  # fmt: skip
        rest = {k: v for k, v in released.items() if k != key}
        yield orders.order(f"routed.cluster.{name}", f"{change} lets linear experts do better than as released",
                           "not asked", LEARNED | {key: released[key]}, LEARNED | {key: value},
                           at=rest | LINEAR)  # fmt: skip
    for i, (label, cell) in enumerate(cells(config).items()):
        at, statement = {key: cell[key] for key in released}, f"non-linear experts beat linear ones: {label}"
        id = f"routed.cluster.nonlinear.{i}"
        yield orders.order(id, statement, "99 against 93 %", LEARNED | LINEAR, LEARNED | CUBIC, at=at)


FACTORS = Figure(
    "what makes linear experts fail: gate, loss and scale of the inputs",
    changes={"seeds": 3},
    sweep=lambda config: tuple(combinations(config).values()),
    claims=lambda config: tuple(claim_factors(config)),
    plots=lambda config: (
        {"kind": "methods", "name": "factors", "methods": combinations(config), "metrics": (ACCURACY, ENTROPY)},
    ),
)

# Key Techniques 1 and 3, the remark after Theorem 4.1, and the sizes of Theorem 4.2

# Rules (docs/decisions/chen2022.md): Algorithm 1 as printed in setting 3, where Theorem 4.1 holds. Inputs x 10 with a
# tenth of the router's rate are printed inputs with sigma_0, eta and eta_r x 10, so a tenth of the steps. Loads are
# chances over the noise (their eq. 5.1), so test samples are routed with it.
ALGORITHM1 = PRESETS["paper"] | SETTINGS["3"] | CUBIC | {
    "data.input_scale": 10.0, "router.learning_rate": 0.01, "router.noise_at_eval": True, "eval_every": 50,
}  # fmt: skip
GAP, SHARE, OWN_ERROR = "router/group_gap", "router/group_share", "theory/own_error"
#: Readings of o(1): of an error or a difference of loads, and of the test error, which is "nearly zero".
SMALL, TINY = 0.1, 0.05
#: Plain gradients must have learned before their loads are compared: a router at its start is even.
LEARNT = (Precondition("learned_plain", "ensemble", 0.4, "train/loss"),)


def techniques(config: ConfigDict) -> dict[str, Point]:
    """The mixture with and without the techniques, an ensemble of as many experts, and one expert."""
    count = config.experts.count
    return {f"{count} experts": {"experts.count": count}, "one expert": {"experts.count": 1, "arms": ("ensemble",)}}


def claim_techniques(config: ConfigDict) -> Iterator[Claim]:
    """Section 5 on both techniques, and the ensemble's bound; what the paper leaves open is a claim of ours."""
    at = {"experts.count": config.experts.count}
    write = Writer(comparability(config), ACCURACY, at, "difference", prefix="chen.")
    ours = write._replace(prefix="routed.cluster.")
    noiseless, plain, neither, ensemble = (
        {"arm": name} for name in ("learned_noiseless", "learned_plain", "learned_plain_noiseless", "ensemble")
    )
    load, churn = "router/load_max", "router/churn"
    for id, statement, paper, lower, higher, metric in (
        ("technique1.accuracy", "noise on the choice raises accuracy", "it stabilises training", noiseless, LEARNED,
         ACCURACY),
        ("technique1.plain", "noise raises it with plain gradients too", "it stabilises training", neither, plain,
         ACCURACY),
        ("technique1.stable", "with noise fewer choices change over the last 50 steps", "the router is more stable",
         LEARNED, noiseless, churn),
        ("technique1.load", "with noise the largest load is lower", "it helps exploration across experts", LEARNED,
         noiseless, load),
        ("technique3.load", "normalised gradients even out the load inside a group", "almost the same amount of data",
         LEARNED, plain, GAP),
        ("technique3.even", f"with them loads inside a group differ by less than {SMALL}",
         "almost the same amount of data", LEARNED, {"value": SMALL}, GAP),
        ("technique3.speed", "with them experts err less on the cluster of their group",
         "experts of a group are trained at the same speed", LEARNED, plain, OWN_ERROR),
        ("technique3.accuracy", "they raise accuracy", "imbalance causes performance problems", plain, LEARNED,
         ACCURACY),
        ("ensemble.bound", "an ensemble: at most 87.5 % right", "theorem", ensemble, {"value": 0.875}, ACCURACY),
        ("ensemble.mixture", "the mixture beats an ensemble of as many experts", "theorem", ensemble, LEARNED,
         ACCURACY),
    ):  # fmt: skip
        needs = LEARNT if id == "technique3.load" else ()
        yield write.order(id, statement, paper, lower, higher, metric=metric, needs=needs)
    single = ensemble | {"experts.count": 1}
    yield ours.order("ensemble", "an ensemble of 8 experts beats one of them", "may not improve", single, ensemble)


TECHNIQUES = Figure(
    "Key Techniques 1 and 3: a mixture without noise, without normalised gradients, and an ensemble",
    changes=ALGORITHM1
    | {"arms": ("learned", "learned_noiseless", "learned_plain", "learned_plain_noiseless", "ensemble")},
    sweep=lambda config: tuple(techniques(config).values()),
    claims=lambda config: tuple(claim_techniques(config)),
    plots=lambda config: (
        {"kind": "methods", "name": "techniques", "methods": techniques(config),
         "metrics": (ACCURACY, GAP, "router/load_max", OWN_ERROR)},
        {"kind": "training", "name": "training", "at": {"experts.count": config.experts.count},
         "metrics": (ACCURACY, GAP, SHARE)},
        *({"kind": "dispatch", "name": f"dispatch_{arm}", "arm": arm, "lines": {"8 experts": {"experts.count": 8}}}
          for arm in ("learned", "learned_plain")),
    ),
)  # fmt: skip


def sizes(config: ConfigDict) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of experts M, of 16 filters each, and of filters J of 8 experts. With constants 1 they ask for 7.6
    and 2.8.
    """
    return ((4, 8), (4, 16)) if config.scale == "smoke" else ((4, 8, 16, 32), (1, 4, 16, 64))


def sized(config: ConfigDict) -> tuple[Point, ...]:
    """A point for each size; the router's rate grows with the square of M, as Theorem 4.2 has it."""
    experts, filters = sizes(config)
    base = config.experts.count, config.experts.width
    pairs = dict.fromkeys([*((count, base[1]) for count in experts), *((base[0], width) for width in filters)])
    return tuple(
        {"experts.count": count, "experts.width": width,
         "router.learning_rate": config.router.learning_rate * (count / base[0]) ** 2}
        for count, width in pairs
    )  # fmt: skip


def claim_sizes(config: ConfigDict) -> Iterator[Claim]:
    """Theorem 4.2's statements at each M that is large enough, and what becomes worse with few experts or filters."""
    (few, *enough), (narrow, *_, wide) = sizes(config)
    experts, filters = "M of order K log K log log d", "J of order log M log log d"
    order = Writer(comparability(config), ACCURACY, {}, "difference", prefix="chen.theorem42.").order
    mixtures = {count: LEARNED | {"experts.count": count, "experts.width": 16} for count in (few, *enough)}
    thin, thick = (LEARNED | {"experts.count": 8, "experts.width": width} for width in (narrow, wide))
    most, sides = enough[-1], (mixtures[few], mixtures[enough[-1]])
    yield order("experts.accuracy", f"{most} experts are right more often than {few}", experts, *sides)
    statement = f"with {most} experts more samples go to the group of their cluster than with {few}"
    yield order("experts.router", statement, experts, *sides, metric=SHARE)
    yield order(
        "width.accuracy", f"experts of {wide} filters are right more often than of {narrow}", filters, thin, thick
    )
    for count in enough:
        mixture, id, label = mixtures[count], f"m{count}", f"{count} experts"
        yield order(f"{id}.error", f"{label}: test error below {TINY}", "o(1)", {"value": 1 - TINY}, mixture)
        statement = f"{label} err on less than {SMALL} of the cluster of their group"
        yield order(f"{id}.experts", statement, "o(1)", mixture, {"value": SMALL}, metric=OWN_ERROR)
        statement = f"{label}: more than {1 - SMALL} of the samples go to the group of their cluster"
        yield order(f"{id}.router", statement, "1 - o(1)", {"value": 1 - SMALL}, mixture, metric=SHARE)


SIZES = Figure(
    "Theorem 4.2: accuracy and routing against the number of experts and of filters",
    changes=ALGORITHM1,
    sweep=sized,
    claims=lambda config: tuple(claim_sizes(config)),
    plots=lambda config: (
        {"kind": "curves", "name": "experts", "x": "experts.count", "at": {"experts.width": 16},
         "metrics": (ACCURACY, SHARE, OWN_ERROR, GAP)},
        {"kind": "curves", "name": "filters", "x": "experts.width", "at": {"experts.count": 8},
         "metrics": (ACCURACY, SHARE, OWN_ERROR, GAP)},
    ),
    computed=("router.learning_rate",),
)  # fmt: skip


FIGURES = {
    "": HEADLINE, "printed": PRINTED, "activations": ACTIVATIONS,
    "signals": SIGNALS, "picture": PICTURE, "factors": FACTORS,
    "techniques": TECHNIQUES, "sizes": SIZES,
}  # fmt: skip


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of FIGURE[,SCALE]."""
    return make_config("cluster_cnn", arg, FIGURES, PROTOCOL, SCALES)
