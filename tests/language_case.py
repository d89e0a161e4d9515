"""A tiny T5 in the engine, for test_language and, as a program, for its processes.

`python -m tests.language_case PORT PROCESS CACHE` runs process PROCESS of two, with four devices each, that share one run, and prints
its validation and training losses.
"""

import json
import sys

import jax
import numpy as np

from routed.config import base, override
from routed.kinds import kind_of
from routed.layout import compile_group, make_mesh, stack_settings, traced

#: One layer a stack, of width 8, on the artificial languages: a step takes milliseconds, compiling some seconds. Eight devices
#: can share its 256 encoder tokens and 72 decoder tokens in whole groups.
TINY = {
    "name": "tiny", "data.name": "generated", "data.tokens": "bytes", "data.vocabulary": 320, "data.input_length": 32,
    "data.eval_rows": 16, "data.languages": ("qaa", "qba"), "batch_size": 8, "steps": 4, "eval_every": 2, "seeds": 1,
    "checkpoint.every": 1, "transformer.layers": 1, "selection.group_size": 8, "transformer.dim": 8, "transformer.heads": 2,
    "transformer.head_dim": 4, "transformer.width": 16, "experts.name": "gated_ffn", "experts.activation": "gelu",
    "experts.count": 4, "experts.width": 16, "selection.name": "top_k", "selection.k": 2, "selection.eval.k": 2,
    "dispatch": "slots", "optimizer.name": "adam", "router.learning_rate": 1e-2, "experts.learning_rate": 1e-2,
    "arms": ("learned",), "router.vocabulary": 320, "router.choices": 2, "mesh.run": 1, "mesh.runs_per_batch": 2,
}  # fmt: skip


def losses(config):
    """[validation, training] losses of seed 0, a row an evaluation."""
    compiled, kind = compile_group(config, 0, 1, make_mesh(config)), kind_of(config)
    seeds, settings = (compiled.place(a) for a in (np.zeros(1, np.uint32), stack_settings([traced(config)])))
    given, feed = compiled.place_given(kind.given(config)), kind.feed(config, 0)
    worlds, states = compiled.start(seeds, settings, given)
    for part in range(config.steps + 1):
        steps, evaluated = min(part, 1), part % config.eval_every == 0
        batch = compiled.place_feed(jax.tree.map(lambda a: a[None], feed(max(part - 1, 0), 1)))
        flags = [compiled.place(np.array([value])) for value in (True, np.int32(steps), evaluated)]
        states = compiled.advance(*flags, seeds, settings, worlds, states, batch, given)
    history = states["history"]
    return np.stack([np.asarray(history[name])[0] for name in ("eval/loss", "train/loss")], 1)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]))
    mesh = {"mesh.data": 2, "mesh.expert": 4, "data.cache": sys.argv[3]}
    print(json.dumps(losses(override(base(), TINY | mesh)).tolist()))
