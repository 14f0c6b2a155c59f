"""What a micro-batch says about its tokens: who predicts whom, which experts are replayed, and all ranks agree."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_t1.config.schema import LayoutConfig
from megatron_t1.training.batch import MicroBatch, ReplayShape, build_micro_batch, lengths_of, plan_samples
from megatron_t1.training.samples import Sample
from megatron_t1.trajectory.layout import TokenLayout
from tests.training.synthetic import EXPERTS, GARBAGE, LAYERS, TOP_K, samples

SHAPE = ReplayShape(num_moe_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K, expert_parallel=2)
LONE = dict(context_size=1, context_rank=0, tensor_size=1, tensor_rank=0, sequence_parallel=False)


def build(group: list[Sample], *, shape: ReplayShape | None = SHAPE, **sizes) -> MicroBatch:
    return build_micro_batch(group, layout_sizes={**LONE, **sizes}, route_shape=shape, device=torch.device("cpu"))


def hand_made() -> Sample:
    """prompt 10, sampled 11 12, tool output 20 21, sampled 13; advantages 1 2 3."""
    ids = np.array([10, 11, 12, 20, 21, 13], np.int32)
    mask = np.array([0, 1, 1, 0, 0, 1], bool)
    routes = (np.arange(6 * LAYERS)[:, None] + np.arange(TOP_K)).reshape(6, LAYERS, TOP_K) % EXPERTS
    routes[5] = GARBAGE
    fields = {"advantages": np.array([1, 2, 3], np.float32)}
    return Sample("a", "a", ids, mask, routes.astype(np.uint8), np.arange(6) < 5, 1.0, fields)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=20), st.sampled_from([(1, 1), (2, 1), (1, 4), (2, 3)]),
    st.integers(64, 131), st.integers(1, 3),
)  # fmt: skip
def test_no_micro_batch_is_padded_beyond_the_capacity(lengths, sizes, capacity, replicas):
    context, tensor = sizes
    multiple = LayoutConfig(context=context, tensor=tensor).stream_multiple
    group = [replace(hand_made(), name=str(n), ids=np.zeros(length, np.int32)) for n, length in enumerate(lengths)]
    plan = plan_samples(group, replicas=replicas, capacity=capacity, context_size=context, stream_multiple=multiple)
    for rank in range(replicas):
        for batch in plan.groups(rank, group):
            layout = TokenLayout(lengths_of(batch), context, 0, tensor, 0, tensor > 1)
            assert layout.total <= capacity


def test_each_loss_token_is_read_at_the_position_before_it():
    batch = build([hand_made()])
    assert batch.tokens.tolist() == [[10, 11, 12, 20, 21, 13]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5]]
    # 13 follows tool output: it is read at the output's last token, 21, and not at 12, the sampled token before it.
    assert batch.positions.tolist() == [0, 1, 4]
    assert batch.targets.tolist() == [11, 12, 13]
    assert batch.ordinals.tolist() == [0, 1, 2] and batch.count == 3
    assert batch.loss_field("advantages", torch.device("cpu")).tolist() == [1.0, 2.0, 3.0]


def test_no_sequence_predicts_the_first_token_of_the_next():
    first, second = hand_made(), hand_made()
    second.ids = second.ids + 30
    second.fields = {"advantages": np.array([4, 5, 6], np.float32)}
    batch = build([first, second])
    assert batch.positions.tolist() == [0, 1, 4, 6, 7, 10]
    assert batch.targets.tolist() == [11, 12, 13, 41, 42, 43]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5] * 2]
    assert batch.layout.cu_seqlens.tolist() == [0, 6, 12]
    assert [part.tolist() for part in batch.per_sample(np.arange(6))] == [[0, 1, 2], [3, 4, 5]]


def test_recorded_rows_are_replayed_and_the_unrecorded_last_one_is_not():
    sample = hand_made()
    batch = build([sample])
    assert batch.routes.mask.tolist() == [True] * 5 + [False]
    assert np.array_equal(batch.routes.routes[:5].numpy(), sample.routes[:5])
    assert build([sample], shape=None).routes is None


def test_padding_gets_distinct_spread_experts():
    sample = hand_made()
    batches = [build([sample], context_size=2, context_rank=rank) for rank in (0, 1)]  # 6 tokens padded to 8
    padding = [batch.layout.is_padding for batch in batches]
    assert sum(part.sum() for part in padding) == 2
    for batch, where in zip(batches, padding, strict=True):
        rows = batch.routes.routes.numpy()[where]
        assert batch.routes.mask.numpy()[where].all()
        assert (rows < EXPERTS).all() and (rows[..., 0] != rows[..., 1]).all()
        assert (batch.tokens.numpy()[0, where] == 0).all()
        assert not np.isin(batch.positions.numpy(), np.flatnonzero(where)).any()


def test_a_rank_without_work_gets_a_batch_of_no_weight():  # NeMo-RL#158
    batch = build([])
    assert batch.tokens.shape[1] > 0 and batch.count == 0 and len(batch.positions) == 0
    assert batch.routes.mask.all()
    rows = batch.routes.routes.numpy()
    assert (rows[..., 0] != rows[..., 1]).all()
    loads = np.bincount(rows.reshape(-1) * 2 // EXPERTS, minlength=2)  # of the two expert-parallel ranks
    assert abs(int(loads[0]) - int(loads[1])) <= LAYERS
    assert batch.loss_field("advantages", torch.device("cpu")).shape == (0,)
    assert batch.per_sample(np.zeros(0)) == []


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.integers(0, 3))
def test_cuts_over_ranks_are_the_whole_cut_apart(count, context_size, tensor_size, seed):  # slime#2235
    group = samples(count, seed=seed)
    for sample in group:
        sample.fields["mark"] = np.arange(sample.loss_tokens, dtype=np.float32)
    whole = build(group)
    expected = {
        int(ordinal): (int(target), float(mark))
        for ordinal, target, mark in zip(
            whole.ordinals, whole.targets, whole.loss_field("mark", torch.device("cpu")), strict=True
        )
    }
    assert sorted(expected) == list(range(sum(sample.loss_tokens for sample in group)))
    found = {}
    for context_rank in range(context_size):
        ranks = [
            build(
                group,
                context_size=context_size,
                context_rank=context_rank,
                tensor_size=tensor_size,
                tensor_rank=tensor_rank,
                sequence_parallel=tensor_size > 1,
            )
            for tensor_rank in range(tensor_size)
        ]
        batch = ranks[0]
        for other in ranks[1:]:  # tensor ranks see the same tokens and losses, and other rows of routes
            assert torch.equal(batch.tokens, other.tokens) and torch.equal(batch.positions, other.positions)
        assert batch.count == whole.count
        rows = torch.cat([rank.routes.routes for rank in ranks])
        mask = torch.cat([rank.routes.mask for rank in ranks])
        assert len(rows) == batch.tokens.shape[1]
        owner, place = batch.layout.sequence_ids, batch.layout.position_ids
        for row in range(len(rows)):
            sample = group[owner[row]]
            if batch.layout.is_padding[row]:
                assert mask[row] and (rows[row] < EXPERTS).all()
                continue
            assert bool(mask[row]) == bool(sample.routed[place[row]])
            assert int(batch.tokens[0, row]) == sample.ids[place[row]]
            if mask[row]:
                assert np.array_equal(rows[row].numpy(), sample.routes[place[row]])
        marks = batch.loss_field("mark", torch.device("cpu"))
        for ordinal, target, mark in zip(batch.ordinals, batch.targets, marks, strict=True):
            assert int(ordinal) not in found
            found[int(ordinal)] = (int(target), float(mark))
    assert found == expected


def test_what_stands_where_no_loss_is_changes_no_loss_field():
    """Poison in the rows that are never read: log-probs of tool output, routes of the last token."""
    clean, poisoned = hand_made(), hand_made()
    poisoned.routes = poisoned.routes.copy()
    poisoned.routes[5] = 0
    one, other = build([clean]), build([poisoned])
    assert torch.equal(one.routes.routes[one.routes.mask], other.routes.routes[other.routes.mask])
    with pytest.raises(KeyError):
        one.loss_field("absent", torch.device("cpu"))
