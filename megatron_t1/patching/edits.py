"""One edit of a declaration on one parsed file: is it there already, can it be done, and the file after it."""

from __future__ import annotations

import string
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

import libcst as cst

from megatron_t1.patching.declaration import Edit
from megatron_t1.patching.errors import DeclarationError, PlaceError
from megatron_t1.patching.fingerprint import form, local_names
from megatron_t1.patching.marks import MARK
from megatron_t1.patching.names import Rename, bound_by, fresh_names, names_in
from megatron_t1.patching.places import Found, find_places
from megatron_t1.patching.syntax import Source, Target, assigned_names, calls, replaced

_PLACEHOLDER = "__t1_expression__"


@dataclass(frozen=True)
class Outcome:
    """What an edit comes to on a file.

    Attributes:
        source: the file after the edit; None when it is there already, or its optional target is not.
        present: the edit was found to be there already.
    """

    source: Source | None
    present: bool = False


def perform(edit: Edit, source: Source, patch: str) -> Outcome:
    """Do one edit of the named patch.

    Raises:
        MissingError: the target isn't defined in this file.
        PlaceError: the place isn't as expected; shows both.
        DeclarationError: the edit's own lines aren't Python.
    """
    target = source.target(edit.target)
    if _has_sign(edit, target):
        return Outcome(None, present=True)
    _require_parameters(edit, target)
    if edit.add_parameter:
        return _add_parameter(edit, target)
    if edit.place is None:
        statements = _own_statements(edit, {}, patch, target)
        if _holds(target, statements):
            return Outcome(None, present=True)
        return Outcome(Source(source.path, _at_edge(target, edit.insert, statements)))
    if edit.lines:
        present = _own_lines_present(edit, target, patch)
        if present:
            return Outcome(None, present=True)
    return _at_places(edit, target, patch)


def _at_places(edit: Edit, target: Target, patch: str) -> Outcome:
    """The edit at each of its places, from the last to the first, so that no change moves a place still to come."""
    found = find_places(target, edit.place, want_expressions=bool(edit.wrap or edit.add_argument))
    if edit.add_argument:
        name = edit.add_argument.partition("=")[0].strip()
        open_calls = [place for place in found if not _has_keyword(place.trail[-1], name)]
        if not open_calls:
            return Outcome(None, present=True)
        found = open_calls
    source = target.source
    for index in reversed(range(len(found))):
        place = found[index]
        # Earlier places are untouched by a change behind them, but their trails start at the old module.
        trail = place.trail if source is target.source else _rebased(place, source)
        names = _captured(edit, place)
        if edit.add_argument:
            new = replaced(trail, _with_argument(trail[-1], edit.add_argument))
        elif edit.wrap:
            new = replaced(trail, _wrapped(edit, trail[-1], names))
        else:
            new = _at_statement(edit, trail, _own_statements(edit, names, patch, target))
        source = Source(source.path, new)
    return Outcome(source)


def _rebased(place: Found, source: Source):
    """The trail of the same node in a later module; nodes off a changed trail are shared between both."""
    trail = (source.module,)
    for node in place.trail[1:]:
        children = trail[-1].children
        same = next((child for child in children if child is node), None)
        trail = (*trail, children[place.child_index(len(trail))] if same is None else same)
    return trail


# ---------------------------------------------------------------------- what is there already


def _has_sign(edit: Edit, target: Target) -> bool:
    return any(_sign_holds(kind, value, target) for kind, value in edit.present)


def _sign_holds(kind: str, value: str, target: Target) -> bool:
    if kind == "parameter":
        return value in target.parameters()
    if kind == "call":
        return any(calls(trail[-1], value) for trail in target.expressions)
    if kind == "assigns":
        return any(value in assigned_names(trail[-1]) for trail in target.statements)
    nodes = (*target.statements, *target.expressions)
    return any(target.form(trail[-1]).fingerprint == value for trail in nodes)


def _own_lines_present(edit: Edit, target: Target, patch: str) -> bool:
    """Whether our lines stand in the target, under whatever local names."""
    # Captured names are locals of the target, so any local stands for them: the form numbers them alike.
    names = {name: f"captured_{name}" for name in edit.capture}
    return _holds(target, _own_statements(edit, names, patch), frozenset(names.values()))


