"""What the engine answers is checked before anything is kept of it."""

import json

import numpy as np
import pytest

from megatron_t1.rollout.engine.completion import Completion, EngineRoutes
from megatron_t1.rollout.engine.errors import EngineAnswerInvalid, EngineRequestFailed
from tests.rollout.conftest import SHAPE, answer, completion, routes_for


def parse(body, *, prompt_length=4, max_tokens=8, routes_from=None, shape=SHAPE, stop_ids=()):
    return Completion.from_response(
        body,
        prompt_length=prompt_length,
        max_tokens=max_tokens,
        stop_ids=stop_ids,
        routes_from=routes_from,
        route_shape=shape,
        where="test-0, turn 1",
    )


def test_good_answer():
    routes = routes_for(4 + 3 - 1 - 2)
    made = parse(answer([7, 8, 2], routes=routes), routes_from=2)
    assert made.ids.tolist() == [7, 8, 2] and made.ids.dtype == np.int32
    assert made.logprobs.dtype == np.float32 and np.allclose(made.logprobs, [-0.5, -0.51, -0.52])
    assert made.routes.dtype == np.uint8 and (made.routes == routes).all()
    assert (made.routes_start, made.prompt_length, made.finish_reason) == (2, 4, "stop")


def test_only_the_engine_makes_sampled_tokens():  # trl#5224
    with pytest.raises(TypeError, match="engine client only"):
        Completion(np.array([1], np.int32))
    made = completion([1, 2], 3)
    with pytest.raises(AttributeError):
        made.ids = np.array([9], np.int32)
    with pytest.raises(ValueError):
        made.ids[0] = 9


@pytest.mark.parametrize(
    "body, message",
    [
        (b"not json", "JSONDecodeError"),
        (b'{"choices": []}', "ValueError"),
        (b"[]", "TypeError"),
        (answer([], logprobs=[]), "0 sampled tokens"),
        (answer(range(9)), "9 sampled tokens"),
        (answer([5], token_ids=[-1]), "not a list of token ids"),
        (answer([5], token_ids=[True]), "not a list of token ids"),
        (answer([5, 6], token_ids=[5]), "don't belong"),
        (answer([5, 6], token_ids=[5, 7]), "don't belong"),
        (answer([5], logprobs=[None]), "log-probabilit"),
        (answer([5], logprobs=[float("nan")]), "log-probability nan"),
        (answer([5], logprobs=[-9999.0]), "log-probability -9999"),
        (answer([5], logprobs=[0.5]), "log-probability 0.5"),
        (answer([5], logprobs=["-0.5"]), "log-probabilities that are no numbers"),
        (answer([5], logprobs=[-(10**400)]), "log-probabilities that are no numbers"),
        (answer([5], logprobs=[-1e60]), "log-probability -inf"),
        (b"[" * 100_000, "RecursionError"),
        (answer([5]).replace(b'tokens": 0', b'tokens": "x"'), "cached_tokens is 'x'"),
        (answer([5]).replace(b'tokens": 0', b'tokens": -1'), "cached_tokens is '-1'"),
        (answer([5]).replace(b'tokens": 0', b'tokens": 1e99'), "expected a number of tokens"),
        (answer([5], reason="length"), "ended by length after 1 of 8"),
    ],
)
def test_bad_answers_are_refused(body, message):
    with pytest.raises(EngineAnswerInvalid, match=message) as caught:
        parse(body)
    assert caught.value.where == "test-0, turn 1"


@pytest.mark.parametrize(
    "body, message",
    [
        (answer([5, 2, 6]), "tokens after the stop id 2, which is sampled token 1 of 3"),
        (answer([2, 3]), "tokens after the stop id 2"),
        (answer([2] + [5] * 7, reason="length"), "tokens after the stop id 2"),
        (answer([5, 6]), "stopped after token 6, which is none of the stop ids"),
    ],
)
def test_a_turn_ends_with_its_first_stop_id_and_nothing_else_stops_it(body, message):
    with pytest.raises(EngineAnswerInvalid, match=message):
        parse(body, stop_ids=(2, 3))


def test_a_turn_that_ends_as_it_must_is_taken():
    assert len(parse(answer([5, 3]), stop_ids=(2, 3))) == 2
    assert len(parse(answer([5] * 8, reason="length"), stop_ids=(2, 3))) == 8


def test_abort_is_a_failed_request():
    with pytest.raises(EngineRequestFailed, match="abort"):
        parse(answer([5], reason="abort"))


@pytest.mark.parametrize(
    "routes, message",
    [
        (None, "no routed experts"),
        (routes_for(7), r"shape \(7, 3, 2\), expected \(6, 3, 2\)"),  # vllm#28284: rows are one fewer than tokens
        (np.zeros((6, 3, 2), np.uint8), "an expert twice"),  # vllm-ascend#15451: rows never written
        (routes_for(6) + 8, "of 8"),
        (routes_for(6).astype(np.float32), "type float32"),
    ],
)
def test_bad_routes_are_refused(routes, message):
    with pytest.raises(EngineAnswerInvalid, match=message):
        parse(answer([7, 8, 2], routes=routes), routes_from=0)


def test_garbage_instead_of_routes_is_refused_without_unpickling():
    body = json.loads(answer([7, 8, 2]))
    for garbage in ("!!", "gASVAAAA", 7):
        body["choices"][0]["routed_experts"] = garbage
        with pytest.raises(EngineAnswerInvalid, match="routed experts"):
            parse(json.dumps(body).encode(), routes_from=0)


def test_dense_layers_are_left_out():
    shape = EngineRoutes(num_moe_layers=2, top_k=2, num_experts=8, num_layers=3, columns=(1, 2))
    routes = routes_for(6)
    routes[:, 0] = 0  # the engine never writes the rows of a dense layer
    made = parse(answer([7, 8, 2], routes=routes), routes_from=0, shape=shape)
    assert (made.routes == routes[:, 1:]).all()


def test_more_than_256_experts_need_two_bytes():
    shape = EngineRoutes(num_moe_layers=1, top_k=2, num_experts=300)
    routes = np.array([[[299, 0]]] * 6, dtype=np.uint16)
    made = parse(answer([7, 8, 2], routes=routes), routes_from=0, shape=shape)
    assert made.routes.dtype == np.uint16 and int(made.routes.max()) == 299
