"""A tiny T5, and a tiny decoder that compiles faster, for the tests of language models and of several processes."""

from tests.test_decoder import TINY as LAYERS

#: One layer a stack, of width 8, on the artificial languages: a step takes milliseconds, compiling some seconds. Eight
#: devices can share its 256 encoder tokens and 72 decoder tokens in whole groups.
TINY = {
    "name": "tiny", "data.name": "artificial", "data.tokens": "bytes", "data.vocabulary": 320, "data.input_length": 32,
    "data.eval_rows": 16, "data.languages": ("qaa", "qba"), "batch_size": 8, "steps": 4, "eval_every": 2, "seeds": 1,
    "checkpoint.every": 1, "transformer.layers": 1, "selection.group_size": 8, "transformer.dim": 8,
    "transformer.heads": 2, "transformer.head_dim": 4, "transformer.width": 16, "experts.name": "gated_ffn",
    "experts.activation": "gelu", "experts.count": 4, "experts.width": 16, "selection.name": "top_k", "selection.k": 2,
    "selection.eval.k": 2, "dispatch": "slots", "optimizer.name": "adam", "router.learning_rate": 1e-2,
    "experts.learning_rate": 1e-2, "arms": ("learned",), "router.vocabulary": 320, "router.experts_per_id": 2,
    "mesh.run": 1,
    "mesh.runs_per_batch": 2,
}  # fmt: skip
DECODER = LAYERS | {
    "name": "tiny", "data.languages": ("qaa", "qab"), "data.eval_rows": 8, "batch_size": 8, "steps": 4,
    "eval_every": 2, "seeds": 1, "checkpoint.every": 1, "selection.group_size": 8, "optimizer.name": "adam",
    "router.learning_rate": 1e-2, "experts.learning_rate": 1e-2, "router.experts_per_id": 2, "arms": ("learned",),
    "mesh.run": 1, "mesh.runs_per_batch": 2,
}  # fmt: skip
