"""What a phase plays: its episodes, their limits and where their records go, from configuration and policy alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_t1.config.schema import Config
from megatron_t1.environment.baseline import require_baselines, with_baselines
from megatron_t1.environment.loading import load_tasks
from megatron_t1.environment.sandbox.interface import builds_dockerfiles
from megatron_t1.environment.selection import kept_choice, load_sources
from megatron_t1.errors import MismatchError
from megatron_t1.paths import RunPaths
from megatron_t1.rollout.agent import Attempt, opening
from megatron_t1.rollout.budget import EpisodeLimits
from megatron_t1.rollout.formats import ChatFormat
from megatron_t1.rollout.policy import Policy
from megatron_t1.rollout.pool import make_reward
from megatron_t1.rollout.schedule import attempts_of, tasks_of_iteration
from megatron_t1.trajectory.contract import SamplingContract
from megatron_t1.trajectory.record import EndReason
from megatron_t1.trajectory.store import RolloutStore


@dataclass(frozen=True)
class Plan:
    """One phase: its episodes, where their records go, and how they are played."""

    phase: str
    label: str
    attempts: list[Attempt]
    directory: Path
    limits: EpisodeLimits
    temperature: float
    routes: bool


def rollout_plan(config: Config, policy: Policy, iteration: int) -> Plan:
    rollout, paths = config.rollout, RunPaths.of(config.run.dir)
    loaded = load_sources(config.env)
    tasks = {name: task for source in loaded.values() for name, task in source.items()}
    choice = kept_choice(paths.tasks, config.env, rollout.selection, loaded)
    chosen = tasks_of_iteration(
        [(source.names, source.weight) for source in choice.sources],
        seed=config.run.seed,
        iteration=iteration,
        count=rollout.tasks_per_iteration,
    )
    if getattr(make_reward(config), "needs_baseline", False):
        require_baselines([tasks[name] for name in chosen], where=config.env.baselines or config.env.tasks)
    pairs = attempts_of(chosen, rollout.samples_per_task)
    return Plan(
        phase="rollout",
        label=f"rollout {iteration}",
        attempts=[Attempt(tasks[name], attempt, iteration, policy.version) for name, attempt in pairs],
        directory=paths.rollouts(iteration),
        limits=EpisodeLimits.of(config),
        temperature=rollout.temperature,
        routes=rollout.routes and policy.route_shape is not None,
    )


def evaluation_plan(config: Config, policy: Policy, iteration: int) -> Plan:
    builds = builds_dockerfiles(config.env.sandbox)
    loaded = with_baselines(load_tasks(config.eval.tasks, engine_builds=builds), config.eval.tasks)
    tasks = {task.name: task for task in loaded}
    names = sorted(tasks)[: config.eval.limit or None]
    return Plan(
        phase="evaluation",
        label=f"evaluation of policy {policy.version}",
        attempts=[
            Attempt(tasks[name], attempt, iteration, policy.version)
            for name, attempt in attempts_of(names, config.eval.attempts)
        ],
        directory=RunPaths.of(config.run.dir).evaluation(policy.version),
        limits=EpisodeLimits.of(config, max_turns=config.eval.max_turns),
        temperature=config.eval.temperature,
        routes=False,
    )


def require_playable(plan: Plan, chat: ChatFormat) -> None:
    """What can be known of tasks before an engine starts (their files were checked when they were loaded).

    Raises:
        T1Error: an instruction, of a step's too, leaves no room for a turn.
    """
    for task in {attempt.task.name: attempt.task for attempt in plan.attempts}.values():
        for stage in task.stages:
            opening(stage, chat, plan.limits.max_context)


def finished(store: RolloutStore, plan: Plan, contract: SamplingContract, policy: Policy) -> set[str]:
    """Ids of the plan's records that are there; raises when they are of another policy, contract or plan."""
    headers = store.headers()
    planned = {attempt.trajectory_id: attempt for attempt in plan.attempts}
    stray = sorted(set(headers) - set(planned))
    if stray:
        raise MismatchError(
            f"{len(stray)} records don't belong to this {plan.phase}, for example {stray[0]!r}",
            where=str(plan.directory),
            remedy="they were made with other tasks or options: remove the directory, or use another run.dir",
        )
    for name, header in headers.items():
        if header.contract is not None:
            header.contract.require_equal(contract.to_json() | {"stop_ids": contract.stop_ids}, where=name)
        if any(version != policy.version for version in header.policy_versions):
            raise MismatchError(
                f"the record was sampled by policy {header.policy_versions[0]}, this phase plays {policy.version}",
                where=str(plan.directory / name),
                remedy="remove the directory, or use another run.dir",
            )
        # A policy may be evaluated at any iteration, but samples the rollout of one at a time.
        if plan.phase == "rollout" and header.iteration != planned[name].iteration:
            raise MismatchError(
                f"the record is of iteration {header.iteration}, this phase plays {planned[name].iteration}",
                where=str(plan.directory / name),
                remedy="remove the directory, or use another run.dir",
            )
    return set(headers)


def give_second_chance(store: RolloutStore, attempts: Iterable[Attempt]) -> set[str]:
    """Take out the unsealed records of episodes that the infrastructure lost, so that a restart plays them again."""
    headers = store.headers()
    lost = [
        attempt.trajectory_id
        for attempt in attempts
        if attempt.trajectory_id in headers and headers[attempt.trajectory_id].end_reason in EndReason.LOST
    ]
    return {name for name in lost if store.discard(name)}
