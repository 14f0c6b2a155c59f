"""What the ranks of a dry run must amount to together, on findings made by hand; and the arithmetic of buffers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_t1.planner.bytes import ALIGNMENT, RankBytes, buffer_elements, buffer_spans, shard_elements
from megatron_t1.planner.dryrun import passing_ranks
from megatron_t1.planner.dryrun_report import BatchFindings, LayoutFindings, PassFindings, Place, RankFindings

TENSORS = {"embed": 8, "experts.0": 6, "experts.1": 6}
TOKENS, LAYERS = 5, 2


def rank(number: int, **changes) -> RankFindings:
    """One of two ranks: they share the tokens, each has one layer's routes of every token and one expert."""
    converted = {f"experts.{number}": 6, **({"embed": 8} if number == 0 else {})}
    found = RankFindings(
        place=Place(number, 0, 0, 0, number, number, 0, 0),
        bytes=RankBytes(number, 8, 6, 28, 56, 84),
        converted=converted,
        stored={"embed": [8 if number == 0 else 0, 8], "experts": [6, 12]},
        passed=PassFindings(16, [], 0.1),
        batch=BatchFindings(
            tokens=[0, 1, 2] if number == 0 else [3, 4],
            predicted=[1, 2] if number == 0 else [4],
            routed=[0, 1, 2] if number == 0 else [3, 4],
            layers=[0, 1],
            misplaced=0,
        ),
    )
    return replace(found, **changes)


def layout(*ranks: RankFindings, **changes) -> LayoutFindings:
    ranks = ranks or (rank(0), rank(1))
    found = LayoutFindings(
        name="two", role="policy", core="0", ranks=ranks, processes=2, tensors=TENSORS, head=0, tokens=TOKENS,
        loss_tokens=3, layers=LAYERS, planned_parameters=20,
        planned=[RankBytes(number, 8, 6, 28, 56, 84) for number in range(2)],
    )  # fmt: skip
    return replace(found, **changes)


def batch(number: int, **changes) -> RankFindings:
    return rank(number, batch=replace(rank(number).batch, **changes))


def test_ranks_that_fit_together_have_no_problem():
    found = layout()
    assert found.problems() == [] and found.parameters == 20
    assert found.table() == [["0", "2", "0.00", "0.00", *["0.00"] * 4]]


BROKEN = {
    "a rank is missing": (layout(rank(0)), "1 of 2 ranks"),
    "a rank twice": (layout(rank(0), rank(0), rank(1)), "2 of 2 ranks"),
    "a tensor nowhere": (layout(rank(0, converted={"experts.0": 6}), rank(1)), "embed (0 of 8)"),
    "a tensor twice": (layout(rank(0), rank(1, converted={"experts.1": 6, "embed": 8})), "embed (16 of 8)"),
    "half a tensor": (layout(rank(0), rank(1, converted={"experts.1": 3})), "experts.1 (3 of 6)"),
    "an entry without a writer": (
        layout(rank(0), rank(1, stored={"experts": [0, 12]})), "experts (6 of 12)"),
    "two writers of an entry": (layout(rank(0), rank(1, stored={"embed": [8, 8]})), "embed (16 of 8)"),
    "another plan": (layout(planned=[RankBytes(0, 8, 6, 28, 56, 84), RankBytes(1, 8, 6, 28, 56, 88)]), "rank 1 first"),
    "another total": (layout(planned_parameters=21), "20 parameters, the plan says 21"),
    "no gradient": (layout(rank(0), rank(1, passed=PassFindings(16, ["w"], 0.1))), "rank 1: no gradient for 1"),
    "no pass": (layout(rank(0, passed=None), rank(1, passed=None)), "stages [0]"),
    "a token twice": (layout(rank(0), batch(1, tokens=[3, 4, 4])), "1 tokens aren't there exactly once"),
    "a token nowhere": (layout(rank(0), batch(1, tokens=[3])), "1 tokens aren't there exactly once"),
    "a loss twice": (layout(rank(0), batch(1, predicted=[4, 1])), "3 of 3 loss tokens have a loss, or some twice"),
    "a loss nowhere": (layout(rank(0), batch(1, predicted=[])), "2 of 3 loss tokens"),
    "routes nowhere": (layout(rank(0), batch(1, layers=[0])), "2 of 10 (token, layer)"),
    "routes twice": (layout(rank(0), batch(1, routed=[3, 4, 0])), "2 of 10 (token, layer)"),
    "routes beside their token": (layout(rank(0), batch(1, misplaced=2)), "rank 1: 2 rows"),
}  # fmt: skip


@pytest.mark.parametrize(("found", "said"), BROKEN.values(), ids=BROKEN)
def test_what_does_not_hold_is_said(found, said):
    assert said in "\n".join(found.problems())


def test_no_passes_are_missed_where_none_were_asked_for():
    assert layout(rank(0, passed=None), rank(1, passed=None), passes=False).problems() == []


def test_findings_survive_the_way_from_the_worker():
    found = rank(0, seconds={"build": 0.5})
    assert RankFindings.from_json(json.loads(json.dumps(found.to_json()))) == found
    bare = rank(1, passed=None, batch=None)
    assert RankFindings.from_json(json.loads(json.dumps(bare.to_json()))) == bare


def test_one_rank_of_each_stage_runs():
    assert passing_ranks(12, 3) == {0, 7, 11}
    assert passing_ranks(12, 3, only_last=True) == {11}
    assert passing_ranks(3, 3) == {0, 1, 2}
    assert passing_ranks(4, 1, only_last=True) == {0}


SIZES = st.lists(st.integers(1, 300), min_size=1, max_size=12)


@given(sizes=SIZES, ranks=st.integers(1, 12))
def test_shards_hold_every_element_once(sizes, ranks):
    shards = [shard_elements(sizes, ranks, number, distributed_optimizer=True) for number in range(ranks)]
    assert sum(shards) == sum(sizes)
    assert max(shards) <= buffer_elements(sizes, ranks, distributed_optimizer=True) // ranks


@given(sizes=SIZES, ranks=st.integers(1, 12))
def test_parameters_lie_apart_and_aligned(sizes, ranks):
    spans, total = buffer_spans(sizes, ranks, distributed_optimizer=True)
    assert [len(span) for span in spans] == sizes and total % ranks == 0
    assert all(span.start % ALIGNMENT == 0 for span in spans)
    assert all(later.stop <= earlier.start for earlier, later in zip(spans, spans[1:], strict=False))
    assert spans[0].stop <= total  # the module's first parameter comes last


def test_without_the_distributed_optimizer_nothing_is_padded():
    assert buffer_spans([3, 5], 4, distributed_optimizer=False) == ([range(5, 8), range(0, 5)], 8)
    assert shard_elements([3, 5], 4, 2, distributed_optimizer=False) == 8
