"""Precision: the floating-point types of a model's computation, reductions and optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from fxpipe.errors import RunError


@dataclass(frozen=True)
class Precision:
    """Mixed precision with master weights: ``fxpipe.compile(..., precision=fxpipe.Precision())``.

    Gradients add up over micro-batches in float32, or in ``compute`` if that is wider. float16 has a smaller range than
    float32: if any rank's gradient has an inf or nan, all ranks skip the step, so that each step waits for the device.
    bfloat16 has the range of float32: its steps do not wait.

    After Micikevicius et al., "Mixed Precision Training", https://arxiv.org/abs/1710.03740.

    Raises:
        RunError: a type is not a floating-point type of at least 16 bits.
    """

    compute: torch.dtype = torch.bfloat16
    """The type of the stages' parameters and of floating-point inputs."""
    reduce: torch.dtype = torch.float32
    """The type in which gradients are summed over ranks."""
    master: torch.dtype = torch.float32
    """The type of the optimizer's state and of the copy that the optimizer steps; the copy starts from the values
    before rounding."""

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
    """Rounds a module's floating-point parameters to ``compute``; each parameter stays the same object.

    Returns the values before rounding, by name, for the optimizer's masters. Buffers keep their type, since running
    statistics need their precision. Parameters on the meta device are cast, too, but have no values to return.
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
    """Whether a number converts between two types by rounding alone; 8-bit floats and integers may need scales."""
    plain = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return stored == wanted or (stored in plain and wanted in plain)


def merged(exact: Tensor, values: Tensor, rounded: torch.dtype) -> Tensor:
    """``exact`` for elements whose ``exact``, rounded to type ``rounded``, equals ``values``; otherwise ``values``."""
    # An element that was only rounded takes its lost bits back; an element that was changed since keeps its value.
    return torch.where(exact.to(rounded).to(values.dtype) == values, exact, values.to(exact.dtype))
