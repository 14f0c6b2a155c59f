"""The JSON-lines form: one trajectory on each line; docs/token-streams.md describes the fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron_t1.errors import T1Error
from megatron_t1.importing.exchanges import ForeignTurn
from megatron_t1.importing.foreign import Foreign, contract_of, plain_name
from megatron_t1.importing.values import count, entries, logprobs, number, numbers, token_ids
from megatron_t1.trajectory.contract import SamplingContract
from megatron_t1.trajectory.routes import repeated_experts, route_dtype

FIELDS = frozenset("id task ids mask logprobs routes turn policy reward passed total contract exchanges".split())

EXPERT_MAX = 2**16 - 1


def read_lines(path: str | Path, contract: SamplingContract | None = None) -> Iterator[Foreign]:
    """The trajectories of a file.

    Args:
        contract: of lines that state none.

    Raises:
        T1Error: names the line, the field and what is wrong with it.
    """
    path = Path(path)
    try:
        with open(path, encoding="utf-8") as file:
            for at, line in enumerate(file, 1):
                if line.strip():
                    yield _foreign(line, f"{path.name}, line {at}", contract, f"{path.stem}-{at}")
    except (OSError, UnicodeDecodeError) as error:
        raise T1Error(f"can't be read: {error}", where=str(path)) from error


def _foreign(line: str, where: str, contract: SamplingContract | None, default_name: str) -> Foreign:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise T1Error(f"not JSON: {error}", where=where) from error
    if not isinstance(raw, dict) or "ids" not in raw or "mask" not in raw:
        raise T1Error("expected an object with at least ids and mask", where=where)
    unknown = sorted(set(raw) - FIELDS)
    if unknown:
        raise T1Error(
            f"unknown field(s) {', '.join(unknown)}", where=where, remedy=f"known: {', '.join(sorted(FIELDS))}"
        )
    ids = token_ids(raw["ids"], "ids", where)
    mask = numbers(raw["mask"], "mask", where)
    if not np.isin(mask, (0, 1)).all():
        raise T1Error("mask holds something else than 0 and 1", where=where)
    found = contract_of(raw["contract"], where) if "contract" in raw else contract
    routes, routed = read_routes(raw.get("routes"), found, where)
    name = plain_name(str(raw.get("id", default_name)))
    return Foreign(
        name=name,
        task=str(raw.get("task", name)),
        ids=ids,
        mask=mask == 1,
        logprobs=logprobs(raw["logprobs"], where) if raw.get("logprobs") is not None else None,
        source=where,
        routes=routes,
        routed=routed,
        turn=_turn(raw["turn"], where) if "turn" in raw else None,
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


def read_routes(
    rows: Any, contract: SamplingContract | None, where: str
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Routes [T, L, K] and which rows were recorded, from a list of rows [L][K]; null stands for an unrecorded row.

    Raises:
        T1Error: rows of different shapes, something that is no expert, or one expert twice.
    """
    if rows is None:
        return None, None
    if not isinstance(rows, list) or not any(row is not None for row in rows):
        raise T1Error("routes is not a list of rows [layers][experts]", where=where)
    routed = np.array([row is not None for row in rows])
    try:
        known = np.array([row for row in rows if row is not None])
    except ValueError as error:
        raise T1Error(f"routes: rows of different shapes ({error})", where=where) from error
    if known.ndim != 3 or known.dtype.kind not in "iu" or known.min() < 0:
        found = f"{known.dtype} {known.shape}"
        raise T1Error(f"routes must be non-negative integers [tokens][layers][experts], got {found}", where=where)
    if known.max() > EXPERT_MAX:
        token = int(np.flatnonzero(routed)[(known > EXPERT_MAX).any(axis=(1, 2)).argmax()])
        raise T1Error(
            f"routes of token {token} name expert {known.max()}, a record holds up to {EXPERT_MAX}", where=where
        )
    experts = contract.num_experts if contract is not None and contract.num_experts else int(known.max()) + 1
    if known.max() >= experts:
        raise T1Error(f"routes name expert {known.max()}, the model has {experts}", where=where)
    twice = repeated_experts(known).any(axis=1)
    if twice.any():
        token = int(np.flatnonzero(routed)[twice.argmax()])
        raise T1Error(f"routes of token {token} name an expert twice", where=where)
    routes = np.zeros((len(rows), *known.shape[1:]), route_dtype(experts))
    routes[routed] = known
    return routes, routed


def _exchange(raw: Any, where: str) -> ForeignTurn:
    if not isinstance(raw, dict):
        raise T1Error("not an object", where=where)
    sampled = token_ids(raw.get("completion_ids"), "completion_ids", where)
    prompt = token_ids(raw.get("prompt_ids"), "prompt_ids", where)
    return ForeignTurn(prompt, sampled, logprobs(raw.get("logprobs"), where, tokens=len(sampled)))


def _turn(values: Any, where: str) -> np.ndarray:
    return np.array([count(value, f"turn of token {index}", where)
                     for index, value in enumerate(entries(values, "turn", where))], np.int64)  # fmt: skip
