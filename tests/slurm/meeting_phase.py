"""A training phase for tests: its processes meet over gloo and stay together until another run's have met too."""

import os
import sys
import time
from pathlib import Path

import dummy_phase
import torch
import torch.distributed as dist

WAIT_S = 90


def main():
    dist.init_process_group("gloo", init_method="env://")
    jobs = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    job = torch.tensor([int(os.environ["SLURM_JOB_ID"])])
    dist.all_gather(jobs, job)
    assert all(int(other) == int(job) for other in jobs), f"processes of other jobs joined job {int(job)}: {jobs}"
    meetings = Path(os.environ["MEETINGS"])
    (meetings / os.environ["SLURM_JOB_ID"]).write_text(os.environ["MASTER_PORT"])
    deadline = time.monotonic() + WAIT_S
    while len(list(meetings.iterdir())) < 2:
        assert time.monotonic() < deadline, "the other run's processes didn't meet"
        time.sleep(0.1)
    dist.barrier()
    dist.destroy_process_group()
    dummy_phase.main()


if __name__ == "__main__":
    sys.exit(main())
