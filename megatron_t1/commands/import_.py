"""`t1 import`: other people's rollouts as records."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from megatron_t1.cli import Invocation
from megatron_t1.commands.arguments import Parser
from megatron_t1.commands.configuration import require_startable
from megatron_t1.config.compose import absolute, as_override, compose, load_run_config
from megatron_t1.config.inputs import is_run
from megatron_t1.config.schema import RewardConfig
from megatron_t1.errors import ConfigError, IncompleteError, T1Error
from megatron_t1.importing.foreign import Foreign, read_contract, write
from megatron_t1.importing.harbor import TrialReader
from megatron_t1.importing.jsonlines import read_lines
from megatron_t1.importing.values import float32_problem
from megatron_t1.loop.lock import RunLock
from megatron_t1.loop.runner import opened
from megatron_t1.loop.steps import total_iterations
from megatron_t1.manifest import FinishedStep, Manifest
from megatron_t1.paths import RunPaths
from megatron_t1.phase import PhaseResult
from megatron_t1.printable import printable
from megatron_t1.trajectory.exchange import log_names
from megatron_t1.trajectory.record import Trajectory
from megatron_t1.trajectory.selection import select
from megatron_t1.trajectory.store import SUFFIX, RolloutStore


def jsonl(invocation: Invocation) -> int:
    options = _options(invocation, "t1 import jsonl")
    contract = read_contract(options.contract) if options.contract else None
    return _write(options, (item for path in options.paths for item in read_lines(path, contract)))


def harbor(invocation: Invocation) -> int:
    options = _options(invocation, "t1 import harbor")
    contract = read_contract(options.contract) if options.contract else None
    reader = TrialReader(contract, scale=options.scale, routes=not options.no_routes)
    status = _write(options, (item for path in options.paths for item in reader.read(path)))
    for name, count in sorted((+reader.ignored).items()):
        print(printable(f"not imported: {name} ({count})"))
    return status


def _options(invocation: Invocation, name: str) -> argparse.Namespace:
    parser = Parser(prog=name, add_help=False)
    parser.add_argument("paths", nargs="+", metavar="PATH")
    parser.add_argument("--out", metavar="DIR")
    parser.add_argument("--run", metavar="RUN")
    parser.add_argument("--iteration", type=int, metavar="N")
    parser.add_argument("--options", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--contract", metavar="FILE")
    if name.endswith("harbor"):
        parser.add_argument("--scale", type=float, default=RewardConfig().scale)
        parser.add_argument("--no-routes", action="store_true")
    options = parser.parse_args(invocation.arguments)
    if bool(options.out) == bool(options.run) or (options.run is None) != (options.iteration is None):
        raise ConfigError("name one place: --out DIR, or --run RUN --iteration N", where=name)
    if options.iteration is not None and options.iteration < 0:
        raise ConfigError(f"--iteration {options.iteration}: iterations count from 0", where=name)
    if options.options and not options.run:
        raise ConfigError("--options begin a run, and --out names none", where=name)
    if name.endswith("harbor") and (problem := float32_problem(options.scale)):
        raise ConfigError(f"--scale {options.scale} is {problem}", where=name)
    return options


def _write(options: argparse.Namespace, found: Iterable[Foreign | str]) -> int:
    items = list(found)
    foreign = [item for item in items if isinstance(item, Foreign)]
    skipped = [item for item in items if isinstance(item, str)]
    if not foreign:
        raise IncompleteError(
            f"nothing could be imported: {len(skipped)} trials have no token ids"
            if skipped
            else "nothing could be imported: there is no trajectory",
            where=", ".join(options.paths),
            remedy="record them: Harbor's agents do with collect_rollout_details=true" if skipped else "",
        )
    if options.out:
        out = Path(options.out)
        records = write(foreign, out)
    else:
        _require_run(options)
        out, records = _write_rollout(foreign, RunPaths.of(options.run), options.iteration)
    selection = select(records)
    proven = sum(bool(item.exchanges) for item in foreign)
    print(f"{len(records)} trajectories, {sum(map(len, records)):,} tokens, "
          f"{sum(int(record.loss_mask.sum()) for record in records):,} with loss: {out}")  # fmt: skip
    print(f"{proven} with the requests that made them; PPO can train on {len(selection.kept)}")
    for reason, count in sorted(selection.counts.items()):
        print(f"  {count} left out by PPO: {reason}")
    if skipped:
        print(f"{len(skipped)} trials without token ids were left out, for example {printable(skipped[0])}")
    print(f"next: t1 audit {out}")
    return 0


def _require_run(options: argparse.Namespace) -> None:
    """Begin the run with --options where there is none yet.

    Raises:
        IncompleteError: there is none, and no options to begin one with.
        ConfigError: the options clash, or the run has its own.
    """
    root = RunPaths.of(options.run).root
    if is_run(root):
        if options.options:
            raise ConfigError(
                f"{options.run} is a run, which has its options already",
                where="--options",
                remedy="leave them out, or name another run",
            )
        return
    if not options.options:
        raise IncompleteError(
            "there is no run",
            where=options.run,
            remedy="name the run.dir of a `t1 run`; or begin one with --options model.path=..., as `t1 run` takes them",
        )
    config = absolute(compose([*options.options, as_override("run.dir", root)]))
    require_startable(config, ["model.path"])
    with opened(config, kinds=("train",)):
        pass


def _write_rollout(foreign: list[Foreign], paths: RunPaths, iteration: int) -> tuple[Path, list[Trajectory]]:
    """Store trajectories as the finished rollout of an iteration that has none; nobody else changes the run meanwhile.

    Raises:
        T1Error: a loop works on the run, it has no such iteration, the step is finished, or records lie in its
            directory.
    """
    out, directory = paths.rollouts(iteration), paths.phase(iteration, "rollout")
    with RunLock(paths.root):
        manifest, total = Manifest.read(paths.manifest), total_iterations(load_run_config(paths.root).loop)
        if iteration >= total:
            raise T1Error(
                f"the run has {total} iterations, counted from 0, and so none with the number {iteration}",
                where=str(paths.root),
                remedy="name another iteration, or begin a run with more (loop.warmup_iterations, loop.iterations)",
            )
        if (iteration, "rollout") in manifest.keys:
            raise T1Error(
                f"the rollout of iteration {iteration} is finished",
                where=str(paths.manifest),
                remedy="name an iteration that has none, or write to --out DIR",
            )
        if any(out.glob(f"*{SUFFIX}")) or log_names(out):
            raise T1Error(
                f"records of iteration {iteration} are there already",
                where=str(out),
                remedy="name another iteration, or move this directory away first",
            )
        records = write(foreign, out)
        result = PhaseResult("rollout", iteration, outputs=RolloutStore(out).written_files(paths.root))
        result.write(directory)
        manifest.finished.append(
            FinishedStep.of(result, directory, launch="import", inputs={}, seconds=0.0, attempts=1)
        )
        manifest.write(paths.manifest)
    return out, records
