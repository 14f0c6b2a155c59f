"""`t1 reward analyze`: the analysis of stored trials as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from megatron_t1.report.rewards import Analysis, Bucket
from megatron_t1.report.show import make_console, make_table


def print_analysis(found: Analysis, *, top: int = 10, console: Console | None = None) -> None:
    """Args: top: rows of each list that is shown."""
    console = console or make_console()

    def say(text: str) -> None:
        console.print(escape(text), highlight=False, soft_wrap=True)

    trusted = found.solved + found.unsolved
    sources = ", ".join(f"{name} {count}" for name, count in found.sources.items())
    say(f"{found.trials} trials of {found.tasks} tasks; {trusted} with a result ({sources})")
    for reason, count in list(found.errors.items())[:top]:
        say(f"  no result: {count} x {reason}")
    if found.unsolved:
        say(
            f"{found.solved} solved, {found.unsolved} not; of these {found.with_progress} "
            f"({found.with_progress / found.unsolved:.0%}) pass some checks all the same, which a binary reward pays "
            f"nothing for ({found.unsolved_one_check} have one check only)"
        )
    rows = (("number of checks", found.reward_with_checks), ("turns", found.reward_with_turns),
            ("tokens", found.reward_with_tokens))  # fmt: skip
    known = [f"{name} {value:+.2f}" for name, value in rows if value is not None]
    say(f"mean dense reward {found.reward_mean:.3f}; rank correlation with {', '.join(known) or 'nothing known'}")
    _print_buckets("by number of checks", found.by_checks, console)
    _print_buckets("by turns", found.by_length, console)
    _print_tasks(found, top, console)
    for title, checks in (("always", found.always), ("never", found.never)):
        say(f"{len(checks)} checks {title} pass" + (", for example:" if checks else ""))
        for task, name in checks[:top]:
            say(f"  {task}: {name}")
    if found.suspicions or found.alarms:
        console.print("[bold]to be looked at[/bold]")
    for item in found.suspicions[: 2 * top]:
        names = f" ({', '.join(item.trials[:3])}{', ...' if len(item.trials) > 3 else ''})" if item.trials else ""
        say(f"  {item.kind}: {item.task}: {item.text}{names}")
    if len(found.suspicions) > 2 * top:
        say(f"  and {len(found.suspicions) - 2 * top} more; --out FILE has all")
    for alarm in found.alarms:
        say(f"  jump: {alarm}")


def _print_buckets(title: str, buckets: Sequence[Bucket], console: Console) -> None:
    if not buckets:
        return
    table = make_table(title)
    for name in ("", "trials", "checks passed", "share", "solved"):
        table.add_column(name, justify="right" if name else "left")
    for row in buckets:
        table.add_row(row.label, str(row.trials), f"{row.passed:.2f}", f"{row.share:.0%}", f"{row.solved:.0%}")
    console.print(table)


def _print_tasks(found: Analysis, top: int, console: Console) -> None:
    table = make_table(f"tasks by their share of all reward (the top tenth has {found.top_tenth_share:.0%})")
    for name in ("task", "trials", "checks", "passed", "share of reward"):
        table.add_column(name, justify="left" if name == "task" else "right")
    for row in found.dominating[:top]:
        table.add_row(
            escape(row.task), str(row.trials), str(row.checks), f"{row.passed:.2f}", f"{row.reward_share:.1%}"
        )
    console.print(table)
