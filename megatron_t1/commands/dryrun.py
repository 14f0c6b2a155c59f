"""`t1 dryrun`: every rank of one or several layouts, built without GPUs and checked."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_t1.cli import Invocation
from megatron_t1.commands.configuration import print_config
from megatron_t1.commands.plan import require_vocabulary, with_vocabulary
from megatron_t1.commands.sweep import jobs
from megatron_t1.config.compose import absolute, compose, parse_overrides
from megatron_t1.config.families import installed_core_problems
from megatron_t1.config.schema import Config
from megatron_t1.config.validate import check, unbuildable
from megatron_t1.errors import T1Error
from megatron_t1.planner.dryrun import ROLES, DryRun, dry_run
from megatron_t1.planner.dryrun_report import LayoutFindings

PHASES = {"policy": "actor", "value": "critic"}
COLUMNS = ("stage", "ranks", "dense, M", "experts, M") + tuple(
    f"{part}, GiB" for part in ("weights", "gradients", "optimizer", "together")
)


def dryrun(invocation: Invocation) -> int:
    layouts = _layouts(invocation)
    if invocation.print_config:
        return max(print_config(config) for _, config in layouts)
    for _, config in layouts:
        here = not config.cluster.train.python  # a dry run starts no container
        check(
            config, more=[*unbuildable(config), *_python_problems(config), *installed_core_problems(config, here=here)]
        )
        require_vocabulary(config)
    roles = ROLES[:1] if "--policy" in invocation.flags else ROLES
    runs = [
        DryRun(name, replace(config, layout=config.layout.of(PHASES[role])), role)
        for name, config in layouts
        for role in roles
    ]
    began = time.monotonic()
    found = dry_run(
        runs,
        passes="--no-passes" not in invocation.flags,
        say=say,
    )
    for each, run in zip(found, runs, strict=True):
        print(layout_text(each, run.config))
    ranks = sum(each.visited for each in found)
    spent = sum(rank.seconds.get("all", 0.0) for each in found for rank in each.ranks[-each.visited :])
    say(f"{ranks} ranks in {time.monotonic() - began:.0f} s; {spent / ranks:.2f} s of a worker for each")
    problems = [problem for each in found for problem in each.problems()]
    if problems:
        raise T1Error("the dry run found problems:\n" + "\n".join(f"  - {problem}" for problem in problems))
    return 0


def say(line: str) -> None:
    """Progress, apart from the tables."""
    print(line, file=sys.stderr, flush=True)


def _layouts(invocation: Invocation) -> list[tuple[str, Config]]:
    """(name, configuration) of each; several where an option has several values."""
    parsed = parse_overrides(invocation.arguments)
    if any(override.is_sweep_override() for override in parsed):
        chosen = jobs(invocation.arguments)
    else:
        chosen = [("", invocation.arguments)]
    layouts = []
    for name, overrides in chosen:
        config = with_vocabulary(absolute(compose(overrides, config_dirs=invocation.config_dirs)))
        if not Path(config.model.path).is_dir():
            config.model.path = ""  # the architecture's numbers are all that is needed of it
        layouts.append((name.removeprefix("layout=") or _name(overrides, config.model.name), config))
    return layouts


def _name(overrides: Sequence[str], otherwise: str) -> str:
    return next((word.partition("=")[2] for word in reversed(overrides) if word.startswith("layout=")), otherwise)


def _python_problems(config: Config) -> list[str]:
    python = config.cluster.train.python
    return [f"cluster.train.python={python}: no such interpreter"] if python and shutil.which(python) is None else []


def layout_text(found: LayoutFindings, config: Config) -> str:
    """One layout's table, as Markdown: GiB of the fullest rank of each kind."""
    layout = config.layout
    passed = [rank.passed for rank in found.ranks[-found.visited :] if rank.passed is not None]
    lines = [
        f"### {found.name}, {PHASES[found.role]}: {layout.processes} ranks {layout.sizes_text}",
        "",
        f"megatron-core {found.core}. {found.parameters:,} parameters in {len(found.tensors):,} tensors; "
        f"{found.tokens} tokens, {found.loss_tokens} losses and {found.tokens * found.layers:,} routes of the sample "
        f"batch; forward and backward on {len(passed)} ranks. "
        + ("Each exactly once, bytes as planned." if not found.problems() else "**Problems, see below.**"),
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
        *(f"| {' | '.join(row)} |" for row in found.table()),
        "",
    ]
    return "\n".join(lines)
