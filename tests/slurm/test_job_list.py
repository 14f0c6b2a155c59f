"""The run's list of jobs when lines of it are gone: which is said, mended from what Slurm knows, and ends nothing."""

import pytest

from megatron_t1 import sealed
from megatron_t1.commands.slurm import job_lines
from megatron_t1.config.compose import compose
from megatron_t1.errors import T1Error
from megatron_t1.loop import job_list, slurm_jobs
from megatron_t1.loop.chain import cancel_chain
from megatron_t1.loop.links import followers
from megatron_t1.loop.manifest import new_manifest
from megatron_t1.paths import RunPaths


@pytest.fixture(scope="module")
def manifest():
    return new_manifest(compose(["run.dir=somewhere"]))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run whose list has jobs 1 to 5, of which Slurm knows 4 and 5, and somebody else's 6."""
    for job in range(1, 6):
        slurm_jobs.note(tmp_path, job, event="submitted", kind="train", after=job - 1 or None)
    shown = "".join(
        f"JobId={job} JobName=t1-{kind} JobState=PENDING Reason=Dependency Dependency={dependency} Restarts=0 "
        f"SubmitTime=2026-01-02T03:04:0{job} Command={folder}/slurm/job.sh {folder} python WorkDir=/\n"
        for job, kind, dependency, folder in [
            (4, "rollout", "afterany:3(unfulfilled)", tmp_path),
            (5, "train", "afterany:3(unfulfilled),afterany:4(unfulfilled)", tmp_path),
            (6, "train", "(null)", f"{tmp_path}_other"),
        ]
    )

    def ask(command, **more):
        wanted = command[3] if command[3] != "-o" else ""
        return "".join(line for line in shown.splitlines(True) if f"JobId={wanted}" in line) or None

    monkeypatch.setattr(slurm_jobs, "ask", ask)
    return tmp_path


def remember(run, manifest):
    """The manifest is written as the loop does it."""
    said = []
    manifest.jobs = job_list.mend(run, said.append)
    manifest.write(RunPaths.of(run).manifest)
    return said


def cut(run, *rows):
    path = run / slurm_jobs.JOBS_FILE
    lines = path.read_bytes().splitlines(True)
    path.write_bytes(b"".join(line for row, line in enumerate(lines, 1) if row not in rows))


@pytest.mark.parametrize(
    ("rows", "gone"), [((5,), 1), ((4, 5), 2), ((2,), 1), ((1,), 1), ((2, 4), 2), ((1, 2, 3, 4, 5), 5)]
)
@pytest.mark.parametrize("noted_since", [0, 1, 3])
def test_lines_that_are_gone_are_missed(run, manifest, rows, gone, noted_since):
    assert remember(run, manifest) == [] and job_list.damage(run) == ""
    cut(run, *rows)
    for job in range(noted_since):
        slurm_jobs.note(run, 20 + job, event="began")
    found = job_list.damage(run)
    assert found.startswith("slurm/jobs.jsonl: ") and found.endswith(" lines are gone")
    assert noted_since or f" {gone} lines" in found
    assert any(found in line for line in job_lines(run))
    (said,) = remember(run, manifest)
    assert said.startswith(found) and said.endswith("this goes on")
    assert {4, 5} <= {line["job"] for line in slurm_jobs.noted(run)} and job_list.damage(run) == ""
    assert remember(run, manifest) == []  # said once


def test_a_list_that_was_deleted_is_missed_and_its_jobs_are_known_again(run, manifest):
    remember(run, manifest)
    (run / slurm_jobs.JOBS_FILE).unlink()
    assert "5 lines are gone" in job_list.damage(run)
    assert [line.split()[1] for line in job_lines(run) if line.startswith("job ")] == ["4", "5"]
    (said,) = remember(run, manifest)
    assert "Slurm knows 4, 5 of this run" in said and followers(run, 3) == [4, 5]


def test_lines_out_of_another_list_or_in_another_order_are_seen(run, manifest):
    path = run / slurm_jobs.JOBS_FILE
    lines = path.read_bytes().splitlines(True)
    for order in ([0, 2, 1, 3, 4], [0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 3]):
        path.write_bytes(b"".join(lines[row] for row in order))
        assert job_list.damage(run)
    other = run / "other.jsonl"
    for job in range(5):
        sealed.append(other, {"job": job})
    path.write_bytes(b"".join(lines[:2]) + b"".join(other.read_bytes().splitlines(True)[2:]))
    assert "1 lines are gone" in job_list.damage(run)


def test_a_line_that_was_cut_short_is_no_line_that_is_gone(run, manifest):
    remember(run, manifest)
    with open(run / slurm_jobs.JOBS_FILE, "ab") as file:
        file.write(b'{"job": 6, "ti')
    slurm_jobs.note(run, 7, event="began")
    assert job_list.damage(run) == "slurm/jobs.jsonl: 1 lines aren't what was written"
    remember(run, manifest)
    assert job_list.damage(run) == ""


def test_a_slurm_that_does_not_answer_leaves_it_for_the_next_time(run, manifest, monkeypatch):
    remember(run, manifest)
    cut(run, 5)
    known = dict(manifest.jobs)
    with monkeypatch.context() as patch:
        patch.setattr(slurm_jobs, "of_script", lambda script: (_ for _ in ()).throw(T1Error("no answer")))
        (said,) = remember(run, manifest)
        assert "isn't known: no answer; this goes on" in said and manifest.jobs == known
    assert "1 lines are gone" in job_list.damage(run)
    assert remember(run, manifest) and job_list.damage(run) == ""


def test_cancelling_ends_jobs_whose_lines_are_gone(run, manifest, monkeypatch):
    ended = []
    remember(run, manifest)
    cut(run, 4, 5)
    monkeypatch.setattr(slurm_jobs, "cancel", ended.append)
    remember(run, manifest)
    asked = []
    monkeypatch.setattr(slurm_jobs, "find", lambda job, find=slurm_jobs.find: asked.append(job) or find(job))
    assert cancel_chain(run) == ended == [5, 4]
    assert 0 not in asked  # which means all jobs of the cluster to scontrol
