"""The random generators of one process as bytes: what it would draw next is part of where it stands."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_t1.errors import IncompleteError

TRACKED = "megatron/"


def random_state() -> bytes:
    """States of Python's, numpy's and torch's default generators, the current GPU's, and Megatron's named ones."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    python = [version, float("nan") if gauss is None else gauss]
    tensors = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_rest": torch.tensor(python, dtype=torch.float64),
        "numpy": torch.from_numpy(keys.astype(np.int64)),
        "numpy_rest": torch.tensor([position, has_gauss, cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    for name, state in get_cuda_rng_tracker().get_states().items():
        tensors[TRACKED + name] = state if isinstance(state, torch.Tensor) else state.get_state()
    return safetensors.torch.save(tensors)


def restore_random_state(data: bytes, *, where: str) -> None:
    """Put every generator where `random_state` found it.

    Raises:
        IncompleteError: the bytes aren't what `random_state` made on such a process; names `where`.
    """
    try:
        tensors = safetensors.torch.load(data)
        version, gauss = tensors["python_rest"].tolist()
        words = tuple(tensors["python"].tolist())
        position, has_gauss, cached = tensors["numpy_rest"].tolist()
        keys = tensors["numpy"].numpy().astype(np.uint32)
        random.setstate((int(version), words, None if gauss != gauss else gauss))
        np.random.set_state(("MT19937", keys, int(position), int(has_gauss), cached))
        torch.set_rng_state(tensors["torch"])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(tensors["cuda"])
        _restore_tracked({name: state for name, state in tensors.items() if name.startswith(TRACKED)})
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise IncompleteError(
            f"the state of the random generators can't be read: {error}",
            where=where,
            remedy="use an earlier checkpoint",
        ) from error


def _restore_tracked(tensors: dict[str, torch.Tensor]) -> None:
    tracker = get_cuda_rng_tracker()
    states: dict[str, Any] = tracker.get_states()
    for name, state in states.items():
        stored = tensors[TRACKED + name]
        if isinstance(state, torch.Tensor):
            states[name] = stored
        else:
            state.set_state(stored)
    tracker.set_states(states)
