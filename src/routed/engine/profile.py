"""A profile of some training steps, for xprof and Perfetto."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator

import jax
from absl import logging as log

from routed.contracts import UserError
from routed.system import files, hosts


class Profile:
    """Records `steps` training steps of the first batch of a command, from its first step on; 0 records nothing.

    The next evaluation or checkpoint ends the record. Of several hosts the first records.

    Raises:
      UserError: the workdir is in a bucket, where JAX cannot write a profile.
    """

    def __init__(self, workdir: pathlib.Path, steps: int = 0):
        self.folder, self.steps = workdir / "profile", steps
        if steps and files.remote(workdir):
            raise UserError(f"--profile={steps}: JAX writes profiles on a disk alone: name a --workdir on this machine")

    def limit(self, steps: int) -> int:
        """Returns the most steps of the next stretch of work, otherwise `steps`: a stretch is recorded as a whole."""
        return self.steps or steps

    @contextlib.contextmanager
    def recorded(self, steps: int) -> Iterator[None]:
        """Records the work in its context, once, if it has any steps."""
        if not (self.steps and steps):
            yield
            return
        asked, self.steps = self.steps, 0
        if not hosts.is_first():
            yield
            return
        with files.explained(self.folder), jax.profiler.trace(str(self.folder), create_perfetto_trace=True):
            yield
        pages = f"open perfetto_trace.json.gz at ui.perfetto.dev, or xprof --logdir={self.folder}"
        log.info("profiled %d of %d steps in %s: %s", steps, asked, self.folder, pages)
