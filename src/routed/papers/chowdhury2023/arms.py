"""Arms of Chowdhury et al. (2023): learned, fixed and oracle routers of patches, and networks without a router."""

from routed.plan.arms import Arm

ARMS: dict[str, Arm] = {
    # First the router alone is trained, to separate the experts' summed scores by class; then the router is fixed (the
    # paper's separate training; the arm `learned` is the paper's joint training).
    "separate": Arm(
        {
            "phases": ("epochs=100 train=router loss=scores", "train=experts"),
            "selection.patch_weights": "one",
            "selection.eval.patch_weights": "one",
        },
        "router trained first, then fixed",
        "#4477AA",
    ),
    # The oracle knows the patch that decides; random patches ignore it.
    "oracle_patch": Arm({"router.frozen": True, "router.name": "decisive"}, "oracle (patch that decides)", "#000000"),
    "random_patches": Arm(
        {"router.frozen": True, "router.name": "random"}, "random patches, anew in each step", "#EE6677"
    ),
    "fixed_patches": Arm(
        {"router.frozen": True, "router.name": "random", "router.resample": False}, "random patches, fixed", "#BB5566"
    ),
    # No router: one network of all neurons on all patches.
    "cnn": Arm({"model": "patch_cnn"}, "CNN on all patches", "#777777"),
    # No router: the wide ResNet whose last convolution has as many weights as all experts.
    "wide_resnet": Arm({"model": "wide_resnet"}, "wide ResNet, no mixture", "#228833"),
}
