"""`t1 slurm`, and jobs that queue themselves again: the real command line and Slurm, over phases of tests."""

import os
import subprocess
import time
from datetime import datetime
from pathlib import Path

import pytest
from jobs import ROOT, SCRIPT, SIZES, all_keys, environment, finished, logs, user_environment

from megatron_t1 import sealed
from megatron_t1.commands.slurm import job_lines, obstacle
from megatron_t1.config.compose import compose, save
from megatron_t1.errors import T1Error
from megatron_t1.loop import slurm_jobs
from megatron_t1.loop.chain import cancel_chain
from megatron_t1.loop.links import Chain
from megatron_t1.loop.manifest import new_manifest
from megatron_t1.loop.submission import heterogeneous_job, one_job, resource_options
from megatron_t1.paths import RunPaths


def options_of(*overrides: str) -> list[str]:
    return one_job(compose(["experiment=ppo_122b", *overrides]), "name")


def test_resources_follow_from_the_configuration():
    assert {"--nodes=8", "--gpus-per-node=8", "--signal=B:TERM@300", "--requeue"} <= set(options_of())
    assert "--nodes=16" in options_of("layout=gpus128")
    assert not [option for option in options_of("cluster.backend=cpu") if "gpus" in option]
    own = options_of('cluster.slurm.sbatch_args=["--account=lab","--nodes=9"]', "cluster.slurm.time=1:00:00")
    assert own.index("--nodes=9") > own.index("--nodes=8") and "--time=1:00:00" in own  # sbatch takes the last


def test_each_kind_has_options_of_its_own():
    config = compose(
        ["experiment=ppo_122b", "cluster.rollout.nodes=4", 'cluster.rollout.sbatch_args=["--partition=infer"]',
         'cluster.train.sbatch_args=["--partition=train"]']
    )  # fmt: skip
    assert resource_options(config, ["rollout"]) == [
        "--nodes=4", "--exclusive", "--gpus-per-node=8", "--partition=infer"
    ]  # fmt: skip
    line = heterogeneous_job(config, "name")
    rollout, train = line[: line.index(":")], line[line.index(":") + 1 :]
    assert "--partition=infer" in rollout and "--partition=infer" not in train
    assert "--nodes=8" in train and "--partition=train" in train


def test_a_component_without_a_heterogeneous_job_is_refused(tmp_path, capsys, monkeypatch):
    from megatron_t1.cli import main

    monkeypatch.chdir(tmp_path)
    words = ["slurm", "submit", "--dry-run", "experiment=ppo_122b", "run.dir=run", "cluster.train.het_group=1"]
    assert main(words) == 2
    assert "cluster.train.het_group=1: only a heterogeneous job has components" in capsys.readouterr().err


def test_what_slurm_reads_of_a_run_s_name_is_plain():
    names = [
        one_job(compose(["experiment=ppo_122b"]), name)[0] for name in ("a b", "x JobState=FAILED", "a\nb", "", "ppo-1")
    ]
    assert names == [f"--job-name={name}" for name in ("a_b", "x_JobState_FAILED", "a_b", "t1", "ppo-1")]


def test_the_list_of_jobs_survives_a_cut_line(tmp_path):
    slurm_jobs.note(tmp_path, 7, event="submitted")
    with open(tmp_path / slurm_jobs.JOBS_FILE, "a") as file:
        file.write('{"job": 8, "ev\n[1]\n')
    slurm_jobs.note(tmp_path, 9, event="began")
    with open(tmp_path / slurm_jobs.JOBS_FILE, "a") as file:
        file.write('{"job": 10')  # the disk was full, and nothing after it, not even the end of the line, was written
    slurm_jobs.note(tmp_path, 11, event="submitted")
    assert [line["job"] for line in slurm_jobs.noted(tmp_path)] == [7, 9, 11]
    assert sealed.read_lines(tmp_path / slurm_jobs.JOBS_FILE).damaged == 3


def test_a_turned_bit_in_the_list_of_jobs_makes_no_job_of_somebody_else_the_run_s(tmp_path, monkeypatch):
    slurm_jobs.note(tmp_path, 12, event="submitted", kind="run")
    path = tmp_path / slurm_jobs.JOBS_FILE
    path.write_bytes(path.read_bytes().replace(b'"job": 12', b'"job": 13'))
    said = "JobId=13 JobName=other Command=/home/other/slurm/job.sh x WorkDir=/ JobState=RUNNING"
    monkeypatch.setattr(
        slurm_jobs, "ask", lambda command, **more: said if command[-2:] == ["job", "-o"] else pytest.fail()
    )
    assert cancel_chain(tmp_path) == []
    assert job_lines(tmp_path) == ["slurm/jobs.jsonl: 1 lines aren't what was written: jobs may be missing here"]


