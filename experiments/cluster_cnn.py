"""Why do experts specialise, and is it the clusters that make a mixture better than one model?

Question. Chen et al. (2022) build data with cluster structure: the label of a sample is a signal in one of its patches, which signal
it is depends on its cluster, and another cluster's signal with a random sign stands beside it. No sum of a function over patches, so no
two-layer CNN of any width, gets more than 87.5 % right (Theorem 4.1). A mixture of eight small CNNs with cubic filters, trained by
Algorithm 1, gets nearly all right, each expert serving one cluster and the router finding the clusters; one of linear experts, which
could represent the labels, stays at 93 % with experts that serve all clusters.

    python -m routed.main --config=experiments/cluster_cnn.py               # Tables 1, 3, 4 to 6, 9, protocol of the released code
    python -m routed.main --config=experiments/cluster_cnn.py:printed       # ... the protocol as the paper prints it
    python -m routed.main --config=experiments/cluster_cnn.py:activations   # Tables 7 and 8
    python -m routed.main --config=experiments/cluster_cnn.py:signals       # Figures 3, 4 and 5, the lemmas
    python -m routed.main --config=experiments/cluster_cnn.py:picture       # Figure 1
    python -m routed.main --config=experiments/cluster_cnn.py:factors       # what makes linear experts fail?

Two protocols (PRESETS below; every option is a config key). The paper prints one, its released code runs another, and its tables are
the code's: inputs times 10, two logits, softmax applied twice (so the loss is at least .3133), the noisy score itself as the gate,
biases, an early stop, noise also on test samples, one data set for all seeds.

Rules where both are silent, set on seeds from 5000 on.
  steps       500 (released: 501, at most; evaluations come at equal distances), single models 800 (801). printed: see STEPS.
  data        a data set of our own for each setting, by the same law; test clusters are equally frequent.
  single      the released code's: Adam on the cross entropy (no double softmax), PyTorch's initial weights, coupled weight decay.
  balance     Table 9 has neither formula nor coefficient: the released code's term, 1e-4 E^2 mean_e(load_e mean score_e).
  picture     their notebook's data (noise outside of the signals, norm 3, feature strength 1), 1,024 of the test samples.
  gate        1, so none: the number of steps belongs to the protocol.

Cost on 2 free cores, minutes: headline 16, printed 25, activations 7, signals 3.5, picture .5, factors 17; all figures 69. A
mixture takes 3 seconds a seed, a single model of 128 filters 7, of 512 a minute (BUILD_NOTES.md, sections 3 and 4).

Found: 14 of 16 numbers of Table 3's mixtures are reproduced, 1 of 4 of Table 9, 14 of 18 of Tables 7 and 8, all orders and
Theorem 4.1. As printed, linear experts do better than the tables, which are the code's, say: 96 to 98 % instead of 88 to 96. Of
the 7 points that linear experts lack in setting 1, the second softmax takes about 5, the scale 4, the gate 2 (each by itself);
that clusters share linear experts stays under every protocol.
"""

from __future__ import annotations

import math

from ml_collections import ConfigDict

from routed.claims import Claim, Measured
from routed.config import base, override, variant
from routed.points import Point, chain, cross

FIGURES = ("", "printed", "activations", "signals", "picture", "factors")

#: What the paper prints (`paper`) and what its released code does; sigma_0 of the former is not stated.
PRESETS: dict[str, Point] = {
    "paper": {
        "data.target": "sign", "data.target_dim": 1, "experts.width": 16, "loss": "logistic", "data.input_scale": 1.0,
        "selection.name": "top_k", "selection.eval.name": "top_k", "router.noise_in_weights": False, "router.noise_at_eval": False,
        "experts.bias": False, "experts.init": "lecun", "experts.init_scale": 1e-3 * math.sqrt(50), "optimizer.normalise": "expert",
        "stop.rise": 0.0, "stop.floor": 0.0, "held": (),
    },
    "released": {
        "data.target": "class", "data.target_dim": 2, "experts.width": 8, "loss": "softmax_cross_entropy", "data.input_scale": 10.0,
        "selection.name": "raw", "selection.eval.name": "raw", "router.noise_in_weights": True, "router.noise_at_eval": True,
        "experts.bias": True, "experts.init": "uniform", "experts.init_scale": 1e-3, "optimizer.normalise": "expert_sum",
        "stop.rise": 0.02, "stop.floor": 0.314, "held": ("world",),
    },
}  # fmt: skip

