"""Numbers for every loss token of a rollout from one forward pass: log-probs of a policy, values of a critic."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist

from megatron_t1.training.batch import fill_fields
from megatron_t1.training.context import Context
from megatron_t1.training.engine import Engine, TokenReader
from megatron_t1.training.samples import Sample


def score_groups(
    engine: Engine, groups: list[list[Sample]], read: TokenReader, name: str, *, field: str, replay: bool | None = None
) -> None:
    """Fill `fields[field]` of this replica's samples with what `read` gives under `name`. Collective over all ranks.

    Args:
        groups: the samples of each micro-batch (`Context.groups`).
        replay: whether recorded routes are replayed; None: as the engine does.
    """
    batches = engine.micro_batches(groups, replay=replay)
    fill_fields(batches, engine.score(batches, read), name, field=field)


def share(context: Context, samples: Iterable[Sample], groups: list[list[Sample]], field: str) -> None:
    """Give every rank the field of all samples: mini-batches are packed anew, so a sample may move to another rank."""
    own = {sample.key: sample.fields[field] for group in groups for sample in group}
    gathered: list = [None] * context.replica_count
    dist.all_gather_object(gathered, own, group=context.replicas)
    merged = {key: numbers for part in gathered for key, numbers in part.items()}
    for sample in samples:
        sample.fields[field] = merged[sample.key]
