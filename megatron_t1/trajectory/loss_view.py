"""What a training step reads of packed sequences: inputs, the rows that carry loss, and what they predict.

The training phases build their micro-batches with this, and the audit looks through it at the same records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_t1.trajectory.layout import TokenLayout


@dataclass(frozen=True)
class LossView:
    """One micro-batch as one rank sees it. T_local: token rows of this context-parallel rank.

    Attributes:
        tokens: int32 [T_local], inputs; padding is 0.
        positions: int64 [n], rows of T_local whose output carries loss.
        ordinals: int64 [n], loss token that each of them predicts: index into the concatenated loss fields.
        targets: int32 [n], its id.
        count: loss tokens of the whole micro-batch, over all context ranks.
    """

    tokens: np.ndarray
    positions: np.ndarray
    ordinals: np.ndarray
    targets: np.ndarray
    count: int


def loss_view(ids: Sequence[np.ndarray], masks: Sequence[np.ndarray], layout: TokenLayout) -> LossView:
    """Cut ids (int32 [length]) and loss masks (bool [length]) of all sequences to this rank.

    The loss of token t is computed at the position before it; across context ranks that may be another rank's.
    """
    count, ordinals = 0, []
    for mask in masks:
        numbered = np.full(len(mask), -1, np.int64)
        numbered[mask] = np.arange(count, count + mask.sum())
        count += int(mask.sum())
        ordinals.append(numbered)
    local_ordinals = layout.local(layout.shift(ordinals, fill=-1), fill=-1)
    local_targets = layout.local(layout.shift(ids, fill=0), fill=0)
    positions = np.flatnonzero(local_ordinals >= 0)
    return LossView(
        tokens=layout.local(ids, fill=0),
        positions=positions,
        ordinals=local_ordinals[positions],
        targets=local_targets[positions],
        count=count,
    )
