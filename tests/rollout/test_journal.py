"""Episodes that were begun when a phase ended: played again from their first turn, or continued from their answers."""

import numpy as np
import pytest

from megatron_t1.environment.sandbox.interface import CommandResult
from megatron_t1.errors import T1Error
from megatron_t1.rollout.journal import FOLDER, Journal
from megatron_t1.rollout.phase import run_rollout
from megatron_t1.trajectory.exchange import make_frame
from megatron_t1.trajectory.exchange_reader import read_exchange
from megatron_t1.trajectory.store import RolloutStore
from tests.audit.conftest import make_config
from tests.rollout.conftest import FakeServer, PassingSandbox


def journal(tmp_path, bound="policy 0", begun=True):
    made = Journal(tmp_path, "demo-0", bound)
    if begun:
        made.begin()
    return made


def test_recorded_requests_get_their_answers_and_others_end_it(tmp_path):
    with_three = journal(tmp_path)
    for number in range(3):
        assert with_three.answer(b"request %d" % number) is None
        with_three.add(b"request %d" % number, b"answer %d" % number, 2.0)
    with_three.close()

    again = journal(tmp_path)
    assert again.answer(b"request 0") == b"answer 0" and again.answer(b"request 1") == b"answer 1"
    assert again.continued == 2 and again.earlier_s == 4.0
    assert again.answer(b"another") is None and again.answer(b"request 2") is None  # what came after is void
    again.add(b"another", b"its answer", 1.0)
    again.close()

    third = journal(tmp_path)
    assert [third.answer(each) for each in (b"request 0", b"request 1", b"another", b"request 2")] == [
        b"answer 0", b"answer 1", b"its answer", None,
    ]  # fmt: skip
    third.begin()  # another attempt of the same episode begins at its first turn
    assert third.answer(b"request 0") is None and third.continued == 0
    third.discard()
    assert not third.path.exists()


def test_of_another_policy_nothing_is_taken(tmp_path):
    first = journal(tmp_path)
    first.add(b"request", b"answer", 1.0)
    first.close()
    assert journal(tmp_path, "policy 1").answer(b"request") is None
    assert journal(tmp_path, "policy 0").answer(b"request") is None  # it was begun anew


