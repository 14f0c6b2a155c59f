"""Slurm's facts as the launcher reads them, and the loop with phases of tests over a virtual cluster."""

import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
from jobs import driven_run, environment

from megatron_t1.config.compose import compose
from megatron_t1.errors import T1Error
from megatron_t1.loop.launcher import KINDS, PhaseCommand
from megatron_t1.loop.lock import LOCK_FILE, RunLock, this_process
from megatron_t1.loop.slurm import (
    PORTS,
    Allocation,
    SlurmLauncher,
    compare,
    cpus_per_task,
    first_node,
    meeting_port,
    need,
)
from megatron_t1.loop.steps import all_steps
from megatron_t1.manifest import Manifest
from megatron_t1.paths import RunPaths
from megatron_t1.processes import start_ticks


@pytest.mark.parametrize(
    ("text", "node"),
    [("n[1-4,7],gpu03", "n1"), ("gpu03", "gpu03"), ("gpu03,gpu04", "gpu03"), ("rack1-n[007-009]", "rack1-n007"),
     ("a[3]b,c", "a3b"), ("rack[1-2]n[01-16],x", "rack1n01")],
)  # fmt: skip
def test_first_node_of_a_list(text, node):
    assert first_node(text) == node


@pytest.mark.parametrize("text", ["", ",", "[", "n[a-b]", "n[1"])
def test_what_is_no_list_of_nodes_is_named(text):
    with pytest.raises(T1Error, match="can't read the node list"):
        first_node(text)


def test_allocation_from_the_environment(monkeypatch):
    for name, value in {"JOB_ID": "7", "JOB_NUM_NODES": "3", "JOB_CPUS_PER_NODE": "72(x2),36", "JOB_NODELIST": "n[1-3]",
                        "GPUS_ON_NODE": "8"}.items():  # fmt: skip
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert Allocation.current() == Allocation(7, 3, 36, 8, "n[1-3]")


def compared(config, allocation):
    return [line for kind in KINDS for line in compare(need(config, kind, allocation), allocation)]


def test_allocation_against_layout_names_what_is_missing():
    config = compose(["experiment=ppo_122b", "cluster.train.gpus_per_node=8"])
    problems = compared(config, Allocation(1, 4, 4, 0, "n[1-4]"))
    assert any("training needs 8 nodes" in problem and "-N8" in problem for problem in problems)
    assert any("8 processes per node, the allocation has 4 CPUs" in problem for problem in problems)
    assert any("--gpus-per-node=8" in problem for problem in problems)
    assert compared(config, Allocation(1, 8, 96, 8, "n[1-8]")) == []


def test_too_few_gpus_are_seen_without_being_told_how_many():
    problems = compared(compose(["experiment=ppo_122b"]), Allocation(1, 8, 96, 4, "n[1-8]"))
    assert len(problems) == 2
    assert problems[0].startswith("rollout needs 8 GPUs per node, the allocation has 4")  # one engine over 8 GPUs
    assert problems[1].startswith("training needs 8 GPUs per node, the allocation has 4")
    cpu = ["model=tiny", "layout=ep2", "cluster=slurm", "cluster.backend=cpu", "cluster.train.processes_per_node=2"]
    assert compared(compose(cpu), Allocation(1, 1, 8, 1, "n1")) == []


@pytest.mark.parametrize(
    ("cpus", "tasks", "each"), [(96, 8, 12), (8, 1, 8), (7, 1, 7), (32, 3, 10), (2, 2, 1), (1, 2, 1)]
)
def test_tasks_share_a_node_in_whole_cores(cpus, tasks, each):
    assert cpus_per_task(cpus, tasks) == each


def test_a_port_in_use_is_passed_over():
    expected = meeting_port(41, 0, probe=False)
    assert expected in PORTS
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", expected))
        taken.listen()
        assert meeting_port(41, 0, probe=True) == expected + 1


def test_ports_of_neighbouring_jobs_and_launches_differ():
    ports = [meeting_port(job, launch, probe=False) for job in range(1, 9) for launch in range(100)]
    assert len(set(ports)) == len(ports)


