"""Ranks that die or hang in a phase over EP=2: one readable error, and the phase goes on from its checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_t1.errors import T1Error
from megatron_t1.loop.launcher import PhaseCommand, require_success
from megatron_t1.loop.local import LocalLauncher
from megatron_t1.paths import RunPaths
from megatron_t1.phase import PhaseResult, missing_outputs
from tests.training.synthetic import save_config
from tests.training.weights import parameters

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def two_ranks(make_run, monkeypatch):
    """A run of a critic's warm-up over EP=2 that saves after every mini-batch."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def make(name: str):
        config = make_run(name, warmup=1, expert=2, processes=2)
        config.train.critic = replace(config.train.critic, warmup_epochs=2, checkpoint_every=1)
        config.train.gae.lambda_critic = 0.9
        config.cluster.stop_grace_s, config.cluster.collective_timeout_s = 2.0, 20.0
        save_config(config)
        return config

    return make


def launch(config, attempt: int = 1, **fault):
    """Run the phase as the loop does. Raises as the loop would."""
    arguments = ("--run", config.run.dir, "--iteration", "0", "--roles", "critic")
    environment = {"T1_FAULT": json.dumps(fault)} if fault else {}
    command = PhaseCommand(
        "critic", "train", "tests.training.faulty", arguments, 2, distributed=True, environment=environment
    )
    said: list[str] = []
    logs = RunPaths.of(config.run.dir).phase(0, "critic") / "logs" / f"attempt_{attempt}"
    require_success(LocalLauncher(config).launch(command, logs, echo=said.append), command)
    return said


def failure(config, attempt: int = 1, **fault) -> str:
    with pytest.raises(T1Error) as caught:
        launch(config, attempt, **fault)
    text = str(caught.value)
    assert "Traceback" not in text and "torch.distributed" not in text.splitlines()[0]
    return text


def test_killed_in_the_middle_and_in_the_writing(two_ranks, backend):  # Automodel#3261 KempnerForge#102
    undisturbed, disturbed = two_ranks("undisturbed"), two_ranks("disturbed")
    launch(undisturbed)
    text = failure(disturbed, 1, rank=1, after=3, what="kill")
    assert "the critic phase failed: rank 1 died of SIGKILL" in text
    text = failure(disturbed, 2, rank=0, after=1, what="write")  # going on after 2, it writes the third
    assert "rank 0 died of SIGKILL" in text
    paths = RunPaths.of(disturbed.run.dir)
    left = sorted(path.name for path in paths.progress(0, "critic").glob("step_*"))
    assert left == ["step_0000002", "step_0000003.partial"]
    assert any("going on in the middle of the phase, after 2 mini-batches" in line for line in launch(disturbed, 3))
    one, other = (parameters(config, backend, "critic", 1) for config in (undisturbed, disturbed))
    assert torch.equal(one, other)
    results = [PhaseResult.read(RunPaths.of(config.run.dir).phase(0, "critic")) for config in (undisturbed, disturbed)]
    assert results[0].metrics == results[1].metrics
    assert missing_outputs(results[1], paths.root, digests=True) == []
    assert not paths.progress(0, "critic").exists()


def test_a_rank_that_hangs(two_ranks):  # Megatron-LM#1763
    text = failure(two_ranks("run"), rank=1, after=2, what="hang")
    assert "error on rank 1: it didn't come to a collective operation in time" in text
    assert "cluster.collective_timeout_s" in text
