"""What Linux passes to a new program: how long one argument or variable may be, and all of them together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MAX_WORD_BYTES = (128 << 10) - 1  # MAX_ARG_STRLEN of a kernel with pages of 4 KiB, without the NUL at the end
MAX_TOTAL_BYTES = 1 << 20  # the kernel's own limit is a quarter of the stack's, 2 MiB by default
POINTER_BYTES = 24  # what an entry costs beside its text


def too_large(words: Sequence[str], env: Mapping[str, str]) -> str:
    """Why a program can't be started with these arguments and variables ("Argument list too long"); "" if it can."""
    total = 0
    named = [*(("an argument", word) for word in words), *((name, f"{name}={text}") for name, text in env.items())]
    for name, text in named:
        size = len(text.encode(errors="surrogateescape"))
        if size > MAX_WORD_BYTES:
            return f"{name[:80]} has {size} bytes, a program can be given {MAX_WORD_BYTES}"
        total += size + POINTER_BYTES
    if total > MAX_TOTAL_BYTES:
        return f"arguments and variables come to {total} bytes, a program can be given {MAX_TOTAL_BYTES}"
    return ""