#: Strengths of feature and false feature, and the noise; beta is U(1, 2) in all. Alpha and gamma agree in 3, 4 and verify.
SETTINGS: dict[str, Point] = {
    "1": {"data.alpha_low": 0.5, "data.gamma_low": 0.5, "data.gamma_high": 3.0, "data.patch_noise": 1.0},
    "2": {"data.alpha_low": 0.5, "data.gamma_low": 0.5, "data.gamma_high": 3.0, "data.patch_noise": 2.0},
    "3": {"data.alpha_low": 0.5, "data.gamma_low": 0.5, "data.gamma_high": 2.0, "data.patch_noise": 1.0},
    "4": {"data.alpha_low": 0.5, "data.gamma_low": 0.5, "data.gamma_high": 2.0, "data.patch_noise": 2.0},
    "verify": {"data.alpha_low": 1.0, "data.gamma_low": 1.0, "data.gamma_high": 2.0, "data.patch_noise": 1.0},
}
TABLE3 = ("1", "2", "3", "4")
CUBIC, LINEAR = {"experts.activation": "cubic"}, {"experts.activation": "linear"}
BALANCE = 1e-4  # theirs: 1e-4 E^2 mean_e = 1e-4 E sum_e; our balance loss is E sum_e

#: Table 3: accuracy in % and dispatch entropy with their (population) standard deviations over ten runs.
MOE = {
    ("1", "linear"): (92.99, 2.11, 1.300, 0.044), ("1", "cubic"): (99.46, 0.55, 0.098, 0.087),
    ("2", "linear"): (88.48, 1.96, 1.294, 0.036), ("2", "cubic"): (98.09, 1.27, 0.171, 0.103),
    ("3", "linear"): (95.93, 1.34, 1.160, 0.100), ("3", "cubic"): (99.99, 0.02, 0.008, 0.011),
    ("4", "linear"): (93.30, 1.48, 1.160, 0.155), ("4", "cubic"): (98.92, 1.18, 0.089, 0.120),
}  # fmt: skip
#: Tables 1 and 3: accuracy in % of single models, one run each, with 128 and 512 filters.
SINGLE = {
    ("1", "linear"): (68.71, 67.63), ("1", "cubic"): (79.48, 78.18), ("2", "linear"): (60.59, 63.04), ("2", "cubic"): (72.29, 52.09),
    ("3", "linear"): (74.81, 74.54), ("3", "cubic"): (72.69, 67.78), ("4", "linear"): (74.63, 72.98), ("4", "cubic"): (68.60, 61.65),
}  # fmt: skip
#: Table 9: accuracy of the linear mixture with a balance loss.
BALANCED = {"1": (93.81, 1.02), "2": (89.20, 2.20), "3": (95.12, 0.58), "4": (92.50, 1.55)}
#: Tables 7 (verify) and 8 (settings 1 and 2): accuracy in % of single models with 128 filters.
ACTIVATIONS = {
    "linear": (74.81, 68.71, 60.59), "cubic": (72.69, 79.48, 72.29), "relu": (73.45, 72.28, 80.12),
    "celu": (76.91, 81.75, 78.99), "gelu": (74.01, 79.04, 82.01), "tanh": (74.76, 81.72, 81.03),
}  # fmt: skip
#: Steps of the printed protocol, whose inputs are ten times smaller: by then the test accuracy of linear experts, the slower ones,
#: has stopped changing (by less than .004 over the next 1,600 steps, in all settings, on seed 5000).
STEPS = 6400

#: The factors of `factors`: gate, loss and scale, with what goes with each.
GATES = {
    "raw": {"selection.name": "raw", "selection.eval.name": "raw", "router.noise_in_weights": True},
    "softmax": {"selection.name": "top_k", "selection.eval.name": "top_k", "router.noise_in_weights": False},
}
LOSSES = {
    "twice": {"loss": "softmax_cross_entropy", "stop.floor": 0.314},
    "once": {"loss": "cross_entropy", "stop.floor": 0.0},
}
SCALES_OF_DATA = (10.0, 1.0)


