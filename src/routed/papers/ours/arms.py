"""Arms of the project's questions: controls that remove one difference at a time from a comparison."""

from routed.plan.arms import TOP1, Arm, Match

ARMS: dict[str, Arm] = {
    # Rows from data change both the partition and the sharpness of the gate. Two arms separate the effects: a gate as
    # sharp as the learned gate, and a gate as soft as the initial gate.
    "frozen_data_sharp": Arm(
        {"router.frozen": True, "router.init_from_data": True},
        "frozen, rows are examples, as sharp as learned",
        "#661100",
        match=Match("router.initial_entropy", "learned", "router/entropy_token_train"),
    ),
    "frozen_data_fresh": Arm(
        {"router.frozen": True, "router.init_from_data": True},
        "frozen, rows are examples, as soft as fresh",
        "#9999FF",
        match=Match("router.initial_entropy", "frozen", "router/entropy_token_train"),
    ),
    # The irrelevant label of a cell (tasks of crossed clusters): as certain as the oracle, but useless.
    "oracle_irrelevant": Arm(
        {"router.frozen": True, "router.name": "oracle", "router.label_digit": 1, **TOP1},
        "oracle of what does not matter",
        "#A6761D",
    ),
    # The true dialect of the row.
    "oracle_dialect": Arm({"router.frozen": True, "router.name": "oracle"}, "oracle (true dialect)", "#000000"),
}
