"""`t1 show`, `t1 verify`, `t1 compare` and `t1 inspect`: read a run or a file, change nothing (but plots)."""

from __future__ import annotations

from pathlib import Path

from megatron_t1.cli import Invocation
from megatron_t1.commands.arguments import Parser
from megatron_t1.errors import ConfigError, IncompleteError
from megatron_t1.loop.outside import phase_outside_the_loop


def show(invocation: Invocation) -> int:
    parser = Parser(prog="t1 show", add_help=False)
    parser.add_argument("run")
    parser.add_argument("--trajectory", metavar="ID")
    parser.add_argument("--trajectories", action="store_true")
    parser.add_argument("--plots", action="store_true")
    parser.add_argument("--evaluations", action="store_true")
    options = parser.parse_args(invocation.arguments)
    if not Path(options.run).is_dir():
        raise IncompleteError("no such run directory", where=options.run)
    if options.trajectory:
        from megatron_t1.report.transcript import print_transcript

        print_transcript(options.run, options.trajectory)
    elif options.trajectories:
        from megatron_t1.report.transcript import print_trajectories

        print_trajectories(options.run)
    elif options.evaluations:
        from megatron_t1.report.comparison import evaluations_of
        from megatron_t1.report.evaluation import evaluate_summary, print_evaluation

        for directory in evaluations_of(options.run):
            print_evaluation(evaluate_summary(directory))
    elif phase := phase_outside_the_loop(Path(options.run)):
        from megatron_t1.report.outside import print_outside, write_warmup_plot

        if options.plots and phase == "warmup":
            print(write_warmup_plot(options.run))
            return 0
        print_outside(options.run)
    else:
        from megatron_t1.report.show import print_run

        if options.plots:
            from megatron_t1.report.plots import write_plots

            for path in write_plots(options.run):
                print(path)
            return 0
        print_run(options.run)
    return 0


def verify(invocation: Invocation) -> int:
    parser = Parser(prog="t1 verify", add_help=False)
    parser.add_argument("run")
    options = parser.parse_args(invocation.arguments)
    from megatron_t1.loop.verify import verify_run
    from megatron_t1.printable import printable

    found = verify_run(options.run)
    for problem in found.problems:
        print(printable(problem))
    gone = f"; {found.retired} directories were deleted by policy" if found.retired else ""
    said = f"{len(found.problems)} problems" if found.problems else "nothing has changed"
    print(f"{found.files} files ({found.size / 2**20:,.1f} MiB): {said} since they were written{gone}")
    return int(bool(found.problems))


def inspect(invocation: Invocation) -> int:
    parser = Parser(prog="t1 inspect", add_help=False)
    parser.add_argument("file")
    parser.add_argument("--trajectory", metavar="ID", default="")
    parser.add_argument("--tokenizer", metavar="DIR")
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args(invocation.arguments)
    if Path(options.file).is_dir():
        raise IncompleteError(
            "this is a directory; `t1 inspect` shows one record, shard or exchange log",
            where=options.file,
            remedy="name a file in it; `t1 show RUN` shows a run, `t1 audit DIR` checks all records of a directory",
        )
    from megatron_t1.report.record_view import print_file

    print_file(options.file, trajectory=options.trajectory, tokenizer=options.tokenizer, every_span=options.all)
    return 0


def compare(invocation: Invocation) -> int:
    parser = Parser(prog="t1 compare", add_help=False)
    parser.add_argument("a")
    parser.add_argument("b", nargs="?")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=10_000)
    options = parser.parse_args(invocation.arguments)
    if options.samples < 100:
        raise ConfigError("--samples must be at least 100")
    from megatron_t1.report.comparison import evaluations_of, print_comparison

    if options.b is None:
        found = evaluations_of(options.a)
        if len(found) < 2:
            raise IncompleteError("the run has fewer than two evaluations", where=options.a)
        sides = found[0], found[-1]
    else:
        sides = evaluations_of(options.a)[-1], evaluations_of(options.b)[-1]
    print_comparison(*sides, samples=options.samples, seed=options.seed)
    return 0
