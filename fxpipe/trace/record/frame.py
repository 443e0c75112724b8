"""Frames: calls of submodules and of autograd functions while they run. Each may become one operation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from fxpipe.graph.program import Effects
from fxpipe.trace.fake import outside
from fxpipe.trace.record.recorder import Recorder
from fxpipe.trace.record.tape import Operation, Surroundings, TapeValue, Touched, is_plain, paths, tensors
from fxpipe.trace.record.touched import PythonState


@dataclass
class Frame:
    """A call of a submodule, or of an autograd function, while it runs."""

    path: str
    module: nn.Module | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: Surroundings
    start: int
    """The length of the tape when it began."""
    serial: int
    boundaries: int
    """How many had been recorded."""
    regions: int
    """How many calls of the user's opaque regions had been recorded."""
    assigned: int
    """How many buffers had been set."""
    differentiated: int
    """By how many values gradients had been taken."""
    changed: frozenset[str]
    """Which attributes of the model had been changed."""
    python: PythonState | None = None
    """What an operation does not show, as it was."""
    reset: dict[str, str] = field(default_factory=dict)
    """Plain attributes that something else had set in it, and in submodules called before, and the lines where."""
    changes: set[tuple[int, str]] = field(default_factory=set)
    """The attributes that it has changed."""
    opaque: bool = True
    """Whether all that it is given can stand in a graph."""
    tensors: list[Tensor] = field(default_factory=list)
    """The tensors among its arguments."""

    @property
    def given(self) -> set[int]:
        return {id(tensor) for tensor in self.tensors}


def enter(
    recorder: Recorder,
    path: str,
    module: nn.Module | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    assigned: int,
) -> Frame:
    """A call begins."""
    recorder.check_random()
    place = recorder.place()
    if module is not None:
        place = replace(place, stack={**place.stack, path: type(module)})
    serial, changed = recorder.serial + 1, frozenset(recorder.changes())
    frame = Frame(
        path,
        module,
        args,
        kwargs,
        place,
        start=0,
        serial=serial,
        boundaries=recorder.boundaries,
        regions=recorder.regions,
        assigned=assigned,
        differentiated=len(recorder.differentiated),
        changed=changed,
    )
    if module is not None:
        with outside():
            frame.python = PythonState(module)
    if is_plain((args, kwargs)):
        frame.tensors = tensors((args, kwargs))
        frame.args, frame.kwargs = recorder.as_values(args), recorder.as_values(kwargs)
    else:
        frame.opaque = False
    frame.start = len(recorder.tape)
    return frame


def collapse(
    recorder: Recorder, frame: Frame, target: str, result: Any, touched: Touched, effects: Effects, kept: bool
) -> None:
    """Puts one operation in place of all that were recorded since the frame was entered."""
    hidden = recorder.tape[frame.start :]
    del recorder.tape[frame.start :]
    for operation in hidden:
        if isinstance(operation, Operation):
            operation.hidden_in = frame.path
    recorder.random_moved()
    recorder.excused |= frozenset(recorder.changes()) - frame.changed
    arguments = frame.args, frame.kwargs
    made = recorder.append("call_module", target, *arguments, result, touched, frame.place, effects)
    made.kept = kept
    for path, leaf in paths(result):
        if isinstance(leaf, Tensor) and id(leaf) not in frame.given:
            recorder.name(leaf, TapeValue(made, path))
