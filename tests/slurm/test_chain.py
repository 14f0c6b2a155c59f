"""Links of a chain and jobs that queue themselves again, over a Slurm that is a dictionary: who goes on, who ends."""

from __future__ import annotations

import os
import signal
import time
from datetime import datetime

import pytest
from queue_of_links import fail, finish, link

from megatron_t1.config.cluster import SlurmConfig, slurm_problems, slurm_seconds
from megatron_t1.errors import T1Error
from megatron_t1.loop import chain, links, slurm_jobs
from megatron_t1.loop.headway import finished_keys, headway
from megatron_t1.loop.launcher import Stopped
from megatron_t1.loop.lock import OtherLoop
from megatron_t1.loop.requeue import requeue_when_out_of_time
from megatron_t1.paths import RunPaths


def test_a_link_whose_nodes_are_not_fit_has_a_successor(config, slurm):
    """It fails when the run is opened: a node of its job lacks something, its file system is away."""

    def begin():
        raise T1Error("phases can't be started here")

    for number in range(2):
        with pytest.raises(T1Error, match="can't be started here"):
            chain.run_link(config, "rollout", lambda line: None, begin)
        assert slurm.waiting == [(10, "train")], number  # queued again, it finds the one that waits
    with pytest.raises(T1Error, match="2 jobs in a row finished no step"):
        chain.run_link(config, "rollout", lambda line: None, begin)


def test_a_link_works_also_where_its_successor_is_refused_for_now(config, slurm):
    worked = []
    slurm.refuses = "QOSMaxSubmitJobPerUserLimit"

    def work():
        worked.append(True)
        slurm.refuses = ""

    said = link(config, work=work)
    assert worked and slurm.waiting == [(10, "train")]
    assert "tried again at the end: QOSMaxSubmit" in said and "job 10 follows" in said


def test_a_lost_successor_is_replaced_after_work_a_failure_and_a_stop(config, slurm):
    for end in (lambda: None, fail(T1Error("the phase failed")), fail(Stopped(15))):
        slurm.jobs = {1: slurm.jobs[1]}
        slurm_jobs.note(config.run.dir, 0, event="chain")

        def work(end=end):
            slurm.jobs[10]["JobState"] = "gone"
            del slurm.jobs[10]
            slurm.jobs[11] = {"JobState": "COMPLETED", "kind": "somebody's"}
            end()

        assert "lost job 10" in link(config, work=work)
        assert [kind for _, kind in slurm.waiting] == ["train"]


@pytest.mark.parametrize("end", [T1Error("the phase failed"), Stopped(15)])
@pytest.mark.parametrize("full", [False, True])
def test_a_link_that_can_t_hand_on_still_says_what_ended_it(config, slurm, monkeypatch, end, full):
    slurm.refuses = refused = "QOSMaxSubmitJobPerUserLimit"
    if full:
        refused = "No space left on device (ENOSPC)"
        error = OSError(28, "No space left on device", "jobs.jsonl")
        monkeypatch.setattr(chain, "_verified", lambda *_: fail(error)())
    said = link(config, work=fail(end))
    assert said.endswith(f"raised {end}") and f"no job that follows could be handed in: {refused}" in said


def test_a_link_that_slurm_has_lost_hands_on_all_the_same(config, slurm, monkeypatch):
    """A controller that dies within seconds may lose the working job as well: nothing can depend on that any more."""
    asked = []
    submit = slurm_jobs.submit
    monkeypatch.setattr(
        slurm_jobs, "submit", lambda options, *rest, **more: asked.append(options) or submit(options, *rest, **more)
    )

    def work():
        slurm.jobs = {2: {"JobState": "RUNNING", "kind": "somebody's"}}
        raise T1Error("srun: Invalid job id specified")

    link(config, work=work)
    assert ["--dependency=afterany:1" in options for options in asked] == [True, False]
    assert len(slurm.waiting) == 1


def test_the_last_link_takes_its_successor_back(config, slurm):
    config.loop.warmup_iterations, config.loop.iterations = 1, 0
    finish(config, "evaluation", "rollout")

    def work():
        finish(config, "evaluation", "rollout", "critic")

    said = link(config, "train", work=work)
    assert "the training is done; job 10 was taken back" in said and slurm.waiting == []
    assert "nothing is left to do" in link(config, "train")


def test_a_link_of_the_other_kind_hands_on_without_opening_the_run(config, slurm):
    finish(config, "evaluation", "rollout")
    said = link(config, "rollout", work=fail(AssertionError("it worked")))
    assert "the next step is of kind train" in said and slurm.waiting == [(10, "train")]


@pytest.mark.parametrize(("owner", "left"), [("77", []), ("5", [(10, "train")])])
def test_a_link_beside_another_job_of_the_run_leaves_the_chain_to_that_one(config, slurm, monkeypatch, owner, left):
    """Job 77 is a link, too (this one was handed in twice); 5 is somebody's `t1 run`."""
    slurm_jobs.note(config.run.dir, 77, event="began")
    monkeypatch.setattr(chain, "lock_owner", lambda run: {"slurm_job": owner})
    assert "raised another loop" in link(config, work=fail(OtherLoop("another loop works on this run")))
    assert slurm.waiting == left


