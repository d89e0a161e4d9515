"""Tasks: what a data generator draws once (a world), and the batches it makes of it."""

from routed.data import gmm

#: A task is a module with `world`, `examples`, `train_batch`, `fresh_batch`, `test_batch`, `bayes`, `variance` and `bytes_per_sample`.
TASKS = {"gmm": gmm}
