"""A vLLM server that belongs to this process: started, watched, and gone when it is stopped or when we are."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import socket
import sys
import time
from pathlib import Path

import aiohttp

from megatron_t1.config.schema import EngineConfig
from megatron_t1.rollout.engine import observed, supervisor
from megatron_t1.rollout.engine.command import installed_build, require_plugin, serve_command, serve_environment
from megatron_t1.rollout.engine.errors import EngineLost

HOST = "127.0.0.1"
PORT_ATTEMPTS = 3
LOG_LINES = 15
_PORT_TAKEN = "address already in use"
# What an error doesn't quote of the log: the list of routes, and frames of a traceback, whose last line says it all.
_UNTOLD = re.compile(r" Route: |(^|\] )(Traceback \(most recent call last\):| +\S)")


class VllmServer:
    """One engine; use as `async with VllmServer(...) as server`.

    Args:
        config: `rollout.engine`.
        model_dir: Hugging Face directory to serve.
        dtype: of the weights in the engine.
        log_path: where the engine's output goes; appended to.
        max_model_len: longest stream in tokens, answer included.
        routes: record the experts each token took.
        seed: of the engine's own randomness.

    Attributes:
        url: base address, once started.
        served_name: of the model, once started; no other engine has it.
        build: the installed vLLM.
        router_dtype: of the router's logits, as the engine's processes found it in the loaded model; "": none looked.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_dir: str | Path,
        dtype: str,
        log_path: str | Path,
        *,
        max_model_len: int,
        routes: bool,
        seed: int = 0,
    ):
        self.config = config
        self.model_dir = Path(model_dir).resolve()
        self.dtype = dtype
        self.log_path = Path(log_path)
        self.max_model_len = max_model_len
        self.routes = routes
        self.seed = seed
        self.build = installed_build()
        self.url = self.served_name = ""
        self.start_s = 0.0
        self.router_dtype = ""
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> VllmServer:
        await self.start()
        return self

    async def __aexit__(self, *_) -> None:
        await self.stop()

    @property
    def pid(self) -> int:
        """Process id of the supervisor; the engine's processes are below it."""
        if self._process is None:
            raise RuntimeError("the engine is not running")
        return self._process.pid

    async def start(self) -> None:
        """Start and wait until healthy.

        Raises:
            EngineLost: the engine ended, didn't become ready in `start_timeout_s`, or its port is in use.
        """
        if not (self.model_dir / "config.json").is_file():
            raise EngineLost(
                "the model directory has no config.json",
                where=str(self.model_dir),
                remedy="check model.path, or make a start model with `t1 model init`",
            )
        if self.routes and self.build.is_cpu:
            require_plugin()
        began = time.monotonic()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        attempts = 1 if self.config.port else PORT_ATTEMPTS
        for attempt in range(attempts):
            port = self.config.port or _free_port()
            if self.config.port and not _is_free(port):
                raise EngineLost(
                    f"port {port} is in use",
                    where="rollout.engine.port",
                    remedy="set another port, or 0 for a free one",
                )
            offset = self.log_path.stat().st_size if self.log_path.exists() else 0
            try:
                await self._start_once(port)
            except EngineLost:
                taken = _PORT_TAKEN in self._log_since(offset).lower()
                await self.stop()
                if taken and attempt + 1 < attempts:
                    continue  # somebody took the port between our choice and the engine's bind
                raise
            except BaseException:
                await self.stop()
                raise
            self.start_s = time.monotonic() - began
            self.router_dtype = observed.router_dtype(self._log_since(offset))
            return

    async def stop(self) -> None:
        """End every process of the engine; returns when they are gone. Safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), supervisor.GRACE_S + 10)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def check_alive(self) -> None:
        """Raise EngineLost when the engine has ended, also when it is ending right now."""
        process = self._process
        if process is None:
            raise EngineLost("the engine was stopped", where=str(self.log_path))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(process.wait()), supervisor.GRACE_S + 2)
        if process.returncode is not None:
            raise self._lost(f"the engine ended with status {process.returncode}")

    async def _start_once(self, port: int) -> None:
        self.served_name = f"policy-{secrets.token_hex(8)}"
        command = serve_command(
            self.config,
            self.build,
            model_dir=self.model_dir,
            served_name=self.served_name,
            dtype=self.dtype,
            port=port,
            max_model_len=self.max_model_len,
            routes=self.routes,
            seed=self.seed,
        )
        with open(self.log_path, "ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                supervisor.__file__,
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=serve_environment(self.config, self.build, routes=self.routes),
                start_new_session=True,
            )
        self.url = f"http://{HOST}:{port}"
        await self._wait_healthy()

    async def _wait_healthy(self) -> None:
        deadline = time.monotonic() + self.config.start_timeout_s
        timeout = aiohttp.ClientTimeout(total=5)
        async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
            while time.monotonic() < deadline:
                if self._process.returncode is not None:
                    raise self._lost(f"the engine ended with status {self._process.returncode} while starting")
                if await _serves(session, self.url, self.served_name):
                    return
                await asyncio.sleep(0.1)
        raise self._lost(f"the engine wasn't ready after {self.config.start_timeout_s:g} s")

    def _lost(self, problem: str) -> EngineLost:
        lines = [line for line in self._log_since(0).splitlines() if not _UNTOLD.search(line)][-LOG_LINES:]
        return EngineLost(
            "\n".join([problem, *(f"  | {line[:300]}" for line in lines)]),
            where=str(self.log_path),
            remedy="read the engine's log; finished trajectories are kept, and the phase can be started again",
        )

    def _log_since(self, offset: int) -> str:
        try:
            with open(self.log_path, "rb") as log:
                log.seek(max(offset, os.fstat(log.fileno()).st_size - 200_000))
                return log.read().decode(errors="replace")
        except OSError:
            return ""


async def _serves(session: aiohttp.ClientSession, url: str, served_name: str) -> bool:
    """Whether the engine at `url` is healthy and is ours: another process may have taken the port."""
    try:
        async with session.get(f"{url}/health") as response:
            if response.status != 200:
                return False
        async with session.get(f"{url}/v1/models") as response:
            models = await response.json()
            return any(model.get("id") == served_name for model in models.get("data", []))
    except (aiohttp.ClientError, TimeoutError, ValueError, AttributeError, TypeError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
