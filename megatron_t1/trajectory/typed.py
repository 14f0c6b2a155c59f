"""JSON from outside against the shape it must have, before anything computes with it; the first misfit is named.

A shape is one of the predicates below, a tuple of shapes (any of them), a list of one shape (a list of such values), or
a dict: name -> shape of the field, "name?" of one that may be absent, and None -> shape of fields of any other name.
"""

from __future__ import annotations

from typing import Any

INTEGER_LIMIT = 1 << 63  # what numpy and every writer of ours holds
SHOWN = 40  # characters of a wrong value


def integer(value: Any) -> bool:
    return type(value) is int and -INTEGER_LIMIT <= value < INTEGER_LIMIT


def number(value: Any) -> bool:
    return type(value) is float or integer(value)


def text(value: Any) -> bool:
    return isinstance(value, str)


def truth(value: Any) -> bool:
    return isinstance(value, bool)


def nothing(value: Any) -> bool:
    return value is None


def anything(_: Any) -> bool:
    return True


def check(value: Any, shape: Any, name: str) -> Any:
    """Return `value`; raise ValueError, naming the field below `name`, where it isn't of this shape."""
    if isinstance(shape, tuple):
        if not any(fits(value, option) for option in shape):
            raise ValueError(f"{name} is {_few(value)}, expected {' or '.join(map(_called, shape))}")
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise ValueError(f"{name} is {_few(value)}, expected {_called(shape)}")
        for index, item in enumerate(value):
            check(item, shape[0], f"{name}[{index}]")
    elif isinstance(shape, dict):
        _check_fields(value, shape, name)
    elif not shape(value):
        raise ValueError(f"{name} is {_few(value)}, expected {_called(shape)}")
    return value


def fits(value: Any, shape: Any) -> bool:
    try:
        check(value, shape, "")
    except ValueError:
        return False
    return True


def _check_fields(value: Any, shape: dict[str | None, Any], name: str) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {_few(value)}, expected {_called(shape)}")
    fields = {field.removesuffix("?"): (field, of) for field, of in shape.items() if field is not None}
    for field, (written, _) in fields.items():
        if field not in value and not written.endswith("?"):
            raise ValueError(f"{name} has no {field!r}")
    for field, item in value.items():
        if field in fields:
            check(item, fields[field][1], f"{name}.{field}")
        elif None in shape:
            check(item, shape[None], f"{name}[{_few(field)}]")
        else:
            raise ValueError(f"{name} has an unknown field {_few(field)}")


def _called(shape: Any) -> str:
    if isinstance(shape, list):
        return "a list"
    if isinstance(shape, dict):
        return "an object"
    return {integer: "a whole number", number: "a number", text: "text", truth: "true or false", nothing: "null"}.get(
        shape, getattr(shape, "__name__", "something else")
    )


def _few(value: Any) -> str:
    if isinstance(value, int) and not integer(value) and not isinstance(value, bool):
        return "a number beyond 64 bits"
    shown = ascii(value)
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."
