"""A torchvision that can be imported and does nothing, where there is none.

vLLM's files of the Qwen3.5 models, text-only ones too, import transformers' image processors, which import torchvision
at their top. None can be installed beside the CPU build's torch, and text never reaches it.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

_MODULES = (
    "torchvision",
    "torchvision.io",
    "torchvision.ops",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)


class _Absent(types.ModuleType):
    """A module in which every name is a class that can't be instantiated."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": _refuse})


def _refuse(self: Any, *_: Any, **__: Any) -> None:
    raise ImportError(f"{type(self).__name__} needs torchvision, which isn't installed: images can't be processed")


def stand_in_for_torchvision() -> None:
    """Make `import torchvision` succeed in this process where there is none. Idempotent; a real one is left alone."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return
    for name in _MODULES:
        module = _Absent(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