def single(activation: str, filters: int) -> Point:
    """A single model of the released code: `filters` in all, half of them for each class."""
    slow = {"linear": 3e-3}
    return {
        "arms": ("dense_expert",), "experts.activation": activation, "experts.width": filters // 2, "loss": "cross_entropy",
        "experts.init_scale": 1.0, "experts.learning_rate": slow.get(activation, 1e-2), "optimizer.name": "adam",
        "optimizer.normalise": "none", "optimizer.l2": 5e-4, "stop.floor": 0.0, "stop.after": 500, "steps": 800, "eval_every": 100,
    }  # fmt: skip


def get_config(arg: str | None = None) -> ConfigDict:
    """The config of FIGURE[,SCALE]."""
    figure, scale = variant(arg, FIGURES)
    c = base()
    with c.unlocked():
        c.name, c.figure, c.scale = "cluster_cnn", figure, scale
        c.arms, c.seeds, c.gate.train_loss, c.shuffles = ("learned",), 10, 1.0, 0
        c.data.name, c.data.clusters, c.data.dim, c.data.whole = "patches", 4, 50, True
        c.data.samples = c.data.test_samples = c.batch_size = 16000
        c.router.name, c.router.noise, c.router.init_scale, c.router.learning_rate = "conv", "uniform", 0.0, 0.1
        c.experts.name, c.experts.count, c.experts.activation, c.experts.learning_rate = "cnn", 8, "cubic", 1e-3
        c.selection.renormalise = c.selection.eval.renormalise = False
        c.losses.balance_of, c.optimizer.momentum, c.dispatch = "scores", 0.0, "ragged"
        c.steps, c.eval_every = 500, 100
        if figure == "printed":
            c.steps, c.eval_every = STEPS, STEPS // 20
        if scale == "default":
            c.seeds = {"printed": 5, "factors": 3}.get(figure, c.seeds)
        if figure == "signals":
            c.eval_every = 25
        if figure == "picture":
            c.experts.count, c.data.samples, c.data.test_samples, c.batch_size, c.seeds = 4, 1600, 1600, 1600, 3
        if scale == "smoke":
            c.data.samples = c.data.test_samples = c.batch_size = 800
            c.steps, c.eval_every, c.seeds = 20, 10, 2
    changes = PRESETS["paper" if figure == "printed" else "released"]
    if figure in ("signals", "picture"):
        changes = changes | {"stop.rise": 0.0}
    if figure == "picture":
        changes = changes | {"experts.width": 10, "data.noise_outside": True, "data.patch_noise": 3.0}
    return override(c.lock(), changes)


def get_sweep(config: ConfigDict) -> tuple[Point, ...]:
    """The rows of the tables that the figure shows."""
    small = {"steps": config.steps, "eval_every": config.eval_every, "stop.after": 0} if config.scale == "smoke" else {}
    few = {"seeds": min(3, config.seeds) if config.scale != "paper" else config.seeds}

    def singles(settings, activations, filters) -> tuple[Point, ...]:
        return tuple(SETTINGS[s] | single(a, f) | small | few for s in settings for a in activations for f in filters)

    mixtures = tuple(SETTINGS[s] | one for s in TABLE3 for one in (CUBIC, LINEAR))
    if config.figure == "printed":
        return mixtures
    if config.figure == "activations":
        return singles(("verify", "1", "2"), ACTIVATIONS, (128,))
    if config.figure == "signals":
        return mixtures[:4]
    if config.figure == "picture":
        shown = {
            "data.alpha_low": 1.0,
            "data.alpha_high": 1.0,
            "data.beta_low": 1.2,
            "data.gamma_low": 1.0,
            "data.gamma_high": 2.0,
        }
        return tuple(shown | one for one in (CUBIC, LINEAR))
    if config.figure == "factors":
        return cross(_cells(config), (LINEAR, CUBIC))
    balanced = tuple(SETTINGS[s] | LINEAR | {"losses.balance": BALANCE} for s in TABLE3)
    return chain(mixtures, balanced, singles(TABLE3, ("linear", "cubic"), (128, 512)))


