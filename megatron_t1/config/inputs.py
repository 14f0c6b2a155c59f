"""What a command needs on disk before it starts: is it there, and is it what its option says?"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from megatron_t1.config.compose import flatten, load_run_config
from megatron_t1.config.schema import MISSING, Config, RewardConfig
from megatron_t1.errors import T1Error
from megatron_t1.manifest import Manifest
from megatron_t1.paths import RunPaths, number_of
from megatron_t1.phase import RESULT_FILE

ADVICE = {
    "model.path": "`t1 model init` makes a tiny one, `t1 train sft` trains it",
    "train.actor.reference": "empty: model.path",
    "train.critic.start": "`t1 train critic` with train.critic.rollouts leaves one in RUN/critic",
    "env.tasks": "`t1 tasks generate` makes tasks",
    "eval.tasks": "`t1 tasks generate` makes tasks",
    "train.sft.demonstrations": "`t1 tasks demonstrate` makes demonstrations",
}
MODEL_FILES = ("config.json", "tokenizer.json")
CHECKPOINT_MARKER = "checkpoint.json"
TASK_FILES = ("task.toml", "instruction.md", "task.yaml")


def missing_inputs(config: Config, options: Iterable[str]) -> list[str]:
    """One line for each of the path options that is not set, names nothing, or names something else."""
    flat = flatten(config)
    problems = []
    for option in options:
        places = {option: flat[option]}
        if option == "env.tasks":
            places = {f"env.sources.{name}": path for name, path in config.env.sources.items()} or places
            trials = [path for path in config.rollout.selection.trials if not Path(path).is_dir()]
            problems += [f"rollout.selection.trials: {path}: no such directory" for path in trials]
        for name, value in places.items():
            if not value or value == MISSING:
                problems.append(f"{name} is not set")
            elif lacks := _lacks(option, Path(value)):
                problems.append(f"{name}={value}: {lacks} ({ADVICE[option]})")
            elif option == "train.critic.start":
                problems += [f"{name}={value}: {line}" for line in _critic_problems(config, Path(value).resolve())]
    return problems


def _critic_problems(config: Config, critic: Path) -> list[str]:
    """Why a checkpoint can't be the first critic of this training, as far as small files beside it tell.

    A critic that was copied without its run's directory says nothing of its rewards; those of a run do.
    """
    try:
        role = json.loads((critic / "state.json").read_text())["role"]
    except (OSError, ValueError, KeyError, TypeError):
        role = ""
    if role not in ("", "value"):
        return [f"it is the checkpoint of a {role}, not of a critic"]
    number = number_of(critic)
    if number is None:
        paths, phase = RunPaths.of(critic.parent), (0, "warmup")
        own = paths.warm_critic
    else:
        paths, phase = RunPaths.of(critic.parents[2]), (number - 1, "critic")
        own = paths.checkpoint("critic", number)
    if own != critic or not paths.config.is_file():
        return []
    directory = paths.phase(*phase)
    if directory.is_dir() and not (directory / RESULT_FILE).is_file():
        return [f"the {phase[1]} phase that writes it isn't finished ({directory})"]
    try:
        before = load_run_config(paths.root)
    except T1Error:
        return []
    problems = [line] if (line := other_reward(before.reward, config.reward)) else []
    if before.train.gae.gamma != config.train.gae.gamma:
        problems.append(
            f"its values are for train.gae.gamma={before.train.gae.gamma:g}, here it is {config.train.gae.gamma:g}"
        )
    return problems


def other_reward(theirs: RewardConfig, own: RewardConfig) -> str:
    """How the reward that something was made with differs from the configured one; "" where it doesn't."""
    differing = [
        (name, there, here) for name, there in flatten(theirs).items() if there != (here := getattr(own, name))
    ]
    if not differing:
        return ""
    return "another reward: " + ", ".join(
        f"reward.{name}={there}, here it is {here}" for name, there, here in differing
    )


def _lacks(option: str, directory: Path) -> str:
    """What `directory` lacks to be what `option` names; "" when it looks complete."""
    if option in ("env.tasks", "eval.tasks") and directory.is_file():
        return ""  # a list, read when its tasks are
    if not directory.is_dir():
        return "no such directory"
    if option in ("model.path", "train.actor.reference"):
        absent = [name for name in MODEL_FILES if not (directory / name).is_file()]
        if not any(directory.glob("*.safetensors")):
            absent.append("*.safetensors")
        return f"no model, {', '.join(absent)} missing" if absent else ""
    if option == "train.critic.start":
        return "" if (directory / CHECKPOINT_MARKER).is_file() else f"no checkpoint, {CHECKPOINT_MARKER} missing"
    if option in ("env.tasks", "eval.tasks"):
        found = any((folder / name).is_file() for folder in directory.iterdir() for name in TASK_FILES)
        return "" if found else "no task in it, which is a folder with task.toml"
    return ""


def run_dir_problems(config: Config) -> list[str]:
    """Why the run directory can't be one: a run that lies inside another would be part of it."""
    root = Path(config.run.dir).resolve()
    inside = next((parent for parent in root.parents if is_run(parent)), None)
    if inside is None:
        return []
    return [f"run.dir={config.run.dir} lies inside the run {inside}: name a directory outside of it"]


def is_run(directory: Path) -> bool:
    """Whether a training was started in `directory`; also where of its manifest only the one before is left."""
    return Manifest.exists(directory / "manifest.json") and (directory / "config.yaml").is_file()


def device_problems(config: Config) -> list[str]:
    """Whether the device that is asked for is there. Of this machine only: phases under Slurm run on others."""
    cluster = config.cluster
    if cluster.backend == "cuda" and cluster.launcher == "local" and not any(Path("/dev").glob("nvidia[0-9]*")):
        return ["cluster.backend=cuda: this machine has no NVIDIA device (/dev/nvidia0); use cluster.backend=cpu"]
    return []
