"""Trees of files between this machine and a sandbox, in the form that `put_files` and `get_files` take."""

from __future__ import annotations

import os
import posixpath
import shlex
import stat
from pathlib import Path

from megatron_t1.environment.sandbox.interface import Sandbox, SandboxLost
from megatron_t1.environment.task import Files

LIMIT_BYTES = 512 << 20  # of one file that is fetched
COMMAND_TIMEOUT_S = 120.0


def read_tree(source: Path, target: str) -> tuple[Files, list[str], dict[str, str]]:
    """What lies below `source`, placed below `target`: files, directories, and symbolic links with their targets."""
    files: dict[str, tuple[bytes, int]] = {}
    directories, links = [target], {}
    for folder, names, leaves in os.walk(source):
        inside = posixpath.normpath(posixpath.join(target, Path(folder).relative_to(source).as_posix()))
        for name in sorted(names + leaves):
            path, place = Path(folder, name), posixpath.join(inside, name)
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                links[place] = os.readlink(path)
            elif stat.S_ISDIR(mode):
                directories.append(place)
            elif stat.S_ISREG(mode):
                files[place] = (path.read_bytes(), stat.S_IMODE(mode))
    return files, directories, links


async def put_tree(sandbox: Sandbox, source: Path, target: str) -> None:
    """Copy a directory of this machine into a sandbox. Raises SandboxLost."""
    files, directories, links = read_tree(source, target)
    commands = [f"mkdir -p -- {shlex.join(directories)}"]
    commands += [f"ln -sfn -- {shlex.quote(to)} {shlex.quote(place)}" for place, to in links.items()]
    await must(sandbox, "\n".join(commands))
    if files:
        await sandbox.put_files(files)


async def get_tree(sandbox: Sandbox, source: str, target: Path) -> None:
    """Copy the regular files below a sandbox's directory; links and special files are left out.

    Raises:
        SandboxLost: there is no such directory.
    """
    listing = f"{posixpath.join('/tmp', '.t1-listing')}"
    place = shlex.quote(source)
    await must(sandbox, f"cd -- {place} && find . -type f -print0 > {listing} && cd - > /dev/null")
    found = (await sandbox.get_files([listing], LIMIT_BYTES)).files.get(listing, b"")
    names = [posixpath.normpath(os.fsdecode(name)) for name in found.split(b"\0") if name]
    paths = {posixpath.join(source, name): name for name in names if not name.startswith(("/", ".."))}
    target.mkdir(parents=True, exist_ok=True)
    root = target.resolve()
    fetched = await sandbox.get_files(list(paths), LIMIT_BYTES)
    for path, content in fetched.files.items():
        destination = target / paths[path]
        if not destination.parent.resolve().is_relative_to(root):
            raise SandboxLost(f"{path} would be written outside of {target}")
        destination.parent.mkdir(parents=True, exist_ok=True)
        destination.unlink(missing_ok=True)
        destination.write_bytes(content)


async def must(sandbox: Sandbox, command: str) -> str:
    """Output of a command of ours that has to succeed. Raises SandboxLost."""
    result = await sandbox.run(command, COMMAND_TIMEOUT_S)
    if result.exit_code != 0:
        raise SandboxLost(f"{command[:200]!r} failed in the sandbox: {result.output.strip()[-300:]}")
    return result.output
