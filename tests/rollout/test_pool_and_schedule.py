"""Which episodes are played, by whom, and that an error leaves nothing behind."""

import asyncio
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_t1.config.schema import Config
from megatron_t1.errors import ConfigError, T1Error
from megatron_t1.rollout.pool import make_reward, run_pool, sandbox_maker
from megatron_t1.rollout.schedule import attempts_of, share, tasks_of_iteration, turn_seed
from tests.rollout.conftest import FakeSandbox


@given(st.integers(1, 30), st.integers(1, 17), st.integers(0, 5), st.integers(0, 3))
def test_every_task_comes_once_in_each_epoch(tasks, count, seed, epoch):  # slime#2236 miles#3102
    names = [f"task-{number:03d}" for number in range(tasks)]
    needed = (epoch + 1) * tasks
    walk = []
    for iteration in range(-(-needed // count)):
        walk += tasks_of_iteration([(names, 1.0)], seed=seed, iteration=iteration, count=count)
    assert sorted(walk[epoch * tasks : (epoch + 1) * tasks]) == names


def test_an_iteration_is_a_function_of_seed_and_number():
    names = [f"task-{number}" for number in range(50)]
    first = tasks_of_iteration([(names, 1.0)], seed=1, iteration=4, count=8)
    assert first == tasks_of_iteration([(names[::-1], 3.0)], seed=1, iteration=4, count=8)
    assert first != tasks_of_iteration([(names, 1.0)], seed=2, iteration=4, count=8)
    assert len(set(first) & set(tasks_of_iteration([(names, 1.0)], seed=1, iteration=5, count=8))) == 0
    for sources in ([], [([], 1.0)], [(names, 1.0), ([], 1.0)]):
        with pytest.raises(T1Error, match="no task"):
            tasks_of_iteration(sources, seed=1, iteration=0, count=8)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(0.05, 20.0)), min_size=2, max_size=4),
    st.integers(1, 40), st.integers(0, 9), st.integers(0, 3),
)  # fmt: skip
def test_sources_have_their_shares_and_every_task_of_each_comes_once_an_epoch(sizes, count, iteration, seed):
    sources = [([f"{number}-{task}" for task in range(size)], weight) for number, (size, weight) in enumerate(sizes)]
    played = [
        name
        for index in range(iteration + 1)
        for name in tasks_of_iteration(sources, seed=seed, iteration=index, count=count)
    ]
    total = sum(weight for _, weight in sources)
    for names, weight in sources:
        walk = [name for name in played if name in names]
        assert abs(len(walk) - len(played) * weight / total) <= 4
        for start in range(0, len(walk) - len(names) + 1, len(names)):
            assert sorted(walk[start : start + len(names)]) == sorted(names)


def test_a_task_chosen_twice_gets_further_attempts():
    pairs = attempts_of(["a", "b", "a"], 2)
    assert pairs == [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("a", 2), ("a", 3)]


@given(st.integers(0, 40), st.integers(1, 7))
def test_workers_share_everything_once(count, workers):
    parts = [share(range(count), rank, workers) for rank in range(workers)]
    assert sorted(item for part in parts for item in part) == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_seeds_differ_by_turn_and_trajectory():
    seeds = Counter(turn_seed(0, name, turn) for name in "abc" for turn in range(100))
    assert len(seeds) == 300 and all(0 <= seed < 2**63 for seed in seeds)
    assert turn_seed(0, "a", 1) == turn_seed(0, "a", 1) != turn_seed(1, "a", 1)


def test_pool_plays_every_job_with_at_most_so_many_at_once():
    made, played, active, most = [], [], 0, 0

    def make():
        made.append(FakeSandbox())
        return made[-1]

    async def play(job, sandbox):
        nonlocal active, most
        active += 1
        most = max(most, active)
        await asyncio.sleep(0.001)
        active -= 1
        played.append(job)

    asyncio.run(run_pool(range(50), play, workers=7, make_sandbox=make))
    assert sorted(played) == list(range(50)) and most == 7
    assert len(made) == 7 and all(sandbox.stops for sandbox in made)


def test_first_error_ends_the_pool_and_every_sandbox():  # SkyRL#1110: nothing waits for a hanging episode
    made = []

    def make():
        made.append(FakeSandbox())
        return made[-1]

    async def play(job, sandbox):
        if job == 3:
            raise T1Error("broken")
        await asyncio.sleep(600)

    with pytest.raises(T1Error, match="broken"):
        asyncio.run(asyncio.wait_for(run_pool(range(50), play, workers=5, make_sandbox=make), 60))
    assert made and all(sandbox.stops for sandbox in made)


def test_a_later_run_finds_the_sandboxes_of_a_killed_one(tmp_path):
    config = Config()
    config.env.sandbox.scratch_dir = str(tmp_path / "scratch")
    assert sandbox_maker(config.env)()._base == sandbox_maker(config.env)()._base


HANGUP = """
import asyncio, os, signal, sys
from megatron_t1.errors import T1Error
from megatron_t1.rollout.signals import run_until_signal
async def main():
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.sleep(0.5)
    print("still here")
try:
    run_until_signal(main())
except T1Error as error:
    print(error.problem)
"""


@pytest.mark.parametrize(("before", "said"), [([], "stopped by SIGHUP"), (["nohup"], "still here")])
def test_a_terminal_that_closes_stops_a_phase_which_was_not_to_outlive_it(before, said):
    done = subprocess.run([*before, sys.executable, "-c", HANGUP], capture_output=True, text=True, timeout=120)
    assert said in done.stdout and done.returncode == 0, done.stderr


def test_classes_are_named_in_the_configuration():
    config = Config()
    assert make_reward(config).scale == config.reward.scale
    config.reward._target_ = "megatron_t1.environment.reward.NoSuchReward"
    with pytest.raises(ConfigError, match="NoSuchReward"):
        make_reward(config)
