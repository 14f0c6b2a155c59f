"""Released sources of megatron-core and full Megatron-LM checkouts, where they can be had."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RELEASES = "T1_MEGATRON_RELEASES"  # directory that keeps unpacked releases; default: that of `make test-matrix`
CHECKOUTS = "T1_MEGATRON_CHECKOUTS"  # directory of full checkouts


def _matrix():
    """scripts/test_matrix.py, which knows the releases and how to get them."""
    if "test_matrix" not in sys.modules:
        spec = importlib.util.spec_from_file_location("test_matrix", ROOT / "scripts" / "test_matrix.py")
        sys.modules["test_matrix"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["test_matrix"])
    return sys.modules["test_matrix"]


VERSIONS: tuple[str, ...] = _matrix().VERSIONS


def _get(requirement: str) -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "megatron-t1" / "matrix"
    try:
        return _matrix().install(requirement, Path(os.environ.get(RELEASES, default)))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"{requirement} can't be had: {error.stderr.strip()[-200:]}")


def release(version: str) -> Path:
    """A directory with that release's megatron/core; skips the test offline. Not to be changed."""
    return _get(f"megatron-core=={version}")


def python_path(version: str, core: Path) -> str:
    """PYTHONPATH for a process that imports this core."""
    needs = tuple(map(int, version.split(".")[:2])) >= _matrix().NEEDS_TRITON
    lacks = needs and importlib.util.find_spec("triton") is None
    return os.pathsep.join(map(str, [core, *([_get(_matrix().TRITON)] if lacks else [])]))


def checkouts() -> list[Path]:
    """Full checkouts; skips the test where there is none."""
    given = os.environ.get(CHECKOUTS)
    if not given:
        pytest.skip(f"{CHECKOUTS} names no directory of Megatron-LM checkouts")
    found = sorted(path.parents[1] for path in Path(given).glob("*/megatron/core"))
    if not found:
        pytest.skip(f"no checkout in {given}")
    return found
