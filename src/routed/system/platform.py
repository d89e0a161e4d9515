"""The platform that a program is traced and compiled for: that of its mesh, which need not be the host's."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import Mesh


def platform() -> str:
    """cpu, gpu or tpu: of the mesh in whose context JAX traces, outside of any the default backend.

    The mesh is part of what JAX keys its traces by, so a function traced for one platform is traced again for another.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return _general(jax.default_backend() if device is None else device.platform)


def platform_of(mesh: Mesh) -> str:
    """cpu, gpu or tpu: of the devices of a mesh."""
    return _general(mesh.devices.flat[0].platform)


def tracing_for(mesh: Mesh) -> AbstractContextManager[Any]:
    """In this context `platform` is that of the mesh."""
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def _general(name: str) -> str:
    return "gpu" if name in ("cuda", "rocm") else name
