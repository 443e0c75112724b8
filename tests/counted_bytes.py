"""What a process really holds between steps: the memory of all its tensors, by what it is for."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import fxpipe
from fxpipe.torch_compat.fakes import FakeTensor


def memory_of(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address → bytes; a tensor that is spread over ranks has those of its own part."""
    found: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        is_plain = type(local) in (Tensor, torch.nn.Parameter) and local.layout is torch.strided
        if is_plain and not local.is_meta and not isinstance(local, FakeTensor):
            storage = local.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def alive() -> list[Tensor]:
    """All tensors there are. Whoever keeps them keeps their addresses from others."""
    gc.collect()
    return [one for one in gc.get_objects() if isinstance(one, Tensor)]


@dataclass(frozen=True)
class Counted:
    """Bytes. ``rest``: all that is alive beside parameters and what the optimizer has: gradients, and small things."""

    parameters: int
    optimizer: int
    rest: int


def counted(forward_backward: fxpipe.ForwardBackward, optimizer: Any, before: list[Tensor]) -> Counted:
    """``before``: what was alive before the model was built."""
    module = forward_backward.module
    parameters = memory_of([*module.parameters(), *module.buffers()])
    states = [leaf for leaf in pytree.tree_leaves(dict(optimizer.state)) if isinstance(leaf, Tensor)]
    stepped = memory_of([*states, *(target.tensor for group in optimizer._targets for target in group)])
    own = {key: size for key, size in stepped.items() if key not in parameters}
    others = {*memory_of(before), *parameters, *own}
    rest = {key: size for key, size in memory_of(alive()).items() if key not in others}
    return Counted(sum(parameters.values()), sum(own.values()), sum(rest.values()))
