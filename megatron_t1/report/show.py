"""`t1 show RUN`: what a run did so far, as tables. Reads the manifest and the metrics, never a tensor."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_t1.errors import IncompleteError
from megatron_t1.paths import RunPaths
from megatron_t1.report.metrics import read_metrics, series

# column title -> (phase, metric names, format); the first name that was measured counts
COLUMNS: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    ("reward", "rollout", ("rollout/mean_reward",), "{:.3f}"),
    ("checks", "rollout", ("rollout/checks_passed",), "{:.2f}"),
    ("solved", "rollout", ("rollout/success_rate",), "{:.1%}"),
    ("turns", "rollout", ("rollout/turns",), "{:.1f}"),
    ("new tok/s", "rollout", ("rollout/sampled_tokens_per_s", "rollout/tokens_per_s"), "{:.0f}"),
    ("EV", "critic", ("critic/explained_variance",), "{:.2f}"),
    ("KL", "actor", ("actor/approx_kl", "actor/kl"), "{:.1e}"),
    ("clipped", "actor", ("actor/clip_fraction", "actor/clipped"), "{:.1%}"),
    ("entropy", "actor", ("actor/entropy", "actor/entropy_before"), "{:.3f}"),
    ("gap", "actor", ("gap/abs_logprob_replay",), "{:.1e}"),
    ("gap, no replay", "actor", ("gap/abs_logprob_no_replay",), "{:.1e}"),
    ("choices differ", "actor", ("gap/differing_choices",), "{:.1%}"),
)
CONFIG_LINE = (
    "model.name", "layout.processes", "layout.expert", "reward._target_", "reward.scale", "rollout.tasks_per_iteration",
    "rollout.samples_per_task", "train.actor.lr", "train.critic.lr", "train.gae.lambda_actor", "train.replay.actor",
    "train.replay.critic", "run.seed",
)  # fmt: skip


def print_run(run_dir: str | Path, console: Console | None = None) -> None:
    """Configuration, iterations, evaluations, and where the time went.

    Raises:
        IncompleteError: the directory holds no run.
    """
    console = console or Console()
    manifest = read_manifest(run_dir)
    lines = read_metrics(run_dir)
    config = manifest["config"]
    console.print(f"[bold]{RunPaths.of(run_dir).root}[/bold]", highlight=False)
    console.print(
        "  ".join(f"{key.rpartition('.')[2] if key != 'model.name' else 'model'}={_short(config.get(key))}"
                  for key in CONFIG_LINE),
        style="dim", highlight=False,
    )  # fmt: skip
    if not lines:
        console.print("nothing is finished yet")
        return
    console.print(iteration_table(lines, int(config.get("loop.warmup_iterations", 0))))
    evaluations = evaluation_table(lines, int(config.get("loop.warmup_iterations", 0)))
    if evaluations is not None:
        console.print(evaluations)
    console.print(time_table(lines))
    last = manifest["finished"][-1] if manifest["finished"] else None
    if last:
        console.print(f"last finished: {last['phase']} of iteration {last['iteration']}", highlight=False)


def print_summary(run_dir: str | Path, console: Console | None = None) -> None:
    """The small table at the end of `t1 run`, and where to look next."""
    console = console or Console()
    print_run(run_dir, console)
    root = RunPaths.of(run_dir).root
    console.print("\nnext:", highlight=False)
    for command in (
        f"t1 show {root}",
        f"t1 show {root} --trajectories",
        f"t1 compare {root}",
        f"tensorboard --logdir {root / 'tensorboard'}",
    ):
        console.print(f"  {command}", highlight=False, soft_wrap=True)
    console.print(f"  plots: {root / 'plots'}", highlight=False, soft_wrap=True)


def read_manifest(run_dir: str | Path) -> dict[str, Any]:
    path = RunPaths.of(run_dir).manifest
    try:
        raw = json.loads(path.read_text())
        return {"config": dict(raw["config"]), "finished": list(raw["finished"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IncompleteError(
            f"this directory holds no readable run: {error}", where=str(path), remedy="name the run.dir of a `t1 run`"
        ) from error


def iteration_table(lines: list[dict[str, Any]], warmup: int) -> Table:
    """One row for each iteration; columns that nothing measured are left out."""
    iterations = sorted({line["iteration"] for line in lines if line["phase"] != "evaluation"})
    seconds = _launch_seconds(lines)
    columns = [(title, series(lines, phase, *names), form) for title, phase, names, form in COLUMNS]
    columns = [column for column in columns if column[1]]
    table = Table(title="iterations", title_justify="left", header_style="bold")
    for title in ("iteration", "policy", *(title for title, _, _ in columns), "time"):
        table.add_column(title, justify="right")
    for iteration in iterations:
        cells = [form.format(values[iteration]) if iteration in values else "" for _, values, form in columns]
        policy = "warm-up" if iteration < warmup else str(iteration - warmup)
        table.add_row(str(iteration), policy, *cells, f"{seconds[iteration]:.0f} s")
    return table


def evaluation_table(lines: list[dict[str, Any]], warmup: int) -> Table | None:
    """One row for each evaluated policy; None when nothing was evaluated."""
    rows = [line for line in lines if line["phase"] == "evaluation"]
    if not rows:
        return None
    table = Table(title="evaluations on held-out tasks", title_justify="left", header_style="bold")
    for title in ("policy", "checks passed", "share", "solved", "reward", "turns", "episodes"):
        table.add_column(title, justify="right")
    names = ("checks_passed", "checks_fraction", "success_rate", "mean_reward", "turns", "episodes")
    forms = ("{:.3f}", "{:.1%}", "{:.1%}", "{:.3f}", "{:.1f}", "{:.0f}")
    for line in rows:
        values = [line["metrics"].get(f"evaluation/{name}") for name in names]
        cells = ["" if value is None else form.format(value) for value, form in zip(values, forms, strict=True)]
        table.add_row(str(max(0, line["iteration"] - warmup)), *cells)
    return table


def time_table(lines: list[dict[str, Any]]) -> Table:
    """Where the time went: per phase, its share, and its longest parts."""
    total: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    parts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for line in lines:
        own = own_seconds(line)
        total[line["phase"]] += own
        count[line["phase"]] += 1
        for name, value in line["timings_s"].items():
            if value is not None and name != "total":
                parts[line["phase"]][name] += value
    everything = sum(total.values()) or 1.0
    table = Table(title="where the time went", title_justify="left", header_style="bold")
    for title, justify in (
        ("phase", "left"),
        ("times", "right"),
        ("total", "right"),
        ("share", "right"),
        ("of it", "left"),
    ):
        table.add_column(title, justify=justify)
    for phase, seconds in sorted(total.items(), key=lambda item: -item[1]):
        longest = sorted(parts[phase].items(), key=lambda item: -item[1])[:4]
        detail = ", ".join(f"{name} {value:.1f} s" for name, value in longest)
        table.add_row(phase, str(count[phase]), f"{seconds:.1f} s", f"{seconds / everything:.0%}", detail)
    return table


def own_seconds(line: dict[str, Any]) -> float:
    """A phase's own time where it measured it; phases that share a launch share its wall time."""
    own = line["timings_s"].get("total")
    return float(line["seconds"] if own is None else min(own, line["seconds"]) or line["seconds"])


def _launch_seconds(lines: list[dict[str, Any]]) -> dict[int, float]:
    seconds: dict[int, float] = defaultdict(float)
    for line in lines:
        if line["phase"] != "evaluation":
            seconds[line["iteration"]] += own_seconds(line)
    return seconds


def _short(value: Any) -> str:
    return value.rpartition(".")[2] if isinstance(value, str) and "." in value else str(value)
