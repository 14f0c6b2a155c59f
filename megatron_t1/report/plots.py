"""RUN/plots/*.png from RUN/metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_t1.paths import RunPaths
from megatron_t1.report.metrics import read_metrics, series

# file -> (title, y label, curves); a curve is (label, phase, metric names)
PLOTS: dict[str, tuple[str, str, list[tuple[str, str, tuple[str, ...]]]]] = {
    "reward": ("reward", "mean reward", [
        ("rollout", "rollout", ("rollout/mean_reward",)),
        ("held out", "evaluation", ("evaluation/mean_reward",)),
    ]),
    "checks": ("passed checks", "checks per episode", [
        ("rollout", "rollout", ("rollout/checks_passed",)),
        ("held out", "evaluation", ("evaluation/checks_passed",)),
    ]),
    "success": ("solved tasks", "share of episodes", [
        ("rollout", "rollout", ("rollout/success_rate",)),
        ("held out", "evaluation", ("evaluation/success_rate",)),
    ]),
    "length": ("trajectory length", "turns", [
        ("mean", "rollout", ("rollout/turns",)),
        ("90th percentile", "rollout", ("rollout/turns_p90",)),
    ]),
    "errors": ("episodes without a trusted verdict", "share of episodes", [
        ("verifier", "rollout", ("rollout/verifier_errors",)),
        ("sandbox, engine", "rollout", ("rollout/infrastructure_errors",)),
    ]),
    "gap": ("sampler/trainer gap", "mean |log p difference|", [
        ("with replay", "actor", ("gap/logprob_gap_replay",)),
        ("without replay", "actor", ("gap/logprob_gap_no_replay",)),
    ]),
    "critic": ("critic before its update", "explained variance", [
        ("of the rollout", "critic", ("critic/explained_variance",)),
        ("of held-out tasks after a warm-up", "critic", ("critic/held_out_explained_variance",)),
        ("task means on them", "critic", ("critic/held_out_explained_variance_task_mean",)),
    ]),
    "policy": ("policy update", "nats, share", [
        ("KL", "actor", ("actor/approx_kl", "actor/kl")),
        ("clipped", "actor", ("actor/clip_fraction", "actor/clipped")),
        ("entropy", "actor", ("actor/entropy", "actor/entropy_before")),
    ]),
}  # fmt: skip


def write_plots(run_dir: str | Path) -> list[Path]:
    """Draw what was measured; returns the files. Plots without any point are not written."""
    lines = read_metrics(run_dir)
    if not lines:
        return []
    directory = RunPaths.of(run_dir).root / "plots"
    directory.mkdir(exist_ok=True)
    written = []
    for name, (title, label, curves) in PLOTS.items():
        drawn = [(text, points) for text, phase, names in curves if (points := series(lines, phase, *names))]
        if not drawn:
            continue
        figure, axes = new_figure()
        for text, points in drawn:
            axes.plot(list(points), list(points.values()), marker="o", markersize=3, label=text)
        if name == "gap" and all(value > 0 for _, points in drawn for value in points.values()):
            axes.set_yscale("log")
        axes.set(title=title, ylabel=label, xlabel="iteration")
        axes.grid(alpha=0.3)
        axes.legend()
        written.append(saved(figure, directory / f"{name}.png"))
    written.append(_time_plot(lines, directory / "time.png"))
    return written


def _time_plot(lines: list[dict[str, Any]], path: Path) -> Path:
    from megatron_t1.report.show import own_seconds

    iterations = sorted({line["iteration"] for line in lines})
    figure, axes = new_figure()
    base = dict.fromkeys(iterations, 0.0)
    for phase in ("rollout", "evaluation", "critic", "actor", "export"):
        seconds = {line["iteration"]: own_seconds(line) for line in lines if line["phase"] == phase}
        if not seconds:
            continue
        heights = [seconds.get(iteration, 0.0) for iteration in iterations]
        axes.bar(iterations, heights, bottom=[base[iteration] for iteration in iterations], label=phase)
        for iteration, height in zip(iterations, heights, strict=True):
            base[iteration] += height
    axes.set(title="time per phase", ylabel="seconds", xlabel="iteration")
    axes.legend()
    return saved(figure, path)


def new_figure() -> tuple[Any, Any]:
    """A figure that needs no display, and its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def saved(figure: Any, path: Path) -> Path:
    from megatron_t1 import atomic

    with atomic.replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return path
