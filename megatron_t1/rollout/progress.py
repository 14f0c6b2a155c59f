"""How far a rollout is: a bar on a terminal, one plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time

from megatron_t1.trajectory.record import Trajectory

LINE_EVERY_S = 5.0


class RolloutProgress:
    """Counts finished episodes; use as a context manager.

    Args:
        label: what is going on, e.g. "rollout 3".
        total: episodes to finish.
        done: of them, finished before (a restarted phase).
    """

    def __init__(self, label: str, total: int, *, done: int = 0):
        self.label, self.total, self.done = label, total, done
        self.tokens = self.sampled = self.untrusted = 0
        self._finished_here = 0
        self._reward_sum, self._rewarded = 0.0, 0
        self._began = self._last_line = time.monotonic()
        self._bar = self._task = None

    def __enter__(self) -> RolloutProgress:
        self._began = self._last_line = time.monotonic()
        if sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[facts]}"),
            )
            self._task = self._bar.add_task(self.label, total=self.total, completed=self.done, facts="")
            self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._finished_here:
            self._print()

    @property
    def seconds(self) -> float:
        return max(1e-9, time.monotonic() - self._began)

    def add(self, trajectory: Trajectory) -> None:
        header = trajectory.header
        self.done += 1
        self._finished_here += 1
        self.tokens += len(trajectory)
        self.sampled += int(trajectory.loss_mask.sum())
        if header.verdict is not None and not header.verdict.trusted:
            self.untrusted += 1
        if "total" in header.reward:
            self._reward_sum += header.reward["total"]
            self._rewarded += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, facts=self._facts())
        elif time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._print()

    def _print(self) -> None:
        self._last_line = time.monotonic()
        print(f"{self.label}: {self.done}/{self.total} episodes, {self._facts()}", flush=True)

    def _facts(self) -> str:
        facts = [f"{self.sampled / self.seconds:.0f} new tokens/s ({self.tokens / self.seconds:.0f} with prompts)"]
        if self._rewarded:
            facts.append(f"mean reward {self._reward_sum / self._rewarded:.3f}")
        if self.untrusted:
            facts.append(f"{self.untrusted} untrusted")
        return ", ".join(facts)
