"""Chips of another machine: memory, clock, network and price of an hour, and topologies of several.

TPUs are as libtpu describes them, GPUs are described by the properties of their cards.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from routed.aot.interconnect import Collective, nodes, torus
from routed.contracts import UserError
from routed.system.chips import CHIPS, Chip
from routed.system.machine import Rates


class Target(NamedTuple):
    """A chip, as a program is compiled for it."""

    chip: Chip
    memory: float  # bytes
    price: float  # dollars of an hour
    seconds: Callable[[Collective], float]
    clock: float = 0.0  # Hz of the cycles in which XLA counts; 0 for GPUs, of which it estimates none


#: Source of the prices; nobody has confirmed them since.
PRICED = "list prices on demand as known in 2026, not quotes"

# v4 and v5p close rings from 4 x 4 x 4 on, v5e and v6e at 16 x 16. A clock is an assumption: with it the matrix units
# of jax.experimental.pallas.tpu.get_tpu_info reach the peak, 4 or 8 of 128 x 128 (v4, v5e, v5p), two of 256 x 256 with
# two products a cycle each (v6e). By XLA's estimate of a product of 8,192 x 8,192 these clocks give .90, .88, .90 and
# .70 of the peak. GPUs: NVLink of 600 (A100) and 900 GB/s both ways, a 400 Gb/s port a GPU. A hop: How to Scale Your
# Model, part 3.
TARGETS = {
    "v4": Target(CHIPS["v4"], 34.4e9, 3.22, partial(torus, axes=3, closes=64), 1.05e9),
    "v5e": Target(CHIPS["v5e"], 17.2e9, 1.20, partial(torus, axes=2, closes=256), 1.5e9),
    "v5p": Target(CHIPS["v5p"], 103e9, 4.20, partial(torus, axes=3, closes=64, link=100e9), 1.75e9),
    "v6e": Target(CHIPS["v6e"], 34.4e9, 2.70, partial(torus, axes=2, closes=256, link=100e9), 1.75e9),
    "a100": Target(CHIPS["a100"], 85.9e9, 3.43, partial(nodes, inside=300e9)),
    "h100": Target(CHIPS["h100"], 85.9e9, 6.88, nodes),
    "h200": Target(CHIPS["h200"], 151e9, 7.91, nodes),
}
#: Variables with which libtpu compiles on a machine without TPUs, and in several processes at once.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
#: Description of a card for XLA's compiler for GPUs: NVIDIA's tuning guides of Ampere and Hopper, data sheets of the
#: SXM models.
CARD = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: {shared} shared_memory_per_block_optin: {optin}
  threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: {units}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {bandwidth:.0f} l2_cache_size: {cache} clock_rate_ghz: {clock} device_memory_size: {memory:.0f}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: 0 {feature} }}
  name: "{name}" driver_version: "13.0.0" runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""
_AMPERE = {"shared": 167936, "optin": 166912, "cores": 108, "units": 64, "cache": 41943040, "clock": 1.41, "major": 8}
_HOPPER: dict[str, Any] = {"shared": 233472, "optin": 232448, "cores": 132, "units": 128, "cache": 52428800}
_HOPPER |= {"clock": 1.98, "major": 9, "feature": "feature_extension: ACCELERATED_FEATURES"}
CARDS: dict[str, dict[str, Any]] = {
    "a100": {"name": "NVIDIA A100-SXM4-80GB", "feature": ""} | _AMPERE,
    "h100": {"name": "NVIDIA H100 80GB HBM3"} | _HOPPER,
    "h200": {"name": "NVIDIA H200"} | _HOPPER,
}
#: Packages that compile for CUDA without a driver: JAX's plugin and its compiler; ptxas and libdevice.
PLUGIN, NVCC = ("jax-cuda12-plugin", "jax-cuda12-pjrt"), "nvidia-cuda-nvcc-cu12"


class Topology(NamedTuple):
    """Chips of one kind; a chip may be several devices, which divide its rates and memory."""

    name: str
    target: Target
    chips: int
    devices: list[Any]

    @property
    def share(self) -> float:
        """Part of a chip that a device has."""
        return self.chips / len(self.devices)

    @property
    def rates(self) -> Rates:
        """Peak FLOP/s and bytes/s of a device."""
        chip = self.target.chip
        return Rates({dtype: self.share * peak for dtype, peak in chip.peak.items()}, self.share * chip.bandwidth)

    @property
    def device_memory(self) -> float:
        """Bytes of memory of a device."""
        return self.target.memory * self.share

    def memory(self, mesh: Mesh) -> int:
        """Returns the bytes of memory of all devices of a mesh together."""
        return int(self.device_memory * mesh.size)


def topology_of(text: str) -> Topology:
    """Returns the topology of CHIP:SHAPE: v5e:8x8 are TPUs, h100:8x2 two nodes of eight GPUs.

    Raises:
      UserError: the chip or shape is unknown; a compiler is missing, or not of the release that this JAX wants.
    """
    name, _, shape = text.partition(":")
    tpus = [name for name, target in TARGETS.items() if target.clock]
    gpus = [name for name in TARGETS if name not in tpus]
    if not (
        (name in tpus and re.fullmatch(r"\d+(x\d+)+", shape))
        or (name in gpus and re.fullmatch(r"[1-9]\d*(x[1-9]\d*)?", shape))
    ):
        raise UserError(
            f"--topology={text}: unknown; name a TPU of {', '.join(tpus)} and a shape, such as v5e:2x4 or v4:2x2x2,"
            f" or a GPU of {', '.join(gpus)} with how many a node has, and nodes, such as h200:8 or h100:8x2"
        )
    (_require_libtpu if name in tpus else _require_cuda)(text)
    os.environ.update(ENVIRONMENT)
    jax.config.update("jax_platforms", "cpu")  # or JAX looks for accelerators of this machine
    jax.config.update("jax_enable_compilation_cache", False)  # programs for GPUs cannot be read again without a GPU
    from jax.experimental import topologies

    target = TARGETS[name]
    description = {"topology_name": text, "platform": "tpu"}
    if name in gpus:
        near, _, nodes = shape.partition("x")
        card = CARD.format(bandwidth=target.chip.bandwidth, memory=target.memory, **CARDS[name])
        description = {"platform": "cuda", "target_config": card, "topology": f"1x{nodes or 1}x{near}"}
    try:
        devices = topologies.get_topology_desc(**description).devices
    except (jax.errors.JaxRuntimeError, RuntimeError) as error:
        raise UserError(f"--topology={text}: it cannot be described: {str(error).splitlines()[0]}") from error
    return Topology(text, target, math.prod(map(int, shape.split("x"))), list(devices))


def _require_libtpu(text: str) -> None:
    requirements = importlib.metadata.requires("jax") or ()
    release = next(line for line in requirements if line.startswith("libtpu")).partition(";")[0].strip()
    install = f"pip install '{release}'"  # libtpu==0.0.42.*
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(f"--topology={text}: compiling for a TPU needs libtpu (200 MB): {install}")
    version = importlib.metadata.version("libtpu")
    if not version.startswith(release.partition("==")[2].rstrip("*")):
        raise UserError(f"--topology={text}: libtpu {version} is not the one for jax {jax.__version__}: {install}")


def _require_cuda(text: str) -> None:
    plugins = " ".join(f"{package}=={jax.__version__}" for package in PLUGIN)
    install = f"pip install --no-deps {plugins} {NVCC}"
    for package in (*PLUGIN, NVCC):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError as error:
            raise UserError(
                f"--topology={text}: compiling for a GPU needs {package} (220 MB in all): {install}"
            ) from error
        if package in PLUGIN and version != jax.__version__:
            raise UserError(
                f"--topology={text}: {package} {version} is not the one for jax {jax.__version__}: {install}"
            )
