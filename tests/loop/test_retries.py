"""A phase that something killed is launched again within the same loop; one that says what is wrong is not."""

import functools

import pytest
from loop_commands import dummy_command

from megatron_t1.errors import T1Error
from megatron_t1.loop.runner import opened
from megatron_t1.loop.worker import AGAIN, _is_lost
from megatron_t1.manifest import Manifest
from megatron_t1.paths import RunPaths
from megatron_t1.rollout.engine.errors import EngineLost, EngineRequestFailed


@pytest.fixture
def run(config):
    """Runs the loop's first step; returns what it said."""
    config.loop.warmup_iterations, config.loop.iterations, config.loop.evaluate_first = 0, 1, False
    config.loop.evaluate_last = False
    config.cluster.phase_retries = 2
    said = []

    def run(behave):
        with opened(config, say=said.append, command=functools.partial(dummy_command, behave=behave)) as runner:
            runner.run(kind="rollout")
        return "\n".join(said)

    run.said, run.manifest = said, RunPaths.of(config.run.dir).manifest
    return run


@pytest.mark.parametrize("behave", ["crash once", "lose engine once"])
def test_what_was_killed_or_lost_its_engine_is_launched_again(run, behave):
    assert "launched again (1 of 2 times)" in run(behave)
    (step,) = Manifest.read(run.manifest).finished
    assert step.key == (0, "rollout") and step.attempts == 2


def test_so_often_and_no_more(run):
    with pytest.raises(T1Error, match="died of SIGKILL"):
        run("crash")
    assert [line for line in run.said if "launched again" in line] == [
        "    launched again (1 of 2 times)", "    launched again (2 of 2 times)"
    ]  # fmt: skip


def test_what_says_what_is_wrong_is_not(run):
    with pytest.raises(T1Error, match="the frobnicator is missing"):
        run("fail")
    assert "launched again" not in "\n".join(run.said)


def test_only_a_lost_engine_is_said_to_pass():
    assert AGAIN == 75
    assert _is_lost(ExceptionGroup("", [ValueError(), EngineLost("it died")]))
    assert not _is_lost(ExceptionGroup("", [EngineRequestFailed("time-out")]))
