"""The engine's command line, environment and client errors, without an engine."""

import asyncio
import contextlib
import json

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from megatron_t1.config.schema import EngineConfig
from megatron_t1.errors import T1Error
from megatron_t1.rollout.engine import command
from megatron_t1.rollout.engine.client import EngineClient
from megatron_t1.rollout.engine.command import EngineBuild, serve_command, serve_environment
from megatron_t1.rollout.engine.errors import EngineAnswerInvalid, EngineLost, EngineRequestFailed
from megatron_t1.rollout.engine.server import _serves
from megatron_t1.rollout.journal import Journal
from megatron_t1.rollout.policy import Policy, route_shape_of
from tests.rollout.conftest import answer

CPU, GPU = EngineBuild("vllm-cpu", "0.32.0"), EngineBuild("vllm", "0.32.0")


def arguments(config, build=CPU, **changes):
    options = dict(model_dir="m", served_name="p", dtype="float32", port=1, max_model_len=512, routes=True, seed=0)
    return serve_command(config, build, **{**options, **changes})


def test_flags_follow_the_configuration():
    assert "--enable-return-routed-experts" in arguments(EngineConfig())
    assert "--enable-return-routed-experts" not in arguments(EngineConfig(), routes=False)
    assert "--logprobs-mode=processed_logprobs" in arguments(EngineConfig())  # vllm#42259: never left to a default
    assert "--generation-config=vllm" in arguments(EngineConfig())
    unchunked = arguments(EngineConfig(chunked_prefill=False))
    assert "--no-enable-chunked-prefill" in unchunked and "--max-num-batched-tokens=8192" in unchunked
    gpu = arguments(EngineConfig(tensor_parallel=8, enforce_eager=False, extra_args=["--x=1"]), GPU)
    assert "--tensor-parallel-size=8" in gpu and "--enforce-eager" not in gpu and gpu[-1] == "--x=1"


def test_environment_is_a_known_part_of_ours(monkeypatch):
    monkeypatch.setenv("SOME_SECRET_TOKEN", "s")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # the CPU backend sets it for its own process
    cpu = serve_environment(EngineConfig(omp_threads=3), CPU, routes=True)
    assert "SOME_SECRET_TOKEN" not in cpu and cpu["HF_HUB_OFFLINE"] == "1" and cpu["OMP_NUM_THREADS"] == "3"
    assert cpu["TORCHDYNAMO_DISABLE"] == "1" and "VLLM_USE_V2_MODEL_RUNNER" not in cpu
    assert cpu["VLLM_PLUGINS"] == "other,megatron_t1_cpu"
    gpu = serve_environment(EngineConfig(), GPU, routes=True)
    assert gpu["VLLM_USE_V2_MODEL_RUNNER"] == "1" and "TORCHDYNAMO_DISABLE" not in gpu


def test_cpu_builds_are_recognised():
    assert EngineBuild("vllm", "0.32.0+cpu").is_cpu and CPU.is_cpu and not GPU.is_cpu


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(command.importlib.metadata, "entry_points", lambda group: [])
    with pytest.raises(T1Error, match="not installed"):
        command.require_plugin()


def test_missing_requirements_of_the_plugin_are_listed(monkeypatch):
    vllm = pytest.importorskip("vllm")
    from megatron_t1.rollout import vllm_cpu

    assert vllm_cpu.missing_requirements() == []
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    assert vllm_cpu.missing_requirements() == ["version 0.99.1, checked against 0.32"]
    monkeypatch.undo()
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    monkeypatch.delattr(CPUModelRunner, "initialize_kv_cache")
    monkeypatch.delattr("vllm.v1.worker.gpu_model_runner.GPUModelRunner.initialize_kv_cache")
    assert vllm_cpu.missing_requirements() == ["CPUModelRunner.initialize_kv_cache is gone"]


