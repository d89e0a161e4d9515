"""The platform for which a program is traced and compiled: that of its mesh, which may differ from the host's."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import Mesh


def platform() -> str:
    """Returns cpu, gpu or tpu: the platform of the mesh in whose context JAX traces, or else of the default backend.

    The mesh is part of the key of JAX's traces, so a function traced for one platform is traced again for another.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return _general(jax.default_backend() if device is None else device.platform)


def platform_of(mesh: Mesh) -> str:
    """Returns cpu, gpu or tpu: the platform of a mesh's devices."""
    return _general(mesh.devices.flat[0].platform)


def tracing_for(mesh: Mesh) -> AbstractContextManager[Any]:
    """Makes a context in which `platform` returns the platform of the mesh."""
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def _general(name: str) -> str:
    return "gpu" if name in ("cuda", "rocm") else name
