"""Commands in README and docs can be pasted: they exist, their options too, and what explains them is a comment."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megatron_t1.cli import find_command, parse
from megatron_t1.config.compose import OPEN_KEYS, flatten, group_names, parse_overrides
from megatron_t1.config.schema import Config

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^( *)```\w*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
PROSE = re.compile(r" {3,}(?![#-])\S")  # words far behind a command, which a shell would take for arguments
GROUPS, OPTIONS = group_names([ROOT / "conf"]), flatten(Config())
OPEN = tuple(f"{key}." for key in OPEN_KEYS)
OURS = ("t1", "sbatch", "srun", "apptainer", "enroot", "make")


def commands(path: Path) -> list[str]:
    """Lines of code blocks that begin with a command, continued ones joined."""
    found = []
    for block in BLOCK.finditer(path.read_text()):
        lines = re.sub(r"\\\n\s*", " ", block[2]).splitlines()
        stripped = (line.strip().removeprefix("$ ") for line in lines)
        found += [line for line in stripped if re.match(rf"({'|'.join(OURS)}) \S", line)]
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_can_be_pasted(path):
    for line in commands(path):
        assert not PROSE.search(line), f"{path.name}: not a comment: {line}"
        words = shlex.split(line, comments=True)
        if words[0] != "t1" or "..." in words:
            continue
        command, rest = find_command(words[1:])
        invocation = parse(command, rest)
        if not command.configured:
            continue
        for override in parse_overrides(invocation.arguments):
            name = override.key_or_group
            if name in GROUPS and not override.is_sweep_override():
                assert str(override.value()) in GROUPS[name], f"{path.name}: {line}"
            assert name in GROUPS or name in OPTIONS or name.startswith(OPEN), f"{path.name}: {line}"


def test_documents_have_commands():
    assert sum(len(commands(path)) for path in DOCUMENTS) > 60