@pytest.mark.parametrize(
    "raw, expected",
    [
        ({}, None),
        ({"num_experts": 16, "num_experts_per_tok": 4}, (4, 4, 16, ())),
        ({"num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0]}, (3, 2, 8, (1, 2, 3))),
        ({"num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 2}, (2, 2, 8, (1, 3))),
        ({"text_config": {"num_hidden_layers": 2, "num_experts": 512, "num_experts_per_tok": 8}}, (2, 8, 512, ())),
    ],
)
def test_moe_layers_of_a_checkpoint(raw, expected):
    shape = route_shape_of({"num_hidden_layers": 4, **raw})
    found = shape and (shape.num_moe_layers, shape.top_k, shape.num_experts, shape.columns)
    assert found == expected


@pytest.mark.parametrize(
    "status, body, lost, error",
    [
        (400, b"too long", False, EngineAnswerInvalid),
        (500, b"broken", False, EngineRequestFailed),
        (500, b"broken", True, EngineLost),
        (404, b"the model is not served here", True, EngineLost),  # by whoever took the port
        (200, b"{}", False, EngineAnswerInvalid),
        (None, b"", False, EngineRequestFailed),
        (None, b"", True, EngineLost),
    ],
)
def test_every_kind_of_failure_has_its_error(status, body, lost, error):
    async def handle(request):
        if status is None:
            await asyncio.sleep(30)
        return web.Response(status=status, body=body)

    async def check_alive():
        if lost:
            raise EngineLost("the engine ended with status 137")

    async def main():
        app = web.Application()
        app.router.add_post("/inference/v1/generate", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        try:
            async with EngineClient(url, request_timeout_s=0.5, check_alive=check_alive) as client:
                with pytest.raises(error) as caught:
                    await client.generate(
                        np.array([1], np.int32), max_tokens=4, temperature=1, top_p=1, stop_ids=[2], where="demo-0"
                    )
                assert lost or caught.value.where == "demo-0"
        finally:
            await runner.cleanup()

    asyncio.run(main())


def test_answers_come_back_whole():
    async def handle(request):
        asked = await request.json()
        assert asked["sampling_params"]["stop_token_ids"] == [2] and asked["stream"] is False
        return web.Response(body=answer([7, 2]))

    async def main():
        app = web.Application()
        app.router.add_post("/inference/v1/generate", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        async with EngineClient(url) as client:
            options = dict(max_tokens=4, temperature=1.0, top_p=1.0, stop_ids=[2])
            made = await client.generate(np.array([1], np.int32), **options)
            assert made.ids.tolist() == [7, 2] and made.routes is None
            with pytest.raises(ValueError, match="records none"):
                await client.generate(np.array([1], np.int32), **options, routes_from=0)
        await runner.cleanup()

    asyncio.run(main())


@contextlib.asynccontextmanager
async def served(routes):
    """The address of a server: path -> what it answers."""
    app = web.Application()
    for path, body in routes.items():
        app.router.add_route("*", path, lambda request, body=body: body(request))
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


def test_an_engine_that_took_the_port_of_a_dead_one_is_not_listened_to(tmp_path):
    """It refuses a model that it doesn't serve; what a journal holds is found again after an engine of another name."""
    asked = []

    async def generate(request):
        asked.append(await request.json())
        known = asked[-1]["model"] == "policy-1"
        return web.Response(body=answer([7, 2])) if known else web.Response(status=404, text="no such model")

    async def lost():
        raise EngineLost("the engine ended with status 137")

    async def main():
        options = dict(max_tokens=4, temperature=1.0, top_p=1.0, stop_ids=[2])
        journal = Journal(tmp_path, "demo-0", "policy 1")
        async with served({"/inference/v1/generate": generate}) as url:
            async with EngineClient(url, model="policy-0", check_alive=lost) as client:
                with pytest.raises(EngineLost):
                    await client.generate(np.array([1], np.int32), **options)
            async with EngineClient(url, model="policy-1") as client:
                journal.begin()
                await client.generate(np.array([1], np.int32), **options, journal=journal)
                journal.close()
        journal = Journal(tmp_path, "demo-0", "policy 1")
        journal.begin()
        async with EngineClient("http://127.0.0.1:9", model="policy-2") as client:
            await client.generate(np.array([1], np.int32), **options, journal=journal)
        assert journal.continued == 1 and [request["token_ids"] for request in asked] == [[1], [1]]

    asyncio.run(main())


@pytest.mark.parametrize("models", [None, 7, [], {}, {"data": None}, {"data": 3}, {"data": [None]}, {"data": [{}]}])
def test_a_stranger_on_the_port_is_not_ours(models):
    async def main():
        async def healthy(request):
            return web.Response()

        async def list_models(request):
            return web.json_response(models)

        async with served({"/health": healthy, "/v1/models": list_models}) as url:
            async with aiohttp.ClientSession() as session:
                assert not await _serves(session, url, "policy-0")

    asyncio.run(main())


def test_a_vision_language_models_numbers_are_those_of_its_language_model(tmp_path):
    from megatron_t1.config.schema import Config

    text = {"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 4, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text, "vision_config": {}}))
    config = Config()
    config.model.path, config.run.dir, config.rollout.max_context = str(tmp_path), str(tmp_path / "run"), 64
    policy = Policy.of(config, 0)
    assert policy.max_positions == 64 and policy.route_shape.num_experts == 8
    config.rollout.max_context = 65
    with pytest.raises(T1Error, match="the model has 64 positions"):
        Policy.of(config, 0)


def test_a_dead_engine_is_told_without_its_traceback(tmp_path):
    from megatron_t1.rollout.engine.server import VllmServer

    log = tmp_path / "engine.log"
    prefix = "(APIServer pid=1) ERROR 11-30 18:41:27 [async_llm.py:906] "
    log.write_text(
        "INFO loading weights\n(EngineCore) INFO [x.py:1] Route: /v1/models\n"
        f'{prefix}Traceback (most recent call last):\n{prefix}  File "async_llm.py", line 849, in output_handler\n'
        f"{prefix}    outputs = await engine_core.get_output_async()\n{prefix}              ^^^^^\n"
        f"{prefix}EngineDeadError: EngineCore encountered an issue.\n"
        'Traceback (most recent call last):\n  File "a.py", line 1\nMemoryError: no room\n'
    )
    server = VllmServer(EngineConfig(), tmp_path, "float32", log, max_model_len=8, routes=False)
    said = str(server._lost("the engine ended with status 137"))
    assert "loading weights" in said and "EngineDeadError: EngineCore" in said and "MemoryError: no room" in said
    assert not any(word in said for word in ("Traceback", "File", "output_handler", "^^^", "Route:"))
