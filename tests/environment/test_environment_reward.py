import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_t1.config.schema import Config
from megatron_t1.config.targets import target_problems
from megatron_t1.environment.baseline import (
    Baseline,
    read_baselines,
    require_baselines,
    with_baselines,
    write_baselines,
)
from megatron_t1.environment.reward import BinaryReward, DenseReward, GainReward, RatioReward
from megatron_t1.environment.task import Task
from megatron_t1.errors import T1Error
from megatron_t1.rollout.pool import make_reward
from megatron_t1.trajectory.record import Verdict

REWARDS = [DenseReward(), GainReward(), BinaryReward(), RatioReward()]


def verdict(passed, total, trusted=True):
    return Verdict(passed, total, baseline=1, trusted=trusted)


def named(**checks):
    return Verdict(sum(checks.values()), len(checks), 0, trusted=True, checks=checks)


@pytest.mark.parametrize(("passed", "total"), [(0, 4), (3, 4), (3, 8), (8, 8)])
def test_dense_is_absolute(passed, total):  # Repo2RLEnv#44
    assert DenseReward(scale=0.25)(verdict(passed, total)) == {"total": 0.25 * passed, "passed": passed}


def test_four_of_five_repaired_tests_are_worth_four():  # Repo2RLEnv#44
    baseline = {"a": False, "b": False, "c": False, "d": False, "e": False, "f": True}
    after = named(a=True, b=True, c=True, d=True, e=False, f=True)
    assert BinaryReward()(after)["total"] == 0.0
    assert GainReward(scale=1.0)(after, baseline)["total"] == 4.0
    assert DenseReward(scale=1.0)(after)["total"] == 5.0


def test_gain_counts_by_name_and_charges_what_broke():  # Repo2RLEnv#44
    baseline = {"kept": True, "broken": True, "gained": False, "still": False}
    reward = GainReward(scale=0.5, penalty=2.0)(named(kept=True, broken=False, gained=True, still=False), baseline)
    assert reward == {"total": 0.5 * (1 - 2.0), "passed": 2.0, "gained": 1.0, "broken": 1.0}
    # The same number of passed checks as when nothing is done, and yet not nothing: a count alone can't tell.
    assert DenseReward(scale=0.5)(named(kept=True, broken=False, gained=True, still=False))["total"] == 1.0
    gone = GainReward(scale=1.0, penalty=1.0)(named(new=True), baseline)  # a check that vanished doesn't pass
    assert (gone["gained"], gone["broken"]) == (1.0, 2.0)


def test_a_cap_bounds_what_one_task_pays():
    assert DenseReward(scale=1.0, cap=3)(verdict(5, 8)) == {"total": 3.0, "passed": 5.0, "capped": 2.0}
    assert DenseReward(scale=1.0, cap=3)(verdict(2, 8)) == {"total": 2.0, "passed": 2.0, "capped": 0.0}
    checks = {f"c{number}": True for number in range(6)}
    capped = GainReward(scale=1.0, penalty=1.0, cap=4)(named(**checks), {"lost": True})
    assert (capped["total"], capped["capped"]) == (4.0 - 1.0, 2.0)


def test_binary_and_ratio():
    assert [BinaryReward(2.0)(verdict(passed, 4))["total"] for passed in (0, 3, 4)] == [0.0, 0.0, 2.0]
    assert [RatioReward(2.0)(verdict(passed, 4))["total"] for passed in (0, 3, 4)] == [0.0, 1.5, 2.0]


@pytest.mark.parametrize("reward", REWARDS)
def test_untrusted_has_no_reward(reward):  # rllm#677
    assert reward(verdict(0, 0, trusted=False), None) == {}


@pytest.mark.parametrize("reward", REWARDS)
@given(checks=st.dictionaries(st.text(max_size=3), st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=9))
def test_components_are_finite_numbers_and_scale_linearly(reward, checks):
    after = Verdict(sum(now for _, now in checks.values()), len(checks), 0, True,
                    checks={name: now for name, (_, now) in checks.items()})  # fmt: skip
    baseline = {name: before for name, (before, _) in checks.items()}
    found = reward(after, baseline)
    assert all(isinstance(value, float | int) and math.isfinite(value) for value in found.values())
    doubled = type(reward)(scale=2 * reward.scale)(after, baseline)
    assert doubled["total"] == pytest.approx(2 * found["total"])


def test_gain_needs_a_baseline():
    with pytest.raises(T1Error, match="not known by check name"):
        GainReward()(named(a=True))
    tasks = [Task("known", "x", baseline_checks={}), Task("unknown-1", "x"), Task("unknown-2", "x")]
    with pytest.raises(T1Error, match="for 2 tasks, for example unknown-1, unknown-2") as caught:
        require_baselines(tasks, where="tasks/train")
    assert "t1 tasks check" in caught.value.remedy
    require_baselines(tasks[:1], where="tasks/train")


def test_baselines_are_stored_beside_the_task_set(tmp_path):
    known = {"b": Baseline({"x": True, "y": False}, ("x", "y", "z")), "a": Baseline({})}
    write_baselines(tmp_path / "baseline.json", known)
    assert read_baselines(tmp_path / "baseline.json") == known
    a, b, c = with_baselines([Task("a", "."), Task("b", "."), Task("c", ".")], tmp_path)
    assert (a.baseline, a.baseline_checks, a.check_names) == (0, {}, ())
    assert (b.baseline, b.baseline_checks, b.check_names) == (1, {"x": True, "y": False}, ("x", "y", "z"))
    assert (c.baseline, c.baseline_checks) == (-1, None)
    assert with_baselines([Task("b", ".")], tmp_path / "tasks.list") == [b]  # beside a list of tasks
    (tmp_path / "elsewhere").mkdir()
    assert with_baselines([Task("b", ".")], tmp_path / "elsewhere") == [Task("b", ".")]
    assert with_baselines([Task("b", ".")], tmp_path / "elsewhere", tmp_path / "baseline.json") == [b]


@pytest.mark.parametrize(
    "raw",
    [None, [], {}, {"version": 2, "tasks": {}}, {"version": 1}, {"version": 1, "tasks": []},
     *({"version": 1, "tasks": {"a": entry}} for entry in ({}, {"checks": {"x": 1}}, {"checks": {}, "names": [1]}))],
)  # fmt: skip
def test_other_baselines_are_refused_with_their_file(tmp_path, raw):
    path = tmp_path / "baseline.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(T1Error, match="no readable baselines") as caught:
        read_baselines(path)
    assert str(path) in caught.value.where


def test_the_options_that_are_set_reach_the_reward():
    config = Config()
    config.reward.cap = 6.0
    assert make_reward(config) == DenseReward(scale=0.25, cap=6.0)
    config.reward.penalty = 1.5
    assert any("reward.penalty=1.5" in problem for problem in target_problems(config))
    config.reward._target_ = "megatron_t1.environment.reward.GainReward"
    assert make_reward(config) == GainReward(scale=0.25, penalty=1.5, cap=6.0)
    assert not [problem for problem in target_problems(config) if "reward" in problem]
    config.reward._target_ = "megatron_t1.environment.reward.BinaryReward"
    assert len([problem for problem in target_problems(config) if "has no such option" in problem]) == 2
