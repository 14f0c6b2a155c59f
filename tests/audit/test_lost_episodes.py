"""Episodes that were lost, played again or taken back leave more in the log than in the records: that is no drift."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from megatron_t1.audit.run import audit_target
from megatron_t1.audit.targets import find_targets
from megatron_t1.errors import T1Error
from megatron_t1.rollout.phase import run_rollout
from megatron_t1.trajectory.exchange import log_names
from megatron_t1.trajectory.record import EndReason
from megatron_t1.trajectory.store import RolloutStore
from tests.audit.conftest import make_config
from tests.rollout.conftest import FakeServer


@pytest.fixture
def config(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_t1.rollout.phase.VllmServer", FakeServer)
    config = make_config(tmp_path / "run", tmp_path / "tasks", tiny_model)
    config.rollout.concurrency = 1
    return config


def totals(config):
    (target,) = find_targets(Path(config.run.dir) / "rollouts/iter_0000")
    result = audit_target(target)
    assert not result.files, result.files
    assert not [finding for one in result.trajectories for finding in one.findings]
    return result.totals()


def test_lost_episodes_have_a_log_of_what_was_answered(config, monkeypatch):
    monkeypatch.setattr(FakeServer, "refuse_after", 4)  # in the middle of the second episode
    config.rollout.max_untrusted_share = 1.0
    run_rollout(config, 0)
    ends = [record.header.end_reason for record in RolloutStore(Path(config.run.dir) / "rollouts/iter_0000")]
    assert EndReason.ENGINE_LOST in ends and EndReason.SUBMITTED in ends
    assert totals(config)["clean"] == 6


def test_a_phase_that_was_stopped_and_went_on_has_two_logs(config, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(FakeServer, "refuse_after", 4)
        with pytest.raises(T1Error, match="no trusted verdict"):
            run_rollout(config, 0)
    run_rollout(config, 0)  # what was lost is played again
    assert len(log_names(Path(config.run.dir) / "rollouts/iter_0000")) == 2
    assert totals(config)["clean"] == 6


def test_a_reply_that_nobody_answered_in_time_is_unseen_and_can_be_trained_on(config, monkeypatch):
    """The time is over while the third turn is sampled: the output of the second command stands at the end."""
    from megatron_t1.routing.validation import validate_routes

    answer_now = FakeServer.generate

    async def slow(self, request):
        asked = await request.json()
        if sum(token == 1 for token in asked["token_ids"]) == 6:
            await asyncio.sleep(30)
        return await answer_now(self, request)

    monkeypatch.setattr(FakeServer, "generate", slow)
    config.env.agent_timeout_s, config.rollout.concurrency = 2.0, 6
    run_rollout(config, 0)
    (target,) = find_targets(Path(config.run.dir) / "rollouts/iter_0000")
    result = audit_target(target)
    for name, record in target.records():
        assert record.header.end_reason == EndReason.AGENT_TIMEOUT and record.header.counts["turns"] in (1, 2), name
        assert not record.routed[-3:].any()  # the engine never saw them
        validate_routes(record, num_experts=16, top_k=4, num_moe_layers=4)
    assert all(one.status == "clean" and one.unseen > 5 and not one.trained for one in result.trajectories)
