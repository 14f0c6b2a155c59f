"""The sampler/trainer correction of a rollout: one factor for each loss token, fixed before the update."""

from __future__ import annotations

import numpy as np
import torch

from megatron_t1.config.schema import ActorConfig
from megatron_t1.errors import T1Error
from megatron_t1.ppo.corrections import effective_sample_share, importance_correction
from megatron_t1.ppo.sums import means
from megatron_t1.training.samples import Sample

FIELD = "correction"


def add_corrections(samples: list[Sample], options: ActorConfig) -> dict[str, float]:
    """Fill `correction` of all samples, where options.correction asks for one. Every rank computes the same.

    Args:
        samples: of the whole rollout, with `trainer_logprobs` and `sampler_logprobs`.

    Raises:
        T1Error: no token's factor is above 0, so the update would learn nothing from the rollout.

    Returns:
        actor/correction (mean factor), correction_touched, correction_rejected (shares of tokens), and the effective
        sample size in tokens and as a share of them; empty without a correction.
    """
    if options.correction == "none":
        return {}
    lengths = [sample.loss_tokens for sample in samples]

    def joined(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([sample.fields[name] for sample in samples]))

    factors, sums = importance_correction(
        joined("trainer_logprobs"),
        joined("sampler_logprobs"),
        kind=options.correction,
        cap=options.correction_cap,
        low=options.correction_low,
        lengths=torch.tensor(lengths),
    )
    if not bool((factors > 0).any()):
        raise T1Error(
            f"train.actor.correction={options.correction} rejects all {sum(lengths)} tokens of the rollout",
            where="actor/correction_rejected of this rollout, before the update",
            remedy="`t1 gap` says why sampler and trainer disagree; correction_low and correction_cap bound "
            "p_trainer / p_sampler",
        )
    for sample, own in zip(samples, np.split(factors.numpy(), np.cumsum(lengths)[:-1]), strict=True):
        sample.fields[FIELD] = own
    share = effective_sample_share(sums)
    found = means({name: pair for name, pair in sums.items() if name != "correction_square"})
    return {
        **{f"actor/{name}": value for name, value in found.items()},
        "actor/effective_sample_share": share,
        "actor/effective_sample_tokens": share * sum(lengths),
    }
