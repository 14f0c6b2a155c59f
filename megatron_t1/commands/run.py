"""`t1 run` and its phases by hand: `t1 rollout`, `t1 train critic` and `actor`, `t1 export`, `t1 eval`."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable

from megatron_t1.cli import Invocation
from megatron_t1.commands.configuration import command_config, print_config, require_startable
from megatron_t1.commands.plan import fit_problems
from megatron_t1.config.compose import as_override, flatten, load_run_config
from megatron_t1.config.inputs import is_run, missing_inputs
from megatron_t1.config.schema import Config
from megatron_t1.errors import ConfigError, IncompleteError, T1Error, warn
from megatron_t1.loop import slurm_jobs
from megatron_t1.loop.headway import finished_keys
from megatron_t1.loop.launcher import Stopped
from megatron_t1.loop.outside import OUTSIDE, phase_outside_the_loop
from megatron_t1.loop.requeue import answering_for_its_job, requeue_when_out_of_time
from megatron_t1.loop.runner import opened
from megatron_t1.loop.steps import Key, Step, all_steps, evaluates, next_step, total_iterations
from megatron_t1.manifest import Manifest
from megatron_t1.paths import Counters, RunPaths
from megatron_t1.phase import PhaseResult

INPUTS = {
    "rollout": ("model.path", "env.tasks"),
    "evaluation": ("model.path", "eval.tasks"),
    "critic": ("model.path",),
    "actor": ("model.path",),
    "export": ("model.path",),
}


def run(invocation: Invocation) -> int:
    """The whole training."""
    if invocation.multirun:
        from megatron_t1.commands.sweep import sweep

        return sweep(invocation)
    config = command_config(invocation)
    if invocation.print_config:
        return print_config(config, model=True)
    require_startable(config, run_inputs(config), more=[*loop_problems(config), *fit_problems(config)])
    with answering_for_its_job(config, say):
        return stoppable(lambda: _run(config), stopped=lambda number: requeue_when_out_of_time(config, number, say))


def run_inputs(config: Config) -> list[str]:
    """The path options that a whole training reads."""
    evaluating = any(evaluates(config.loop, iteration) for iteration in range(total_iterations(config.loop) + 1))
    models = [*_own_model(config, "critic"), *_own_model(config, "actor")]
    return ["model.path", "env.tasks", *(["eval.tasks"] if evaluating else []), *models]


def _own_model(config: Config, phase: str) -> list[str]:
    """The option that names a model of the phase's own, where it is to be read: a reference policy, a first critic."""
    if phase == "actor" and config.train.actor.reference:
        return ["train.actor.reference"]
    if phase == "critic" and config.train.critic.start and (0, "critic") not in finished_keys(config):
        return ["train.critic.start"]
    return []


def loop_problems(config: Config) -> list[str]:
    """Options that a whole training doesn't read."""
    if not config.train.critic.rollouts:
        return []
    return ["train.critic.rollouts is read by `t1 train critic` alone; train.critic.start takes the critic it leaves"]


def _run(config: Config) -> int:
    started = time.monotonic()
    with opened(config, say=say) as runner:
        if config.cluster.launcher == "slurm" and (job := slurm_jobs.own_job()) is not None:
            slurm_jobs.note(config.run.dir, job, event="began")
        say(f"run {config.run.dir}: model {config.model.name}, {config.layout.processes} training processes")
        count = runner.run()
    from megatron_t1.report.plots import write_plots
    from megatron_t1.report.show import print_summary

    write_plots(config.run.dir)
    say(f"done: {count} steps in {time.monotonic() - started:.0f} s" if count else "nothing is left to do")
    print_summary(config.run.dir)
    return 0


def phase(invocation: Invocation) -> int:
    """One phase of a run, started by hand: the same command, files and record as in the loop."""
    name = invocation.command.words[-1]
    config = command_config(invocation)
    if invocation.print_config:
        return print_config(config, model=True)
    wanted, config.iteration = config.iteration, -1
    if not is_run(RunPaths.of(config.run.dir).root):
        _require_first(config, name)
    require_startable(config, [*INPUTS[name], *_own_model(config, name)])
    return stoppable(lambda: _phase(config, name, wanted))


def _require_first(config: Config, name: str) -> None:
    """Refuse to start a run with anything but a rollout whose inputs are there: a run.dir may be mistyped.

    Raises:
        IncompleteError: names the directory.
    """
    if name == "rollout" and not missing_inputs(config, INPUTS[name]):
        return
    kind = OUTSIDE.get(phase_outside_the_loop(RunPaths.of(config.run.dir).root))
    if kind is None:
        raise IncompleteError(
            "there is no run",
            where=config.run.dir,
            remedy="name the run.dir of a `t1 run`; `t1 rollout` with model.path and env.tasks starts a new one",
        )
    raise IncompleteError(
        f"there is no run: {kind.what} lies there",
        where=config.run.dir,
        remedy=f"start one from what it left: `t1 run run.dir=ANOTHER {kind.option}={config.run.dir}/{kind.leaves}`",
    )


