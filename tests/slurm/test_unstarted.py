"""Links and jobs that no node starts: who goes on in their place, and where it is said."""

import os
import subprocess

import pytest
from jobs import all_keys, finished, logs
from queue_of_links import fail, link

from megatron_t1.cli import main
from megatron_t1.commands.slurm import going_on, refusal
from megatron_t1.errors import T1Error
from megatron_t1.loop import chain, links, slurm_jobs
from megatron_t1.loop.submission import write_script


@pytest.mark.slow
def test_a_chain_gets_over_nodes_that_start_no_job(cluster, t1, tmp_path):
    """The first link of all comes to a node without t1, the first one of training to a node whose prolog fails."""
    run, parts = tmp_path / "run", [f'cluster.{kind}.sbatch_args=["--partition={name}"]' for kind, name in PARTS]
    with cluster.broken("n1", "interpreter"), cluster.broken("n3", "prolog"):
        said = t1(
            "slurm", "submit", "--chain", *parts, "cluster.rollout.nodes=1", "cluster.train.processes_per_node=2",
            INTERPRETER=str(cluster.interpreter()),
        )  # fmt: skip
        assert said.startswith("jobs "), said
        cluster.wait(lambda: finished(run) == all_keys(), 180, "the chain")
    cluster.wait(lambda: not cluster.output("squeue", "-h", "-t", "PENDING,RUNNING").strip(), 30, "an empty queue")
    cluster.wait_until_idle()
    assert "can't begin on n1" in logs(run) and "queued again, for other nodes" in logs(run)
    (line,) = [line for line in slurm_jobs.noted(run) if line["event"] == "unstarted"]
    assert (line["kind"], line["node"]) == ("train", "n3") and f"job {line['job']} never began" in logs(run)
    assert logs(run).count("can't begin on n1") < 3  # those that were handed in afterwards don't go there
    assert "n3 didn't start it" in t1("slurm", "status", str(run))


PARTS = [("rollout", "sampling"), ("train", "training")]


@pytest.fixture
def spared(config):
    config.cluster.slurm.spare_links, config.cluster.slurm.max_failures = 2, 5
    return config


def begin(slurm, monkeypatch, job):
    """From now on a link's process is that of this job, and those before it are over."""
    slurm.jobs[job] |= {"JobState": "RUNNING"}
    monkeypatch.setenv("SLURM_JOB_ID", str(job))


LAUNCH = ("CANCELLED", {})  # as Slurm shows a link whose prolog failed, or whose script slurmd couldn't write
GONE = ("FAILED", {"Reason": "NonZeroExitCode", "ExitCode": "127:0"})
LOST = ("NODE_FAIL", {"ExitCode": "0:1"})
LOG = ("FAILED", {"Reason": "JobLaunchFailure", "ExitCode": "0:53"})


def test_a_chain_is_handed_in_with_those_that_would_take_the_first_one_s_place(spared, slurm):
    assert links.fill(spared, "rollout", None, print) == [10, 11, 12]
    assert [kind for _, kind in slurm.waiting] == ["rollout", "train", "rollout"]
    assert "--dependency=afterany:10:11" in slurm.options and "--no-requeue" in slurm.options


@pytest.mark.parametrize(("state", "fields"), [LAUNCH, GONE, LOST, LOG])
@pytest.mark.parametrize("many", [1, 2])
def test_whichever_link_begins_first_goes_on(spared, slurm, monkeypatch, state, fields, many):
    """The next ones never begin: none of them hands anything in, and the run is where it was."""
    links.fill(spared, "rollout", None, print)
    begin(slurm, monkeypatch, 10)
    said = link(spared, work=fail(T1Error("the phase was lost")))
    assert "job 11 follows when this one ends; jobs 12, 13 in its place" in said
    slurm.end(10, "FAILED", ExitCode="1:0")
    for job in range(11, 11 + many):
        slurm.end(job, state, **fields)
    first = 11 + many
    begin(slurm, monkeypatch, first)
    worked = []
    said = link(spared, slurm.jobs[first]["kind"], work=lambda: worked.append(True))
    assert f"job {first - 1} never began: {state}" in said and len(slurm.waiting) == 3
    if many == 2:  # of the other kind again, it hands on
        assert not worked and "the next step is of kind rollout" in said
    assert "--exclude=n3" in slurm.options
    assert bool(worked) == (slurm.jobs[first]["kind"] == "rollout")


