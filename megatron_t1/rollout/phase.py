"""The rollout and evaluation phases: one engine, many episodes, every finished one kept at once.

Episodes whose record exists are not played again, so a phase that was killed goes on where it was. Several workers (one
engine each) share one directory and take every n-th episode; worker 0 seals it when all have said they are through.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from megatron_t1 import atomic
from megatron_t1.config.schema import Config
from megatron_t1.environment.sandbox.interface import Sandbox
from megatron_t1.environment.verifier import verify
from megatron_t1.errors import T1Error
from megatron_t1.paths import Counters, RunPaths
from megatron_t1.phase import PhaseResult, WrittenFile
from megatron_t1.printable import printable
from megatron_t1.rollout.agent import Attempt, run_episode
from megatron_t1.rollout.crew import ALONE, Crew
from megatron_t1.rollout.engine.client import EngineClient
from megatron_t1.rollout.engine.command import installed_build
from megatron_t1.rollout.engine.server import VllmServer
from megatron_t1.rollout.formats import ChatFormat
from megatron_t1.rollout.journal import Journal, discard_all
from megatron_t1.rollout.plan import Plan, evaluation_plan, finished, give_second_chance, require_playable, rollout_plan
from megatron_t1.rollout.policy import Policy, engine_dtype
from megatron_t1.rollout.pool import make_reward, require_buildable, run_pool, sandbox_maker
from megatron_t1.rollout.progress import RolloutProgress
from megatron_t1.rollout.samplers import EngineSampler
from megatron_t1.rollout.schedule import share, turn_seed
from megatron_t1.rollout.signals import run_until_signal
from megatron_t1.rollout.summary import evaluation_summary, require_trusted, rollout_metrics, untrusted_reasons
from megatron_t1.timing import timed
from megatron_t1.trajectory.contract import SamplingContract
from megatron_t1.trajectory.exchange import REFERENCE, ExchangeLog, ExchangeSession
from megatron_t1.trajectory.record import Header
from megatron_t1.trajectory.store import RolloutStore

PHASES = ("evaluation", "rollout")  # in the order in which one engine serves them
SUMMARY_FILE = "summary.json"
LOOK_EVERY_S = 1.0  # for other nodes' records


def run_rollout(config: Config, iteration: int) -> PhaseResult:
    """Play the episodes of `iteration`; see `run_phases`."""
    return run_phases(config, iteration, ("rollout",))["rollout"]


def run_evaluation(config: Config, policy: int) -> PhaseResult:
    """Evaluate `policy` on the held-out tasks; see `run_phases`."""
    iteration = 0 if policy == 0 else policy + config.loop.warmup_iterations
    return run_phases(config, iteration, ("evaluation",))["evaluation"]


def run_phases(
    config: Config, iteration: int, phases: tuple[str, ...] | list[str], *, crew: Crew = ALONE
) -> dict[str, PhaseResult]:
    """Run `phases` ("evaluation", "rollout") of the policy that samples in `iteration`, with one engine for all.

    Writes RUN/rollouts/iter_N (rollout) and RUN/evaluations/iter_P with summary.json (evaluation).

    Args:
        crew: this process's place among those that share the phases.

    Returns:
        A result for each phase. Worker 0's is that of the whole phase; those of others list no outputs.

    Raises:
        T1Error: the engine was lost, a task can't be played, the records there are of another contract, or the phase
            was stopped by a signal. Finished trajectories are kept in every case.
    """
    unknown = [phase for phase in phases if phase not in PHASES]
    if unknown:
        raise ValueError(f"unknown phases {unknown}")
    ordered = [phase for phase in PHASES if phase in phases]
    return run_until_signal(_run(config, iteration, ordered, crew))


class _Engine:
    """The engine of these phases, started when the first episode needs it."""

    def __init__(self, config: Config, policy: Policy, log_path: Path, seed: int, stack: contextlib.AsyncExitStack):
        self.config, self.policy, self.log_path, self.seed, self.stack = config, policy, log_path, seed, stack
        self.observed: dict[str, Any] = {}  # fields of the contract, as the engine was found to be
        self._client: EngineClient | None = None

    async def client(self) -> EngineClient:
        if self._client is None:
            rollout = self.config.rollout
            shape = self.policy.route_shape if rollout.routes else None
            if rollout.routes and shape is None:
                print("this policy has no experts: no routes are recorded", flush=True)  # vllm#42593
            print(f"starting the engine ({self.policy.model_dir}), log: {self.log_path}", flush=True)
            await asyncio.to_thread(self.policy.require_recorded, self.config)
            server = VllmServer(
                rollout.engine,
                self.policy.model_dir,
                engine_dtype(self.config),
                self.log_path,
                max_model_len=rollout.max_context,
                routes=shape is not None,
                seed=self.seed % 2**31,
            )
            await self.stack.enter_async_context(server)
            if server.router_dtype:
                self.observed["router_dtype"] = server.router_dtype
            client = EngineClient(
                server.url,
                route_shape=shape,
                request_timeout_s=rollout.engine.request_timeout_s,
                check_alive=server.check_alive,
                model=server.served_name,
            )
            self._client = await self.stack.enter_async_context(client)
            print(f"the engine is ready after {server.start_s:.1f} s", flush=True)
        return self._client


async def _run(config: Config, iteration: int, phases: list[str], crew: Crew) -> dict[str, PhaseResult]:
    counters = Counters(iteration, config.loop.warmup_iterations)
    policy = Policy.of(config, counters.policy)
    results = {}
    async with contextlib.AsyncExitStack() as stack:
        log_path = RunPaths.of(config.run.dir).phase(iteration, phases[0]) / f"engine.{crew.worker}.log"
        seed = config.run.seed * 1_000_003 + iteration * 1009 + crew.worker
        engine = _Engine(config, policy, log_path, seed, stack)
        makers = {"evaluation": evaluation_plan, "rollout": rollout_plan}
        plans = [makers[phase](config, policy, iteration) for phase in phases]
        chat = policy.chat_format(config)
        for plan in plans:  # all before the first episode: a broken task is known at once
            require_playable(plan, chat)
            require_buildable({attempt.task.name: attempt.task for attempt in plan.attempts}.values(), config.env)
        for plan in plans:
            results[plan.phase] = await _run_plan(config, iteration, policy, plan, chat, engine, crew)
    return results


async def _run_plan(
    config: Config, iteration: int, policy: Policy, plan: Plan, chat: ChatFormat, engine: _Engine, crew: Crew
) -> PhaseResult:
    began = time.monotonic()
    store = RolloutStore(plan.directory)
    contract = policy.contract(config, chat, installed_build(), temperature=plan.temperature)
    for name, error in store.set_aside_damaged().items():
        print(f"{plan.label}: the record of {name} is damaged, it is played again: {error.problem}", flush=True)
    done = finished(store, plan, contract, policy)
    mine = share(plan.attempts, crew.worker, crew.workers)
    done -= give_second_chance(store, mine)
    pending = [attempt for attempt in mine if attempt.trajectory_id not in done]
    if done:
        print(f"{plan.label}: {len(mine) - len(pending)} of {len(mine)} episodes are there already", flush=True)
    timings: dict[str, float] = {}
    made: list[Sandbox] = []
    progress = RolloutProgress(plan.label, len(mine), done=len(mine) - len(pending))
    if pending:
        with timed(timings, "engine_start"):  # next to nothing where the phase before has started it
            client = await engine.client()
        count = min(config.rollout.concurrency, len(pending))
        facts = policy.engine_facts(config, installed_build()) | engine.observed
        facts["template_sha256"] = getattr(chat, "template_sha256", "")  # formats that are code have none
        log = ExchangeLog(plan.directory, worker=crew.worker, facts=facts)
        with log, timed(timings, "episodes"), progress:
            play = _player(config, policy, plan, chat, contract, client, store, progress, log)
            make, teardown_s = sandbox_maker(config.env, made), config.env.teardown_timeout_s
            await run_pool(pending, play, workers=count, make_sandbox=make, teardown_timeout_s=teardown_s)
    markers = RunPaths.of(config.run.dir).phase(iteration, plan.phase)
    crew.report_done(markers)
    if crew.worker != 0:
        return PhaseResult(plan.phase, iteration, timings_s=timings)
    with timed(timings, "waiting"):
        await crew.wait_for_others(markers, config.cluster.phase_timeout_s)
    headers = await all_headers(plan, store, crew)
    _require_complete(plan, headers)
    require_trusted(headers.values(), config.rollout.max_untrusted_share, where=str(plan.directory))
    with timed(timings, "seal"):
        await asyncio.to_thread(store.seal)
        discard_all(plan.directory)
    metrics = rollout_metrics(headers.values(), plan.phase)
    if pending:
        metrics |= _speeds(plan, [header for name, header in headers.items() if name not in done], timings)
    run_dir = RunPaths.of(config.run.dir).root
    outputs = store.written_files(run_dir)
    if plan.phase == "evaluation":
        outputs.append(_write_summary(plan, policy, headers.values(), run_dir))
    timings["total"] = time.monotonic() - began
    _say_result(plan, metrics, untrusted_reasons(headers.values()))
    return PhaseResult(
        plan.phase,
        iteration,
        metrics=metrics,
        timings_s=timings,
        outputs=outputs,
        details={
            "policy": policy.version,
            "engine": contract.engine,
            "contract": contract.to_json(),
            "sandbox": dict(made[0].guarantees()) if made else {},  # what bounded them on this machine
        },
    )


def _player(
    config: Config,
    policy: Policy,
    plan: Plan,
    chat: ChatFormat,
    contract: SamplingContract,
    client: EngineClient,
    store: RolloutStore,
    progress: RolloutProgress,
    log: ExchangeLog,
) -> Callable[[Attempt, Sandbox], Awaitable[None]]:
    """What plays one attempt, logs its exchange with the engine, stores its record and counts it."""
    reward = make_reward(config)
    bound = f"{policy.version} {contract.to_json()}"
    saving = asyncio.Lock()

    async def play(attempt: Attempt, sandbox: Sandbox) -> None:
        name = attempt.trajectory_id

        def seed(turn: int) -> int:
            return turn_seed(config.run.seed, f"{plan.label}/{name}", turn)

        exchanges: list[ExchangeSession] = []
        journal = Journal(plan.directory, name, bound) if config.rollout.in_flight == "continue" else None

        def sampler() -> EngineSampler:
            exchanges.append(log.session(name, attempt.policy))
            own_seed = seed if config.rollout.seeded else None
            if journal is not None:
                journal.begin()
            return EngineSampler(client, contract, name=name, seed=own_seed, exchange=exchanges[-1], journal=journal)

        with contextlib.closing(journal) if journal is not None else contextlib.nullcontext():
            trajectory = await run_episode(
                attempt,
                sandbox,
                sampler,
                chat,
                plan.limits,
                route_shape=policy.route_shape if plan.routes else None,
                verify=verify,
                reward=reward,
            )
        trajectory = trajectory.noting(**{REFERENCE: exchanges[-1].reference})
        async with saving:
            await asyncio.to_thread(log.sync)
            await asyncio.to_thread(store.add, trajectory)
        if journal is not None:
            journal.discard()
        progress.add(trajectory)

    return play


async def all_headers(plan: Plan, store: RolloutStore, crew: Crew) -> dict[str, Header]:
    """Of all records; what workers on other nodes have written is waited for as long as it may be seen late."""
    deadline = time.monotonic() + (atomic.LATE_FILES_S if crew.workers > 1 else 0.0)
    while _missing(plan, headers := store.headers()) and time.monotonic() < deadline:
        atomic.look_anew(Path(plan.directory))
        await asyncio.sleep(LOOK_EVERY_S)
    return headers


def _missing(plan: Plan, headers: dict[str, Header]) -> set[str]:
    return {attempt.trajectory_id for attempt in plan.attempts} - set(headers)


def _require_complete(plan: Plan, headers: dict[str, Header]) -> None:
    missing = _missing(plan, headers)
    if missing:
        raise T1Error(
            f"{len(missing)} episodes are missing, for example {sorted(missing)[0]!r}",
            where=str(plan.directory),
            remedy="start the phase again; all its workers must see the same run directory and configuration",
        )


def _speeds(plan: Plan, played: list[Header], timings: dict[str, float]) -> dict[str, float]:
    """Of all workers together, from worker 0's first episode to everybody's last."""
    seconds = timings["episodes"] + timings["waiting"]
    counts = {"tokens": "tokens_per_s", "sampled_tokens": "sampled_tokens_per_s"}
    return {
        f"{plan.phase}/{name}": sum(header.counts.get(count, 0) for header in played) / seconds
        for count, name in counts.items()
    }


def _write_summary(plan: Plan, policy: Policy, headers: Any, run_dir: Path) -> WrittenFile:
    path = plan.directory / SUMMARY_FILE
    tasks = {attempt.task.name: attempt.task for attempt in plan.attempts}
    atomic.write_json(path, evaluation_summary(headers, policy.version, tasks))
    return WrittenFile(str(path.relative_to(run_dir)), path.stat().st_size, atomic.sha256_file(path))


def _say_result(plan: Plan, metrics: dict[str, float], reasons: list[tuple[str, int]]) -> None:
    facts = [f"{plan.label} is complete: {metrics[f'{plan.phase}/episodes']:.0f} episodes"]
    for name, text in (("mean_reward", "mean reward"), ("checks_passed", "checks passed"), ("success_rate", "solved")):
        if f"{plan.phase}/{name}" in metrics:
            facts.append(f"{text} {metrics[f'{plan.phase}/{name}']:.3f}")
    if reasons:
        untrusted = metrics[f"{plan.phase}/untrusted"]
        facts.append(f"{untrusted:.0f} without a trusted verdict (excluded), most of them: {printable(reasons[0][0])}")
    print(", ".join(facts), flush=True)