def test_every_torn_or_damaged_tail_is_dropped(tmp_path):
    first = journal(tmp_path)
    for number in range(3):
        first.add(b"%d" % number, b"answer %d" % number, 1.0)
    first.close()
    whole = first.path.read_bytes()
    bound, frame = len(make_frame(1, b"policy 0")), len(make_frame(2, bytes(40) + b"answer 0"))
    for cut in range(len(whole)):
        for data in (whole[:cut], whole[:cut] + bytes([whole[cut] ^ 1]) + whole[cut + 1 :]):
            first.path.write_bytes(data)
            again = journal(tmp_path)
            intact = max(0, (cut - bound) // frame) if cut >= bound else 0
            assert [again.answer(b"%d" % number) for number in range(intact)] == [
                b"answer %d" % number for number in range(intact)
            ]
            assert again.answer(b"%d" % intact) is None
            again.add(b"new", b"its answer", 1.0)
            again.close()
            third = journal(tmp_path)
            assert [third.answer(b"%d" % number) is not None for number in range(intact)] == [True] * intact
            assert third.answer(b"new") == b"its answer"
            third.close()


class Stops(Exception):
    pass


@pytest.fixture
def config(tmp_path, tiny_model, monkeypatch):
    config = make_config(tmp_path / "run", tmp_path / "tasks", tiny_model)
    config.rollout.concurrency, config.rollout.samples_per_task = 1, 1
    monkeypatch.setattr("megatron_t1.rollout.phase.VllmServer", FakeServer)
    asked = []
    generate = FakeServer.generate

    async def counted(self, request):
        asked.append((await request.json())["token_ids"])
        return await generate(self, request)

    monkeypatch.setattr(FakeServer, "generate", counted)
    config.extra["asked"] = asked
    return config


def interrupted(config, monkeypatch, at_command, *, says=""):
    """Run until the so-manieth command, then again; returns the requests of the second run."""
    asked, commands = config.extra.pop("asked"), []
    first_run = True

    class Sandbox(PassingSandbox):
        async def run(self, command, timeout_s):
            commands.append(command)
            if first_run and len(commands) == at_command:
                raise T1Error("the node is gone")
            await super().run(command, timeout_s)
            return CommandResult(0, "" if first_run else says)

    monkeypatch.setattr("tests.rollout.conftest.PassingSandbox", Sandbox)
    with pytest.raises(T1Error, match="the node is gone"):
        run_rollout(config, 0)
    first_run, before = False, len(asked)
    result = run_rollout(config, 0)
    assert result.metrics["rollout/episodes"] == 3
    return asked[before:], RolloutStore(result_directory(config))


def result_directory(config):
    from megatron_t1.paths import RunPaths

    return RunPaths.of(config.run.dir).rollouts(0)


@pytest.mark.parametrize(("in_flight", "asked_again"), [("restart", 6), ("continue", 4)])
def test_an_episode_in_flight_restarts_or_continues(config, monkeypatch, in_flight, asked_again):
    """Three turns an episode; the second episode ends in its second command, after two answers."""
    config.rollout.in_flight = in_flight
    asked, store = interrupted(config, monkeypatch, 4)
    assert len(asked) == asked_again
    counts = [record.header.counts.get("continued_turns", 0) for record in store]
    assert sorted(counts) == ([0, 0, 0] if in_flight == "restart" else [0, 0, 2])
    assert not (store.directory / FOLDER).exists()
    for record in store:  # what was continued is in the record's own exchange log, as what was asked now is
        reference = record.header.extra["exchange"]
        session = read_exchange(store.directory / reference["log"]).sessions[reference["session"]]
        assert len(session.turns) == record.header.counts["turns"] == 3
        assert (
            np.concatenate([turn.sampled for turn in session.turns]).tolist() == record.ids[record.loss_mask].tolist()
        )


def test_where_a_command_says_something_else_the_engine_is_asked_again(config, monkeypatch):
    config.rollout.in_flight = "continue"
    asked, store = interrupted(config, monkeypatch, 4, says="another")
    assert len(asked) == 5  # the first turn's answer still follows its prompt; the second prompt is another one
    assert sorted(record.header.counts.get("continued_turns", 0) for record in store) == [0, 0, 1]


def test_time_that_the_engine_took_before_counts(config, monkeypatch):
    config.rollout.in_flight = "continue"
    config.env.agent_timeout_s = 50.0
    real = Journal.add
    monkeypatch.setattr(Journal, "add", lambda self, request, body, seconds: real(self, request, body, 30.0))
    _, store = interrupted(config, monkeypatch, 4)
    ends = {record.header.trajectory_id: record.header.end_reason for record in store}
    continued = next(r.header for r in store if r.header.counts.get("continued_turns"))
    assert ends.pop(continued.trajectory_id) == "agent_timeout" and set(ends.values()) == {"submitted"}
    assert continued.timings_s["engine"] >= 60.0


@pytest.mark.parametrize("damage", ["truncated", "a bit turned", "emptied"])
def test_a_damaged_record_of_an_unfinished_phase_is_played_again(config, monkeypatch, capsys, damage):
    class Sandbox(PassingSandbox):
        async def run(self, command, timeout_s):
            if len(config.extra["asked"]) == 8:
                raise T1Error("the node is gone")
            return await super().run(command, timeout_s)

    monkeypatch.setattr("tests.rollout.conftest.PassingSandbox", Sandbox)
    with pytest.raises(T1Error, match="the node is gone"):
        run_rollout(config, 0)
    directory = result_directory(config)
    first, second = sorted(directory.glob("*.safetensors"))
    kept = first.read_bytes()
    data = bytearray(second.read_bytes())
    data[len(data) * 3 // 4] ^= 16
    second.write_bytes({"truncated": data[:-9], "a bit turned": data, "emptied": b""}[damage])
    asked = len(config.extra["asked"])
    assert run_rollout(config, 0).metrics["rollout/episodes"] == 3
    assert len(config.extra["asked"]) == asked + 2 * 3  # the damaged one and the one that was being played
    assert f"the record of {second.stem} is damaged, it is played again" in capsys.readouterr().out
    assert (directory / f"{second.stem}.damaged").exists()
    record = RolloutStore(directory).load(first.stem, verify=True)
    assert record.digest.encode() in kept
