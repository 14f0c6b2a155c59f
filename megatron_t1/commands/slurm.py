"""`t1 slurm submit`, `status` and `cancel`: a run's jobs; `link` is what the jobs of a chain run."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

from megatron_t1.cli import Invocation, find_command, parse
from megatron_t1.commands.arguments import Parser
from megatron_t1.commands.configuration import command_config, model_problems, print_config
from megatron_t1.commands.plan import fit_problems
from megatron_t1.commands.run import run_inputs, say, stoppable
from megatron_t1.config.compose import as_override
from megatron_t1.config.inputs import is_run, run_dir_problems
from megatron_t1.config.schema import Config
from megatron_t1.config.validate import check, unbuildable
from megatron_t1.errors import ConfigError, IncompleteError, T1Error
from megatron_t1.loop import job_list, slurm_jobs
from megatron_t1.loop.chain import cancel_chain, next_kind, run_link
from megatron_t1.loop.headway import finished_keys, headway
from megatron_t1.loop.launcher import KINDS
from megatron_t1.loop.links import Chain, begun, fill, listed, note_unstarted, waiting_links
from megatron_t1.loop.lock import lock_owner
from megatron_t1.loop.requeue import answering_for_its_job, release_if_held
from megatron_t1.loop.runner import opened, read_launch
from megatron_t1.loop.steps import Step, next_step, progress
from megatron_t1.loop.submission import (
    heterogeneous_job,
    heterogeneous_overrides,
    job_arguments,
    job_options,
    one_job,
    resource_options,
    script_of,
    write_script,
)
from megatron_t1.manifest import Manifest
from megatron_t1.paths import RunPaths
from megatron_t1.phase import RESULT_FILE

HELD = ("JobHeldUser", "JobHoldMaxRequeue", "job_requeued_in_held_state")  # reasons that the job's owner may lift
# Reasons of jobs that ask for what their partition, account or quality of service doesn't give.
IMPOSSIBLE = frozenset(
    "AccountNotAllowed BadConstraints InvalidAccount InvalidQOS PartitionNodeLimit PartitionTimeLimit QOSNotAllowed "
    "ReservationDeleted QOSMaxNodePerJob QOSMaxGRESPerJob QOSMaxWallDurationPerJob AssocMaxNodePerJob "
    "AssocMaxWallDurationPerJob".split()
)


def submit(invocation: Invocation) -> int:
    config = command_config(invocation)
    if invocation.print_config:
        return print_config(config, model=True)
    _require_submittable(config, invocation)
    name = Path(config.run.dir).name
    if "--chain" in invocation.flags:
        return _submit_chain(config, invocation)
    plain = [*_config_dirs(invocation), *invocation.arguments]
    words = ["run", *plain]
    options = one_job(config, name)
    if "--het" in invocation.flags:
        options, words = heterogeneous_job(config, name), [*words, *heterogeneous_overrides()]
    if "--dry-run" in invocation.flags:
        say(shlex.join(["sbatch", *options, str(script_of(config.run.dir)), *job_arguments(config.run.dir, *words)]))
        return 0
    again = shlex.join(["t1", "slurm", "submit", *sorted(invocation.flags), *plain])
    arguments = job_arguments(config.run.dir, *words)
    job = slurm_jobs.submit(options, write_script(config.run.dir), arguments, directory=Path.cwd())
    command = f"cd {shlex.quote(str(Path.cwd()))} && {again}"
    slurm_jobs.note_submitted(config.run.dir, job, kind="run", after=None, command=command)
    _say_submitted(config, [job.id])
    return 0


def _submit_chain(config: Config, invocation: Invocation) -> int:
    kind = next_kind(config, finished_keys(config))
    if kind is None:
        say("nothing is left to do")
        return 0
    if "--dry-run" in invocation.flags:
        for each in KINDS:
            options = [*job_options(config, f"t1-{each}"), *resource_options(config, [each])]
            command = job_arguments(config.run.dir, "slurm", "link", config.run.dir, each)
            say(shlex.join(["sbatch", *options, str(script_of(config.run.dir)), *command]))
        return 0
    job_list.mend(config.run.dir, say)
    waiting = waiting_links(config.run.dir)
    if waiting:
        raise ConfigError(
            f"jobs of this run wait already: {', '.join(map(str, waiting))}",
            where=config.run.dir,
            remedy=f"`t1 slurm status {config.run.dir}` shows them, `t1 slurm cancel {config.run.dir}` ends them",
        )
    Chain([*_config_dirs(invocation), *invocation.arguments], str(Path.cwd())).write(config.run.dir)
    note_unstarted(config.run.dir, headway(config, finished_keys(config)), say)
    slurm_jobs.note(config.run.dir, 0, event="chain")
    _say_submitted(config, fill(config, kind, None, say))
    return 0


def _say_submitted(config: Config, jobs: list[int]) -> None:
    say(f"{listed(jobs)}; `t1 slurm status {config.run.dir}` tells how it is, {config.run.dir}/slurm holds its log")


def _config_dirs(invocation: Invocation) -> list[str]:
    return [f"--config-dir={Path(directory).resolve()}" for directory in invocation.config_dirs]


def _require_submittable(config: Config, invocation: Invocation) -> None:
    """Everything that can be known before the job starts, where it starts.

    Raises:
        ConfigError: lists it.
    """
    problems = [*model_problems(config), *run_dir_problems(config), *unbuildable(config), *fit_problems(config)]
    if config.cluster.launcher != "slurm":
        problems.append("`t1 slurm` starts phases as job steps: add cluster=slurm, or experiment=ppo_122b")
    if {"--chain", "--het"} <= invocation.flags:
        problems.append("--chain and --het are two ways to give rollout and training nodes of their own: choose one")
    if "--het" not in invocation.flags:
        problems += [
            f"cluster.{kind}.het_group={group}: only a heterogeneous job has components; add --het"
            for kind in KINDS
            if (group := config.cluster.resources(kind).het_group) >= 0
        ]
    if config.cluster.slurm.stop_lead_s <= config.cluster.stop_grace_s:
        problems.append(
            f"cluster.slurm.stop_lead_s={config.cluster.slurm.stop_lead_s:g} must exceed "
            f"cluster.stop_grace_s={config.cluster.stop_grace_s:g}, the time a phase has to end"
        )
    check(config, run_inputs(config), problems)


def link(invocation: Invocation) -> int:
    parser = Parser(prog="t1 slurm link", add_help=False)
    parser.add_argument("run", type=Path)
    parser.add_argument("kind", choices=KINDS)
    options = parser.parse_args(invocation.arguments)
    chain = Chain.read(options.run)
    # The run as this job was given it takes the place of the chain's: a relative run.dir means another place where the
    # directory it was handed in from isn't there.
    config = command_config(_run_invocation([*chain.overrides, as_override("run.dir", options.run)]))
    check(config, run_inputs(config), [*model_problems(config), *run_dir_problems(config)])

    def work() -> int:
        run_link(config, options.kind, say, lambda: opened(config, say=say, kinds=[options.kind]))
        return 0

    with answering_for_its_job(config, say):
        return stoppable(work, stopped=lambda number: release_if_held(config, say))


def cancel(invocation: Invocation) -> int:
    run = _run_argument(invocation, "cancel")
    job_list.mend(run, say)  # no job is left that was in a line which is gone
    ended = cancel_chain(run)
    say(f"ended: jobs {', '.join(map(str, ended))}" if ended else "no job of this run waits or works")
    return 0


def status(invocation: Invocation) -> int:
    run = _run_argument(invocation, "status")
    paths = RunPaths.of(run)
    config = command_config(_run_invocation([as_override("run.dir", run)])) if is_run(run) else None
    for line in job_lines(run):
        say(line)
    owner = lock_owner(run)
    if owner:
        job = f", job {owner['slurm_job']}" if owner.get("slurm_job") else ""
        say(f"loop: process {owner['pid']} on {owner['host']}{job}")
    if config is None:
        say("the run has not begun")
        return _say_going_on(run)
    manifest = Manifest.read(paths.manifest)
    step = next_step(config.loop, manifest.settled)
    done, total = progress(config.loop, manifest.settled)
    say(f"finished: {done} of {total} steps" + ("" if step else "; nothing is left to do"))
    if step is not None:
        say(f"{'now' if owner else 'next'}: {step}{_attempts(paths, step)}")
    return 0 if step is None or owner else _say_going_on(run)


def _say_going_on(run: str | Path) -> int:
    if command := going_on(run):
        say(f"no job of this run waits or works; this goes on: {command}")
    return 0


def going_on(run: str | Path) -> str:
    """The command that goes on with a run whose jobs are all over; "" while one is not, or where none was handed in."""
    lines = slurm_jobs.noted(run)
    jobs = [slurm_jobs.find_noted(run, job) for job in {line["job"] for line in lines if line["job"]}]
    if any(job is not None and job.alive for job in jobs):
        return ""
    for line in reversed(lines):
        if line.get("command"):
            return line["command"]
        if line.get("event") == "chain":
            break
    try:
        return Chain.read(run).command
    except IncompleteError:
        return ""


def _attempts(paths: RunPaths, step: Step) -> str:
    """When the step was begun, how often, and where it said why it didn't end."""
    directory = paths.phase(*step.keys[0])
    launch = read_launch(directory)
    if not launch or (directory / RESULT_FILE).exists():
        return ""
    begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(launch["started_at"]))
    return f"; attempt {launch['attempt']} began {begun}: {directory}/logs/attempt_{launch['attempt']}"


