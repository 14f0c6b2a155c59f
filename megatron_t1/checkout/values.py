"""The critic's first act on a rollout: values of every record, advantages and returns, written as sidecars."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state as state

from megatron_t1.checkout.data import RolloutData
from megatron_t1.checkout.gae import write_gae
from megatron_t1.checkout.models import Models
from megatron_t1.checkout.options import Options
from megatron_t1.training.advantages import VALUE_FIELDS, compute_advantages
from megatron_t1.training.batch import fill_fields
from megatron_t1.training.passes import missing_micro_batches, read_values, score, speaks_for_replica
from megatron_t1.trajectory.sidecar import write_sidecar


def write_values(options: Options, data: RolloutData, models: Models) -> dict[str, float]:
    """Score the records with the model as it is now, and write --t1-values. Collective over all ranks.

    Old values belong to the critic that hasn't yet been trained on these records, so a run that goes on after an
    interruption finds them here instead of computing them again.

    Returns:
        Statistics of the values (`compute_advantages`), printed by rank 0 as well.
    """
    batches = [data.micro_batch(group) for group in data.groups(data.samples)]
    batches += [data.micro_batch([]) for _ in range(missing_micro_batches(len(batches)))]
    fill_fields(batches, score(models.chunks, batches, read_values, models.replay), "values", field="old_values")
    own = [sample for batch in batches for sample in batch.samples]
    group, device = state.get_data_parallel_group(), data.place.device
    statistics = compute_advantages(own, options.config.train.gae, group=group, device=device)
    if dist.get_rank() == 0:  # before the sidecars: none of them is without it
        write_gae(options.values, options.config.train.gae)
    if speaks_for_replica():
        arrays = {sample.key: {name: sample.fields[name] for name in VALUE_FIELDS} for sample in own}
        write_sidecar(options.values, data.place.replica, arrays, ranks=data.place.replicas)
    dist.barrier()
    if dist.get_rank() == 0:
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in statistics.items())
        print(f"> t1: values of {len(data.samples)} trajectories written to {options.values}: {numbers}", flush=True)
    return statistics
