"""The Makefile does what it and the documents say it does: a target without a recipe succeeds and does nothing."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][\w-]*):(?!=)", MAKEFILE, re.MULTILINE))


def test_every_phony_target_has_a_recipe_and_every_target_is_phony():
    (line,) = re.findall(r"^\.PHONY:(.*)$", MAKEFILE, re.MULTILINE)
    assert set(line.split()) == TARGETS


def test_help_and_documents_name_targets_that_are_there():
    named = set(re.findall(r'echo "make ([a-z][\w-]*)', MAKEFILE))
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        # As code: in backquotes, or at the beginning of a line of an example.
        named |= set(re.findall(r"(?:`|^)make ([a-z][\w-]*)(?=[`\s])", path.read_text(), re.MULTILINE))
    assert named - TARGETS == set()
    assert len(named) > 20
