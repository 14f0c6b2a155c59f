"""Fakes at the two outer seams: what the engine answers (raw bytes of its protocol) and what a sandbox says."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest
from aiohttp import web

from megatron_t1.config.schema import ModelConfig
from megatron_t1.environment.sandbox.interface import CommandResult, SandboxLost, VerifierRun
from megatron_t1.environment.task import Task, TaskContent
from megatron_t1.model.initial import create_initial_model
from megatron_t1.rollout.engine.completion import Completion, EngineRoutes
from megatron_t1.trajectory.contract import SamplingContract

SHAPE = EngineRoutes(num_moe_layers=3, top_k=2, num_experts=8)
CORPUS = [
    f"{verb} the file {name}.{end} in {place} with {word}"
    for verb in ("create", "copy", "rename")
    for name in ("alpha", "beta", "gamma", "notes")
    for end in ("txt", "md")
    for place in ("docs", "src")
    for word in ("red", "blue", "green")
] + ["echo red > docs/alpha.txt", "cat notes.md", "ok", "error 1", "done"] * 3


def routes_for(rows: int, shape: EngineRoutes = SHAPE, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    picked = random.random((rows, shape.num_moe_layers, shape.num_experts)).argsort(axis=2)[:, :, : shape.top_k]
    return picked.astype(shape.dtype)


def answer(ids, *, logprobs=None, reason="stop", routes=None, **changes) -> bytes:
    """Body of an answer of /inference/v1/generate."""
    ids = [int(token) for token in ids]
    logprobs = [-0.5 - 0.01 * position for position in range(len(ids))] if logprobs is None else logprobs
    encoded = None
    if routes is not None:
        buffer = io.BytesIO()
        np.save(buffer, routes)
        encoded = base64.b64encode(buffer.getvalue()).decode()
    choice = {
        "index": 0,
        "finish_reason": reason,
        "token_ids": ids,
        "logprobs": {"content": [{"token_id": t, "logprob": p} for t, p in zip(ids, logprobs, strict=True)]},
        "routed_experts": encoded,
        **changes,
    }
    return json.dumps({"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": 0}}}).encode()


def completion(ids, prompt_length: int, *, routes_from=None, routes=None, reason="stop", logprobs=None) -> Completion:
    if routes_from is not None and routes is None:
        routes = routes_for(prompt_length + len(ids) - 1 - routes_from, seed=prompt_length)
    return Completion.from_response(
        answer(ids, routes=routes, reason=reason, logprobs=logprobs),
        prompt_length=prompt_length,
        max_tokens=len(ids),
        routes_from=routes_from,
        route_shape=SHAPE if routes_from is not None else None,
        where="test",
    )


def contract(**changes) -> SamplingContract:
    values = dict(
        temperature=1.0,
        top_p=1.0,
        logprobs_mode="processed",
        stop_ids=(2,),
        tokenizer_sha256="0" * 64,
        chat_format="chatml_bash",
        engine="test 0",
        engine_dtype="float32",
        model_dtype="float32",
        num_experts=8,
        top_k=2,
        num_moe_layers=3,
    )
    return SamplingContract(**{**values, **changes})


class FakeSampler:
    """Answers with prepared turns (lists of ids, or exceptions) in the engine's own protocol."""

    def __init__(self, turns, routes: bool = False):
        self.turns, self.routes = list(turns), routes
        self.contract, self.cached_tokens, self.rooms = contract(), 0, []
        self.continued_turns, self.earlier_s = 0, 0.0

    async def next_turn(self, stream, max_tokens):
        self.rooms.append(max_tokens)
        turn = self.turns.pop(0)
        if isinstance(turn, BaseException):
            raise turn
        if callable(turn):
            turn = await turn()
        ids = list(turn)[:max_tokens]
        made = completion(
            ids,
            len(stream),
            routes_from=stream.routes_from if self.routes else None,
            reason="stop" if len(ids) == len(turn) else "length",
        )
        stream.append_sampled(made)
        return made.ids


