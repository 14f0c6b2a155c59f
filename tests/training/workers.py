"""Functions that run in several processes; see tests.distributed."""

from __future__ import annotations

from pathlib import Path


def run_phases(run_dir: str, iteration: int, roles: list[str]) -> None:
    from megatron_t1.training.main import run_roles

    run_roles(Path(run_dir), iteration, roles, [])
