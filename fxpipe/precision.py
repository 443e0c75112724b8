"""Precision: which floating-point types a model computes, reduces and is stepped in."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from fxpipe.errors import RunError


@dataclass(frozen=True)
class Precision:
    """Mixed precision with master weights: ``fxpipe.compile(..., precision=fxpipe.Precision())``.

    Gradients add up over micro-batches in float32 (in ``compute``, where that is wider). With float16, which overflows
    where float32 does not, a step for which any rank's gradient has an inf or nan is left out on all ranks: each step
    waits for the device to know. bfloat16 has the range of float32, and its steps wait for nothing.

    After Micikevicius et al., "Mixed Precision Training", https://arxiv.org/abs/1710.03740.

    Raises:
        RunError: a type is not a floating-point type of at least 16 bits.
    """

    compute: torch.dtype = torch.bfloat16
    """The type of the parameters that stages run with, and of the floating-point inputs."""
    reduce: torch.dtype = torch.float32
    """The type in which gradients are summed over ranks."""
    master: torch.dtype = torch.float32
    """The type of the copy that the optimizer steps, made from the values before they were rounded, and of its
    state."""

    def __post_init__(self) -> None:
        for field in fields(self):
            dtype = getattr(self, field.name)
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
                raise RunError(
                    f"Precision({field.name}={dtype!r}) is no floating-point type of at least 16 bits; "
                    "write torch.bfloat16, torch.float16, torch.float32 or torch.float64"
                )

    @property
    def gradient(self) -> torch.dtype:
        """The type of ``.grad``, in which gradients add up over micro-batches."""
        return torch.promote_types(self.compute, torch.float32)


def cast_parameters(module: nn.Module, precision: Precision) -> dict[str, Tensor]:
    """Rounds a module's floating-point parameters to ``compute``, each of them remaining the same object.

    Returns the values before that, by name, for the optimizer's masters. Buffers are left as they are: running
    statistics need their bits. Parameters on the meta device are cast, too, but have no values to return.
    """
    originals: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if not parameter.is_floating_point():
            continue
        # ``.data`` keeps the parameter the same object, which optimizers and tied modules hold.
        if parameter.dtype != precision.compute:
            if not parameter.is_meta:
                originals[name] = parameter.detach()
            parameter.data = parameter.detach().to(precision.compute)
        parameter.grad_dtype = precision.gradient
    return originals


def converts(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a number of one type is the same, but for rounding, in the other; 8-bit ones and integers have scales."""
    plain = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return stored == wanted or (stored in plain and wanted in plain)


def merged(exact: Tensor, values: Tensor, rounded: torch.dtype) -> Tensor:
    """``exact`` where rounding it to a type gives ``values``, and ``values`` elsewhere."""
    # A value that only went through the rounding takes its lost bits back; one that was changed meanwhile stays.
    return torch.where(exact.to(rounded).to(values.dtype) == values, exact, values.to(exact.dtype))
