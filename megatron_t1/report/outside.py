"""`t1 show` of a directory that holds no training: a fine-tuning, or a critic's warm-up on stored rollouts."""

from __future__ import annotations

import math
from pathlib import Path
from shlex import quote
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_t1 import sealed
from megatron_t1.loop.outside import OUTSIDE, POLICY_FILE, phase_outside_the_loop
from megatron_t1.paths import RunPaths
from megatron_t1.phase import RESULT_FILE, PhaseResult
from megatron_t1.report.show import make_console, make_table

EXPLAINED = "held_out_explained_variance"
FACTS = {
    "sft": (
        ("demonstrations", "sft/demonstrations", "{:,.0f}"),
        ("tokens", "sft/tokens", "{:,.0f}"),
        ("optimizer steps", "sft/optimizer_steps", "{:,.0f}"),
        ("held-out loss before, nats/token", "sft/held_out_loss_before", "{:.3f}"),
        ("held-out loss, nats/token", "sft/held_out_loss", "{:.3f}"),
    ),
    "warmup": (
        ("trajectories", "batch/trajectories", "{:,.0f}"),
        ("of them held out, whole tasks", "critic/held_out_trajectories", "{:,.0f}"),
        ("explained variance before", f"critic/{EXPLAINED}_before", "{:.3f}"),
        ("explained variance, best", f"critic/{EXPLAINED}", "{:.3f}"),
        ("of a predictor that knows each task's mean", f"critic/{EXPLAINED}_task_mean", "{:.3f}"),
    ),
}


def print_outside(directory: str | Path, console: Console | None = None) -> None:
    """What was done there, what came of it, and how a training starts from it."""
    console = console or make_console()
    paths = RunPaths.of(directory)
    phase = phase_outside_the_loop(paths.root)
    kind, own = OUTSIDE[phase], paths.phase(0, phase)
    console.print(f"[bold]{paths.root}[/bold]: {kind.what}", highlight=False)
    if not (own / RESULT_FILE).is_file():
        console.print(f"it isn't finished; logs: {own / 'logs'}", highlight=False, soft_wrap=True)
        return
    result = PhaseResult.read(own)
    for label, name, form in FACTS[phase]:
        if name in result.metrics:
            console.print(f"  {label:<44} {form.format(result.metrics[name])}", highlight=False)
    for reason, count in sorted(result.details.get("excluded", {}).items()):
        console.print(f"  left out: {reason:<34} {count:,}", highlight=False)
    if phase == "warmup":
        console.print(_warmup_table(result))
        console.print(_ended(result), highlight=False)
    if policy := _policy(own / POLICY_FILE):
        console.print(f"the policy's {len(policy)} files are untouched (SHA-256 before and after)", highlight=False)
    start = f"t1 run run.dir=ANOTHER {kind.option}={quote(str(paths.root / kind.leaves))}"
    console.print(f"\nnext: {start}", highlight=False, soft_wrap=True)


def _policy(path: Path) -> dict[str, Any]:
    try:
        return sealed.read(path)
    except (OSError, ValueError):
        return {}


def _warmup_table(result: PhaseResult) -> Table:
    """The held-out explained variance over steps; long histories are thinned out, first, best and last stay."""
    history = result.details["warmup"]
    best, mark_best = _best(result), "best, kept" if _has_best(result) else "kept"
    shown = {0, len(history) - 1, best, *range(0, len(history), max(1, len(history) // 20))}
    table = make_table("explained variance of the reward on held-out tasks, trajectories weighted equally")
    for title in ("step", "epoch", "value loss", "held out", ""):
        table.add_column(title, justify="right")
    for number in sorted(shown):
        line = history[number]
        loss = f"{line['value_loss']:.4f}" if "value_loss" in line else ""
        held_out = "" if line[EXPLAINED] is None else f"{line[EXPLAINED]:.3f}"
        table.add_row(str(line["step"]), f"{line['epoch']:.2f}", loss, held_out, mark_best if number == best else "")
    return table


def _best(result: PhaseResult) -> int:
    """Index of the measurement whose critic was kept: the best, or the last where nothing could be explained."""
    history = result.details["warmup"]
    epoch = result.metrics["critic/warmup_best_epoch"]
    return next((n for n, line in enumerate(history) if line["epoch"] == epoch), len(history) - 1)


def _has_best(result: PhaseResult) -> bool:
    return any(line[EXPLAINED] is not None for line in result.details["warmup"])


def _ended(result: PhaseResult) -> str:
    if not _has_best(result):
        return "the held-out rewards don't vary, so there is nothing to explain: the last critic was kept"
    if result.metrics["critic/warmup_stopped_rising"]:
        return "it ended because the explained variance had stopped rising"
    return "it ended after train.critic.warmup_epochs, before the explained variance had stopped rising"


def write_warmup_plot(directory: str | Path) -> Path:
    """Held-out explained variance over optimizer steps beside the task-mean predictor: DIR/plots/warmup.png."""
    from megatron_t1.report.plots import new_figure, saved

    paths = RunPaths.of(directory)
    result = PhaseResult.read(paths.phase(0, "warmup"))
    history, best = result.details["warmup"], _best(result)
    figure, axes = new_figure()
    steps = [line["step"] for line in history]
    explained = [math.nan if line[EXPLAINED] is None else line[EXPLAINED] for line in history]
    axes.plot(steps, explained, marker="o", markersize=3, label="critic")
    axes.plot(steps[best], explained[best], marker="o", markersize=9, fillstyle="none", color="black",
              linestyle="none", label="kept")  # fmt: skip
    known = result.metrics[f"critic/{EXPLAINED}_task_mean"]
    axes.axhline(known, linestyle="--", color="gray", label="predictor that knows each task's mean")
    axes.set(title="critic warm-up, held-out tasks", ylabel="explained variance", xlabel="optimizer step")
    axes.grid(alpha=0.3)
    axes.legend()
    return saved(figure, paths.root / "plots" / "warmup.png")
