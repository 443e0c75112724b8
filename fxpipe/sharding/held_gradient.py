"""Held gradient: a pipe rank's gradient, whose norm is not the whole model's."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import RunError
from fxpipe.torch_compat import plain_results

TORCHS_CLIP = (
    "torch.nn.utils.clip_grad_norm_ would clip by the norm of this rank's gradients alone; write "
    "forward_backward.clip_grad_norm_(max_norm), which counts the whole model's"
)
_TORCHS_NORM = inspect.unwrap(torch.nn.utils.get_total_norm).__code__


class HeldGradient(Tensor):
    """A gradient of one of several pipe ranks. torch's ``clip_grad_norm_`` of it is a RunError, in whatever list its
    parameter came; to everybody else it is a tensor, and what is computed with it is a plain one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if sys._getframe(1).f_code is _TORCHS_NORM:
            raise RunError(TORCHS_CLIP)
        return plain_results(func, types, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.detach(), memo)


def hold_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Makes ``HeldGradient``s of their plain ones, in the same memory."""
    for parameter in parameters:
        if type(parameter.grad) is Tensor:
            parameter.grad = parameter.grad.as_subclass(HeldGradient)
