"""The log of a command in its workdir, beside the one on the terminal."""

from __future__ import annotations

import contextlib
import logging
import pathlib
import tempfile
from collections.abc import Iterator

from absl import logging as log

from routed.contracts import UserError
from routed.system import files


@contextlib.contextmanager
def copied_log(workdir: pathlib.Path) -> Iterator[None]:
    """Copies the log into the workdir, into a bucket at the end; a full disk loses lines of the log, nothing else."""
    path = workdir / "routed.log"
    with files.explained(path):
        local_file = path
        if files.remote(workdir):
            with tempfile.NamedTemporaryFile(suffix=".log", delete=False) as file:
                local_file = pathlib.Path(file.name)
        handler = logging.FileHandler(local_file, encoding="utf-8", errors="backslashreplace")
    handler.handleError = lambda record: None  # type: ignore[method-assign]
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.get_absl_logger().addHandler(handler)
    try:
        yield
    except UserError as error:  # `run` prints it, when this file is closed
        handler.handle(logging.LogRecord("routed", logging.ERROR, __file__, 0, "error: %s", (error,), None))
        raise
    finally:
        log.get_absl_logger().removeHandler(handler)
        with contextlib.suppress(OSError):
            handler.close()
        if local_file != path:
            try:
                with files.explained(path):
                    earlier = path.read_bytes() if path.exists() else b""
                    files.write(path, earlier + local_file.read_bytes())
            finally:
                local_file.unlink()