def _phase(config: Config, name: str, wanted: int) -> int:
    with opened(config, say=say) as runner:
        finished = runner.manifest.keys
        iteration = wanted if wanted >= 0 else _first_open(config, name, finished)
        known = [step for step in all_steps(config.loop) if (iteration, name) in step.keys]
        if not known:
            raise T1Error(
                f"this run has no {name} phase in iteration {iteration}",
                where=config.run.dir,
                remedy=f"it has {total_iterations(config.loop)} iterations, of which the first "
                f"{config.loop.warmup_iterations} only warm up the critic",
            )
        if (iteration, name) in finished:
            runner.forget((iteration, name))
        results = runner.execute(Step(iteration, (name,)))
    print_results(results)
    return 0


def evaluate(invocation: Invocation) -> int:
    """Evaluate the newest exported policy, or that of `iteration`."""
    config = command_config(invocation)
    if invocation.print_config:
        return print_config(config, model=True)
    wanted, config.iteration = config.iteration, -1
    _require_own_evaluation(config, wanted)
    require_startable(config, INPUTS["evaluation"], training=False)
    return stoppable(lambda: _evaluate(config, wanted))


def _require_own_evaluation(config: Config, wanted: int) -> None:
    """Refuse other evaluation options inside a run, whose evaluations must stay comparable; say where they can go.

    Raises:
        ConfigError: names the options, with the command that evaluates with them in a directory of its own.
    """
    paths = RunPaths.of(config.run.dir)
    manifest = Manifest.read(paths.manifest) if is_run(paths.root) else None
    if manifest is None or not manifest.finished:
        return
    saved, now = flatten(load_run_config(paths.root)), flatten(config)
    changed = [key for key in now if key.startswith("eval.") and now[key] != saved[key]]
    changed = [key for key in changed if key != "eval.solved_at"]  # only how the same attempts are reported
    if not changed:
        return
    policy = Counters(_evaluated(manifest, wanted), config.loop.warmup_iterations).policy
    words = [
        "t1", "eval", as_override("run.dir", f"{paths.root}-evaluation"), f"model={config.model.name}",
        as_override("model.path", paths.hf(policy, config.model.path)),
        as_override("eval.tasks", now["eval.tasks"]),
        *(f"{key}={now[key]}" for key in changed if key != "eval.tasks"),
    ]  # fmt: skip
    raise ConfigError(
        "the run evaluates with other options: "
        + "; ".join(f"{key}: the run has {saved[key]!r}, now {now[key]!r}" for key in changed),
        where=str(paths.config),
        remedy=f"evaluate in a directory of its own (with the run's other options): {shlex.join(words)}",
    )


def _evaluated(manifest: Manifest, wanted: int) -> int:
    """The iteration whose policy is evaluated: `wanted`, or that of the newest export."""
    exported = [iteration + 1 for iteration, name in manifest.keys if name == "export"]
    return wanted if wanted >= 0 else max(exported, default=0)


def _evaluate(config: Config, wanted: int) -> int:
    with opened(config, say=say) as runner:
        iteration = _evaluated(runner.manifest, wanted)
        key = (iteration, "evaluation")
        if key in runner.manifest.keys:
            runner.forget(key)
        results = runner.execute(Step(iteration, ("evaluation",)))
    policy = Counters(iteration, config.loop.warmup_iterations).policy
    print_results(results)
    from megatron_t1.report.evaluation import REPORT_FILE, evaluate_summary, print_evaluation, write_report
    from megatron_t1.report.summary_file import SUMMARY_FILE

    directory = RunPaths.of(config.run.dir).evaluation(policy)
    found = evaluate_summary(directory, solved_at=config.eval.solved_at)
    write_report(directory, found)
    print_evaluation(found)
    say(f"attempts: {directory / SUMMARY_FILE}, statistics: {directory / REPORT_FILE}")
    return 0


def _first_open(config: Config, name: str, finished: set[Key]) -> int:
    """First iteration whose `name` phase is not finished; the next step's own when it is of that kind."""
    step = next_step(config.loop, finished)
    if step is not None and name in step.phases:
        return step.iteration
    open_iterations = [
        step.iteration
        for step in all_steps(config.loop)
        if name in step.phases and (step.iteration, name) not in finished
    ]
    if not open_iterations:
        raise T1Error(
            f"every {name} phase of this run is finished",
            where=config.run.dir,
            remedy="name one to repeat: iteration=N; or raise loop.iterations",
        )
    return open_iterations[0]


def print_results(results: list[PhaseResult]) -> None:
    for result in results:
        seconds = sum(value for name, value in result.timings_s.items() if name != "total")
        say(f"{result.phase}, iteration {result.iteration}: {result.timings_s.get('total', seconds):.1f} s")
        for name, value in sorted(result.metrics.items()):
            say(f"    {name:<36} {value:.6g}")


def say(line: str) -> None:
    """Print a line. A reader that has gone, or a log on a full disk, ends no training, and isn't tried again."""
    try:
        print(line, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            warn(f"warning: the output can't be written any more: {error.strerror}; this goes on")


RESUMES = "finished steps are kept, the same command goes on from there"
STARTS_AGAIN = "the same command starts again from the beginning"


def stoppable(
    work: Callable[[], int], stopped: Callable[[int], object] | None = None, *, afterwards: str = RESUMES
) -> int:
    """Run `work`; a clean stop by a signal becomes its exit status, after `stopped(signal number)`.

    Args:
        afterwards: what is left of the work, and what the same command then does.
    """
    try:
        return work()
    except Stopped as stop:
        number = stop.signal_number
        warn(f"stopped by {signal.Signals(number).name}; {afterwards}")
        if stopped is not None:
            stopped(number)
        return 128 + number
