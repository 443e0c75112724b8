"""Detached: a step's loss as it is handed to the user, who by habit would call backward on it."""

from __future__ import annotations

import copy
import sys
from typing import Any, NoReturn

import torch
from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.torch_compat import plain_results


class DetachedLoss(Tensor):
    """A plain detached tensor, but for ``.backward()``, which says that it has been run.

    So say what it is multiplied or divided by a number, as ``(loss / k).backward()`` and loss scalers do. Whatever else
    is made from it, copied or pickled is a plain tensor, and it says that its class is, for loggers that go by that.
    """

    # as torch's notes on extending it have it
    __torch_function__ = plain_results

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RunError(
            "gradients are there already: the call that returned this loss has run forward and backward; leave "
            ".backward() out. Gradients of several calls add up; for their mean give one call the larger batch, with "
            "more microbatches=, or scale .grad before the optimizer steps"
        )

    def __mul__(self, other: Any) -> Any:
        if sys._getframe(1).f_code is torch.amp.GradScaler.scale.__code__:
            raise RunError(
                "gradients are there already, and were never multiplied by the scale that a GradScaler would divide "
                "them by; leave the scaler out, and write compile(..., precision=fxpipe.Precision()) for half precision"
            )
        return detached(super().__mul__(other))

    def __rmul__(self, other: Any) -> Any:
        return detached(super().__rmul__(other))

    def __truediv__(self, other: Any) -> Any:
        return detached(super().__truediv__(other))

    @property  # type: ignore[misc]
    def __class__(self) -> type[Tensor]:  # type: ignore[override]
        return Tensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.detach(), memo)

    def __format__(self, spec: str) -> str:
        return format(self.detach(), spec)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.detach())


def detached(value: Any) -> Any:
    """A 0-dimensional tensor without a gradient as a ``DetachedLoss``, on the same memory; anything else unchanged."""
    if isinstance(value, Tensor) and value.dim() == 0 and not value.requires_grad:
        return value.as_subclass(DetachedLoss)
    return value