def _holds(target: Target, statements: list[cst.BaseStatement], captured: frozenset[str] = frozenset()) -> bool:
    module = cst.Module(statements)
    local = local_names(module.code) | captured
    if isinstance(target.node, cst.FunctionDef):
        local |= set(target.parameters()) | target.locals
    else:
        local = frozenset()
    wanted = [form(cst.Module([statement]).code, local).fingerprint for statement in statements]
    have = {form(target.source.code(trail[-1]), local).fingerprint for trail in target.statements}
    return all(fingerprint in have for fingerprint in wanted)


def _has_keyword(call: cst.Call, name: str) -> bool:
    return any(argument.keyword is not None and argument.keyword.value == name for argument in call.args)


def _require_parameters(edit: Edit, target: Target) -> None:
    have = target.parameters()
    missing = [name for name in edit.parameters if name not in have]
    if missing:
        raise PlaceError(
            f"expected: a function with {_listed(edit.parameters)} among its parameters\n"
            f"found:    {_listed(have) or 'none'}; missing: {_listed(missing)}",
            where=target.where,
        )


def _listed(names) -> str:
    return ", ".join(names)


# ---------------------------------------------------------------------- our own lines


def _own_statements(
    edit: Edit, names: Mapping[str, str], patch: str, target: Target | None = None
) -> list[cst.BaseStatement]:
    """The edit's lines as statements, with a comment that names the patch above the first.

    Args:
        target: the function they go into, whose own names they leave alone; None where they are only compared.
    """
    # Captured names are put in last: until then none of them is one that the lines make.
    stand_ins = {name: f"__t1_captured_{name}__" for name in names}
    text = _filled(edit.lines, stand_ins)
    try:
        module = cst.parse_module(textwrap.dedent(text).strip("\n") + "\n")
    except cst.ParserSyntaxError as error:
        raise DeclarationError(f"the lines aren't Python: {error}", where=f"{patch}: {edit.target}") from error
    if any(line.comment for line in module.footer) or not module.body:
        raise DeclarationError("the lines end in a comment, which has no statement", where=f"{patch}: {edit.target}")
    module = module.visit(_BlankLines())
    if target is not None and isinstance(target.node, cst.FunctionDef):
        module = _fitted(module, target, set(stand_ins.values()))
    module = module.visit(Rename({stand_ins[name]: value for name, value in names.items()}))
    statements = list(module.body)
    mark = cst.EmptyLine(comment=cst.Comment(f"{MARK}{patch}"))
    above = [line for line in (*module.header, *statements[0].leading_lines) if line.comment]
    statements[0] = statements[0].with_changes(leading_lines=[mark, *above])
    return statements


def _fitted(module: cst.Module, target: Target, captured: set[str]) -> cst.Module:
    """The lines under names that don't clash with the function's."""
    made, changed = bound_by(module.code)
    have = names_in(target.source.code(target.node))
    if missing := sorted(changed - captured - have):
        raise PlaceError(
            f"expected: a function that has {_listed(missing)}, which the lines change\nfound:    none of that name",
            where=target.where,
        )
    clashing = (made - captured) & have
    return module.visit(Rename(fresh_names(clashing, have | names_in(module.code))))


class _BlankLines(cst.CSTTransformer):
    """An empty line has no indentation."""

    def leave_EmptyLine(self, original_node: cst.EmptyLine, updated_node: cst.EmptyLine) -> cst.EmptyLine:
        if updated_node.comment is not None:
            return updated_node
        return updated_node.with_changes(indent=False, whitespace=cst.SimpleWhitespace(""))


def _filled(text: str, names: Mapping[str, str]) -> str:
    try:
        return string.Template(text).substitute(names)
    except (KeyError, ValueError) as error:
        raise DeclarationError(f"a $name that isn't captured: {error}", where=text.strip()) from error


def _captured(edit: Edit, place: Found) -> dict[str, str]:
    names = {}
    for name, reference in edit.capture.items():
        index = int(reference.removeprefix("@"))
        if index >= len(place.names):
            raise DeclarationError(f"the place has no local {reference}", where=edit.target)
        names[name] = place.names[index]
    return names


# ---------------------------------------------------------------------- changing the tree


def _at_edge(target: Target, edge: str, statements: list[cst.BaseStatement]) -> cst.Module:
    trail = target.trail if isinstance(target.node, cst.Module) else (*target.trail, target.node.body)
    block = trail[-1]
    if isinstance(block, cst.SimpleStatementSuite):
        block = _as_block(block)
    body = list(block.body)
    index = len(body) if edge == "end" else int(bool(body) and _is_docstring(body[0]))
    return replaced(trail, block.with_changes(body=[*body[:index], *statements, *body[index:]]))


