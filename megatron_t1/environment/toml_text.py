"""Python values as TOML text: the standard library reads TOML and doesn't write it."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def toml_document(sections: Mapping[str, Any]) -> str:
    """Values first, then one [table] each; tables inside of tables are written inline. None is left out.

    Raises:
        TypeError: a value that TOML has no form for.
    """
    values = {name: value for name, value in sections.items() if not isinstance(value, Mapping) and value is not None}
    tables = {name: value for name, value in sections.items() if isinstance(value, Mapping)}
    blocks = [_lines(values), *(f"[{_key(name)}]\n{_lines(table)}" for name, table in tables.items())]
    return "\n\n".join(block.rstrip() for block in blocks if block.strip()) + "\n"


def quoted(text: str) -> str:
    """A basic string: JSON's escapes are TOML's, but for DEL and lone surrogates, which TOML doesn't allow."""
    safe = text.encode("utf-8", errors="replace").decode("utf-8")
    return json.dumps(safe, ensure_ascii=False).replace("\x7f", "\\u007f")


def _lines(table: Mapping[str, Any]) -> str:
    return "\n".join(f"{_key(name)} = {_value(value)}" for name, value in table.items() if value is not None)


def _key(name: object) -> str:
    return str(name) if _BARE.fullmatch(str(name)) else quoted(str(name))


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Mapping):
        items = (f"{_key(name)} = {_value(item)}" for name, item in value.items() if item is not None)
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value if item is not None) + "]"
    raise TypeError(f"TOML has no form for {value!r}")
