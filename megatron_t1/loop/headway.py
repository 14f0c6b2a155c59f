"""How far a run has come, also within a step: what tells a job that was too short from one that gets nowhere."""

from __future__ import annotations

import re
from collections.abc import Collection

from megatron_t1.config.schema import Config
from megatron_t1.loop.steps import next_step
from megatron_t1.manifest import Key, Manifest
from megatron_t1.paths import Counters, RunPaths

_STEP = re.compile(r"step_(\d+)", re.ASCII)  # of training.progress


def finished_keys(config: Config) -> set[Key]:
    """Steps of the run in run.dir that are finished, or can't be any more; none where there is no run."""
    path = RunPaths.of(config.run.dir).manifest
    return Manifest.read(path).settled if Manifest.exists(path) else set()


def headway(config: Config, finished: Collection[Key]) -> list[int]:
    """[finished steps, records of the rollout that is next, mini-batches of the training phase that is next].

    Two equal ones mean that what happened in between is lost.
    """
    step, paths = next_step(config.loop, finished), RunPaths.of(config.run.dir)
    records = taken = 0
    for iteration, phase in step.keys if step else ():
        policy = Counters(iteration, config.loop.warmup_iterations).policy
        directory = paths.evaluation(policy) if phase == "evaluation" else paths.rollouts(iteration)
        if phase in ("evaluation", "rollout"):
            records += sum(1 for _ in directory.glob("*.safetensors"))
        else:
            steps = (_STEP.fullmatch(path.name) for path in paths.progress(iteration, phase).glob("step_*"))
            taken += max((int(found[1]) for found in steps if found), default=0)
    return [len(finished), records, taken]
