"""Model chunks without the wrappers a trainer puts around them."""

from __future__ import annotations

from typing import Any


def bare_chunks(chunks: Any) -> list[Any]:
    """The GPT models inside: one model or a list, with or without DDP or Float16Module around each."""
    bare = []
    for chunk in chunks if isinstance(chunks, (list, tuple)) else [chunks]:
        while not hasattr(chunk, "architecture") and hasattr(chunk, "module"):
            chunk = chunk.module
        bare.append(chunk)
    return bare
