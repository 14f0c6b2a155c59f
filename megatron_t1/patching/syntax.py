"""Finding and replacing nodes of a concrete syntax tree (libcst), which keeps every byte it isn't told to change.

A `Trail` is the path from the module down to a node, both included. Trees are immutable: `replaced` gives a new module
that shares everything off the trail with the old one.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from megatron_t1.patching.errors import MissingError, PatchError, PlaceError
from megatron_t1.patching.fingerprint import Form, form, local_names

Trail = tuple[cst.CSTNode, ...]
_EXCERPT_LINES = 12
_LINE_END = re.compile(r"\r\n|\r|\n")  # as Python ends lines: not at a form feed or U+2028


@dataclass(frozen=True, eq=False)
class Source:
    """A parsed file.

    Attributes:
        path: as the user knows it, for messages.
    """

    path: str
    module: cst.Module

    @classmethod
    def parse(cls, data: bytes, path: str) -> Source:
        """Raises PatchError when this isn't Python, or when libcst can't give the very same bytes back."""
        try:
            module = cst.parse_module(data)
        except (cst.ParserSyntaxError, UnicodeDecodeError, LookupError) as error:
            raise PatchError(f"the file can't be parsed: {error}", where=path) from error
        if module.bytes != data:
            raise PatchError("the file can't be reproduced byte for byte after parsing", where=path)
        return cls(path, module)

    def code(self, node: cst.CSTNode) -> str:
        """The node's source at indentation 0, so that it can be parsed alone."""
        if isinstance(node, cst.SimpleStatementSuite):
            node = cst.SimpleStatementLine(node.body)
        if isinstance(node, cst.BaseExpression):
            return f"({self.module.code_for_node(node)}\n)"
        if hasattr(node, "leading_lines"):
            node = node.with_changes(leading_lines=())
        return self.module.code_for_node(node)

    @cached_property
    def _positions(self):
        return MetadataWrapper(self.module, unsafe_skip_copy=True).resolve(PositionProvider)

    def excerpt(self, node: cst.CSTNode) -> str:
        """The node's own lines with their numbers, at most a dozen."""
        span = self._positions[node]
        lines = _LINE_END.split(self.module.code)[span.start.line - 1 : span.end.line]
        shown = [f"    {span.start.line + i:5d}  {line}" for i, line in enumerate(lines[:_EXCERPT_LINES])]
        return "\n".join(shown + (["      ..."] if len(lines) > _EXCERPT_LINES else []))

    def line(self, node: cst.CSTNode) -> int:
        return self._positions[node].start.line

    # ------------------------------------------------------------------ finding

    def imported_from(self, name: str) -> tuple[str, int] | None:
        """(module, level) of `from module import name`, level the dots in front of it; None where there is none."""
        for trail in _descend((self.module,)):
            node = trail[-1]
            if isinstance(node, cst.ImportFrom) and not isinstance(node.names, cst.ImportStar):
                if any(alias.name.value == name and alias.asname is None for alias in node.names):
                    return dotted_name(node.module) if node.module else "", len(node.relative)
        return None

    def definitions(self, dotted: str) -> list[Trail]:
        """All classes and functions of that dotted name; the module itself for ""."""
        trails: list[Trail] = [(self.module,)]
        for name in dotted.split(".") if dotted else []:
            trails = [inner for trail in trails for inner in _defined_in(trail, name)]
        return trails

    def target(self, dotted: str) -> Target:
        """The one class or function of that name.

        Raises:
            MissingError: there is none.
            PlaceError: there are several.
        """
        found = self.definitions(dotted)
        if len(found) == 1:
            return Target(self, found[0], dotted)
        if not found:
            last = dotted.rpartition(".")[2]
            near = [self.line(trail[-1]) for trail in _all_defined(self.module) if trail[-1].name.value == last]
            also = f"; {last} is defined in line {', '.join(map(str, near))}, elsewhere than expected" if near else ""
            raise MissingError(f"expected: a definition of {dotted}\nfound:    none{also}", where=self.path)
        lines = ", ".join(str(self.line(trail[-1])) for trail in found)
        raise PlaceError(
            f"expected: one definition of {dotted}\nfound:    {len(found)}, in lines {lines}", where=self.path
        )