def test_a_cancelled_chain_ends_also_where_the_next_link_never_began(spared, slurm, monkeypatch):
    links.fill(spared, "rollout", None, print)
    begin(slurm, monkeypatch, 10)
    link(spared, work=fail(T1Error("told to stop")))
    slurm.end(10, "CANCELLED", ExitCode="143:0")
    slurm.end(11, "CANCELLED")  # by Slurm
    begin(slurm, monkeypatch, 12)
    said = link(spared, work=fail(AssertionError("it worked")))
    assert "job 10, which this one follows, was cancelled: the chain ends" in said and slurm.waiting == []


def test_a_link_that_a_controller_forgot_and_no_node_started_again_ends_no_chain(spared, slurm, monkeypatch):
    """Slurm shows it as cancelled: where the first start's processes are still there, slurmd refuses another one."""
    links.fill(spared, "rollout", None, print)
    begin(slurm, monkeypatch, 10)
    link(spared, work=fail(T1Error("told to stop")))
    slurm.end(10, "CANCELLED")
    begin(slurm, monkeypatch, 11)
    assert "the next step is of kind rollout: job 12 takes it" in link(spared, "train")


def test_a_link_that_somebody_took_out_of_the_queue_ends_the_chain(spared, slurm, monkeypatch):
    links.fill(spared, "rollout", None, print)
    begin(slurm, monkeypatch, 10)
    link(spared)
    slurm.end(10, "COMPLETED")
    slurm.end(11, "CANCELLED", NodeList="(null)")
    begin(slurm, monkeypatch, 12)
    assert "job 11, which this one follows, was cancelled" in link(spared) and slurm.waiting == []


def test_links_that_no_node_starts_end_a_chain_after_a_few(spared, slurm, monkeypatch):
    """All of training's nodes are broken: rollout's links would hand on for ever."""
    spared.cluster.slurm.max_failures = 2
    monkeypatch.setattr(chain, "next_kind", lambda config, finished: "train")
    links.fill(spared, "rollout", None, print)
    for job, kind in ((10, "rollout"), (12, "rollout"), (14, "rollout")):
        begin(slurm, monkeypatch, job)
        said = link(spared, kind)
        slurm.end(job, "COMPLETED")
        if job + 1 in slurm.jobs and slurm.jobs[job + 1]["JobState"] == "PENDING":
            slurm.end(job + 1, "CANCELLED")
    assert "2 jobs in a row finished no step" in said and "(2 of them were started by no node)" in said
    assert slurm.waiting == []


def test_spares_that_slurm_refuses_keep_no_link_from_working(spared, slurm, monkeypatch):
    worked, submit = [], slurm_jobs.submit

    def limited(*arguments, **more):
        if len(slurm.waiting) >= 1:
            raise T1Error("QOSMaxSubmitJobPerUserLimit")
        return submit(*arguments, **more)

    monkeypatch.setattr(slurm_jobs, "submit", limited)
    said = link(spared, work=lambda: worked.append(True))
    assert worked and "Slurm takes no more now: QOSMaxSubmit" in said and slurm.waiting == [(10, "train")]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], ["--exclude=n3"]),
        (["--exclude=n9"], ["--exclude=n9,n3"]),
        (["-x", "n9"], []),
        (["--exclusive"], ["--exclude=n3"]),
    ],
)
def test_nodes_are_left_out_beside_those_of_the_user(tmp_path, given, expected):
    assert links._left_out(tmp_path, given) == []
    slurm_jobs.note(tmp_path, 3, event=links.UNSTARTED, node="n3")
    assert links._left_out(tmp_path, given) == expected


