"""The settings of competition (Pham et al. 2024), and the combinations of them that are refused."""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from routed.settings.setting import COEFFICIENT, Setting, When, at_least, one_of, refuse, within

#: Steps of an epoch of the released code, by which its schedule goes.
EPOCH = 1000

#: Where somebody wins.
_WON = When(lambda config: config.selection.winners != "all", "selection.winners=norms or random")

#: Where the task's loss reaches the router of a layer that competes.
_HEARD = When(
    lambda config: _WON.holds(config) and not config.selection.output_of_winners, "selection.output_of_winners=false"
)

SETTINGS: dict[str, Setting] = {
    "competition_rate": Setting(
        0.05, "lambda: share of the training steps on which a layer competes", within(0, 1), traced=True
    ),
    "schedule": Setting(
        "constant",
        f"of competition_rate; root: times 2 / (2 + sqrt(t + 1)), t the number of past {EPOCH:,} steps (an option of"
        " the released code)",
        one_of(("constant", "root")),
    ),
    "winners": Setting(
        "norms",
        "norms: the largest outputs; random: each token's norms, dealt anew among its experts; all: nobody wins, every"
        " expert counts by the softmax of its score",
        one_of(("norms", "random", "all")),
    ),
    "output_of_winners": Setting(
        True, "the layer's output is the winners'; else the router's choice, and its loss alone is of them", when=_WON
    ),
    "alpha": Setting(
        1.0,
        "times the gradient that the task's loss sends to the router's weights where a layer competes (eq. 5)",
        at_least(0),
        when=_HEARD,
    ),
    "distillation_coefficient": Setting(
        1.0,
        "coefficient of the router's loss, summed over the layers that compete",
        COEFFICIENT,
        traced=True,
        when=_WON,
    ),
    "distillation_softmax": Setting(
        "chosen",
        "of the router in that loss: softmax over the chosen K (paper) or all experts",
        one_of(("chosen", "all")),
        when=_WON,
    ),
    "distillation_target": Setting(
        "own",
        "what it learns: its own tokens' norms; shuffled: those of other tokens",
        one_of(("own", "shuffled")),
        when=_WON,
    ),
    "distillation_detached": Setting(True, "its loss sends no gradient to the experts through the norms", when=_WON),
    "distillation_trunk": Setting(
        False, "its loss sends a gradient to the layers below through the router's input", when=_WON
    ),
    "distillation_mean": Setting(
        "tokens",
        "squared errors are summed over experts, or (entries) averaged too",
        one_of(("tokens", "entries")),
        when=_WON,
    ),
}


def _is_taught(settings: Any) -> bool:
    """True if the router of a layer that always competes has a loss to learn from."""
    distilled = settings.distillation_coefficient and (settings.k > 1 or settings.distillation_softmax == "all")
    return settings.winners == "all" or not settings.output_of_winners or bool(distilled)


def check(config: ConfigDict) -> None:
    """Refuses an evaluation that would draw coins or teach, and a router that has no loss to learn from."""
    training, evaluation = config.selection, config.selection.eval
    always = "competition_rate" in training and training.competition_rate == 1  # read where experts compete in training
    if always and not (_is_taught(training) or config.router.frozen or training.no_gradient or config.phases):
        refuse(
            "selection.competition_rate",
            1,
            "where winners compute every output the router hears of no task, and"
            " selection.distillation_coefficient=0 (or selection.k=1, of which a softmax is always 1) teaches it"
            " nothing, an accidental frozen router; lower the rate or set router.frozen=true",
        )
    if training.get("distillation_trunk") and config.router.get("stop_gradient"):
        refuse(
            "selection.distillation_trunk",
            True,
            "router.stop_gradient=true lets nothing through to the layers below; set one of them to false",
        )
    if "winners" not in evaluation:  # an evaluation without a contest
        return
    if evaluation.winners == "random":
        refuse("selection.eval.winners", "random", "an evaluation tosses no coins; use norms or all")
    for name in SETTINGS.keys() - {"winners", "output_of_winners"}:
        if name in evaluation and evaluation[name] != SETTINGS[name].default:
            refuse(
                f"selection.eval.{name}",
                evaluation[name],
                f"an evaluation competes always and teaches nobody; set selection.{name}, which is of training",
            )
    if config.router.get("noise_at_eval"):
        refuse(
            "router.noise_at_eval",
            True,
            "an evaluation that competes draws nothing; set it to false or selection.eval.name=top_k",
        )
