"""Losses and gradients that aren't finite: the step isn't taken, and the trajectory is named."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_t1.errors import T1Error
from megatron_t1.paths import RunPaths
from megatron_t1.trajectory.sidecar import read_sidecar, write_sidecar
from megatron_t1.trajectory.store import RolloutStore

pytestmark = pytest.mark.slow


def poison(config, *names: str) -> None:
    """Advantages of these trajectories that aren't finite, as they come from values that aren't."""
    paths = RunPaths.of(config.run.dir)
    values = read_sidecar(paths.values(0))
    keys = {record.digest for record in RolloutStore(paths.rollouts(0)) if record.header.trajectory_id in names}
    arrays = {
        key: {name: np.full_like(array, np.inf) if key in keys else array.copy() for name, array in values[key].items()}
        for key in values
    }
    shutil.rmtree(paths.values(0))
    write_sidecar(paths.values(0), 0, arrays)


def test_a_mini_batch_is_skipped_and_its_trajectory_named(make_run, run):  # verl#498
    config = make_run()
    run("critic", config)
    poison(config, "task4-0")
    config.train.actor = replace(config.train.actor, minibatches=3, nonfinite="skip")
    with pytest.warns(UserWarning, match="step . of the policy model: the loss of task4-0; the mini-batch is"):
        result = run("actor", config)
    assert result.metrics["actor/optimizer_steps"] == 2 and result.metrics["actor/skipped_steps"] == 1
    assert [skipped["trajectories"] for skipped in result.details["skipped"]] == [["task4-0"]]
    assert all(np.isfinite(value) for value in result.metrics.values())

    config.train.actor.nonfinite = "stop"
    with pytest.raises(T1Error, match="the loss of task4-0\n"):
        run("actor", config)


def test_nothing_but_skipped_steps_is_an_error(make_run, run):
    config = make_run()
    run("critic", config)
    poison(config, *(f"task{number}-0" for number in range(9)))
    config.train.actor.nonfinite = "skip"
    with pytest.raises(T1Error, match="all 2 mini-batches of the phase were skipped"), pytest.warns(UserWarning):
        run("actor", config)
    assert not RunPaths.of(config.run.dir).checkpoint("actor", 1).exists()


def test_a_gradient_without_a_finite_loss_of_its_own(make_run, backend):
    """A finite loss whose derivative isn't; the model is as it was, and the next step is taken."""
    from megatron_t1.training.actor import load_actor
    from megatron_t1.training.context import Context
    from megatron_t1.training.samples import load_rollouts

    config = make_run()
    config.train.actor.nonfinite, config.train.replay.load = "skip", True
    context = Context(config, backend, 0)
    engine = load_actor(context, 0)
    samples = load_rollouts(context.paths.rollouts(0), config, context.contract_facts()).samples
    batches = engine.micro_batches(context.groups(samples))
    steep = "task5-0"

    def loss(output, batch):
        total = -engine.logprobs(output, batch)["logprobs"].sum()
        if any(sample.name == steep for sample in batch.samples):
            total = total + ((output * 0.0).sum()).sqrt()
        return total, {}

    before = [parameter.detach().clone() for parameter in engine.chunks[0].parameters()]
    with pytest.warns(UserWarning, match=f"the gradient of {steep};"):
        sums = engine.train_step(batches, loss)
    assert set(sums) == {"skipped"} and engine.optimizer_steps == 0
    assert engine.skipped == [{"step": 0, "trajectories": [steep]}]
    assert engine.replay.take_load() == {}  # the next step's load is its own
    assert all(torch.equal(old, new) for old, new in zip(before, engine.chunks[0].parameters(), strict=True))
    steep = ""
    assert engine.train_step(batches, loss)["skipped"].tolist() == [0.0, 1.0] and engine.optimizer_steps == 1
