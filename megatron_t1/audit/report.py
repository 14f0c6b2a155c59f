"""The report of an audit: a table for people, JSON for machines."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import megatron_t1
from megatron_t1 import atomic
from megatron_t1.audit.baseline import Baseline
from megatron_t1.audit.rescore import Rescored
from megatron_t1.audit.run import LONG_TURNS, TargetAudit
from megatron_t1.errors import IncompleteError
from megatron_t1.printable import printable
from megatron_t1.report.show import make_table, print_table

FORMAT = "megatron-t1 audit"
VERSION = 1
SHOWN = 20  # findings listed below the table
COLUMNS = {
    "trajectories": "epi-\nsodes",
    "long": f">{LONG_TURNS}\nturns",
    "loss_tokens": "loss\ntokens",
    "drift_in_loss": "drift\nin loss",
    "drift_outside": "drift\noutside",
    "mask": "mask",
    "logprobs": "log-\nprobs",
    "routes": "routes",
    "contract": "con-\ntract",
    "evidence": "evi-\ndence",
}
PROBLEMS = ("drift_in_loss", "drift_outside", "mask", "logprobs", "routes", "contract", "evidence")


def as_json(
    audits: Sequence[TargetAudit], baselines: Sequence[Baseline | None], rescored: Sequence[Rescored | None]
) -> dict[str, Any]:
    """The whole report; see docs/audit.md. One entry of `targets` for each of `audits`, in order."""
    targets = []
    for audit, baseline, scores in zip(audits, baselines, rescored, strict=True):
        target: dict[str, Any] = {
            "path": _relative(audit.target.label),
            "totals": audit.totals(),
            "inputs": [{**item, "path": _relative(item["path"])} for item in audit.inputs],
            "files": [finding.to_json() for finding in audit.files],
            "trajectories": [
                {
                    "id": found.trajectory,
                    "digest": found.digest,
                    "status": found.status,
                    "turns": found.turns,
                    "tokens": found.tokens,
                    "loss_tokens": found.loss_tokens,
                    **({"excluded": found.excluded} if found.excluded else {}),
                    **({"unseen": found.unseen} if found.unseen else {}),
                    **({"left_out": found.trained} if found.trained else {}),
                    **({"findings": [finding.to_json() for finding in found.findings]} if found.findings else {}),
                }
                for found in audit.trajectories
            ],
        }
        if baseline is not None:
            target["baseline"] = baseline.to_json()
        if scores is not None:
            target["rescored"] = scores.to_json()
        targets.append(target)
    return {
        "format": FORMAT,
        "version": VERSION,
        "megatron_t1": megatron_t1.__version__,
        "totals": total(audits),
        "targets": targets,
    }


def require_writable(path: str | Path) -> None:
    """Raise IncompleteError unless a report can be written there; to be called before the work."""
    path = Path(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise IncompleteError(
            f"the report can't be written: {error.strerror or error}", where=str(path), remedy="name another file"
        ) from error


def write(path: str | Path, report: dict[str, Any]) -> None:
    """Write the report as JSON in which a trajectory without findings is one line."""
    # A file name that is no UTF-8 holds lone surrogates, which JSON has an escape for.
    atomic.write_bytes(path, (_lines(report) + "\n").encode("utf-8", "backslashreplace"))


def _lines(value: Any, indent: str = "") -> str:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not any(isinstance(item, dict | list) for item in items):
        return json.dumps(value, ensure_ascii=False)
    inner = indent + " "
    if isinstance(value, dict):
        rows = [f"{inner}{json.dumps(name)}: {_lines(item, inner)}" for name, item in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    return "[\n" + ",\n".join(f"{inner}{_lines(item, inner)}" for item in value) + f"\n{indent}]"


def total(audits: Sequence[TargetAudit]) -> dict[str, int]:
    """Sums over all targets; `most_turns` is the largest."""
    totals = [audit.totals() for audit in audits]
    return {
        name: max(each[name] for each in totals) if name == "most_turns" else sum(each[name] for each in totals)
        for name in (totals[0] if totals else {})
    }


def print_report(
    audits: Sequence[TargetAudit],
    baselines: Sequence[Baseline | None],
    rescored: Sequence[Rescored | None],
    console: Console,
) -> None:
    print_table(console, audit_table(audits))
    if any(baseline is not None and baseline.trajectories for baseline in baselines):
        print_table(console, baseline_table(audits, baselines))
    for audit, baseline in zip(audits, baselines, strict=True):
        if baseline is not None and baseline.problem:
            done = f" after {baseline.trajectories} trajectories" if baseline.trajectories else ""
            line = f"{short_label(audit)}: no baseline{done}: {printable(baseline.problem)}"
            console.print(escape(line), style="yellow", highlight=False, soft_wrap=True)
    for audit, scores in zip(audits, rescored, strict=True):
        if scores is not None:
            console.print(f"{escape(short_label(audit))}: {scores}", highlight=False, soft_wrap=True)
    lines = [
        f"{found.trajectory}: {finding}"
        for audit in audits
        for found in audit.trajectories
        for finding in found.findings
    ]
    lines += [f"{short_label(audit)}: {finding}" for audit in audits for finding in audit.files]
    for line in lines[:SHOWN]:
        console.print(escape(printable(line)), style="red", highlight=False, soft_wrap=True)
    if len(lines) > SHOWN:
        console.print(f"... and {len(lines) - SHOWN} more; --report FILE writes all of them", style="red")
    unproven = sum(audit.totals()["unproven"] for audit in audits)
    if unproven:
        console.print(f"{unproven} imported trajectories have no exchange log: checked in themselves only")
    if not lines:
        console.print("nothing is wrong", style="green")


def audit_table(audits: Sequence[TargetAudit]) -> Table:
    """One row for each target and, where there are several, one for all."""
    table = make_table("what training sees against what the engine saw and produced (counts of tokens)")
    table.add_column("records", overflow="fold")
    rows = [(short_label(audit), audit.totals()) for audit in audits]
    if len(audits) > 1:
        rows.append(("all", total(audits)))
    for name, title in COLUMNS.items():  # numbers are never cut: a long name is folded instead
        longest = max(len(f"{totals[name]:,}") for _, totals in rows)
        table.add_column(title, justify="right", min_width=longest)
    for label, totals in rows:
        cells = []
        for name in COLUMNS:
            text = f"{totals[name]:,}"
            cells.append(f"[red]{text}[/red]" if name in PROBLEMS and totals[name] else text)
        table.add_row(escape(label), *cells)
    return table


def baseline_table(audits: Sequence[TargetAudit], baselines: Sequence[Baseline | None]) -> Table:
    table = make_table("the same trajectories decoded, parsed, rendered and encoded again (baseline)")
    for title in (
        "records", "format", "epi-\nsodes", "drifted", "share", "loss tokens\ndrifted", "share", "others\ndrifted"
    ):  # fmt: skip
        table.add_column(title, justify="left" if title in ("records", "format") else "right")
    for audit, baseline in zip(audits, baselines, strict=True):
        if baseline is None or not baseline.trajectories:
            continue
        table.add_row(
            escape(short_label(audit)), escape(printable(baseline.chat_format)), f"{baseline.trajectories:,}",
            f"{baseline.drifted:,}", f"{baseline.drifted / max(1, baseline.trajectories):.1%}",
            f"{baseline.loss_tokens_drifted:,}", f"{baseline.loss_tokens_drifted / max(1, baseline.loss_tokens):.2%}",
            f"{baseline.context_tokens_drifted:,}",
        )  # fmt: skip
    return table


def short_label(audit: TargetAudit) -> str:
    """my_run, rollout 3; outside a run the last part of the path."""
    target = audit.target
    if not target.kind or target.file is not None or target.number is None or target.root is None:
        return printable(Path(target.label).resolve().name)
    return printable(f"{target.root.name}, {target.kind.removesuffix('s')} {target.number}")


def _relative(path: str) -> str:
    """Relative to the working directory where it lies below: a report says nothing about the machine."""
    try:
        return str(Path(path).resolve().relative_to(Path.cwd()))
    except (ValueError, RuntimeError, OSError):  # elsewhere, or a circle of links
        return path
