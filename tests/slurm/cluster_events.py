"""What happens to trainings on a cluster: each event strikes one at work, and does what its user would do then."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from cluster_training import Training

from megatron_t1.loop.runner import read_launch

AWAY_S = 4.0  # how long the controller is away


@dataclass(frozen=True)
class Event:
    """Something that happens to a training.

    Attributes:
        mode: of the training.
        name: as the table says it.
        strike: makes it happen and returns how Slurm and the user answered.
        phase: at work when it strikes; "submission": a link has just handed its successor in.
    """

    mode: str
    name: str
    strike: Callable[[Training], str]
    phase: str = "rollout"

    @property
    def id(self) -> str:
        return f"{self.mode}: {self.name}, {self.phase}".replace(" ", "-")


@dataclass(frozen=True)
class Recovery:
    answer: str
    work_goes_on_s: float  # from the event to the next start of the disturbed phase; 0: it was not disturbed
    total_s: float  # of the training, from its submission


def happen(event: Event, training: Training) -> Recovery:
    """Hand the training in, let the event strike once its phase is at work, and follow it to its end."""
    submitted, phase = time.time(), "critic" if event.phase == "critic" else "rollout"
    training.linger = "" if event.strike is nothing else phase
    training.submit()
    if event.phase == "submission":
        training.wait(lambda: training.handed_in(), "a link that handed another one in")
    elif training.linger:
        training.wait_for(phase)
    directory = training.paths.phase(0, phase)
    before, struck = read_launch(directory), time.time()
    answer = event.strike(training)
    training.hurry()
    training.finish()
    after = read_launch(directory)
    again = bool(training.linger) and after["launch"] != before.get("launch")
    return Recovery(answer, after["started_at"] - struck if again else 0.0, time.time() - submitted)


def nothing(training: Training) -> str:
    return "—"


def cancelled(training: Training) -> str:
    """`scancel` of the job that works; a chain must not go on by itself then."""
    job = training.running()
    training.cluster.output("scancel", str(job))
    assert training.cluster.finish(job) == "CANCELLED"
    training.wait(lambda: not set(training.jobs()) & training.cluster.queue(), "no job of the run", 60)
    training.submit()
    return "ended; submitted again"


def requeued(training: Training) -> str:
    job = training.running()
    training.cluster.output("scontrol", "requeue", str(job))
    _wait_for_restart(training, job)
    return "the same job again"


def _wait_for_restart(training: Training, job: int) -> None:
    cluster = training.cluster
    training.wait(lambda: cluster.shown(job, "Restarts") == "1" and cluster.state(job) == "RUNNING", "a restart")


def out_of_time(training: Training) -> str:
    """The limit is lowered to little more than the lead of the signal from now; Slurm knows whole minutes."""
    job, cluster = training.running(), training.cluster
    passed = time.time() - datetime.fromisoformat(cluster.shown(job, "StartTime")).timestamp()
    cluster.output("scontrol", "update", f"JobId={job}", f"TimeLimit={int(passed // 60) + 2}")
    if training.mode == "chain":
        training.wait(lambda: training.running() not in (0, job), "the next link")
        return "ended cleanly; the next link went on"
    _wait_for_restart(training, job)
    cluster.output("scontrol", "update", f"JobId={job}", "TimeLimit=20")
    assert "ran out of time" in training.said()
    return "queued itself again"


def _node_lost(training: Training, node: str) -> str:
    job, cluster = training.running(), training.cluster
    cluster.kill_node(node)
    training.wait(lambda: node not in cluster.shown(job, "NodeList") or cluster.state(job) != "RUNNING", "NODE_FAIL")
    if training.mode == "chain":
        training.wait(lambda: training.running() not in (0, job), "the next link")
    else:
        _wait_for_restart(training, job)
    training.wait(lambda: training.running() and training.paths.root.exists(), "the run's next job")
    where = ",".join(training.nodes())
    cluster.start_node(node)
    return f"{node} lost; went on, on {where}"


def batch_host_lost(training: Training) -> str:
    """slurmd alone dies: the loop and the phase on that node live on, and nobody can reach them."""
    return _node_lost(training, training.nodes()[0])


def other_node_lost(training: Training) -> str:
    return _node_lost(training, training.nodes()[-1])


def component_lost(training: Training) -> str:
    """A node of training's component: Slurm queues that component alone again."""
    job, cluster = training.running(), training.cluster
    node = cluster.output("scontrol", "show", "hostnames", cluster.shown(job + 1, "NodeList")).split()[-1]
    cluster.kill_node(node)
    training.wait(lambda: cluster.shown(job, "Restarts") == "1", "the job back in the queue")
    cluster.start_node(node)  # the component needs all of its partition
    _wait_for_restart(training, job)
    return f"{node} lost; the whole job again"


