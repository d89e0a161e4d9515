"""Software and machine that produced a result."""

from __future__ import annotations

import contextlib
import importlib.metadata
import pathlib
import platform
import subprocess
from typing import Any

PACKAGES = ("routed", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "scipy", "scikit-learn", "pandas")


def provenance() -> dict[str, Any]:
    """Returns versions of the packages, the commit and the machine, without asking JAX for devices."""
    return {
        "versions": {"python": platform.python_version()} | {package: _version(package) for package in PACKAGES},
        "commit": _commit(),
        "machine": f"{platform.system()} {platform.machine()}, {platform.processor() or 'CPU'}",
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """Returns the commit of the source tree, with a mark for uncommitted changes; a launcher writes it for a copy."""
    folder, described = pathlib.Path(__file__).parent, ""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        described = subprocess.run(
            command, cwd=folder, capture_output=True, encoding="utf-8", timeout=10
        ).stdout.strip()
    copied = folder.parents[2] / "commit"
    return described or (copied.read_text("utf-8").strip() if copied.exists() else "") or "unknown"
