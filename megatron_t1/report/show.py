"""`t1 show RUN`: what a run did so far, as tables. Reads the manifest and the metrics, never a tensor."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from shlex import quote
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from megatron_t1.config.schema import MonitorConfig
from megatron_t1.errors import IncompleteError
from megatron_t1.manifest import Manifest
from megatron_t1.paths import RunPaths
from megatron_t1.report.metrics import read_metrics, series
from megatron_t1.report.monitor import alarms

# column title, phase, metric names (the first that was measured counts), format
Columns = tuple[tuple[str, str, tuple[str, ...], str], ...]
ROLLOUT_COLUMNS: Columns = (
    ("reward", "rollout", ("rollout/mean_reward",), "{:.3f}"),
    ("checks", "rollout", ("rollout/checks_passed",), "{:.2f}"),
    ("solved", "rollout", ("rollout/success_rate",), "{:.1%}"),
    ("turns", "rollout", ("rollout/turns",), "{:.1f}"),
    ("tokens", "rollout", ("rollout/tokens",), "{:.0f}"),
    ("of checks", "rollout", ("rollout/checks_per_task",), "{:.1f}"),
    ("errors", "rollout", ("rollout/verifier_errors",), "{:.1%}"),
    ("new tok/s", "rollout", ("rollout/sampled_tokens_per_s", "rollout/tokens_per_s"), "{:.0f}"),
)
UPDATE_COLUMNS: Columns = (
    ("EV", "critic", ("critic/explained_variance",), "{:.2f}"),
    ("KL", "actor", ("actor/approx_kl", "actor/kl"), "{:.1e}"),
    ("clipped", "actor", ("actor/clip_fraction",), "{:.1%}"),
    ("entropy", "actor", ("actor/entropy", "actor/entropy_before"), "{:.2f}"),
    ("gap", "actor", ("gap/logprob_gap_replay",), "{:.1e}"),
    ("no replay", "actor", ("gap/logprob_gap_no_replay",), "{:.1e}"),
    ("routes differ", "actor", ("gap/route_difference",), "{:.1%}"),
)
CONFIG_LINE = {
    "model": "model.name",
    "processes": "layout.processes",
    "experts over": "layout.expert",
    "reward": "reward._target_",
    "scale": "reward.scale",
    "tasks": "rollout.tasks_per_iteration",
    "samples": "rollout.samples_per_task",
    "actor lr": "train.actor.lr",
    "critic lr": "train.critic.lr",
    "lambda": "train.gae.lambda_actor",
    "replay": "train.replay.actor",
    "critic replay": "train.replay.critic",
    "seed": "run.seed",
}
WIDTH = 110  # of what goes to a file or a pipe


def make_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def make_table(title: str | None = None) -> Table:
    return Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)


def print_table(console: Console, table: Table) -> None:
    """Print a table without cutting a cell: what goes to a file or a pipe is as wide as it needs."""
    if not console.is_terminal:
        needed = Measurement.get(console, console.options.update(width=10_000, max_width=10_000), table).maximum
        if needed > console.width:
            console.width = needed
    console.print(table)


def print_run(run_dir: str | Path, console: Console | None = None) -> None:
    """Configuration, iterations, evaluations, and where the time went.

    Raises:
        IncompleteError: the directory holds no run.
    """
    console = console or make_console()
    manifest = read_manifest(run_dir)
    lines = read_metrics(run_dir)
    config = manifest["config"]
    console.print(f"[bold]{RunPaths.of(run_dir).root}[/bold]", highlight=False)
    facts = [f"{label} {_short(config.get(key))}" for label, key in CONFIG_LINE.items()]
    console.print(", ".join(facts), style="dim", highlight=False)
    if not lines:
        console.print("nothing is finished yet")
        return
    warmup = int(config.get("loop.warmup_iterations", 0))
    console.print(iteration_table(lines, warmup, ROLLOUT_COLUMNS, "rollouts", with_time=True))
    for alarm in alarms(lines, monitor_options(config)):
        console.print(f"[bold red]alarm[/bold red] {alarm}", highlight=False)
    console.print(iteration_table(lines, warmup, UPDATE_COLUMNS, "updates (gap: mean |log p trainer - log p sampler|)"))
    evaluations = evaluation_table(lines, warmup)
    if evaluations is not None:
        console.print(evaluations)
    console.print(time_table(lines, manifest["finished"]))
    last = manifest["finished"][-1] if manifest["finished"] else None
    if last:
        console.print(f"last finished: {last['phase']} of iteration {last['iteration']}", highlight=False)


def print_summary(run_dir: str | Path, console: Console | None = None) -> None:
    """The small table at the end of `t1 run`, and where to look next."""
    console = console or make_console()
    print_run(run_dir, console)
    root = RunPaths.of(run_dir).root
    console.print("\nnext:", highlight=False)
    for command in (
        f"t1 show {quote(str(root))}",
        f"t1 show {quote(str(root))} --trajectories",
        f"t1 compare {quote(str(root))}",
        f"tensorboard --logdir {quote(str(root / 'tensorboard'))}",
    ):
        console.print(f"  {command}", highlight=False, soft_wrap=True)
    console.print(f"  plots: {root / 'plots'}", highlight=False, soft_wrap=True)


def read_manifest(run_dir: str | Path) -> dict[str, Any]:
    path = RunPaths.of(run_dir).manifest
    try:
        manifest = Manifest.read(path)
    except IncompleteError as error:
        raise IncompleteError(
            f"this directory holds no readable run: {error.problem}",
            where=str(path),
            remedy="name the run.dir of a `t1 run`",
        ) from error
    finished = [
        {"iteration": step.iteration, "phase": step.phase, "launch": step.launch, "seconds": step.seconds}
        for step in manifest.finished
    ]
    return {"config": manifest.config, "finished": finished}


def monitor_options(config: dict[str, Any]) -> MonitorConfig:
    """The thresholds that a run was started with."""
    own = {field.name: config[key] for field in fields(MonitorConfig) if (key := f"monitor.{field.name}") in config}
    return MonitorConfig(**own)


def iteration_table(
    lines: list[dict[str, Any]], warmup: int, wanted: Columns, title: str, *, with_time: bool = False
) -> Table:
    """One row for each iteration; columns that nothing measured are left out."""
    iterations = sorted({line["iteration"] for line in lines if line["phase"] != "evaluation"})
    columns = [(name, series(lines, phase, *names), form) for name, phase, names, form in wanted]
    columns = [column for column in columns if column[1]]
    seconds: dict[int, float] = defaultdict(float)
    for line in lines:
        seconds[line["iteration"]] += own_seconds(line) if line["phase"] != "evaluation" else 0.0
    table = make_table(title)
    for name in ("it", "policy", *(name for name, _, _ in columns), *(["time"] if with_time else [])):
        table.add_column(name, justify="right")
    for iteration in iterations:
        cells = [form.format(values[iteration]) if iteration in values else "" for _, values, form in columns]
        policy = "warm-up" if iteration < warmup else str(iteration - warmup)
        table.add_row(str(iteration), policy, *cells, *([f"{seconds[iteration]:.0f} s"] if with_time else []))
    return table


def evaluation_table(lines: list[dict[str, Any]], warmup: int) -> Table | None:
    """One row for each evaluated policy; None when nothing was evaluated."""
    rows = [line for line in lines if line["phase"] == "evaluation"]
    if not rows:
        return None
    table = make_table("evaluations on held-out tasks")
    for title in ("policy", "checks passed", "share", "solved", "reward", "turns", "episodes"):
        table.add_column(title, justify="right")
    names = ("checks_passed", "checks_fraction", "success_rate", "mean_reward", "turns", "episodes")
    forms = ("{:.3f}", "{:.1%}", "{:.1%}", "{:.3f}", "{:.1f}", "{:.0f}")
    for line in rows:
        values = [line["metrics"].get(f"evaluation/{name}") for name in names]
        cells = ["" if value is None else form.format(value) for value, form in zip(values, forms, strict=True)]
        table.add_row(str(max(0, line["iteration"] - warmup)), *cells)
    return table


def time_table(lines: list[dict[str, Any]], finished: list[dict[str, Any]]) -> Table:
    """Where the time went: per phase, its share, and its longest parts; and what starting and ending phases cost."""
    total: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    parts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for line in lines:
        own = own_seconds(line)
        total[line["phase"]] += own
        count[line["phase"]] += 1
        for name, value in line["timings_s"].items():
            if value is not None and name != "total" and "/" not in name:  # a name with a slash is a part of others
                parts[line["phase"]][name] += value
    launches = {step["launch"]: float(step["seconds"]) for step in finished}
    between = max(0.0, sum(launches.values()) - sum(total.values()))
    everything = sum(total.values()) + between or 1.0
    table = make_table("where the time went")
    for title, justify in (
        ("phase", "left"),
        ("times", "right"),
        ("total", "right"),
        ("share", "right"),
        ("of it", "left"),
    ):
        table.add_column(title, justify=justify)
    for phase, seconds in sorted(total.items(), key=lambda item: -item[1]):
        longest = sorted(parts[phase].items(), key=lambda item: -item[1])[:3]
        detail = ", ".join(f"{name} {value:.1f} s" for name, value in longest)
        table.add_row(phase, str(count[phase]), f"{seconds:.1f} s", f"{seconds / everything:.0%}", detail)
    detail = "interpreters, launchers, imports"
    table.add_row("start and end", str(len(launches)), f"{between:.1f} s", f"{between / everything:.0%}", detail)
    return table


def own_seconds(line: dict[str, Any]) -> float:
    """A phase's own time where it measured it; phases that share a launch share its wall time."""
    own = line["timings_s"].get("total")
    return float(line["seconds"] if own is None else min(own, line["seconds"]) or line["seconds"])


def _short(value: Any) -> str:
    return value.rpartition(".")[2] if isinstance(value, str) and "." in value else str(value)
