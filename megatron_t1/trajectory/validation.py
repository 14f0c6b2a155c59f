"""What makes a record a record: dtypes, lengths and agreement between its fields, checked where it is built or read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megatron_t1.errors import T1Error

if TYPE_CHECKING:
    from megatron_t1.trajectory.record import Trajectory

FIELD_DTYPES = {
    "ids": (np.int32,),
    "origin": (np.uint8,),
    "turn": (np.uint16,),
    "logprobs": (np.float32,),
    "routes": (np.uint8, np.uint16),
    "routed": (np.bool_,),
    "excluded": (np.bool_,),
}
OPTIONAL_FIELDS = frozenset({"routes", "excluded"})


def validate(trajectory: Trajectory, *, where: str = "") -> None:
    """Raise T1Error for the first thing that can't be true of a record, naming its field and token.

    Routes are checked for dtype and shape only; whether they fit a model is the concern of whoever replays them.

    Args:
        where: the file it came from; the trajectory id is used when empty.
    """
    problem = _problem(trajectory)
    if problem:
        raise T1Error(
            problem,
            where=where or f"trajectory {trajectory.header.trajectory_id!r}",
            remedy="the record was built wrongly or damaged; make the trajectory again",
        )


def _problem(trajectory: Trajectory) -> str:
    return _shape_problem(trajectory) or _content_problem(trajectory) or _turn_problem(trajectory)


def _shape_problem(trajectory: Trajectory) -> str:
    for name, dtypes in FIELD_DTYPES.items():
        array = getattr(trajectory, name)
        if array is None and name in OPTIONAL_FIELDS:
            continue
        if not isinstance(array, np.ndarray) or array.dtype not in dtypes:
            wanted = " or ".join(np.dtype(dtype).name for dtype in dtypes)
            found = array.dtype.name if isinstance(array, np.ndarray) else type(array).__name__
            return f"field {name!r} must be a numpy array of {wanted}, found {found}"
        dimensions = 3 if name == "routes" else 1
        if array.ndim != dimensions:
            return f"field {name!r} must have {dimensions} dimension(s), found shape {list(array.shape)}"
        if len(array) != len(trajectory.ids):
            return f"field {name!r} has {len(array)} rows, but there are {len(trajectory.ids)} tokens"
    if len(trajectory.ids) == 0:
        return "the record has no token"
    if trajectory.routes is not None and 0 in trajectory.routes.shape:
        return f"field 'routes' has shape {list(trajectory.routes.shape)}: no layer or no expert"
    return ""


def _content_problem(trajectory: Trajectory) -> str:
    from megatron_t1.trajectory.record import Origin

    ids, origin, logprobs = trajectory.ids, trajectory.origin, trajectory.logprobs
    if (token := _first(ids < 0)) is not None:
        return f"field 'ids': token {token} is {ids[token]}, token ids can't be negative"
    if (token := _first(origin > max(Origin))) is not None:
        return f"field 'origin': token {token} is {origin[token]}, known values are 0 to {int(max(Origin))}"
    sampled = origin == Origin.SAMPLED
    finite = np.isfinite(logprobs)
    if (token := _first(sampled & ~finite)) is not None:
        return f"field 'logprobs': sampled token {token} has {logprobs[token]}, every sampled token needs a finite one"
    if (token := _first(~sampled & ~np.isnan(logprobs))) is not None:
        found = Origin(int(origin[token])).name.lower()
        return f"field 'logprobs': token {token} has {logprobs[token]}, but its origin is {found}, which means NaN"
    if (token := _first(sampled & finite & (logprobs > 1e-3))) is not None:
        return f"field 'logprobs': sampled token {token} has {logprobs[token]}, a log-probability can't be positive"
    for name in ("routed", "excluded"):
        array = getattr(trajectory, name)
        if array is not None and (token := _first(array.view(np.uint8) > 1)) is not None:
            return f"field {name!r}: token {token} is neither true nor false"
    if trajectory.routes is None and (token := _first(trajectory.routed)) is not None:
        return f"field 'routed': token {token} counts as recorded, but the record has no routes"
    return ""


def _turn_problem(trajectory: Trajectory) -> str:
    from megatron_t1.trajectory.record import Origin

    turn = trajectory.turn
    if (token := _first(turn[1:] < turn[:-1])) is not None:
        return f"field 'turn': token {token + 1} goes back from turn {turn[token]} to {turn[token + 1]}"
    versions, turns = trajectory.header.policy_versions, int(turn[-1]) + 1
    needs_versions = len(versions) > 0 or bool(np.any(trajectory.origin == Origin.SAMPLED))
    if needs_versions and len(versions) < turns:
        return f"policy_versions has {len(versions)} entries, but the stream has {turns} assistant turns"
    return ""


def _first(wrong: np.ndarray) -> int | None:
    """Index of the first true element."""
    index = int(wrong.argmax()) if len(wrong) else 0
    return index if len(wrong) and wrong[index] else None
