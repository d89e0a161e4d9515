"""Tasks: what a generator draws once (a world), and the batches it makes of it."""

from routed.data import dictionary, gmm, images, patches, sequence, subspaces, two_gaussians

#: name -> `routed.data.samples.Task`.
TASKS = {
    "gmm": gmm.TASK,
    "subspaces": subspaces.TASK,
    "sequence": sequence.TASK,
    "dictionary": dictionary.TASK,
    "images": images.TASK,
    "patches": patches.TASK,
    "two_gaussians": two_gaussians.TASK,
}
