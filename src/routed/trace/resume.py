"""Output folders of one command each: a killed command continues there, and a different command is refused."""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from routed.contracts import UserError
from routed.system import files


def bind_folder(file: pathlib.Path, model: Any, rows: Sequence[np.ndarray], settings: dict[str, Any]) -> None:
    """Writes the settings, model and text of a command to `file`, or compares them with those of an earlier call.

    Raises:
      UserError: a setting differs from that of the earlier call.
    """
    digests = {"weights": digest_of_model(model), "class": type(model).__name__, "text": digest_of_rows(rows)}
    settings = settings | digests | {"rows": len(rows)}
    with files.explained(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        files.write(file, json.dumps(settings, indent=1) + "\n")
        return
    before = json.loads(file.read_text("utf-8"))
    for key, value in settings.items():
        if before.get(key) != value:
            difference = f"{file.parent} holds a {file.stem} with {key}={before.get(key)}, now {value}"
            raise UserError(f"{difference}: choose another --out, or remove it")


def digest_of_model(model: Any) -> str:
    """Returns a digest of all parameters and buffers of a PyTorch model: experts may train under a frozen router."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def digest_of_rows(rows: Sequence[np.ndarray]) -> str:
    """Returns a digest of rows of token ids."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(np.ascontiguousarray(row, np.int64).tobytes())
    return digest.hexdigest()[:16]