@dataclass(frozen=True, eq=False)
class Target:
    """A class, a function, or a whole file."""

    source: Source
    trail: Trail
    name: str

    @property
    def node(self) -> cst.CSTNode:
        return self.trail[-1]

    @property
    def where(self) -> str:
        line = f":{self.source.line(self.node)}" if self.name else ""
        return f"{self.source.path}{line}{f' ({self.name})' if self.name else ''}"

    @cached_property
    def locals(self) -> frozenset[str]:
        """Names a renaming inside the target may have changed: a function's locals; classes and files have none."""
        if not isinstance(self.node, cst.FunctionDef):
            return frozenset()
        return local_names(self.source.code(self.node))

    def form(self, node: cst.CSTNode) -> Form:
        return form(self.source.code(node), self.locals)

    @cached_property
    def statements(self) -> list[Trail]:
        """All statements inside, nested ones too, in order; the body of a one-line suite counts as one."""
        return [trail for trail in _descend(self.trail) if _is_statement(trail) and trail[-1] is not self.node]

    @cached_property
    def expressions(self) -> list[Trail]:
        return [trail for trail in _descend(self.trail) if isinstance(trail[-1], cst.BaseExpression)]

    def enclosing_statement(self, trail: Trail) -> Trail:
        """The smallest statement around an expression."""
        for end in range(len(trail), 0, -1):
            if _is_statement(trail[:end]):
                return trail[:end]
        raise AssertionError("an expression outside every statement")

    def parameters(self) -> dict[str, cst.Param]:
        if not isinstance(self.node, cst.FunctionDef):
            return {}
        found = self.node.params
        star = (found.star_arg,) if isinstance(found.star_arg, cst.Param) else ()
        every = (*found.posonly_params, *found.params, *star, *found.kwonly_params)
        every += (found.star_kwarg,) if found.star_kwarg else ()
        return {parameter.name.value: parameter for parameter in every}


_SIMPLE = (cst.SimpleStatementLine, cst.SimpleStatementSuite)


def _is_statement(trail: Trail) -> bool:
    """Something lines can be put before or after: in a block, or the one line of `if x: y`; an `elif` is neither."""
    node, parent = trail[-1], trail[-2] if len(trail) > 1 else None
    if isinstance(node, cst.SimpleStatementSuite):
        return True
    return isinstance(parent, (cst.Module, cst.IndentedBlock)) and isinstance(node, cst.BaseStatement)


def dotted_name(node: cst.CSTNode) -> str:
    """`a.b.c` of a name or attribute; "" for anything else, "?" in front where the chain starts with an expression."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        return f"{dotted_name(node.value) or '?'}.{node.attr.value}"
    return ""


def calls(node: cst.CSTNode, callee: str) -> bool:
    """Whether the node is a call of `callee`, by that name or as the end of a longer dotted one."""
    if not isinstance(node, cst.Call):
        return False
    name = dotted_name(node.func)
    return name == callee or name.endswith(f".{callee}")


def assigned_names(statement: cst.CSTNode) -> set[str]:
    """Dotted names a simple statement assigns to."""
    found: set[str] = set()
    for small in getattr(statement, "body", ()) if isinstance(statement, _SIMPLE) else ():
        if isinstance(small, cst.Assign):
            targets = [target.target for target in small.targets]
        elif isinstance(small, (cst.AnnAssign, cst.AugAssign)):
            targets = [small.target]
        else:
            continue
        for target in targets:
            elements = [e.value for e in target.elements] if isinstance(target, (cst.Tuple, cst.List)) else [target]
            found.update(filter(None, map(dotted_name, elements)))
    return found


def bound_names(statement: cst.CSTNode) -> set[str]:
    """Names that a statement itself imports, assigns or defines."""
    if isinstance(statement, (cst.FunctionDef, cst.ClassDef)):
        return {statement.name.value}
    found = assigned_names(statement)
    for small in getattr(statement, "body", ()) if isinstance(statement, _SIMPLE) else ():
        if isinstance(small, (cst.Import, cst.ImportFrom)) and not isinstance(small.names, cst.ImportStar):
            for alias in small.names:
                name = alias.asname.name if alias.asname else alias.name
                found.add(dotted_name(name).partition(".")[0])
    return found


def replaced(trail: Trail, new: cst.CSTNode) -> cst.Module:
    """The module with the trail's last node exchanged."""
    for parent, old in zip(reversed(trail[:-1]), reversed(trail[1:]), strict=True):
        new = _with_child(parent, old, new)
    return new


def _with_child(parent: cst.CSTNode, old: cst.CSTNode, new: cst.CSTNode) -> cst.CSTNode:
    for field in dataclasses.fields(parent):
        value = getattr(parent, field.name)
        if value is old:
            return parent.with_changes(**{field.name: new})
        if isinstance(value, (list, tuple)) and any(item is old for item in value):
            return parent.with_changes(**{field.name: [new if item is old else item for item in value]})
    raise AssertionError("the trail doesn't lead to its end")


def _descend(trail: Trail) -> Iterator[Trail]:
    for child in trail[-1].children:
        inner = (*trail, child)
        yield inner
        yield from _descend(inner)


def _defined_in(trail: Trail, name: str) -> Iterator[Trail]:
    """Definitions of a name in a module, class or function, also below if, try and with, not inside other ones."""
    for child in trail[-1].children:
        inner = (*trail, child)
        if isinstance(child, (cst.FunctionDef, cst.ClassDef)):
            if child.name.value == name:
                yield inner
        elif not isinstance(child, (cst.SimpleStatementLine, cst.BaseExpression)):
            yield from _defined_in(inner, name)


def _all_defined(module: cst.Module) -> Iterator[Trail]:
    return (t for t in _descend((module,)) if isinstance(t[-1], (cst.FunctionDef, cst.ClassDef)))
