"""Names that a patch's lines bind for themselves: they get others where the function they go into has such names."""

from __future__ import annotations

import ast
from collections.abc import Iterable

import libcst as cst

from megatron_t1.patching.fingerprint import local_names

_SUFFIX = "_t1"


def bound_by(code: str) -> tuple[set[str], set[str]]:
    """(names that lines make, names of the function around them that they change).

    A name is the function's where the lines read it before they bind it. Imports bind the same thing everywhere, and
    are neither.
    """
    made: set[str] = set()
    theirs: set[str] = set()
    changed: set[str] = set()

    def bind(names: set[str]) -> None:
        changed.update(names & theirs)
        made.update(names - theirs)

    def visit(statement: ast.stmt) -> None:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bind({statement.name})
        elif not isinstance(statement, (ast.Import, ast.ImportFrom)):
            names = [node for node in _own_nodes(statement) if isinstance(node, ast.Name)]
            read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
            if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
                read.add(statement.target.id)
            theirs.update(read - made)
            bind({node.id for node in names if isinstance(node.ctx, ast.Store)})
            for inner in _inner_statements(statement):
                visit(inner)

    for statement in ast.parse(code).body:
        visit(statement)
    return made, changed


def _inner_statements(statement: ast.stmt) -> Iterable[ast.stmt]:
    """Statements in the bodies of a statement, an exception handler's too, in order."""
    for field in ("body", "handlers", "orelse", "finalbody"):
        for part in getattr(statement, field, []):
            yield from part.body if isinstance(part, ast.ExceptHandler) else [part]


def _own_nodes(statement: ast.stmt) -> Iterable[ast.AST]:
    """Nodes of a statement, without those of statements in its body."""
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, (ast.stmt, ast.ExceptHandler)):
            yield from ast.walk(child)


def names_in(code: str) -> set[str]:
    """Every name that the function in `code` reads or binds, in nested functions too."""
    read = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    return read | local_names(code)


def fresh_names(names: Iterable[str], taken: set[str]) -> dict[str, str]:
    """A name that isn't `taken` for each of `names`."""
    fresh = {}
    for name in sorted(names):
        number = 1
        while (new := f"{name}{_SUFFIX}{'' if number == 1 else number}") in taken:
            number += 1
        fresh[name] = new
    return fresh


class Rename(cst.CSTTransformer):
    """Renames variables; attributes and keywords of calls are others' names."""

    def __init__(self, fresh: dict[str, str]):
        self.fresh = fresh

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        return updated_node.with_changes(value=self.fresh.get(updated_node.value, updated_node.value))

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.Attribute:
        return updated_node.with_changes(attr=original_node.attr)

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:
        return updated_node.with_changes(keyword=original_node.keyword)
