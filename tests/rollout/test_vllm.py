"""The real engine: what it returns against a transformers forward, and that it never outlives its owner."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import numpy as np
import psutil
import pytest

from megatron_t1.config.schema import Config, EngineConfig, GenerateConfig
from megatron_t1.errors import MismatchError, T1Error
from megatron_t1.rollout.engine.client import EngineClient
from megatron_t1.rollout.engine.completion import EngineRoutes
from megatron_t1.rollout.engine.errors import EngineLost
from megatron_t1.rollout.engine.server import VllmServer
from megatron_t1.rollout.phase import run_evaluation, run_phases, run_rollout
from megatron_t1.trajectory.record import Origin
from megatron_t1.trajectory.store import RolloutStore

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow
SHAPE = EngineRoutes(num_moe_layers=4, top_k=4, num_experts=16)
MARK = "T1_TEST_MARK"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    from megatron_t1.environment.generate.sets import generate_sets

    out = tmp_path_factory.mktemp("tasks")
    options = GenerateConfig(train=8, held_out=4, pool="small", workers=4)
    asyncio.run(generate_sets(options, 0, out, quiet=True))
    return out


@pytest.fixture
def config(tasks, tiny_model, tmp_path):
    config = Config()
    config.run.dir = str(tmp_path / "run")
    config.model.path = str(tiny_model)
    config.env.tasks, config.eval.tasks = str(tasks / "train"), str(tasks / "held_out")
    config.rollout.tasks_per_iteration, config.rollout.samples_per_task = 8, 1
    config.rollout.engine.omp_threads = 1
    config.eval.attempts = 1
    return config


def engine_processes(mark: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
            if process.environ().get(MARK) == mark and "api_server" in command and "supervisor.py" not in command:
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def wait_until(condition, timeout_s: float = 60.0):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError("waited in vain")


def reference(model_dir: Path, ids: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Log-probability of each token after the first, and expert sets as bool [T, L, E], of a transformers forward."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        output = model(torch.tensor(ids[None].astype(np.int64)), output_router_logits=True)
    logprobs = torch.log_softmax(output.logits[0].double() / temperature, dim=-1)
    picked = logprobs[:-1].gather(1, torch.tensor(ids[1:, None].astype(np.int64)))[:, 0]
    sets = torch.stack([torch.zeros_like(x).scatter(1, x.topk(SHAPE.top_k).indices, 1) for x in output.router_logits])
    return picked.numpy(), sets.permute(1, 0, 2).bool().numpy()


def test_the_gate_computes_in_the_engines_type(tiny_model, tmp_path):  # prime-rl#2952 Automodel#3650
    """What contracts state of the sampler's routers, found in a loaded model."""

    async def started() -> str:
        engine = EngineConfig(omp_threads=1)
        server = VllmServer(engine, tiny_model, "bfloat16", tmp_path / "engine.log", max_model_len=64, routes=True)
        async with server:
            return server.router_dtype

    assert asyncio.run(started()) == "bfloat16"


def test_rollout_and_evaluation_on_one_engine_match_transformers(config, tiny_model):
    config.rollout.temperature = 0.8
    results = run_phases(config, 0, ("rollout", "evaluation"))
    records = list(RolloutStore(Path(config.run.dir) / "rollouts/iter_0000"))
    assert len(records) == 8 and any(record.header.counts["turns"] > 1 for record in records)
    differences = []
    for record in records:
        logprobs, sets = reference(tiny_model, record.ids, 0.8)
        sampled = np.flatnonzero(record.origin == Origin.SAMPLED)
        differences.append(np.abs(record.logprobs[sampled] - logprobs[sampled - 1]))
        taken = np.zeros_like(sets)
        np.put_along_axis(taken, record.routes.astype(np.int64), True, axis=2)
        assert record.routed[:-1].all() and not record.routed[-1]
        assert (taken[:-1] == sets[:-1]).all()
        assert record.header.counts["route_differences"] == 0
        assert record.header.contract.logprobs_mode == "processed" and record.header.contract.temperature == 0.8
        assert record.header.contract.router_dtype == "float32"  # which the audit compares with what was found
    differences = np.concatenate(differences)
    assert differences.mean() < 2e-6 and differences.max() < 2e-5

    rollout, evaluation = results["rollout"], results["evaluation"]
    assert rollout.metrics["rollout/episodes"] == 8 and evaluation.metrics["evaluation/episodes"] == 4
    assert (Path(config.run.dir) / "evaluations/iter_0000/summary.json").is_file()
    evaluated = list(RolloutStore(Path(config.run.dir) / "evaluations/iter_0000"))
    assert all(record.routes is None for record in evaluated)

    again = run_rollout(config, 0)  # everything is there: no engine is started
    assert "engine_start" not in again.timings_s
    assert [file.sha256 for file in again.outputs] == [file.sha256 for file in rollout.outputs]
    config.rollout.temperature = 1.0
    with pytest.raises(MismatchError, match="temperature"):
        run_rollout(config, 0)


