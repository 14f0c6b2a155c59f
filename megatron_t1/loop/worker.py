"""Entry point of a rollout phase's processes: `python -m megatron_t1.loop.worker --run RUN --iteration N --phases ...`.

The loop, `t1 rollout` and `t1 eval` start it; under Slurm one on each node, where each takes its share of the episodes.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback

from megatron_t1 import fence
from megatron_t1.config.compose import load_run_config
from megatron_t1.errors import readable
from megatron_t1.loop.launcher import AGAIN
from megatron_t1.paths import RunPaths
from megatron_t1.processes import LAUNCH_MARK

PHASES = ("rollout", "evaluation")
WORKER, WORKERS = "T1_WORKER", "T1_WORKERS"  # this process's place among the workers of the phase; the launcher sets it


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="megatron_t1.loop.worker", description=__doc__)
    parser.add_argument("--run", required=True, help="run directory (holds config.yaml)")
    parser.add_argument("--iteration", type=int, required=True)
    parser.add_argument("--phases", required=True, help="comma-separated, of: rollout, evaluation")
    parser.add_argument("overrides", nargs="*", help="key=value on top of the run's configuration")
    options = parser.parse_args(arguments)
    phases = options.phases.split(",")
    unknown = [phase for phase in phases if phase not in PHASES]
    if unknown:
        parser.error(f"unknown phase {', '.join(unknown)}; known: {', '.join(PHASES)}")
    try:
        run_phases(options.run, options.iteration, phases, options.overrides)
    except Exception as error:
        said = readable(error) or f"a defect of this program, please report it:\n{traceback.format_exc()}"
        print(f"error: {said}", file=sys.stderr, flush=True)
        return AGAIN if _is_lost(error) else 1
    return 0


def _is_lost(error: BaseException) -> bool:
    """Whether the engine died while it was at work: another one finishes the episodes that are left."""
    from megatron_t1.rollout.engine.errors import EngineLost

    if isinstance(error, BaseExceptionGroup):
        return any(_is_lost(inner) for inner in error.exceptions)
    return isinstance(error, EngineLost)


def run_phases(run_dir: str, iteration: int, phases: list[str], overrides: list[str]) -> None:
    """Run the phases with one engine; worker 0 writes each one's result."""
    from megatron_t1.rollout.crew import Crew
    from megatron_t1.rollout.phase import run_phases as play

    config = load_run_config(run_dir, overrides)
    launch = os.environ.get(LAUNCH_MARK, "")
    crew = Crew(int(os.environ.get(WORKER, 0)), int(os.environ.get(WORKERS, 1)), launch=launch)
    fence.watch_own(RunPaths.of(run_dir).phase(iteration, phases[0]))
    results = play(config, iteration, phases, crew=crew)
    if crew.worker == 0:
        for phase, result in results.items():
            result.write(RunPaths.of(run_dir).phase(iteration, phase))


if __name__ == "__main__":
    sys.exit(main())
