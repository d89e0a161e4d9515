"""Chips that are not here, as JAX's compilers describe them: TPUs by their topology, GPUs by what their driver would say."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import re
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from routed.contracts import UserError
from routed.system.chips import CHIPS, Chip

#: What libtpu asks of a machine that is no TPU, and several processes at once.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
#: What XLA's compiler for GPUs asks of a card. NVIDIA's tuning guides of Ampere and Hopper, and data sheets of the SXM models.
CARD = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: {shared} shared_memory_per_block_optin: {optin}
  threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: {units}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {bandwidth:.0f} l2_cache_size: {cache} clock_rate_ghz: {clock} device_memory_size: {memory:.0f}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: 0 {feature} }}
  name: "{name}" driver_version: "13.0.0" runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""
_HOPPER = {
    "shared": 233472, "optin": 232448, "cores": 132, "units": 128, "cache": 52428800, "clock": 1.98, "major": 9,
    "feature": "feature_extension: ACCELERATED_FEATURES",
}  # fmt: skip
CARDS: dict[str, dict[str, Any]] = {
    "a100": {
        "name": "NVIDIA A100-SXM4-80GB", "shared": 167936, "optin": 166912, "cores": 108, "units": 64, "cache": 41943040,
        "clock": 1.41, "major": 8, "feature": "",
    },
    "h100": {"name": "NVIDIA H100 80GB HBM3"} | _HOPPER,
    "h200": {"name": "NVIDIA H200"} | _HOPPER,
}  # fmt: skip
#: What compiles for CUDA, without a driver: the plugin and its compiler in JAX's own release; ptxas and libdevice.
PLUGIN, NVCC = ("jax-cuda12-plugin", "jax-cuda12-pjrt"), "nvidia-cuda-nvcc-cu12"


class Topology(NamedTuple):
    """Chips of one kind; a chip may be several devices, each with its share of the chip's rates and memory."""

    name: str
    chip: Chip
    chips: int
    devices: list[Any]

    @property
    def share(self) -> float:
        """Of a chip, that a device has."""
        return self.chips / len(self.devices)

    def memory(self, mesh: Mesh) -> int:
        """Bytes of the devices of a mesh, all together."""
        return int(self.chip.memory * self.share * mesh.size)


def topology_of(text: str) -> Topology:
    """The chips that CHIP:SHAPE names: v5e:8x8 of a TPU, h100:8x2 of two nodes of eight GPUs.

    Raises:
      UserError: an unknown chip or shape; what compiles for it is missing, or not the release that this JAX wants.
    """
    name, _, shape = text.partition(":")
    tpus, gpus = (
        [known for known, chip in CHIPS.items() if chip.clock],
        [known for known, chip in CHIPS.items() if not chip.clock],
    )
    if not (
        (name in tpus and re.fullmatch(r"\d+(x\d+)+", shape))
        or (name in gpus and re.fullmatch(r"[1-9]\d*(x[1-9]\d*)?", shape))
    ):
        raise UserError(
            f"--topology={text}: unknown; name a TPU of {', '.join(tpus)} and a shape, such as v5e:2x4 or v4:2x2x2, or a GPU of"
            f" {', '.join(gpus)} with how many a node has, and nodes, such as h200:8 or h100:8x2"
        )
    (_require_libtpu if name in tpus else _require_cuda)(text)
    os.environ.update(ENVIRONMENT)
    jax.config.update("jax_platforms", "cpu")  # or JAX looks for accelerators here
    jax.config.update("jax_enable_compilation_cache", False)  # programs for GPUs cannot be read again without one
    from jax.experimental import topologies

    described = {"topology_name": text, "platform": "tpu"}
    if name in gpus:
        near, _, nodes = shape.partition("x")
        card = CARD.format(bandwidth=CHIPS[name].bandwidth, memory=CHIPS[name].memory, **CARDS[name])
        described = {"platform": "cuda", "target_config": card, "topology": f"1x{nodes or 1}x{near}"}
    try:
        devices = topologies.get_topology_desc(**described).devices
    except (jax.errors.JaxRuntimeError, RuntimeError) as error:
        raise UserError(f"--topology={text}: it cannot be described: {str(error).splitlines()[0]}") from error
    return Topology(text, CHIPS[name], math.prod(map(int, shape.split("x"))), list(devices))


def _require_libtpu(text: str) -> None:
    asked = next(one for one in importlib.metadata.requires("jax") or () if one.startswith("libtpu"))
    release = asked.partition(";")[0].strip()  # libtpu==0.0.42.*
    install = f"pip install '{release}'"
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(f"--topology={text}: compiling for a TPU needs libtpu (200 MB): {install}")
    found = importlib.metadata.version("libtpu")
    if not found.startswith(release.partition("==")[2].rstrip("*")):
        raise UserError(f"--topology={text}: libtpu {found} is not the one for jax {jax.__version__}: {install}")


def _require_cuda(text: str) -> None:
    install = f"pip install --no-deps {' '.join(f'{one}=={jax.__version__}' for one in PLUGIN)} {NVCC}"
    for package in (*PLUGIN, NVCC):
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError as error:
            raise UserError(
                f"--topology={text}: compiling for a GPU needs {package} (220 MB in all): {install}"
            ) from error
        if package in PLUGIN and found != jax.__version__:
            raise UserError(f"--topology={text}: {package} {found} is not the one for jax {jax.__version__}: {install}")
