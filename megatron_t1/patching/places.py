"""Finding the places of an edit, and showing an author what places a file has.

python -m megatron_t1.patching.places FILE TARGET [--expressions]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import libcst as cst

from megatron_t1.patching.declaration import Place
from megatron_t1.patching.errors import PlaceError
from megatron_t1.patching.syntax import Source, Target, Trail, assigned_names, bound_names, calls

_SHOWN_CANDIDATES = 3


@dataclass(frozen=True, eq=False)
class Found:
    """A place: where it is, and what it calls @0, @1, ..."""

    trail: Trail
    names: tuple[str, ...]

    def child_index(self, depth: int) -> int:
        """Position of the trail's node at `depth` among its parent's children."""
        parent, node = self.trail[depth - 1], self.trail[depth]
        return next(i for i, child in enumerate(parent.children) if child is node)


def find_places(target: Target, place: Place, *, want_expressions: bool) -> list[Found]:
    """The places that fit, in order.

    Raises:
        PlaceError: not as many as declared; shows what was expected and what stands there.
    """
    candidates = _candidates(target, place, want_expressions)
    found = []
    for trail in candidates:
        if place.fingerprints:
            shape = target.form(trail[-1])
            if shape.fingerprint in place.fingerprints:
                found.append(Found(trail, shape.names))
        else:
            found.append(Found(trail, ()))
    if place.outermost:
        found = [Found(_outermost(item.trail, target), item.names) for item in found]
    if found and place.count in (0, len(found)):
        return found
    raise _mismatch(target, place, candidates, found)


def _candidates(target: Target, place: Place, want_expressions: bool) -> list[Trail]:
    """Everything of the right kind, whatever its form."""
    if place.call:
        found = [trail for trail in target.expressions if calls(trail[-1], place.call)]
        if place.argument is not None:
            found = [argument for trail in found for argument in _argument(trail, place.argument)]
        if not want_expressions:
            found = _distinct([target.enclosing_statement(trail) for trail in found])
    elif place.returns and want_expressions:
        found = [t for t in target.expressions if isinstance(t[-2], cst.Return) and _own(t, target)]
    elif want_expressions:
        found = target.expressions
    else:
        found = target.statements
    if place.returns and not want_expressions:
        found = [t for t in found if _is_return(t[-1]) and _own(t, target)]
    if place.binds or place.assigns:
        found = [t for t in found if _binds(t if not want_expressions else target.enclosing_statement(t), place)]
    return found


def _binds(trail: Trail, place: Place) -> bool:
    names = bound_names(trail[-1]) if place.binds else assigned_names(trail[-1])
    return (place.binds or place.assigns) in names


def _argument(trail: Trail, which: int | str) -> list[Trail]:
    call = trail[-1]
    positional = [argument for argument in call.args if argument.keyword is None and not argument.star]
    if isinstance(which, int):
        chosen = positional[which : which + 1]
    else:
        chosen = [
            argument for argument in call.args if argument.keyword is not None and argument.keyword.value == which
        ]
    return [(*trail, argument, argument.value) for argument in chosen]


def _is_return(statement: cst.CSTNode) -> bool:
    return not isinstance(statement, cst.BaseCompoundStatement) and any(
        isinstance(small, cst.Return) for small in statement.body
    )


def _own(trail: Trail, target: Target) -> bool:
    """Whether a node belongs to the target itself, not to a function inside it."""
    inside = trail[len(target.trail) :]
    return not any(isinstance(node, (cst.FunctionDef, cst.Lambda)) for node in inside)


def _outermost(trail: Trail, target: Target) -> Trail:
    """The statement of the target's own body around a statement."""
    depth = len(target.trail) + (not isinstance(target.node, cst.Module))  # classes and functions have a block between
    return trail[: depth + 1]


def _distinct(trails: list[Trail]) -> list[Trail]:
    return list({id(trail[-1]): trail for trail in trails}.values())


def _mismatch(target: Target, place: Place, candidates: list[Trail], found: list[Found]) -> PlaceError:
    count = "at least one place" if place.count == 0 else f"{place.count} place{'s' * (place.count != 1)}"
    forms = f" (form {' or '.join(place.fingerprints)})" if place.fingerprints else ""
    if found:
        shown, verdict = [item.trail for item in found], f"{len(found)}:"
    elif len(candidates) <= len(target.statements) // 2 or place.call or place.binds or place.assigns:
        shown, verdict = candidates, "none of this form" + (", but:" if candidates else " and nothing like it")
    else:  # any statement would be a candidate
        shown, verdict = [], f"none of this form among its {len(candidates)} statements and expressions"
    lines = [f"expected: {count}: {place.says}{forms}", f"found:    {verdict}"]
    for trail in shown[:_SHOWN_CANDIDATES]:
        lines.append(target.source.excerpt(trail[-1]) + f"   (form {target.form(trail[-1]).fingerprint})")
    return PlaceError(
        "\n".join(lines),
        where=target.where,
        remedy="compare with docs/patches.md; make the change by hand, or report the fork's form of this place",
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m megatron_t1.patching.places", description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("target", help='dotted name of a function or class, "" for the file')
    parser.add_argument("--expressions", action="store_true", help="also arguments of calls and returned values")
    options = parser.parse_args()
    source = Source.parse(Path(options.file).read_bytes(), options.file)
    target = source.target(options.target)
    shown = list(target.statements)
    if options.expressions:
        shown += [t for t in target.expressions if isinstance(t[-2], (cst.Arg, cst.Return))]
    for trail in shown:
        shape = target.form(trail[-1])
        names = " ".join(f"@{i}={name}" for i, name in enumerate(shape.names))
        print(f"{shape.fingerprint}  {names}\n{source.excerpt(trail[-1])}")


if __name__ == "__main__":
    main()