SCRIPTED = """#!/bin/bash
echo x >> "$0.calls"
line=$(sed -n "$(wc -l < "$0.calls")p" "$0.says")
[[ $line == ok ]] && { echo Submitted; exit 0; }
echo "$line" >&2
exit 1
"""
AWAY, BUSY = (
    "sbatch: error: Unable to contact slurm controller (connect failure)",
    "Socket timed out on send/recv operation",
)


@pytest.mark.parametrize(
    ("says", "repeatable", "calls"),
    [
        ([AWAY, BUSY, "ok"], True, 3),
        ([AWAY, "ok"], False, 2),
        ([BUSY, "ok"], False, 1),
        (["Invalid qos", "ok"], True, 1),
    ],
)
def test_a_controller_that_is_away_or_busy_is_asked_again(tmp_path, monkeypatch, says, repeatable, calls):
    """But a job that Slurm may have taken isn't handed in twice."""
    program = tmp_path / "slurm"
    program.write_text(SCRIPTED)
    program.chmod(0o755)
    Path(f"{program}.says").write_text("\n".join(says) + "\n")
    monkeypatch.setattr(slurm_jobs.time, "sleep", lambda seconds: None)
    if calls == len(says):
        assert slurm_jobs.ask([str(program), "word"], repeatable=repeatable) == "Submitted\n"
    else:
        with pytest.raises(T1Error, match=says[0].split(" (")[0]) as caught:
            slurm_jobs.ask([str(program), "word"], repeatable=repeatable)
        assert ("squeue --me" in caught.value.remedy) == (says[0] == BUSY)
    assert Path(f"{program}.calls").read_text().count("x") == calls


@pytest.mark.parametrize(
    ("reason", "priority", "says"),
    [("launch_failed_requeued_held", 0, "`scontrol release 7` lets it try again"), ("Resources", 5, ""),
     ("JobHeldUser", 0, "`scontrol release 7`"), ("JobHeldAdmin", 0, "an administrator"), ("Dependency", 0, ""),
     ("DependencyNeverSatisfied", 0, "scancel 7"), ("PartitionTimeLimit", 5, "mend cluster.slurm.sbatch_args"),
     ("Priority", 1, ""), ("BeginTime", 0, "")],
)  # fmt: skip
def test_what_keeps_a_job_from_starting_is_said_with_its_remedy(reason, priority, says):
    job = slurm_jobs.Job(7, {"JobState": "PENDING", "Reason": reason, "Priority": str(priority)})
    assert (says in obstacle(job)) if says else (obstacle(job) == "")


def test_one_task_of_an_array_is_named_as_one_in_a_remedy():
    held = {"JobState": "PENDING", "Reason": "DependencyNeverSatisfied", "ArrayJobId": "7", "ArrayTaskId": "2"}
    assert "`scancel 7_2`" in obstacle(slurm_jobs.Job(7, held))


def test_a_job_is_found_among_the_tasks_of_its_array(monkeypatch):
    shown = (
        "JobId=12 ArrayJobId=12 ArrayTaskId=1 JobName=a JobState=RUNNING Restarts=2 NodeList=n2\n"
        "JobId=11 ArrayJobId=12 ArrayTaskId=0 JobName=a JobState=FAILED Restarts=0 NodeList=n1\n"
    )
    monkeypatch.setattr(slurm_jobs, "ask", lambda command, **more: shown)
    assert (slurm_jobs.find(11).state, slurm_jobs.find(12).restarts) == ("FAILED", 2)
    assert slurm_jobs.find(13) is None
    monkeypatch.setattr(slurm_jobs, "ask", lambda command, **more: None)
    assert slurm_jobs.find(12) is None


