"""One critic phase and one actor phase give the same numbers and the same weights in every layout and split.

The gradients of many more layouts are compared by test_invariance.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_t1.paths import RunPaths
from megatron_t1.phase import PhaseResult
from megatron_t1.trajectory.store import RolloutStore
from tests.distributed import run_distributed
from tests.tiny_model import ARCHITECTURE
from tests.training.synthetic import run_config, save_config, write_rollout
from tests.training.weights import distance, parameters

pytestmark = pytest.mark.slow
TOLERANCE = 1e-5  # of the norm, fp32; two critic and five actor steps move the weights by some 1e-2


class Reference:
    """The phases in one process, and what they give."""

    def __init__(self, directory, model, backend):
        from megatron_t1.training.actor import run_actor
        from megatron_t1.training.context import Context
        from megatron_t1.training.critic import run_critic

        self.model, self.backend = model, backend
        self.config = self.run(directory)
        self.metrics = {}
        for phase in (run_critic, run_actor):
            self.metrics.update(phase(Context(self.config, backend, 0)).metrics)
        self.weights = {role: parameters(self.config, backend, role, 1) for role in ("actor", "critic")}

    def run(self, directory, *, capacity=256, **layout):
        config = run_config(directory, self.model, **layout)
        config.train.replay.critic = config.train.replay.load = True
        config.train.capacity = capacity
        config.train.actor.minibatches = 5  # the last one of a single trajectory: a second replica has nothing to do
        save_config(config)
        write_rollout(RunPaths.of(directory).rollouts(0), self.model)
        return config


@pytest.fixture(scope="module")
def reference(tmp_path_factory, model, backend):
    return Reference(tmp_path_factory.mktemp("reference"), model, backend)


def test_the_update_is_one(reference):
    for role, weights in reference.weights.items():
        assert distance(weights, parameters(reference.config, reference.backend, role, 0)) > 1e-3
    assert reference.metrics["actor/optimizer_steps"] == 5
    assert reference.metrics["actor/clip_fraction"] > 0 and reference.metrics["gap/route_difference"] > 0.1
    assert reference.metrics["gap/logprob_gap_no_replay"] != reference.metrics["gap/logprob_gap_replay"]


def test_expert_load_is_that_of_the_recorded_routes(reference, tmp_path):  # slime#2308 Megatron-LM#5542
    """The critic's single epoch takes the recorded experts; only each last token, which has no row, takes its own."""
    from megatron_t1.training.context import Context
    from megatron_t1.training.critic import run_critic

    config = reference.run(tmp_path / "run")
    config.train.critic = replace(config.train.critic, minibatches=1, epochs=1)
    metrics = run_critic(Context(config, reference.backend, 0)).metrics
    episodes = list(RolloutStore(RunPaths.of(config.run.dir).rollouts(0)))
    rows = np.concatenate([episode.routes[episode.routed] for episode in episodes])
    counts = np.stack([np.bincount(layer.ravel(), minlength=ARCHITECTURE.num_experts) for layer in rows.swapaxes(0, 1)])
    assert metrics["critic/expert_load_max"] == pytest.approx((counts.max(1) / counts.mean(1)).mean(), rel=0.03)
    assert metrics["critic/experts_unused"] == 0.0 and metrics["critic/expert_rank_load_max"] == 1.0


@pytest.mark.parametrize(
    ("processes", "capacity", "layout"),
    [
        pytest.param(2, 64, {"expert": 2, "recompute": "full"}, id="dp2-ep2-small-batches-recompute"),
        pytest.param(2, 256, {"context": 2, "recompute": "moe"}, id="cp2-recompute-moe"),
        pytest.param(4, 96, {"context": 2, "expert": 4, "dispatcher": "allgather"}, id="dp2-cp2-ep4-allgather"),
        pytest.param(4, 96, {"tensor": 2, "pipeline": 2, "expert": 2, "recompute": "full"}, id="tp2-pp2-ep2-recompute"),
        pytest.param(2, 96, {"pipeline": 2, "virtual_pipeline": 2}, id="pp2-vpp2"),
    ],
)  # verl#6957 miles#3231 slime#2235 slime#951
def test_same_update_in_every_layout(reference, tmp_path, processes, capacity, layout):
    config = reference.run(tmp_path / "run", processes=processes, capacity=capacity, **layout)
    run_distributed(
        "tests.training.workers:run_phases", processes, run_dir=config.run.dir, iteration=0, roles=["critic", "actor"]
    )
    metrics = {}
    for phase in ("critic", "actor"):
        metrics.update(PhaseResult.read(RunPaths.of(config.run.dir).phase(0, phase)).metrics)
    if {"tensor", "pipeline", "context"} & layout.keys():
        assert {name for name in reference.metrics if name not in metrics} == {
            "gap/route_difference", "gap/token_route_difference", "gap/expert_difference"
        }  # fmt: skip
    else:
        assert metrics.keys() == reference.metrics.keys()
    for name, value in metrics.items():
        if "/packing_" in name or "/expert_rank_" in name:  # the split itself; experts of a rank by the ranks there are
            continue
        assert value == pytest.approx(reference.metrics[name], rel=2e-4, abs=2e-5), name
    for role, weights in reference.weights.items():
        assert distance(parameters(config, reference.backend, role, 1), weights) <= TOLERANCE, role


@pytest.mark.parametrize(
    ("processes", "layout", "said"),
    [
        (2, {"tensor": 2}, "set layout.expert_tensor=2"),
        (3, {"expert": 3}, "architecture.num_experts=8 is not a multiple of layout.expert=3"),
        (2, {"expert": 2, "distributed_optimizer": True}, "can't be checkpointed"),
    ],
    ids=["tp2-etp1", "ep3", "distributed-optimizer"],
)
def test_a_layout_that_computes_wrong_is_refused_by_name(make_run, monkeypatch, processes, layout, said):
    from megatron_t1.errors import ConfigError
    from megatron_t1.training.main import run_roles

    config = make_run(rollouts=0, processes=processes, **layout)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConfigError) as caught:
        run_roles(RunPaths.of(config.run.dir).root, 0, ["critic"], [])
    assert said in str(caught.value)
