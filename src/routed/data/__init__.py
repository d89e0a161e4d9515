"""Tasks: what a generator draws once (a world), and the batches it makes of it."""

from routed.data import dictionary, gmm, sequence, subspaces

#: name -> `routed.data.samples.Task`.
TASKS = {"gmm": gmm.TASK, "subspaces": subspaces.TASK, "sequence": sequence.TASK, "dictionary": dictionary.TASK}