@pytest.mark.parametrize(
    ("command", "change"), [("requeue", "scontrol requeue"), ("release", "scontrol release"), ("cancel", "scancel")]
)
def test_a_task_of_an_array_isn_t_taken_for_all_of_it(monkeypatch, command, change):
    """One of the tasks has the number of the array, which means every task to scontrol and scancel."""
    shown = (
        "JobId=12 ArrayJobId=12 ArrayTaskId=1 JobState=RUNNING\nJobId=11 ArrayJobId=12 ArrayTaskId=0 JobState=RUNNING\n"
    )
    asked = []
    monkeypatch.setattr(slurm_jobs, "ask", lambda command, **more: asked.append(" ".join(command)) or shown)
    getattr(slurm_jobs, command)(12)
    assert asked[-1] == f"{change} 12_1"
    shown = "JobId=12 JobState=RUNNING"
    getattr(slurm_jobs, command)(12)
    assert asked[-1] == f"{change} 12"


def program(folder: Path, text: str) -> str:
    path = folder / "slurm"
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_what_a_user_sets_for_slurm_s_commands_changes_no_answer(tmp_path, monkeypatch):
    for name in ("SLURM_TIME_FORMAT", "SLURM_CLUSTERS", "SBATCH_EXPORT", "SCANCEL_INTERACTIVE", "SCONTROL_ALL"):
        monkeypatch.setenv(name, "x")
    for name in ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"):
        monkeypatch.setenv(name, "kept")
    said = slurm_jobs.ask([program(tmp_path, "env"), "word"])
    names = {line.partition("=")[0] for line in said.splitlines()}
    assert {name for name in names if name.startswith(("SLURM_", "SBATCH_", "SCANCEL_", "SCONTROL_"))} == {
        "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"
    }  # fmt: skip


def test_a_job_of_somebody_with_a_name_that_is_no_text_is_read_all_the_same(tmp_path):
    said = slurm_jobs.ask([program(tmp_path, r"printf 'JobId=1 JobName=caf\xe9 JobState=RUNNING\n'"), "word"])
    assert "JobState=RUNNING" in said


def test_a_directory_that_is_gone_is_not_taken_for_a_slurm_that_is_missing(tmp_path):
    with pytest.raises(T1Error, match="the directory that jobs are handed in from isn't there"):
        slurm_jobs.ask([program(tmp_path, "true"), "word"], directory=tmp_path / "gone")


@pytest.mark.parametrize(
    ("state", "waits", "alive"),
    [("SPECIAL_EXIT", True, True), ("RESV_DEL_HOLD", True, True), ("REQUEUE_HOLD", True, True),
     ("STOPPED", False, True), ("SIGNALING", False, True), ("NODE_FAIL", False, False)],
)  # fmt: skip
def test_a_job_that_is_held_or_stopped_is_not_over(state, waits, alive):
    assert (state in slurm_jobs.WAITING, slurm_jobs.Job(1, {"JobState": state}).alive) == (waits, alive)


def test_jobs_are_asked_of_a_run_whose_path_is_hydra_s_syntax(tmp_path, monkeypatch):
    """Names as a sweep gives them. A link works on the run that it was given, wherever its own directory is."""
    from megatron_t1.commands import slurm as commands

    run, worked_on = tmp_path / "00_lr=1e-6,seed=2", []
    Chain(["run.dir=runs/a", "cluster=slurm"], "/not/on/this/node").write(run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "check", lambda *arguments: None)
    monkeypatch.setattr(commands, "run_link", lambda config, *more: worked_on.append(config.run.dir))
    assert commands.link(commands.parse(*commands.find_command(["slurm", "link", str(run), "train"]))) == 0
    assert worked_on == [str(run)]
    config = compose([f"run.dir='{run}'"])
    save(config, run / "config.yaml")
    new_manifest(config).write(RunPaths.of(run).manifest)
    said = []
    monkeypatch.setattr(commands, "say", said.append)
    assert commands.status(commands.parse(*commands.find_command(["slurm", "status", str(run)]))) == 0
    assert any("finished: 0 of" in line for line in said)


def test_a_number_that_slurm_gave_to_another_job_is_not_the_run_s(tmp_path, monkeypatch):
    """A controller that lost job 20 in a crash gives the number to the next one that anybody hands in."""
    slurm_jobs.note(tmp_path, 20, event="submitted", kind="train", after=19)
    shown = {"JobId": "20", "JobState": "RUNNING", "Restarts": "0"}
    monkeypatch.setattr(slurm_jobs, "ask", lambda command, **more: " ".join(f"{k}={v}" for k, v in shown.items()))

    def submitted(seconds: float) -> None:
        shown["SubmitTime"] = datetime.fromtimestamp(time.time() + seconds).isoformat(timespec="seconds")

    submitted(-10)
    assert slurm_jobs.find_noted(tmp_path, 20).id == 20
    submitted(30)
    assert slurm_jobs.find(20).id == 20 and slurm_jobs.find_noted(tmp_path, 20) is None
    shown["Restarts"] = "1"  # queued again, which is a new submission to Slurm
    assert slurm_jobs.find_noted(tmp_path, 20).id == 20


