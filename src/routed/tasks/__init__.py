"""Tasks: what a generator draws once (a world), and the batches it makes of it; and sources of text, under `text`."""

from routed.tasks import (
    augmented,
    collages,
    crossed,
    dictionary,
    gated_gaussians,
    generated,
    gmm,
    images,
    patches,
    scenes,
    sentences,
    sequence,
    subspaces,
    two_gaussians,
)
from routed.tasks.task import SHARED, Task, World

#: name -> task.
TASKS: dict[str, Task] = {
    "gmm": gmm.TASK,
    "crossed": crossed.TASK,
    "subspaces": subspaces.TASK,
    "sequence": sequence.TASK,
    "dictionary": dictionary.TASK,
    "images": images.TASK,
    "scenes": scenes.TASK,
    "rotated": augmented.ROTATED,
    "augmented": augmented.AUGMENTED,
    "patches": patches.TASK,
    "generated": generated.TASK,
    "collages": collages.TASK,
    "sentences": sentences.TASK,
    "two_gaussians": two_gaussians.TASK,
    "gated_gaussians": gated_gaussians.TASK,
}

__all__ = ["SHARED", "TASKS", "Task", "World"]