class FakeSandbox:
    """Remembers commands; `results` maps a command to a result or an exception."""

    def __init__(self, results=None, lost_starts: int = 0):
        self.results, self.lost_starts = results or {}, lost_starts
        self.commands, self.starts, self.stops = [], 0, 0

    async def start(self, task):
        self.starts += 1
        if self.starts <= self.lost_starts:
            raise SandboxLost("the sandbox is gone")

    async def run(self, command, timeout_s):
        self.commands.append(command)
        result = self.results.get(command, CommandResult(0, ""))
        if isinstance(result, BaseException):
            raise result
        return result

    async def stop(self):
        self.stops += 1

    def guarantees(self):
        return {"network": "none"}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A start model with weights large enough that routes and log-probs vary."""
    config = ModelConfig()
    config.architecture.initializer_range = 0.08
    return create_initial_model(tmp_path_factory.mktemp("models") / "tiny", config, 0, CORPUS)


@pytest.fixture(scope="session")
def chat(tiny_model):
    from megatron_t1.rollout.formats import load_format

    return load_format("chatml_bash", tiny_model)


@pytest.fixture
def task():
    return Task(name="demo", instruction="create the file alpha.txt", content=TaskContent(), baseline=1)


class PassingSandbox(FakeSandbox):
    """For env.sandbox._target_: the verifier counts the commands that were run, of two checks."""

    def __init__(self, config, scratch_dir, output_limit):
        super().__init__()

    async def start(self, task):
        self.commands = []

    async def run_verifier(self, task, timeout_s, names):
        report = {"results": {"tests": [
            {"name": "ran", "status": "passed" if self.commands else "failed"},
            {"name": "ran_twice", "status": "passed" if len(self.commands) > 1 else "failed"},
        ]}}  # fmt: skip
        return VerifierRun(0, "", False, {"ctrf.json": json.dumps(report).encode()})


class FakeServer:
    """Stands where the phase starts vLLM: answers its token endpoint with a scripted policy and its routes."""

    started = 0
    refuse_after: int | None = None  # requests until it answers 500

    def __init__(self, config, model_dir, dtype, log_path, *, max_model_len, routes, seed=0):
        from megatron_t1.rollout.formats import load_format

        chat = load_format("chatml_bash", model_dir)
        self.turns = [chat.command("echo red > docs/alpha.txt"), chat.command("cat notes.md"), chat.submission()]
        self.routes, self.start_s, self.requests, self.sessions, self.url = routes, 0.0, [], [], ""
        self.shape = EngineRoutes(num_moe_layers=4, top_k=4, num_experts=16)
        self.router_dtype, self.served_name = "float32", "policy-fake"

    async def __aenter__(self):
        type(self).started += 1
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/inference/v1/generate", self.generate)
        self.runner = web.AppRunner(app, handler_cancellation=True)  # a request that nobody waits for ends
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        await self.runner.cleanup()

    async def check_alive(self):
        return None

    async def generate(self, request):
        asked = await request.json()
        self.requests.append(asked)
        self.sessions.append(request.headers.get("X-Session-ID", ""))
        if self.refuse_after is not None and len(self.requests) > self.refuse_after:
            return web.Response(status=500, text="out of order")
        prompt, sampling = asked["token_ids"], asked["sampling_params"]
        starts = sum(1 for token in prompt if token == 1) // 2  # <|im_start|> comes twice for each turn before
        turn = self.turns[starts - 1]
        rows = len(prompt) + len(turn) - 1 - sampling.get("routed_experts_prompt_start", 0)
        routes = routes_for(rows, self.shape, seed=len(prompt)) if self.routes else None
        return web.Response(body=answer(turn, routes=routes), content_type="application/json")


@pytest.fixture
def fake_engine(monkeypatch):
    """The phase with `FakeServer` in the place of vLLM; returns the class."""
    monkeypatch.setattr("megatron_t1.rollout.phase.VllmServer", FakeServer)
    monkeypatch.setattr(FakeServer, "started", 0)
    return FakeServer
