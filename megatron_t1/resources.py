"""Where conf/, patches/, slurm/ and docker/ lie: in the wheel as package data, in a checkout beside the package."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def resource_dir(name: str) -> Path:
    """Directory of a shipped resource folder (`conf`, `patches`, `slurm`).

    Raises:
        FileNotFoundError: the installation lacks it.
    """
    for candidate in (_PACKAGE / "_data" / name, _PACKAGE.parent / name):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"this installation of megatron-t1 lacks its {name}/ folder; reinstall it")
