"""What the problems of text report, and how it is shown."""

from __future__ import annotations

from routed.contracts import AT_LEAST_0, SHARE, Column
from routed.training.program_columns import PROGRAM

#: How the columns of any text are shown.
COLUMNS = {
    "train/loss": Column(
        "training loss (nats per token)",
        bounds=AT_LEAST_0,
        definition="Mean cross-entropy of the training batches since the last evaluation, in nats for each target token.",
    ),
    "eval/loss": Column(
        "validation loss (nats per token)",
        bounds=AT_LEAST_0,
        definition="Cross-entropy on held-out rows, in nats for each target token; all arms are asked about the same tokens.",
    ),
    "eval/accuracy": Column(
        "validation token accuracy",
        bounds=SHARE,
        higher_is_better=True,
        definition="Share of held-out target tokens that the model ranks first.",
    ),
    "router/mi_language": Column(
        "I(expert; language) (nats)",
        bounds=AT_LEAST_0,
        definition="Mutual information of the chosen expert and the language of the row: 0 where routing ignores language.",
    ),
    "router/mi_language_given_token": Column(
        "I(expert; language | token id) (nats)",
        bounds=AT_LEAST_0,
        definition="Mutual information of expert and language among occurrences of the same token id: what routing knows of the language beyond which words it has.",
    ),
    "router/mi_token": Column(
        "I(expert; token id) (nats)",
        bounds=AT_LEAST_0,
        definition="Mutual information of the chosen expert and the id of the token, beyond what permuted ids have: 0 where routing ignores which token it is. Comparable between runs of one vocabulary and as many tokens.",
    ),
    "router/alike": Column(
        "mean cosine of\ntwo experts' outputs",
        bounds=(-1.0, 1.0),
        definition="Mean over held-out tokens and pairs of experts of the cosine of their outputs: 1 where all experts say the same.",
    ),
    "router/churn_router": Column(
        "churn by the router in the last interval",
        bounds=SHARE,
        definition="Share of probe tokens whose experts change when the router of now replaces that of the last evaluation, on the features of now.",
    ),
    "router/churn_features": Column(
        "churn by its features in the last interval",
        bounds=SHARE,
        definition="Share of probe tokens whose experts change when the features move and the router of the last evaluation stays.",
    ),
    "train/experts": Column(
        "experts computed per training token",
        log=True,
        bounds=AT_LEAST_0,
        definition="Experts that are computed for a training token on average: k, and all of them on steps on which they compete.",
    ),
    "train/flops": Column(
        "training FLOPs so far",
        log=True,
        bounds=AT_LEAST_0,
        definition="FLOPs of the model's products until the evaluation, forward and backward, by their sizes.",
    ),
} | PROGRAM

#: What forms that hold rows out for a test say of the gates there.
TEST_GATES = {
    "router/entropy_test": Column(
        "entropy of a test token's gate (nats)",
        bounds=AT_LEAST_0,
        definition="Mean over the tokens of the test rows of the entropy of the softmax of the scores: 0 is a sharp gate, log E a uniform one.",
    ),
    "router/entropy_test_std": Column(
        "deviation of that entropy over test tokens",
        bounds=AT_LEAST_0,
        definition="Standard deviation over the tokens of the test rows of the entropy of the softmax of the scores.",
    ),
}