def test_kill_of_the_engine_is_one_error_and_the_phase_goes_on(config, monkeypatch):  # vllm#55510
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    config.rollout.samples_per_task, config.rollout.concurrency = 12, 2
    directory = Path(config.run.dir) / "rollouts/iter_0001"

    def kill_after_three() -> None:
        wait_until(lambda: len(list(directory.glob("*.safetensors"))) >= 3, 120)
        os.kill(engine_processes(mark)[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_after_three, daemon=True)
    killer.start()
    with pytest.raises(EngineLost, match="ended with status 137") as caught:
        run_rollout(config, 1)
    assert "engine.0.log" in caught.value.where
    killer.join(10)
    wait_until(lambda: not engine_processes(mark), 10)
    finished = {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}
    assert 3 <= len(finished) < 96
    result = run_rollout(config, 1)
    assert result.metrics["rollout/episodes"] == 96
    store = RolloutStore(directory)
    for name, before in finished.items():  # kept, not played again
        kept = store.load(name.removesuffix(".safetensors"))
        assert kept.ids.tobytes() in before
    assert not engine_processes(mark)


def test_seeds_reproduce_a_rollout(config, tasks):
    config.rollout.seeded, config.rollout.engine.chunked_prefill = True, False
    played = []
    for directory, concurrency in (("first", 32), ("again", 1)):
        config.run.dir, config.rollout.concurrency = f"{config.run.dir}-{directory}", concurrency
        run_evaluation(config, 0)
        records = RolloutStore(Path(config.run.dir) / "evaluations/iter_0000")
        played.append({record.header.trajectory_id: record.ids.tolist() for record in records})
    assert len(played[0]) == 4 and played[0] == played[1]


DRIVER = """
import asyncio, sys
from megatron_t1.config.schema import EngineConfig
from megatron_t1.errors import T1Error
from megatron_t1.rollout.engine.server import VllmServer
from megatron_t1.rollout.signals import run_until_signal
async def main():
    async with VllmServer(EngineConfig(), sys.argv[1], "float32", sys.argv[2], max_model_len=256, routes=True):
        await asyncio.sleep(600)
try:
    run_until_signal(main())
except T1Error as error:
    print(error)
    sys.exit(1)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_engine_never_outlives_its_driver(tiny_model, tmp_path, number):  # AReaL#622, vllm#55846
    mark = uuid.uuid4().hex
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tiny_model), str(tmp_path / "engine.log")],
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        engine = wait_until(lambda: engine_processes(mark), 30)
        if number == signal.SIGKILL:  # late: when the engine has children of its own
            wait_until(lambda: "/inference/v1/generate" in (tmp_path / "engine.log").read_text(), 180)
        driver.send_signal(number)
        output = driver.communicate(timeout=15)[0]
    finally:
        driver.kill()
    if number == signal.SIGTERM:
        assert driver.returncode == 1 and "stopped by SIGTERM" in output
    wait_until(lambda: not any(is_running(pid) for pid in [*engine, *engine_processes(mark)]), 15)


def test_killing_the_supervisor_ends_the_engine(tiny_model, tmp_path, monkeypatch):
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)

    async def main():
        server = VllmServer(EngineConfig(), tiny_model, "float32", tmp_path / "log", max_model_len=256, routes=True)
        async with server:
            async with EngineClient(server.url, route_shape=SHAPE, check_alive=server.check_alive) as client:
                prompt = np.array([7, 8, 9], np.int32)
                options = dict(temperature=1.0, top_p=1.0, stop_ids=[2], max_tokens=4)
                assert 1 <= len(await client.generate(prompt, **options, routes_from=0)) <= 4
                with pytest.raises(T1Error, match="400") as refused:  # longer than the context
                    await client.generate(np.arange(300, dtype=np.int32), **options, where="demo-0, turn 0")
                assert refused.value.where == "demo-0, turn 0"
                os.kill(server.pid, signal.SIGKILL)
                with pytest.raises(EngineLost):
                    while True:
                        await client.generate(prompt, **options)

    asyncio.run(main())
    wait_until(lambda: not engine_processes(mark), 10)


def start(config: EngineConfig, model_dir, log: Path) -> None:
    async def main():
        async with VllmServer(config, model_dir, "float32", log, max_model_len=256, routes=False):
            pass

    asyncio.run(main())


def test_an_engine_that_dies_while_starting_shows_its_last_words(tiny_model, tmp_path):
    with pytest.raises(EngineLost, match="while starting") as caught:
        start(EngineConfig(extra_args=["--no-such-option"]), tiny_model, tmp_path / "log")
    assert "--no-such-option" in str(caught.value) and str(tmp_path / "log") in str(caught.value)


def test_a_port_in_use_and_a_missing_model_are_named(tiny_model, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EngineLost, match=f"port {port} is in use"):
            start(EngineConfig(port=port), tiny_model, tmp_path / "log")
    with pytest.raises(EngineLost, match="no config.json"):
        start(EngineConfig(), tmp_path, tmp_path / "log")
