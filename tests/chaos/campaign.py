"""Many trainings, each disturbed by kills and compared with one that nobody disturbed; and the report of it.

    python -m tests.chaos.campaign DIR --kills 200 --seed 0 --report docs/chaos-report.md

What is finished lies in DIR: started again, it goes on from there. Every fifth training runs in an allocation of a real
Slurm on this machine, where it is installed; the others in plain processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_t1 import atomic
from megatron_t1.errors import T1Error
from megatron_t1.manifest import Manifest
from megatron_t1.paths import RunPaths
from megatron_t1.processes import marked, send
from tests.chaos.comparison import difference, outcome
from tests.chaos.kills import Chaos
from tests.chaos.report import write_report
from tests.workshop import MARK, Workshop

KILLS_OF_A_TRAINING = 20  # of seven launches
UNDISTURBED, TRAININGS = "undisturbed", "trainings.jsonl"
BY_SLURM = (
    "cluster=slurm cluster.stop_grace_s=4 cluster.rollout.threads=1 cluster.train.threads=1 "
    "cluster.train.processes_per_node=2"
).split()
# One optimizer's worth of everything, and what makes sampling a function of the seeds.
SMALL = (
    "train.actor.old_logprobs=recomputed rollout.samples_per_task=2 eval.attempts=1 loop.colocate_roles=false"
).split()


# In turn: what a loop does about a killed phase, a phase about episodes that had begun and about its own middle.
IN_PHASE = ("train.critic.checkpoint_every=1", "train.actor.checkpoint_every=1")
VARIANTS = (
    ("cluster.phase_retries=0", "rollout.in_flight=restart"),
    ("cluster.phase_retries=1000", "rollout.in_flight=continue"),
    ("cluster.phase_retries=0", "rollout.in_flight=continue", *IN_PHASE),
)
FAILURES = 3  # after which a campaign ends


class Campaign:
    """Trainings in one directory. Small enough for a few in a test, and for hundreds of kills in an hour.

    Args:
        directory: made if missing; finished trainings in it count.
        slurm: whether every fifth training runs under Slurm.
        furnished: a workshop whose tasks and start model are used; None: this one's own.
    """

    def __init__(self, directory: Path, *, seed: int = 0, slurm: bool = True, furnished: Workshop | None = None):
        self.seed, self.slurm = seed, slurm
        place = directory / "trainings"  # not in the command line of who started this, and so told from it
        place.mkdir(parents=True, exist_ok=True)
        self.workshop = Workshop(place, tasks=furnished)
        if furnished is not None:
            shutil.copytree(furnished.directory / "sft/model", place / "sft/model")
        self.workshop.options += SMALL
        self.book = directory / TRAININGS
        self.trainings = [json.loads(line) for line in self.book.read_text().splitlines()] if self.book.exists() else []
        self.undisturbed = RunPaths.of(place / UNDISTURBED)

    def prepare(self) -> None:
        """Tasks, a start model, and the training that nobody disturbs."""
        self.workshop.furnish()
        said = self.workshop.run(UNDISTURBED)
        assert "done:" in said or "nothing is left to do" in said

    def run(self, kills: int, report: Path | None = None) -> None:
        """Disturb trainings until there were so many kills. One that ends otherwise stays in failed_N, for a look.

        Raises:
            AssertionError: FAILURES trainings ended otherwise.
        """
        expected = outcome(self.undisturbed)
        with contextlib.ExitStack() as stack:
            allocation: list[str] = []
            while (done := self.kills) < kills:
                number = len(self.trainings)
                if self.slurm and number % 5 == 4 and not allocation:
                    allocation = stack.enter_context(slurm_allocation())
                around = allocation if number % 5 == 4 else []
                self._one(number, min(KILLS_OF_A_TRAINING, kills - done), around, expected)
                if report is not None:
                    atomic.write_text(report, self.report())
                assert len(self.failed) < FAILURES, self.failed

    @property
    def failed(self) -> list[str]:
        """Why trainings ended otherwise than the undisturbed one."""
        return [training["failed"] for training in self.trainings if training["failed"]]

    def _one(self, number: int, wanted: int, around: Sequence[str], expected: dict[str, object]) -> None:
        name, started = f"run_{number}", time.monotonic()
        paths = RunPaths.of(self.workshop.directory / name)
        shutil.rmtree(paths.root, ignore_errors=True)  # of a campaign that was stopped
        words = [*self.workshop.run_words(name), *(BY_SLURM if around else []), *VARIANTS[number % len(VARIANTS)]]
        killed = Counter(kill["kind"] for training in self.trainings for kill in training["kills"])
        chaos = Chaos(self.workshop, name, self.seed * 1000 + number, wanted, words, self.durations, around, killed)
        failed, found = "", {}
        try:
            chaos.run()
            assert chaos.kills, "nothing was killed"
            assert outcome(paths) == expected
            found = asdict(difference(self.undisturbed, paths))
        except (AssertionError, T1Error) as error:
            failed = f"training {number}: {str(error)[-3000:]}"
            send(marked(MARK, self.workshop.mark), signal.SIGKILL)
        line = {
            "failed": failed,
            "launcher": "slurm" if around else "local",
            "options": " ".join(VARIANTS[number % len(VARIANTS)]),
            "seconds": time.monotonic() - started,
            "kills": [asdict(kill) for kill in chaos.kills],
            **found,
        }
        self.trainings.append(line)
        with open(self.book, "a") as file:
            file.write(json.dumps(line) + "\n")
        if failed:
            paths.root.rename(paths.root.with_name(f"failed_{number}"))
        else:
            shutil.rmtree(paths.root)

    @property
    def kills(self) -> int:
        return sum(len(training["kills"]) for training in self.trainings)

    @property
    def durations(self) -> dict[str, float]:
        """Seconds of a launch by its phases, of the undisturbed training."""
        launches: dict[str, tuple[list[str], float]] = {}
        for step in Manifest.read(self.undisturbed.manifest).finished:
            launches.setdefault(step.launch, ([], step.seconds))[0].append(step.phase)
        return {"+".join(phases): seconds for phases, seconds in launches.values()}

    def report(self) -> str:
        launches = {step.launch: step.seconds for step in Manifest.read(self.undisturbed.manifest).finished}
        return write_report(self.trainings, undisturbed_s=sum(launches.values()), seed=self.seed)


@contextlib.contextmanager
def slurm_allocation() -> Iterator[list[str]]:
    """A cluster of one virtual node; yields the command that runs another one in an allocation of it; [] without."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "slurm"))
    from virtual_cluster import VirtualCluster, unavailable

    if unavailable():
        yield []
        return
    with tempfile.TemporaryDirectory(prefix="t1-slurm-") as directory:
        cluster = VirtualCluster(Path(directory), nodes=1, gpus=0)
        try:
            cluster.start()
            path, conf = cluster.env["PATH"], cluster.env["SLURM_CONF"]
            around = ["env", f"PATH={path}", f"SLURM_CONF={conf}", "salloc", "-Q", "-N1", "--exclusive", "--time=300"]
            yield [*around, "bash", "-c", '"$@"; exit $?', "loop"]  # salloc itself ends with 0 after a killed command
        finally:
            cluster.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, help="written anew after every training")
    options = parser.parse_args()
    campaign = Campaign(options.directory.resolve(), seed=options.seed)
    try:
        campaign.prepare()
        campaign.run(options.kills, options.report)
        print(campaign.report())
    finally:
        shutil.rmtree(campaign.workshop.scratch, ignore_errors=True)
    return int(bool(campaign.failed))


if __name__ == "__main__":
    sys.exit(main())
