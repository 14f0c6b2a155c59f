"""GPUs that plans are made for, by their makers' data sheets, and which of them this machine has."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

GIB = 2**30
AUTO = "auto"


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        memory_gib: that `nvidia-smi` shows, a little less than is printed on it.
        tflops: dense bfloat16, at its peak, in 1e12 operations a second.
        bandwidth_gb_s: of its memory, in 1e9 bytes a second.
    """

    name: str
    memory_gib: float
    tflops: float
    bandwidth_gb_s: float

    @property
    def memory(self) -> int:
        return int(self.memory_gib * GIB)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 80.0, 312, 2039),
        Gpu("h100", 79.6, 989, 3350),
        Gpu("h800", 79.6, 989, 3350),
        Gpu("h20", 95.6, 148, 4000),
        Gpu("h200", 140.4, 989, 4800),
        Gpu("b200", 179.1, 2250, 7700),
        Gpu("gb200", 184.9, 2500, 8000),
        Gpu("b300", 268.6, 2250, 8000),
    )
}
QUERY = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
QUERY_TIMEOUT_S = 10.0


def find_gpu(name: str, memory_gib: float = 0.0) -> Gpu | None:
    """The GPU that a plan is for.

    Args:
        name: of GPUS, or "auto": the smallest one of this machine.
        memory_gib: overrides what is known of its memory; 0: nothing is.

    Returns:
        None when it is "auto" and this machine has none, as a login node has none.
    """
    gpu = local_gpu() if name == AUTO else GPUS[name]
    if gpu is None or not memory_gib:
        return gpu
    return Gpu(gpu.name, memory_gib, gpu.tflops, gpu.bandwidth_gb_s)


def local_gpu() -> Gpu | None:
    """The GPU of this machine with the least memory; None without NVIDIA's driver or without a GPU."""
    try:
        found = subprocess.run(QUERY, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_query(found)


def parse_query(text: str) -> Gpu | None:
    """The smallest GPU among lines of "name, MiB". One that isn't in GPUS has the speed of the most similar one."""
    gpus = []
    for line in text.splitlines():
        name, _, mebibytes = line.rpartition(",")
        if not mebibytes.strip().isdigit():
            continue
        memory_gib = int(mebibytes) / 1024
        words = name.lower().replace("-", " ").split()
        like = next((gpu for gpu in GPUS.values() if gpu.name in words), None)
        like = like or min(GPUS.values(), key=lambda gpu: abs(gpu.memory_gib - memory_gib))
        gpus.append(Gpu(" ".join(words) or like.name, memory_gib, like.tflops, like.bandwidth_gb_s))
    return min(gpus, key=lambda gpu: gpu.memory_gib, default=None)
