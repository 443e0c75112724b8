"""Log to: writes figures of a step with TensorBoard, W&B, MLflow or a function, on one rank."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

from torch import Tensor

from fxpipe.device import peak_bytes
from fxpipe.distributed.activity import announced
from fxpipe.errors import FxpipeError, RunError
from fxpipe.run.forward_backward import ForwardBackward, alone
from fxpipe.run.step.step import Steps
from fxpipe.sharding.clip import grad_norm
from fxpipe.validation import is_number, is_whole, shown

Numbers = dict[str, float]


def _add_scalars(writer: Any, numbers: Numbers, step: int) -> None:
    for name, number in numbers.items():
        writer.add_scalar(name, number, step)


_WRITES: dict[str, Callable[[Any, Numbers, int], Any]] = {
    "add_scalar": _add_scalars,
    "log_metrics": lambda writer, numbers, step: writer.log_metrics(numbers, step=step),
    "log": lambda writer, numbers, step: writer.log(numbers, step=step),
    "__call__": lambda writer, numbers, step: writer(numbers, step),
}
"""A method of a writer → the call that writes numbers with it. The method is looked up at each call: ``wandb.init``
replaces ``wandb.log``."""


def log_to(writer: Any, every: int = 1) -> StepLog:
    """Returns a function that writes a step's figures: ``log = fxpipe.log_to(writer)``, ``log(forward_backward, loss,
    step)``.

    ``log`` is a collective call of all ranks, with the same ``step``, after ``forward_backward`` and before the
    gradients are cleared. The first rank that has a writer writes:

    - ``fxpipe/loss``, and ``fxpipe/metrics/NAME`` for each entry of ``forward_backward.metrics``;
    - ``fxpipe/gradient_norm``: the norm that ``clip_grad_norm_()`` returned, or else the gradient's norm of order 2;
    - ``fxpipe/step_seconds``: the mean seconds of a step since the last write, with all that the loop does in it;
    - ``fxpipe/exposed_seconds``: how long communication blocked a rank in the step, on the rank with most;
    - ``fxpipe/memory_bytes``: the most bytes that a rank has had so far, on its device or, on the CPU, resident;
    - ``fxpipe/bubble``: the idle part of the ranks' time, from 0 to 1, of ``timeline()``.

    A figure that was not measured is left out: seconds in the first write, communication in the first write on a GPU,
    the norm if the gradients are cleared. The bubble is left out without ``record_timeline()``, and in one process.
    The host waits for the device and for the other ranks: in one gather, in the norm's reduction, and in ``timeline()``
    if it is recorded.

    Args:
        writer: a ``SummaryWriter`` of TensorBoard, a run of W&B or the module ``wandb``, the module ``mlflow``, or a
            function of a dict name → float and the step. None on ranks that need not write.
        every: ``log`` returns at once unless ``step`` is a multiple of it.

    Raises:
        RunError: ``writer`` has no known method. ``log`` raises it on all ranks if no rank has a writer.
    """
    if not is_whole(every) or every < 1:
        raise RunError(f"every is {shown(every)}; it is a number of steps, from 1")
    known = [name for name in _WRITES if callable(getattr(writer, name, None))]
    if writer is not None and (not known or isinstance(writer, (type, logging.Logger))):
        raise RunError(
            f"writer is {shown(writer)}; it has add_scalar(name, number, step) as TensorBoard's SummaryWriter(), "
            "log_metrics(numbers, step=) as the module mlflow, or log(numbers, step=) as wandb.init(); or it is a "
            "function of (numbers, step); None on ranks that do not write"
        )
    return StepLog(None if writer is None else partial(_WRITES[known[0]], writer), every)


class StepLog:
    """The function that ``log_to`` returns. ``write``: called with the numbers and the step; None on other ranks."""

    def __init__(self, write: Callable[[Numbers, int], Any] | None, every: int) -> None:
        self._write, self._every = write, every
        self._last: tuple[int, float] | None = None  # the last written step, and when, in seconds

    def __call__(self, forward_backward: ForwardBackward, loss: Tensor | float, step: int) -> None:
        """Writes the figures of the last step. A collective call of all ranks.

        Args:
            forward_backward: the object that ``fxpipe.compile`` returned.
            loss: the loss to write, such as the sum of several calls.
            step: the number that the writer gets.

        Raises:
            RunError: no rank has a writer, or ``loss`` or ``step`` is no number. What the writer raises, too.
        """
        if not is_whole(step):
            raise RunError(f"step is {shown(step)}; it is a whole number")
        if not (is_number(loss) or (isinstance(loss, Tensor) and loss.numel() == 1)):
            raise RunError(f"loss is {shown(loss)}; it is what forward_backward returns, or a number")
        if step % self._every:
            return
        name = f"log of step {step}"
        with alone(forward_backward, name) as steps, announced(name + steps.which):
            with steps.failing.together(FxpipeError):
                steps.failing.check_open()
                measured = self._measured(steps)
            if measured is None:
                return
            assert self._write is not None
            metrics = {f"metrics/{name}": value for name, value in forward_backward.metrics.items()}
            figures = {"loss": loss, **metrics, **measured}
            numbers = {f"fxpipe/{name}": float(value) for name, value in figures.items()}
            last, self._last = self._last, (step, perf_counter())  # behind the wait for the device
            if last is not None and step > last[0]:
                numbers["fxpipe/step_seconds"] = (self._last[1] - last[1]) / (step - last[0])
            self._write(numbers, int(step))

    def _measured(self, steps: Steps) -> dict[str, Any] | None:
        """The figures of all ranks, on the rank that writes; None on the others."""
        transport, reducer, recorder = steps.transport, steps.rank_state.reducer, steps.recorder
        exposed = transport.traffic().exposed  # first: the calls below communicate, too
        pieces = reducer.pieces()
        # A single process plays all ranks in turns, which is no bubble.
        is_recorded = transport.pipe_rank is not None and 0 <= recorder.last == steps.number - 1
        has_gradient = any(piece.parameter.grad is not None for piece in pieces)
        here = self._write is not None, exposed, peak_bytes(steps.rank_state.device), has_gradient, is_recorded
        writers, waits, memory, gradients, recorded = zip(*transport.gather("all", here), strict=True)
        if not any(writers):
            raise RunError("no rank has a writer; give log_to() one on one rank at least, None on the others")
        figures: dict[str, Any] = {"memory_bytes": max(memory)}
        if not any(map(math.isnan, waits)):
            figures["exposed_seconds"] = max(waits)
        # All ranks make the calls below, or none: they have gathered the same.
        if any(gradients):
            norm = steps.norm
            figures["gradient_norm"] = grad_norm(pieces, transport, reducer.shards) if norm is None else norm
        if all(recorded):
            figures["bubble"] = recorder.timeline().bubble
        return figures if transport.ranks("all")[writers.index(True)] == transport.rank else None
