"""Which rank failed first, from logs as torchrun, srun and NCCL write them."""

import pytest

from megatron_t1.loop.failure import first_failure

TORCHRUN = """E1130 torch/distributed/elastic/multiprocessing/api.py: failed (exitcode: {code}) local_rank: {rank}
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
megatron_t1.training.main FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  host      : n1
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: 4711)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
"""
OWN = "error on rank {}: the frobnicator is missing\n  remedy: install it\n"
LOST = "broken off on rank {}: the connection to another rank is gone\n  Connection closed by peer\n"
NCCL = (
    "[rank{}]:[E1130 ProcessGroupNCCL.cpp:632] [Rank {}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600013 milliseconds\n"
)


@pytest.fixture
def failure(tmp_path):
    def of(main, *ranks):
        (tmp_path / "main.log").write_text(main)
        logs = {}
        for rank, text in enumerate(ranks):
            logs[rank] = [tmp_path / f"rank_{rank}.log"]
            logs[rank][0].write_text(text)
        return first_failure(tmp_path / "main.log", logs)

    return of


def test_the_rank_that_says_why_and_not_the_one_that_lost_it(failure):
    """Also where torchrun saw the other one first: it looks at both at once."""
    for named in (0, 1):
        found = failure(TORCHRUN.format(rank=named, code=1), LOST.format(0), OWN.format(1))
        assert (found.rank, found.log.name, found.reason) == (1, "rank_1.log", "")


def test_a_rank_that_was_killed(failure):
    found = failure(TORCHRUN.format(rank=1, code=-9), LOST.format(0), "step 3\n")
    assert (found.rank, found.log.name) == (1, "rank_1.log")
    assert found.reason == "failed: rank 1 died of SIGKILL"


@pytest.mark.parametrize(
    ("said", "how"),
    [
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.\nsrun: error: n2: task 1: Out Of Memory\n",
         "SIGKILL, out of memory"),
        ("srun: error: n2: task 1: Segmentation fault\n", "SIGSEGV"),
        ("srun: error: n2: task 1: Killed\n", "SIGKILL"),
    ],
)  # fmt: skip
def test_a_task_that_slurm_says_was_killed(failure, said, how):
    found = failure(said, LOST.format(0), "step 3\n")
    assert (found.rank, found.reason) == (1, f"failed: rank 1 died of {how}")


def test_tasks_that_slurm_kills_after_one_that_failed(failure):
    main = "srun: error: n2: task 1: Exited with exit code 1\nsrun: error: n1: task 0: Killed\n"
    found = failure(main, "step 3\n", OWN.format(1))
    assert (found.rank, found.reason) == (1, "")


def test_a_rank_that_another_one_waited_for(failure):
    said = "error on rank 3: it didn't come to a collective operation in time; rank 0 waited\n"
    found = failure(TORCHRUN.format(rank=0, code=1), said, "", "", "")
    assert (found.rank, found.log.name) == (3, "rank_0.log")


def test_the_rank_that_nccl_s_watchdog_did_not_end(failure):
    main = TORCHRUN.format(rank=0, code=-6)
    found = failure(main, NCCL.format(0, 0), "loading\n", NCCL.format(2, 2))
    assert found.rank == 1 and "rank 1 didn't come to a collective operation in time" in found.reason
    found = failure(main, NCCL.format(0, 0), NCCL.format(1, 1))
    assert "the ranks wait for each other" in found.reason


def test_a_defect_s_traceback_and_nothing_at_all(failure):
    found = failure(TORCHRUN.format(rank=1, code=1), LOST.format(0), "Traceback (most recent call last):\nKeyError\n")
    assert found.rank == 1
    found = failure(TORCHRUN.format(rank=0, code=1), LOST.format(0), LOST.format(1))
    assert found.rank == 0
    assert failure("bash: no such file\n").log.name == "main.log"