def _cells(config: ConfigDict) -> tuple[Point, ...]:
    """Every combination of gate, loss and scale, in setting 1; the smaller scale takes as many steps as the printed protocol."""
    steps = {10.0: {}, 1.0: {} if config.scale == "smoke" else {"steps": STEPS, "eval_every": STEPS // 4}}
    scales = tuple({"data.input_scale": scale} | steps[scale] for scale in SCALES_OF_DATA)
    return cross(cross(tuple(GATES.values()), tuple(LOSSES.values())), scales)


def get_claims(config: ConfigDict) -> tuple[Claim, ...]:
    """Every number of the tables, and the orders that the paper draws from them."""
    if config.figure == "factors":
        return _of_factors(config)
    if config.figure == "activations":
        return _of_activations(config)
    if config.figure == "signals":
        return _of_signals(config)
    if config.figure == "picture":
        return ()
    entropy = "router/dispatch_entropy" if config.figure == "printed" else "train/dispatch_entropy"
    found = []
    for s in TABLE3:
        cubic, linear = (
            SETTINGS[s] | one | {"experts.width": config.experts.width, "losses.balance": 0.0}
            for one in (CUBIC, LINEAR)
        )
        if config.figure == "printed":  # nothing else is swept
            cubic, linear = SETTINGS[s] | CUBIC, SETTINGS[s] | LINEAR
        for name, at in (("nonlinear", cubic), ("linear", linear)):
            mean, std, spread, of = MOE[s, at["experts.activation"]]
            words, id = f"setting {s}, mixture of {name} experts", f"chen.table3.s{s}.moe-{name}"
            found += [
                _number(
                    config,
                    f"{id}.accuracy",
                    f"{words}: accuracy",
                    _over_runs(mean / 100, std / 100),
                    "test/accuracy",
                    at,
                ),
                _number(config, f"{id}.entropy", f"{words}: dispatch entropy", _over_runs(spread, of), entropy, at),
            ]
        sides = _without(cubic, "experts.activation"), LINEAR | LEARNED, CUBIC | LEARNED
        found += [
            _order(config, f"chen.table3.s{s}.accuracy", f"setting {s}: non-linear experts beat linear ones", "99 against 93 %", *sides),
            _order(config, f"chen.table3.s{s}.entropy", f"setting {s}: non-linear experts divide the clusters, linear ones do not",
                   "below .2 against above 1.1", sides[0], sides[2], sides[1], metric=entropy),
        ]  # fmt: skip
        if config.figure != "printed":
            found += _of_singles(config, s, cubic)
    return tuple(found)


LEARNED, SINGLE_MODEL = {"arm": "learned"}, {"arm": "dense_expert"}


def _over_runs(mean: float, std: float) -> Measured:
    """A mean over the paper's ten runs; its standard deviation divides by ten, as their code does, and Welch's test wants nine."""
    return Measured(mean, std * math.sqrt(10 / 9), 10)


def _without(at: Point, *keys: str) -> Point:
    return {key: value for key, value in at.items() if key not in keys}


def _where(config: ConfigDict) -> str:
    return "scaled" if config.scale == "smoke" else "gaps_filled"


def _number(config: ConfigDict, id: str, statement: str, paper, metric: str, at: Point, side=LEARNED) -> Claim:
    id = f"{id}.printed" if config.figure == "printed" else id
    return Claim("number", id, statement, paper, _where(config), metric, side, {}, at)


def _order(
    config: ConfigDict, id: str, statement: str, paper: str, at: Point, lower, higher, metric="test/accuracy"
) -> Claim:
    id = f"{id}.printed" if config.figure == "printed" else id
    return Claim("order", id, statement, paper, _where(config), metric, lower, higher, at, "difference")


def _of_singles(config: ConfigDict, s: str, mixture: Point) -> list[Claim]:
    """Single models of a setting: their numbers, the mixture beside them, Theorem 4.1, and Table 9."""
    found = []
    for name in ("linear", "cubic"):
        for filters, value in zip((128, 512), SINGLE[s, name], strict=True):
            at = SETTINGS[s] | {"experts.activation": name, "experts.width": filters // 2}
            id, words = (
                f"chen.table3.s{s}.single-{name}-{filters}",
                f"setting {s}, single {name} model of {filters} filters",
            )
            found.append(_number(config, id, f"{words}: accuracy", value / 100, "test/accuracy", at, SINGLE_MODEL))
            if s in ("3", "4"):
                found.append(_bound(config, f"s{s}.{name}-{filters}", words, at))
    best = {"experts.activation": "cubic", "experts.width": 64}
    mean, std = BALANCED[s]
    balanced = SETTINGS[s] | LINEAR | {"losses.balance": BALANCE}
    return [
        *found,
        _order(config, f"chen.table1.s{s}.mixture", f"setting {s}: the mixture beats a single cubic model of as many filters", "99 against 79 %",
               SETTINGS[s], SINGLE_MODEL | best, LEARNED | {k: mixture[k] for k in ("experts.activation", "experts.width", "losses.balance")}),
        _number(config, f"chen.table9.s{s}", f"setting {s}, linear experts with a balance loss: accuracy", _over_runs(mean / 100, std / 100), "test/accuracy", balanced),
        _order(config, f"chen.table9.s{s}.order", f"setting {s}: balancing does not make linear experts as good as non-linear ones", "94 against 99 %",
               SETTINGS[s] | {"experts.width": config.experts.width}, LEARNED | LINEAR | {"losses.balance": BALANCE}, LEARNED | CUBIC | {"losses.balance": 0.0}),
    ]  # fmt: skip


def _bound(config: ConfigDict, id: str, words: str, at: Point) -> Claim:
    """Theorem 4.1, where alpha and gamma have the same law."""
    return _order(
        config, f"chen.theorem41.{id}", f"{words}: at most 87.5 % right", "theorem", at, SINGLE_MODEL, {"value": 0.875}
    )


def _of_activations(config: ConfigDict) -> tuple[Claim, ...]:
    """Tables 7 and 8, and Theorem 4.1 for each activation on data where alpha and gamma agree."""
    found = []
    for name, values in ACTIVATIONS.items():
        for s, value in zip(("verify", "1", "2"), values, strict=True):
            at, id = SETTINGS[s] | {"experts.activation": name}, f"chen.table{7 if s == 'verify' else 8}.{name}"
            words = f"data {s}, single {name} model of 128 filters"
            id = id if s == "verify" else f"{id}.s{s}"
            found.append(_number(config, id, f"{words}: accuracy", value / 100, "test/accuracy", at, SINGLE_MODEL))
            if s == "verify":
                found.append(_bound(config, f"verify.{name}", words, at))
    return tuple(found)


def _of_signals(config: ConfigDict) -> tuple[Claim, ...]:
    """What Figs. 3 to 5 say in words, and the lemmas."""
    at, found = SETTINGS["1"] | CUBIC, []

    def order(id, statement, lower, higher, at=at, metric="signals/expert_feature", paper="Figs. 4 and 5"):
        found.append(_order(config, id, statement, paper, at, lower, higher, metric))

    second, centre = LEARNED | {"metric": "signals/expert_second"}, LEARNED | {"metric": "signals/expert_centre"}
    feature, routed = LEARNED | {"metric": "signals/router_feature"}, LEARNED | {"metric": "signals/router_centre"}
    order(
        "chen.fig4.one-feature", "a non-linear expert aligns with one feature more than with any other", second, LEARNED
    )
    order(
        "chen.fig4.no-centre", "a non-linear expert aligns with its feature more than with any centre", centre, LEARNED
    )
    order(
        "chen.fig4.router",
        "the router of non-linear experts aligns with centres more than with features",
        feature,
        routed,
        metric="signals/router_centre",
    )
    order(
        "chen.fig5.router",
        "the router of linear experts aligns with features more than with centres",
        routed,
        feature,
        SETTINGS["1"] | LINEAR,
        "signals/router_feature",
    )
    for s in ("1", "2"):
        order(f"chen.fig3.s{s}", f"setting {s}: the entropy of non-linear experts ends below that of linear ones", LEARNED | CUBIC, LEARNED | LINEAR,
              SETTINGS[s], "train/dispatch_entropy", "below .3 against above 1.1")  # fmt: skip
    order(
        "chen.lemma51",
        "routing moves at most E^2 times as far as scores (Lemma 5.1)",
        LEARNED,
        {"value": 1.0},
        at,
        "theory/lemma51",
        "lemma",
    )
    order(
        "chen.theorem42.groups",
        "experts serve the cluster that their initial filters favour more often than by chance (1/4)",
        {"value": 0.25},
        LEARNED,
        at,
        "router/group_hit",
        "theorem",
    )
    return tuple(found)


def _of_factors(config: ConfigDict) -> tuple[Claim, ...]:
    """Our own questions: does one change to the released protocol let linear experts learn?"""
    at = {"selection.name": "raw", "loss": "softmax_cross_entropy", "data.input_scale": 10.0} | LINEAR
    changes = (
        ("gate", "selection.name", "top_k", "a softmax gate"), ("loss", "loss", "cross_entropy", "softmax once"),
        ("scale", "data.input_scale", 1.0, "inputs as printed"),
    )  # fmt: skip
    single = tuple(
        _order(config, f"routed.cluster.{name}", f"{words} lets linear experts do better than as released", "not asked", _without(at, key),
               LEARNED | {key: at[key]}, LEARNED | {key: value})
        for name, key, value, words in changes
    )  # fmt: skip
    cells = tuple(
        _order(config, f"routed.cluster.nonlinear.{i}", "non-linear experts beat linear ones: " + _words(cell), "99 against 93 %",
               _without(cell, "steps", "eval_every", "selection.eval.name", "router.noise_in_weights", "stop.floor"),
               LEARNED | LINEAR, LEARNED | CUBIC)
        for i, cell in enumerate(_cells(config))
    )  # fmt: skip
    return single + cells


def _words(point: Point) -> str:
    gate = "score as gate" if point["selection.name"] == "raw" else "softmax gate"
    loss = "softmax twice" if point["loss"] == "softmax_cross_entropy" else "softmax once"
    return f"{gate}, {loss}, inputs x {point['data.input_scale']:g}"


def get_plots(config: ConfigDict) -> tuple[dict, ...]:
    """Tables as figures; entropy, products and the map of samples for the figures of the paper."""
    curves = ("test/accuracy", "train/dispatch_entropy", "train/loss")
    sweep = get_sweep(config)
    lines = (
        {
            f"{'non-linear' if p['experts.activation'] == 'cubic' else 'linear'}, setting {_setting(p)}": p
            for p in sweep
            if "arms" not in p and not p.get("losses.balance")
        }
        if config.figure in ("", "printed", "signals")
        else {}
    )
    if config.figure == "factors":
        methods = {f"{p['experts.activation']}: {_words(p)}": p for p in sweep}
        return ({"kind": "methods", "name": "factors", "methods": methods, "metrics": curves[:2]},)
    if config.figure == "activations":
        methods = {f"{p['experts.activation']}, data {_setting(p)}": p for p in sweep}
        return (
            {"kind": "methods", "name": "activations", "methods": methods, "metrics": ("test/accuracy", "train/loss")},
        )
    if config.figure == "picture":
        lines = {"non-linear experts": sweep[0], "linear experts": sweep[1]}
        return (
            {"kind": "embedding", "name": "figure1", "lines": lines},
            {"kind": "dispatch", "name": "dispatch", "lines": lines},
        )
    if config.figure == "signals":
        first = {"non-linear": lines["non-linear, setting 1"], "linear": lines["linear, setting 1"]}
        strength = (
            "signals/expert_feature",
            "signals/expert_second",
            "signals/expert_centre",
            "signals/router_feature",
            "signals/router_centre",
        )
        return (
            {"kind": "series", "name": "figure3", "lines": lines, "metrics": curves},
            {"kind": "products", "name": "figures4and5", "lines": first},
            {"kind": "series", "name": "alignment", "lines": first, "metrics": (*strength, "router/group_hit")},
            {
                "kind": "series",
                "name": "lemmas",
                "lines": first,
                "metrics": ("theory/lemma51", "theory/lemma_c4", "theory/row_sum"),
            },
        )
    methods = dict(lines)
    for p in sweep:
        if "arms" in p:
            methods[f"single {p['experts.activation']}, {2 * p['experts.width']} filters, setting {_setting(p)}"] = p
        elif p.get("losses.balance"):
            methods[f"linear, balanced, setting {_setting(p)}"] = p
    shown = {name: point for name, point in lines.items() if name.endswith("setting 1")}
    metrics = ("test/accuracy", "train/dispatch_entropy" if config.figure == "" else "router/dispatch_entropy")
    return (
        {"kind": "methods", "name": "table3", "methods": methods, "metrics": metrics},
        {"kind": "dispatch", "name": "dispatch", "lines": shown},
        {"kind": "series", "name": "training", "lines": lines, "metrics": curves},
    )


def _setting(point: Point) -> str:
    return next(name for name, setting in SETTINGS.items() if setting.items() <= point.items())
