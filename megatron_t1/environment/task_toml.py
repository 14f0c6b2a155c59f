"""task.toml in Harbor's schema (versions 1.0 to 1.4): the type of every field, and what contradicts what.

`check_document` looks and reports; nothing is changed, guessed or dropped. A field that the schema doesn't know is no
error, since newer versions add some: it is reported by name and kept.
"""

from __future__ import annotations

import math
import re
import reprlib
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

NEWEST_SCHEMA = (1, 4)
NETWORK_MODES = ("public", "no-network", "allowlist")
MAX_SECONDS = 1e7
MAX_STEP_NAME_BYTES = 255
MAX_REWARD = 1e9

Rule = Callable[[Any], str]  # what is wrong with a value, "" for nothing

_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_VERSION = re.compile(r"\d{1,4}(\.\d{1,4})*")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMG])\s*", re.IGNORECASE)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STEP = re.compile(r'[^<>:"/\\|?*\x00-\x1f\x7f]*[^<>:"/\\|?*\x00-\x1f\x7f. ]')
_TOPOLOGY = re.compile(r"[1-9]\d*(x[1-9]\d*)+")
_shorten = reprlib.Repr()
_shorten.maxstring = _shorten.maxother = 80


def shown(value: Any) -> str:
    """`repr`, cut to a readable length and depth."""
    return _shorten.repr(value)


@dataclass(frozen=True)
class Required:
    """A field that its table must have."""

    rule: Any


@dataclass
class Findings:
    """Attributes:
    problems: "field: what is wrong with it", in the order of the document.
    unknown: dotted name -> value of each field that the schema doesn't have.
    """

    problems: list[str] = field(default_factory=list)
    unknown: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, problem: str) -> None:
        self.problems.append(f"{name}: {problem}")


def is_text(value: Any) -> str:
    if not isinstance(value, str):
        return "is not a text"
    return "holds a NUL character" if "\0" in value else ""


