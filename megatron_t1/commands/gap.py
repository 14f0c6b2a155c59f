"""`t1 gap`: what does the gap between sampler and trainer of a rollout consist of?"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_t1 import atomic
from megatron_t1.attribution.findings import Scored, findings
from megatron_t1.attribution.job import OUTCOME_FILE, Job
from megatron_t1.attribution.measures import Step
from megatron_t1.attribution.report import FEW, print_report
from megatron_t1.attribution.retokenised import Retokenised, retokenise
from megatron_t1.attribution.settings import Alternative, Kept, alternatives, as_trained
from megatron_t1.audit.baseline import baseline_format
from megatron_t1.audit.report import require_writable
from megatron_t1.audit.rescore import choose
from megatron_t1.cli import Invocation
from megatron_t1.commands.arguments import Parser
from megatron_t1.commands.configuration import model_problems
from megatron_t1.commands.run import STARTS_AGAIN, say, stoppable
from megatron_t1.config.compose import load_run_config
from megatron_t1.config.inputs import device_problems, missing_inputs
from megatron_t1.config.schema import Config
from megatron_t1.config.validate import unbuildable
from megatron_t1.errors import ConfigError, IncompleteError, T1Error
from megatron_t1.loop.launcher import PhaseCommand, make_launcher, require_success
from megatron_t1.loop.outside import OUTSIDE, phase_outside_the_loop
from megatron_t1.loop.runner import stop_signals
from megatron_t1.paths import Counters, RunPaths, number_of, numbered
from megatron_t1.report.show import make_console
from megatron_t1.report.transcript import VISIBLE
from megatron_t1.rollout.formats import ChatFormat
from megatron_t1.trajectory.record import Trajectory
from megatron_t1.trajectory.selection import select
from megatron_t1.trajectory.sidecar import read_sidecar
from megatron_t1.trajectory.store import RolloutStore

SAMPLE = 64  # trajectories; ours
WORST = 10  # tokens kept of each setting
UPDATES = "every policy of this run that sampled something is deleted; raise train.keep_checkpoints"


def gap(invocation: Invocation) -> int:
    options = _options(invocation)
    config = load_run_config(options.run)
    _require_scorable(config)
    paths = RunPaths.of(options.run)
    kept = Kept.of(paths, config.model.path)
    iteration = _iteration(config, paths, kept, options.iteration)
    suffix = ".no_replay.json" if options.no_replay else ".json"
    out = Path(options.out or paths.root / "gap" / f"{paths.rollouts(iteration).name}{suffix}")
    require_writable(out)
    rollout = _Rollout.read(config, paths, iteration, options.sample, options.seed)
    policy = Counters(iteration, config.loop.warmup_iterations).policy
    baseline = as_trained(config, policy, kept, replay=config.train.replay.actor and not options.no_replay)
    streams, reason = _retokenised(rollout)
    has_routes = all(record.routes is not None for record in rollout.records)
    others, not_measured = alternatives(baseline.setting, kept, has_routes=has_routes, rerendered=reason)
    job = Job([record.header.trajectory_id for record in rollout.records], baseline, others, kept)

    def work() -> int:
        scored = _scored(config, iteration, job, rollout.records, streams, out)
        report = {
            "run": str(paths.root),
            "iteration": iteration,
            "policy": policy,
            "trajectories": rollout.trainable,
            "sample": len(rollout.records),
            "of_other_policies": sum(bool(set(r.header.policy_versions) - {policy}) for r in rollout.records),
            "contract": rollout.records[0].header.contract.to_json(),
            "layout": dict(vars(config.layout)),
            "retokenised": None if rollout.chat is None else _drift(rollout.records, streams),
            "not_measured": not_measured,
            **findings(scored, rollout.decode, max(WORST, options.worst)),
        }
        atomic.write_json(out, report)
        print_report(report, make_console(), worst=options.worst)
        say(f"report: {out}")
        return 0

    return stoppable(work, afterwards=STARTS_AGAIN)


def _options(invocation: Invocation) -> argparse.Namespace:
    parser = Parser(prog="t1 gap", add_help=False)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--iteration", type=int, default=-1, metavar="N")
    parser.add_argument("--sample", type=int, default=SAMPLE, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--worst", type=int, default=5, metavar="N")
    parser.add_argument("--no-replay", action="store_true")
    parser.add_argument("--out", metavar="FILE")
    options = parser.parse_args(invocation.arguments)
    if min(options.sample, options.worst, options.seed) < 0 or options.iteration < -1:
        raise ConfigError("--iteration, --sample, --worst and --seed take numbers that aren't negative")
    if 0 < options.sample < FEW:
        raise ConfigError(
            f"--sample {options.sample}: what a gap consists of can't be told from fewer than {FEW} "
            "trajectories; 0 takes all"
        )
    if not RunPaths.of(options.run).config.is_file():
        raise IncompleteError("there is no run", where=options.run, remedy="name the run.dir of a `t1 run`")
    if phase := phase_outside_the_loop(RunPaths.of(options.run).root):
        raise IncompleteError(
            f"this directory holds {OUTSIDE[phase].what}, which samples nothing",
            where=options.run,
            remedy="name the run.dir of a `t1 run`",
        )
    return options


def _require_scorable(config: Config) -> None:
    """Raise ConfigError with everything that would make the passes fail. What only rollouts need isn't looked at."""
    problems = [
        *missing_inputs(config, ["model.path"]), *unbuildable(config), *model_problems(config), *device_problems(config)
    ]  # fmt: skip
    if problems:
        raise ConfigError("\n".join(["the run's model can't be scored here:", *(f"  - {line}" for line in problems)]))


