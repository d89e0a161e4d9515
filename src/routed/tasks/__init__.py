"""Tasks: what a generator draws once (a world), and the batches it makes of it; and sources of text, under `text`."""

from routed.tasks import gmm, images
from routed.tasks.task import SHARED, TASKS, Task, World

TASKS |= {"gmm": gmm.TASK, "images": images.TASK}

__all__ = ["SHARED", "TASKS", "Task", "World"]
