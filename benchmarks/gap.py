"""The gap between sampler and trainer on real rollouts, by `t1 gap`: fp32 and bf16, with and without replay.

    python benchmarks/gap.py [--tasks DIR] [--out DIR] [--episodes N] [VARIANT ...]

Each variant makes a start model from a seed, samples episodes with the real vLLM, and scores the same tokens with the
real Megatron-Core (EP=2 over two processes), one thing otherwise each time. DIR/VARIANT.json has everything that
`t1 gap` found. Shares of differing choices are those of a start model with random weights; --model DIR measures a
trained one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

VARIANTS = {
    "tiny fp32": ["model=tiny"],
    "tiny bf16": ["model=tiny", "model.dtype=bfloat16"],
    "tiny_64e fp32": ["model=tiny_64e", "model.dtype=float32"],
    "tiny_64e bf16": ["model=tiny_64e"],
}
COLUMNS = {  # title: setting and number of the report
    "tokens": ("as_trained", "tokens"),
    "gap, replay": ("as_trained", "gap"),
    "gap, no replay": ("own_routes", "gap"),
    "KL, replay": ("as_trained", "kl"),
    "KL, no replay": ("own_routes", "kl"),
    "choices differ": ("as_trained", "route_difference"),
    "tokens with one": ("as_trained", "token_route_difference"),
}


def t1(*arguments: str) -> None:
    command = [sys.executable, "-c", "import sys; from megatron_t1.cli import main; sys.exit(main())", *arguments]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        sys.exit(f"t1 {' '.join(arguments)} failed:\n{finished.stdout[-2000:]}{finished.stderr[-2000:]}")


def measure(name: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Setting -> number -> value of one variant."""
    overrides = VARIANTS[name]
    run = options.out / name.replace(" ", "-")
    model = Path(options.model) if options.model else options.out / f"model-{name.replace(' ', '-')}"
    report = run.with_suffix(".json")
    if not model.is_dir():
        t1("model", "init", *overrides, f"model.path={model}", "generate.pool=small")
    t1(
        "run", *overrides, f"model.path={model}", f"run.dir={run}", f"env.tasks={options.tasks / 'train'}",
        f"eval.tasks={options.tasks / 'held_out'}", f"rollout.tasks_per_iteration={options.episodes}",
        "rollout.samples_per_task=1", "loop.warmup_iterations=0", "loop.iterations=1", "loop.colocate_roles=true",
        "loop.evaluate_first=false", "loop.evaluate_last=false",
    )  # fmt: skip
    t1("gap", str(run), "--iteration", "0", "--sample", "0", "--out", str(report))
    return {found["name"]: {**found, **found["routes"]} for found in json.loads(report.read_text())["settings"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=Path, default=Path("tasks/quickstart"))
    parser.add_argument("--out", type=Path, default=Path("runs/gap"))
    parser.add_argument("--model", help="a trained model of the variant's architecture and dtype")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("variants", nargs="*", default=list(VARIANTS), help=f"of: {', '.join(VARIANTS)}")
    options = parser.parse_args()
    if not options.tasks.is_dir():
        sys.exit(f"no tasks in {options.tasks}: make them with `t1 tasks generate experiment=quickstart`")
    table = Table("variant", *COLUMNS, title="sampler/trainer gap: mean |difference of log-probs|, nats")
    for name in options.variants:
        settings = measure(name, options)
        table.add_row(name, *(f"{settings[setting][number]:.3g}" for setting, number in COLUMNS.values()))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
