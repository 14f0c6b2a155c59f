"""A trajectory as a training step reads it: through packing, layout and the shift, not from the record's own fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_t1.trajectory.layout import TokenLayout
from megatron_t1.trajectory.loss_view import loss_view
from megatron_t1.trajectory.record import Trajectory


@dataclass(frozen=True)
class TrainedView:
    """One trajectory of T tokens in a micro-batch; N of them carry loss.

    Attributes:
        ids: int32 [T], the inputs.
        loss_tokens: int64 [N], position in the stream of the token that each loss term is about.
        targets: int32 [N], the id that the term is about.
        logprobs: float32 [N], the sampler's log-probability that the term uses.
    """

    ids: np.ndarray
    loss_tokens: np.ndarray
    targets: np.ndarray
    logprobs: np.ndarray

    @property
    def loss_mask(self) -> np.ndarray:
        """bool [T]."""
        mask = np.zeros(len(self.ids), bool)
        mask[self.loss_tokens] = True
        return mask


def trained_views(trajectories: Sequence[Trajectory], *, context_size: int = 1) -> list[TrainedView]:
    """Lay the trajectories out as one micro-batch and read back what every context-parallel rank would train on."""
    layout = TokenLayout(tuple(len(trajectory) for trajectory in trajectories), context_size=context_size)
    masks = [trajectory.loss_mask for trajectory in trajectories]
    joined = np.concatenate([t.logprobs[mask] for t, mask in zip(trajectories, masks, strict=True)])
    pieces, sequences, tokens, targets, ordinals = [], [], [], [], []
    for rank in range(context_size):
        here = layout.at(context_rank=rank)
        view = loss_view([trajectory.ids for trajectory in trajectories], masks, here)
        pieces.append(view.tokens)
        sequences.append(here.sequence_ids[view.positions])
        tokens.append(here.position_ids[view.positions] + 1)
        targets.append(view.targets)
        ordinals.append(view.ordinals)
    sequence, token, target, ordinal = map(np.concatenate, (sequences, tokens, targets, ordinals))
    views = []
    for number, ids in enumerate(layout.scatter(pieces)):
        own = np.flatnonzero(sequence == number)
        own = own[np.argsort(ordinal[own], kind="stable")]
        views.append(TrainedView(ids, token[own], target[own], joined[ordinal[own]]))
    return views