def _iteration(config: Config, paths: RunPaths, kept: Kept, wanted: int) -> int:
    """The rollout to look at: the wanted one, or the newest whose policy is still there.

    Raises:
        IncompleteError: there is no such rollout, or its policy was deleted; names those that can be scored.
    """
    rollouts = [number_of(directory) for directory in numbered(paths.rollouts(0).parent)]
    policy = {number: Counters(number, config.loop.warmup_iterations).policy for number in rollouts}
    possible = [number for number in rollouts if policy[number] in kept.versions]
    if wanted < 0 and possible:
        return possible[-1]
    if wanted in possible:
        return wanted
    problem = f"policy {policy[wanted]}, which sampled it, is deleted" if wanted in policy else "there is no rollout"
    raise IncompleteError(
        problem,
        where=str(paths.rollouts(max(wanted, 0))),
        remedy=f"--iteration can be: {', '.join(map(str, possible))}" if possible else UPDATES,
    )


@dataclass(frozen=True)
class _Rollout:
    """The sample of a rollout, and the format its text is read with.

    Attributes:
        trainable: trajectories of the rollout that training takes.
        chat: None where the format can't render them again; `reason` says why.
    """

    records: list[Trajectory]
    trainable: int
    chat: ChatFormat | None
    reason: str

    @classmethod
    def read(cls, config: Config, paths: RunPaths, iteration: int, sample: int, seed: int) -> _Rollout:
        store = RolloutStore(paths.rollouts(iteration))
        selection = select(store, timed_out_policy=config.env.timed_out_policy)
        names = [record.header.trajectory_id for record in selection.kept if record.header.contract is not None]
        if not names:
            raise IncompleteError("no trajectory can be trained on", where=str(store.directory))
        records = [store.load(name, verify=True) for name in choose(names, sample or len(names), seed)]
        chat, reason = None, ""
        try:
            chat = baseline_format(config.model.chat_format, config.model.path)
        except T1Error as error:
            reason = error.problem
        return cls(records, len(names), chat, reason)

    def decode(self, ids: np.ndarray) -> str:
        """Text of ids; the ids themselves where there is no format to read them with."""
        if self.chat is None:
            return "".join(f"[{token}]" for token in ids.tolist())
        return self.chat.decode(ids).translate(VISIBLE)


def _retokenised(rollout: _Rollout) -> tuple[dict[str, Retokenised], str]:
    """Streams that come out otherwise, by digest; and why there are none to score."""
    if rollout.chat is None:
        return {}, rollout.reason
    made = {record.digest: retokenise(record, rollout.chat) for record in rollout.records}
    streams = {digest: stream for digest, stream in made.items() if stream is not None}
    return streams, "" if streams else "every trajectory comes out as the ids that were sampled"


def _drift(records: list[Trajectory], streams: dict[str, Retokenised]) -> dict[str, int]:
    """How many trajectories come out otherwise, their loss tokens, and those of them without a counterpart."""
    changed = [record for record in records if record.digest in streams]
    lost = sum(
        int((streams[record.digest].counterparts(len(record))[record.loss_mask] < 0).sum()) for record in changed
    )
    return {"changed": len(changed), "tokens": sum(int(record.loss_mask.sum()) for record in changed), "lost": lost}


def _scored(
    config: Config,
    iteration: int,
    job: Job,
    records: list[Trajectory],
    streams: dict[str, Retokenised],
    out: Path,
) -> Scored:
    """Launch the scoring processes, as the run's training phases are launched, and read what they leave."""
    with _workplace(out) as directory:
        job.write(directory, streams)
        run_dir = str(RunPaths.of(config.run.dir).root)
        command = PhaseCommand(
            "gap", "train", "megatron_t1.training.rescoring",
            ("--run", run_dir, "--iteration", str(iteration), "--job", str(directory)),
            config.layout.processes, distributed=True,
        )  # fmt: skip
        with stop_signals() as received:
            launcher = make_launcher(config, lambda: received[0] if received else 0)
            problems = launcher.preflight()
            if problems:
                raise T1Error("it can't be scored here:\n" + "\n".join(f"  - {problem}" for problem in problems))
            exit_ = launcher.launch(command, directory / "logs", echo=lambda line: say(f"    {line}"))
            require_success(exit_, command)
        outcome: dict[str, Any] = json.loads((directory / OUTCOME_FILE).read_text())
        sidecar = read_sidecar(directory)
        scores = [{name: np.array(array) for name, array in sidecar[record.digest].items()} for record in records]
    found = [Alternative.from_json(raw) for raw in outcome["alternatives"]]
    named = {alternative.name: alternative for alternative in found}
    return Scored(records, scores, named, outcome["routes"], [Step(**step) for step in outcome["steps"]])


@contextlib.contextmanager
def _workplace(out: Path) -> Iterator[Path]:
    """A directory of its own beside the report, where all nodes see it; what failed leaves it with its logs."""
    place = out.resolve().parent
    place.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=f"{out.name}.work.", dir=place))
    yield directory
    shutil.rmtree(directory)
