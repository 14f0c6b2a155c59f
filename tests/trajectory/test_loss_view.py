"""The view that training reads: every loss token once, at the position before it, on some context rank."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_t1.trajectory.layout import TokenLayout
from megatron_t1.trajectory.loss_view import loss_view


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.sampled_from([1, 2, 3]), st.integers(0, 999))
def test_all_context_ranks_together_hold_each_loss_token_once(lengths, context_size, seed):
    random = np.random.default_rng(seed)
    ids = [random.integers(0, 500, length).astype(np.int32) for length in lengths]
    masks = [random.random(length) < 0.5 for length in lengths]
    for mask in masks:
        mask[0] = False
    joined = np.concatenate([own[mask] for own, mask in zip(ids, masks, strict=True)])
    layout = TokenLayout(tuple(lengths), context_size=context_size)
    seen = []
    for rank in range(context_size):
        here = layout.at(context_rank=rank)
        view = loss_view(ids, masks, here)
        assert view.count == len(joined) and (view.targets == joined[view.ordinals]).all()
        before = [ids[s][p] for s, p in zip(here.sequence_ids[view.positions], here.position_ids[view.positions],
                                            strict=True)]  # fmt: skip
        assert view.tokens[view.positions].tolist() == before
        seen += view.ordinals.tolist()
    assert sorted(seen) == list(range(len(joined)))
