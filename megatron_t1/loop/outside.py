"""Phases that are no part of a training: fine-tuning, and critic warm-up on stored rollouts. Each in its own directory.

DIR/config.yaml                       what it was started with, resolved
DIR/phases/iter_0000/PHASE/           result.json and logs
DIR/model/ or DIR/critic/             what a training starts from
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_t1 import sealed
from megatron_t1.config.compose import save
from megatron_t1.config.inputs import is_run
from megatron_t1.config.schema import Config
from megatron_t1.errors import IncompleteError, MismatchError, T1Error
from megatron_t1.loop import start_model
from megatron_t1.loop.launcher import PhaseCommand, make_launcher, next_attempt, require_success
from megatron_t1.loop.lock import RunLock
from megatron_t1.loop.runner import go_on, stop_signals
from megatron_t1.loop.storage import sweep
from megatron_t1.manifest import Manifest
from megatron_t1.paths import RunPaths
from megatron_t1.phase import RESULT_FILE, PhaseResult, missing_outputs, summarised

POLICY_FILE = "policy.json"  # in the phase's directory: the files of model.path, the same before and after


@dataclass(frozen=True)
class Kind:
    """What such a phase is, and how a run starts from what it leaves."""

    what: str
    leaves: str  # directory
    option: str


OUTSIDE = {
    "sft": Kind("a fine-tuning (`t1 train sft`)", "model", "model.path"),
    "warmup": Kind("a critic's warm-up on stored rollouts (`t1 train critic`)", "critic", "train.critic.start"),
}


def phase_outside_the_loop(directory: Path) -> str:
    """Which of these phases was started in `directory`; "" for none."""
    if is_run(directory):
        return ""
    return next((name for name in OUTSIDE if RunPaths.of(directory).phase(0, name).is_dir()), "")


def run_outside(config: Config, phase: str, *, say: Callable[[str], None]) -> PhaseResult:
    """Run one of these phases in run.dir, from its beginning or from the checkpoint that it left in its middle.

    What an earlier one left there is deleted first: stopped halfway, this one leaves nothing that could be taken for
    its result.

    Raises:
        T1Error: the directory is locked or holds something else, or the phase failed.
        MismatchError: a file of model.path isn't what it was before.
        Stopped: after a signal; the phase has been ended.
    """
    paths, model = RunPaths.of(config.run.dir), Path(config.model.path)
    _require_own_directory(paths, phase)
    _require_other_start(config, paths, phase)
    paths.root.mkdir(parents=True, exist_ok=True)
    with stop_signals() as received, RunLock(paths.root) as lock:
        lock.wait_for_former(config.cluster.stop_grace_s, lambda: len(received))
        sweep(paths.root)
        launcher = make_launcher(config, lambda: received[0] if received else lock.lost)
        problems = launcher.preflight()
        if problems:
            raise T1Error("the phase can't be started here:\n" + "\n".join(f"  - {problem}" for problem in problems))
        save(config, paths.config)
        directory = paths.phase(0, phase)
        (directory / RESULT_FILE).unlink(missing_ok=True)
        shutil.rmtree(paths.root / OUTSIDE[phase].leaves, ignore_errors=True)
        policy = start_model.describe(model, say=say, before_file=lambda: go_on(received))
        command = PhaseCommand(
            phase, "train", "megatron_t1.training.main",
            ("--run", str(paths.root), "--iteration", "0", "--roles", phase),
            config.layout.processes, distributed=True,
        )  # fmt: skip
        logs = directory / "logs" / f"attempt_{next_attempt(directory)}"
        require_success(launcher.launch(command, logs, echo=lambda line: say(f"    {line}")), command)
        lock.require_held()
        if changed := start_model.differences(model, policy):
            raise MismatchError(
                f"the policy was changed while the {phase} phase ran: " + summarised(changed), where=str(model)
            )
        sealed.write(directory / POLICY_FILE, policy)
    result = PhaseResult.read(directory)
    if wrong := missing_outputs(result, paths.root):
        raise IncompleteError(f"{phase} did not leave what it says: {summarised(wrong)}", where=str(directory))
    return result


def _require_other_start(config: Config, paths: RunPaths, phase: str) -> None:
    """Refuse to start from what this very phase replaces."""
    for option, place in (("model.path", config.model.path), ("train.critic.start", config.train.critic.start)):
        if place and Path(place).resolve() == paths.root / OUTSIDE[phase].leaves:
            raise T1Error(
                f"{option} is what {OUTSIDE[phase].what} replaces in this directory",
                where=place,
                remedy="choose another run.dir to go on from it",
            )


def _require_own_directory(paths: RunPaths, phase: str) -> None:
    other = phase_outside_the_loop(paths.root)
    if Manifest.exists(paths.manifest) or other not in ("", phase):
        raise T1Error(
            f"this directory holds {OUTSIDE[other].what if other else 'a training'}",
            where=str(paths.root),
            remedy=f"choose another run.dir for {OUTSIDE[phase].what}",
        )
