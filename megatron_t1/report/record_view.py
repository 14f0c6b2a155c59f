"""`t1 inspect FILE`: one record, shard or exchange log, from the file alone: header, spans, and where the loss is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from megatron_t1.errors import IncompleteError
from megatron_t1.printable import printable
from megatron_t1.report.show import make_console, make_table, print_table
from megatron_t1.report.transcript import STYLES, token_decoder
from megatron_t1.trajectory.exchange import is_log
from megatron_t1.trajectory.exchange_reader import read_exchange
from megatron_t1.trajectory.record import Header, Origin, Trajectory, load
from megatron_t1.trajectory.store import SHARD_SUFFIX, RolloutStore
from megatron_t1.trajectory.views import route_coverage, spans

IDS_SHOWN = 12  # of a span, without a tokenizer
SPANS_SHOWN = 200
NEWLINE = "\u21b5"  # so that a span of nothing else is seen


def print_file(
    path: str | Path,
    *,
    trajectory: str = "",
    tokenizer: str | Path | None = None,
    every_span: bool = False,
    console: Console | None = None,
) -> None:
    """Print what `path` holds; of a shard, the list of its records, or the one called `trajectory`.

    Args:
        tokenizer: model directory with a tokenizer.json: text instead of ids.
        every_span: also of trajectories with more than SPANS_SHOWN.

    Raises:
        IncompleteError: it can't be read, was changed since it was written, or has no such trajectory.
    """
    path, console = Path(path), console or make_console()
    decode = token_decoder(Path(tokenizer)) if tokenizer else None
    if is_log(path.name):
        print_log(path, console)
        return
    if path.name.endswith(SHARD_SUFFIX):
        store = RolloutStore(path.parent)
        names = store.sealed_ids(path.name)
        if not trajectory:
            _print_list(path, {name: store.load(name, verify=True) for name in names}, console)
            return
        if trajectory not in names:
            raise IncompleteError(f"there is no trajectory {trajectory!r}", where=str(path))
        record = store.load(trajectory, verify=True)
    else:
        record = load(path, verify=True)
    print_record(record, console, decode=decode, every_span=every_span)


def print_record(
    record: Trajectory,
    console: Console,
    *,
    decode: Callable[[list[int]], str] | None = None,
    every_span: bool = False,
) -> None:
    _print_header(record, console)
    table = make_table()
    for title in ("token", "turn", "tokens"):
        table.add_column(title, justify="right")
    table.add_column("origin")
    table.add_column("loss", justify="right")
    table.add_column("mean\nlog-prob", justify="right")
    table.add_column("text" if decode else "ids", overflow="fold")
    found = spans(record)
    loss = record.loss_mask
    shown = found if every_span else found[:SPANS_SHOWN]
    for span in shown:
        ids, carry = record.ids[span.start : span.stop], int(loss[span.start : span.stop].sum())
        style = STYLES[span.origin]
        mean = ""
        if span.origin == Origin.SAMPLED:
            mean = f"{float(np.mean(record.logprobs[span.start : span.stop])):.3f}"
        content = printable(decode(ids.tolist()).replace("\n", NEWLINE)) if decode else _few(ids)
        table.add_row(
            str(span.start), str(span.turn), str(span.stop - span.start), Text(span.origin.name.lower(), style=style),
            Text(str(carry) if carry else "", style="bold green"), mean, Text(content, style=style),
        )  # fmt: skip
    print_table(console, table)
    if len(found) > len(shown):
        console.print(f"{len(found) - len(shown)} more spans; --all shows them", style="dim")


def print_log(path: Path, console: Console) -> None:
    """An exchange log: what the engine said it is, and one line for each session."""
    log = read_exchange(path)
    state = "sealed" if log.sealed else f"not sealed, {log.torn} bytes of a torn frame"
    console.print(f"exchange log, {log.size:,} bytes, {state}", highlight=False)
    console.print(escape(printable(", ".join(f"{name} {value}" for name, value in log.facts.items()))), style="dim")
    table = make_table()
    for title in ("session", "trajectory", "policy", "requests", "prompt tokens", "sampled tokens"):
        table.add_column(title, justify="left" if title == "trajectory" else "right")
    for number, session in log.sessions.items():
        new, sampled = (sum(len(getattr(t, name)) for t in session.turns) for name in ("new_prompt", "sampled"))
        cells = number, escape(printable(session.trajectory)), session.policy, len(session.turns), new, sampled
        table.add_row(*map(str, cells))
    print_table(console, table)


def _print_header(record: Trajectory, console: Console) -> None:
    header = record.header
    console.print(f"[bold]{escape(printable(header.trajectory_id))}[/bold]  digest {record.digest}", soft_wrap=True)
    for name, value in _facts(record, header).items():
        console.print(f"  {escape(printable(name)):<14} {escape(printable(value))}", highlight=False, soft_wrap=True)
    console.print(Text.assemble("  ", *((f" {origin.name.lower()} ", style) for origin, style in STYLES.items())))


def _facts(record: Trajectory, header: Header) -> dict[str, object]:
    verdict, versions = header.verdict, header.policy_versions
    loss, excluded = record.loss_mask, record.excluded
    facts: dict[str, object] = {
        "task": f"{header.task}, attempt {header.attempt}, iteration {header.iteration}",
        "ended": header.end_reason,
        "tokens": f"{len(record):,}, {int(loss.sum()):,} with loss"
        + (f", {int(excluded.sum()):,} excluded" if excluded is not None else ""),
        "turns": int(record.turn[-1]) + 1,
        "policy": ", ".join(map(str, sorted(set(versions)))) if versions else "none",
    }
    if verdict is None:
        facts["verdict"] = "none"
    elif not verdict.trusted:
        facts["verdict"] = f"not trusted: {verdict.reason}"
    else:
        facts["verdict"] = f"{verdict.passed} of {verdict.total} checks, {verdict.baseline} when nothing is done"
    if verdict is not None and verdict.source:
        own = ", ".join(f"{name} {value:g}" for name, value in verdict.rewards.items())
        facts["counted by"] = verdict.source + (f"; the task's own: {own}" if own else "")
    if verdict is not None and verdict.statuses:
        facts["not run"] = ", ".join(f"{name} {status}" for name, status in verdict.statuses.items())
    if header.steps:
        facts["steps"] = "; ".join(step.describe() for step in header.steps)
    if header.reward:
        facts["reward"] = ", ".join(f"{name} {value:g}" for name, value in header.reward.items())
    if record.routes is not None:
        _, layers, top_k = record.routes.shape
        kind = f"{layers} layers, top-{top_k}, {record.routes.dtype}"
        facts["routes"] = f"{kind}, {route_coverage(record):.1%} of what can be recorded"
    if header.contract is not None:
        facts["contract"] = ", ".join(f"{name} {value}" for name, value in header.contract.to_json().items())
    for name, value in {**header.counts, **header.extra}.items():
        if value:
            facts.setdefault(name, value)
    return facts


def _print_list(path: Path, records: dict[str, Trajectory], console: Console) -> None:
    console.print(f"{escape(printable(path.name))}: {len(records)} records", highlight=False)
    table = make_table()
    for title in ("trajectory", "tokens", "loss", "turns", "ended"):
        table.add_column(title, justify="right" if title in ("tokens", "loss", "turns") else "left")
    for name, record in records.items():
        loss, turns = int(record.loss_mask.sum()), int(record.turn[-1]) + 1
        table.add_row(
            escape(name), f"{len(record):,}", f"{loss:,}", str(turns), escape(printable(record.header.end_reason))
        )
    print_table(console, table)
    console.print("--trajectory ID shows one of them", style="dim")


def _few(ids: np.ndarray) -> str:
    shown = " ".join(map(str, ids[:IDS_SHOWN].tolist()))
    return shown + (f" ... {ids[-1]}" if len(ids) > IDS_SHOWN else "")
