"""`python -m megatron_t1.planner.dryrun_worker JOBS OUT`: visits ranks of layouts, one after another.

JOBS is a JSON list of {"run": directory with config.yaml, "role", "ranks", "passes": ranks that also run forward and
backward}. OUT gets lines of JSON: for each job one about the whole model and batch, one for each rank, and one when
it is done.

Every few ranks have a process of their own, forked after the imports: a model under Megatron's DistributedDataParallel
is never freed, and with a hundred of them around a garbage collection takes longer than a rank.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from megatron_t1.config.compose import load_run_config
from megatron_t1.errors import readable
from megatron_t1.planner.dryrun import SAID
from megatron_t1.planner.dryrun_world import MetaBackend, fake_world
from megatron_t1.timing import timed

RANKS_OF_A_CHILD = 8


def main(arguments: list[str]) -> int:
    try:
        return _main(arguments)
    except Exception as error:
        return _report(error)


def _main(arguments: list[str]) -> int:
    jobs, out = json.loads(Path(arguments[0]).read_text()), Path(arguments[1])
    backend = MetaBackend()
    backend.prepare()
    import torch

    from megatron_t1.planner import dryrun_pass, dryrun_rank  # noqa: F401

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what was imported is never garbage: collecting after each rank needn't look at it
    fork = multiprocessing.get_context("fork")
    with out.open("w") as file:
        for index, job in enumerate(jobs):
            ranks = job["ranks"]
            for start in range(0, len(ranks), RANKS_OF_A_CHILD):
                some = ranks[start : start + RANKS_OF_A_CHILD]
                child = fork.Process(target=_visit, args=(job, index, some, backend, file))
                child.start()
                child.join()
                if child.exitcode:
                    if child.exitcode < 0:
                        print(f"error: signal {-child.exitcode} ended a visit of ranks {some}", file=sys.stderr)
                    return 1
            _write(file, job=index, done=True)
    return 0


def _report(error: Exception) -> int:
    """Print what a user can read of an error, which `dryrun` hands on; other errors are raised again."""
    said = readable(error)
    if said is None:
        raise error
    print(json.dumps({SAID: [said.problem, said.where, said.remedy]}), file=sys.stderr, flush=True)
    return 1


def _write(file: TextIO, **line: Any) -> None:
    file.write(json.dumps(line) + "\n")
    file.flush()


def _visit(job: dict[str, Any], index: int, ranks: Sequence[int], backend: MetaBackend, file: TextIO) -> None:
    try:
        _visit_ranks(job, index, ranks, backend, file)
    except Exception as error:
        sys.exit(_report(error))


def _visit_ranks(job: dict[str, Any], index: int, ranks: Sequence[int], backend: MetaBackend, file: TextIO) -> None:
    from megatron_t1.planner import dryrun_batch, dryrun_rank
    from megatron_t1.planner.dryrun_pass import forward_backward
    from megatron_t1.planner.dryrun_report import RankFindings

    config, role = load_run_config(job["run"]), job["role"]
    for rank in ranks:
        seconds: dict[str, float] = {}
        with timed(seconds, "all"), fake_world(rank, config.layout, backend, architecture=config.model.architecture):
            with timed(seconds, "build"):
                engine = dryrun_rank.build_engine(config, backend, role)
            with timed(seconds, "conversion"):
                converted = dryrun_rank.converted_elements(engine)
            with timed(seconds, "checkpoint"):
                stored = dryrun_rank.stored_elements(engine)
            with timed(seconds, "batch"):
                batch = dryrun_batch.check_batch(engine)
            place, held = dryrun_rank.place(), dryrun_rank.measure_bytes(engine)
            if rank == job["ranks"][0]:
                whole = {**dryrun_rank.whole_model(engine), **dryrun_batch.whole_batch(engine)}
                _write(file, job=index, whole=whole)
            del engine
            with timed(seconds, "pass"):
                passed = forward_backward(config, backend, role) if rank in job["passes"] else None
            gc.collect()
        findings = RankFindings(place, held, converted, stored, passed, batch, seconds)
        _write(file, job=index, rank=findings.to_json())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
