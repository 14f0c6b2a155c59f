"""The critic's first act on a rollout: values of every record, advantages and returns, written as sidecars."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state as state

from megatron_t1.checkout.data import VALUE_FIELDS, RolloutData
from megatron_t1.checkout.models import Models
from megatron_t1.checkout.options import Options
from megatron_t1.training.advantages import compute_advantages
from megatron_t1.training.passes import read_values, score
from megatron_t1.trajectory.sidecar import write_sidecar


def write_values(options: Options, data: RolloutData, models: Models) -> dict[str, float]:
    """Score the records with the model as it is now, and write --t1-values. Collective over all ranks.

    Old values belong to the critic that hasn't yet been trained on these records, so a run that goes on after an
    interruption finds them here instead of computing them again.

    Returns:
        Statistics of the values (`compute_advantages`), printed by rank 0 as well.
    """
    batches = [data.micro_batch(group) for group in data.groups(data.samples)]
    batches += [data.micro_batch([]) for _ in range(_missing(len(batches)))]
    for batch, result in zip(batches, score(models.chunks, batches, read_values, models.replay), strict=True):
        for sample, values in zip(batch.samples, batch.per_sample(result["values"].numpy()), strict=True):
            sample.fields["old_values"] = values
    own = [sample for batch in batches for sample in batch.samples]
    group, device = state.get_data_parallel_group(), data.place.device
    statistics = compute_advantages(own, options.config.train.gae, group=group, device=device)
    if (
        state.is_pipeline_last_stage(ignore_virtual=True)
        and state.get_tensor_model_parallel_rank() == 0
        and state.get_context_parallel_rank() == 0
    ):
        arrays = {sample.key: {name: sample.fields[name] for name in VALUE_FIELDS} for sample in own}
        write_sidecar(options.values, data.place.replica, arrays, ranks=data.place.replicas)
    dist.barrier()
    if dist.get_rank() == 0:
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in statistics.items())
        print(f"> t1: values of {len(data.samples)} trajectories written to {options.values}: {numbers}", flush=True)
    return statistics


def _missing(count: int) -> int:
    """Micro-batches to fill the last round of interleaved pipeline stages."""
    interleaved = state.get_virtual_pipeline_model_parallel_world_size() is not None
    return -count % state.get_pipeline_model_parallel_world_size() if interleaved else 0
