"""What a model may return as its loss, and how micro-batch losses become the loss of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.validation import is_number, shown


class Sum(NamedTuple):
    """A loss given as a sum and the number of items that it is over.

    Loss and gradients of a step are then Σ total / Σ count over all micro-batches and the data axis: exactly those of
    the whole batch, whatever was masked where. Where the inputs alone decide the count (labels, masks, sizes), the
    backward begins with 1 / Σ count; else gradients are divided behind it, and parameters may have no hooks.
    """

    total: Tensor
    """0-dimensional."""
    count: Any
    """A number, or a 0-dimensional tensor."""


@dataclass(frozen=True)
class Counting:
    """Counts what a ``Sum`` is over, by inputs alone. ``names``: of the inputs; ``function``: None where they do not
    decide it."""

    names: tuple[str, ...]
    function: Callable[..., Any] | None

    @torch.no_grad()
    def of(self, batch: Mapping[str, Any], beside: Tensor) -> Tensor:
        """The items of a micro-batch, as a number like ``beside``; the host does not wait for it."""
        assert self.function is not None
        count = self.function(*(batch[name] for name in self.names))
        _check_count(count)
        return _number(count, beside, beside.dtype)


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
    if isinstance(result, Mapping):
        if "loss" not in result:
            raise RunError(
                f"the model returned a dict with {sorted(map(str, result))} and no 'loss'; "
                f"return {{'loss': ...}}, or pass {_loss_fn_for(result)} to fxpipe.compile"
            )
        loss = result["loss"]
        metrics = {name: item for name, item in result.items() if name != "loss" and _is_metric(item)}
    count = None
    if isinstance(loss, Sum):
        loss, count = loss
        _check_count(count)
    if not (isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point()):
        found = f"{type(loss).__name__} {shown(loss):.80}"
        if isinstance(loss, Tensor):
            found = f"a tensor of shape {tuple(loss.shape)} and type {str(loss.dtype).removeprefix('torch.')}"
        raise RunError(
            f"the loss must be one number, but the model returned {found}; "
            f"reduce it (.mean() or fxpipe.Sum(total, count)), or pass {_loss_fn_for(result)} to fxpipe.compile"
        )
    return MicrobatchLoss(loss, count, metrics)


def _loss_fn_for(result: Any) -> str:
    """What to write for the first number in a container that a model returned."""
    items = result.items() if isinstance(result, Mapping) else enumerate(result if isinstance(result, tuple) else ())
    found = (
        key for key, value in items if isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()
    )
    return next((f"loss_fn=lambda out: out[{key!r}]" for key in found), "loss_fn=")


def _check_count(count: Any) -> None:
    # a tensor's number is not looked at: the host would wait for the device
    is_tensor = isinstance(count, Tensor)
    if not (count.numel() == 1 and not count.is_complex() if is_tensor else is_number(count) and count >= 0):
        raise RunError(f"fxpipe.Sum has count={shown(count)}; it is a number of items, or a tensor with one")
    if is_tensor and count.requires_grad:
        raise RunError(
            "the count of a fxpipe.Sum requires a gradient, and a number of items is given none; write "
            "fxpipe.Sum(total, count), in this order, with count.detach() where it shall be held fixed"
        )


def loss_in(result: Any) -> Any:
    """The loss alone, a number or a ``Sum``; RunError where there is none."""
    loss = read_loss(result)
    return loss.value if loss.count is None else Sum(loss.value, loss.count)


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


def root_weight(part: MicrobatchLoss, share: float, per_item: Tensor | None) -> float | Tensor:
    """The gradient that a micro-batch's loss is given, whose share of the step's weight is ``share``. ``per_item``: of
    a ``Sum``, 1 / the items of the step, where they were counted ahead."""
    if part.count is None:
        return share
    return 1.0 if per_item is None else per_item


class LossKind(NamedTuple):
    """What is the same in all losses that are added up. ``metrics``: the names of those that come with it."""

    is_sum: bool
    dtype: torch.dtype
    metrics: tuple[str, ...]

    def check(self, earlier: LossKind, what: str) -> None:
        """RunError where this and an ``earlier`` one cannot be added up, or compared. ``what``: each is the loss of."""
        # added up, they would give a number that depends on the order of the micro-batches
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


@dataclass(frozen=True, slots=True)
class LossPart:
    """What a micro-batch adds: its loss times its share, or the total and count of its ``Sum``; and its metrics."""

    value: Tensor
    count: Tensor | None
    metrics: Mapping[str, Tensor]


class StepLoss:
    """The micro-batch losses of one step, on their device, added up without waiting for it.

    A mean is weighted: Σ loss_i · (w_i / Σw), added up in micro-batch order, Σw being over all replicas. A ``Sum`` is
    Σ total and Σ count.
    """

    def __init__(self) -> None:
        self._parts: dict[int, LossPart] = {}
        self._kind: LossKind | None = None

    @property
    def kind(self) -> LossKind:
        """That of those with weight; where there are none, of the last."""
        return self._kind or LossKind(False, torch.float32, ())

    @property
    def is_known(self) -> bool:
        """Whether there was any micro-batch."""
        return self._kind is not None

    @property
    def is_empty(self) -> bool:
        """Whether no micro-batch had any weight."""
        return not self._parts

    def add(self, part: MicrobatchLoss, share: float, microbatch: int | None = None) -> Tensor | None:
        """Adds a micro-batch whose share of the step's weight is ``share``; returns what it has added.

        One without weight, whose numbers may be NaN, adds nothing. RunError where it is of another kind than others.
        """
        kind = LossKind(part.count is not None, part.value.dtype, tuple(part.metrics))
        if self.is_empty:
            self._kind = kind
        if not share:
            return None  # 0 * NaN would be NaN
        kind.check(self.kind, "micro-batch")
        value = part.value.detach()
        value = value.clone() if kind.is_sum else value * share  # no alias of what the user's code holds
        count = _number(part.count, part.value, torch.float64) if kind.is_sum else None
        dtype = metric_dtype(kind.dtype)
        metrics = {name: _number(metric, part.value, dtype) * share for name, metric in part.metrics.items()}
        self._parts[len(self._parts) if microbatch is None else microbatch] = LossPart(value, count, metrics)
        return value

    @staticmethod
    def of_ranks(losses: Sequence[StepLoss]) -> StepLoss:
        """Those of a step whose micro-batches have their losses on several ranks."""
        known = [loss for loss in losses if loss.is_known]
        if len(known) < 2:
            return known[0] if known else losses[0]
        weighty = [loss for loss in known if not loss.is_empty]
        whole = StepLoss()
        whole._kind = (weighty or known)[0].kind
        for loss in weighty:
            loss.kind.check(whole.kind, "micro-batch")
            whole._parts |= loss._parts
        # in the order of the micro-batches, as plain PyTorch adds them up
        whole._parts = dict(sorted(whole._parts.items()))
        return whole

    def value(self) -> Tensor:
        """The replica's part of the loss, a mean."""
        return _added([part.value for part in self._parts.values()])

    def metrics(self) -> dict[str, Tensor]:
        parts = list(self._parts.values())
        return {name: _added([part.metrics[name] for part in parts]) for name in (parts[0].metrics if parts else ())}

    def numbers(self, metrics: tuple[str, ...], device: torch.device) -> Tensor:
        """The replica's part of [loss, or total of a ``Sum``; its count, or 0; metrics ...], float64."""
        if self.is_empty:
            return torch.zeros(2 + len(metrics), dtype=torch.float64, device=device)
        counts = [part.count for part in self._parts.values() if part.count is not None]
        return _row(LossPart(self.value(), _added(counts) if counts else None, self.metrics()), metrics)

    def rows(self, metrics: tuple[str, ...], microbatches: int, device: torch.device) -> Tensor:
        """The same for each micro-batch, 0 where it has no weight or is another rank's: what ``of_rows`` reads."""
        # one row each, so that the sum over ranks adds zeros to it, and rounds nothing
        rows = torch.zeros(microbatches, 2 + len(metrics), dtype=torch.float64, device=device)
        for microbatch, part in self._parts.items():
            rows[microbatch] = _row(part, metrics)
        return rows

    @staticmethod
    def of_rows(kind: LossKind, rows: Tensor) -> StepLoss:
        """The losses of a step, from the sum of the ``rows`` of its ranks."""
        step, dtype = StepLoss(), metric_dtype(kind.dtype)
        step._kind = kind
        for microbatch, row in enumerate(rows):
            metrics = {name: row[2 + place].to(dtype) for place, name in enumerate(kind.metrics)}
            step._parts[microbatch] = LossPart(row[0].to(kind.dtype), row[1] if kind.is_sum else None, metrics)
        return step


def _row(part: LossPart, metrics: tuple[str, ...]) -> Tensor:
    value = part.value.double()
    count = torch.zeros_like(value) if part.count is None else part.count
    return torch.stack([value, count, *(part.metrics[name].double() for name in metrics)])


def _added(numbers: Sequence[Tensor]) -> Tensor:
    """Their sum, one after another."""
    # one after another: torch.stack(...).sum() adds in another order
    total = numbers[0].clone()
    for number in numbers[1:]:
        total.add_(number)
    return total
