"""What a task's own steps bring into a sandbox after it was built, and how the driver runs commands in a session."""

from __future__ import annotations

import hashlib
import posixpath
import shlex
from collections.abc import Awaitable, Callable, Iterable

from megatron_t1.environment.task import Files

# A regular file, not a link to one, of at most so many bytes; raises OSError or ValueError.
Read = Callable[[str, int], Awaitable[bytes]]


class OwnFiles:
    """Files that the driver put in place for a step: no change of the agent's while they hold what was written.

    A link to the same content is one: where it leads, another file can be mounted when the tests run.
    """

    def __init__(self) -> None:
        self._written: dict[str, tuple[int, bytes]] = {}  # absolute path -> size and digest

    def place(self, files: Files, workdir: str) -> Files:
        """`files` by absolute path, remembered."""
        placed = {posixpath.join(workdir, name): entry for name, entry in files.items()}
        self._written |= {path: (len(content), _digest(content)) for path, (content, _) in placed.items()}
        return placed

    async def others(self, paths: Iterable[str], read: Read) -> list[str]:
        """Those of `paths` where no file of ours stands, or not as it was written."""
        return [path for path in paths if not await self._stands(path, read)]

    async def _stands(self, path: str, read: Read) -> bool:
        if path not in self._written:
            return False
        size, digest = self._written[path]
        try:
            content = await read(path, size)
        except (OSError, ValueError):
            return False
        return len(content) == size and _digest(content) == digest


def child_command(command: str) -> str:
    """A command line of the session's shell that runs `command` in a shell below it, with nothing to read."""
    return f"/bin/bash -c {shlex.quote(command)} < /dev/null"


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
