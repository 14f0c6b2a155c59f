"""Run a function in several processes that meet over gloo, and collect what each returns."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def run_distributed(function_path: str, world_size: int, *, timeout_s: float = 300.0, **kwargs: Any) -> list[Any]:
    """Call `package.module:function(**kwargs)` in `world_size` fresh processes with torchrun's variables set.

    Arguments and results cross as JSON. Raises AssertionError with the traceback of every rank that failed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as scratch:
        children = []
        for rank in range(world_size):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
            }
            command = [sys.executable, "-m", "tests.distributed", function_path, json.dumps(kwargs), scratch]
            with open(Path(scratch) / f"{rank}.log", "wb") as log:
                children.append(
                    subprocess.Popen(
                        command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                    )
                )
        try:
            for child in children:
                child.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            for child in children:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
        failed = [rank for rank, child in enumerate(children) if child.returncode != 0]
        logs = "\n".join(f"--- rank {rank}\n{(Path(scratch) / f'{rank}.log').read_text()[-4000:]}" for rank in failed)
        assert not failed, f"ranks {failed} of {function_path} failed:\n{logs}"
        return [json.loads((Path(scratch) / f"{rank}.json").read_text()) for rank in range(world_size)]


def _main(function_path: str, arguments: str, scratch: str) -> int:
    module, name = function_path.split(":")
    try:
        result = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    except BaseException:
        traceback.print_exc()
        return 1
    (Path(scratch) / f"{os.environ['RANK']}.json").write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    code = _main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a rank that failed must not wait for the others in a process group's destructor
