"""Whether a directory takes so many bytes, which free space alone doesn't say: no quota is in it.

The bytes are reserved for a moment, in files without a name, and given back: what a quota of a user, group or project,
or a file system that keeps blocks back, would refuse in the middle of a phase is refused now. Whatever can't reserve is
taken at its word about its free space.
"""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

PART_BYTES = 16 * 2**30  # of one file: a file system with several storage targets spreads files, as it does a phase's
IN_MEMORY = ("tmpfs", "ramfs")  # whose reserved bytes are memory, and which have no quotas worth that
REFUSED = (errno.EDQUOT, errno.ENOSPC)


def refusal(directory: str | Path, size: int) -> int:
    """Reserve `size` bytes in a directory, and give them back.

    Returns:
        EDQUOT or ENOSPC where the file system refuses them; 0 where it grants them, or can't reserve.
    """
    if _in_memory(directory):
        return 0
    try:
        with ExitStack() as held:
            for start in range(0, size, PART_BYTES):
                file = held.enter_context(tempfile.TemporaryFile(dir=directory, prefix=".reserved."))
                code = fallocate(file.fileno(), min(PART_BYTES, size - start))
                if code:
                    return code if code in REFUSED else 0
    except OSError as error:
        return error.errno if error.errno in REFUSED else 0
    return 0


def fallocate(descriptor: int, size: int) -> int:
    """Reserve bytes of a file: 0, or the error's number. Not `posix_fallocate`: that writes where it can't reserve."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if call is None:
        return errno.EOPNOTSUPP
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    while call(descriptor, 0, 0, size):
        if (code := ctypes.get_errno()) != errno.EINTR:
            return code
    return 0


def _in_memory(directory: str | Path) -> bool:
    """By Linux's list of mounts; False where there is none."""
    try:
        device = os.stat(directory).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            words = line.split(" ")
            if words[2] == wanted:
                return words[words.index("-") + 1] in IN_MEMORY
    except (OSError, ValueError, IndexError):
        pass
    return False
