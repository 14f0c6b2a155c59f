"""Entry point of every training process: `python -m megatron_t1.training.main --run RUN --iteration N --roles ...`.

Started under torchrun or srun; `t1 train ...`, `t1 export` and the loop do that. Roles are run one after another in
one process group, each with the memory to itself.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megatron_t1 import fence
from megatron_t1.config.compose import load_run_config
from megatron_t1.config.schema import Config
from megatron_t1.errors import T1Error, readable, warn
from megatron_t1.model.backend import Backend, select_backend
from megatron_t1.paths import RunPaths
from megatron_t1.phase import PhaseResult

LINGER_S = 10.0  # torchrun looks every 0.1 s, Slurm every second or so
ROLES = ("sft", "warmup", "critic", "actor", "export")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="megatron_t1.training.main", description=__doc__)
    parser.add_argument("--run", required=True, help="run directory (holds config.yaml)")
    parser.add_argument("--iteration", type=int, default=0)
    parser.add_argument("--roles", required=True, help=f"comma-separated, of: {', '.join(ROLES)}")
    parser.add_argument("overrides", nargs="*", help="key=value on top of the run's configuration")
    options = parser.parse_args(arguments)
    roles = options.roles.split(",")
    unknown = [role for role in roles if role not in ROLES]
    if unknown:
        parser.error(f"unknown role {', '.join(unknown)}; known: {', '.join(ROLES)}")
    return guarded(lambda: run_roles(Path(options.run), options.iteration, roles, options.overrides))


def guarded(work: Callable[[], None]) -> int:
    """Exit status of a rank's work. An error is said where the launcher looks for it, and ends the process at once.

    A rank that only lost the others lets them go first: the launcher ends it, and names the one that failed.
    """
    try:
        work()
    except Exception as error:
        from megatron_t1.model.collective import lost_others

        match lost_others(error):
            case "late":
                _say_who_is_late(error)
            case "gone":
                warn(f"broken off on rank {_rank()}: the connection to another rank is gone")
                warn(f"  {' '.join(str(error).split())[:300]}")
                time.sleep(LINGER_S)
            case _:
                said = readable(error) or _of_the_device(error)
                text = f"\n{traceback.format_exc()}" if said is None else f" {said}"
                warn(f"error on rank {_rank()}:{text}")
        _leave(1)
    return 0


def _say_who_is_late(error: BaseException) -> None:
    from megatron_t1.model.collective import ranks_that_never_came

    late = ranks_that_never_came()
    if late:
        more = f", nor did {', '.join(map(str, late[1:9]))}" if late[1:] else ""
        warn(
            f"error on rank {late[0]}: it didn't come to a collective operation in time{more}; "
            f"rank {_rank()} waited for cluster.collective_timeout_s"
        )
    else:
        who = "other ranks, which can't be asked" if late is None else "the other ranks, and they for it"
        warn(f"error on rank {_rank()}: it waited in vain for {who}")
    warn(f"  where:  {' '.join(str(error).split())[:300]}")
    warn(
        "  remedy: see that rank's log and its node; a phase that is only slow needs a larger "
        "cluster.collective_timeout_s"
    )


def _of_the_device(error: BaseException) -> T1Error | None:
    """A GPU that has too little memory is no defect of this program."""
    if type(error).__name__ != "OutOfMemoryError":
        return None
    return T1Error(
        str(error).split(". ")[0],
        remedy="lower train.capacity, set layout.recompute=full, or spread the model over more GPUs",
    )


def _rank() -> str:
    return os.environ.get("RANK", "0")


def joined(run_dir: Path, overrides: list[str], phase: str = "actor") -> tuple[Config, Backend]:
    """The run's configuration, with the layout that one phase has, and this machine's backend, in a process that has
    met all others. Collective."""
    config = load_run_config(run_dir, overrides)
    config.layout = config.layout.of(phase)
    backend = select_backend(config.cluster.backend)
    backend.prepare()  # before anything imports Megatron

    from megatron_t1.model.build import resolve_architecture
    from megatron_t1.model.parallel import initialize_parallel

    config.model.architecture = resolve_architecture(config.model)
    initialize_parallel(
        config.layout,
        backend,
        config.run.seed,
        architecture=config.model.architecture,
        timeout_s=config.cluster.collective_timeout_s,
    )
    return config, backend


def run_roles(run_dir: Path, iteration: int, roles: list[str], overrides: list[str]) -> None:
    started = time.perf_counter()
    fence.watch_own(RunPaths.of(run_dir).phase(iteration, roles[0]))
    config, backend = joined(run_dir, overrides, roles[0])

    import torch.distributed as dist

    from megatron_t1.model.parallel import destroy_parallel
    from megatron_t1.training.context import Context
    from megatron_t1.training.inputs import require_inputs
    from megatron_t1.training.progress import forget_progress

    paths = RunPaths.of(run_dir)
    dist.barrier()  # who is slow to start is waited for here, and not in the first role's own time
    start_s = time.perf_counter() - started
    for role in roles:
        context = Context(config, backend, iteration)
        if context.is_writer:
            forget_progress(paths, but=paths.progress(iteration, role))
        context.timings_s["start"] = start_s
        start_s = 0.0
        began = time.perf_counter()
        with context.timed("verify"):
            require_inputs(context, role)
        result = _phase(role)(context)
        result.timings_s["total"] = time.perf_counter() - began + context.timings_s["start"]
        dist.barrier()
        if context.is_writer:
            result.write(paths.phase(iteration, role))
            forget_progress(paths)
        dist.barrier()  # the next role reads it
        del result, context
        gc.collect()
    destroy_parallel()


def _phase(role: str) -> Callable[..., PhaseResult]:
    from megatron_t1.training import actor, critic, export, sft, stored

    phases = {
        "sft": sft.run_sft,
        "warmup": stored.run_warmup,
        "critic": critic.run_critic,
        "actor": actor.run_actor,
        "export": export.run_export,
    }
    return phases[role]


def _leave(code: int) -> None:
    """End at once: other ranks may be inside a collective, and the launcher ends them when it sees this exit."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the disk that holds the logs is full
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
