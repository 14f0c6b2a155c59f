"""A git repository with one empty commit on main, as plain files: making it needs no git, and it is always the same."""

from __future__ import annotations

import hashlib
import zlib
from functools import cache

_CONFIG = (
    "[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = false\n"
    "[user]\n\tname = Agent\n\temail = agent@localhost\n[gc]\n\tauto = 0\n[maintenance]\n\tauto = false\n"
)
_PERSON = "Agent <agent@localhost> 1700000000 +0000"


@cache
def empty_repository() -> dict[str, bytes]:
    """Files of .git, path below the work tree -> content."""
    files: dict[str, bytes] = {}

    def store(kind: str, body: bytes) -> str:
        raw = f"{kind} {len(body)}\0".encode() + body
        digest = hashlib.sha1(raw, usedforsecurity=False).hexdigest()
        files[f".git/objects/{digest[:2]}/{digest[2:]}"] = zlib.compress(raw)
        return digest

    tree = store("tree", b"")
    commit = store("commit", f"tree {tree}\nauthor {_PERSON}\ncommitter {_PERSON}\n\nstart\n".encode())
    files[".git/HEAD"] = b"ref: refs/heads/main\n"
    files[".git/config"] = _CONFIG.encode()
    files[".git/refs/heads/main"] = f"{commit}\n".encode()
    return files
