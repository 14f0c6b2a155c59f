import pytest

from megatron_t1.environment.reward import BinaryReward, DenseReward, RatioReward
from megatron_t1.trajectory.record import Verdict


def verdict(passed, total, trusted=True):
    return Verdict(passed, total, baseline=1, trusted=trusted)


@pytest.mark.parametrize(("passed", "total"), [(0, 4), (3, 4), (3, 8), (8, 8)])
def test_dense_is_absolute(passed, total):  # Repo2RLEnv#44
    assert DenseReward(scale=0.25)(verdict(passed, total))["total"] == 0.25 * passed


def test_binary_and_ratio():
    assert [BinaryReward(2.0)(verdict(passed, 4))["total"] for passed in (0, 3, 4)] == [0.0, 0.0, 2.0]
    assert [RatioReward(2.0)(verdict(passed, 4))["total"] for passed in (0, 3, 4)] == [0.0, 1.5, 2.0]


@pytest.mark.parametrize("reward", [DenseReward(), BinaryReward(), RatioReward()])
def test_untrusted_has_no_reward(reward):  # rllm#677
    assert reward(verdict(0, 0, trusted=False)) == {}
