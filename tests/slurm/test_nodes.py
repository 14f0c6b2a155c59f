"""Nodes compared before a job's first phase; containers, GPUs and ports of its steps."""

import errno
import json
import os
import socket
import subprocess
import threading

import pytest

from megatron_t1.config.compose import compose
from megatron_t1.loop import node_check, node_reports
from megatron_t1.loop.launcher import BaseLauncher, Exit, PhaseCommand
from megatron_t1.loop.node_reports import compare_nodes, needed_paths
from megatron_t1.loop.slurm import PORT_TAKEN, PORT_TRIES, SlurmLauncher, gpu_lines

GOOD = {
    "megatron_t1": "1", "python": "3.11", "packages": {"torch": "2.9"}, "clock_s": 0.1, "missing_paths": [],
    "unseen": [], "won": False, "gpus": 8, "connected": "",
}  # fmt: skip


def compared(*differences: dict, gpus: int = 8) -> list[str]:
    reports = [{**GOOD, "node": f"n{number}", **each} for number, each in enumerate(differences, 1)]
    return compare_nodes(reports, "train", gpus, 10.0)


def test_equal_nodes_have_no_problem():
    assert compared({"won": True}, {}, {}) == []


@pytest.mark.parametrize(
    ("different", "line"),
    [
        ({"packages": {"torch": "2.8"}}, "torch is 2.9 on most nodes, but n3 has 2.8"),
        ({"packages": {}}, "torch is 2.9 on most nodes, but n3 has None"),
        ({"megatron_t1": "2"}, "megatron_t1 is 1 on most nodes, but n3 has 2"),
        ({"clock_s": 60.0}, "the clocks of n1 and n3 differ by 60 s"),
        ({"clock_s": -60.0}, "the clocks of n3 and n2 differ by 60 s"),
        ({"missing_paths": ["/models/m"]}, "node n3 doesn't see /models/m"),
        ({"unseen": [0, 1]}, "node n3 doesn't see in run.dir what n1, n2 wrote there"),
        ({"won": True}, "2 nodes made the same link in run.dir"),
        ({"won": "Operation not permitted"}, "n3 can't make a hard link in run.dir: Operation not permitted"),
        ({"gpus": 7}, "node n3 shows 7 GPUs, 8 are needed"),
        ({"connected": "10.0.0.1:2 can't be reached: timed out"}, "n3: 10.0.0.1:2 can't be reached"),
    ],
)
def test_what_one_node_lacks_is_named(different, line):
    (problem,) = compared({"won": True}, {}, different)
    assert line in problem and problem.startswith("train: ")


def test_nodes_report_on_one_directory_and_meet(tmp_path, monkeypatch):  # Megatron-LM#1763
    """Three processes stand for three nodes of a file system that works."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    reports = {}

    def node(rank):
        reports[rank] = node_check.report(tmp_path, [str(tmp_path), "/nowhere"], rank, 3)

    threads = [threading.Thread(target=node, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [reports[rank]["connected"] for rank in range(3)] == ["", "", ""]
    assert sorted(reports[rank]["won"] for rank in range(3)) == [False, False, True]
    assert all(reports[rank]["unseen"] == [] and reports[rank]["missing_paths"] == ["/nowhere"] for rank in range(3))
    assert all(abs(reports[rank]["clock_s"]) < 5 for rank in range(3))


def meeting_at(monkeypatch, port: int) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setattr(node_check, "PATIENCE_S", 0.2)


def test_a_directory_that_is_not_shared_and_a_node_that_is_not_reached_are_seen(tmp_path, monkeypatch):
    meeting_at(monkeypatch, 0)
    found = node_check.report(tmp_path, [], 0, 2)
    assert found["unseen"] == [1] and found["connected"] == "not every node could reach this one"


def test_a_taken_port_is_said_so_that_the_launcher_tries_another(tmp_path, monkeypatch, capsys):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    with socket.create_server(("", 0)) as taken:
        meeting_at(monkeypatch, taken.getsockname()[1])
        assert node_check.main([str(tmp_path)]) == 1
    assert PORT_TAKEN.search(capsys.readouterr().err)


def test_paths_that_nodes_must_see_depend_on_the_kind():
    config = compose(["experiment=ppo_122b", "model.path=/m", "env.tasks=/t", "eval.tasks=/e"])
    assert needed_paths(config, "rollout") == ["/m", "/t", "/e"]
    assert needed_paths(config, "train") == ["/m"]


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    """Of a job on two nodes whose addresses needn't be asked for."""
    for name, value in {"JOB_ID": "7", "JOB_NUM_NODES": "2", "JOB_CPUS_PER_NODE": "96(x2)", "JOB_NODELIST": "n[1-2]",
                        "GPUS_ON_NODE": "8"}.items():  # fmt: skip
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr("megatron_t1.loop.slurm_jobs.node_address", lambda node: "10.0.0.1")

    def make(*overrides: str) -> SlurmLauncher:
        return SlurmLauncher(compose(["experiment=ppo_30b", f"run.dir={tmp_path}", *overrides]))

    return make


