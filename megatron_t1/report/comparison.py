"""`t1 compare`: two evaluations side by side, with what is certain about their difference."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from megatron_t1.errors import IncompleteError
from megatron_t1.report.show import make_console, make_table
from megatron_t1.report.statistics import compare_evaluations, read_evaluation


def evaluations_of(path: str | Path) -> list[Path]:
    """Evaluation directories of a run, oldest policy first; or the one directory that is itself an evaluation.

    Raises:
        IncompleteError: there is none.
    """
    path = Path(path).resolve()
    if (path / "summary.json").is_file():
        return [path]
    found = sorted(directory.parent for directory in path.glob("evaluations/iter_*/summary.json"))
    if not found:
        raise IncompleteError(
            "no finished evaluation here", where=str(path), remedy="run `t1 eval run.dir=...` or let `t1 run` finish"
        )
    return found


def print_comparison(a: Path, b: Path, *, samples: int = 10_000, seed: int = 0, console: Console | None = None) -> None:
    """B minus A for checks passed, share of checks and solved tasks."""
    console = console or make_console()
    results = compare_evaluations(read_evaluation(a), read_evaluation(b), samples=samples, seed=seed)
    console.print(f"A: {a}\nB: {b}", highlight=False, soft_wrap=True)
    tasks = next(iter(results.values())).tasks
    table = make_table(f"paired bootstrap over {tasks} tasks and their attempts")
    for title in ("", "A", "B", "B - A", "95% interval", ""):
        table.add_column(title, justify="right" if title else "left")
    for name, result in results.items():
        verdict = "B is better" if result.low > 0 else "A is better" if result.high < 0 else "not separated"
        table.add_row(
            name,
            f"{result.mean_a:.3f}",
            f"{result.mean_b:.3f}",
            f"{result.difference:+.3f}",
            f"[{result.low:+.3f}, {result.high:+.3f}]".replace("[", "\\["),
            verdict,
        )
    console.print(table)
