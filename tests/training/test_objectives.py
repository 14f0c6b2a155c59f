"""What the actor's loss is made of, and the correction that is fixed before the update."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_t1.config.schema import ActorConfig
from megatron_t1.errors import T1Error
from megatron_t1.ppo.losses import kl_loss, policy_loss
from megatron_t1.training.corrections import add_corrections
from megatron_t1.training.objectives import actor_objective
from megatron_t1.training.samples import Sample
from tests.training.synthetic import samples

COUNT = 12


@pytest.fixture
def fields() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    names = ("sampler_logprobs", "trainer_logprobs", "advantages", "reference_logprobs", "correction")
    return {name: torch.randn(COUNT, generator=random) for name in names}


def objective(fields, options, current):
    batch = SimpleNamespace(loss_field=lambda name, device: fields[name])
    return actor_objective(current, batch, options)


def test_the_terms_add_up(fields):
    new = (fields["trainer_logprobs"] + 0.1).requires_grad_()
    entropy = torch.rand(COUNT, requires_grad=True)
    options = ActorConfig(old_logprobs="recomputed", correction="band", kl_coef=0.3, entropy_coef=0.01)
    total, metrics = objective(fields, options, {"logprobs": new, "entropy": entropy})
    clipped, _ = policy_loss(
        new, fields["trainer_logprobs"], fields["advantages"], clip_low=0.2, clip_high=0.28,
        correction=fields["correction"],
    )  # fmt: skip
    divergence, _ = kl_loss(new, fields["reference_logprobs"], kind="k3")
    assert total.item() == pytest.approx((clipped + 0.3 * divergence - 0.01 * entropy.sum()).item(), rel=1e-6)
    assert metrics.keys() >= {"policy_loss", "reference_kl", "entropy"}
    total.backward()
    assert entropy.grad.tolist() == pytest.approx([-0.01] * COUNT)


def test_nothing_that_is_off_is_read_or_differentiated(fields):
    only = {name: fields[name] for name in ("sampler_logprobs", "advantages")}
    new, entropy = fields["sampler_logprobs"].clone().requires_grad_(), torch.rand(COUNT, requires_grad=True)
    total, metrics = objective(only, ActorConfig(), {"logprobs": new, "entropy": entropy})
    total.backward()
    assert entropy.grad is None and "reference_kl" not in metrics
    assert new.grad.tolist() == pytest.approx((-fields["advantages"]).tolist())


def scored(shift: list[float]):
    """Trajectories whose trainer disagrees with the sampler by a constant each, in nats."""
    found = samples(len(shift))
    for sample, gap in zip(found, shift, strict=True):
        sample.fields["trainer_logprobs"] = sample.fields["sampler_logprobs"] + np.float32(gap)
    return found


def test_a_band_that_rejects_everything_stops_the_update():
    group = [Sample(name="a", key="a", ids=np.zeros(4, np.int32), loss_mask=np.array([False, True, True, True]),
                    routes=None, routed=np.zeros(4, bool), reward=0.0, fields={
                        "trainer_logprobs": np.zeros(3, np.float32),
                        "sampler_logprobs": np.full(3, -5.0, np.float32)})]  # fmt: skip
    options = ActorConfig(correction="band", old_logprobs="recomputed")
    with pytest.raises(T1Error, match="correction=band rejects all 3 tokens"):
        add_corrections(group, options)


def test_a_correction_belongs_to_its_trajectory():
    data = scored([0.0, 2.0, -0.5])
    options = ActorConfig(old_logprobs="recomputed", correction="sequence", correction_cap=2.0)
    metrics = add_corrections(data, options)
    for sample, expected in zip(data, (1.0, 2.0, np.exp(-0.5)), strict=True):
        np.testing.assert_allclose(sample.fields["correction"], np.full(sample.loss_tokens, expected), rtol=1e-5)
    tokens = [sample.loss_tokens for sample in data]
    assert metrics["actor/correction_touched"] == pytest.approx(tokens[1] / sum(tokens))
    factors = np.repeat([1.0, 2.0, np.exp(-0.5)], tokens)
    assert metrics["actor/effective_sample_tokens"] == pytest.approx(factors.sum() ** 2 / (factors**2).sum(), rel=1e-5)


def test_a_band_rejects_whole_tokens_and_no_correction_is_no_field():
    data = scored([0.0, 2.0, -2.0])
    options = ActorConfig(old_logprobs="recomputed", correction="band", correction_low=0.5, correction_cap=2.0)
    tokens = [sample.loss_tokens for sample in data]
    assert add_corrections(data, options)["actor/correction_rejected"] == pytest.approx(sum(tokens[1:]) / sum(tokens))
    plain = samples(2)
    assert add_corrections(plain, replace(options, correction="none")) == {}
    assert "correction" not in plain[0].fields
