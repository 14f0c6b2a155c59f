"""How a template writes a call of the shell, learnt from an example that the template rendered; and how to read one.

Two kinds of syntax are in use. The command is a string inside a JSON object (`{"name": "bash", "arguments": {...}}`
between markers), or stands as it is between markers (`<parameter=command>...</parameter>`). A template without tools
gets a fenced block, which the system message then asks for.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from megatron_t1.rollout.formats.protocol import ONE_CALL, Command, FormatProblem, command_problem
from megatron_t1.rollout.formats.shell_tool import command_argument

# What is rendered as the command of the example: the quote tells JSON from plain text.
LEFT, RIGHT = "\ue002command", "command\ue003"
REASONING, REASONING_END = "<think>", "</think>"
EXAMPLE = f'{LEFT}"{RIGHT}'


@dataclass(frozen=True)
class CallSyntax:
    """Text before and after the variable part of a call: a JSON object (`json`) or the command itself.

    `path`: keys from the object to the command; `name_path`: to the tool's name, empty where it stands outside.
    """

    before: str
    after: str
    json: bool = False
    path: tuple[str, ...] = ()
    name_path: tuple[str, ...] = ()

    def write(self, command: str) -> str:
        """A call in this syntax; JSON calls are written by the template instead."""
        return f"{self.before}{command}{self.after}"

    def read(self, text: str) -> Command | FormatProblem | None:
        """The call in `text` (a turn without its reasoning); None: it has none."""
        pattern = _loosely(self.before)
        starts = list(re.finditer(pattern, text)) if pattern else []
        if not pattern:
            if not text.lstrip().startswith("{"):
                return None
            starts = [re.match(r"\s*", text)]
        if not starts:
            marker = _marker(self.before)
            return FormatProblem(ONE_CALL) if marker and marker in text else None
        if len(starts) > 1:
            return FormatProblem(ONE_CALL)
        rest = text[starts[0].end() :]
        return self._read_json(rest) if self.json else self._read_plain(rest)

    def _read_plain(self, rest: str) -> Command | FormatProblem:
        end = re.search(_loosely(self.after) or r"\s*\Z", rest)
        if end is None:
            return FormatProblem(ONE_CALL)
        if rest[end.end() :].strip():
            return FormatProblem("text after call")
        return _checked(rest[: end.start()])

    def _read_json(self, rest: str) -> Command | FormatProblem:
        rest = rest.lstrip()
        try:
            found, length = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):
            return FormatProblem("call: invalid json")
        tail = rest[length:].strip()
        end = re.match(_loosely(self.after), tail)
        if end is None or (not self.before and tail.startswith("{")):
            return FormatProblem(ONE_CALL)
        if tail[end.end() :]:
            return FormatProblem("text after call")
        name = _at(found, self.name_path) if self.name_path else "bash"
        if name != "bash":
            return FormatProblem(f"no tool {str(name)[:40]!r}")
        return _checked(command_argument({"command": _at(found, self.path)}))


FENCED = CallSyntax("```bash\n", "\n```")
FENCED_ADVICE = "Write the command of a turn as one block that begins with ```bash and ends with ```."


def learn(turn: str) -> CallSyntax | None:
    """The syntax of a rendered turn that calls bash with the command `EXAMPLE`; None when it can't be found.

    Args:
        turn: from where the turn is sampled up to its end token (exclusive).
    """
    if turn.count(EXAMPLE) == 1:
        before, _, after = turn.partition(EXAMPLE)
        return CallSyntax(_after_reasoning(before).lstrip(), after.rstrip()) if _marker(before) else None
    for start in (match.start() for match in re.finditer(r"\{", turn)):
        try:
            found, length = json.JSONDecoder().raw_decode(turn[start:])
        except (ValueError, RecursionError):
            continue
        path = _path_to(found, EXAMPLE)
        if path is not None:
            before, after = _after_reasoning(turn[:start]).strip(), turn[start + length :].strip()
            return CallSyntax(before, after, True, path, _path_to(found, "bash") or ())
    return None


def _after_reasoning(text: str) -> str:
    return text.rpartition(REASONING_END)[2]


def _checked(text: str | None) -> Command | FormatProblem:
    problem = command_problem(text)
    return FormatProblem(problem) if problem else Command(text.strip())


def _loosely(text: str) -> str:
    """A pattern for `text` in which the amount of white space doesn't matter."""
    return r"\s*".join(re.escape(word) for word in text.split())


def _marker(text: str) -> str:
    """The first word of a call's beginning: where it stands alone, the call was begun and not completed."""
    return text.split()[0] if text.split() else ""


def _at(value, path: tuple[str, ...]):
    """The value at `path`; objects on the way may be JSON text (transformers#45419)."""
    for key in path:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                return None
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _path_to(value, wanted: str) -> tuple[str, ...] | None:
    if isinstance(value, str) and value != wanted and wanted in value:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if value == wanted:
        return ()
    if isinstance(value, dict):
        for key, inner in value.items():
            found = _path_to(inner, wanted)
            if found is not None:
                return (key, *found)
    return None