def test_container_takes_its_own_interpreter():
    command = PhaseCommand("critic", "train", "module", distributed=True)
    launcher = SlurmLauncher(compose(["cluster=slurm", "cluster.train.container=image.sqsh"]))
    assert launcher.python(command) == "python3"
    launcher.config.cluster.train.python = "/opt/megatron/bin/python"
    assert launcher.python(command) == "/opt/megatron/bin/python"


def submit(cluster, folder, config, behaviour="", options=("-N2", "--exclusive"), **more):
    return cluster.submit(
        *options, "-o", str(folder / "log"), str(folder / "job.sh"), config.run.dir, "dummy_phase", "dummy_phase",
        behaviour, cwd=folder, env=environment(**more),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("processes_per_node", "nodes"), [(1, ["n1", "n2"]), (2, ["n1", "n1"])])
def test_loop_over_two_virtual_nodes(cluster, tmp_path, processes_per_node, nodes):
    config = driven_run(
        tmp_path, f"cluster.train.processes_per_node={processes_per_node}",
        'cluster.train.setup=["echo rank $SLURM_PROCID runs on $SLURMD_NODENAME"]',
    )  # fmt: skip
    job = submit(cluster, tmp_path, config)
    assert cluster.finish(job) == "COMPLETED", (tmp_path / "log").read_text()
    expected = [key for step in all_steps(config.loop) for key in step.keys]
    paths = RunPaths.of(config.run.dir)
    assert [step.key for step in Manifest.read(paths.manifest).finished] == expected
    logs = paths.phase(0, "critic") / "logs" / "attempt_1"
    for rank, node in enumerate(nodes):
        assert f"rank {rank} runs on {node}\n" in (logs / f"rank_{rank}.log").read_text()
    ran = [tuple(json.loads(line)) for line in (paths.root / "executions.jsonl").read_text().splitlines()]
    assert {worker for _, phase, worker in ran if phase == "rollout"} == {0, 1}  # one worker on each node
    assert "critic finished" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_ranks_meet_at_an_address_not_a_name(cluster, tmp_path):
    """verl#491, SkyRL#709, OpenRLHF#737: names of nodes need not resolve."""
    config = driven_run(tmp_path)
    assert cluster.finish(submit(cluster, tmp_path, config)) == "COMPLETED", (tmp_path / "log").read_text()
    script = RunPaths.of(config.run.dir).phase(0, "critic") / "logs" / "attempt_1" / "launch.sh"
    assert "MASTER_ADDR=127.0.0.1 MASTER_PORT=" in script.read_text()


@pytest.mark.slow
def test_failing_rank_on_the_second_node_is_named(cluster, tmp_path):
    job = submit(cluster, tmp_path, driven_run(tmp_path), "fail", FAILING_RANK="1")
    assert cluster.finish(job) == "FAILED"
    text = (tmp_path / "log").read_text()
    assert "first failing rank: 1" in text and "the frobnicator is missing" in text


@pytest.mark.slow
def test_scancel_leaves_no_process(cluster, tmp_path):
    pids = tmp_path / "pids"
    job = submit(cluster, tmp_path, driven_run(tmp_path), "tree", PID_FILE=str(pids))
    cluster.wait(pids.exists, 30, "the phase")
    cluster.output("scancel", str(job))
    assert cluster.finish(job) == "CANCELLED"
    recorded = [int(pid) for pid in pids.read_text().split()]
    cluster.wait(lambda: all(start_ticks(pid) is None for pid in recorded), 15, "the phase's end")


@pytest.mark.slow
def test_signal_before_the_time_limit_ends_the_phase_and_keeps_the_run(cluster, tmp_path):
    pids = tmp_path / "pids"
    config = driven_run(tmp_path, "cluster.stop_grace_s=2")
    job = submit(cluster, tmp_path, config, "tree", PID_FILE=str(pids))
    cluster.wait(pids.exists, 30, "the phase")
    cluster.output("scancel", "--batch", "--signal=TERM", str(job))  # as --signal=B:TERM@300 does
    assert cluster.finish(job) == "FAILED"
    assert cluster.exit_code(job) == "143:0"
    assert "stopped by SIGTERM" in (tmp_path / "log").read_text()
    recorded = [int(pid) for pid in pids.read_text().split()]
    cluster.wait(lambda: all(start_ticks(pid) is None for pid in recorded), 15, "the phase's end")
    assert cluster.finish(submit(cluster, tmp_path, config)) == "COMPLETED"