def job_lines(run: str | Path) -> list[str]:
    """One line for each job of the run that Slurm still knows, and what stands in the way of those that wait."""
    kinds = {line["job"]: line.get("kind") or "run" for line in slurm_jobs.noted(run) if line["job"]}
    jobs = {number: slurm_jobs.find_noted(run, number) for number in kinds}
    began = begun(run)
    forgotten = sum(job is None for job in jobs.values())
    lines = [f"{forgotten} earlier jobs are over, and forgotten by Slurm"] if forgotten else []
    if damaged := job_list.damage(run):
        lines.append(f"{damaged}: jobs may be missing here")
        for job in _unlisted(run):
            kinds[job.id], jobs[job.id] = job_list.kind_of(job), job
    for number, job in jobs.items():
        if job is None:
            continue
        kind = kinds[number]
        since = job.when("StartTime" if job.state in slurm_jobs.WORKING else "SubmitTime")
        when = "" if since is None else time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(since))
        where = f" on {job.nodes}" if job.nodes else ""
        again = f", queued again {job.restarts} times" if job.restarts else ""
        why = f" ({job.reason})" if job.reason else ""
        lines.append(f"job {number:<8} {kind:<8} {job.state}{why}{where}{when}{again}")
        if remedy := obstacle(job) if job.state in slurm_jobs.WAITING else refusal(job, number in began):
            lines.append(f"    {remedy}")
    return lines