def test_what_a_stop_finds_handed_in_is_noted(config, slurm, monkeypatch):
    submit = slurm_jobs.submit

    def stopped(*arguments, **more):
        job = submit(*arguments, **more)
        os.kill(os.getpid(), signal.SIGTERM)
        return job

    monkeypatch.setattr(slurm_jobs, "submit", stopped)
    assert "raised stopped by SIGTERM" in link(config, work=fail(AssertionError("it worked")))
    assert [line["job"] for line in slurm_jobs.noted(config.run.dir) if line["event"] == "submitted"] == [10]


def test_a_chain_that_was_changed_is_not_gone_on_with(config):
    path = RunPaths.of(config.run.dir).root / links.CHAIN_FILE
    path.write_text(path.read_text().replace("[]", '["loop.iterations=7"]'))
    with pytest.raises(T1Error, match="its content isn't what its sha256 was made of"):
        links.Chain.read(config.run.dir)


def test_links_that_only_play_episodes_get_somewhere(config, slurm):
    """A rollout that takes more jobs than may fail: each leaves some episodes behind."""
    rollouts = RunPaths.of(config.run.dir).rollouts(0)
    rollouts.mkdir(parents=True)
    for number in range(5):
        work = fail(Stopped(15)) if number % 2 else fail(T1Error("the phase was lost"))
        assert "jobs in a row" not in link(config, work=work)
        (rollouts / f"{number}.safetensors").touch()
    assert [line["headway"] for line in slurm_jobs.noted(config.run.dir) if line["event"] == "began"] == [
        [0, number, 0] for number in range(5)
    ]


def test_checkpoints_in_the_middle_of_a_phase_are_headway(config):
    finish(config, "evaluation", "rollout")
    progress = RunPaths.of(config.run.dir).progress(0, "critic")
    assert headway(config, finished_keys(config)) == [2, 0, 0]
    for name in ("step_0000004", "step_0000012", "step_0000013.partial", "fields_0000000"):
        (progress / name).mkdir(parents=True)
    assert headway(config, finished_keys(config)) == [2, 0, 12]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("1:30", 90), ("1:00:00", 3600), ("2-0", 172800), ("1-1:01", 90060), ("1-0:0:1", 86401),
     ("UNLIMITED", float("inf")), ("infinite", float("inf")), ("", None), ("abc", None), ("1h", None),
     ("1:2:3:4", None)],
)  # fmt: skip
def test_times_of_slurm(text, seconds):
    assert slurm_seconds(text) == seconds


def test_times_that_leave_no_time_to_work_are_refused():
    def problems(**options):
        return slurm_problems(SlurmConfig(**options))

    assert problems() == [] and problems(time="UNLIMITED") == []
    assert "is 300 s, and a job is told to stop 360 s before its end" in problems(time="5")[0]
    assert "requeue_within_s=100 must be at least 360 (stop_lead_s=300" in problems(requeue_within_s=100.0)[0]
    assert "no time of Slurm's" in problems(time="soon")[0]


def requeued(config, monkeypatch, *, ran_s, restarts=0):
    """What a job that is told to stop 100 s before its end of two hours says, and whether it queues itself again."""
    now = time.time()
    times = {"StartTime": now - ran_s, "EndTime": now + 100}
    fields = {name: datetime.fromtimestamp(at).isoformat(timespec="seconds") for name, at in times.items()}
    monkeypatch.setattr(
        slurm_jobs, "find", lambda job: slurm_jobs.Job(job, {"JobState": "RUNNING", "TimeLimit": "02:00:00", **fields})
    )
    monkeypatch.setattr(slurm_jobs, "requeue", lambda job: None)
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    said = []
    return requeue_when_out_of_time(config, 15, said.append), said[-1]


def test_a_job_whose_whole_time_leads_nowhere_does_not_queue_itself_again_for_ever(config, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    for number in range(4):  # preempted, soon after it began
        assert requeued(config, monkeypatch, ran_s=60, restarts=number)[0]
    assert requeued(config, monkeypatch, ran_s=7000)[0] and requeued(config, monkeypatch, ran_s=7000)[0]
    again, said = requeued(config, monkeypatch, ran_s=7000)
    assert not again and "2 times its whole time finished no step" in said and "checkpoint_every" in said
    finish(config, "evaluation", "rollout")
    assert requeued(config, monkeypatch, ran_s=7000)[0]
    again, said = requeued(config, monkeypatch, ran_s=60, restarts=50)
    assert not again and "max_requeues" in said


@pytest.mark.parametrize(("restarts", "released"), [(1, True), (51, False)])
def test_a_job_that_a_node_would_not_start_again_is_let_go(config, monkeypatch, restarts, released):
    """Slurm, which had forgotten that it runs, ends this process, and holds the job."""
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    fields = {"JobState": "COMPLETING", "Reason": "launch_failed_requeued_held", "Restarts": str(restarts)}
    gone, said = [], []
    monkeypatch.setattr(slurm_jobs, "find", lambda job: slurm_jobs.Job(job, fields))
    monkeypatch.setattr(slurm_jobs, "release", gone.append)
    assert requeue_when_out_of_time(config, 15, said.append) == released
    assert gone == [1] * released and "held" in said[0]
