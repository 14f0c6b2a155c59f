"""What is gone from a run is found: records, logs, the run's own files; and nothing that is as it should be."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace

import pytest

from megatron_t1 import sealed
from megatron_t1.audit.findings import Kind
from megatron_t1.audit.run import audit_target, exit_status
from megatron_t1.audit.targets import find_all, find_targets
from megatron_t1.cli import main
from megatron_t1.trajectory.exchange import ExchangeLog, log_names
from megatron_t1.trajectory.store import RolloutStore
from tests.audit.conftest import ROLLOUT

RESULT = "phases/iter_0000/rollout/result.json"


def audited(*paths):
    """(exit status, findings about files) of an audit."""
    results = [audit_target(target) for target in find_all(paths)]
    return exit_status(results), [finding for result in results for finding in result.files]


def shard(run):
    (path,) = (run / ROLLOUT).glob("*.shard.safetensors")
    return path


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])


GONE = {
    "a shard": (lambda run: shard(run).unlink(), "shard.safetensors: missing"),
    "a log": (lambda run: (run / ROLLOUT / log_names(run / ROLLOUT)[0]).unlink(), ".log: missing"),
    "a directory of records": (lambda run: shutil.rmtree(run / ROLLOUT), "shard.safetensors: missing"),
    "all rollouts": (lambda run: shutil.rmtree(run / "rollouts"), "shard.safetensors: missing"),
    "the evaluations": (lambda run: shutil.rmtree(run / "evaluations"), "summary.json: missing"),
    "a summary": (lambda run: (run / "evaluations/iter_0000/summary.json").unlink(), "summary.json: missing"),
    "a summary's end": (lambda run: cut(run / "evaluations/iter_0000/summary.json"), "bytes, expected"),
    "the configuration": (lambda run: (run / "config.yaml").unlink(), "config.yaml: missing"),
    "the manifest": (lambda run: (run / "manifest.json").unlink(), "manifest.json: missing"),
    "a result": (lambda run: (run / RESULT).unlink(), f"{RESULT}: missing, and manifest.json says"),
    "all results": (lambda run: shutil.rmtree(run / "phases"), f"{RESULT}: missing, and manifest.json says"),
}


@pytest.mark.parametrize("name", GONE)
def test_what_is_gone_from_a_run_is_found(run, capsys, name):
    damage, said = GONE[name]
    damage(run)
    assert main(["audit", str(run)]) == 1
    output = capsys.readouterr().out
    assert "nothing is wrong" not in output and "not as the run recorded it" in output and said in output


UNREADABLE = {
    "the configuration": lambda run: (run / "config.yaml").write_text("]"),
    "the manifest": lambda run: (run / "manifest.json").write_text("{"),
    "a manifest that is a number": lambda run: (run / "manifest.json").write_text("5"),
    "a shard": lambda run: shard(run).parent.joinpath("x.shard.safetensors").write_bytes(b"hello"),
}


@pytest.mark.parametrize("name", ["the configuration", "the manifest", "a manifest that is a number"])
def test_what_cannot_be_read_has_exit_status_2(run, tmp_path, name):
    UNREADABLE[name](run)
    status, findings = audited(run)
    assert status == 2 and {finding.kind for finding in findings} == {Kind.UNREADABLE}
    report = tmp_path / "report.json"
    assert main(["audit", str(run), "--report", str(report)]) == 2
    assert json.loads(report.read_text())["totals"]["clean"] == 10  # everything else was audited


@pytest.mark.parametrize(
    "content",
    ["{", "5", "[]", '{"outputs": 3}', '{"phase": "rollout", "iteration": 0, "outputs": [{"path": 5, "size": 1}]}',
     '{"phase": "rollout", "iteration": 0, "outputs": [{"path": "../../etc/passwd", "size": 1}]}'],
)  # fmt: skip
def test_a_damaged_result_is_named(run, content):
    (run / RESULT).write_text(content)
    status, findings = audited(run)
    assert status == 1 and {finding.kind for finding in findings} == {Kind.UNREADABLE, Kind.RECORDED}
    assert all(finding.detail.startswith(RESULT) for finding in findings)


def test_a_record_that_nobody_recorded_is_found(run):
    RolloutStore(run / ROLLOUT).add(replace_id(next(iter(RolloutStore(run / ROLLOUT))), "another"))
    status, findings = audited(run)
    assert status == 1 and any("another.safetensors: nobody recorded this file" in str(one) for one in findings)


def replace_id(record, name):
    return replace(record, header=replace(record.header, trajectory_id=name))


def test_large_files_are_compared_by_content(run, monkeypatch):
    monkeypatch.setattr("megatron_t1.audit.run.SMALL_BYTES", 0)
    monkeypatch.setattr("megatron_t1.phase.SMALL_BYTES", 0)
    assert audited(run) == (0, [])
    path = shard(run)
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    status, findings = audited(run)
    assert any("its SHA-256 is another one than was recorded" in finding.detail for finding in findings)


def test_episodes_in_the_log_without_a_record_are_found(copy):
    del copy.records[copy.name]
    copy.write()
    status, (finding,) = audited(copy.directory)
    assert status == 1 and finding.kind == Kind.NO_RECORD and copy.name in finding.detail


def test_plays_that_were_repeated_or_are_under_way_are_fine(copy):
    with ExchangeLog(copy.directory) as log:
        log.session(copy.name, 0)  # aborted; the record is of another play
    assert audited(copy.directory) == (0, [])
    for path in copy.directory.glob("*.safetensors"):
        path.unlink()
    for record in list(copy.records.values())[:2]:  # a phase that was killed: nothing is sealed yet
        RolloutStore(copy.directory).add(record)
    assert audited(copy.directory) == (0, [])


def test_rollouts_without_books_whose_records_are_gone_are_found(run, tmp_path):
    shutil.copytree(run / "rollouts", tmp_path / "kept/rollouts")
    shutil.copytree(run / "rollouts/iter_0000", tmp_path / "kept/rollouts/iter_0001")
    shard(tmp_path / "kept").unlink()
    status, (finding,) = audited(tmp_path / "kept")
    assert status == 1 and finding.kind == Kind.NO_RECORD and finding.detail.startswith("6 episodes")


def test_rollouts_that_were_deleted_by_policy_are_not_missed(run):
    shutil.rmtree(run / ROLLOUT)
    assert audited(run)[0] == 1
    sealed.write(run / "manifest.json", {**sealed.read(run / "manifest.json"), "retired": [ROLLOUT]})
    assert audited(run) == (0, [])
    assert main(["verify", str(run)]) == 0


def test_a_phase_that_is_under_way_or_was_set_aside_is_fine(run):
    (run / "phases/iter_0001/rollout").mkdir(parents=True)
    (run / "rollouts/iter_0001").mkdir()
    with ExchangeLog(run / "rollouts/iter_0001") as log:
        log.session("first", 0)
    assert audited(run) == (0, [])
    # Another configuration, before a step was finished: the loop moves the records away.
    sealed.write(run / "manifest.json", {**sealed.read(run / "manifest.json"), "finished": []})
    (run / "superseded_1").mkdir()
    for kind in ("rollouts", "evaluations"):
        os.rename(run / kind, run / "superseded_1" / kind)
    shutil.copytree(run / "superseded_1/rollouts/iter_0001", run / "rollouts/iter_0001")
    assert main(["audit", str(run)]) == 2  # there are no records
    (run / "superseded_1/rollouts").rename(run / "elsewhere")
    assert audited(run)[0] == 1


def test_directories_of_another_name_are_not_part_of_the_run(run, monkeypatch):
    for name in ("iter_0000.bak", "iter_", "iter_x", "iter_1", "iter_\u0661\u0661\u0661\u0661"):
        shutil.copytree(run / ROLLOUT, run / "rollouts" / name)
    (run / "phases/iter_0000.bak").mkdir()
    assert main(["audit", str(run), "--baseline", "rerender"]) == 0
    assert sorted(target.directory.name for target in find_targets(run)) == ["iter_0000", "iter_0000"]
    assert main(["audit", str(run / "rollouts/iter_0000.bak")]) == 0
    assert main(["audit", str(run / "rollouts/iter_0000.bak"), "--baseline", "rerender"]) == 2
    monkeypatch.chdir(run / ROLLOUT)
    assert main(["audit", ".", "--baseline", "rerender"]) == 0


def test_one_unreadable_shard_does_not_end_the_audit(run, tmp_path, capsys):
    UNREADABLE["a shard"](run)
    shutil.rmtree(run / "phases")
    report = tmp_path / "report.json"
    assert main(["audit", str(run / "rollouts"), str(run / "evaluations"), "--report", str(report)]) == 1
    assert main(["audit", str(run / ROLLOUT), "--report", str(report)]) == 2
    totals = json.loads(report.read_text())["totals"]
    assert (totals["clean"], totals["unreadable"], totals["evidence"]) == (6, 1, 1)
    assert "unreadable: x.shard.safetensors" in capsys.readouterr().out


@pytest.mark.parametrize("bad", ["x y.safetensors", ".safetensors", "d.safetensors", "d.shard.safetensors"])
def test_files_that_are_no_records_are_named(copy, bad):
    (copy.directory / bad).mkdir()
    status, findings = audited(copy.directory)
    assert status == 2 and len([one for one in findings if one.kind == Kind.UNREADABLE]) <= 1


@pytest.mark.parametrize("kind", ["directory", "circle of links"])
def test_a_log_that_cannot_be_opened_is_unreadable(copy, tmp_path, kind):
    def make(path):
        path.mkdir() if kind == "directory" else path.symlink_to(path)

    log, other = copy.log, copy.directory / "exchange.9.x.log"
    make(other)
    status, (finding,) = audited(copy.directory)
    assert status == 2 and finding.kind == Kind.UNREADABLE and finding.detail.startswith(other.name)
    log.unlink()
    make(log)  # the one that the records point to
    report = tmp_path / "report.json"
    assert main(["audit", str(copy.directory), "--report", str(report)]) == 2
    target = json.loads(report.read_text())["targets"][0]
    assert {one["findings"][0]["kind"] for one in target["trajectories"]} == {"unreadable"}
    assert any("unreadable" in item for item in target["inputs"])


def test_a_report_that_cannot_be_written_is_found_before_the_work(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("megatron_t1.commands.audit.audit_target", None)  # no work
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file/report.json", "/proc/t1/report.json"):
        assert main(["audit", str(run), "--report", str(path)]) == 2
        assert "the report can't be written" in capsys.readouterr().err


def test_what_is_named_twice_is_counted_once(run, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(run)
    monkeypatch.chdir(run)
    names = (str(run), ".", str(tmp_path / "link"), str(run / ROLLOUT), str(shard(run)), "rollouts")
    assert len(find_all(names)) == 2
    assert len(find_all([shard(run), shard(run)])) == 1


@pytest.mark.parametrize(
    "options", [["--model", "x"], ["--chat-format", "x"], ["--rescore", "1", "--chat-format", "x"]]
)
def test_options_without_effect_are_refused(run, capsys, options):
    assert main(["audit", str(run), *options]) == 2
    assert "--baseline rerender" in capsys.readouterr().err


def test_the_rollouts_of_a_run_can_be_named(run, capsys):
    assert main(["audit", str(run / "rollouts")]) == 0
    said = capsys.readouterr().out
    assert "rollout 0" in said and "evaluation" not in said
    shard(run).unlink()
    assert main(["audit", str(run / "rollouts")]) == 1
    assert main(["audit", str(run / ROLLOUT)]) == 1
    assert main(["audit", str(run / "evaluations")]) == 0


def test_inspecting_a_directory_explains(run, capsys):
    assert main(["inspect", str(run)]) == 1
    said = capsys.readouterr().err
    assert "this is a directory" in said and "t1 show RUN" in said


def test_records_of_another_policy_than_their_iterations_are_found(run):
    shutil.move(run / "evaluations/iter_0000", run / "evaluations/iter_0001")
    (target,) = find_targets(run / "evaluations/iter_0001")
    result = audit_target(target)
    kinds = [{finding.kind: finding.detail for finding in one.findings} for one in result.trajectories]
    assert kinds == [{Kind.POLICY: "the record says 0, the run's iteration 1"}] * 4
