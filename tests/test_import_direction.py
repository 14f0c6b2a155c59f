"""A module's imports point one way, as docs/architecture.md says; and the two environments stay apart."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "megatron_t1"
# What stands in one row doesn't import each other.
LAYERS = (
    ("config",),
    ("trajectory",),
    ("routing", "ppo", "environment"),
    ("model", "rollout", "importing"),
    ("audit",),
    ("training",),
    ("loop", "checkout", "planner"),
    ("commands",),
)
RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names}
WITHOUT_MEGATRON = ("config", "trajectory", "environment", "rollout", "importing", "audit", "loop")
WITHOUT_VLLM = ("model", "routing", "training", "ppo", "trajectory", "config", "checkout")


@cache
def imports(package: str) -> frozenset[tuple[str, str]]:
    """(file, module imported) of everything in a package, also of imports within functions."""
    return frozenset(
        (str(path.relative_to(PACKAGE)), module)
        for path in (PACKAGE / package).rglob("*.py")
        for module in _modules(ast.parse(path.read_text()))
    )


def _modules(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", RANKS)
def test_imports_point_one_way(package):
    for file, module in imports(package):
        top, _, rest = module.partition(".")
        other = rest.partition(".")[0]
        if top == "megatron_t1" and other in RANKS and other != package:
            assert RANKS[other] < RANKS[package], f"{file} imports {module}"


@pytest.mark.parametrize(
    "absent, packages", [("megatron", WITHOUT_MEGATRON), ("vllm", WITHOUT_VLLM)], ids=["megatron", "vllm"]
)
def test_environments_stay_apart(absent, packages):
    for package in packages:
        for file, module in imports(package):
            assert module.partition(".")[0] != absent, f"{file} imports {module}"
