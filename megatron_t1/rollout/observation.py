"""What the model reads of a command."""

from __future__ import annotations

from megatron_t1.environment.sandbox.interface import CommandResult


def observation_text(result: CommandResult, limit: int) -> str:
    """Its output, `ok` for none, `error STATUS ...` for a failure.

    The output is cut to `limit` characters, head and tail are kept.
    """
    output = clip(result.output.rstrip(), limit)
    if result.timed_out:
        return f"error timeout {output}".rstrip()
    if result.exit_code == 0:
        return output or "ok"
    status = "shell ended" if result.exit_code is None else result.exit_code
    return f"error {status} {output}".rstrip()


def clip(text: str, limit: int) -> str:
    """Head and tail of a text longer than `limit` characters, with the cut marked."""
    if len(text) <= limit:
        return text
    half = max(1, (limit - 5) // 2)
    return f"{text[:half]} ... {text[-half:]}"
