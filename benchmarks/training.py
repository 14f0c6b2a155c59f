"""How fast critic and actor train on stored records, with and without replay, and where the time of a phase goes.

    python benchmarks/training.py RUN [--repeats 3] [--out DIR] [key=value ...]

RUN is a finished run; its first rollout is copied, and the critic and actor phases of a first iteration are run on it
from the run's start model as the loop runs them (the actor without the extra passes that measure what replay changes),
with replay off and on in turn. Medians over the repeats, of rank 0's own clock. `update tokens/s` counts all tokens of
the streams, once for each epoch; the share outside forward and backward is of everything the phase does between the end
of its start-up and its result, reading and saving included.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

from driving import copy_rollouts, markdown, train

from megatron_t1.config.compose import load_run_config
from megatron_t1.phase import PhaseResult

REPLAY = {"no replay": False, "replay": True}
PASSES = "engine/passes"
# What a phase does besides passes: names of its timings that don't overlap.
PARTS: dict[str, tuple[str, ...]] = {
    "reading": ("verify", "load_rollouts"),
    "model": ("load_model",),
    "packing": ("engine/packing", "engine/batches"),
    "advantages": ("advantages",),
    "optimizer": ("engine/optimizer",),
    "metrics": ("engine/sums",),
    "saving": ("write_values", "save"),
}
HEADER = ("phase", "update tokens/s", "phase, s", "outside passes", *(f"{part}, s" for part in (*PARTS, "rest")))


def numbers(result: PhaseResult, epochs: int) -> list[float]:
    """Of one phase, in the order of HEADER: a rate, seconds, a share, and the seconds of each part and of the rest."""
    times = result.timings_s
    own = times["total"] - times["start"]  # without the start of interpreter and process group
    parts = [sum(times.get(name, 0.0) for name in names) for names in PARTS.values()]
    rate = epochs * result.metrics["batch/tokens"] / times["update"]
    return [rate, own, 1.0 - times[PASSES] / own, *parts, own - times[PASSES] - sum(parts)]


def measure(run: Path, out: Path, repeats: int, overrides: list[str]) -> dict[str, list[PhaseResult]]:
    """ "ROLE, REPLAY" -> result of each repeat."""
    found: dict[str, list[PhaseResult]] = {f"{role}, {name}": [] for role in ("critic", "actor") for name in REPLAY}
    for repeat in range(repeats):
        for name in REPLAY if repeat % 2 == 0 else reversed(REPLAY):
            copy_rollouts(run, out, only=0)
            on = str(REPLAY[name]).lower()
            options = [
                "loop.warmup_iterations=0", f"train.replay.actor={on}", f"train.replay.critic={on}",
                "train.replay.measure_gap=false", *overrides,
            ]  # fmt: skip
            for role, result in train(out, 0, ["critic", "actor"], options).items():
                found[f"{role}, {name}"].append(result)
                own, passes = result.timings_s["total"] - result.timings_s["start"], result.timings_s[PASSES]
                print(f"{repeat + 1}/{repeats} {role}, {name}: {passes:.1f} of {own:.1f} s in passes", file=sys.stderr)
    return found


def table(found: dict[str, list[PhaseResult]], epochs: dict[str, int]) -> str:
    rows = []
    for name, results in found.items():
        repeats = [numbers(result, epochs[name.partition(",")[0]]) for result in results]
        rate, own, outside, *parts = (median(column) for column in zip(*repeats, strict=True))
        rows.append([name, f"{rate:,.0f}", f"{own:.2f}", f"{outside:.1%}", *(f"{value:.2f}" for value in parts)])
    return markdown(HEADER, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/training-speed"))
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args()
    found = measure(options.run, options.out.resolve(), options.repeats, options.overrides)
    config = load_run_config(options.out, options.overrides)
    first = next(iter(found.values()))[0].metrics
    start = median(result.timings_s["start"] for result in found["critic, replay"])
    print(
        f"{first['batch/trajectories']:.0f} trajectories, {first['batch/tokens']:,.0f} tokens, "
        f"{first['batch/loss_tokens']:,.0f} of them sampled; {config.layout.processes} processes, "
        f"started in {start:.1f} s; medians of {options.repeats}\n"
    )
    print(table(found, {role: getattr(config.train, role).epochs for role in ("critic", "actor")}))


if __name__ == "__main__":
    main()
