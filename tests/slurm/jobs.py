"""What the Slurm tests share: runs, the environment they are submitted with, and who belongs to a job."""

import os
import sys
from pathlib import Path

from megatron_t1.config.compose import absolute, compose, save
from megatron_t1.config.schema import Config
from megatron_t1.loop.steps import all_steps
from megatron_t1.manifest import Manifest
from megatron_t1.paths import RunPaths

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "slurm" / "ppo_122b.sh"
# The script's own configuration at a size for two virtual nodes on two cores; what each test needs comes after it.
TINY = (
    "model=tiny layout=ep2 env=terminal rollout=default train=default loop.colocate_roles=true "
    "cluster.train.processes_per_node=1 cluster.rollout.threads=1 cluster.train.threads=1 cluster.stop_grace_s=4 "
    "env.max_turns=3 eval.attempts=1 rollout.tasks_per_iteration=4 rollout.concurrency=4 "
    "rollout.max_tokens_per_turn=24 "
    "rollout.engine.omp_threads=1 rollout.engine.kv_cache_bytes=33554432 train.actor.minibatches=1 "
    "train.critic.minibatches=1"
).split()

SIZES = (
    *("+experiment=ppo_122b", "cluster=slurm", *TINY),
    *("loop.warmup_iterations=1", "loop.iterations=1", "cluster.slurm.preflight=false"),
)


def environment(**more: str) -> dict[str, str]:
    """For programs of these tests, which aren't installed."""
    folders = [ROOT / "tests" / "slurm", ROOT / "tests" / "loop", ROOT]
    return {"PYTHONPATH": os.pathsep.join(map(str, folders)), **more}


def user_environment() -> dict[str, str]:
    """As a user submits: the environment with `t1` is on PATH."""
    folder = Path(sys.executable).parent
    assert (folder / "t1").exists(), f"megatron-t1 is not installed in {folder.parent}"
    return {"PATH": os.pathsep.join([str(folder), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])}


def driven_run(directory: Path, *overrides: str) -> Config:
    """A run directory with its configuration, and job.sh, which gives its arguments to drive.py."""
    config = absolute(
        compose([f"run.dir={directory / 'run'}", "cluster=slurm", "cluster.train.processes_per_node=1",
                 "loop.iterations=1", "loop.warmup_iterations=1", "cluster.rollout.threads=1",
                 "cluster.train.threads=1", "cluster.slurm.preflight=false", *overrides])
    )  # fmt: skip
    save(config, f"{config.run.dir}/config.yaml")
    script = directory / "job.sh"
    script.write_text(f'#!/bin/bash\nexec {sys.executable} {ROOT}/tests/slurm/drive.py "$@"\n')
    return config


def processes_of(job: int, slurm_conf: str) -> dict[int, str]:
    """pid -> command line of everything that inherited the job's environment."""
    wanted = {f"SLURM_JOB_ID={job}".encode(), f"SLURM_CONF={slurm_conf}".encode()}
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def finished(run: Path) -> list[tuple[int, str]]:
    path = RunPaths.of(run).manifest
    return [step.key for step in Manifest.read(path).finished] if path.exists() else []


def all_keys() -> list[tuple[int, str]]:
    loop = compose([*SIZES, "run.dir=run"]).loop
    return [key for step in all_steps(loop) for key in step.keys]


def logs(run: Path) -> str:
    return "\n".join(path.read_text() for path in sorted((run / "slurm").glob("*.log")))
