"""Which of the trainer's backends can run on this machine's GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")


def gpu_backends() -> list[str]:
    """Plain torch always; Transformer Engine's layers where it is installed."""
    return ["cuda_torch"] + (["cuda"] if importlib.util.find_spec("transformer_engine") else [])