def is_number(value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return "" if number and abs(value) < math.inf else "is not a number"  # an integer may exceed every float


def is_seconds(value: Any) -> str:
    return "" if not is_number(value) and 0 < value < MAX_SECONDS else "is not a positive number of seconds"


def is_delay(value: Any) -> str:
    return "" if not is_number(value) and 0 <= value < MAX_SECONDS else "is not a number of seconds"


def is_count(value: Any) -> str:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return "" if whole and 0 <= value < 1 << 40 else "is not a whole number, 0 or more"


def is_amount(value: Any) -> str:
    return "" if not is_number(value) and 0 <= value < 1 << 40 else "is not a number, 0 or more"


def is_flag(value: Any) -> str:
    return "" if isinstance(value, bool) else "is not true or false"


def is_texts(value: Any) -> str:
    return "" if isinstance(value, list) and not any(map(is_text, value)) else "is not a list of texts"


def is_environment(value: Any) -> str:
    if not isinstance(value, dict) or any(map(is_text, value.values())):
        return "is not a table of texts"
    odd = [name for name in value if not _VARIABLE.fullmatch(name)]
    return f"has {shown(odd[0])}, which is no name of a variable" if odd else ""


def is_user(value: Any) -> str:
    return is_text(value) and is_count(value) and "is not a user's name or number"


def is_workdir(value: Any) -> str:
    return is_text(value) or ("" if not value or value.startswith("/") else "is not an absolute path")


def is_package(value: Any) -> str:
    ok = isinstance(value, str) and _PACKAGE.fullmatch(value) and ".." not in value
    return "" if ok else "is not of the form organisation/name"


def is_version(value: Any) -> str:
    if not isinstance(value, str) or not _VERSION.fullmatch(value):
        return 'is not a version such as "1.4"'
    if int(value.split(".")[0]) > NEWEST_SCHEMA[0]:
        return f"is a version that this reader doesn't know (up to {NEWEST_SCHEMA[0]}.{NEWEST_SCHEMA[1]})"
    return ""


def is_size(value: Any) -> str:
    return "" if isinstance(value, str) and _SIZE.fullmatch(value) else 'is not a size such as "2G" or "512M"'


def is_step_name(value: Any) -> str:
    fits = (
        isinstance(value, str) and _STEP.fullmatch(value) and len(value.encode(errors="replace")) <= MAX_STEP_NAME_BYTES
    )
    return "" if fits else "is not a name that every file system takes"


def is_reward(value: Any) -> str:
    return "" if not is_number(value) and abs(value) <= MAX_REWARD else "is not a number"


def is_threshold(value: Any) -> str:
    if isinstance(value, dict):
        return "" if not any(map(is_reward, value.values())) else "is not a table of numbers"
    return is_reward(value) and "is not a number or a table of numbers"


def is_topology(value: Any) -> str:
    return "" if isinstance(value, str) and _TOPOLOGY.fullmatch(value.strip()) else "is not a topology such as 2x2x1"


def is_anything(value: Any) -> str:
    return ""


def one_of(*choices: str) -> Rule:
    def rule(value: Any) -> str:
        known = isinstance(value, str) and value.lower() in choices
        return "" if known else f"is none of {', '.join(choices)}"

    return rule


def size_in_mb(value: str) -> int:
    """Of the older fields `memory` and `storage`; the unit stands for 1,024 of the next smaller one."""
    number, unit = _SIZE.fullmatch(value).groups()
    return int(float(number) * {"K": 1 / 1024, "M": 1, "G": 1024}[unit.upper()])


_NETWORK = {"network_mode": one_of(*NETWORK_MODES), "allowed_hosts": is_texts}
_HEALTHCHECK = {
    "command": Required(is_text),
    "interval_sec": is_delay,
    "timeout_sec": is_seconds,
    "start_period_sec": is_delay,
    "start_interval_sec": is_delay,
    "retries": is_count,
}
_ENVIRONMENT = {
    **_NETWORK,
    "build_timeout_sec": is_seconds,
    "docker_image": is_text,
    "os": one_of("linux", "windows"),
    "cpus": is_amount,
    "memory_mb": is_count,
    "storage_mb": is_count,
    "gpus": is_count,
    "gpu_types": is_texts,
    "tpu": {"type": Required(is_text), "topology": Required(is_topology)},
    "mcp_servers": [
        {
            "name": Required(is_text),
            "transport": one_of("stdio", "sse", "streamable-http", "http"),
            "url": is_text,
            "command": is_text,
            "args": is_texts,
            "headers": lambda value: (
                "" if isinstance(value, dict) and not any(map(is_text, value.values())) else "is not a table of texts"
            ),
        }
    ],
    "env": is_environment,
    "skills_dir": is_text,
    "healthcheck": _HEALTHCHECK,
    "workdir": is_workdir,
    "allow_internet": is_flag,
    "memory": is_size,
    "storage": is_size,
}
_AGENT = {**_NETWORK, "timeout_sec": is_seconds, "user": is_user}
_VERIFIER = {
    **_NETWORK,
    "timeout_sec": is_seconds,
    "env": is_environment,
    "user": is_user,
    "environment_mode": one_of("shared", "separate"),
    "environment": _ENVIRONMENT,
    "collect": [{"command": Required(is_text), "service": is_text, "timeout_sec": is_seconds, "user": is_user}],
}
_ARTIFACT = {"source": Required(is_text), "destination": is_text, "exclude": is_texts, "service": is_text}
SCHEMA: dict[str, Any] = {
    "schema_version": is_version,
    "version": is_version,  # the older name of schema_version
    "source": is_text,
    "artifacts": [_ARTIFACT],  # or plain texts
    "multi_step_reward_strategy": one_of("mean", "final"),
    "task": {
        "name": Required(is_package),
        "version": is_text,
        "description": is_text,
        "authors": [{"name": Required(is_text), "email": is_text}],
        "keywords": is_texts,
    },
    "metadata": {},  # anything may stand here; see `check_document`
    "agent": _AGENT,
    "verifier": _VERIFIER,
    "environment": _ENVIRONMENT,
    "solution": {"env": is_environment},
    "steps": [
        {
            "name": Required(is_step_name),
            "agent": _AGENT,
            "verifier": _VERIFIER,
            "min_reward": is_threshold,
            "healthcheck": _HEALTHCHECK,
            "artifacts": [_ARTIFACT],
        }
    ],
}


def check_document(raw: dict[str, Any]) -> Findings:
    """Everything that is wrong or unknown in a parsed task.toml."""
    found = Findings()
    metadata = raw.get("metadata", {})
    _walk({name: value for name, value in raw.items() if name != "metadata"}, SCHEMA, "", found)
    if not isinstance(metadata, dict):
        found.add("metadata", f"{shown(metadata)} is not a table")
    else:
        baseline = metadata.get("baseline", -1)
        if isinstance(baseline, bool) or not isinstance(baseline, int) or baseline < -1:
            found.add("metadata.baseline", f"{shown(baseline)} is not a number of checks")
    if not found.problems:  # what follows needs fields of the right types
        for name, problem in _contradictions(raw):
            found.add(name, problem)
    return found


def _walk(value: Any, schema: Any, name: str, found: Findings) -> None:
    if isinstance(schema, Required):
        _walk(value, schema.rule, name, found)
    elif isinstance(schema, list):
        if not isinstance(value, list):
            found.add(name, f"{shown(value)} is not a list")
            return
        for index, item in enumerate(value):
            if not (schema[0] is _ARTIFACT and isinstance(item, str)):
                _walk(item, schema[0], f"{name}[{index}]", found)
    elif isinstance(schema, dict):
        if not isinstance(value, dict):
            found.add(name, f"{shown(value)} is not a table")
            return
        prefix = f"{name}." if name else ""
        for key, item in value.items():
            if key in schema:
                _walk(item, schema[key], prefix + key, found)
            else:
                found.unknown[prefix + key] = item
        for key, rule in schema.items():
            if isinstance(rule, Required) and key not in value:
                found.add(prefix + key, "missing")
    elif problem := schema(value):
        found.add(name, f"{shown(value)} {problem}")


def _contradictions(raw: dict[str, Any]) -> Iterable[tuple[str, str]]:
    """(field, problem) of fields that are well formed and don't fit each other."""
    steps = raw.get("steps", [])
    seen: dict[str, str] = {}
    for index, step in enumerate(steps):
        key = unicodedata.normalize("NFC", step["name"]).casefold()
        if key in seen:
            yield f"steps[{index}].name", f"{shown(step['name'])} is taken by another step, {shown(seen[key])}"
        seen[key] = step["name"]
    sections = [("", raw), *((f"steps[{index}].", step) for index, step in enumerate(steps))]
    for prefix, section in sections:
        verifier = section.get("verifier", {})
        if verifier.get("environment_mode") == "shared" and "environment" in verifier:
            yield f"{prefix}verifier.environment", "contradicts environment_mode = 'shared'"
        tables = {name: section.get(name, {}) for name in ("environment", "agent", "verifier")}
        tables["verifier.environment"] = verifier.get("environment", {})
        for name, table in tables.items():
            yield from _network(f"{prefix}{name}", table)
        for name in ("environment", "verifier.environment"):
            yield from _environment(f"{prefix}{name}", tables[name])
        for index, artifact in enumerate(section.get("artifacts", [])):
            artifact = {"source": artifact} if isinstance(artifact, str) else artifact
            for key in ("source", "destination"):
                if ".." in artifact.get(key, "").split("/") or (key, artifact.get(key, "")[:1]) == ("destination", "/"):
                    yield f"{prefix}artifacts[{index}].{key}", f"{shown(artifact[key])} leaves its folder"


def _network(name: str, table: dict[str, Any]) -> Iterable[tuple[str, str]]:
    if table.get("allowed_hosts") and str(table.get("network_mode", "")).lower() != "allowlist":
        yield f"{name}.allowed_hosts", "needs network_mode = 'allowlist'"


def _environment(name: str, table: dict[str, Any]) -> Iterable[tuple[str, str]]:
    for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
        if old in table and new in table and size_in_mb(table[old]) != table[new]:
            yield f"{name}.{old}", f"{table[old]!r} contradicts {new} = {table[new]}"
    for index, server in enumerate(table.get("mcp_servers", [])):
        needed = "command" if server.get("transport") == "stdio" else "url"
        if not server.get(needed):
            yield f"{name}.mcp_servers[{index}].{needed}", "missing, which its transport needs"
