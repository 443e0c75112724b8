"""Loss: the results that a model may return as its loss, and how micro-batch losses become the loss of a step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.progress import log
from fxpipe.torch_compat.tensors import tensors_in
from fxpipe.validation import is_number, is_whole, shown


class Sum(NamedTuple):
    """A loss as a sum, and the number of items in the sum.

    Loss and gradients of a step are then Σ total / Σ count over all micro-batches and the data axis: exactly the whole
    batch's, however items are masked. If the inputs alone decide the count (labels, masks, sizes), the backward begins
    with 1 / Σ count; otherwise gradients are divided after the backward, and parameters may have no hooks.
    """

    total: Tensor
    """0-dimensional."""
    count: Any
    """A number, or a 0-dimensional tensor."""


@dataclass(frozen=True)
class Counting:
    """Counts the items of a ``Sum`` from the inputs alone. ``names``: the names of the inputs; ``function``: None if
    the inputs do not decide the count."""

    names: tuple[str, ...]
    function: Callable[..., Any] | None

    @torch.no_grad()
    def of(self, batch: Mapping[str, Any], beside: Tensor) -> Tensor:
        """Returns the number of items in a micro-batch, as a tensor like ``beside``; the host does not wait for it."""
        assert self.function is not None
        count = self.function(*(batch[name] for name in self.names))
        _check_count(count)
        return _number(count, beside, beside.dtype)


class MicrobatchLoss(NamedTuple):
    """The loss of a micro-batch. ``count`` is None for a mean, the number of items for a ``Sum``.

    ``metrics``: the other scalars that the model returned with the loss: numbers, 0-dimensional tensors, or a ``Sum``.
    ``left_out``: the names of other tensors, and of containers of tensors, which a step does not return.
    """

    value: Tensor
    count: Any
    metrics: Mapping[str, Any]
    left_out: tuple[str, ...] = ()


def read_loss(result: Any) -> MicrobatchLoss:
    """Finds the loss in a model's result; RunError if the result has no loss."""
    metrics: dict[str, Any] = {}
    loss = result
    left_out: tuple[str, ...] = ()
    if not isinstance(result, Tensor) and isinstance(result, Mapping):
        if "loss" not in result:
            raise RunError(
                f"the model returned a dict with {sorted(map(str, result))} and no 'loss'; "
                f"return {{'loss': ...}}, or pass {_loss_fn_for(result)} to fxpipe.compile"
            )
        loss = result["loss"]
        others = {name: item for name, item in result.items() if name != "loss"}
        metrics = {name: item for name, item in others.items() if _is_metric(item)}
        left_out = tuple(n for n, item in others.items() if n not in metrics and (item is None or tensors_in(item)))
    count = None
    if isinstance(loss, Sum):
        loss, count = loss
        _check_count(count)
    if not (isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point()):
        description = f"{type(loss).__name__} {shown(loss):.80}"
        if isinstance(loss, Tensor):
            description = f"a tensor of shape {tuple(loss.shape)} and type {str(loss.dtype).removeprefix('torch.')}"
        raise RunError(
            f"the loss must be one number, but the model returned {description}; "
            f"reduce it (.mean() or fxpipe.Sum(total, count)), or pass {_loss_fn_for(result)} to fxpipe.compile"
        )
    return MicrobatchLoss(loss, count, metrics, left_out)


def _loss_fn_for(result: Any) -> str:
    """Returns the code of ``loss_fn=`` for the first number in a container that a model returned."""
    items = result.items() if isinstance(result, Mapping) else enumerate(result if isinstance(result, tuple) else ())
    keys = (key for key, value in items if isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point())
    return next((f"loss_fn=lambda out: out[{key!r}]" for key in keys), "loss_fn=")


def _check_count(count: Any) -> None:
    # a tensor's value is not read: the host would wait for the device
    is_tensor = isinstance(count, Tensor)
    if not (count.numel() == 1 and not count.is_complex() if is_tensor else is_number(count) and count >= 0):
        raise RunError(f"fxpipe.Sum has count={shown(count)}; it is a number of items, or a tensor with one")
    if is_tensor and count.requires_grad:
        raise RunError(
            "the count of a fxpipe.Sum requires a gradient, and a number of items is given none; write "
            "fxpipe.Sum(total, count), in this order, with count.detach() where it shall be held fixed"
        )


def loss_in(result: Any) -> Any:
    """Returns only the loss, a number or a ``Sum``; RunError if the result has no loss."""
    loss = read_loss(result)
    return loss.value if loss.count is None else Sum(loss.value, loss.count)


