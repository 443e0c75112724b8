"""Own memory: what is on its way to other stages is not written by the next micro-batch.

Autograd makes the first gradient of a parameter its ``.grad`` without copying it, where nobody else holds that very
tensor; but it may be a view of what goes to a stage before this one, as that of a position embedding of one row is.
In plain PyTorch that one is used by then. Here the next micro-batch's gradient is added to ``.grad``, in place, first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.parameters.dtensors import local
from fxpipe.torch_compat import pytree, storage_id


def without_gradient(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Those whose ``.grad`` the next backward may make."""
    return [parameter for parameter in parameters if parameter.grad is None and parameter.requires_grad]


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


def apart_from(buffers: Sequence[Tensor], value: Any) -> Any:
    """A value that leaves a stage, with copies of what shares memory with these: the next forward may write them."""
    if isinstance(value, Tensor) and value.requires_grad:
        return value
    leaves = [leaf for leaf in pytree.tree_leaves(value) if _has_memory(leaf) and not leaf.requires_grad]
    if not leaves:
        return value
    taken = {storage_id(local(buffer)) for buffer in buffers if _has_memory(buffer)}
    shared = {id(leaf) for leaf in leaves if storage_id(local(leaf)) in taken}
    return pytree.tree_map(lambda leaf: leaf.clone() if id(leaf) in shared else leaf, value) if shared else value


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided
