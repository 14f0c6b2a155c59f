"""Processes of a running training are killed at random moments; it ends as one that nobody disturbed.

`make chaos` does it for as long as one likes: T1_CHAOS_KILLS in all, T1_CHAOS_SEED, T1_CHAOS_REPORT (a file).
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest

from megatron_t1.paths import RunPaths
from tests.chaos.kills import KINDS, Chaos, outcome, weight_distance
from tests.workshop import Workshop

pytest.importorskip("vllm")
KILLS = int(os.environ.get("T1_CHAOS_KILLS", "2"))
SEED = int(os.environ.get("T1_CHAOS_SEED", "0"))
REPORT = os.environ.get("T1_CHAOS_REPORT", "")
KILLS_OF_A_RUN = 5  # a run has eight steps
# Weights that were trained on the same tokens; prefix-cache hits change the last bits of the sampler's log-probs.
TOLERANCE = 1e-4
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900 + 120 * KILLS)]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    place = Workshop(tmp_path_factory.mktemp("chaos"))
    place.options += ["train.actor.old_logprobs=recomputed", "rollout.samples_per_task=2", "eval.attempts=1"]
    base = f"model.path={place.directory}/sft/model"
    place.t1("tasks", "generate", *place.options)
    place.t1("model", "init", *place.options, base)
    yield place
    shutil.rmtree(place.scratch)


@pytest.fixture(scope="module")
def undisturbed(workshop) -> RunPaths:
    assert "done:" in workshop.run("undisturbed", "loop.colocate_roles=false")
    return RunPaths.of(workshop.directory / "undisturbed")


def test_whatever_is_killed_the_training_is_the_same(workshop, undisturbed):  # slime#1558 vllm#55510 AReaL#622
    expected, kills, distances = outcome(undisturbed), [], []
    started = time.monotonic()
    while len(kills) < KILLS:
        number = len(distances)
        words = [*workshop.run_words(f"run_{number}"), "loop.colocate_roles=false"]
        chaos = Chaos(workshop, f"run_{number}", SEED * 1000 + number, min(KILLS_OF_A_RUN, KILLS - len(kills)), words)
        chaos.run()
        assert chaos.kills, "nothing was killed"
        assert outcome(chaos.paths) == expected
        distances.append(weight_distance(undisturbed, chaos.paths, 1))
        assert distances[-1] <= TOLERANCE
        kills += chaos.kills
        shutil.rmtree(chaos.paths.root)
        if REPORT:
            write_report(Path(REPORT), kills, distances, time.monotonic() - started)


def write_report(path: Path, kills: list, distances: list[float], seconds: float) -> None:
    """A table of what was killed, in which phase, and whether the loop went on or was started again."""
    lines = [
        f"{len(kills)} processes killed (SIGKILL) at random moments of {len(distances)} trainings, seed {SEED}, in "
        f"{seconds / 60:.0f} minutes. Every training ended with the token ids, steps and counters of an undisturbed "
        f"one; its weights differ by at most {max(distances):.1e} of a tensor's largest. No process or mount was left.",
        "",
        "| killed | " + " | ".join(phases := sorted({kill.phase for kill in kills})) + " | all | loop went on |",
        "|---" * (len(phases) + 3) + "|",
    ]
    for kind in KINDS:
        own = [kill for kill in kills if kill.kind == kind]
        by_phase = Counter(kill.phase for kill in own)
        cells = [str(by_phase[phase]) for phase in phases]
        lines.append(f"| {kind} | {' | '.join(cells)} | {len(own)} | {sum(kill.status is None for kill in own)} |")
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("kind", list(KINDS))
def test_each_kind_is_one(kind):
    """Command lines as they are; the engine's supervisor names the engine's module too."""
    lines = {
        "engine core": ["VLLM::EngineCore"],
        "engine": ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"],
        "sandbox": ["/usr/bin/bwrap", "--unshare-all", "--", "bash"],
        "phase supervisor": ["python", "-m", "megatron_t1.loop.supervisor", "1", "15", "log", "python", "-m", "x"],
        "rollout worker": ["python", "-m", "megatron_t1.loop.worker", "--run", "r"],
        "torchrun": ["python", "-m", "torch.distributed.run", "-m", "megatron_t1.training.main", "--", "--run", "r"],
        "rank": ["python", "-u", "-m", "megatron_t1.training.main", "--run", "r"],
        "loop": ["python", "-m", "megatron_t1.cli", "run"],
    }
    assert next(name for name, fits in KINDS.items() if fits(lines[kind])) == kind
