"""Arms of Pham et al. (2024): competition, ablations of competition, and the baselines of the paper."""

from __future__ import annotations

from ml_collections import ConfigDict

from routed.plan.arms import Arm

#: Experts compete on a share of the steps (`selection.competition_rate`); evaluations route as top-k does.
_COMPETE = {"selection.name": "compete"}

#: Stages of equal length in which the K of SMoE-Dropout grows; every stage compiles a program.
STAGES = 4


def growing(config: ConfigDict) -> tuple[str, ...]:
    """Returns phases in which K grows linearly from selection.k to all experts."""
    k, rest = config.selection.k, config.experts.count - config.selection.k
    texts = [f"selection.k={k + round(rest * stage / (STAGES - 1))}" for stage in range(STAGES)]
    ends = [f"until={max(1, config.steps * (stage + 1) // STAGES)} " for stage in range(STAGES - 1)]
    return tuple(end + text for end, text in zip([*ends, ""], texts, strict=True))


ARMS: dict[str, Arm] = {
    # Competition, and ablations: a target without meaning, random winners, no winners (all experts run and learn on as
    # many steps), and no effect of the winners on the output.
    "compete": Arm(_COMPETE, "competition", "#661100"),
    "compete_shuffled": Arm(
        _COMPETE | {"selection.distillation_target": "shuffled"}, "competition, shuffled target", "#E69F00"
    ),
    "compete_random": Arm(_COMPETE | {"selection.winners": "random"}, "random winners", "#CC79A7"),
    "compete_dense": Arm(_COMPETE | {"selection.winners": "all"}, "dense steps, nobody wins", "#009E73"),
    "compete_distil": Arm(_COMPETE | {"selection.output_of_winners": False}, "competition, only distilled", "#56B4E9"),
    # Competition beside a balance loss, which the paper leaves to future work (6.1, Section 7): on a competing step the
    # load is that of the winners, the probabilities are the router's.
    "compete_balanced": Arm(_COMPETE | {"losses.balance": 0.01}, "competition, balance loss .01", "#A50026"),
    # Baselines as published. StableMoE (Dai et al. 2022): one expert, weighted by a sigmoid; for a tenth of the steps
    # the router learns and teaches a router of token ids, which then decides. SMoE-Dropout (Chen et al. 2023): a frozen
    # router whose K grows to all experts. HyperRouter (Do et al. 2023): a frozen network computes the router's weights
    # from a learned embedding.
    "stable": Arm(
        {
            "router.name": "stable",
            "router.experts_per_id": 1,
            "router.teach_steps": lambda config: -(-config.steps // 10),
            "selection.name": "sigmoid",
            "selection.k": 1,
            "selection.renormalise": False,
            "selection.eval.name": "sigmoid",
            "selection.eval.k": 1,
            "selection.eval.renormalise": False,
        },
        "StableMoE",
        "#44AA99",
    ),
    "smoe_dropout": Arm(
        {"router.frozen": True, "phases": growing, "selection.eval.k": lambda config: config.experts.count},
        "SMoE-Dropout",
        "#CC6677",
    ),
    "hyper": Arm({"router.name": "hyper"}, "HyperRouter", "#AA4499"),
    # StableMoE and XMoE as in the code of Pham et al. (2024): only embeddings of length 1, of whole tokens or of 8
    # numbers of each token.
    "stable_coded": Arm({"router.score": "direction"}, "StableMoE as Pham et al. coded it", "#88CCEE"),
    "xmoe_coded": Arm(
        {"router.name": "projected", "router.score": "direction", "router.dim": 8},
        "XMoE as Pham et al. coded it",
        "#DDCC77",
    ),
    # Embeddings of experts in few dimensions, compared by cosine with a learned temperature (XMoE, Chi et al. 2022).
    "xmoe": Arm({"router.name": "cosine"}, "XMoE's router", "#332288"),
}
