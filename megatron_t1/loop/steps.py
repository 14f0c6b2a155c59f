"""The state machine of a training: which step comes next, as a pure function of options and finished steps.

Iteration i of W warm-up iterations and N iterations with an actor update:

    [evaluation] rollout -> critic                        i <  W
    [evaluation] rollout -> critic -> actor -> export     W <= i < W + N
    [evaluation]                                          i == W + N (the last policy)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from megatron_t1.config.schema import LoopConfig
from megatron_t1.manifest import Key
from megatron_t1.paths import Counters

ROLLOUT_PHASES = ("evaluation", "rollout")
TRAIN_PHASES = ("critic", "actor", "export")


@dataclass(frozen=True)
class Step:
    """Phases that one launch runs one after another: usually one; evaluation and rollout share an engine."""

    iteration: int
    phases: tuple[str, ...]

    @property
    def kind(self) -> str:
        return "rollout" if self.phases[0] in ROLLOUT_PHASES else "train"

    @property
    def keys(self) -> list[Key]:
        return [(self.iteration, phase) for phase in self.phases]

    def __str__(self) -> str:
        return f"iteration {self.iteration}: {' + '.join(self.phases)}"


def total_iterations(loop: LoopConfig) -> int:
    return loop.warmup_iterations + loop.iterations


def evaluates(loop: LoopConfig, iteration: int) -> bool:
    """Whether the policy that samples in this iteration is evaluated then (each policy at most once)."""
    policy = Counters(iteration, loop.warmup_iterations).policy
    if policy == 0:
        return iteration == 0 and loop.evaluate_first
    if policy == loop.iterations:
        return loop.evaluate_last
    return loop.evaluate_every > 0 and policy % loop.evaluate_every == 0


def launches(loop: LoopConfig, iteration: int) -> Iterator[tuple[str, ...]]:
    """Groups of phases of one iteration, in order; each group is one launch."""
    evaluation = ("evaluation",) if evaluates(loop, iteration) else ()
    if iteration == total_iterations(loop):
        if evaluation and loop.iterations:
            yield evaluation
        return
    yield (*evaluation, "rollout")
    training = TRAIN_PHASES if iteration >= loop.warmup_iterations else ("critic",)
    if loop.colocate_roles:
        yield training
    else:
        yield from ((phase,) for phase in training)


def all_steps(loop: LoopConfig) -> Iterator[Step]:
    for iteration in range(total_iterations(loop) + 1):
        for phases in launches(loop, iteration):
            yield Step(iteration, phases)


def next_step(loop: LoopConfig, finished: Collection[Key]) -> Step | None:
    """The first launch with an unfinished phase, reduced to its unfinished phases; None: the training is done."""
    for step in all_steps(loop):
        missing = tuple(phase for phase in step.phases if (step.iteration, phase) not in finished)
        if missing:
            return Step(step.iteration, missing)
    return None


def progress(loop: LoopConfig, finished: Collection[Key]) -> tuple[int, int]:
    """How many launches of a training are finished, and how many there are."""
    steps = list(all_steps(loop))
    return sum(set(step.keys) <= set(finished) for step in steps), len(steps)


def predecessors(loop: LoopConfig, key: Key) -> list[Key]:
    """Steps whose outputs this one reads."""
    iteration, phase = key
    counters = Counters(iteration, loop.warmup_iterations)
    wrote_policy = loop.warmup_iterations + counters.policy - 1  # iteration that wrote the policy in use, if any
    previous_actor = [(wrote_policy, "actor")] if counters.policy else []
    match phase:
        case "rollout" | "evaluation":
            return [(wrote_policy, "export")] if counters.policy else []
        case "critic":
            return [(iteration, "rollout"), *([(iteration - 1, "critic")] if iteration else [])]
        case "actor":
            return [(iteration, "rollout"), (iteration, "critic"), *previous_actor]
        case "export":
            return [(iteration, "actor")]
    return []


def readers(loop: LoopConfig, key: Key, finished: Collection[Key]) -> list[Key]:
    """Finished steps that read this one's outputs; also those beyond a `loop.iterations` that was lowered since."""
    return [other for other in sorted(finished) if key in predecessors(loop, other)]