@pytest.mark.slow
def test_lock_of_a_job_on_another_node(cluster, tmp_path, monkeypatch):
    """A job that died with its node leaves a lock; nothing but Slurm can tell from elsewhere that it is over."""
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster.env[name])
    script = tmp_path / "sleep.sh"
    script.write_text("#!/bin/bash\nsleep 60\n")
    job = cluster.submit("-N1", "-o", os.devnull, str(script), cwd=tmp_path)

    def leave_lock(**more):
        owner = {**this_process(), "host": "elsewhere", "token": "other", "slurm_job": str(job)}
        owner |= {"slurm_cluster": "virtual", **more}
        (tmp_path / LOCK_FILE).write_text(json.dumps(owner))

    cluster.wait(lambda: cluster.state(job) == "RUNNING", 20, "the job")
    leave_lock()
    with pytest.raises(T1Error, match=f"Slurm job {job}"), RunLock(tmp_path):
        pass
    cluster.output("scancel", str(job))
    cluster.wait(lambda: not cluster.output("squeue", "-h", "-j", str(job)), 20, "the job's end")
    with RunLock(tmp_path):
        pass
    leave_lock(slurm_cluster="another")
    with pytest.raises(T1Error, match="another loop"), RunLock(tmp_path):
        pass


@pytest.mark.parametrize(("restarts", "taken"), [("1", True), ("0", False)])
def test_lock_of_the_same_job_before_it_was_requeued(tmp_path, monkeypatch, restarts, taken):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    owner = {**this_process(), "host": "elsewhere", "token": "other"}
    (tmp_path / LOCK_FILE).write_text(json.dumps(owner))
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    lock = RunLock(tmp_path)
    if taken:
        with lock:
            return
    with pytest.raises(T1Error, match="another loop"), lock:
        pass


def test_loop_that_outlived_its_node_is_taken_over_and_waited_for(tmp_path, monkeypatch):
    """slurmd died, the node didn't: Slurm started the job again, even on a node from which the old process is seen."""
    former = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    owner = {**this_process(), "pid": former.pid, "start_ticks": start_ticks(former.pid), "token": "other"}
    (tmp_path / LOCK_FILE).write_text(json.dumps(owner))
    with pytest.raises(T1Error, match="another loop"), RunLock(tmp_path):
        pass
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with RunLock(tmp_path, heartbeat_s=60) as lock:
        assert lock.former["pid"] == former.pid
        lock.wait_for_former(0.0, lambda: 1)  # told to stop: doesn't wait
        ending = threading.Timer(0.5, former.kill)
        ending.start()
        began = time.monotonic()
        threading.Thread(target=former.wait, daemon=True).start()
        lock.wait_for_former(60.0)
        assert 0.3 < time.monotonic() - began < 30


@pytest.mark.slow
def test_two_runs_at_once_meet_on_ports_of_their_own(cluster, tmp_path):
    """Both virtual nodes are this machine, so the runs share its ports."""
    meetings = tmp_path / "meetings"
    meetings.mkdir()
    jobs = {}
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        config = driven_run(
            folder, "cluster.train.processes_per_node=2", "loop.warmup_iterations=0", "loop.colocate_roles=true"
        )
        jobs[name] = cluster.submit(
            "-N1", "--exclusive", "-o", str(folder / "log"), str(folder / "job.sh"), config.run.dir, "dummy_phase",
            "meeting_phase", cwd=folder, env=environment(MEETINGS=str(meetings)),
        )  # fmt: skip
    for name, job in jobs.items():
        assert cluster.finish(job, 200) == "COMPLETED", (tmp_path / name / "log").read_text()
    ports = {int(path.name): path.read_text() for path in meetings.iterdir()}
    assert set(ports) == set(jobs.values())
    assert len(set(ports.values())) == 2
