"""Everything planted in a copy of a real rollout is found, named and put into the exit status."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from megatron_t1.audit.findings import Kind
from megatron_t1.audit.guard import require_no_drift
from megatron_t1.audit.run import audit_target, exit_status
from megatron_t1.audit.targets import find_targets
from megatron_t1.cli import main
from megatron_t1.errors import MismatchError
from megatron_t1.trajectory.exchange import ExchangeLog, log_names
from megatron_t1.trajectory.exchange_reader import read_exchange
from megatron_t1.trajectory.record import Origin
from megatron_t1.trajectory.store import RolloutStore
from tests.audit.conftest import ROLLOUT, edited


def audit(directory):
    (target,) = find_targets(directory)
    return audit_target(target)


def found(result, name=None):
    return {finding.kind: finding for one in result.trajectories for finding in one.findings
            if name is None or one.trajectory == name}  # fmt: skip


def test_an_untouched_run_is_clean(run, capsys):
    assert main(["audit", str(run)]) == 0
    output = capsys.readouterr().out
    assert "nothing is wrong" in output and "run, rollout 0" in output and "run, evaluation 0" in output
    for target in find_targets(run):
        result = audit_target(target)
        totals = result.totals()
        assert totals["clean"] == totals["trajectories"] == (6 if target.kind == "rollouts" else 4)
        assert totals["loss_tokens"] > 0 and totals["drift_in_loss"] == totals["drift_outside"] == 0
        assert {item["path"].rsplit(".", 1)[1] for item in result.inputs} == {"safetensors", "log"}
    assert require_no_drift(run / ROLLOUT) == 6


def test_an_honest_copy_is_clean(copy):
    copy.write()
    assert audit(copy.directory).totals()["clean"] == 6


def sampled(record, number=1):
    return int(np.flatnonzero(record.origin == Origin.SAMPLED)[number])


def context(record):
    return int(np.flatnonzero(record.origin == Origin.ENVIRONMENT)[2])


def without(record, at, **changes):
    return replace(record, **{name: np.delete(array, at, 0) for name, array in record.arrays().items()}, **changes)


def doubled(record, at):
    return replace(record, **{name: np.insert(array, at, array[at], 0) for name, array in record.arrays().items()})


def shifted(record):
    """Origin and log-probs one token later: the kind of mistake that offsets from a template make."""
    origin, logprobs = np.roll(record.origin, 1), np.roll(record.logprobs, 1)
    origin[0], logprobs[0] = Origin.PROMPT, np.nan
    return replace(record, origin=origin, logprobs=logprobs)


def unmasked(record):
    at = sampled(record)
    return replace(
        record, origin=edited(record.origin, at, Origin.REPAIR), logprobs=edited(record.logprobs, at, np.nan)
    )


def masked(record):
    at = context(record)
    return replace(record, origin=edited(record.origin, at, Origin.SAMPLED), logprobs=edited(record.logprobs, at, -1.0))


def demonstrated(record):
    at = sampled(record)
    origin, logprobs = edited(record.origin, at, Origin.DEMONSTRATION), edited(record.logprobs, at, np.nan)
    return replace(record, origin=origin, logprobs=logprobs)


def contract(record, **changes):
    return replace(record, header=replace(record.header, contract=replace(record.header.contract, **changes)))


def one_expert(record):
    at = int(len(record) // 2)
    other = (record.routes[at, 0] + 1) % 16
    return replace(record, routes=edited(record.routes, (at, 0), other))


DAMAGE = {
    "one sampled token changed": (lambda r: replace(r, ids=edited(r.ids, sampled(r), 17)), {Kind.CHANGED}),
    "one context token changed": (lambda r: replace(r, ids=edited(r.ids, context(r), 17)), {Kind.CHANGED}),
    "one sampled token inserted": (lambda r: doubled(r, sampled(r)), {Kind.INSERTED}),
    "one context token inserted": (lambda r: doubled(r, context(r)), {Kind.INSERTED}),
    "one sampled token missing": (lambda r: without(r, sampled(r)), {Kind.MISSING}),
    "one context token missing": (lambda r: without(r, context(r)), {Kind.MISSING}),
    "the last token missing": (lambda r: r.truncated(len(r) - 1), {Kind.MISSING}),
    "mask shifted by one": (shifted, {Kind.NOT_SAMPLED, Kind.NOT_TRAINED, Kind.LOGPROB}),
    "a sampled token out of the mask": (unmasked, {Kind.NOT_TRAINED}),
    "a context token in the mask": (masked, {Kind.NOT_SAMPLED}),
    "a log-prob changed by one bit": (
        lambda r: replace(r, logprobs=edited(r.logprobs, sampled(r), np.nextafter(r.logprobs[sampled(r)], 0))),
        {Kind.LOGPROB},
    ),
    "two log-probs swapped": (
        lambda r: replace(
            r, logprobs=edited(r.logprobs, [sampled(r), sampled(r, 2)], r.logprobs[[sampled(r, 2), sampled(r)]])
        ),
        {Kind.LOGPROB},
    ),
    "a route row missing": (
        lambda r: replace(r, routed=edited(r.routed, 5, False), routes=edited(r.routes, 5, 0)),
        {Kind.ROUTES_MISSING, Kind.ROUTES_CHANGED},
    ),
    "one expert of one token changed": (one_expert, {Kind.ROUTES_CHANGED}),
    "route rows shifted by one": (
        lambda r: replace(r, routes=np.concatenate([r.routes[:1], r.routes[:-1]])),
        {Kind.ROUTES_CHANGED},
    ),
    "a route row that no answer had": (
        lambda r: replace(
            r, routed=edited(r.routed, len(r) - 1, True), routes=edited(r.routes, len(r) - 1, r.routes[0])
        ),
        {Kind.ROUTES_CHANGED},
    ),
    "a sampled token excluded": (
        lambda r: replace(r, excluded=edited(np.zeros(len(r), bool), sampled(r), True)),
        {Kind.NOT_TRAINED},
    ),
    "a sampled token as a demonstration": (demonstrated, {Kind.LOGPROB}),
    "two context tokens swapped": (
        lambda r: replace(r, ids=edited(r.ids, [context(r), context(r) + 1], r.ids[[context(r) + 1, context(r)]])),
        {Kind.CHANGED},
    ),
    "log-probs at another temperature": (
        lambda r: replace(r, logprobs=(r.logprobs / np.float32(1.1)).astype(np.float32)),
        {Kind.LOGPROB},
    ),
    "layers in another order": (lambda r: replace(r, routes=r.routes[:, ::-1].copy()), {Kind.ROUTES_CHANGED}),
    "all routes missing": (
        lambda r: replace(r, routes=None, routed=np.zeros(len(r), bool)),
        {Kind.ROUTES_MISSING},
    ),
    "wrong tokenizer": (lambda r: contract(r, tokenizer_sha256="1" * 64), {Kind.CONTRACT}),
    "wrong temperature": (lambda r: contract(r, temperature=0.7), {Kind.CONTRACT}),
    "wrong stop ids": (lambda r: contract(r, stop_ids=(5,)), {Kind.CONTRACT}),
    "wrong chat format": (lambda r: contract(r, chat_format="renderers:qwen3"), {Kind.CONTRACT}),
    "wrong log-prob mode": (lambda r: contract(r, logprobs_mode="raw"), {Kind.CONTRACT}),
    "wrong type of router logits": (lambda r: contract(r, router_dtype="bfloat16"), {Kind.CONTRACT}),
    "wrong engine": (lambda r: contract(r, engine="vllm 0.1"), {Kind.CONTRACT}),
    "no contract": (lambda r: replace(r, header=replace(r.header, contract=None)), {Kind.CONTRACT}),
    "wrong policy version": (
        lambda r: replace(r, header=replace(r.header, policy_versions=(0, 1, 0))),
        {Kind.POLICY},
    ),
    "turns merged": (lambda r: replace(r, turn=np.minimum(r.turn, 1).astype(np.uint16)), {Kind.TURN}),
    "the pointer to the log lost": (lambda r: replace(r, header=replace(r.header, extra={})), {Kind.LOG_MISSING}),
    "a pointer out of the directory": (
        lambda r: r.noting(exchange={"log": "exchange.../../x.log", "session": 0}),
        {Kind.LOG_MISSING},
    ),
    "the log of another trajectory": (
        lambda r: r.noting(exchange={**r.header.extra["exchange"], "session": 5}),
        {Kind.LOG_FOREIGN},
    ),
    "a session that isn't there": (
        lambda r: r.noting(exchange={**r.header.extra["exchange"], "session": 99}),
        {Kind.LOG_CUT},
    ),
}


# What the cheap part leaves to others: routes are validated when they are loaded, records without a log are imports.
NOT_CHEAP = {Kind.ROUTES_CHANGED, Kind.ROUTES_MISSING}
UNSEEN_BY_TRAINING = ("the pointer to the log lost", "wrong chat format")


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_record_is_found_and_only_it(copy, name):
    damage, kinds = DAMAGE[name]
    copy.write(damage(copy.record))
    result = audit(copy.directory)
    assert {one.trajectory for one in result.trajectories if one.findings} == {copy.name}
    assert kinds <= set(found(result)), found(result)
    assert exit_status([result]) == 1
    assert all(finding.detail and str(finding) for finding in found(result).values())
    if name not in UNSEEN_BY_TRAINING and not set(found(result)) <= NOT_CHEAP:
        with pytest.raises(MismatchError, match="training would not see") as caught:  # the training phases refuse it
            require_no_drift(copy.directory)
        assert copy.name in caught.value.where and "t1 audit" in caught.value.remedy


def test_drift_says_where_and_whether_it_is_in_the_loss(copy):
    original = copy.record
    at = sampled(original)
    copy.write(replace(original, ids=edited(original.ids, at, 17)))
    finding = found(audit(copy.directory))[Kind.CHANGED]
    assert (finding.token, finding.tokens, finding.loss_tokens, finding.turn) == (at, 1, 1, 0)
    assert f"token id 17, the engine had {original.ids[at]}" in finding.detail
    outside = context(original)
    copy.write(replace(original, ids=edited(original.ids, outside, 17)))
    totals = audit(copy.directory).totals()
    assert (totals["drift_in_loss"], totals["drift_outside"]) == (0, 1)
    copy.write(doubled(original, at))
    totals = audit(copy.directory).totals()
    assert (totals["drift_in_loss"], totals["drift_outside"], totals["mask"]) == (1, 0, 0)


def test_a_cut_log_is_found(copy):
    content = copy.log.read_bytes()
    copy.log.write_bytes(content[:-10])  # only its last frame
    result = audit(copy.directory)
    assert [finding.kind for finding in result.files] == [Kind.LOG_CUT] and exit_status([result]) == 1
    assert not found(result)
    copy.log.write_bytes(content[: len(content) // 2])
    result = audit(copy.directory)
    assert found(result) and exit_status([result]) == 1
    assert {Kind.LOG_CUT, Kind.POLICY, Kind.LOG_MISSING} >= set(found(result)) - {Kind.LOG_CUT}


def test_a_log_cut_within_an_episode_leaves_loss_tokens_without_evidence(copy):
    content, log = copy.log.read_bytes(), read_exchange(copy.log)
    first = min(log.sessions[number].turns[1].new_prompt.ctypes.data for number in log.sessions)
    base = log.sessions[0].turns[0].new_prompt.ctypes.data
    start = content.index(log.sessions[0].turns[0].new_prompt.tobytes())
    copy.log.write_bytes(content[: start + first - base])
    kinds = {finding.kind for one in audit(copy.directory).trajectories for finding in one.findings}
    assert Kind.LOG_CUT in kinds


def test_a_changed_byte_in_a_log_is_found(copy):
    content = bytearray(copy.log.read_bytes())
    content[len(content) // 2] ^= 1
    copy.log.write_bytes(content)
    result = audit(copy.directory)
    assert Kind.LOG_DAMAGED in found(result) and len(result.files) == 1 and exit_status([result]) == 1


def test_a_log_that_is_gone_or_of_another_rollout_is_found(copy, tmp_path):
    name = copy.log.name
    copy.log.unlink()
    result = audit(copy.directory)
    assert set(found(result)) == {Kind.LOG_MISSING} and exit_status([result]) == 1
    with ExchangeLog(tmp_path / "other") as log:
        for number in range(6):
            log.session(f"other-{number}", 0)
    shutil.move(log.path, copy.directory / name)
    assert Kind.LOG_FOREIGN in found(audit(copy.directory))


def test_a_record_changed_after_it_was_written_is_unreadable(copy):
    path = next(copy.directory.glob("*.shard.safetensors"))
    content = bytearray(path.read_bytes())
    content[content.index(copy.record.ids.tobytes())] ^= 1
    path.write_bytes(content)
    result = audit(copy.directory)
    assert set(found(result)) == {Kind.UNREADABLE} and exit_status([result]) == 2
    assert main(["audit", str(copy.directory)]) == 2


@pytest.mark.parametrize("content", [b"", b"hello", b"\x10\0\0\0\0\0\0\0{}"])
def test_unreadable_input_has_its_own_exit_status(tmp_path, capsys, content):
    (tmp_path / "x.shard.safetensors").write_bytes(content)
    assert main(["audit", str(tmp_path)]) == 2
    assert main(["audit", str(tmp_path / "nothing")]) == 2
    assert "error:" in capsys.readouterr().err


def test_shards_and_single_records_can_be_audited_alone(copy):
    shard = next(copy.directory.glob("*.shard.safetensors"))
    assert main(["audit", str(shard)]) == 0
    single = RolloutStore(copy.directory / "single")
    single.add(replace(copy.record, ids=edited(copy.record.ids, sampled(copy.record), 17)))
    shutil.copy(copy.log, copy.directory / "single")
    assert main(["audit", str(next((copy.directory / "single").glob("*.safetensors")))]) == 1


def test_the_report_names_inputs_and_findings(copy, tmp_path, monkeypatch):
    copy.write(replace(copy.record, ids=edited(copy.record.ids, sampled(copy.record), 17)))
    monkeypatch.chdir(copy.directory)
    assert main(["audit", ".", "--report", str(tmp_path / "report.json")]) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["format"] == "megatron-t1 audit" and report["totals"]["drift_in_loss"] == 1
    (target,) = report["targets"]
    assert sorted(item["path"] for item in target["inputs"]) == sorted(
        [path.name for path in copy.directory.glob("*.safetensors")] + log_names(copy.directory)
    )
    wrong = [one for one in target["trajectories"] if one["status"] == "wrong"]
    assert [one["id"] for one in wrong] == [copy.name] and wrong[0]["findings"][0]["kind"] == "changed token"


@pytest.mark.parametrize("context_size", [1, 2, 4])
def test_the_view_is_the_records_own_under_any_context_parallel_size(copy, context_size):
    from megatron_t1.audit.view import trained_views

    records = list(copy.records.values())
    for record, view in zip(records, trained_views(records, context_size=context_size), strict=True):
        at = np.flatnonzero(record.loss_mask)
        assert (view.ids == record.ids).all() and (view.loss_tokens == at).all()
        assert (view.targets == record.ids[at]).all() and (view.logprobs == record.logprobs[at]).all()


def test_the_audit_needs_neither_torch_nor_vllm(run):
    code = (
        "import sys; from megatron_t1.cli import main; import megatron_t1.audit.guard; "
        f"assert main(['audit', {str(run)!r}, '--baseline', 'rerender']) == 0; "
        "found = {'torch', 'vllm', 'megatron', 'transformers'} & set(sys.modules); assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
