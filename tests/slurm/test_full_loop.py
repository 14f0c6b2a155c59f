"""The real loop over two virtual nodes through slurm/ppo_122b.sh: vLLM on each, Megatron-Core across both."""

import json
from collections import Counter
from pathlib import Path

import pytest
from jobs import SCRIPT, TINY, processes_of, user_environment

from megatron_t1.manifest import Manifest
from megatron_t1.paths import RunPaths
from megatron_t1.trajectory.store import RolloutStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
LIMIT_S = 500  # of one job, on a busy machine
SHOW_NODE = '["echo process $SLURM_PROCID of $SLURM_NTASKS runs on $SLURMD_NODENAME"]'


@pytest.fixture
def scratch(cluster, tmp_path) -> Path:
    """Where the job's sandboxes lie: not below pytest's own directory, which only root may enter."""
    return cluster.base / tmp_path.name


@pytest.fixture
def submit(cluster, inputs, tmp_path, scratch):
    """Submits the script from a directory that isn't the repository, as a user does; the log is LOG there."""

    scratch.mkdir(exist_ok=True)

    def submit(log: str, *overrides: str) -> int:
        return cluster.submit(
            "-N2", "--gpus-per-node=0", "--time=20", "-o", log, str(SCRIPT), *TINY, "run.dir=run",
            f"model.path={inputs / 'model'}", f"env.tasks={inputs / 'tasks/train'}",
            f"eval.tasks={inputs / 'tasks/held_out'}", *overrides,
            cwd=tmp_path, env=user_environment() | {"TMPDIR": str(scratch)},
        )  # fmt: skip

    return submit


def keys(run: RunPaths) -> list[tuple[int, str]]:
    return [step.key for step in Manifest.read(run.manifest).finished]


def test_whole_loop_over_two_nodes(cluster, submit, tmp_path):
    job = submit(
        "log", "loop.warmup_iterations=1", "loop.iterations=1",
        f"cluster.train.setup={SHOW_NODE}", f"cluster.rollout.setup={SHOW_NODE}",
    )  # fmt: skip
    state = cluster.finish(job, LIMIT_S)
    text = (tmp_path / "log").read_text()
    assert state == "COMPLETED", text
    run = RunPaths.of(tmp_path / "run")
    assert keys(run) == [
        (0, "evaluation"), (0, "rollout"), (0, "critic"),
        (1, "rollout"), (1, "critic"), (1, "actor"), (1, "export"), (2, "evaluation"),
    ]  # fmt: skip
    assert {step.attempts for step in Manifest.read(run.manifest).finished} == {1}
    assert "policy   checks passed" in text  # the table of evaluations at the end

    for iteration, phase in ((0, "evaluation"), (0, "critic"), (1, "rollout"), (1, "critic")):
        for rank, node in enumerate(("n1", "n2")):
            log = run.phase(iteration, phase) / "logs" / "attempt_1" / f"rank_{rank}.log"
            assert f"process {rank} of 2 runs on {node}\n" in log.read_text()

    for iteration in (0, 1):  # each worker had an engine of its own and played its half; all are there once
        for worker in (0, 1):
            log = run.phase(iteration, "evaluation" if iteration == 0 else "rollout") / f"engine.{worker}.log"
            assert log.stat().st_size > 0
        store = RolloutStore(run.rollouts(iteration))
        assert len(store.ids()) == 8
        names = sorted(path.name for path in run.rollouts(iteration).iterdir())
        assert sum(name.endswith(".safetensors") for name in names) == 1, names  # one shard, sealed once
        assert [name[:11] for name in names if name.endswith(".log")] == ["exchange.0.", "exchange.1."]
        assert len(names) == 3, names
        assert Counter(header.task for header in store.headers().values()).most_common(1)[0][1] == 2
    metrics = [json.loads(line) for line in (run.root / "metrics.jsonl").read_text().splitlines()]
    rollouts = [entry for entry in metrics if entry.get("phase") == "rollout"]
    assert len(rollouts) == 2
    for policy in (0, 1):
        summary = json.loads((run.evaluation(policy) / "summary.json").read_text())
        assert len(summary["tasks"]) == 6

    for role, iteration in (("critic", 1), ("critic", 2), ("actor", 1)):  # both nodes wrote their experts
        names = {path.name for path in (run.root / "checkpoints" / role / f"iter_{iteration:04d}").iterdir()}
        assert {"__0_0.distcp", "__1_0.distcp"} <= names
    assert (run.root / "hf" / "iter_0001" / "config.json").is_file()
    assert not processes_of(job, cluster.env["SLURM_CONF"])


def test_cancelled_and_requeued_run_goes_on(cluster, submit, tmp_path, scratch):
    """Cancelled while both engines work, requeued during training (as after a node failure), submitted once more."""
    options = (
        "loop.warmup_iterations=0", "loop.iterations=1", "loop.evaluate_first=false", "loop.evaluate_last=false",
        "rollout.samples_per_task=8",
    )  # fmt: skip
    run = RunPaths.of(tmp_path / "run")
    job = submit("log-1", *options)
    cluster.wait(lambda: any(run.rollouts(0).glob("*.safetensors")), 300, "the first finished episode")
    commands = " ".join(processes_of(job, cluster.env["SLURM_CONF"]).values())
    assert commands.count("vllm.entrypoints") >= 2
    assert any(scratch.glob("t1-sandboxes-*"))
    cluster.output("scancel", str(job))
    assert cluster.finish(job) == "CANCELLED"
    cluster.wait(lambda: not processes_of(job, cluster.env["SLURM_CONF"]), 20, "the job's processes to end")
    kept = RolloutStore(run.rollouts(0)).headers()
    assert 1 <= len(kept) < 32

    job = submit("log-2", *options)
    cluster.wait((run.phase(0, "critic") / "launch.json").exists, 300, "training")
    played = RolloutStore(run.rollouts(0)).headers()
    assert len(played) == 32
    assert all(played[name].to_json() == header.to_json() for name, header in kept.items())
    cluster.output("scontrol", "requeue", str(job))
    cluster.wait(lambda: cluster.state(job) != "RUNNING", 60, "the requeue")
    state = cluster.finish(job, LIMIT_S)
    text = (tmp_path / "log-2").read_text()
    assert state == "COMPLETED", text
    assert text.count("iteration 0: rollout") == 1  # not repeated after the requeue
    assert text.count("iteration 0: critic + actor + export") == 2
    assert keys(run) == [(0, "rollout"), (0, "critic"), (0, "actor"), (0, "export")]

    job = submit("log-3", *options)
    assert cluster.finish(job, LIMIT_S) == "COMPLETED"
    assert "nothing is left to do" in (tmp_path / "log-3").read_text()
