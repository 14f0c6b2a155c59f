"""The conformance table: every chat format of `renderers` and some Jinja templates, through every case.

    python benchmarks/conformance.py [--turns N] [--write FILE] [FORMAT ...]

Prints the table as Markdown; --write puts it into FILE between the two marks there (docs/chat-formats.md). Ends with
status 1 when a case fails. The cases are tests/conformance/cases.py.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the tests' cases

from driving import write_between

from megatron_t1.config.targets import renderers_families
from megatron_t1.errors import T1Error
from megatron_t1.rollout.formats import ConversationRefused, load_format
from tests.conformance.cases import CASES
from tests.conformance.templates import TEMPLATES
from tests.conformance.turns import Turns
from tests.conformance.vocabularies import available_families, family_directory, qwen35, small

REAL = "qwen3.5, its own vocabulary"
FAILED = "**FAILS**"


def formats() -> list[str]:
    return [*renderers_families(), REAL, *(f"template: {name}" for name in TEMPLATES)]


def load(name: str, directory: Path):
    """(chat format, name of its manner of writing turns)."""
    if name == REAL:
        return load_format("renderers:qwen3.5", qwen35(directory)), "qwen3.5"
    kind, _, template_name = name.partition(": ")
    if kind == "template":
        template = TEMPLATES[template_name]
        tokens = {"bos_token": template.bos_token, "eos_token": template.eos_token}
        return load_format("template", small(directory, template.names, template.source, **tokens)), template_name
    return load_format(f"renderers:{name}", family_directory(directory, name)), name


def row(name: str, turns: int) -> list[str]:
    """One cell for each case."""
    if name in renderers_families() and name not in available_families():
        return ["not tested here: its vocabulary isn't in $TIKTOKEN_ENCODINGS_BASE", *[""] * (len(CASES) - 1)]
    with tempfile.TemporaryDirectory() as directory:
        try:
            chat, manner = load(name, Path(directory))
        except T1Error as error:
            problem = error.problem.rpartition(": ")[2].partition(" (")[0]
            return [f"can't be used: {problem}", *[""] * (len(CASES) - 1)]
        cells = []
        for case in CASES.values():
            try:
                cells.append(case(chat, Turns(chat, manner), turns))
            except ConversationRefused:
                cells.append("refused by the proof")
            except Exception as error:  # whatever a case meets belongs into the table
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
                cells.append(FAILED)
        return cells


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--write", type=Path)
    parser.add_argument("formats", nargs="*", metavar="FORMAT")
    options = parser.parse_args()
    names = options.formats or formats()
    unknown = sorted(set(names) - set(formats()))
    if unknown:
        parser.error(f"unknown formats {unknown}; there are {', '.join(formats())}")
    lines = [f"| format | {' | '.join(CASES)} |", "|---" * (len(CASES) + 1) + "|"]
    for name in names:
        began = time.monotonic()
        lines.append(f"| {name} | {' | '.join(row(name, options.turns))} |")
        print(lines[-1], f"({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)
    lines.append(f"\nWith renderers {version('renderers')}, {options.turns} turns.")
    table = "\n".join(lines)
    print(table)
    if options.write:
        write_between(options.write, "conformance table", table)
    return 1 if FAILED in table else 0


if __name__ == "__main__":
    sys.exit(main())
