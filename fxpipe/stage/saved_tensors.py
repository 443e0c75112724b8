"""Saved tensors: what hooks of autograd must do that autograd does itself for a tensor that no hook has packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fxpipe.torch_compat.tensors import saved_version


@dataclass(slots=True, weakref_slot=True)
class SavedTensor:
    """A tensor that autograd has saved, and its version then. ``tensor``: without its node, with which it would be a
    cycle; None if its memory has left."""

    tensor: Tensor | None
    version: int

    def on_device(self) -> Sequence[Tensor]:
        """The tensors that it holds on the device."""
        return [] if self.tensor is None else [self.tensor]


def unwritten(tensor: Tensor, expected: int) -> Tensor:
    """The tensor, if it has the expected version; otherwise the error that plain autograd raises."""
    if (version := saved_version(tensor)) != expected:
        raise written(tensor.size(), version, expected)
    return tensor


def written(size: Sequence[int], version: int, expected: int) -> RuntimeError:
    """What plain autograd says of a saved tensor that was written."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
        f"shape {list(size)} is at version {version}; expected version {expected} instead"
    )
