"""What a checkout's own checkpoints hold, read without unpickling anything. No torch."""

from __future__ import annotations

import argparse
import mmap
from pathlib import Path

VALUE_HEAD_ENTRY = b"value_head.weight"
_TRACKER = "latest_checkpointed_iteration.txt"


def find_checkpoint(args: argparse.Namespace) -> Path | None:
    """The directory Megatron will load from (--load, else --pretrained-checkpoint); None: it will start without one."""
    for name in ("load", "pretrained_checkpoint"):
        root = getattr(args, name, None)
        tracker = None if root is None else Path(root) / _TRACKER
        if tracker is None or not tracker.is_file():
            continue
        step = getattr(args, "ckpt_step", None) or tracker.read_text().strip()
        return Path(root) / ("release" if step == "release" else f"iter_{int(step):07d}")
    return None


def has_value_head(directory: Path) -> bool:
    """Whether a torch_dist checkpoint holds a value head. The entry's name stands in its metadata as plain text."""
    path = directory / ".metadata"
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(VALUE_HEAD_ENTRY) >= 0
