"""`t1 audit`: does training see exactly what the sampler saw and produced?"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from megatron_t1.audit.baseline import Baseline, baseline_format, format_of_record
from megatron_t1.audit.findings import TrajectoryAudit
from megatron_t1.audit.report import as_json, print_report, require_writable, write
from megatron_t1.audit.rescore import Rescored, can_rescore, choose, rescore
from megatron_t1.audit.run import UNREADABLE, TargetAudit, audit_target, exit_status
from megatron_t1.audit.targets import Target, find_all
from megatron_t1.cli import Invocation
from megatron_t1.commands.arguments import Parser
from megatron_t1.config.schema import EngineConfig
from megatron_t1.errors import ConfigError, IncompleteError, T1Error
from megatron_t1.paths import RunPaths
from megatron_t1.printable import printable
from megatron_t1.report.show import make_console
from megatron_t1.trajectory.record import Trajectory


def audit(invocation: Invocation) -> int:
    """Exit status: 0 clean; 1 anything is wrong; 2 input that can't be read."""
    options = _options(invocation)
    try:
        if options.report:
            require_writable(options.report)
        return _audit(options, find_all(options.paths))
    except IncompleteError as error:
        print("error: " + "\n".join(map(printable, str(error).splitlines())), file=sys.stderr)
        return UNREADABLE


def _audit(options: argparse.Namespace, targets: list[Target]) -> int:
    audits: list[TargetAudit] = []
    baselines: list[Baseline | None] = []
    rescored: list[Rescored | None] = []
    model = Path(options.model) if options.model else None
    wanted = [
        _Baseline(target, model, options.chat_format) if options.baseline and target.holds_records else None
        for target in targets
    ]  # before the work: a model that isn't named is said at once
    for target, baseline in zip(targets, wanted, strict=True):
        held: dict[str, tuple[Trajectory, TrajectoryAudit]] = {}

        def visit(record: Trajectory, found: TrajectoryAudit, baseline=baseline, held=held) -> None:
            if baseline is not None:
                baseline.add(record)
            if options.rescore and can_rescore(record):
                held[record.header.trajectory_id] = record, found

        audits.append(audit_target(target, visit=visit))
        baselines.append(baseline.counted if baseline is not None else None)
        wants_scores = options.rescore and target.holds_records
        rescored.append(_rescore(target, held, options.rescore, model) if wants_scores else None)
    if options.report:
        write(options.report, as_json(audits, baselines, rescored))
    print_report(audits, baselines, rescored, make_console())
    return exit_status(audits)


def _options(invocation: Invocation) -> argparse.Namespace:
    parser = Parser(prog="t1 audit", add_help=False)
    parser.add_argument("paths", nargs="+", metavar="PATH")
    parser.add_argument("--report", metavar="FILE")
    parser.add_argument("--baseline", choices=["rerender"])
    parser.add_argument("--rescore", type=int, default=0, metavar="N")
    parser.add_argument("--model", metavar="DIR")
    parser.add_argument("--chat-format", metavar="NAME")
    options = parser.parse_args(invocation.arguments)
    if options.rescore < 0:
        raise ConfigError("--rescore takes a number of trajectories")
    if options.chat_format and not options.baseline:
        raise ConfigError("--chat-format is of the baseline", remedy="say --baseline rerender as well, or leave it out")
    if options.model and not (options.baseline or options.rescore):
        raise ConfigError(
            "--model is of the baseline and of the scores",
            remedy="say --baseline rerender or --rescore N, or leave it out",
        )
    return options


class _Baseline:
    """Counts the baseline of one target.

    The format is the one that was asked for, or the run's own; outside a run that of the first record's contract, if it
    is a known one. A target without one has no baseline, which the report says.
    """

    def __init__(self, target: Target, model: Path | None, chat_format: str | None):
        self.model = model or _model_of(target, "--baseline")
        self.name = chat_format or (target.run.model.chat_format if target.run is not None else "")
        self.counted = Baseline(self.name)
        self._chat = baseline_format(chat_format, self.model) if chat_format else None

    def add(self, record: Trajectory) -> None:
        if self.counted.problem:
            return
        try:
            if self._chat is None:
                self.counted.chat_format = self.name or format_of_record(record.header)
                self._chat = baseline_format(self.counted.chat_format, self.model)
            self.counted.add(record, self._chat)
        except T1Error as error:
            self.counted.problem = " ".join(error.problem.split())


def _rescore(
    target: Target, held: dict[str, tuple[Trajectory, TrajectoryAudit]], count: int, model: Path | None
) -> Rescored:
    if not held:  # none of temperature 1 and top-p 1
        return Rescored()
    sample = [held[name] for name in choose(list(held), count)]
    engine = target.run.rollout.engine if target.run is not None else EngineConfig()
    with tempfile.TemporaryDirectory(prefix="t1-audit-") as scratch:
        log_path = Path(scratch) / "engine.log"
        return asyncio.run(
            rescore(sample, model or _model_of(target, "--rescore"), engine, log_path=log_path),
        )


def _model_of(target: Target, option: str) -> Path:
    """The model directory that sampled a target's records: the run's export of that policy."""
    if target.policy is None:
        raise ConfigError(f"{option} needs --model DIR: {target.label} belongs to no run")
    return RunPaths.of(target.run.run.dir).hf(target.policy, target.run.model.path)
