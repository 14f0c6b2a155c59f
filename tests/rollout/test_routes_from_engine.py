"""Recorders that lose rows: what an engine may leave out of its routes is noticed where the answer comes in."""

from __future__ import annotations

import base64
import io
import json
import os

import numpy as np
import pytest

from megatron_t1.config.schema import EngineConfig
from megatron_t1.rollout.engine.completion import Completion
from megatron_t1.rollout.engine.errors import EngineAnswerInvalid
from megatron_t1.rollout.stream import TokenStream
from megatron_t1.trajectory.record import Origin
from megatron_t1.trajectory.routes import decode_routes
from tests.rollout.conftest import SHAPE, answer, completion, routes_for
from tests.rollout.test_engine_command import arguments

PROMPT, SAMPLED = 40, [7, 8, 2]
ROWS = PROMPT + len(SAMPLED) - 1


def parse(routes: np.ndarray, routes_from: int = 0) -> Completion:
    return Completion.from_response(
        answer(SAMPLED, routes=routes),
        prompt_length=PROMPT,
        max_tokens=8,
        routes_from=routes_from,
        route_shape=SHAPE,
        where="test-0, turn 1",
    )


def test_rows_of_the_decoding_worker_alone_are_refused():  # router#184 llm-d-router#1473
    decoded = routes_for(len(SAMPLED) - 1)
    with pytest.raises(EngineAnswerInvalid, match=r"shape \(2, 3, 2\), expected \(42, 3, 2\)") as caught:
        parse(decoded)
    assert caught.value.where == "test-0, turn 1"
    assert parse(np.concatenate([routes_for(PROMPT), decoded])).routes.shape[0] == ROWS


def test_a_span_that_leaves_a_gap_never_enters_a_stream():  # router#184
    stream = TokenStream(SHAPE)
    stream.append(np.arange(PROMPT, dtype=np.int32), Origin.PROMPT)
    late = completion(SAMPLED, PROMPT, routes_from=PROMPT, routes=routes_for(len(SAMPLED) - 1))
    with pytest.raises(ValueError, match="gap|routes"):
        stream.append_sampled(late)
    stream.append_sampled(completion(SAMPLED, PROMPT, routes_from=0, routes=routes_for(ROWS)))
    assert stream.routes_from == ROWS


def encoded(header: dict, data: bytes) -> str:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, header)
    return base64.b64encode(file.getvalue() + data).decode()


@pytest.mark.parametrize(
    "text",
    [
        base64.b64encode(b"PK\x03\x04").decode(),  # an archive, broken
        encoded({"descr": "|u1", "fortran_order": False, "shape": (10**12, 4, 2)}, b"\0" * 8),
        encoded({"descr": "|u1", "fortran_order": False, "shape": (2**62, 4)}, b""),
        encoded({"descr": "|u1", "fortran_order": False, "shape": (2, 2)}, b"\0" * 5),
        encoded({"descr": "|O", "fortran_order": False, "shape": (1,)}, b"\0" * 8),
        base64.b64encode(b"\x93NUMPY\x01\x00\x04\x00((((").decode(),
        base64.b64encode(b"\x93NUMPY\x09\x00\x04\x00{}  ").decode(),
        "",
        "no base64",
    ],
)
def test_what_is_no_array_of_its_size_is_refused_before_it_is_allocated(text):
    with pytest.raises(ValueError):
        decode_routes(text)
    body = json.loads(answer(SAMPLED))
    body["choices"][0]["routed_experts"] = text
    with pytest.raises(EngineAnswerInvalid, match="routed experts"):
        Completion.from_response(
            json.dumps(body).encode(), prompt_length=PROMPT, max_tokens=8, routes_from=0, route_shape=SHAPE, where="x"
        )


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_arrays_of_either_order_and_version_are_read(order, version):
    rows, file = np.asarray(routes_for(5), order=order), io.BytesIO()
    np.lib.format.write_array(file, rows, version)
    assert np.array_equal(decode_routes(base64.b64encode(file.getvalue()).decode()), rows)


@pytest.mark.parametrize("written", [0, 16, ROWS - 1])
def test_rows_beyond_the_recorders_buffer_are_refused(written):  # sglang#26860
    routes = routes_for(ROWS)
    with pytest.raises(EngineAnswerInvalid, match=f"shape \\({written}, 3, 2\\)"):
        parse(routes[:written])
    routes[written:] = 0  # or they come as they were allocated
    with pytest.raises(EngineAnswerInvalid, match=f"row {written}, layer 0: an expert twice"):
        parse(routes)


def test_the_recorders_buffer_holds_the_longest_unchunked_prefill():  # sglang#26860
    command = arguments(EngineConfig(chunked_prefill=False), max_model_len=100_000)
    assert "--max-num-batched-tokens=100000" in command  # rows of vLLM's recorder are made for this many tokens


@pytest.mark.slow
def test_the_engines_store_takes_no_shared_memory_and_fails_closed():  # vllm#32415
    store = pytest.importorskip("vllm.distributed.aux_output_connector.store")
    files = set(os.listdir("/dev/shm"))
    free = os.statvfs("/dev/shm").f_bfree
    large = store.BlockObjectStore(max_bytes=1 << 30, object_nbytes=32 * 48 * 8)  # as mapped at the start, all of it
    assert set(os.listdir("/dev/shm")) <= files and os.statvfs("/dev/shm").f_bfree >= free - 16
    large.close()
    small = store.BlockObjectStore(max_bytes=2, object_nbytes=1)
    for key in "abc":
        small.put([store.BlockObject(key=key, payload=b"1")])
    with pytest.raises(store.BlockObjectStoreError, match="max_bytes"):  # evicted rows are an error, never zeros
        small.get_concatenated(["a", "b", "c"])
