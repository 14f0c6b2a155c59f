"""Processes of a running training are killed at random moments; it ends as one that nobody disturbed.

`make chaos` does it hundreds of times (tests.chaos.campaign).
"""

from __future__ import annotations

import shutil

import pytest

from tests.chaos.campaign import Campaign
from tests.chaos.kills import KINDS, kind_of
from tests.chaos.writes import Writes, writer_of

KILLS = 2


@pytest.fixture(scope="module")
def campaign(tmp_path_factory, workshop):
    pytest.importorskip("vllm")
    campaign = Campaign(tmp_path_factory.mktemp("chaos"), slurm=False, furnished=workshop)
    campaign.prepare()
    yield campaign
    shutil.rmtree(campaign.workshop.scratch)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_whatever_is_killed_the_training_is_the_same(campaign):  # slime#1558 vllm#55510 AReaL#622
    campaign.run(KILLS)
    assert not campaign.failed
    assert campaign.kills == KILLS and f"{KILLS} processes killed" in campaign.report()


@pytest.mark.parametrize("kind", list(KINDS))
def test_each_kind_is_one(kind):
    """Command lines as they are; the engine's supervisor names the engine's module too."""
    lines = {
        "engine core": ["VLLM::EngineCore"],
        "engine": ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"],
        "verifier": ["/usr/bin/bwrap", "--unshare-all", "--bind", "x", "/logs/verifier", "--", "bash"],
        "sandbox": ["/usr/bin/bwrap", "--unshare-all", "--", "bash"],
        "phase supervisor": ["python", "-m", "megatron_t1.loop.supervisor", "1", "15", "log", "srun", "python"],
        "srun": ["/usr/bin/srun", "--nodes=1", "python", "-m", "megatron_t1.loop.worker"],
        "rollout worker": ["python", "-m", "megatron_t1.loop.worker", "--run", "r"],
        "torchrun": ["python", "-m", "torch.distributed.run", "-m", "megatron_t1.training.main", "--", "--run", "r"],
        "rank": ["python", "-u", "-m", "megatron_t1.training.main", "--run", "r"],
        "loop": ["python", "-m", "megatron_t1.cli", "run"],
    }
    assert kind_of(lines[kind]) == kind
    assert kind_of(["salloc", "-N1", *lines["loop"]]) == ""


def test_a_write_is_seen_with_its_writer_also_in_a_new_directory(tmp_path):
    with Writes(tmp_path) as writes:
        (tmp_path / "phases").mkdir()
        assert writes.next(lambda path: False, 0.05) is None
        (tmp_path / "phases/result.json.4711.partial").write_text("{}")
        found = writes.next(lambda path: True, 5.0)
    assert found == tmp_path / "phases/result.json.4711.partial" and writer_of(found) == 4711
    assert writer_of(tmp_path / "iter_0001.partial") is None
