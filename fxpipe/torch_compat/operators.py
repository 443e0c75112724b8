"""Operators: their classes and schemas, modes that see each operator, and operators without a public name.

The names are the same in 2.13 to 2.15.
"""

# ruff: noqa: F401  (other files take what is imported here)

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket  # of torch.ops.aten.add.Tensor, .add
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as no_dispatch_modes

aten = torch.ops.aten
TO_COPY = aten._to_copy.default
"""The operator that ``.to()`` runs."""
NUMBER_READ: Any = torch.ops.aten._local_scalar_dense.default
"""The operator by which Python reads a tensor's number: ``item``, ``float``, ``bool``."""
FOREACH_NORM: Any = torch._foreach_norm
"""The norm of each tensor of a list; ``torch.nn.utils.get_total_norm`` calls this function."""


def schema_of(operator: Any) -> Any:
    """The schema of an operator's overload, which marks written arguments; None for a higher-order operator."""
    return getattr(operator, "_schema", None)


COPY_ALL: Any = torch._foreach_copy_
"""Copies a list of tensors into others by one call, in half the time of a call for each. The lists may not be empty."""
no_function_modes: Callable[[], Any] = torch._C.DisableTorchFunction
function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""Returns how many modes see torch's functions."""
ASSERTIONS = {
    aten._assert_tensor_metadata.default,
    aten._assert_async.msg,
    aten._assert_async.default,
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}
"""Operators that only check values."""
CHECKS = (torch._assert, torch._assert_async)
"""Functions of users' code that only check values."""
DISTRIBUTION_CHECKS = torch.distributions.Distribution, "_validate_args"
"""The attribute in which ``set_default_validate_args`` stores whether distributions check their arguments' values."""


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """Disables oneDNN, as ``torch.backends.mkldnn.flags(enabled=False)``, which would warn of TF32 on every call."""
    before: bool = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