@pytest.mark.parametrize("ahead_s", [-3600, 0, 3600])
def test_a_clock_of_slurm_s_that_goes_otherwise_takes_no_job_from_the_run(tmp_path, monkeypatch, ahead_s):
    def shown(seconds: float) -> str:
        at = datetime.fromtimestamp(int(time.time()) + ahead_s + seconds).isoformat(timespec="seconds")
        return f"JobId=20 JobState=PENDING SubmitTime={at} Restarts=0"

    said = {"now": shown(0)}
    monkeypatch.setattr(slurm_jobs, "ask", lambda command, **more: said["now"])
    slurm_jobs.note_submitted(tmp_path, slurm_jobs.find(20), kind="train", after=19)
    assert slurm_jobs.find_noted(tmp_path, 20).id == 20
    said["now"] = shown(2)  # the controller lost it, and gave its number to somebody's job
    assert slurm_jobs.find_noted(tmp_path, 20) is None


def test_an_address_that_slurm_does_not_tell_is_an_error(monkeypatch):
    monkeypatch.setattr(slurm_jobs, "ask", lambda command, **more: "NodeName=n1 NodeAddr=10.0.0.7 Port=1")
    assert slurm_jobs.node_address("n1") == "10.0.0.7"
    monkeypatch.setattr(slurm_jobs, "ask", lambda command, **more: "NodeName=n1")
    with pytest.raises(T1Error, match="doesn't tell the address of node n1"):
        slurm_jobs.node_address("n1")


def test_a_run_without_a_chain_says_so(tmp_path):
    with pytest.raises(T1Error, match="no chain"):
        Chain.read(tmp_path)
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm/chain.json").write_text("[]")
    with pytest.raises(T1Error, match="it holds list, not an object"):
        Chain.read(tmp_path)


def jobs_of(run: Path, kind: str = "") -> list[int]:
    lines = [line for line in slurm_jobs.noted(run) if line["event"] == "submitted"]
    return [line["job"] for line in lines if kind in ("", line["kind"])]


@pytest.mark.slow
def test_submitted_run_finishes_and_tells_how_it_is(cluster, t1, tmp_path):
    run = tmp_path / "run"
    assert "sbatch --job-name=run" in t1("slurm", "submit", "--dry-run") and not jobs_of(run)
    t1("slurm", "submit")
    (job,) = jobs_of(run)
    assert cluster.finish(job) == "COMPLETED", logs(run)
    assert finished(run) == all_keys()
    said = t1("slurm", "status", str(run))
    assert f"job {job}" in said and "COMPLETED" in said and "nothing is left to do" in said
    assert "no job of this run" in t1("slurm", "cancel", str(run))


@pytest.mark.slow
def test_a_chain_alternates_between_jobs(cluster, t1, tmp_path):
    run = tmp_path / "run"
    t1("slurm", "submit", "--chain")
    cluster.wait(lambda: finished(run) == all_keys(), 180, "the chain")
    cluster.wait(lambda: "SUBMITTED" not in t1("slurm", "status", str(run)), 5, "status")
    # rollout 0, critic 0, rollout 1, training 1, evaluation 2; the last one's successor was taken back
    kinds = [line["kind"] for line in slurm_jobs.noted(run) if line["event"] == "began" and "kind" in line]
    assert kinds == ["rollout", "train", "rollout", "train", "rollout"]
    cluster.wait(lambda: not cluster.output("squeue", "-h", "-t", "PENDING,RUNNING").strip(), 30, "an empty queue")
    assert cluster.state(jobs_of(run)[-1]) == "CANCELLED"
    assert "nothing is left to do" in t1("slurm", "submit", "--chain")


