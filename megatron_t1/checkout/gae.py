"""With which options of GAE the numbers in --t1-values were computed: `gae.json` beside the sidecars. No torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_t1.atomic import write_json
from megatron_t1.config.schema import GaeConfig

FILE = "gae.json"


def write_gae(directory: Path, options: GaeConfig) -> None:
    write_json(directory / FILE, dataclasses.asdict(options))


def gae_problem(directory: Path, wanted: Mapping[str, Any]) -> str:
    """Why the values in `directory` aren't those of the `wanted` options (name -> value); "" where they are.

    Values that this project's trainer computed don't say how: with them no option can be asked for.
    """
    try:
        stored = json.loads((directory / FILE).read_text())
        wrong = {name: value for name, value in wanted.items() if stored[name] != value}
        different = [f"{_flag(name)} is {value}, they have {stored[name]}" for name, value in wrong.items()]
    except FileNotFoundError:
        different = [f"{_flag(name)} is given, and nothing says what they have" for name in wanted]
    except (ValueError, KeyError, TypeError) as error:
        different = [f"{FILE} can't be read: {error!r}"]
    if not different:
        return ""
    return (
        f"the values in {directory} were computed before, with options of their own: {'; '.join(different)}. Leave the "
        "options out, or let the critic compute values into another directory"
    )


def _flag(name: str) -> str:
    return f"--t1-gae-{name.replace('_', '-')}"
