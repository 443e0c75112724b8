"""Loads the C++ of the device: torch asks once, while it is imported, whether there is CUDA."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from importlib.machinery import ExtensionFileLoader
from types import ModuleType

from tests.simulated_gpu import build

NAME = "tests.simulated_gpu._device"


def load() -> ModuleType:
    """The extension module, under NAME; torch is imported in between."""
    file = str(build.library())
    ctypes.CDLL(file)
    import torch  # noqa: F401

    loader = ExtensionFileLoader(NAME, file)
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[NAME] = module
    sys.modules["tests.simulated_gpu"].__dict__["_device"] = module
    return module
