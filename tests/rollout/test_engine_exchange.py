"""The rollout's side of the exchange log, and what the engine may not do to a session."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from megatron_t1.rollout.engine.client import EngineClient
from megatron_t1.rollout.engine.errors import EngineAnswerInvalid
from megatron_t1.rollout.samplers import EngineSampler
from megatron_t1.rollout.stream import TokenStream
from megatron_t1.trajectory.exchange import ExchangeLog
from megatron_t1.trajectory.exchange_reader import read_exchange, rebuild
from megatron_t1.trajectory.record import Origin
from tests.rollout.conftest import SHAPE, FakeServer, answer, completion, contract, routes_for
from tests.rollout.test_completion import parse


def play(tmp_path, chat, tiny_model, names=("a-0", "b-0")):
    """Two episodes of three turns at once through client, sampler and stream; returns the server and the streams."""

    async def main():
        streams = {}
        async with FakeServer(None, tiny_model, "float32", tmp_path / "log", max_model_len=512, routes=True) as server:
            with ExchangeLog(tmp_path) as log:
                async with EngineClient(server.url, route_shape=server.shape) as client:

                    async def episode(name):
                        agreed = replace(contract(), num_experts=16, top_k=4, num_moe_layers=4)
                        sampler = EngineSampler(client, agreed, name=name, exchange=log.session(name, 3))
                        stream = streams[name] = TokenStream(server.shape)
                        conversation = chat.begin(f"do {name}")
                        stream.append(conversation.prompt, Origin.PROMPT)
                        for _ in range(3):
                            sampled = await sampler.next_turn(stream, 64)
                            for span in conversation.reply("ok", sampled):
                                stream.append(span.ids, span.origin)

                    await asyncio.gather(*map(episode, names))
            return server, streams, log.path

    return asyncio.run(main())


def test_client_and_stream_agree_without_knowing_each_other(tmp_path, chat, tiny_model):
    server, streams, path = play(tmp_path, chat, tiny_model)
    log = read_exchange(path)
    assert log.sealed and len(log.sessions) == 2
    for session in log.sessions.values():
        exchanged, stream = rebuild(session), streams[session.trajectory]
        assert session.policy == 3 and exchanged.problems == [] and len(exchanged.turns) == 3
        assert (stream.ids[: len(exchanged.ids)] == exchanged.ids).all()
        assert len(stream) > len(exchanged.ids) and exchanged.sampled.sum() == stream.sampled_tokens
        assert [turn.routes_start for turn in session.turns][0] == 0
        ends = [turn.routes_start + turn.routes_rows for turn in session.turns]
        assert [turn.routes_start for turn in session.turns][1:] == ends[:-1]  # fetched from the first new position on
        assert all(turn.state["stop_ids"] == [2] and len(turn.response_sha256) == 64 for turn in session.turns)


def test_every_request_of_an_episode_names_the_same_session(tmp_path, chat, tiny_model):
    server, _, path = play(tmp_path, chat, tiny_model)
    assert Counter(server.sessions) == {f"{path.name}/0": 3, f"{path.name}/1": 3}


def test_a_turn_of_two_weights_is_refused():  # prime-rl#1563
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    with pytest.raises(EngineAnswerInvalid, match="several weights: 3, 4"):
        parse(answer([7, 2], weight_versions=spans))
    assert parse(answer([7, 2], weight_versions=spans[:1])).weights == "3"
    assert parse(answer([7, 2])).weights == ""


class Recomputing:
    """An engine that returns all rows again with every turn, once with another expert in one of them."""

    def __init__(self):
        self.rows = np.empty((0, SHAPE.num_moe_layers, SHAPE.top_k), np.uint8)

    async def generate(self, ids, **_):
        rows = np.concatenate([self.rows, routes_for(len(ids) + 1 - len(self.rows), seed=len(ids))])
        if len(self.rows):
            rows[1, 0] = (rows[1, 0] + 1) % SHAPE.num_experts
        self.rows = rows
        return completion([7, 2], len(ids), routes_from=0, routes=rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_experts_on_an_overlap_are_an_error_in_float32_and_counted_in_bfloat16(dtype):  # NeMo-RL#3485
    stream, sampler = TokenStream(SHAPE), EngineSampler(Recomputing(), contract(engine_dtype=dtype), name="demo-0")
    stream.append(np.array([1, 2, 3], np.int32), Origin.PROMPT)

    async def turns():
        await sampler.next_turn(stream, 8)
        stream.append(np.array([4], np.int32), Origin.ENVIRONMENT)
        await sampler.next_turn(stream, 8)

    if dtype == "bfloat16":
        asyncio.run(turns())
        assert (stream.route_overlap, stream.route_differences) == (4, 1)
        return
    with pytest.raises(EngineAnswerInvalid, match="other experts when it computed 1 tokens again") as caught:
        asyncio.run(turns())
    assert caught.value.where == "demo-0, turn 1" and "stale prefix cache" in caught.value.remedy
