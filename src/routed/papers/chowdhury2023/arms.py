"""Arms of Chowdhury et al. (2023): routers of patches that learn, are fixed or know the answer, and networks without a router."""

from routed.plan.arms import Arm

ARMS: dict[str, Arm] = {
    # The router is trained by itself, to set the experts' summed scores apart by class, then fixed (the paper's
    # separate training; `learned` is its joint training).
    "separate": Arm(
        {
            "phases": ("epochs=100 train=router loss=scores", "train=experts"),
            "selection.gate": "one",
            "selection.eval.gate": "one",
        },
        "router trained first, then fixed",
        "#4477AA",
    ),
    # One patch is known to decide, or all are as good.
    "oracle_patch": Arm({"router.frozen": True, "router.name": "decisive"}, "oracle (patch that decides)", "#000000"),
    "random_patches": Arm(
        {"router.frozen": True, "router.name": "random"}, "random patches, anew in each step", "#EE6677"
    ),
    "fixed_patches": Arm(
        {"router.frozen": True, "router.name": "random", "router.anew": False}, "random patches, fixed", "#BB5566"
    ),
    # No router: one network of all neurons on all patches.
    "cnn": Arm({"model": "patch_cnn"}, "CNN on all patches", "#777777"),
    # No router: the wide ResNet whose last convolution has as many weights as all experts.
    "wide_resnet": Arm({"model": "wide_resnet"}, "wide ResNet, no mixture", "#228833"),
}
