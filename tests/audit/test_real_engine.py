"""The real vLLM: its rollout is clean, what is planted is found, and scoring again finds what no log can show."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_t1.audit.findings import Kind
from megatron_t1.audit.rescore import rescore
from megatron_t1.audit.run import audit_target
from megatron_t1.audit.targets import find_targets
from megatron_t1.cli import main
from megatron_t1.config.schema import EngineConfig
from megatron_t1.rollout.phase import run_phases
from megatron_t1.trajectory.record import Origin
from megatron_t1.trajectory.store import RolloutStore
from tests.audit.conftest import ROLLOUT, Copy, edited, keep_books, make_config

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def real(tiny_model, tmp_path_factory):
    """A run of the real engine in which episodes go on for 12 turns whatever the untrained policy says."""
    root = tmp_path_factory.mktemp("real")
    config = make_config(root / "run", root / "tasks", tiny_model)
    config.env.min_turns = config.env.max_turns = 12
    config.rollout.max_context, config.rollout.max_tokens_per_turn = 1024, 24
    config.rollout.engine.omp_threads = 1
    keep_books(config, run_phases(config, 0, ("rollout",)))
    return root / "run"


def test_a_real_rollout_is_clean_also_when_scored_again(real, tmp_path, capsys):
    report = tmp_path / "report.json"
    assert main(["audit", str(real), "--rescore", "3", "--baseline", "rerender", "--report", str(report)]) == 0
    (target,) = json.loads(report.read_text())["targets"]
    totals, rescored, baseline = target["totals"], target["rescored"], target["baseline"]
    assert totals["clean"] == 6 and totals["most_turns"] == 12 and totals["loss_tokens"] > 500
    assert rescored["trajectories"] == 3 and rescored["mean"] < 2e-6 and rescored["shifted"] > 0.5
    # A policy that was never trained writes what no tokenizer would: the usual path loses it.
    assert baseline["drifted_in_loss"] == 6 and baseline["loss_tokens_drifted"] > 0
    assert "nothing is wrong" in capsys.readouterr().out
    for record in RolloutStore(real / ROLLOUT):
        assert record.header.counts["turns"] == 12 and record.routed[:-1].all()


def test_damage_to_a_real_rollout_is_found(real, tmp_path):
    copy = Copy(real / ROLLOUT)
    copy.directory = tmp_path
    (tmp_path / copy_log(real).name).write_bytes(copy_log(real).read_bytes())
    at = int(np.flatnonzero(copy.record.origin == Origin.SAMPLED)[40])
    copy.write(replace(copy.record, ids=edited(copy.record.ids, at, (copy.record.ids[at] + 1) % 500)))
    (target,) = find_targets(tmp_path)
    wrong = [one for one in audit_target(target).trajectories if one.findings]
    assert [one.trajectory for one in wrong] == [copy.name]
    assert [(finding.kind, finding.token) for finding in wrong[0].findings] == [(Kind.CHANGED, at)]


def copy_log(run: Path) -> Path:
    return next((run / ROLLOUT).glob("exchange.*.log"))


def test_scoring_again_finds_log_probs_moved_by_one_token(real, tiny_model, tmp_path):
    """A mistake of the client itself would be in the log as well; the engine's own second opinion isn't moved by it."""
    (target,) = find_targets(real / ROLLOUT)
    audits = {one.trajectory: one for one in audit_target(target).trajectories}
    records = list(RolloutStore(real / ROLLOUT))[:2]
    sampled = np.flatnonzero(records[0].origin == Origin.SAMPLED)
    moved = edited(records[0].logprobs, sampled[1:], records[0].logprobs[sampled[:-1]])
    sample = [
        (replace(records[0], logprobs=moved), audits[records[0].header.trajectory_id]),
        (records[1], audits[records[1].header.trajectory_id]),
    ]
    result = asyncio.run(rescore(sample, tiny_model, EngineConfig(omp_threads=1), log_path=tmp_path / "engine.log"))
    assert result.failed == 1 and [finding.kind for finding in sample[0][1].findings] == [Kind.RESCORED]
    assert not sample[1][1].findings