def _is_metric(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.is_complex()
    return isinstance(value, (Real, Sum))


@functools.cache
def log_left_out(names: tuple[str, ...]) -> None:
    """Logs, once, the names of tensors that the model returns with its loss, and that a step does not return."""
    log(
        f"fxpipe: a step does not return {', '.join(map(repr, names))}: .metrics has the numbers that the model "
        "returns with its loss (0-dimensional tensors, fxpipe.Sum), and evaluate() returns all"
    )


@functools.cache
def step_dtype(number: torch.dtype) -> torch.dtype:
    """Returns the dtype in which numbers of micro-batches are combined: at least float32, as half precision would make
    steps of a curve."""
    return torch.promote_types(number, torch.float32)


def is_mean(number: Any) -> bool:
    """Whether numbers of micro-batches are averaged; integers and tensors of bools are added."""
    if isinstance(number, Tensor):
        return number.is_floating_point() or number.is_complex()
    return not is_whole(number)


Column = tuple[str, str]
"""The name of a metric; and "mean", "integer", or "total" or "count" of a ``Sum``, whose total comes first."""


def columns_of(metrics: Mapping[str, Any]) -> dict[Column, Any]:
    """Returns the numbers of a micro-batch's metrics; a ``Sum`` has two."""
    columns = dict[Column, Any]()
    for name, value in metrics.items():
        if isinstance(value, Sum):
            columns |= {(name, "total"): value.total, (name, "count"): value.count}
        else:
            columns[name, "mean" if is_mean(value) else "integer"] = value
    return columns


def combined_metrics(columns: Mapping[Column, Tensor], loss: torch.dtype) -> dict[str, Tensor]:
    """Returns name → metric of a step; Σ total / Σ count for a ``Sum``, or 0 without items."""
    metrics = dict[str, Tensor]()
    for (name, form), number in columns.items():
        ratio = metrics[name] / torch.where(number == 0, 1.0, number) if form == "count" else number
        metrics[name] = ratio if form == "total" else ratio.to(torch.int64 if form == "integer" else step_dtype(loss))
    return metrics


def _number(value: Any, beside: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a number, or a tensor of one element, as a detached 0-dimensional tensor on the device of ``beside``."""
    if isinstance(value, Tensor):
        return value.detach().reshape(()).to(beside.device, dtype)
    return torch.full_like(beside, float(value), dtype=dtype)  # torch.tensor would copy the number, and wait


def root_weight(part: MicrobatchLoss, share: float, per_item: Tensor | None) -> float | Tensor:
    """Returns the gradient at which a micro-batch's backward begins. ``share``: the micro-batch's share of the step's
    weight. ``per_item``: for a ``Sum``, 1 / the items of the step, if they were counted ahead."""
    if part.count is None or not share:
        return share
    return 1.0 if per_item is None else per_item


class LossKind(NamedTuple):
    """The properties that all added losses must share. ``metrics``: the columns of the metrics that come with a loss.
    ``left_out``: the names of other tensors, which need not be the same."""

    is_sum: bool
    dtype: torch.dtype
    metrics: tuple[Column, ...]
    left_out: tuple[str, ...] = ()

    def check(self, earlier: LossKind, what: str) -> None:
        """RunError if losses of this and an ``earlier`` kind cannot be added up or compared. ``what``: their unit."""
        # their sum would depend on the order of the micro-batches
        if self[:2] != earlier[:2] or set(self.metrics) != set(earlier.metrics):
            raise RunError(
                f"the loss is {earlier} in one {what} and {self} in another, which have no mean; return the same kind "
                "always, of one type, as .float() gives it, with zeros for a metric where there is nothing to report"
            )

    def __str__(self) -> str:
        kind = "a fxpipe.Sum" if self.is_sum else "a mean"
        metrics = [name if form == "mean" else f"{name} ({form})" for name, form in self.metrics]
        return f"{kind} of {self.dtype} with the metrics {shown(metrics)}"


class LossPart(NamedTuple):
    """The part of a micro-batch: its loss times its share, or the total and count of its ``Sum``; and its metrics."""

    value: Tensor
    count: Any
    metrics: Mapping[Column, Tensor]
    """In float64, which holds integers exactly up to 2^53."""


class StepLoss:
    """The micro-batch losses of a step, on their device, added without a wait for the device, in float32 or float64.

    A mean is weighted: Σ loss_i · (w_i / Σw), added in micro-batch order, with Σw over all replicas. A ``Sum`` is Σ
    total and Σ count.
    """

    def __init__(self) -> None:
        self._parts: dict[int, LossPart] = {}
        self.kind: LossKind | None = None
        """The kind of the micro-batches with weight; if none has weight, of the last one; None before the first."""
        self.own: dict[int, Tensor] = {}
        """Micro-batch with weight → its own loss; total / count for a ``Sum``."""

    @property
    def is_empty(self) -> bool:
        """Whether no micro-batch had any weight."""
        return not self._parts

    @property
    def added(self) -> dict[int, Tensor]:
        """Micro-batch with weight → what it has added: its loss times its share, or the total of its ``Sum``."""
        return {microbatch: part.value for microbatch, part in self._parts.items()}

    def add(self, part: MicrobatchLoss, share: float, microbatch: int) -> None:
        """Adds a micro-batch whose share of the step's weight is ``share``.

        A micro-batch without weight, whose values may be NaN, adds nothing. RunError if its kind is another.
        """
        columns = columns_of(part.metrics) if part.metrics else {}
        kind = LossKind(part.count is not None, part.value.dtype, tuple(columns), part.left_out)
        if not self._parts or self.kind is None:
            self.kind = kind
        if not share:
            return  # 0 * NaN would be NaN
        if kind != self.kind:
            kind.check(self.kind, "micro-batch")
        # a copy: no alias of a tensor that the user's code holds
        own = part.value.detach().to(step_dtype(kind.dtype), copy=True)
        value = own if kind.is_sum else own * share
        count = _number(part.count, part.value, torch.float64) if kind.is_sum else None
        self.own[microbatch] = own if count is None else own / torch.where(count == 0, 1.0, count).to(own.dtype)
        metrics = {
            column: _number(number, part.value, torch.float64) * (share if column[1] == "mean" else 1.0)
            for column, number in columns.items()
        }
        self._parts[microbatch] = LossPart(value, count, metrics)

    def _in_order(self) -> list[LossPart]:
        """The parts in the order of the micro-batches, in which plain PyTorch adds: ranks make them in another."""
        return [self._parts[microbatch] for microbatch in sorted(self._parts)]

    def value(self) -> Tensor:
        """Returns the replica's part of a mean loss."""
        return _added([part.value for part in self._in_order()])

    def metrics(self) -> dict[Column, Tensor]:
        parts = self._in_order()
        return {name: _added([part.metrics[name] for part in parts]) for name in (parts[0].metrics if parts else ())}

    def numbers(self, metrics: tuple[Column, ...], device: torch.device) -> Tensor:
        """Returns the replica's part of [loss, or total of a ``Sum``; its count, or 0; metrics ...] in float64."""
        if self.is_empty:
            return torch.zeros(2 + len(metrics), dtype=torch.float64, device=device)
        counts = [part.count for part in self._in_order() if part.count is not None]
        return _row(LossPart(self.value(), _added(counts) if counts else None, self.metrics()), metrics)

    def rows(self, metrics: tuple[Column, ...], microbatches: int, device: torch.device) -> Tensor:
        """A row of ``numbers`` per micro-batch, 0 if it has no weight or is on another rank: ``of_rows`` reads this."""
        # a row each, so that the sum over ranks only adds zeros to it, and rounds nothing
        rows = torch.zeros(microbatches, 2 + len(metrics), dtype=torch.float64, device=device)
        for microbatch, part in self._parts.items():
            rows[microbatch] = _row(part, metrics)
        return rows

    @staticmethod
    def of_rows(kind: LossKind, rows: Tensor) -> StepLoss:
        """Returns the losses of a step from the sum of its ranks' ``rows``."""
        step, loss = StepLoss(), step_dtype(kind.dtype)
        step.kind = kind
        for microbatch, row in enumerate(rows):
            metrics = dict(zip(kind.metrics, row[2:], strict=True))
            step._parts[microbatch] = LossPart(row[0].to(loss), row[1] if kind.is_sum else None, metrics)
        return step


def _row(part: LossPart, metrics: tuple[Column, ...]) -> Tensor:
    value = part.value.double()
    count = torch.zeros_like(value) if part.count is None else part.count
    return torch.stack([value, count, *(part.metrics[column] for column in metrics)])


def _added(numbers: Sequence[Tensor]) -> Tensor:
    """Returns the sum of the numbers, added one after another."""
    # torch.stack(...).sum() would add in another order
    total = numbers[0].clone()
    for number in numbers[1:]:
        total.add_(number)
    return total
