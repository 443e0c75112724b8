"""Frames: calls of submodules, methods and autograd functions while they run, and which may become one operation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from fxpipe.graph.program import Effects
from fxpipe.trace.fake import is_fake, outside
from fxpipe.trace.record.recorder import Recorder
from fxpipe.trace.record.tape import (
    PLAIN,
    NamedSource,
    Operation,
    Surroundings,
    TapeValue,
    Touched,
    is_plain,
    paths,
    tensors,
)
from fxpipe.trace.record.touched import PythonState
from fxpipe.trace.state.snapshot import storage_of


@dataclass
class Frame:
    """A call while it runs, and where the recorder stood when it began."""

    path: str
    module: nn.Module | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: Surroundings
    serial: int
    marks: int
    gradients: int
    sets: int
    """How many attributes had been set."""
    changed: frozenset[str]
    """The attributes that had been changed, where that is watched."""
    start: int = 0
    """The length of the tape."""
    python: PythonState | None = None
    """What an operation does not show, as it was."""
    opaque: bool = True
    """Whether all that it is given can stand in a graph."""
    tensors: list[Tensor] = field(default_factory=list)
    """The tensors among its arguments."""

    @property
    def given(self) -> set[int]:
        return {id(tensor) for tensor in self.tensors}

    @property
    def memory(self) -> set[int]:
        """That of the parameters and buffers that its submodule holds."""
        return set() if self.module is None else held_by(self.module)


def enter(
    recorder: Recorder, path: str, module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Frame:
    """A call begins."""
    recorder.check_random()
    place, serial = recorder.place(), recorder.serial + 1
    if module is not None:
        place = replace(place, stack={**place.stack, path: type(module)})
    frame = Frame(
        path,
        module,
        args,
        kwargs,
        place,
        serial,
        recorder.marks,
        recorder.gradients,
        len(recorder.sets),
        recorder.changes(),
    )
    if module is not None:
        with outside():
            frame.python = PythonState(module)
    frame.opaque = is_plain((args, kwargs))
    if frame.opaque:
        frame.tensors = tensors((args, kwargs))
        frame.args, frame.kwargs = recorder.as_values(args), recorder.as_values(kwargs)
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
    recorder.set_inside |= {one.name for one in recorder.sets[frame.sets :]}
    recorder.set_inside |= recorder.changes() - frame.changed
    del recorder.sets[frame.sets :]
    arguments = frame.args, frame.kwargs
    made = recorder.append("call_module", target, *arguments, result, touched, frame.place, effects)
    made.kept = kept
    for path, leaf in paths(result):
        if isinstance(leaf, Tensor) and id(leaf) not in frame.given:
            recorder.name(leaf, TapeValue(made, path))


def is_untouched(recorder: Recorder, frame: Frame) -> bool:
    """Whether a call has done nothing yet that forbids to keep it whole."""
    return frame.opaque and frame.marks == recorder.marks


def is_whole(recorder: Recorder, frame: Frame, result: Any, touched: Touched) -> bool:
    """Whether a call can be one operation: tensors and plain values go in and out, by arguments and result."""
    reachable = frame.memory | {storage_of(tensor) for tensor in frame.tensors}
    returned = [leaf for _, leaf in paths(result)]
    has_plain = any(not isinstance(leaf, (Tensor, type(None))) for leaf in returned)
    # a gradient that it takes is its own: not by one argument through another, which others have computed from it
    leads_around = recorder.gradients > frame.gradients and sum(one.requires_grad for one in frame.tensors) > 1
    return (
        is_untouched(recorder, frame)
        and not recorder.hooked.keys() & frame.given
        and not (touched.is_stateful and has_plain)
        and frame.place.modes == recorder.place().modes
        and touched.reads & recorder.storages.keys() <= reachable
        and not writes_elsewhere(recorder, frame, touched)
        and _is_closed(recorder, frame)
        and not leads_around
        and all(_can_leave(recorder, frame, leaf) for leaf in returned)
    )


def writes_elsewhere(recorder: Recorder, frame: Frame, touched: Touched) -> bool:
    """Whether it writes what the model holds outside of its submodule, or what it is given."""
    given = {storage_of(tensor) for tensor in frame.tensors}
    return bool((touched.writes & recorder.storages.keys()) - frame.memory or touched.writes & given)


def _is_closed(recorder: Recorder, frame: Frame) -> bool:
    """Whether its operations use no value from outside that it was not given."""
    given = {recorder.value_of(tensor).key for tensor in frame.tensors}
    for operation in recorder.tape[frame.start :]:
        for value in operation.values if isinstance(operation, Operation) else ():
            maker = value.maker
            inside = maker.kind == "get_attr" if isinstance(maker, NamedSource) else maker.serial >= frame.serial
            if not inside and value.key not in given:
                return False
    return True


def _can_leave(recorder: Recorder, frame: Frame, leaf: Any) -> bool:
    """Whether something may be a part of what a call returns."""
    if not isinstance(leaf, Tensor):
        return isinstance(leaf, PLAIN)
    if id(leaf) in frame.given:
        return True
    value = recorder.known(leaf)
    if value is None:  # made by what no torch function mode sees, such as TorchScript
        return is_fake(leaf)
    made_here = isinstance(value.maker, Operation) and value.maker.serial >= frame.serial
    return made_here and storage_of(leaf) not in recorder.storages


def held_by(module: nn.Module) -> set[int]:
    """The memory of a module's parameters and buffers."""
    return {storage_of(tensor) for tensor in (*module.parameters(), *module.buffers())}
