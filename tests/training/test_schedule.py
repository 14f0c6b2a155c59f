import pytest

from megatron_t1.config.schema import ActorConfig, OptimizerConfig, SftConfig
from megatron_t1.training.schedule import learning_rate


def test_constant_rate_after_linear_warmup():
    options = OptimizerConfig(lr=1.0, warmup_steps=4)
    assert [learning_rate(options, step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_ends_at_its_floor():
    options = SftConfig(lr=2e-3, warmup_steps=0, min_lr_ratio=0.05)
    assert learning_rate(options, 0, 100) == pytest.approx(2e-3)
    assert learning_rate(options, 50, 100) == pytest.approx(1e-3)
    assert learning_rate(options, 100, 100) == learning_rate(options, 1000, 100) == pytest.approx(1e-4)


def test_linear_decay_uses_the_roles_own_length():
    options = ActorConfig(lr=1.0, decay="linear", decay_steps=10)
    assert learning_rate(options, 5) == pytest.approx(0.5)
    assert learning_rate(options, 5, 20) == pytest.approx(0.75)


def test_rates_never_rise_after_warmup_and_stay_positive():
    options = OptimizerConfig(lr=1.0, warmup_steps=3, decay="cosine", decay_steps=17, min_lr_ratio=0.01)
    rates = [learning_rate(options, step) for step in range(2, 40)]
    assert all(later <= earlier for earlier, later in zip(rates, rates[1:], strict=False))
    assert min(rates) == pytest.approx(0.01)
