"""How fast ranks add up tensors: the first thing to know of a network. Under srun, or alone; NCCL on GPUs, else gloo.

    MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1) srun --ntasks-per-node=8 \
        python3 benchmarks/all_reduce.py

Prints for each size the time and the bus bandwidth: 2 (n - 1) / n of the bytes over the time, what each rank's link
carries (NVIDIA/nccl-tests, doc/PERFORMANCE.md). Exit status 1 when a sum is wrong.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

SIZES = tuple(4**power for power in range(10, 16))  # bytes: 1 MiB to 1 GiB
REPETITIONS, WARMUP = 10, 2


def main() -> int:
    rank, ranks = int(os.environ.get("SLURM_PROCID", "0")), int(os.environ.get("SLURM_NTASKS", "1"))
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("SLURM_LOCALID", "0")) % torch.cuda.device_count())
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    dist.init_process_group("nccl" if on_gpu else "gloo", rank=rank, world_size=ranks)
    device = torch.device("cuda" if on_gpu else "cpu")
    if rank == 0:
        print(f"{ranks} ranks, {dist.get_backend()}, torch {torch.__version__}", flush=True)
    wrong = 0
    for size in SIZES if on_gpu else SIZES[:3]:
        tensor = torch.ones(size // 4, device=device)
        seconds = _measure(tensor, on_gpu)
        wrong += not bool((torch.isfinite(tensor).all()) and (tensor == tensor[0]).all())
        if rank == 0:
            bandwidth = 2 * (ranks - 1) / ranks * size / seconds / 1e9
            print(f"{size / 2**20:8.0f} MiB  {1e3 * seconds:9.3f} ms  {bandwidth:8.2f} GB/s", flush=True)
    wrong += _sum_of_ranks(device) != ranks * (ranks - 1) // 2
    dist.destroy_process_group()
    return 1 if wrong else 0


def _sum_of_ranks(device: torch.device) -> int:
    own = torch.tensor(dist.get_rank(), device=device)
    dist.all_reduce(own)
    return int(own)


def _measure(tensor: torch.Tensor, on_gpu: bool) -> float:
    """Seconds of one reduction. The maximum keeps ones at one, however often it is repeated."""
    for _ in range(WARMUP):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    if on_gpu:
        torch.cuda.synchronize()
    dist.barrier()
    started = time.perf_counter()
    for _ in range(REPETITIONS):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    if on_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / REPETITIONS


if __name__ == "__main__":
    sys.exit(main())
