"""Which optimizer steps an epoch is made of, and what each of them is divided by."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_t1.config.schema import ActorConfig, Config
from megatron_t1.training.context import Context
from megatron_t1.training.updates import update_epoch
from tests.training.synthetic import samples


@pytest.fixture
def epoch(monkeypatch):
    """Run one epoch over made-up samples; returns the names of the samples and the scale of each step."""
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 1)
    monkeypatch.setattr(Context, "replica", property(lambda self: 0))
    monkeypatch.setattr(Context, "replica_count", property(lambda self: 1))

    def run(data, denominator="step", minibatches=3, seed=0, number=0, parts=None):
        config = Config()
        config.train.loss_denominator = denominator
        seen = []

        def train_step(batches, loss, *, loss_scale):
            seen.append(([sample.name for group in batches for sample in group], loss_scale))
            sums = {"loss": 1.0, "skipped": 0.0}
            return {name: torch.tensor([value, 1.0], dtype=torch.float64) for name, value in sums.items()}

        engine = SimpleNamespace(
            optimizer_config=ActorConfig(minibatches=minibatches), micro_batches=lambda groups: groups,
            train_step=train_step, seconds={},
        )  # fmt: skip
        steps = list(update_epoch(Context(config, None, 0), engine, data, None, seed=seed, epoch=number, parts=parts))
        assert len(steps) == len(seen) and engine.seconds["packing"] > 0
        assert all(step["packing_fill"][0] > 0 and step["packing_imbalance"][0] == 1 for step in steps)
        return seen

    return run


def test_every_trajectory_once_in_an_epoch_and_the_same_again(epoch):
    data = samples(10)
    steps = epoch(data)
    assert sorted(name for names, _ in steps for name in names) == sorted(sample.name for sample in data)
    assert [len(names) for names, _ in steps] == [4, 3, 3]
    assert steps == epoch(data)
    assert [len(names) for names, _ in epoch(data, parts=5)] == [2] * 5
    assert steps != epoch(data, seed=1) and steps != epoch(data, number=1)


def test_a_token_weighs_the_same_in_every_step_of_a_rollout(epoch):
    data = samples(10)
    tokens = {sample.name: sample.loss_tokens for sample in data}
    assert {scale for _, scale in epoch(data)} == {1.0}
    steps = epoch(data, denominator="rollout")
    sizes = np.array([sum(tokens[name] for name in names) for names, _ in steps])
    weight_of_a_token = np.array([scale for _, scale in steps]) / sizes  # Megatron divides by the step's own tokens
    assert len(set(sizes)) > 1
    np.testing.assert_allclose(weight_of_a_token, 1 / sizes.mean(), rtol=1e-12)
