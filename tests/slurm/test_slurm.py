import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megatron_t1.config.compose import absolute, compose, save
from megatron_t1.config.schema import Config
from megatron_t1.loop.manifest import Manifest
from megatron_t1.loop.slurm import Allocation, compare, first_node
from megatron_t1.loop.steps import all_steps
from megatron_t1.paths import RunPaths

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "slurm" / "ppo_122b.sh"


@pytest.mark.parametrize(
    ("text", "node"),
    [("n[1-4,7],gpu03", "n1"), ("gpu03", "gpu03"), ("gpu03,gpu04", "gpu03"), ("rack1-n[007-009]", "rack1-n007"),
     ("a[3]b,c", "a3b")],
)  # fmt: skip
def test_first_node_of_a_list(text, node):
    assert first_node(text) == node


def test_allocation_from_the_environment(monkeypatch):
    for name, value in {"JOB_ID": "7", "JOB_NUM_NODES": "3", "JOB_CPUS_PER_NODE": "72(x2),36", "JOB_NODELIST": "n[1-3]",
                        "GPUS_ON_NODE": "8"}.items():  # fmt: skip
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert Allocation.current() == Allocation(7, 3, 36, 8, "n[1-3]")


def test_allocation_against_layout_names_what_is_missing():
    config = compose(["experiment=ppo_122b", "cluster.train.gpus_per_node=8"])
    problems = compare(config, Allocation(1, 4, 4, 0, "n[1-4]"))
    assert any("training needs 8 nodes" in problem and "-N8" in problem for problem in problems)
    assert any("8 processes per node, the allocation has 4 CPUs" in problem for problem in problems)
    assert any("--gpus-per-node=8" in problem for problem in problems)
    assert compare(config, Allocation(1, 8, 96, 8, "n[1-8]")) == []


def test_batch_script_is_valid_bash_and_reads_nothing_beside_it():
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    text = SCRIPT.read_text()
    assert "$0" not in text and "BASH_SOURCE" not in text and "source " not in text


DRIVER = textwrap.dedent("""
    import functools, sys
    from loop_commands import dummy_command
    from megatron_t1.config.compose import load_run_config
    from megatron_t1.loop.launcher import PhaseCommand
    from megatron_t1.loop.runner import opened

    def command(config, step):
        base = dummy_command(config, step, sys.argv[2])
        if step.kind == "rollout":
            return base
        return PhaseCommand(base.name, "train", base.module, base.arguments, config.layout.processes, distributed=True)

    with opened(load_run_config(sys.argv[1]), command=command) as runner:
        runner.run()
""")


def slurm_run(tmp_path) -> Config:
    config = absolute(
        compose([f"run.dir={tmp_path / 'run'}", "cluster=slurm", "cluster.train.processes_per_node=1",
                 "loop.iterations=1",
                 "loop.warmup_iterations=1", "cluster.rollout.threads=1", "cluster.train.threads=1"])
    )  # fmt: skip
    save(config, f"{config.run.dir}/config.yaml")
    (tmp_path / "driver.py").write_text(DRIVER)
    script = tmp_path / "job.sh"
    script.write_text(f'#!/bin/bash\nexec {sys.executable} {tmp_path}/driver.py "$@"\n')
    return config


def environment(**more):
    return {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "loop"), str(ROOT)]), **more}


@pytest.mark.slow
def test_loop_over_two_virtual_nodes(cluster, tmp_path):
    config = slurm_run(tmp_path)
    job = cluster.submit(
        "-N2", "--exclusive", "-o", str(tmp_path / "log"), str(tmp_path / "job.sh"), config.run.dir, "",
        cwd=tmp_path, env=environment(),
    )  # fmt: skip
    assert cluster.finish(job) == "COMPLETED", (tmp_path / "log").read_text()
    expected = [key for step in all_steps(config.loop) for key in step.keys]
    paths = RunPaths.of(config.run.dir)
    assert [step.key for step in Manifest.read(paths.manifest).finished] == expected
    ran = [tuple(json.loads(line)) for line in (paths.root / "executions.jsonl").read_text().splitlines()]
    assert {rank for _, phase, rank in ran if phase == "actor"} == {0, 1}  # one process on each node
    assert "critic finished" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_failing_rank_on_the_second_node_is_named(cluster, tmp_path):
    config = slurm_run(tmp_path)
    job = cluster.submit(
        "-N2", "--exclusive", "-o", str(tmp_path / "log"), str(tmp_path / "job.sh"), config.run.dir, "fail",
        cwd=tmp_path, env=environment(FAILING_RANK="1"),
    )  # fmt: skip
    assert cluster.finish(job) == "FAILED"
    text = (tmp_path / "log").read_text()
    assert "first failing rank: 1" in text and "the frobnicator is missing" in text


@pytest.mark.slow
def test_scancel_leaves_no_process(cluster, tmp_path):
    pids = tmp_path / "pids"
    config = slurm_run(tmp_path)
    job = cluster.submit(
        "-N2", "--exclusive", "-o", str(tmp_path / "log"), str(tmp_path / "job.sh"), config.run.dir, "tree",
        cwd=tmp_path, env=environment(PID_FILE=str(pids)),
    )  # fmt: skip
    cluster.wait(pids.exists, 30, "the phase")
    cluster.output("scancel", str(job))
    assert cluster.finish(job) == "CANCELLED"
    from megatron_t1.loop.processes import start_ticks

    recorded = [int(pid) for pid in pids.read_text().split()]
    cluster.wait(lambda: all(start_ticks(pid) is None for pid in recorded), 15, "the phase's end")


@pytest.mark.slow
def test_real_batch_script_checks_the_allocation_first(cluster, tmp_path):
    """Submitted from another directory than the script's, with smaller resources on the command line."""
    t1 = tmp_path / "t1"
    t1.write_text(f'#!/bin/bash\nexec {sys.executable} -m megatron_t1.cli "$@"\n')
    t1.chmod(0o755)
    for name in ("tasks/train", "tasks/held_out", "models/tiny_start"):
        (tmp_path / name).mkdir(parents=True)
    job = cluster.submit(
        "-N2", "--gpus-per-node=0", "--time=5", "-o", str(tmp_path / "log"), str(SCRIPT), f"run.dir={tmp_path / 'run'}",
        "model=tiny", "layout=ep2", "env=terminal", "rollout=default", "train=default",
        "layout.processes=4", "cluster.train.processes_per_node=1",
        cwd=tmp_path, env={**environment(), "T1": str(t1)},
    )  # fmt: skip
    assert cluster.finish(job) == "FAILED"
    text = (tmp_path / "log").read_text()
    assert "on 2 nodes: n[1-2]" in text
    assert "training needs 4 nodes (1 processes each), the allocation has 2: submit with -N4" in text
    assert not (tmp_path / "run" / "phases").exists()
