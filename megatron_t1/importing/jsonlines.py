"""The JSON-lines form: one trajectory on each line; docs/token-streams.md describes the fields."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron_t1.errors import T1Error
from megatron_t1.importing.exchanges import ForeignTurn
from megatron_t1.importing.foreign import Foreign, contract_of, plain_name
from megatron_t1.importing.routes import listed_routes
from megatron_t1.importing.values import count, entries, label, logprobs, number, numbers, parse_json, shown, token_ids
from megatron_t1.regular import open_regular
from megatron_t1.trajectory.contract import SamplingContract

FIELDS = frozenset("id task ids mask logprobs routes turn policy reward passed total contract exchanges".split())
EXCHANGE_FIELDS = frozenset({"prompt_ids", "completion_ids", "logprobs"})


def read_lines(path: str | Path, contract: SamplingContract | None = None) -> Iterator[Foreign]:
    """The trajectories of a file.

    Args:
        contract: of lines that state none.

    Raises:
        T1Error: names the line, the field and what is wrong with it.
    """
    path = Path(path)
    try:
        with open_regular(path) as file:
            for at, line in enumerate(io.TextIOWrapper(file, encoding="utf-8"), 1):
                if line.strip():
                    yield _foreign(line, f"{path.name}, line {at}", contract, f"{path.stem}-{at}")
    except (OSError, UnicodeDecodeError) as error:
        raise T1Error(f"can't be read: {error}", where=str(path)) from error


def _foreign(line: str, where: str, contract: SamplingContract | None, default_name: str) -> Foreign:
    raw = parse_json(line, where)
    if not isinstance(raw, dict) or "ids" not in raw or "mask" not in raw:
        raise T1Error("expected an object with at least ids and mask", where=where)
    _require_known(raw, FIELDS, where)
    ids = token_ids(raw["ids"], "ids", where)
    mask = numbers(raw["mask"], "mask", where)
    if not np.isin(mask, (0, 1)).all():
        raise T1Error("mask holds something else than 0 and 1", where=where)
    found = contract_of(raw["contract"], where) if "contract" in raw else contract
    routes, routed = listed_routes(raw.get("routes"), found, where)
    called = label(raw.get("id"), "id", where) or default_name
    name = plain_name(called)
    return Foreign(
        name=name,
        called=called,
        task=label(raw.get("task"), "task", where) or name,
        ids=ids,
        mask=mask == 1,
        logprobs=logprobs(raw["logprobs"], where) if raw.get("logprobs") is not None else None,
        source=where,
        routes=routes,
        routed=routed,
        turn=_turn(raw["turn"], where) if raw.get("turn") is not None else None,
        policy=count(raw.get("policy"), "policy", where) or 0,
        reward=number(raw.get("reward"), "reward", where),
        passed=count(raw.get("passed"), "passed", where),
        total=count(raw.get("total"), "total", where),
        contract=found,
        exchanges=[
            _exchange(item, f"{where}, exchange {index}")
            for index, item in enumerate(entries(raw.get("exchanges"), "exchanges", where))
        ],
    )


def _exchange(raw: Any, where: str) -> ForeignTurn:
    if not isinstance(raw, dict):
        raise T1Error("not an object", where=where)
    _require_known(raw, EXCHANGE_FIELDS, where)
    sampled = token_ids(raw.get("completion_ids"), "completion_ids", where)
    prompt = token_ids(raw.get("prompt_ids"), "prompt_ids", where)
    return ForeignTurn(prompt, sampled, logprobs(raw.get("logprobs"), where, tokens=len(sampled)))


def _require_known(raw: dict[str, Any], fields: frozenset[str], where: str) -> None:
    if unknown := sorted(raw.keys() - fields):
        names = ", ".join(map(shown, unknown))
        raise T1Error(f"unknown field(s) {names}", where=where, remedy=f"known: {', '.join(sorted(fields))}")


def _turn(values: Any, where: str) -> np.ndarray:
    turns = [count(value, f"turn of token {at}", where) for at, value in enumerate(entries(values, "turn", where))]
    if None in turns:
        raise T1Error(f"turn of token {turns.index(None)} is null, expected a whole number", where=where)
    return np.array(turns, np.int64)
