"""One rank of a layout, built as a training phase builds it, and what is found on it: runs inside `fake_world`.

Everything comes from `training.engine.Engine`, whose model, gradient buffers and optimizer shards are those of a real
phase but for the device they lie on.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

from megatron_t1.config.schema import Config
from megatron_t1.errors import MismatchError
from megatron_t1.model.backend import Backend
from megatron_t1.model.binding import bind, expected_tensors
from megatron_t1.model.mapping import WeightMapping
from megatron_t1.model.names import CheckpointNames
from megatron_t1.model.packing import Shape
from megatron_t1.model.parallel import parallel_ranks
from megatron_t1.planner.bytes import RankBytes
from megatron_t1.planner.dryrun_report import Place
from megatron_t1.training.engine import Engine

ADAM_MOMENTS = 2  # float32, as is the master copy


def build_engine(config: Config, backend: Backend, role: str) -> Engine:
    """The engine of the actor's or the critic's phase on this rank."""
    return Engine.of_role(config, backend, role, initialize=False)


def place() -> Place:
    """Where this rank stands in its groups."""
    ranks = parallel_ranks()
    return Place(
        rank=ranks.rank,
        pipeline=ranks.pipeline,
        tensor=ranks.tensor,
        context=ranks.context,
        data=ranks.data,
        expert=ranks.expert,
        expert_tensor=parallel_state.get_expert_tensor_parallel_rank(),
        expert_data=parallel_state.get_expert_data_parallel_rank(),
    )


def measure_bytes(engine: Engine) -> RankBytes:
    """Bytes of what exists: the storages that gradient buffers, parameters and optimizer shards have."""
    named = [pair for chunk in engine.chunks for pair in chunk.named_parameters()]
    parameters = [parameter for _, parameter in named]
    expert = sum(parameter.numel() for name, parameter in named if ".experts." in name)
    buffers = [buffer for module in engine.modules for buffer in module.buffers + module.expert_parallel_buffers]
    in_buffers = [buffer.param_data for buffer in buffers if buffer.param_data is not None]
    weights = _storage_bytes([*in_buffers, *parameters])
    return RankBytes(
        rank=dist.get_rank(),
        dense_parameters=sum(parameter.numel() for parameter in parameters) - expert,
        expert_parameters=expert,
        weight_bytes=weights,
        gradient_bytes=_storage_bytes([buffer.grad_data for buffer in buffers]),
        optimizer_bytes=sum(_optimizer_bytes(part) for part in engine.optimizer.chained_optimizers),
    )


def _storage_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind some tensors; a parameter in a buffer is a view of it."""
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def _optimizer_bytes(optimizer: object) -> int:
    """Adam's moments for every shard, and a float32 master copy of those shards that the model holds in less."""
    if hasattr(optimizer, "shard_fp32_from_float16_groups"):  # the distributed optimizer
        mastered, bare = optimizer.shard_fp32_from_float16_groups, optimizer.shard_fp32_groups
    else:
        mastered = getattr(optimizer, "fp32_from_float16_groups", [])
        bare = getattr(optimizer, "fp32_from_fp32_groups", None)
        bare = [group["params"] for group in optimizer.optimizer.param_groups] if bare is None else bare
    copied, own = (sum(shard.numel() for group in groups for shard in group) for groups in (mastered, bare))
    return 4 * (copied * (1 + ADAM_MOMENTS) + own * ADAM_MOMENTS)


def whole_model(engine: Engine) -> dict[str, Any]:
    """What the ranks together must hold, as `dryrun_report.LayoutFindings` takes it."""
    chunk, architecture = engine.chunks[0], engine.chunks[0].architecture
    expected = expected_tensors(chunk, CheckpointNames())
    shapes = dict(WeightMapping(architecture).tensors())
    return {
        "core": megatron.core.__version__,
        "tensors": {name: math.prod(shapes[name]) for name in sorted(expected)},
        "head": architecture.hidden_size + 1 if engine.role == "value" else 0,
    }


def converted_elements(engine: Engine) -> dict[str, int]:
    """Elements of each Hugging Face tensor that this rank, alone of all that hold them, answers for.

    Raises:
        ConfigError: a parameter that the conversion's table doesn't know.
        MismatchError: the table's tensors don't give the parameter's shape.
    """
    elements: Counter[str] = Counter()
    bound, _ = bind(engine.chunks, CheckpointNames())
    for item in bound:
        source, packing = item.source, item.packing
        rank, size = dist.get_rank(item.group), dist.get_world_size(item.group)
        packed = packing.pack(lambda *cut, packing=packing: _slice(packing.shapes, *cut), rank, size)
        if packed.shape != item.parameter.shape:
            raise MismatchError(
                f"{item.name} has shape {list(item.parameter.shape)}, its tensors give {list(packed.shape)}",
                where=", ".join(source.names),
                remedy="megatron_t1.model.mapping and the built model disagree",
            )
        if item.in_first_replica:
            share = packing.share(rank, size)
            for name, shape in zip(source.names, packing.shapes, strict=True):
                elements[name] += int(share * math.prod(shape))
    return dict(elements)


def _slice(shapes: list[Shape], tensor: int, dimension: int, first: int, last: int) -> torch.Tensor:
    """What reading a part of a stored tensor gives, but for the numbers."""
    shape = list(shapes[tensor])
    shape[dimension] = last - first
    return torch.empty(shape, device="meta")


def stored_elements(engine: Engine) -> dict[str, list[int]]:
    """Elements of each checkpoint entry: [those whose main replica this rank writes, those of the whole tensor]."""
    state = {str(index): chunk.sharded_state_dict() for index, chunk in enumerate(engine.chunks)}
    apply_factories(state)
    found: dict[str, list[int]] = {}
    for entry in nested_values(state):
        if not isinstance(entry, ShardedTensor):
            continue
        replica = entry.replica_id if isinstance(entry.replica_id, tuple) else (entry.replica_id,)
        own = 0 if any(replica) else entry.data.numel()
        before, _ = found.get(entry.key, [0, 0])
        found[entry.key] = [before + own, math.prod(entry.global_shape)]
    return found
