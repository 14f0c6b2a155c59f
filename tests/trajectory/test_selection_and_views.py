"""One predicate says what is trained on; spans and turns are derived, not stored."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_t1.errors import ConfigError
from megatron_t1.trajectory import selection
from megatron_t1.trajectory.record import EndReason, Origin, Verdict
from megatron_t1.trajectory.selection import demonstrates, select, trainable
from megatron_t1.trajectory.views import route_coverage, spans, turns

UNTRUSTED = Verdict(passed=4, total=4, baseline=0, trusted=False, reason="reward file was missing")


def without_sampled(trajectory, origin=Origin.DEMONSTRATION):
    changed = trajectory.origin.copy()
    changed[changed == Origin.SAMPLED] = origin
    return replace(trajectory, origin=changed, logprobs=np.full(len(trajectory), np.nan, np.float32))


def test_reasons(make):  # verl#7970 rllm#677 verifiers#1665 rllm#710
    assert trainable(make()) is None
    assert trainable(make(end_reason=EndReason.TOKEN_LIMIT)) is None
    assert trainable(make(verdict=None)) == selection.UNVERIFIED
    assert trainable(make(verdict=UNTRUSTED)) == selection.UNTRUSTED
    assert trainable(make(reward={})) == selection.NO_REWARD
    assert trainable(make(reward={"total": float("nan")})) == selection.NO_REWARD
    assert trainable(make(end_reason=EndReason.ENGINE_LOST)) == selection.INFRASTRUCTURE
    assert trainable(without_sampled(make())) == selection.NO_SAMPLED_TOKEN
    timed_out = make(end_reason=EndReason.AGENT_TIMEOUT)
    assert trainable(timed_out) is None
    assert trainable(timed_out, timed_out_policy="exclude") == selection.TIMED_OUT
    with pytest.raises(ConfigError, match="'drop'"):
        trainable(timed_out, timed_out_policy="drop")


def test_a_zero_reward_is_trained_on(make):
    zero = make(verdict=Verdict(passed=0, total=4, baseline=0, trusted=True), reward={"total": 0.0})
    assert trainable(zero) is None


def test_demonstrations(make):
    assert demonstrates(without_sampled(make())) is None
    assert demonstrates(make()) == selection.NO_DEMONSTRATION


def test_everything_excluded_is_counted(make):
    made = [
        make("a-0"),
        make("b-0", verdict=UNTRUSTED),
        make("c-0", verdict=UNTRUSTED),
        make("d-0", reward={}),
        make("e-0"),
    ]
    found = select(made)
    assert [trajectory.header.trajectory_id for trajectory in found.kept] == ["a-0", "e-0"]
    assert found.counts == {selection.UNTRUSTED: 2, selection.NO_REWARD: 1}
    assert found.metrics() == {
        "selection/kept": 2,
        "selection/excluded": 3,
        "selection/no_reward": 1,
        "selection/untrusted_verdict": 2,
    }


def test_spans_cover_the_stream_once(make):
    trajectory = make(turns=5)
    found = spans(trajectory)
    assert found[0].start == 0 and found[-1].stop == len(trajectory)
    assert all(one.stop == other.start for one, other in zip(found, found[1:], strict=False))
    for span in found:
        assert np.all(trajectory.origin[span.start : span.stop] == span.origin)
        assert np.all(trajectory.turn[span.start : span.stop] == span.turn)
    assert sum(span.stop - span.start for span in found if span.origin == Origin.SAMPLED) == trajectory.loss_mask.sum()


def test_turns(make):
    trajectory = make(turns=4)
    found = turns(trajectory)
    assert [turn.number for turn in found] == [0, 1, 2, 3] and [turn.policy_version for turn in found] == [0, 1, 2, 3]
    assert sum(turn.tokens for turn in found) == trajectory.loss_mask.sum()
    mean = trajectory.logprobs[(trajectory.turn == 2) & trajectory.loss_mask].mean()
    assert found[2].mean_logprob == pytest.approx(mean)
    assert route_coverage(trajectory) == 1.0 and route_coverage(make(routes=False)) == 0.0
