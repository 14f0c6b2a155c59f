"""What holds for routes wherever they are: their compact type, and that the experts of a row differ. numpy only."""

from __future__ import annotations

import numpy as np


def route_dtype(num_experts: int) -> np.dtype:
    """The compact type of routes: uint8 up to 256 experts, uint16 above."""
    return np.dtype(np.uint8 if num_experts <= 256 else np.uint16)


def repeated_experts(routes: np.ndarray) -> np.ndarray:
    """bool [rows, L]: whether an expert stands twice in a row's choice of that layer; routes [rows, L, K].

    An unwritten row, all zeros, is one too where K > 1 (vllm-ascend#15451, verl#4986).
    """
    ordered = np.sort(routes, axis=2)
    return (ordered[..., 1:] == ordered[..., :-1]).any(axis=2)
