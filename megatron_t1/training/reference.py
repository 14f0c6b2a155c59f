"""The reference role: log-probs of a fixed policy, for the actor's KL term.

It is a scoring pass before the update, of a model without an optimizer that is gone again when the actor is built, so
the two are never in memory together.
"""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from megatron_t1.errors import MismatchError
from megatron_t1.model.convert import load_hf
from megatron_t1.training.context import Context
from megatron_t1.training.engine import Engine
from megatron_t1.training.samples import Sample, tokenizer_digest
from megatron_t1.training.scoring import score_groups, share

FIELD = "reference_logprobs"


def score_reference(context: Context, samples: list[Sample]) -> None:
    """Fill `reference_logprobs` of every sample on every rank, at the sampling temperature.

    With train.replay.reference the experts of the rollout are replayed here too: reference and actor then differ by
    their weights only, and the KL of equal weights is zero. Without, the reference chooses its own experts.

    Raises:
        MismatchError: train.actor.reference is a model with another tokenizer or architecture.
    """
    config = context.config
    directory = Path(config.train.actor.reference or context.start_model)
    if tokenizer_digest(directory) != tokenizer_digest(context.start_model):
        raise MismatchError(
            f"the reference policy {directory} has another tokenizer than {context.start_model}",
            where="train.actor.reference",
            remedy="the KL to a policy is only defined over the same tokens: name a model with the same tokenizer",
        )
    engine = Engine(config, context.backend, "policy", None, replay=config.train.replay.reference)
    load_hf(engine.chunks, directory, role="policy")
    groups = context.groups(samples)
    score_groups(engine, groups, engine.logprobs, "logprobs", field=FIELD)
    share(context, samples, groups, FIELD)
    del engine
    gc.collect()
    if torch.cuda.is_available() and context.backend.device.type == "cuda":
        torch.cuda.empty_cache()
