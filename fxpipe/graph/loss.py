"""What a model may return as its loss, and how micro-batch losses become the loss of a step."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.validation import is_number, shown


class Sum(NamedTuple):
    """A loss given as a sum and the number of items that it is over.

    Loss and gradients of a step are then Σ total / Σ count over all micro-batches and the data axis: exactly those of
    the whole batch, whatever was masked where.
    """

    total: Tensor
    """0-dimensional."""
    count: Any
    """A number, or a 0-dimensional tensor."""


class MicrobatchLoss(NamedTuple):
    """One micro-batch's loss. ``count`` is None for a mean, the number of items for a ``Sum``.

    ``metrics``: the other scalars that came with it, numbers or 0-dimensional tensors.
    """

    value: Tensor
    count: Any
    metrics: Mapping[str, Any]


def read_loss(result: Any) -> MicrobatchLoss:
    """Finds the loss in what a model returned; RunError where there is none."""
    metrics: dict[str, Any] = {}
    loss = result
    if not isinstance(result, Tensor) and isinstance(result, Mapping):
        if "loss" not in result:
            raise RunError(
                f"the model returned a dict with {sorted(map(str, result))} and no 'loss'; "
                "return {'loss': ...}, or pass loss_fn= to fxpipe.compile"
            )
        loss = result["loss"]
        metrics = {name: item for name, item in result.items() if name != "loss" and _is_metric(item)}
    count = None
    if isinstance(loss, Sum):
        loss, count = loss
        if not _is_count(count):
            raise RunError(f"fxpipe.Sum has count={shown(count)}; it is a number of items, or a tensor with one")
        if isinstance(count, Tensor) and count.requires_grad:
            raise RunError(
                "the count of a fxpipe.Sum requires a gradient, and a number of items is given none; write "
                "fxpipe.Sum(total, count), in this order, with count.detach() where it shall be held fixed"
            )
    if not (isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point()):
        raise RunError(
            f"the loss must be one number, but the model returned {_describe(loss)}; "
            "reduce it (.mean() or fxpipe.Sum(total, count)), or pass loss_fn= to fxpipe.compile"
        )
    return MicrobatchLoss(loss, count, metrics)


def loss_in(result: Any) -> Any:
    """The loss alone, a number or a ``Sum``; RunError where there is none."""
    loss = read_loss(result)
    return loss.value if loss.count is None else Sum(loss.value, loss.count)


def _is_count(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return is_number(value) and value >= 0


def _is_metric(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.is_complex()
    return isinstance(value, Real)


def metric_dtype(loss: torch.dtype) -> torch.dtype:
    """The type of the metrics beside a loss of that type: a count of items needs more than half precision."""
    return torch.promote_types(loss, torch.float32)


def _number(value: Any, beside: Tensor, dtype: torch.dtype) -> Tensor:
    """A number, or a tensor with one, as a 0-dimensional tensor on the same device, free of what it came from."""
    if isinstance(value, Tensor):
        return value.detach().reshape(()).to(beside.device, dtype)
    return torch.full_like(beside, float(value), dtype=dtype)  # torch.tensor would copy it, and wait


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and type {str(value.dtype).removeprefix('torch.')}"
    return f"{type(value).__name__} {value!r:.80}"


def root_weight(part: MicrobatchLoss, share: float) -> float:
    """The gradient that a micro-batch's loss is given, whose share of the step's weight is ``share``."""
    return share if part.count is None else 1.0


class LossKind(NamedTuple):
    """What is the same in all losses that are added up. ``metrics``: the names of those that come with it."""

    is_sum: bool
    dtype: torch.dtype
    metrics: tuple[str, ...]

    def check(self, earlier: LossKind, what: str) -> None:
        """RunError where this and an ``earlier`` one cannot be added up, or compared. ``what``: each is the loss of."""
        if self.is_sum != earlier.is_sum:
            raise RunError(f"the loss is a fxpipe.Sum in one {what} and a mean in another; return the same kind always")
        if self.dtype != earlier.dtype:
            raise RunError(
                f"the loss is of {earlier.dtype} in one {what} and of {self.dtype} in another; return the same type "
                "always, as .float() gives it"
            )
        if set(self.metrics) != set(earlier.metrics):
            raise RunError(
                f"the loss comes with the metrics {shown(list(earlier.metrics))} in one {what} and with "
                f"{shown(list(self.metrics))} in another, which have no mean; return the same always, with zeros where "
                "there is nothing to report"
            )


class StepLoss:
    """Accumulates the micro-batch losses of one step, on their device and without waiting for it.

    A mean is weighted: Σ loss_i · (w_i / Σw), added up in micro-batch order, Σw being over all replicas. A ``Sum`` is
    Σ total and Σ count.
    """

    def __init__(self) -> None:
        self._value: Tensor | None = None
        self._count: Tensor | None = None
        self._metrics: dict[str, Tensor] = {}
        self.kind = LossKind(False, torch.float32, ())
        """That of those with weight; where there are none, of the last."""

    @property
    def is_empty(self) -> bool:
        """Whether no micro-batch had any weight."""
        return self._value is None

    def add(self, part: MicrobatchLoss, share: float) -> Tensor | None:
        """Adds a micro-batch whose share of the step's weight is ``share``; returns what it has added.

        One without weight, whose numbers may be NaN, adds nothing. RunError where it is of another kind than others.
        """
        kind = LossKind(part.count is not None, part.value.dtype, tuple(part.metrics))
        if self.is_empty:
            self.kind = kind
        if not share:
            return None
        kind.check(self.kind, "micro-batch")
        value = part.value.detach()
        value = value.clone() if kind.is_sum else value * share
        self._value = value.clone() if self._value is None else self._value.add_(value)
        if kind.is_sum:
            count = _number(part.count, part.value, torch.float64)
            self._count = count if self._count is None else self._count + count
        for name, metric in part.metrics.items():
            weighted = _number(metric, part.value, metric_dtype(kind.dtype)) * share
            self._metrics[name] = self._metrics[name] + weighted if name in self._metrics else weighted
        return value

    def value(self) -> Tensor:
        """The replica's part of the loss, a mean."""
        assert self._value is not None
        return self._value

    def metrics(self) -> dict[str, Tensor]:
        return dict(self._metrics)

    def numbers(self, metrics: tuple[str, ...], device: torch.device) -> Tensor:
        """The replica's part of [loss, or total of a ``Sum``; its count, or 0; metrics ...], float64."""
        if self._value is None:
            return torch.zeros(2 + len(metrics), dtype=torch.float64, device=device)
        value = self._value.double()
        count = self._count if self._count is not None else torch.zeros_like(value)
        return torch.stack([value, count, *(self._metrics[name].double() for name in metrics)])
