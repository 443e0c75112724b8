"""Fake tensors, which have a shape and no values, and the errors that operators on them raise; in 2.13 to 2.15."""

# ruff: noqa: F401  (other files take what is imported here)

from __future__ import annotations

import importlib
from typing import Any

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

NEED_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
"""The errors of operators that need a fake tensor's values: for a branch, a size or a kernel."""
fake_home: Any = importlib.import_module("torch._subclasses")
"""The module from which other libraries take the class ``FakeTensor``, to ask whether they are traced."""
CAPTURE_LOGS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
