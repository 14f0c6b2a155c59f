"""A training phase with a planted fault: `python -m tests.training.faulty` takes megatron_t1.training.main's arguments.

T1_FAULT is JSON: on `rank`, after mini-batch `after` of a phase, `what`: kill | hang; or, with `what` = write, a kill
in the writing of the `after`-th checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

from megatron_t1.training import main


def plant(rank: int, after: int, what: str) -> None:
    from megatron_t1.model import checkpoint
    from megatron_t1.training.progress import Progress

    if int(os.environ["RANK"]) != rank:
        return
    took, digest_own, written = Progress.took, checkpoint._digest_own, []

    def faulty(self, sums):
        took(self, sums)
        if self.taken == after and what != "write":
            act(what)

    def in_the_writing(directory):
        written.append(directory)
        if len(written) == after:
            act("kill")
        return digest_own(directory)

    Progress.took = faulty
    if what == "write":
        checkpoint._digest_own = in_the_writing


def act(what: str) -> None:
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def run() -> int:
    roles = main.run_roles

    def with_fault(*arguments):
        from megatron_t1.model.backend import select_backend

        select_backend("cpu").prepare()
        plant(**json.loads(os.environ["T1_FAULT"]))
        roles(*arguments)

    if os.environ.get("T1_FAULT"):
        main.run_roles = with_fault
    return main.main()


if __name__ == "__main__":
    sys.exit(run())
