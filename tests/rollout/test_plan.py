"""The plan of a rollout: from sources, filters and seed alone, and the same after a restart."""

from collections import Counter
from types import SimpleNamespace

import pytest

from megatron_t1.config.schema import Config
from megatron_t1.environment.loading import write_task
from megatron_t1.environment.task import Task, TaskContent
from megatron_t1.rollout.plan import rollout_plan

POLICY = SimpleNamespace(version=0, route_shape=None)


@pytest.fixture
def config(tmp_path):
    content = TaskContent(tests={"test.sh": (b"true\n", 0o755)})
    for source, count in (("a", 5), ("b", 7)):
        for number in range(count):
            name = f"{source}{number}"
            write_task(Task(name, "do it", content=content), tmp_path / source / name)
    config = Config()
    config.run.dir = str(tmp_path / "run")
    config.env.sources = {name: str(tmp_path / name) for name in "ab"}
    config.env.weights = {"a": 3.0}
    config.rollout.tasks_per_iteration, config.rollout.samples_per_task = 20, 2
    return config


def played(config, iteration):
    return [attempt.trajectory_id for attempt in rollout_plan(config, POLICY, iteration).attempts]


def test_weights_and_samples(config):
    plan = rollout_plan(config, POLICY, 0)
    counts = Counter(attempt.task.name[0] for attempt in plan.attempts)
    assert len(plan.attempts) == 40 and abs(counts["a"] - 30) <= 4
    assert len({attempt.trajectory_id for attempt in plan.attempts}) == 40


def test_a_run_plays_on_what_it_began_with(config, tmp_path):
    first = [played(config, iteration) for iteration in range(3)]
    content = TaskContent(tests={"test.sh": (b"true\n", 0o755)})
    write_task(Task("a9", "late", content=content), tmp_path / "a" / "a9")
    assert [played(config, iteration) for iteration in (2, 1, 0)] == first[::-1]
    config.run.seed = 1
    assert played(config, 0) != first[0]
    config.run.dir = str(tmp_path / "another")
    assert "a9" in {attempt.task.name for attempt in rollout_plan(config, POLICY, 0).attempts}