@pytest.mark.slow
def test_a_chain_ends_when_nothing_gets_finished(cluster, t1, tmp_path):
    run = tmp_path / "run"
    t1("slurm", "submit", "--chain", "cluster.slurm.max_failures=2", BEHAVIOUR="fail")
    began = lambda kind: [  # noqa: E731
        line for line in slurm_jobs.noted(run) if line["event"] == "began" and line.get("kind") == kind
    ]
    cluster.wait(lambda: "2 jobs in a row finished no step" in logs(run), 180, "two tries")
    cluster.wait(lambda: not cluster.output("squeue", "-h").strip(), 60, "an empty queue")
    assert len(began("rollout")) == 2 and "the frobnicator is missing" in logs(run)
    assert finished(run) == []
    t1("slurm", "submit", "--chain")  # mended: it goes on
    cluster.wait(lambda: finished(run) == all_keys(), 180, "the chain")


@pytest.mark.slow
def test_cancelling_a_chain_leaves_no_job(cluster, t1, tmp_path):
    run, pids = tmp_path / "run", tmp_path / "pids"
    t1("slurm", "submit", "--chain", BEHAVIOUR="tree", PID_FILE=str(pids))
    cluster.wait(pids.exists, 60, "the first phase")
    said = t1("slurm", "status", str(run))
    assert "RUNNING" in said and "PENDING (Dependency)" in said and "now: iteration 0" in said
    assert "wait already" in t1("slurm", "submit", "--chain", status=2)
    t1("slurm", "cancel", str(run))
    cluster.wait(lambda: not cluster.output("squeue", "-h").strip(), 60, "an empty queue")
    assert len(jobs_of(run)) == 4  # the one that worked, the next one, and two behind that


@pytest.mark.slow
def test_heterogeneous_job(cluster, t1, tmp_path):
    run = tmp_path / "run"
    where = 'cluster.train.setup=["echo rank $SLURM_PROCID runs on $SLURMD_NODENAME"]'
    t1("slurm", "submit", "--het", "cluster.train.processes_per_node=2", "cluster.rollout.nodes=1", where)
    (job,) = jobs_of(run)
    assert cluster.finish(job) == "COMPLETED", logs(run)
    assert finished(run) == all_keys()
    log = RunPaths.of(run).phase(0, "critic") / "logs" / "attempt_1" / "rank_1.log"
    assert "rank 1 runs on n2" in log.read_text()  # rollout's component has the first node


@pytest.mark.slow
def test_a_job_out_of_time_queues_itself_again(cluster, inputs, tmp_path):
    """The real time limit and signal; Slurm rounds limits up to minutes, so the signal comes early instead."""
    pids = tmp_path / "pids"
    job = cluster.submit(
        "-N2", "--gpus-per-node=0", "--time=2", "--signal=B:TERM@110", "-o", "log", str(SCRIPT), *SIZES[2:],
        f"model.path={inputs / 'model'}", f"env.tasks={inputs / 'tasks/train'}",
        f"eval.tasks={inputs / 'tasks/held_out'}", "run.dir=run", "cluster.backend=cpu",
        "cluster.slurm.max_requeues=1", cwd=tmp_path,
        env={**user_environment(), "BEHAVIOUR": "tree", "PID_FILE": str(pids),
             "PYTHONPATH": os.pathsep.join([str(ROOT / "tests/slurm/driven"), environment()["PYTHONPATH"]])},
    )  # fmt: skip
    log = tmp_path / "log"
    cluster.wait(lambda: log.exists() and "queued again (1 of 1" in log.read_text(), 120, "the time limit's signal")
    cluster.wait(lambda: "is not queued again: it was 1 times" in log.read_text(), 240, "the second time limit")
    assert cluster.finish(job) == "FAILED" and cluster.exit_code(job) == "143:0"
    events = [(line["event"], line.get("restarts")) for line in slurm_jobs.noted(tmp_path / "run")]
    assert events == [("began", None), ("requeued", 1), ("began", None)]


@pytest.mark.slow
def test_a_job_handed_in_waits_for_a_controller_that_starts_again(cluster, tmp_path, monkeypatch):
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster.env[name])
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\ntrue\n")
    cluster.output("scontrol", "shutdown", "slurmctld")
    time.sleep(1.0)
    restarted = subprocess.Popen(["bash", "-c", "sleep 4; exec slurmctld"], env=cluster.env)
    job = slurm_jobs.submit(["-N1", "-o", os.devnull], script, [])
    restarted.wait()
    assert cluster.finish(job.id) == "COMPLETED"
    assert slurm_jobs.find(999999) is None
