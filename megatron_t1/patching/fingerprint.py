"""Hashes of syntax that don't see formatting, comments, docstrings, annotations, or the names of local variables.

The canonical form is a nested list of the syntax tree's node names and values. Names that are local to the function
around it become @0, @1, ... in order of appearance, so a fork that renamed a local still has the same form. What other
code can see (attributes, keyword names, globals, callees) stays.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

_IGNORED_FIELDS = frozenset({"ctx", "type_comment", "annotation", "returns", "kind", "type_params", "type_ignores"})


@dataclass(frozen=True)
class Form:
    """The canonical form of a piece of code.

    Attributes:
        fingerprint: 16 hexadecimal digits.
        names: what the code calls its locals: `names[i]` is @i.
    """

    fingerprint: str
    names: tuple[str, ...]


def form(code: str, local_names: frozenset[str]) -> Form:
    """The form of statements, or of one expression, given as source.

    Raises:
        SyntaxError: `code` isn't Python.
    """
    names: list[str] = []
    text = " ".join(_emit(ast.parse(code), local_names, names))
    return Form(hashlib.sha256(text.encode()).hexdigest()[:16], tuple(names))


def local_names(code: str) -> frozenset[str]:
    """Every name that the function (or lines) in `code` binds, in nested functions too, its own name excepted."""
    tree = ast.parse(code)
    top = tree.body[0] if len(tree.body) == 1 else None
    own = top if isinstance(top, (ast.FunctionDef, ast.AsyncFunctionDef)) else None
    bound: set[str] = set()
    outside: set[str] = set()
    for node in ast.walk(tree):
        if node is own:
            continue
        if isinstance(node, ast.Global):
            outside.update(node.names)
        bound.update(_bound_by(node))
    return frozenset(bound - outside)


def _bound_by(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):
        if not isinstance(node.ctx, ast.Load):
            yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.alias):
        yield node.asname or node.name.partition(".")[0]
    elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
        if node.name:
            yield node.name
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.rest


def _emit(node: object, local: frozenset[str], names: list[str]) -> Iterator[str]:
    if isinstance(node, list):
        yield "["
        for item in node:
            if not _is_text(item):
                yield from _emit(item, local, names)
        yield "]"
        return
    if not isinstance(node, ast.AST):
        yield _name(node, local, names) if isinstance(node, str) else repr(node)
        return
    if isinstance(node, ast.Constant):
        yield f"{type(node.value).__name__}:{node.value!r}"
        return
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        node = ast.Assign(targets=[node.target], value=node.value)
    yield f"({type(node).__name__}"
    public = {"arg"} if isinstance(node, ast.keyword) else {"attr"} if isinstance(node, ast.Attribute) else set()
    for field in node._fields:
        value = getattr(node, field, None)
        if field in _IGNORED_FIELDS or value is None or value == []:
            continue
        yield f"{field}="
        yield from [value] if field in public else _emit(value, local, names)
    yield ")"


def _is_text(node: object) -> bool:
    """A docstring, or another string that stands alone as a statement."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _name(name: str, local: frozenset[str], names: list[str]) -> str:
    if name not in local:
        return name
    if name not in names:
        names.append(name)
    return f"@{names.index(name)}"