TRAIN = PhaseCommand("critic", "train", "m", processes=16, distributed=True)


def test_containers_by_configuration(launcher, tmp_path):
    words = ["cluster.train.container=/images/train.sif", 'cluster.train.container_args=["--nv","--bind=/scratch"]']
    line = launcher(*words, "cluster.train.container_runtime=apptainer").wrapped(TRAIN, tmp_path)
    at = line.index("apptainer")
    assert line[at : at + 5] == ["apptainer", "exec", "--nv", "--bind=/scratch", "/images/train.sif"]
    assert line[at + 5 :] == ["bash", str(tmp_path / "launch.sh"), "python3", "-m", "m"]
    line = launcher(*words).wrapped(TRAIN, tmp_path)
    assert "--container-image=/images/train.sif" in line and "--nv" in line and "apptainer" not in line
    line = launcher('cluster.train.setup=["module load cuda"]').wrapped(TRAIN, tmp_path)
    assert not [word for word in line if word.startswith("--container") or word == "apptainer"]
    assert (tmp_path / "launch.sh").read_text().splitlines()[2] == "module load cuda"


@pytest.mark.parametrize(("place", "own"), [(0, "0,1,2,3"), (1, "4,GPU-a,6,7")])
def test_workers_of_a_node_share_its_gpus(launcher, tmp_path, place, own):  # SkyRL#765
    """Slurm leaves all of a step's GPUs to each of its processes."""
    launcher().wrapped(PhaseCommand("rollout", "rollout", "m"), tmp_path)
    assert gpu_lines(4)[1] in (tmp_path / "launch.sh").read_text()
    script = "\n".join(["set -e", *gpu_lines(4), "echo $CUDA_VISIBLE_DEVICES"])
    told = {**os.environ, "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,GPU-a,6,7", "SLURM_LOCALID": str(place)}
    assert subprocess.check_output(["bash", "-c", script], env=told, text=True).strip() == own


@pytest.mark.parametrize(("taken", "launches"), [(0, 1), (2, 3), (99, PORT_TRIES)])
def test_ranks_whose_port_was_taken_meet_at_another(launcher, tmp_path, monkeypatch, taken, launches):  # verl#158
    """Where rank 0 runs on another node than the loop, a port in use can't be seen before."""
    tries = []

    def launch(self, command, log_dir, *, echo=None):
        tries.append(self.wrapped(command, log_dir) and (log_dir / "launch.sh").read_text())
        failed = len(tries) <= taken
        self.main_log(log_dir).write_text("error: EADDRINUSE, address already in use\n" if failed else "")
        return Exit(int(failed), self.main_log(log_dir), None, "", 1.0)

    monkeypatch.setattr(BaseLauncher, "launch", launch)
    result = launcher().launch(TRAIN, tmp_path)
    assert len(tries) == len(set(tries)) == launches
    assert result.code == (1 if taken >= PORT_TRIES else 0)


def test_a_node_that_is_lost_while_it_is_looked_at_is_said(launcher, tmp_path, monkeypatch):
    """srun's status is 0 when Slurm ends its step so."""
    monkeypatch.setattr(node_reports, "PATIENCE_S", 0.1)
    monkeypatch.setattr(BaseLauncher, "launch", lambda self, command, logs, echo=None: Exit(0, logs, None, "", 1.0))
    (problem,) = node_reports.node_problems(launcher("cluster.rollout.nodes=2"), "rollout", 2, 0)
    assert problem.startswith("rollout: a node said nothing of itself") and "node_0.json" in problem


def test_what_can_t_be_deleted_yet_keeps_no_fit_node_from_working(launcher, monkeypatch):
    """A network file system keeps a file that another node has open, and its directory."""

    def launch(self, command, logs, echo=None):
        (logs.parent / "node_0.json").write_text(json.dumps({**GOOD, "node": "n1"}))
        return Exit(0, logs, None, "", 1.0)

    def refuse(path, **more):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    monkeypatch.setattr(BaseLauncher, "launch", launch)
    monkeypatch.setattr(os, "rmdir", refuse)
    assert node_reports.node_problems(launcher(), "rollout", 1, 0) == []