def _unlisted(run: str | Path) -> list[slurm_jobs.Job]:
    try:
        return job_list.unlisted(run)
    except T1Error:
        return []


def refusal(job: slurm_jobs.Job, began: bool) -> str:
    """Why a job that is over never began; "" for one that did, and for one that somebody took out of the queue."""
    if began or job.alive:
        return ""
    node = job.fields.get("BatchHost") or "a node"
    if job.refused:
        return f"{node} didn't start it (prolog, slurmd, its spool directory): its slurmd's log there says why"
    if job.fields.get("ExitCode") in ("126:0", "127:0"):
        return f"t1 can't be run on {node}: the interpreter, or the file system it is on, isn't there"
    if job.state == "NODE_FAIL":
        return f"{node} was lost before the job began"
    return ""


def obstacle(job: slurm_jobs.Job) -> str:
    """What to do about a job that won't start by itself; "" for one that only waits for its turn."""
    if job.reason == slurm_jobs.LAUNCH_FAILED:
        return f"a node couldn't start it, so Slurm holds it: `scontrol release {job.word}` lets it try again"
    if job.reason == "JobHeldAdmin":
        return "an administrator holds it, and can release it"
    if job.reason in HELD:
        return f"it is held: `scontrol release {job.word}` lets it start"
    if job.reason == "DependencyNeverSatisfied":
        return f"it will never start: `scancel {job.word}`, then submit again"
    if job.reason in IMPOSSIBLE:
        return (
            f"it can't start as it was asked for: `scancel {job.word}`, mend cluster.slurm.sbatch_args and submit again"
        )
    return ""


def _run_invocation(words: list[str]) -> Invocation:
    return parse(*find_command(["run", *words]))


def _run_argument(invocation: Invocation, name: str) -> Path:
    parser = Parser(prog=f"t1 slurm {name}", add_help=False)
    parser.add_argument("run", type=Path)
    run = parser.parse_args(invocation.arguments).run
    if not run.is_dir():
        raise IncompleteError("no such run directory", where=str(run))
    return run.resolve()
