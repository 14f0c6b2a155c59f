"""`t1 import`: other people's rollouts as records."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from megatron_t1.cli import Invocation
from megatron_t1.commands.arguments import Parser
from megatron_t1.config.schema import RewardConfig
from megatron_t1.errors import ConfigError, IncompleteError
from megatron_t1.importing.foreign import Foreign, read_contract, write
from megatron_t1.importing.harbor import read_trials
from megatron_t1.importing.jsonlines import read_lines
from megatron_t1.paths import RunPaths
from megatron_t1.phase import PhaseResult
from megatron_t1.trajectory.selection import select
from megatron_t1.trajectory.store import RolloutStore


def jsonl(invocation: Invocation) -> int:
    options = _options(invocation, "t1 import jsonl")
    contract = read_contract(options.contract) if options.contract else None
    return _write(options, (item for path in options.paths for item in read_lines(path, contract)))


def harbor(invocation: Invocation) -> int:
    options = _options(invocation, "t1 import harbor")
    contract = read_contract(options.contract) if options.contract else None
    return _write(
        options, (item for path in options.paths for item in read_trials(path, contract, scale=options.scale))
    )


def _options(invocation: Invocation, name: str) -> argparse.Namespace:
    parser = Parser(prog=name, add_help=False)
    parser.add_argument("paths", nargs="+", metavar="PATH")
    parser.add_argument("--out", metavar="DIR")
    parser.add_argument("--run", metavar="RUN")
    parser.add_argument("--iteration", type=int, metavar="N")
    parser.add_argument("--contract", metavar="FILE")
    if name.endswith("harbor"):
        parser.add_argument("--scale", type=float, default=RewardConfig().scale)
    options = parser.parse_args(invocation.arguments)
    if bool(options.out) == bool(options.run) or (options.run is None) != (options.iteration is None):
        raise ConfigError("name one place: --out DIR, or --run RUN --iteration N", where=name)
    return options


def _write(options: argparse.Namespace, found: Iterable[Foreign | str]) -> int:
    items = list(found)
    foreign = [item for item in items if isinstance(item, Foreign)]
    skipped = [item for item in items if isinstance(item, str)]
    if not foreign:
        raise IncompleteError(
            f"nothing could be imported: {len(skipped)} trials have no token ids",
            where=", ".join(options.paths),
            remedy="record them: Harbor's agents do with collect_rollout_details=true",
        )
    out = Path(options.out) if options.out else RunPaths.of(options.run).rollouts(options.iteration)
    records = write(foreign, out)
    if options.run:
        paths = RunPaths.of(options.run)
        result = PhaseResult("rollout", options.iteration, outputs=RolloutStore(out).written_files(paths.root))
        result.write(paths.phase(options.iteration, "rollout"))
    selection = select(records)
    proven = sum(bool(item.exchanges) for item in foreign)
    print(f"{len(records)} trajectories, {sum(map(len, records)):,} tokens, "
          f"{sum(int(record.loss_mask.sum()) for record in records):,} with loss: {out}")  # fmt: skip
    print(f"{proven} with the requests that made them; PPO can train on {len(selection.kept)}")
    for reason, count in sorted(selection.counts.items()):
        print(f"  {count} left out by PPO: {reason}")
    if skipped:
        print(f"{len(skipped)} trials without token ids were left out, for example {skipped[0]}")
    print(f"next: t1 audit {out}")
    return 0
