"""Plain: records an ordinary PyTorch loop, for a comparison with a run of fxpipe."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fxpipe.batch.description import bind
from fxpipe.errors import RunError
from fxpipe.graph.boundary import Gather, boundary_label, recording
from fxpipe.numerics.fingerprint import positions_of
from fxpipe.numerics.recording import GRADIENT, PARAMETER, PARAMETER_GRADIENT, VALUE, TensorPart, ValueRecorder
from fxpipe.torch_compat import pytree
from fxpipe.trace.cuts.cuts_by_name import Boundaries, resolve
from fxpipe.trace.cuts.cutting import cutting
from fxpipe.trace.request import Request


class PlainRun:
    """A loop of plain PyTorch that is recorded. ``record_plain`` makes it."""

    def __init__(self, model: nn.Module, recorder: ValueRecorder, boundaries: Boundaries, first_step: int) -> None:
        self._model, self._recorder, self._cuts = model, recorder, resolve(model, boundaries).cuts
        self._names = [name for name, _ in model.named_parameters()]
        self._parameters = list(model.parameters())
        self._signature = Request.signature(model, None)
        self._step, self._number = first_step - 1, -1
        self._boundaries, self._calls = 0, 0

    @contextlib.contextmanager
    def microbatch(self, number: int) -> Iterator[None]:
        """Records the forward and the backward of micro-batch ``number`` of a step, counted from 0; 0 begins a step.
        Inside, call the model once, and ``backward()`` of its loss."""
        recorder = self._recorder
        if number == 0:
            self.end_step()
            self._step += 1
            recorder.step = self._step
        self._number, self._boundaries, self._calls = number, 0, 0
        hook = self._model.register_forward_pre_hook(self._record_inputs, with_kwargs=True)
        try:
            with recording(self._cross), cutting(self._model, self._cuts):
                yield
        finally:
            hook.remove()
        if not self._calls:
            raise RunError(f"the model that is recorded was not called in micro-batch {number}")
        # An optimizer, or clipping, may change .grad afterwards: the last micro-batch has the whole gradient.
        recorder.drop(PARAMETER_GRADIENT)
        recorder.add_parts(PARAMETER_GRADIENT, self._parts([parameter.grad for parameter in self._parameters]))

    def _record_inputs(self, _: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._calls += 1
        self._recorder.add_inputs(self._number, bind(self._signature, args, kwargs))

    def _cross(self, value: Any, name: str | None, gather: Gather | None) -> Any:
        """Records the tensors that cross a boundary, and later their gradients; returns the value after the cut."""
        if gather is not None:
            raise RunError("a boundary gathers, which a plain loop does not do: record the two runs of fxpipe")
        boundary, self._boundaries = self._boundaries, self._boundaries + 1
        number, recorder = self._number, self._recorder
        leaves, spec = pytree.tree_flatten(value)
        tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for order, index in enumerate(tensors):
            label = boundary_label(boundary, name, order)
            recorder.add(VALUE, label, number, boundary, leaves[index], label)
            if leaves[index].requires_grad:
                # A view gets the gradient of its uses after the boundary alone.
                leaves[index] = leaves[index].view_as(leaves[index])
                leaves[index].register_hook(
                    lambda gradient, label=label: recorder.add(GRADIENT, label, number, boundary, gradient, label)
                )
        return pytree.tree_unflatten(leaves, spec)

    def end_step(self) -> None:
        """Records the parameters, which the optimizers have stepped."""
        self._recorder.add_parts(PARAMETER, self._parts(self._parameters))
        self._recorder.write()

    def _parts(self, tensors: Sequence[Tensor | None]) -> Iterator[TensorPart]:
        for order, (name, parameter, tensor) in enumerate(zip(self._names, self._parameters, tensors, strict=True)):
            if tensor is not None:
                yield TensorPart(name, order, tensor, parameter.shape, positions_of(parameter))


@contextlib.contextmanager
def record_plain(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    boundaries: Boundaries = (),
    full: bool = False,
    first_step: int = 0,
) -> Iterator[PlainRun]:
    """Records an ordinary training loop of ``model``, as ``forward_backward.record_values`` records a run of fxpipe.

    ::

        with fxpipe.record_plain(model, "runs/plain") as plain:
            for batch in batches:
                for i, part in enumerate(batch.chunk(4)):
                    with plain.microbatch(i):
                        (model(part) / 4).backward()
                optimizer.step()
                optimizer.zero_grad()

    Gradients are those after the last micro-batch's backward, before a loop clips them.

    Args:
        model: the model, in training mode.
        folder: the folder of the file.
        boundaries: the ``boundaries=`` of ``compile``, to record the values there as well.
        full: write the tensors, too.
        first_step: the number of the loop's first step: of a run that goes on from a checkpoint, the steps before it.

    Raises:
        RunError: the folder cannot be written; a boundary gathers; the model is DDP's or torch.compile's wrapper.
        PartitionError: ``boundaries`` names no submodule of the model.
    """
    inner = next((name for name in ("module", "_orig_mod") if name in dict(model.named_children())), None)
    if inner and type(model).__module__.startswith("torch."):
        raise RunError(f"record_plain is given a {type(model).__name__}; give it the model inside, its .{inner}")
    recorder = ValueRecorder(folder, 0, 1, 0, full)
    try:
        run = PlainRun(model, recorder, boundaries, first_step)
        yield run
        run.end_step()
    finally:
        recorder.close()