def controller_restarted(training: Training) -> str:
    training.cluster.kill_controller()
    time.sleep(AWAY_S)
    training.cluster.start_controller()
    return f"away for {AWAY_S:.0f} s"


def successor_lost(training: Training) -> str:
    """The controller dies a moment after it has taken the next link, which it saves seconds later only."""
    training.cluster.kill_controller()
    waiting, before = training.handed_in()[-1], len(training.handed_in())
    time.sleep(AWAY_S)
    training.cluster.start_controller()
    if waiting in training.cluster.queue():
        return f"job {waiting} was saved already"
    training.hurry()
    # The link itself may have been started again: by a controller that has forgotten that, too.
    training.wait(lambda: len(training.handed_in()) > before, "another one")
    return f"job {waiting} lost; another one in its place"


def drained(training: Training) -> str:
    """An administrator drains the node that the training's job works on, and puts the job back into the queue."""
    job, cluster, node = training.running(), training.cluster, training.nodes()[0]
    cluster.output("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
    if training.mode != "chain":
        cluster.output("scontrol", "requeue", str(job))
        _wait_for_restart(training, job)
        where = ",".join(training.nodes())
        assert node not in where
    training.hurry()
    training.wait(lambda: training.finished() == training.expected, "the training's end")
    cluster.output("scontrol", "update", f"NodeName={node}", "State=RESUME")
    return f"{node} drained" + ("; later links elsewhere" if training.mode == "chain" else f"; requeued to {where}")


def beside_another(training: Training) -> str:
    """A second training with the same seeds is handed in while the first one's phase works."""
    other = training.another()
    other.submit()
    other.wait_for("rollout")
    for each in (training, other):
        each.hurry()
    other.finish()
    return "both ended alike"


EVENTS = [
    *(Event(mode, "undisturbed", nothing) for mode in ("one job", "chain", "heterogeneous")),
    *(Event(mode, "scancel", cancelled, phase) for mode, phase in [
        ("one job", "rollout"), ("one job", "critic"), ("chain", "critic"), ("heterogeneous", "rollout")]),
    *(Event(mode, "scontrol requeue", requeued, phase) for mode, phase in [
        ("one job", "rollout"), ("one job", "critic"), ("heterogeneous", "critic")]),
    *(Event(mode, "time limit, with its signal", out_of_time, phase) for mode, phase in [
        ("one job", "rollout"), ("chain", "rollout")]),
    *(Event(mode, "slurmd killed on the batch host", batch_host_lost, phase) for mode, phase in [
        ("one job", "rollout"), ("one job", "critic"), ("chain", "critic"), ("heterogeneous", "rollout")]),
    *(Event(mode, "slurmd killed on another node", other_node_lost, phase) for mode, phase in [
        ("one job", "rollout"), ("one job", "critic")]),
    Event("heterogeneous", "slurmd killed on another node", component_lost, "critic"),
    *(Event(mode, "slurmctld killed and restarted", controller_restarted, phase) for mode, phase in [
        ("one job", "critic"), ("chain", "rollout"), ("heterogeneous", "rollout")]),
    Event("chain", "slurmctld killed", successor_lost, "submission"),
    Event("one job", "another training at the same time", beside_another),
    *(Event(mode, "node drained", drained) for mode in ("one job", "chain")),
]  # fmt: skip
