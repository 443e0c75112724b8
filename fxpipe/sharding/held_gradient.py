"""Held gradient: ``.grad`` on one of several pipe ranks, where a norm over all that is at hand is this rank's alone."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.parameters.dtensors import is_dtensor
from fxpipe.torch_compat import FOREACH_NORM, plain_results, pytree, recast

_NORMS = {torch.norm, Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm, FOREACH_NORM}
_MULTIPLES = {Tensor.data.__get__, Tensor.detach, torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__}  # type: ignore[attr-defined]


class HeldGradient(Tensor):
    """A gradient on one of several pipe ranks. A norm over several of them (torch's ``clip_grad_norm_``, SAM) is a
    RunError; everything else that is computed with one is a plain tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = plain_results(func, types, args, kwargs or {})
        if func in _NORMS:
            given = args[0] if args else next(iter(kwargs.values()))
            if isinstance(given, Tensor):
                return _HeldNorm.of(found, given)
            return [_HeldNorm.of(norm, gradient) for norm, gradient in zip(found, given, strict=True)]
        return held(found) if func in _MULTIPLES else found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(plain(self), memo)


class _HeldNorm(Tensor):
    """The norm of a gradient that this rank holds, or a number computed from it."""

    gradient: Tensor

    @staticmethod
    def of(norm: Tensor, gradient: Tensor) -> Tensor:
        made = recast(norm, _HeldNorm)
        made.gradient = gradient  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gradients = {id(one.gradient): one.gradient for one in pytree.tree_leaves(args) if isinstance(one, _HeldNorm)}
        if len(gradients) > 1:
            raise RunError(
                "a norm over several gradients (torch.nn.utils.clip_grad_norm_, SAM) would count this rank's alone; "
                "forward_backward.clip_grad_norm_(max_norm) clips by the whole model's, and returns it"
            )
        found = plain_results(func, types, args, kwargs or {})
        return _HeldNorm.of(found, *gradients.values()) if isinstance(found, Tensor) and not found.ndim else found


def held(gradient: Tensor) -> Tensor:
    """The gradient, in the same memory, as one of several pipe ranks'; a sparse one itself: torch cannot alias it."""
    is_dense = type(gradient) is Tensor and gradient.layout is torch.strided
    is_spread = is_dtensor(gradient) and not isinstance(gradient, HeldGradient)
    return recast(gradient, HeldGradient) if is_dense or is_spread else gradient


def plain(gradient: Tensor) -> Tensor:
    """The gradient, in the same memory, as a plain tensor or DTensor."""
    return recast(gradient, Tensor) if isinstance(gradient, HeldGradient) else gradient
