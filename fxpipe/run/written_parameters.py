"""Written parameters: those that a stage's own forward writes, which its second run would write a second time."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fxpipe.errors import RunError
from fxpipe.graph.stage_graph import Stage
from fxpipe.parameters.dtensors import local
from fxpipe.torch_compat import version_of

ULPS = 16
"""A forward may leave what it has written before as it is, but for rounding: so does an embedding with max_norm=."""


class WrittenParameters:
    """Looks at a stage's parameters in a forward, between it and its second run, and in that. Their numbers from before
    a forward are nowhere: what would change twice is refused.

    ``proves``: whether it is looked for writes that autograd does not see, too, as those by ``.data``.
    """

    def __init__(self, stage: Stage, proves: bool) -> None:
        self._stage, self._proves, self._all = stage.name, proves, stage.parameters
        self._versions = self._now()
        self._by_forward = frozenset[str]()

    def _now(self) -> dict[str, int]:
        return {name: version_of(parameter) for name, parameter in self._all.items() if not parameter.is_inference()}

    def first_is_over(self) -> None:
        """The forward has run."""
        now = self._now()
        self._by_forward = frozenset(name for name in now if now[name] != self._versions[name])

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Around the second run; afterwards they are as they were before it. RunError where they had been written
        since the first one, or the second has written them."""
        now = self._now()
        if any(now[name] != self._versions[name] for name in now if name not in self._by_forward):
            raise RunError(
                f"stage {self._stage!r} cannot be recomputed: its parameters were written since its forward, as a "
                "hook does that makes an optimizer's step in backward; make it behind forward_backward(...), or leave "
                "the stage out of recompute="
            )
        copies = {name: self._all[name].detach().clone() for name in self._by_forward}
        unseen = {name: one for name, one in self._all.items() if self._proves and name not in copies and is_plain(one)}
        figures = {name: _figures(one) for name, one in unseen.items()}
        yield
        for name, copy in copies.items():
            self._check(name, _alike(self._all[name].detach(), copy))
            self._all[name].data.copy_(copy)
        for name, before in figures.items():
            self._check(name, _figures(unseen[name]).is_as(before))

    def _check(self, name: str, is_as_it_was: bool) -> None:
        if not is_as_it_was:
            raise RunError(
                f"stage {self._stage!r} cannot be recomputed: its forward writes its parameter {name!r}, and would do "
                "so twice; write it behind forward_backward(...), make what is not trained a buffer "
                "(register_buffer), or leave the stage out of recompute="
            )


def is_plain(leaf: Any) -> bool:
    """Whether it is a tensor whose numbers operators can look at: not sparse, quantized, or of a class of its own."""
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized:
        return False
    return type(local(leaf)) in (Tensor, nn.Parameter)


def _alike(one: Tensor, other: Tensor) -> bool:
    one, other = local(one), local(other)
    return torch.allclose(one, other, rtol=ULPS * _eps(one), atol=0, equal_nan=True)


def _eps(numbers: Tensor) -> float:
    return torch.finfo(numbers.dtype).eps if numbers.is_floating_point() or numbers.is_complex() else 0.0


class _Figures(NamedTuple):
    """Of a parameter the sum, the norm, and by how much rounding may change these: a copy would take its memory."""

    total: float
    norm: float
    of_total: float
    of_norm: float

    def is_as(self, before: _Figures) -> bool:
        if not math.isfinite(self.norm):
            return not math.isfinite(before.norm)
        return abs(self.norm - before.norm) <= before.of_norm and abs(self.total - before.total) <= before.of_total


def _figures(parameter: Tensor) -> _Figures:
    numbers = local(parameter.detach())
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers.resolve_conj())
    if not numbers.is_floating_point() or numbers.dtype.itemsize == 1:
        numbers = numbers.double()
    total = numbers.sum(dtype=torch.float64).item()
    norm = torch.linalg.vector_norm(numbers, dtype=torch.float64).item()
    rounding = ULPS * _eps(parameter) * norm
    return _Figures(total, norm, rounding * math.sqrt(numbers.numel()), rounding)
