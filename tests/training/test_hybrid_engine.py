"""Training the hybrid model in bfloat16, with the float32 decay of its delta nets, and storing it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_t1.training.samples import Sample
from tests.hybrid_model import HYBRID
from tests.tiny_model import tiny_config

LENGTH = 20


@pytest.fixture
def make(backend):
    from megatron_t1.training.engine import Engine

    config = tiny_config(dtype="bfloat16", architecture=HYBRID)
    config.train.actor.lr = 0.01
    return lambda: Engine(config, backend, "policy", config.train.actor, replay=False)


def step(engine, seed: int) -> None:
    random = np.random.default_rng(seed)
    ids = random.integers(0, HYBRID.vocab_size, LENGTH).astype(np.int32)
    mask = np.arange(LENGTH) > 0
    sample = Sample(
        name="one", key="", ids=ids, loss_mask=mask, reward=0.0, fields={},
        routes=np.zeros((LENGTH, 4, 2), np.uint8), routed=np.zeros(LENGTH, bool),
    )  # fmt: skip
    batches = engine.micro_batches([[sample]])
    engine.train_step(batches, lambda output, batch: (-engine.logprobs(output, batch)["logprobs"].sum(), {}))


def test_a_stored_training_goes_on_to_the_same_bits(tmp_path, make):
    engine = make()
    decay = engine.chunks[0].decoder.layers[0].self_attention.A_log
    before = decay.detach().clone()
    step(engine, 1)
    assert decay.dtype == torch.float32 and not torch.equal(decay, before)
    assert not torch.equal(decay, decay.bfloat16().float())  # it isn't rounded to the model's type
    engine.save(tmp_path / "checkpoint", 1, relative_to=tmp_path)

    again = make()
    again.load(tmp_path / "checkpoint")
    for one in (engine, again):
        step(one, 2)
    assert again.optimizer_steps == 2
    pairs = zip(engine.chunks[0].named_parameters(), again.chunks[0].parameters(), strict=True)
    assert all(torch.equal(parameter, other) for (_, parameter), other in pairs)
