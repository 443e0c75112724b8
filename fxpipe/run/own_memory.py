"""Own memory: a parameter's ``.grad`` shares none with gradients that are still on their way to other stages.

Autograd makes the first gradient of a parameter its ``.grad`` without copying it, where nobody else holds that very
tensor; but it may be a view of what goes to a stage before this one, as that of a position embedding of one row is.
In plain PyTorch that one is used by then. Here the next micro-batch's gradient is added to ``.grad``, in place, first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.parameters.dtensors import local
from fxpipe.torch_compat import pytree, storage_id


def without_gradient(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Those whose ``.grad`` the next backward may make."""
    return [parameter for parameter in parameters if parameter.grad is None]


def give_own_memory(parameters: Iterable[nn.Parameter], passing: Any) -> None:
    """A backward has run, which may have made these parameters' ``.grad``. ``passing``: the gradients that it was given
    and has returned, in any container."""
    made = [(one, one.grad) for one in parameters if one.grad is not None]
    if not made:
        return
    taken = {storage_id(local(leaf)) for leaf in pytree.tree_leaves(passing) if _has_memory(leaf)}
    for parameter, gradient in made:
        if _has_memory(gradient) and storage_id(local(gradient)) in taken:
            parameter.grad = gradient.clone()


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided
