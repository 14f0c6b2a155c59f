from __future__ import annotations

import importlib.util
import sys

import pytest

from megatron_t1.rollout.vllm_cpu import vision


def test_it_can_be_imported_and_processes_no_image(monkeypatch):
    monkeypatch.setattr(
        sys, "modules", {name: module for name, module in sys.modules.items() if "torchvision" not in name}
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    vision.stand_in_for_torchvision()
    vision.stand_in_for_torchvision()
    functional = sys.modules["torchvision.transforms.v2.functional"]
    assert sys.modules["torchvision"].transforms.v2.functional is functional
    with pytest.raises(ImportError, match="Resize needs torchvision"):
        functional.Resize(32)


def test_a_real_one_is_left_alone(monkeypatch):
    real = object()
    monkeypatch.setitem(sys.modules, "torchvision", real)
    vision.stand_in_for_torchvision()
    assert sys.modules["torchvision"] is real
