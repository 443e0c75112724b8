"""Which calls can be one operation: tensors and plain values go in and out, by arguments and result alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fxpipe.trace.fake import is_fake
from fxpipe.trace.record.frame import Frame
from fxpipe.trace.record.recorder import Recorder
from fxpipe.trace.record.tape import PLAIN, NamedSource, Obstacle, Operation, TapeValue, Touched, paths
from fxpipe.trace.state.attributes import AssignedBuffers
from fxpipe.trace.state.snapshot import storage_of


class Wholes:
    """Tells them apart in one run. ``paths``: a submodule's path by the identity of its ``__dict__``; ``lines``: where
    forward has set an attribute last, by its name in the model."""

    def __init__(
        self,
        recorder: Recorder,
        module: nn.Module,
        paths: Mapping[int, str],
        buffers: AssignedBuffers,
        lines: Mapping[str, str],
    ) -> None:
        self._recorder, self._paths, self._buffers, self._lines = recorder, paths, buffers, lines
        self._tables = {id(table): dict(table) for part in module.modules() for table in _tables(part)}
        self.storages: dict[int, tuple[int, str]] = {}
        """The memory of the model's tensors: their places in the model, and their first names."""
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            self.storages.setdefault(storage_of(tensor), (len(self.storages), name))

    def is_untouched(self, frame: Frame) -> bool:
        """Whether a call has done nothing yet that forbids to keep it whole."""
        recorder = self._recorder
        now = recorder.boundaries, recorder.regions, self._buffers.count
        return (frame.boundaries, frame.regions, frame.assigned) == now and frame.opaque

    def is_whole(self, frame: Frame, result: Any, touched: Touched) -> bool:
        """Whether a call can be one operation: tensors and plain values go in and out, by arguments and result."""
        return (
            self.is_untouched(frame)
            and not self.is_swapped(frame)
            and not self._recorder.hooked.keys() & frame.given
            and not (touched.is_stateful and _has_plain_leaves(result))
            and frame.place.modes == self._recorder.place().modes
            and touched.reads & self.storages.keys() <= self._reachable(frame)
            and not self.writes_elsewhere(frame, touched)
            and self._is_closed(frame)
            and not self._differentiates_around(frame)
            and all(self._can_leave(frame, leaf) for _, leaf in paths(result))
        )

    def is_swapped(self, frame: Frame) -> bool:
        """Whether the submodule holds other tensors than the model has given it: ``torch.func.functional_call``."""
        if frame.module is None:
            return False
        return any(
            tensor is not self._tables.get(id(table), {}).get(name)
            and f"{path}.{name}" not in self._lines  # a buffer that is set
            for path, part in self.parts_of(frame.module)
            for table in _tables(part)
            for name, tensor in table.items()
        )

    def parts_of(self, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """The submodules of a module that the model has had from the start, with their paths in the model."""
        for part in module.modules():
            if id(vars(part)) in self._paths:
                yield self._paths[id(vars(part))], part

    def _reachable(self, frame: Frame) -> set[int]:
        """The memory that a call may read: what its submodule holds, and what it is given."""
        return self._own(frame) | {storage_of(tensor) for tensor in frame.tensors}

    def _own(self, frame: Frame) -> set[int]:
        return set() if frame.module is None else held_by(frame.module)

    def writes_elsewhere(self, frame: Frame, touched: Touched) -> bool:
        """Whether it writes what the model holds outside of its submodule, or what it is given."""
        given = {storage_of(tensor) for tensor in frame.tensors}
        return bool((touched.writes & self.storages.keys()) - self._own(frame) or touched.writes & given)

    def _is_closed(self, frame: Frame) -> bool:
        """Whether its operations use no value from outside that it was not given."""
        recorder = self._recorder
        given = {recorder.value_of(tensor).key for tensor in frame.tensors}
        for operation in recorder.tape[frame.start :]:
            for value in operation.values if isinstance(operation, Operation) else ():
                maker = value.maker
                inside = maker.kind == "get_attr" if isinstance(maker, NamedSource) else maker.serial >= frame.serial
                if not inside and value.key not in given:
                    return False
        return True

    def _differentiates_around(self, frame: Frame) -> bool:
        """Whether it takes a gradient by what reaches it in more than one way."""
        recorder = self._recorder
        by = recorder.differentiated[frame.differentiated :]
        return bool(by) and leads_around(recorder.tape[: frame.start], by, map(recorder.value_of, frame.tensors))

    def _can_leave(self, frame: Frame, leaf: Any) -> bool:
        """Whether something may be a part of what a call returns."""
        if not isinstance(leaf, Tensor):
            return isinstance(leaf, PLAIN)
        if id(leaf) in frame.given:
            return True
        value = self._recorder.known(leaf)
        if value is None:  # made by what no torch function mode sees, such as TorchScript
            return is_fake(leaf)
        made_here = isinstance(value.maker, Operation) and value.maker.serial >= frame.serial
        return made_here and storage_of(leaf) not in self.storages


def _has_plain_leaves(result: Any) -> bool:
    return any(not isinstance(leaf, (Tensor, type(None))) for _, leaf in paths(result))


def held_by(module: nn.Module) -> set[int]:
    """The memory of a module's parameters and buffers."""
    return {storage_of(tensor) for tensor in (*module.parameters(), *module.buffers())}


def _tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers


def leads_around(tape: Sequence[Operation | Obstacle], by: Iterable[TapeValue], given: Iterable[TapeValue]) -> bool:
    """Whether any of the ``given`` arguments of a call depends, on the tape before that call, on a value ``by`` which
    a gradient is taken inside of it: through another argument, or a parameter that is used outside, too."""
    starts = list(by)
    reached = {value.key for value in starts}
    weights = {storage_of(value.maker.result) for value in starts if _is_weight(value)}
    makers: set[int] = set()
    for operation in tape:
        if isinstance(operation, Operation) and (
            operation.touched.reads & weights or any(_is_reached(v, reached, makers) for v in operation.values)
        ):
            makers.add(id(operation))
    return any(id(value.maker) in makers for value in given if value.key not in reached)


def _is_reached(value: TapeValue, keys: set[tuple[int, tuple[object, ...]]], makers: set[int]) -> bool:
    return value.key in keys or id(value.maker) in makers


def _is_weight(value: TapeValue) -> bool:
    return (
        isinstance(value.maker, NamedSource)
        and value.maker.kind == "get_attr"
        and isinstance(value.maker.result, Tensor)
    )
