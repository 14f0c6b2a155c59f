"""The one tool of a terminal agent, as chat templates are told of it, and what a model may write when it calls it."""

from __future__ import annotations

import json
from typing import Any

SYSTEM = (
    "You work in a Linux terminal. Call bash with one command at a time; directory and environment stay as you leave "
    "them. When the task is done, answer without a call."
)
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in the shell and read its output.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command."}},
            "required": ["command"],
        },
    },
}
SUBMISSION = "done"


def call_message(command: str, call_id: str, *, as_text: bool = False) -> dict[str, Any]:
    """An assistant's message that calls bash; `as_text`: arguments as JSON text, as the OpenAI wire has them."""
    arguments: Any = {"command": command}
    if as_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    call = {"id": call_id, "type": "function", "function": {"name": "bash", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def command_argument(arguments: Any) -> str | None:
    """The command of a call whose arguments are a mapping or its JSON text (transformers#45419)."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    command = arguments.get("command") if isinstance(arguments, dict) else None
    return command if isinstance(command, str) else None
