"""Kill one process of a running loop, chosen by its kind; and say what a run came to, to compare it with another."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from megatron_t1.manifest import Manifest
from megatron_t1.paths import RunPaths
from megatron_t1.phase import PhaseResult, missing_outputs
from tests.workshop import MARK, Workshop, played, records

Words = list[str]

# What a process of each kind has in its command line. The first that fits names a process.
KINDS: dict[str, Callable[[Words], bool]] = {
    "engine core": lambda words: any("EngineCore" in word for word in words),
    "engine": lambda words: any("api_server" in word for word in words) and "supervisor" not in " ".join(words),
    "sandbox": lambda words: any(word.endswith("bwrap") for word in words[:3]),
    "phase supervisor": lambda words: "megatron_t1.loop.supervisor" in words,
    "rollout worker": lambda words: "megatron_t1.loop.worker" in words,
    "torchrun": lambda words: "torch.distributed.run" in words,
    "rank": lambda words: "megatron_t1.training.main" in words,
    "loop": lambda words: "megatron_t1.cli" in words,
}


@dataclass(frozen=True)
class Kill:
    kind: str
    phase: str  # unfinished step at that moment
    delay_s: float
    status: int | None  # of the loop afterwards; None: it went on


def processes_by_kind(mark: str) -> dict[str, list[int]]:
    """Living processes that carry the workshop's mark."""
    found: dict[str, list[int]] = {}
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) != mark and not _of_marked(process, mark):
                continue
            words = process.cmdline() or [process.name()]
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
        except (psutil.Error, OSError):
            continue
        kind = next((kind for kind, fits in KINDS.items() if fits(words)), None)
        if kind:
            found.setdefault(kind, []).append(process.pid)
    return found


def _of_marked(process: psutil.Process, mark: str) -> bool:
    """A process that changed its environment, or whose environment can't be read, below one that carries the mark."""
    parent = process.parent()
    return parent is not None and parent.environ().get(MARK) == mark


class Chaos:
    """Runs one training to its end, killing what the generator says.

    Args:
        wanted: how many kills; the run is left alone afterwards.
    """

    def __init__(self, workshop: Workshop, name: str, seed: int, wanted: int, words: Words):
        self.workshop, self.words, self.wanted = workshop, words, wanted
        self.paths = RunPaths.of(workshop.directory / name)
        self.random = random.Random(seed)
        self.kills: list[Kill] = []
        self.kept: dict[Path, dict[str, str]] = {}

    def run(self, limit_s: float = 3600.0) -> None:
        """Start the training again and again until it is done."""
        deadline = time.monotonic() + limit_s
        while True:
            assert time.monotonic() < deadline, "the training doesn't get to its end"
            loop = self.workshop.start(*self.words)
            while loop.poll() is None and len(self.kills) < self.wanted:
                self._kill_one(loop)
            status = loop.wait(max(1.0, deadline - time.monotonic()))
            said = self.workshop.output.read_text()
            assert "Traceback" not in said, said[-3000:]
            self.workshop.no_process_is_left()
            self._nothing_is_left_behind()
            self._finished_trajectories_stay()
            if status == 0:
                return
            assert "remedy:" in said or status in (-signal.SIGKILL, 128 + signal.SIGKILL), (status, said[-3000:])

    def _kill_one(self, loop) -> None:
        """Let the loop finish up to three steps, wait for a moment of the next, and kill a process that lives then."""
        finished = self._finished() + self.random.choice((0, 0, 1, 1, 2, 3))
        delay = self.random.uniform(0.0, 15.0)  # of a step's some 10 to 30 s
        kinds = list(KINDS)
        self.random.shuffle(kinds)
        while self._finished() < finished and loop.poll() is None:
            time.sleep(0.05)
        deadline = time.monotonic() + delay
        while time.monotonic() < deadline and loop.poll() is None:
            time.sleep(0.01)
        alive = processes_by_kind(self.workshop.mark)
        kind = next((kind for kind in kinds if alive.get(kind)), None)
        if kind is None or loop.poll() is not None:
            return
        victim = self.random.choice(sorted(alive[kind]))
        phase = self._phase()
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            return
        for _ in range(1500):  # a loop that is about to end does so within this time
            if loop.poll() is not None:
                break
            if kind == "sandbox":  # its episode starts again; the loop goes on
                break
            time.sleep(0.02)
        self.kills.append(Kill(kind, phase, delay, loop.poll()))

    def _phase(self) -> str:
        """The step that is being made: launched, and without a result."""
        launches = [
            path for path in self.paths.root.glob("phases/*/*/launch.json")
            if not (path.parent / "result.json").exists()
        ]  # fmt: skip
        return max(launches, key=lambda path: path.stat().st_mtime).parent.name if launches else "between"

    def _finished(self) -> int:
        return len(Manifest.read(self.paths.manifest).finished) if self.paths.manifest.exists() else 0

    def _nothing_is_left_behind(self) -> None:
        mounts = Path("/proc/mounts").read_text()
        assert str(self.workshop.scratch) not in mounts and str(self.workshop.directory) not in mounts

    def _finished_trajectories_stay(self) -> None:
        for directory in [*self.paths.root.glob("rollouts/*"), *self.paths.root.glob("evaluations/*")]:
            found, before = records(directory), self.kept.get(directory, {})
            assert before.items() <= found.items(), directory
            self.kept[directory] = found


def outcome(paths: RunPaths) -> dict[str, object]:
    """What must be equal in two runs whose sampling is seeded: trajectories to the token, steps and counters."""
    manifest = Manifest.read(paths.manifest)
    found: dict[str, object] = {"steps": [step.key for step in manifest.finished]}
    for key in found["steps"]:
        result = PhaseResult.read(paths.phase(*key))
        assert missing_outputs(result, paths.root, digests=True) == []
        if key[1] in ("critic", "actor"):
            names = (f"{key[1]}/optimizer_steps", f"{key[1]}/learning_rate", "batch/loss_tokens", "batch/mean_reward")
            found[f"{key}"] = {name: result.metrics[name] for name in names}
    for directory in sorted(paths.root.glob("rollouts/*")):
        found[directory.name] = played(directory)
    return found


def weight_distance(one: RunPaths, other: RunPaths, policy: int) -> float:
    """Largest difference of two exported policies, over the largest weight of each tensor."""
    from safetensors.numpy import load_file

    worst = 0.0
    for path in sorted(one.hf(policy, "").glob("*.safetensors")):
        first, second = load_file(path), load_file(other.hf(policy, "") / path.name)
        assert first.keys() == second.keys()
        for name, values in first.items():
            difference = np.abs(values.astype(np.float64) - second[name].astype(np.float64)).max()
            worst = max(worst, difference / max(np.abs(values.astype(np.float64)).max(), 1e-12))
    return worst
