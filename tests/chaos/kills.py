"""Kill a process of a running training, by its kind or because it is writing; start again; until it is done."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_t1.config.compose import load_run_config
from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.sandbox.cgroup import find_parents
from megatron_t1.environment.sandbox.scratch import BASE, PREFIX
from megatron_t1.errors import T1Error
from megatron_t1.loop.steps import next_step
from megatron_t1.manifest import Manifest
from megatron_t1.paths import RunPaths
from tests.chaos.writes import Writes, is_kept, writer_of
from tests.workshop import MARK, Workshop, records

Words = list[str]

# What a process of each kind has in its command line. The first that fits names a process. Agents are coroutines of
# the rollout worker. An engine's core that can't change its title looks as any spawned child of its engine.
KINDS: dict[str, Callable[[Words], bool]] = {
    "engine core": lambda words: any("EngineCore" in word for word in words),
    "engine": lambda words: any("api_server" in word for word in words) and "supervisor" not in " ".join(words),
    "verifier": lambda words: _is_bwrap(words) and "/logs/verifier" in words,
    "sandbox": lambda words: _is_bwrap(words),
    "phase supervisor": lambda words: "megatron_t1.loop.supervisor" in words,
    "srun": lambda words: words[0].rpartition("/")[2].startswith("srun"),
    "rollout worker": lambda words: "megatron_t1.loop.worker" in words,
    "torchrun": lambda words: "torch.distributed.run" in words,
    "rank": lambda words: "megatron_t1.training.main" in words,
    "loop": lambda words: "megatron_t1.cli" in words and "python" in words[0],
}
SPAWNED = "multiprocessing.spawn"
OF_ROLLOUT = ("engine core", "engine", "verifier", "sandbox", "rollout worker")
OF_TRAINING = ("torchrun", "rank")
OF_BOTH = ("phase supervisor", "loop")
BRIEF = ("verifier", "sandbox")  # waited for; their episode starts again, and the loop goes on
NONE = "between"  # no phase is there
BETWEEN = 0.05  # share of kills without regard to where the loop is
SPARED = 0.25  # share of launches that are left alone, so that a training gets to its end
IN_A_WRITE = 0.3  # share of kills that strike a writer
WAIT_S = 6.0  # for a write
BRIEF_WAIT_S = 30.0  # for a process of a brief kind: an engine starts first
LONGEST_S = 15.0  # of a launch that the undisturbed training didn't have
LONGEST_END_S = 30.0  # from a kill to the end of the loop or a new launch, of a kill that ends the phase
LOOP_START_S = 4.0  # a start of the loop, until its first launch


@dataclass(frozen=True)
class Kill:
    kind: str
    phase: str  # unfinished step at that moment
    after_s: float  # since its launch
    writing: str  # the file that was being written; "" for a kill by the clock
    status: int | None  # of the loop afterwards; None: it went on
    cost_s: float = 0.0  # until all processes were gone


def _is_bwrap(words: Words) -> bool:
    return any(word.endswith("bwrap") for word in words[:3])


def kind_of(words: Words) -> str:
    return next((kind for kind, fits in KINDS.items() if words and fits(words)), "")


def processes_by_kind(mark: str) -> dict[str, list[int]]:
    """Living processes that carry the workshop's mark, or whose parent does (sandboxes have another environment)."""
    found: dict[str, list[int]] = {}
    needle = f"{MARK}={mark}".encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            words = words_of(entry.name)
            kind = kind_of(words)
            if not kind and SPAWNED in " ".join(words) and kind_of(words_of(_parent(entry.name))) == "engine":
                kind = "engine core"
            if kind and (_carries(entry.name, needle) or _carries(_parent(entry.name), needle)):
                found.setdefault(kind, []).append(int(entry.name))
        except OSError:
            continue
    return found


def words_of(pid: str) -> Words:
    return Path("/proc", pid, "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")


def _carries(pid: str, needle: bytes) -> bool:
    return needle in Path("/proc", pid, "environ").read_bytes().split(b"\0")


def _parent(pid: str) -> str:
    return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[1]


