"""Process groups of a training phase: from the launcher's environment variables to Megatron's parallel state.

Checks the layout against the world size, the architecture and what is known to be wrong in Megatron-Core or on gloo
before any process group exists; every problem found is listed in one error.
"""

from __future__ import annotations

import datetime
import os
import re
from dataclasses import dataclass
from importlib import metadata

from megatron_t1.config.families import core_problems
from megatron_t1.config.layout_rules import layout_problems
from megatron_t1.config.schema import ArchitectureConfig, LayoutConfig
from megatron_t1.errors import ConfigError, T1Error
from megatron_t1.model.backend import Backend


@dataclass(frozen=True)
class Rendezvous:
    """Who this process is, and where the processes meet. `address` is empty for a lone process."""

    rank: int
    world_size: int
    address: str
    port: int


@dataclass(frozen=True)
class ParallelRanks:
    """Rank and size of this process along each axis (`data` excludes context parallelism)."""

    rank: int
    world_size: int
    tensor: int
    tensor_size: int
    pipeline: int
    pipeline_size: int
    context: int
    context_size: int
    data: int
    data_size: int
    expert: int
    expert_size: int


def rendezvous_from_environment(environ: dict[str, str] | None = None) -> Rendezvous:
    """Read torchrun's variables, or Slurm's, or neither (a lone process).

    Raises:
        ConfigError: a variable is missing or isn't a number.
    """
    environ = dict(os.environ) if environ is None else environ
    try:
        if "RANK" in environ:
            rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        elif "SLURM_PROCID" in environ and int(environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", 1))) > 1:
            rank = int(environ["SLURM_PROCID"])
            world_size = int(environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", 1)))
        else:
            return Rendezvous(0, 1, "", 0)
        address = environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_JOB_NODELIST", ""))
        port = int(environ.get("MASTER_PORT") or 20000 + int(environ["SLURM_JOB_ID"]) % 20000)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"the launcher's environment is incomplete: {error!r}",
            where="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT or SLURM_PROCID, SLURM_NTASKS, SLURM_JOB_ID",
            remedy="start training phases with `t1`, torchrun or srun",
        ) from error
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} lies outside the world of {world_size}", where="RANK, WORLD_SIZE")
    if not address and world_size > 1:
        raise ConfigError("no address to meet at", where="MASTER_ADDR", remedy="export MASTER_ADDR, or start with t1")
    return Rendezvous(rank, world_size, address, port)


def first_host(nodelist: str) -> str:
    """First host of a Slurm node list: "gpu[03-05,9],cpu1" -> "gpu03"."""
    match = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,]*))?", nodelist)
    return "" if match is None else match[1] + (match[2] or "") + (match[3] or "")


def initialize_parallel(
    layout: LayoutConfig,
    backend: Backend,
    seed: int,
    *,
    architecture: ArchitectureConfig | None = None,
    timeout_s: float = 600.0,
) -> ParallelRanks:
    """Join the other processes where that hasn't happened yet, build Megatron's process groups, seed every generator.

    Args:
        layout: parallel sizes; checked against the actual number of processes.
        backend: prepared here if it isn't yet.
        seed: equal on all ranks; Megatron derives a rank's own where ranks must differ.
        architecture: checked against the layout when given.
        timeout_s: for the rendezvous and for every collective.

    Raises:
        ConfigError: the layout can't work; lists every reason.
        T1Error: the processes didn't find each other in time.
    """
    meeting = rendezvous_from_environment()
    wrong = layout_problems(layout, architecture, processes=meeting.world_size, backend=backend.name)
    if architecture is not None:
        wrong += core_problems(architecture, layout, metadata.version("megatron-core"))
    if wrong:
        raise ConfigError("the parallel layout can't be used:\n  - " + "\n  - ".join(wrong), where="layout")
    backend.prepare()

    import torch

    if not torch.distributed.is_initialized():
        _join(meeting, backend, timeout_s)

    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        distributed_timeout_minutes=timeout_s / 60,  # Megatron makes a timedelta of it
    )
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return parallel_ranks()


def parallel_ranks() -> ParallelRanks:
    """This process's place, read from Megatron's parallel state."""
    import torch.distributed as dist
    from megatron.core import parallel_state as state

    return ParallelRanks(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tensor=state.get_tensor_model_parallel_rank(),
        tensor_size=state.get_tensor_model_parallel_world_size(),
        pipeline=state.get_pipeline_model_parallel_rank(),
        pipeline_size=state.get_pipeline_model_parallel_world_size(),
        context=state.get_context_parallel_rank(),
        context_size=state.get_context_parallel_world_size(),
        data=state.get_data_parallel_rank(),
        data_size=state.get_data_parallel_world_size(),
        expert=state.get_expert_model_parallel_rank(),
        expert_size=state.get_expert_model_parallel_world_size(),
    )


def _join(meeting: Rendezvous, backend: Backend, timeout_s: float) -> None:
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=timeout_s)
    if meeting.world_size == 1:
        dist.init_process_group(backend.communication, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    device = {} if backend.name == "cpu" else {"device_id": backend.device}
    try:
        dist.init_process_group(
            backend.communication,
            init_method=f"tcp://{meeting.address}:{meeting.port}",
            rank=meeting.rank,
            world_size=meeting.world_size,
            timeout=timeout,
            **device,
        )
    except (dist.DistError, RuntimeError) as error:
        raise T1Error(
            f"rank {meeting.rank} of {meeting.world_size} didn't join the others within {timeout_s:g} s: {error}",
            where=f"{meeting.address}:{meeting.port}",
            remedy="look for the ranks that died first; check that the port is free and the address reachable",
        ) from error


def destroy_parallel() -> None:
    """Leave the process groups. Safe to call twice, and after a failed initialisation."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
