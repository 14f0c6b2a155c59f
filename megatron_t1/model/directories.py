"""Directories that several ranks fill and that appear complete or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from megatron_t1 import atomic
from megatron_t1.errors import naming


def make_empty(directory: Path) -> None:
    """Create `directory`; what an interrupted attempt left there is removed."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def publish_directory(partial: Path, final: Path) -> None:
    """Rename a complete directory to its name; one that had the name before is removed after the exchange."""
    for path in (*partial.iterdir(), partial):
        with naming(path):
            atomic.fsync_path(path)
    replaced = final.with_name(final.name + ".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        os.replace(final, replaced)
    os.replace(partial, final)
    atomic.fsync_path(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
