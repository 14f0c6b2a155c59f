"""Limits of what a chat template may compute: it is a program from outside, and one that never ends would end a phase.

Counted are the steps of loops, calls and filters with the sizes of what they are given, and what is written; looked at
are the sizes of results that arithmetic, calls and filters make. Everything is refused by count, not by the clock, so
that a template fails on every machine or on none.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_t1.errors import T1Error

STEPS = 10_000_000  # of one rendering; some seconds
SIZE_MAX = 1 << 28  # characters or elements of one value, and of all that is written together
CHARACTERS_PER_STEP = 1024
WIDTH_MAX = 1 << 20  # numbers given to calls and filters: widths, indentations, ...
BITS_MAX = 1 << 16
STEPS_OF_CALL = 20  # a call takes about as long as so many passes of an empty loop
_WIDE = re.compile(r"\d{7,}|%[^a-zA-Z%]*\*")  # in a format: a width of millions, or one that is an argument

_left: ContextVar[list[int] | None] = ContextVar("steps and characters that a rendering has left", default=None)


class TemplateTooCostly(T1Error):
    """A rendering went beyond its limits."""


@contextmanager
def budget() -> Iterator[None]:
    """One rendering: it may take STEPS and write SIZE_MAX characters."""
    token = _left.set([STEPS, SIZE_MAX])
    try:
        yield
    finally:
        _left.reset(token)


class BudgetEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which templates are counted (see `budget`)."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any):
        super().__init__(finalize=_written, **options)
        self.globals["range"] = _counted(range)
        for name, function in self.filters.items():
            self.filters[name] = _counted(function)
        self.filters.update(_each=_each, _sized=_sized)

    def _parse(self, *arguments: Any) -> nodes.Template:
        """Every loop goes over counted elements; every `~` makes a value of a checked size."""
        template = super()._parse(*arguments)
        for loop in template.find_all(nodes.For):
            loop.iter = _through("_each", loop.iter)
        _replace_concatenations(template)
        return template

    def call(self, context: Any, function: Any, *arguments: Any, **named: Any) -> Any:
        text = getattr(getattr(function, "__wrapped__", function), "__self__", "")  # of "...".format(...)
        _require_narrow(text if getattr(function, "__name__", "") in ("format", "format_map") else "")
        _charge(arguments, named)
        return _sized(super().call(context, function, *arguments, **named))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            sizes = _size(left), _size(right)
            repeats = [number for number in (left, right) if isinstance(number, int)]
            if any(sizes) and repeats and max(sizes) * repeats[0] > SIZE_MAX:
                raise _too_costly("a value that is too large")
            _require_bits(sum(number.bit_length() for number in repeats))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _require_bits(left.bit_length() * max(right, 0))
        elif operator == "%" and isinstance(left, str):
            _require_narrow(left)
        _spend(1)
        return _sized(super().call_binop(context, operator, left, right))


def _counted(function: Callable) -> Callable:
    @functools.wraps(function, updated=("__dict__",) if hasattr(function, "__dict__") else ())
    def counted(*arguments: Any, **named: Any) -> Any:
        if function is not range:  # whose numbers are what the loop over it is counted by
            _charge(arguments, named)
            if function.__name__ == "do_format":
                _require_narrow(str(arguments[0]))
        made = function(*arguments, **named)
        if function is range:
            _spend(len(made))
        return _sized(made)

    return counted


def _each(values: Iterable) -> Iterator:
    for value in values:
        _spend(1)
        yield value


def _written(value: Any) -> Any:
    left = _left.get()
    if left is not None:
        left[1] -= len(value) if isinstance(value, str) else 0
        if left[1] < 0:
            raise _too_costly(f"more than {SIZE_MAX:,} characters")
    return value


def _sized(value: Any) -> Any:
    if _size(value) > SIZE_MAX:
        raise _too_costly("a value that is too large")
    return value


def _charge(arguments: tuple, named: dict[str, Any]) -> None:
    cost = STEPS_OF_CALL
    for value in (*arguments, *named.values()):
        if type(value) is int and value > WIDTH_MAX:
            raise _too_costly(f"the number {value:.3g} as a width")
        cost += _size(value) // CHARACTERS_PER_STEP if isinstance(value, str) else _size(value)
    _spend(cost)


def _spend(steps: int) -> None:
    left = _left.get()
    if left is not None:
        left[0] -= steps
        if left[0] < 0:
            raise _too_costly(f"more than {STEPS:,} steps")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple, dict, range)) else 0


def _require_narrow(form: Any) -> None:
    if isinstance(form, str) and _WIDE.search(form):
        raise _too_costly("a format that is too wide")


def _require_bits(bits: int) -> None:
    if bits > BITS_MAX:
        raise _too_costly("a number that is too large")


def _too_costly(what: str) -> TemplateTooCostly:
    return TemplateTooCostly(f"the rendering needs {what}")


def _through(name: str, node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _replace_concatenations(node: nodes.Node) -> None:
    for name, value in list(node.iter_fields()):
        inside = value if isinstance(value, list) else [value]
        for index, inner in enumerate(inside):
            if isinstance(inner, nodes.Node):
                _replace_concatenations(inner)
                if isinstance(inner, nodes.Concat):
                    inside[index] = _through("_sized", inner)
        if not isinstance(value, list):
            setattr(node, name, inside[0])
