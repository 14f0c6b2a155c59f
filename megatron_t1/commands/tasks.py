"""`t1 tasks check`, `t1 tasks overlap`, `t1 tasks convert`: other people's tasks, before a training meets them."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from megatron_t1 import atomic
from megatron_t1.cli import Invocation
from megatron_t1.commands.arguments import Parser
from megatron_t1.commands.configuration import command_config
from megatron_t1.config.validate import check as check_config
from megatron_t1.errors import ConfigError, T1Error

SHOWN, SHOWN_REASON = 40, 400  # rows of a table, and characters of a reason; all of it is in a file


def check(invocation: Invocation) -> int:
    """Exit status 1 when a task is not sound."""
    from rich.text import Text

    from megatron_t1.environment.check import LIST, TABLE, Checked, TaskCheck, summary
    from megatron_t1.environment.proof import Status
    from megatron_t1.report.show import make_console, make_table
    from megatron_t1.rollout.pool import run_pool, sandbox_maker

    overrides = [word for word in invocation.arguments if "=" in word and not word.startswith("-")]
    parser = Parser(prog="t1 tasks check", add_help=False)
    parser.add_argument("tasks", metavar="DIR")
    parser.add_argument("--out", metavar="OUT")
    parser.add_argument("--workers", type=int, default=8, metavar="N")
    parser.add_argument("--repeats", type=int, default=2, metavar="N")
    parser.add_argument("--limit", type=int, default=0, metavar="N")
    parser.add_argument("--again", action="append", default=[], metavar="STATUS", choices=Status.ALL)
    parser.add_argument("--with-unproven", action="store_true")
    options = parser.parse_args([word for word in invocation.arguments if word not in overrides])
    if min(options.workers, options.repeats) < 1 or options.limit < 0:
        raise ConfigError("--workers and --repeats count from 1, --limit from 0", where="t1 tasks check")
    config = command_config(Invocation(invocation.command, overrides))
    check_config(config)
    tasks = Path(options.tasks)
    place = tasks.resolve()
    name = place.stem if place.is_file() else place.name
    out = Path(options.out) if options.out else place.with_name(f"{name}-checked")
    began, shown = time.monotonic(), {"done": 0}

    def tell(checked: Checked) -> None:
        shown["done"] += 1
        seconds = sum(checked.proof.seconds.values())
        print(f"[{shown['done']}/{total}] {checked.name}: {checked.proof.status} ({seconds:.1f} s)", flush=True)

    job = TaskCheck(
        tasks, out, config.env, repeats=options.repeats, again=options.again, limit=options.limit, tell=tell
    )
    total = len(job.pending)
    if total < len(job.folders):
        print(f"{len(job.folders) - total} of {len(job.folders)} are known already")
    if total:
        workers = min(options.workers, total)
        asyncio.run(run_pool(job.pending, job.play, workers=workers, make_sandbox=sandbox_maker(config.env)))
    results = job.finish(unproven=options.with_unproven)
    unsound = [checked for checked in results if checked.proof.status != Status.PROVEN]
    table = make_table()
    for column in ("task", "status", "why"):
        table.add_column(column, overflow="fold")
    for checked in unsound[:SHOWN]:
        table.add_row(checked.name, checked.proof.status, Text(" ".join(checked.proof.reason.split())[:SHOWN_REASON]))
    if unsound:
        make_console().print(table)
    if len(unsound) > SHOWN:
        print(f"and {len(unsound) - SHOWN} more")
    print(f"{summary(results)}, {time.monotonic() - began:.0f} s; table: {out / TABLE}")
    listed = {Status.PROVEN, Status.UNPROVEN} if options.with_unproven else {Status.PROVEN}
    if any(checked.proof.status in listed for checked in results):
        print(f"to train on: env.tasks={out / LIST}")
    if Status.UNPROVEN not in listed and any(checked.proof.status == Status.UNPROVEN for checked in results):
        print("--with-unproven lists tasks without a reference solution as well")
    return int(any(checked.proof.status not in listed for checked in results))


def overlap(invocation: Invocation) -> int:
    """Exit status 1 when more of the benchmark is in the training set than --max allows."""
    from megatron_t1.environment.overlap import NEAR_DUPLICATE, NGRAM, PARTS, load_documents, measure
    from megatron_t1.report.show import make_console, make_table

    parser = Parser(prog="t1 tasks overlap", add_help=False)
    parser.add_argument("train", metavar="TRAIN")
    parser.add_argument("benchmark", metavar="BENCHMARK")
    parser.add_argument("--ngram", type=int, default=NGRAM, metavar="N")
    parser.add_argument("--pairs", type=int, default=10, metavar="N")
    parser.add_argument("--max", type=float, default=1.0, metavar="SHARE")
    parser.add_argument("--out", metavar="FILE")
    options = parser.parse_args(invocation.arguments)
    if options.ngram < 1 or options.pairs < 0 or not 0 <= options.max <= 1:
        raise ConfigError("--ngram counts from 1, --pairs from 0, --max lies in [0, 1]", where="t1 tasks overlap")
    found = measure(load_documents(options.train), load_documents(options.benchmark), ngram=options.ngram)
    console = make_console()
    table = make_table(f"{found.benchmark} benchmark tasks against {found.train} of the training set")
    for column in ("part", f"{options.ngram}-grams", "in the training set", "share", "tasks touched", "scaffold"):
        table.add_column(column)
    for name, part in found.parts.items():
        table.add_row(name, f"{part.ngrams:,}", f"{part.shared:,}", f"{part.share:.4f}", str(part.touched),
                      f"{part.scaffold:.2f}")  # fmt: skip
    console.print(table)
    if options.pairs and found.pairs:
        table = make_table("worst pairs: containment / similarity")
        for column in ("benchmark", "training set", *PARTS):
            table.add_column(column, overflow="fold")
        for pair in found.pairs[: options.pairs]:
            shares = [f"{pair.containment.get(part, 0):.2f} / {pair.similarity.get(part, 0):.2f}" for part in PARTS]
            table.add_row(pair.benchmark, pair.train, *shares)
        console.print(table)
    print(f"files that are the same: {len(found.same_files)}")
    for train, benchmark, name in found.same_files[: options.pairs]:
        print(f"  {benchmark}: {name}, also in {train}")
    print(f"near-duplicates (similarity {NEAR_DUPLICATE} or more): {len(found.duplicated)} of {found.benchmark} tasks "
          f"of the benchmark, share {found.share:.4f}")  # fmt: skip
    if options.out:
        atomic.write_json(options.out, found.to_json())
        print(f"all pairs: {options.out}")
    return int(found.share > options.max)


def convert(invocation: Invocation) -> int:
    """Exit status 1 when a task could not be converted; the others are written."""
    from megatron_t1.environment.terminal_bench import TASK_FILE, convert

    parser = Parser(prog="t1 tasks convert", add_help=False)
    parser.add_argument("source", metavar="DIR")
    parser.add_argument("out", metavar="OUT")
    options = parser.parse_args(invocation.arguments)
    source, out = Path(options.source), Path(options.out)
    found = sorted(source.glob(f"*/{TASK_FILE}")) or [source / TASK_FILE] * (source / TASK_FILE).is_file()
    if not found:
        raise T1Error(
            f"no task (folder with {TASK_FILE}) in it", where=str(source), remedy="name the folder above them"
        )
    failed = 0
    for file in found:
        target = out / file.parent.resolve().name
        try:
            if target.exists():
                raise T1Error("it is there already", where=str(target), remedy="remove it, or name another OUT")
            convert(file.parent, target)
        except T1Error as error:
            failed += 1
            print(f"{file.parent.name}: {error.problem}", file=sys.stderr)
    print(f"{len(found) - failed} of {len(found)} tasks converted: {out}")
    return int(failed > 0)