def test_a_link_is_handed_in_all_the_same_where_too_few_nodes_are_left(spared, slurm, monkeypatch):
    slurm_jobs.note(spared.run.dir, 3, event=links.UNSTARTED, node="n3")
    submit = slurm_jobs.submit

    def few(options, *arguments, **more):
        if "--exclude=n3" in options:
            raise T1Error("Requested node configuration is not available")
        return submit(options, *arguments, **more)

    monkeypatch.setattr(slurm_jobs, "submit", few)
    assert links.fill(spared, "rollout", None, print) == [10, 11, 12]


def test_what_ended_a_chain_is_said_with_the_command_that_goes_on(spared, slurm, monkeypatch, capsys):
    """Also where the first links of all never began: there is no run yet."""
    links.Chain(["run.dir=a b", "loop.iterations=3"], "/home/me").write(spared.run.dir)
    slurm_jobs.note(spared.run.dir, 0, event="chain")
    links.fill(spared, "rollout", None, print)
    assert going_on(spared.run.dir) == ""
    for job, (state, fields) in zip((10, 11, 12), (LAUNCH, GONE, LOST), strict=True):
        slurm.end(job, state, **fields)
    assert going_on(spared.run.dir) == "cd /home/me && t1 slurm submit --chain 'run.dir=a b' loop.iterations=3"
    assert main(["slurm", "status", spared.run.dir]) == 0
    said = capsys.readouterr().out
    assert "the run has not begun" in said and f"this goes on: {going_on(spared.run.dir)}" in said
    said = [refusal(slurm.find(job), False) for job in (10, 11, 12)]
    assert "n3 didn't start it (prolog" in said[0] and "t1 can't be run on n3" in said[1] and "lost" in said[2]
    assert refusal(slurm.find(10), True) == ""


SCONTROL = """#!/bin/bash
echo "$*" >> "$0.calls"
case "$1 $2" in
    "show job") echo "JobId=7 ExcNodeList=$(cat "$0.excluded") NodeList=n5";;
    "update JobId=7") if [[ $3 == *n9,* ]]; then exit 1; fi;;
    "show hostnames") tr , "\\n" <<< "$3";;
esac
"""


@pytest.mark.parametrize(
    ("lacks", "excluded", "expected"),
    [("", "(null)", ""), ("interpreter", "(null)", "n5"), ("run directory", "n1,n2", "n1,n2,n5"),
     ("interpreter", "n9", "n9,n5"),
     ("interpreter", ",".join(f"n{number}" for number in range(10, 18)), "")],
)  # fmt: skip
def test_a_script_on_a_node_that_lacks_something_leaves_it_to_others(tmp_path, lacks, excluded, expected):
    run, scontrol = tmp_path / "run", tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(SCONTROL)
    scontrol.chmod(0o755)
    (scontrol.parent / "scontrol.excluded").write_text(excluded)
    script, interpreter = write_script(run).read_text(), tmp_path / "python"
    if lacks != "interpreter":
        interpreter.write_text('#!/bin/bash\n[[ $1 == -c ]] || echo "worked with $*"\n')
        interpreter.chmod(0o755)
    environment = {
        "PATH": f"{scontrol.parent}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "t1-train",
        "SLURMD_NODENAME": "n5",
    }  # fmt: skip
    where = tmp_path / "unmounted" if lacks == "run directory" else run
    done = subprocess.run(
        ["bash", "-c", script, "job.sh", str(where), str(interpreter), "a", "b c"], env=environment, text=True,
        capture_output=True,
    )  # fmt: skip
    calls = scontrol.with_suffix(".calls")
    called = calls.read_text().splitlines() if calls.exists() else []
    log = run / "slurm" / "t1-train-7.log"
    assert done.returncode == (127 if lacks else 0)
    assert ("requeue 7" in called) == bool(expected)
    assert not expected or f"update JobId=7 ExcNodeList={expected}" in called
    assert ("hold 7" in called) == (excluded == "n9")  # too few nodes would be left
    if lacks == "interpreter":
        assert "job 7 can't begin on n5" in log.read_text()
    elif not lacks:
        assert log.read_text() == "worked with a b c\n"
