"""Before a role runs: what it is about to read is what its makers recorded, and what the sampler saw and produced.

Ranks share the reading.

Checkpoints compare themselves with their own digests while they are loaded (model.checkpoint).
"""

from __future__ import annotations

from functools import partial

import torch.distributed as dist

from megatron_t1.audit.guard import require_no_drift
from megatron_t1.model.collective import together
from megatron_t1.phase import require_recorded
from megatron_t1.training.context import Context

READ = {"critic": ("rollout",), "actor": ("rollout", "critic")}  # role -> makers, in the same iteration


def require_inputs(context: Context, role: str) -> None:
    """Compare rollout records and sidecars with the makers' results, and records with their exchange logs. Collective.

    Raises:
        IncompleteError: on every rank, when a file is missing, was changed or added, or a maker left no result.
        MismatchError: on every rank, when a record isn't what the engine saw and produced (`t1 audit`).
    """
    paths, iteration = context.paths, context.iteration
    directories = {"rollout": paths.rollouts(iteration), "critic": paths.values(iteration)}
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for maker in READ.get(role, ()):
        together(partial(require_recorded, paths, iteration, maker, directories[maker], part=rank, parts=ranks))
        if maker == "rollout":
            together(partial(require_no_drift, directories[maker], part=rank, parts=ranks))