def _at_statement(edit: Edit, trail, statements: list[cst.BaseStatement]) -> cst.Module:
    statement, block_trail = trail[-1], trail[:-1]
    if isinstance(statement, cst.SimpleStatementSuite):
        block = _as_block(statement)
        statement, block_trail = block.body[0], trail
        old = block
    else:
        old = block_trail[-1]
    body = list(old.body)
    index = next(i for i, item in enumerate(body) if item is statement)
    if edit.replace:
        leading = (*statement.leading_lines, *statements[0].leading_lines)
        body[index : index + 1] = [statements[0].with_changes(leading_lines=leading), *statements[1:]]
    else:
        index += edit.insert == "after"
        body[index:index] = statements
    return replaced(block_trail, old.with_changes(body=body))


def _as_block(suite: cst.SimpleStatementSuite) -> cst.IndentedBlock:
    """`if x: y` on one line as a block of its own lines."""
    return cst.IndentedBlock(
        [cst.SimpleStatementLine(suite.body, trailing_whitespace=suite.trailing_whitespace)],
    )


def _is_docstring(statement: cst.BaseStatement) -> bool:
    return (
        isinstance(statement, cst.SimpleStatementLine)
        and len(statement.body) == 1
        and isinstance(statement.body[0], cst.Expr)
        and isinstance(statement.body[0].value, (cst.SimpleString, cst.ConcatenatedString))
    )


def _wrapped(edit: Edit, expression: cst.BaseExpression, names: Mapping[str, str]) -> cst.BaseExpression:
    text = _filled(edit.wrap, {**names, "expression": _PLACEHOLDER})
    outer = cst.parse_expression(text)
    return outer.visit(_Put(expression))


class _Put(cst.CSTTransformer):
    def __init__(self, expression: cst.BaseExpression):
        self.expression = expression

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        if original_node.value != _PLACEHOLDER:
            return updated_node
        inner = self.expression
        return inner.with_changes(lpar=[*updated_node.lpar, *inner.lpar], rpar=[*inner.rpar, *updated_node.rpar])


def _add_parameter(edit: Edit, target: Target) -> Outcome:
    name, _, default = (part.strip() for part in edit.add_parameter.partition("="))
    if name in target.parameters():
        return Outcome(None, present=True)
    if not isinstance(target.node, cst.FunctionDef):
        raise PlaceError("expected: a function\nfound:    a class or a file", where=target.where)
    if name in names_in(target.source.code(target.node)):
        raise PlaceError(
            f"expected: a function without a name {name}, as the new parameter is called\nfound:    it has one",
            where=target.where,
        )
    params = target.node.params
    new = cst.Param(cst.Name(name), default=cst.parse_expression(default), equal=_no_space_equal())
    star = isinstance(params.star_arg, (cst.Param, cst.ParamStar))
    field = "kwonly_params" if star else "params"
    group = list(getattr(params, field))
    if params.star_kwarg is not None:
        changed = params.with_changes(**{field: [*group, new.with_changes(comma=_comma(group))]})
    elif group:
        last = group[-1]
        new = new.with_changes(comma=last.comma, whitespace_after_param=last.whitespace_after_param)
        before = last.with_changes(comma=_comma(group[:-1]), whitespace_after_param=cst.SimpleWhitespace(""))
        changed = params.with_changes(**{field: [*group[:-1], before, new]})
    elif isinstance(params.star_arg, cst.Param):
        changed = params.with_changes(star_arg=params.star_arg.with_changes(comma=_comma([])), kwonly_params=[new])
    else:
        changed = params.with_changes(params=[new])
    return Outcome(Source(target.source.path, replaced((*target.trail, params), changed)))


def _with_argument(call: cst.Call, argument: str) -> cst.Call:
    name, _, value = (part.strip() for part in argument.partition("="))
    new = cst.Arg(cst.parse_expression(value), keyword=cst.Name(name), equal=_no_space_equal())
    if not call.args:
        return call.with_changes(args=[new])
    last = call.args[-1]
    new = new.with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
    before = last.with_changes(comma=_comma(call.args[:-1]), whitespace_after_arg=cst.SimpleWhitespace(""))
    return call.with_changes(args=[*call.args[:-1], before, new])


def _comma(others) -> cst.Comma:
    """The separator the list already uses, so that one item on each line stays so."""
    used = [item.comma for item in others if isinstance(item.comma, cst.Comma)]
    return used[-1] if used else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))


def _no_space_equal() -> cst.AssignEqual:
    return cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
