"""The workers that share a phase, and how worker 0 learns that the others are through.

Records alone don't tell: those of episodes that the infrastructure lost in an earlier launch lie there until the worker
that owns them takes them out and plays them again. So each worker says when its share is complete, naming its launch.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_t1 import atomic
from megatron_t1.errors import T1Error


@dataclass(frozen=True)
class Crew:
    """This process's place among the workers.

    Attributes:
        launch: names this start of all the workers; another start has another one. Needed where there are several.

    Raises (at construction):
        T1Error: several workers without a launch.
    """

    worker: int = 0
    workers: int = 1
    launch: str = ""

    def __post_init__(self) -> None:
        if self.workers > 1 and not self.launch:
            raise T1Error(
                f"{self.workers} workers share a phase, but their launch has no name",
                where="T1_LAUNCH",
                remedy="start them with the loop's launcher, or give all the same new T1_LAUNCH",
            )

    def report_done(self, directory: Path) -> None:
        """To be called when all records of this worker's share are written."""
        if self.workers > 1:
            atomic.write_text(self._marker(directory, self.worker), self.launch)

    async def wait_for_others(self, directory: Path, timeout_s: float) -> None:
        """Until every worker of this launch has reported.

        Raises:
            T1Error: not within the time.
        """
        deadline = time.monotonic() + timeout_s
        while missing := [worker for worker in range(self.workers) if not self._is_done(directory, worker)]:
            if time.monotonic() > deadline:
                raise T1Error(
                    f"worker {missing[0]} of {self.workers} has not finished its episodes",
                    where=str(directory),
                    remedy="look at the other workers' logs and start the phase again",
                )
            await asyncio.sleep(0.2)

    def _is_done(self, directory: Path, worker: int) -> bool:
        if self.workers == 1:
            return True
        try:
            return self._marker(directory, worker).read_text() == self.launch
        except OSError:  # not there yet, or one that is being replaced on another node
            return False

    @staticmethod
    def _marker(directory: Path, worker: int) -> Path:
        return directory / f"worker.{worker}.done"


ALONE = Crew()