class Chaos:
    """Runs one training to its end, killing what the generator says.

    Args:
        durations: seconds that a launch of these phases takes when nobody disturbs it, by its name ("rollout").
        wanted: how many kills; the run is left alone afterwards.
        around: command that the loop runs under (a Slurm allocation).
        killed: kind -> how many were killed in trainings before this one; the rarest kinds come first.
    """

    def __init__(
        self, workshop: Workshop, name: str, seed: int, wanted: int, words: Words, durations: dict[str, float],
        around: Words = (), killed: Counter[str] | None = None,
    ):  # fmt: skip
        self.workshop, self.words, self.wanted, self.around = workshop, words, wanted, list(around)
        self.paths = RunPaths.of(workshop.directory / name)
        self.durations = durations
        self.random = random.Random(seed)
        self.kills: list[Kill] = []
        self.killed = Counter(killed or {})
        self.kept: dict[Path, dict[str, str]] = {}
        self.started = 0.0  # when the loop was started, seconds since the epoch
        # The launch in which a sandbox was killed: its episode is played once more; lost again, it would end untrusted.
        self.struck = -1.0
        self.sandboxes: set[str] = set()  # names of those that were there at a kill

    def run(self, limit_s: float = 7200.0) -> None:
        """Start the training again and again until it is done."""
        deadline = time.monotonic() + limit_s
        while True:
            assert time.monotonic() < deadline, "the training doesn't get to its end"
            self.started, before = time.time(), len(self.kills)
            loop = self.workshop.start(*self.words, around=self.around)
            while loop.poll() is None and len(self.kills) < self.wanted:
                self._kill_one(loop)
            status = loop.wait(max(1.0, deadline - time.monotonic()))
            said = self.workshop.output.read_text()
            assert "Traceback" not in said, said[-3000:]
            self.workshop.no_process_is_left()
            self._nothing_is_left_behind()
            self._finished_trajectories_stay()
            if status == 0:
                assert not (left := self._sandboxes_left()), left
                return
            assert len(self.kills) > before, f"nothing was killed, and the loop ended with {status}\n{said[-3000:]}"
            killed = status in (-signal.SIGKILL, 128 + signal.SIGKILL) or (self.around and status)
            assert "remedy:" in said or killed, (status, said[-3000:])

    def _kill_one(self, loop) -> None:
        """Spare a launch, or wait for a random moment of it and kill a process that lives then."""
        if self.random.random() < BETWEEN:
            _wait(self.random.uniform(0.0, LOOP_START_S), loop)
        else:
            while self._phase()[0] == NONE and loop.poll() is None:
                time.sleep(0.02)
            finished = self._finished()
            if self.random.random() < SPARED:
                while self._finished() == finished and loop.poll() is None:
                    time.sleep(0.05)
                return
            _wait(self.random.uniform(0.0, self._duration()), loop)
        path, writer = self._writer() if self.random.random() < IN_A_WRITE else (None, None)
        kind, victim = ("", writer) if writer else self._victim(loop)
        if victim is None or loop.poll() is not None:
            return
        self.sandboxes |= {path.name for path in self._sandboxes()}
        began, launched = time.monotonic(), self._launched()
        try:
            kind = kind or kind_of(words_of(str(victim)))
            os.kill(victim, signal.SIGKILL)
        except OSError:  # it ended by itself
            return
        if kind in BRIEF:
            self.struck = launched
        phase, after_s = self._phase()
        while kind not in BRIEF and loop.poll() is None and self._launched() == launched:
            if time.monotonic() > began + LONGEST_END_S:
                break
            time.sleep(0.01)
        writing = "" if path is None else _without_numbers(path)
        self.killed[kind] += 1
        self.kills.append(Kill(kind, phase, after_s, writing, loop.poll(), time.monotonic() - began))

    def _victim(self, loop) -> tuple[str, int | None]:
        """A process of a kind that lives in this phase; a brief one is waited for."""
        launched, deadline = self._launched(), time.monotonic() + BRIEF_WAIT_S
        kinds = [kind for kind in self._kinds() if kind not in BRIEF or self.struck != launched]
        wanted = min(kinds, key=lambda kind: (self.killed[kind], self.random.random()))
        while True:
            alive = processes_by_kind(self.workshop.mark)
            if self._launched() != launched:  # the phase ended first
                return "", None
            if alive.get(wanted) or wanted not in BRIEF or time.monotonic() > deadline or loop.poll() is not None:
                break
        others = sorted(kind for kind in alive if kind not in BRIEF)
        kind = wanted if alive.get(wanted) else self.random.choice(others or [""])
        return kind, self.random.choice(sorted(alive[kind])) if kind else None

    def _writer(self) -> tuple[Path | None, int | None]:
        """A file that is being written, and its writer; None, None where nothing is in the time."""
        if not self.paths.root.is_dir():
            return None, None
        with Writes(self.paths.root) as writes:
            path = writes.next(is_kept, WAIT_S)
        if path is None:
            return None, None
        alive = processes_by_kind(self.workshop.mark) if writer_of(path) is None else {}
        others = [pid for kind in ("rank", "rollout worker", "loop") for pid in alive.get(kind, ())]
        return path, writer_of(path) or (self.random.choice(others) if others else None)

    def _kinds(self) -> list[str]:
        phase, _ = self._phase()
        own = OF_ROLLOUT if "rollout" in phase or "evaluation" in phase else OF_TRAINING
        return [*own, *OF_BOTH, *(["srun"] if self.around else [])]

    def _duration(self) -> float:
        """Of the step that is to be made."""
        try:
            manifest = Manifest.read(self.paths.manifest)
            step = next_step(load_run_config(self.paths.root).loop, manifest.keys)
        except T1Error:  # the loop hasn't come that far
            return next(iter(self.durations.values()))
        return self.durations.get("+".join(step.phases), LONGEST_S) if step else 0.0

    def _launched(self) -> float:
        """When the newest launch was written down; another one means that the loop went on."""
        times = [path.stat().st_mtime for path in self.paths.root.glob("phases/*/*/launch.json")]
        return max(times, default=0.0)

    def _phase(self) -> tuple[str, float]:
        """The step that is being made (launched, and without a result), and the seconds since its launch."""
        launches = [
            path for path in self.paths.root.glob("phases/*/*/launch.json")
            if not (path.parent / "result.json").exists()
        ]  # fmt: skip
        newest = max((path.stat().st_mtime for path in launches), default=0.0)
        if newest < self.started:  # of a loop before this one
            return NONE, 0.0
        names = sorted(path.parent.name for path in launches if path.stat().st_mtime > newest - 1.0)
        return "+".join(names), time.time() - newest

    def _finished(self) -> int:
        return len(Manifest.read(self.paths.manifest).finished) if self.paths.manifest.exists() else 0

    def _nothing_is_left_behind(self) -> None:
        mounts = Path("/proc/mounts").read_text()
        assert str(self.workshop.scratch) not in mounts and str(self.workshop.directory) not in mounts

    def _sandboxes_left(self) -> list[str]:
        """Directories and control groups of sandboxes; those of a killed driver go when the next one starts."""
        groups = set(find_parents(SandboxConfig()).of.values())
        return [str(path) for path in self._sandboxes()] + [
            str(parent / name) for parent in groups for name in self.sandboxes if (parent / name).exists()
        ]

    def _sandboxes(self) -> list[Path]:
        return list(self.workshop.scratch.glob(f"{BASE}-*/{PREFIX}*"))

    def _finished_trajectories_stay(self) -> None:
        for directory in [*self.paths.root.glob("rollouts/*"), *self.paths.root.glob("evaluations/*")]:
            found, before = records(directory), self.kept.get(directory, {})
            assert before.items() <= found.items(), directory
            self.kept[directory] = found


def _wait(seconds: float, loop) -> None:
    """So long, or until the loop ends."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and loop.poll() is None:
        time.sleep(0.01)


def _without_numbers(path: Path) -> str:
    """The kind of a file, e.g. `result.json`, `record`, `checkpoint`."""
    parts = path.parts
    for folder in ("checkpoints", "hf", "values"):
        if folder in parts:
            return folder
    if path.name.startswith("exchange."):
        return "exchange log"
    return "record" if ".safetensors" in path.name else path.name.lstrip(".").split(".")[0]
