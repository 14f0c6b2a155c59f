"""What holds for routes wherever they are: their shape and compact type, vLLM's encoding of them, what can't be true.

Shapes: L MoE layers, K experts per token. numpy only.
"""

from __future__ import annotations

import base64
import io
import math
from dataclasses import dataclass

import numpy as np

from megatron_t1.config.schema import ArchitectureConfig

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


@dataclass(frozen=True, kw_only=True)
class RouteShape:
    """The experts that a model's tokens can take: `top_k` (K) of `num_experts` in each of `num_moe_layers` (L)."""

    num_moe_layers: int
    num_experts: int
    top_k: int

    @property
    def dtype(self) -> np.dtype:
        return route_dtype(self.num_experts)


def route_dtype(num_experts: int) -> np.dtype:
    """The compact type of routes: uint8 up to 256 experts, uint16 above."""
    return np.dtype(np.uint8 if num_experts <= 256 else np.uint16)


def route_row_bytes(architecture: ArchitectureConfig) -> int:
    """Bytes of one token's experts in every layer, in the compact type."""
    a = architecture
    return a.num_hidden_layers * a.num_experts_per_tok * route_dtype(a.num_experts).itemsize


def decode_routes(encoded: object) -> np.ndarray:
    """Rows of routes from vLLM's text form, base64 of a .npy file; their shape and type are for the caller to check.

    Raises:
        ValueError: it is something else. Pickled objects are never read.
    """
    if not isinstance(encoded, str):
        raise ValueError(f"expected text in base64, found {type(encoded).__name__}")
    content = base64.b64decode(encoded, validate=True)
    file = io.BytesIO(content)
    try:
        read_header = _HEADERS[np.lib.format.read_magic(file)]
        shape, fortran_order, dtype = read_header(file)
    except Exception as error:  # the header is a Python literal, whose parser fails in a dozen ways
        raise ValueError(f"not a .npy file ({type(error).__name__}: {error})") from error
    data = memoryview(content)[file.tell() :]
    needed = math.prod(shape) * dtype.itemsize  # compared before anything of that size is allocated
    if dtype.hasobject or needed != len(data) or not all(type(extent) is int and extent >= 0 for extent in shape):
        raise ValueError(f"the header says {dtype} {shape}, and {len(data)} bytes follow")
    routes = np.frombuffer(data, dtype) if dtype.itemsize else np.empty(0, dtype)
    return routes.reshape(shape, order="F" if fortran_order else "C")


def route_problem(routes: np.ndarray, num_experts: int) -> str:
    """What is impossible about routes [rows, L, K] of one model; "" when they are sound."""
    if int(routes.max()) >= num_experts or int(routes.min()) < 0:
        row, layer, _ = np.argwhere((routes >= num_experts) | (routes < 0))[0]
        return f"row {row}, layer {layer}: expert {routes[row, layer].tolist()} of {num_experts}"
    twice = repeated_experts(routes)
    if twice.any():
        row, layer = np.argwhere(twice)[0]
        return f"row {row}, layer {layer}: an expert twice in {routes[row, layer].tolist()}"
    return ""


def repeated_experts(routes: np.ndarray) -> np.ndarray:
    """bool [rows, L]: whether an expert stands twice in a row's choice of that layer; routes [rows, L, K].

    An unwritten row, all zeros, is one too where K > 1 (vllm-ascend#15451, verl#4986).
    """
    ordered = np.sort(routes, axis=2)
    return (ordered[..., 1:] == ordered[..., :-1]).any(axis=2)
