"""Records, logs and directories of somebody else: nothing they name is run, nothing they hold ends the audit."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from dataclasses import replace

import numpy as np
import pytest

from megatron_t1.audit.baseline import format_of_record
from megatron_t1.audit.findings import Kind
from megatron_t1.audit.guard import require_no_drift
from megatron_t1.audit.run import audit_target, exit_status
from megatron_t1.audit.targets import find_all, find_targets
from megatron_t1.cli import main
from megatron_t1.config.compose import load_run_config
from megatron_t1.errors import ConfigError, MismatchError
from megatron_t1.trajectory.exchange import ExchangeLog
from megatron_t1.trajectory.exchange_reader import read_exchange
from megatron_t1.trajectory.record import IMPORTED
from megatron_t1.trajectory.store import DuplicateError, RolloutStore
from tests.audit.conftest import ROLLOUT, edited
from tests.audit.test_damage import audit, contract, found, sampled


def extra(record, **values):
    return replace(record, header=replace(record.header, extra=values))


# 1: what a record names is data


@pytest.mark.parametrize("name", ["shutil:rmtree", "os:system", "template:/etc/hostname", "renderers:../x", "", "x"])
def test_a_record_names_no_code_and_no_file(copy, tmp_path, capsys, name):
    record = contract(copy.record, chat_format=name)
    with pytest.raises(ConfigError, match="the record names"):
        format_of_record(record.header)
    model = tmp_path / "model"
    shutil.copytree(load_run_config(copy.directory.parents[1]).model.path, model)
    alone, honest = tmp_path / "alone", tmp_path / "honest"
    for directory, held in ((alone, record), (honest, copy.record)):
        RolloutStore(directory).add(held)
        shutil.copy(copy.log, directory)
    report = tmp_path / "report.json"
    options = ["--baseline", "rerender", "--model", str(model), "--report", str(report)]
    assert main(["audit", str(alone), str(honest), *options]) == 1  # the engine's log says another format
    assert model.is_dir() and "alone: no baseline" in capsys.readouterr().out
    one, other = (target["baseline"] for target in json.loads(report.read_text())["targets"])
    assert one["problem"] and one["trajectories"] == 0 and other["trajectories"] == 1 and "problem" not in other


# 2, 5, 6: where the files lie, and what they are


def test_a_run_whose_rollouts_are_a_link_keeps_its_books(run, tmp_path):
    shutil.move(run / "rollouts", tmp_path / "disk")
    (run / "rollouts").symlink_to(tmp_path / "disk")
    for path in (run, run / "rollouts", run / ROLLOUT):
        (target, *_) = find_targets(path)
        assert target.result is not None and target.kind == "rollouts" and target.policy == 0
    assert main(["audit", str(run)]) == 0
    files = RolloutStore(run / ROLLOUT).written_files(run)
    assert all(file.path.startswith(f"{ROLLOUT}/") for file in files) and files
    next((run / ROLLOUT).glob("*.shard.safetensors")).unlink()
    assert main(["audit", str(run)]) == 1


def test_a_directory_that_cannot_be_read_leaves_the_others_audited(run, tmp_path, monkeypatch, capsys):
    closed, listdir = str(run / ROLLOUT), os.listdir

    def refusing(path="."):
        if str(path) == closed:
            raise PermissionError(errno.EACCES, "Permission denied", closed)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refusing)
    report = tmp_path / "report.json"
    assert main(["audit", str(run), "--report", str(report)]) == 2
    output, written = capsys.readouterr().out, json.loads(report.read_text())
    assert "Permission denied" in output and written["totals"]["trajectories"] == 4


@pytest.mark.parametrize("name", ["zz.safetensors", "zz.shard.safetensors", "exchange.9.zz.log"])
def test_a_fifo_or_a_device_is_refused_and_not_read(copy, name, capsys):
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        make(copy.directory / name)
        assert main(["audit", str(copy.directory)]) == 2
        assert main(["inspect", str(copy.directory / name)]) == 1
        output = capsys.readouterr()
        assert "not a regular file" in output.out and "not a regular file" in output.err
        (copy.directory / name).unlink()


@pytest.mark.parametrize("name", ["config.yaml", "manifest.json", "phases/iter_0000/rollout/result.json"])
def test_a_runs_own_file_that_is_a_fifo_is_a_finding(run, name):
    (run / name).unlink()
    os.mkfifo(run / name)
    assert main(["audit", str(run)]) in (1, 2)


# 3: one id, one record


def test_an_id_in_two_shards_is_found_and_never_trained_on(copy):
    forged = replace(copy.record, ids=edited(copy.record.ids, sampled(copy.record), 17))
    RolloutStore(copy.directory)._write_shard([forged])
    result = audit(copy.directory)
    assert Kind.DUPLICATE in {finding.kind for finding in result.files} and exit_status([result]) == 1
    store = RolloutStore(copy.directory)
    for read in (store.ids, store.headers, lambda: store.load(copy.name), lambda: require_no_drift(copy.directory)):
        with pytest.raises(DuplicateError, match=copy.name):
            read()


def test_an_id_twice_in_one_shard_is_found(copy):
    forged = replace(copy.record, ids=edited(copy.record.ids, sampled(copy.record), 17))
    for path in copy.directory.glob("*.safetensors"):
        path.unlink()
    RolloutStore(copy.directory)._write_shard([forged, copy.record])
    result = audit(copy.directory)
    assert [finding.kind for finding in result.files if "twice" in finding.detail] == [Kind.DUPLICATE]


def test_a_single_record_beside_another_sealed_one_is_found(copy):
    single = RolloutStore(copy.directory / "other")
    single.add(copy.record)
    (path,) = (copy.directory / "other").glob("*.safetensors")
    shutil.copy(path, copy.directory)
    assert not audit(copy.directory).files  # about to be removed by the seal that was killed
    path.unlink()
    RolloutStore(copy.directory / "other").add(copy.record.noting(other=1))
    shutil.copy(path, copy.directory)
    assert Kind.DUPLICATE in {finding.kind for finding in audit(copy.directory).files}


# 8: every field of the contract has somebody who says otherwise


RUN_SAYS = {
    "num_experts": 15, "top_k": 1, "num_moe_layers": 7, "chat_format": "template", "model_dtype": "bfloat16",
    "engine_dtype": "bfloat16", "tokenizer_sha256": "0" * 64, "temperature": 0.5, "top_p": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("name", RUN_SAYS)
def test_a_field_of_the_contract_is_compared_with_the_runs_model(copy, name):
    copy.log.unlink()  # no engine speaks
    copy.write(replace(contract(copy.record, **{name: RUN_SAYS[name]}), routes=None,
                       routed=np.zeros(len(copy.record), bool)))  # fmt: skip
    wrong = {one.trajectory: [f.detail for f in one.findings if f.kind == Kind.CONTRACT]
             for one in audit(copy.directory).trajectories}  # fmt: skip
    assert [detail.partition(":")[0] for detail in wrong.pop(copy.name)] == [name]
    assert not any(wrong.values())


@pytest.mark.parametrize("name", ["num_experts", "top_k", "num_moe_layers", "chat_format", "model_dtype"])
def test_a_field_of_the_contract_is_compared_with_the_engines_log(copy, tmp_path, name):
    RolloutStore(tmp_path / "alone").add(contract(copy.record, **{name: RUN_SAYS[name]}))
    shutil.copy(copy.log, tmp_path / "alone")
    findings = [f for one in audit(tmp_path / "alone").trajectories for f in one.findings]
    assert {finding.kind for finding in findings} == {Kind.CONTRACT}
    assert any(finding.detail.startswith(name) and "the engine" in finding.detail for finding in findings)


def test_routes_contradict_the_records_own_contract(copy, tmp_path):
    RolloutStore(tmp_path / "alone").add(contract(copy.record, num_experts=2, top_k=1, num_moe_layers=9))
    details = [f.detail for one in audit(tmp_path / "alone").trajectories for f in one.findings]
    assert sum("its routes" in detail for detail in details) == 3


def test_another_chat_template_than_the_engines_is_found(copy, tmp_path):
    with ExchangeLog(tmp_path, facts={"template_sha256": "a" * 64}) as log:
        replay(log.session(copy.name, 0), copy.record, copy.log)
    record = extra(copy.record, exchange={"log": log.path.name, "session": 0}, template_sha256="b" * 64)
    RolloutStore(tmp_path).add(record)
    assert "template_sha256" in found(audit(tmp_path))[Kind.CONTRACT].detail


def replay(session, record, log, *, routes=True):
    """The exchange of a record, written once more."""
    logged = next(one for one in read_exchange(log).sessions.values() if one.trajectory == record.header.trajectory_id)
    stream = np.empty(0, np.int32)
    for turn in logged.turns:
        prompt = np.concatenate([stream[: turn.kept], turn.new_prompt])
        start = turn.routes_start
        rows = record.routes[start : start + turn.routes_rows] if routes and start >= 0 else None
        session.add(
            prompt, sampled=turn.sampled, logprobs=turn.logprobs, response_sha256=turn.response_sha256,
            finish_reason=turn.finish_reason, state=turn.state, routes=rows, routes_start=max(start, 0),
        )  # fmt: skip
        stream = np.concatenate([prompt, turn.sampled])


# 9, 14: what has no evidence


def test_routes_that_came_with_no_answer_are_found(copy, tmp_path):
    with ExchangeLog(tmp_path) as log:
        replay(log.session(copy.name, 0), copy.record, copy.log, routes=False)
    RolloutStore(tmp_path).add(extra(copy.record, exchange={"log": log.path.name, "session": 0}))
    finding = found(audit(tmp_path))[Kind.ROUTES_CHANGED]
    assert finding.tokens == copy.record.routed.sum()


@pytest.mark.parametrize("values", [{}, {IMPORTED: "x.jsonl:1"}])
@pytest.mark.parametrize("agreed", [True, False])
def test_a_record_without_its_pointer_is_compared_all_the_same(copy, values, agreed):
    record = replace(copy.record, ids=edited(copy.record.ids, sampled(copy.record), 17))
    record = extra(record, **values)
    if not agreed:
        record = replace(record, header=replace(record.header, contract=None))
    copy.write(record)
    result = audit(copy.directory)
    assert {Kind.CHANGED, Kind.LOG_MISSING} <= set(found(result, copy.name)) and exit_status([result]) == 1
    with pytest.raises(MismatchError, match="changed token"):
        require_no_drift(copy.directory)


def test_a_sampled_record_without_any_log_is_no_import(copy):
    copy.write(extra(replace(copy.record, header=replace(copy.record.header, contract=None))))
    copy.log.unlink()
    assert Kind.LOG_MISSING in found(audit(copy.directory), copy.name)
    with pytest.raises(MismatchError, match="exchange log missing"):
        require_no_drift(copy.directory)


def test_a_mask_of_its_own_is_an_imports_only(copy):
    record = copy.record.noting(**{IMPORTED: "x"})
    copy.write(replace(record, excluded=edited(np.zeros(len(record), bool), sampled(record), True)))
    assert Kind.NOT_TRAINED in found(audit(copy.directory), copy.name)


# 13, 18, 19: what is printed and written


def test_names_that_are_no_text_or_orders_are_shown_and_reported(copy, tmp_path, capsys):
    for name in (b"\xff\xfe.safetensors", b"\x1b[2J.safetensors", "\u202e.safetensors".encode()):
        with open(os.path.join(os.fsencode(copy.directory), name), "wb") as file:
            file.write(b"x")
    report = tmp_path / "report.json"
    assert main(["audit", str(copy.directory), "--report", str(report)]) == 2
    output = capsys.readouterr().out
    assert r"\udcff" in output and r"\x1b[2J" in output and r"\u202e" in output
    assert "\x1b" not in output and "\u202e" not in output
    assert any("\udcff" in item["path"] for item in json.loads(report.read_text())["targets"][0]["inputs"])


def test_no_number_of_the_table_is_cut(copy, monkeypatch, capsys):
    from megatron_t1.audit import run as module

    big = {**audit(copy.directory).totals(), **{name: 123_456_789_012 for name in
           ("trajectories", "long", "loss_tokens", "drift_in_loss", "drift_outside", "mask", "logprobs", "routes",
            "contract", "evidence")}}  # fmt: skip
    monkeypatch.setattr(module.TargetAudit, "totals", lambda self: big)
    directory = copy.directory.parent / ("a-long-name" * 12)
    shutil.copytree(copy.directory, directory)
    main(["audit", str(directory)])
    output = capsys.readouterr().out
    assert output.count("123,456,789,012") == 10 and directory.name in output


# 17: a rollout that goes on while it is looked at


def test_a_rollout_that_is_sealed_meanwhile_raises_no_alarm(copy):
    records = list(copy.records.values())
    for path in copy.directory.glob("*.safetensors"):
        path.unlink()
    store = RolloutStore(copy.directory)
    for record in records[:3]:
        store.add(record)
    (target,) = find_targets(copy.directory)

    class Late(type(target)):
        def records(self):
            found = list(super().records())
            for record in records[3:]:
                store.add(record)
            store.seal()
            return iter(found)

    result = audit_target(Late(**{name: getattr(target, name) for name in target.__dataclass_fields__}))
    assert exit_status([result]) == 0 and len(result.trajectories) == 3


def test_two_writers_of_shards_take_turns(copy, tmp_path):
    records = list(copy.records.values())
    errors: list[Exception] = []

    def write(number):
        try:
            RolloutStore(tmp_path / "both").add_many([record.noting(writer=number) for record in records])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 3 and all("already" in str(error) for error in errors)
    assert len(list((tmp_path / "both").iterdir())) == 1 and len(RolloutStore(tmp_path / "both").ids()) == len(records)


def test_paths_that_cannot_be_looked_at_are_findings(run, monkeypatch):
    from megatron_t1.audit import targets

    def refusing(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(targets, "find_targets", refusing)
    results = [audit_target(target) for target in find_all([run])]
    assert exit_status(results) == 2
