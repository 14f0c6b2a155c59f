"""`t1 reward analyze`: what the reward would see in stored trials."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

from megatron_t1.cli import Invocation
from megatron_t1.commands.arguments import Parser
from megatron_t1.errors import ConfigError


def analyze(invocation: Invocation) -> int:
    parser = Parser(prog="t1 reward analyze", add_help=False)
    parser.add_argument("paths", nargs="+", metavar="PATH")
    parser.add_argument("--out", metavar="FILE")
    parser.add_argument("--scale", type=float, default=0.25)
    parser.add_argument("--top", type=int, default=10)
    options = parser.parse_args(invocation.arguments)
    if not 0 < options.scale < math.inf or options.top < 1:
        raise ConfigError("--scale must be a finite number larger than 0, and --top at least 1")
    from megatron_t1 import atomic
    from megatron_t1.environment.trials import read_trials
    from megatron_t1.report.reward_view import print_analysis
    from megatron_t1.report.rewards import analyze as analyze_trials

    paths = list(dict.fromkeys(Path(path).resolve() for path in options.paths))
    paths = [path for path in paths if not any(other in path.parents for other in paths)]  # a trial counts once
    trials = [trial for path in paths for trial in read_trials(path)]
    found = analyze_trials(trials, scale=options.scale, one_run=len(paths) == 1)
    print_analysis(found, top=options.top)
    if options.out:
        atomic.write_json(Path(options.out), {"paths": [str(Path(path)) for path in options.paths], **asdict(found)})
        print(f"written: {options.out}")
    return 0
