"""Snapshots of a model before a capture or a run: they find the changes that forward has made, and undo them.

Takes: modules. Gives: ``Snapshot``, their attributes, with the contents of these, the places of their tensors in
memory, and the states of random generators; ``State``, which adds the numbers of all tensors.

1. Each module's ``__dict__`` is copied; each container and object inside is taken (``contents.Taken``).
2. For each tensor an alias keeps its storage, shape and strides. Its numbers are not copied by a ``Snapshot``.
3. ``changes`` compares, and yields the names of what is different.
4. ``restore`` puts back in this order: attributes, contents, tensors, generators. All of them are put back, whatever
   one raises.

A ``Snapshot`` costs no memory for tensors; a ``State`` costs a copy of each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fxpipe.device import is_accelerator
from fxpipe.patches import MISSING
from fxpipe.seeds import Generators, RandomState, is_generator, set_state, state_of
from fxpipe.snapshots.contents import Taken, alike, walk
from fxpipe.torch_compat.tensors import storage_id, version_of

Memo = tuple[dict[str, Any], str, Any]
"""(the dict of the attributes of a module or an object, a name, a value)"""
PLAIN_VALUE = bool, int, float, str
"""The types of a memo."""


class Snapshot:
    """A copy of the attributes of a module and its submodules: with the containers, objects and random generators in
    them, and, unless ``tensors`` is False, the storages (not the values) of their tensors."""

    def __init__(self, module: nn.Module, tensors: bool = True) -> None:
        self._with_tensors = tensors
        self._attributes: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self._taken: dict[int, tuple[str, Taken]] = {}
        self._tensors: dict[int, _TensorState] = {}
        self._generators: dict[int, tuple[Any, Any]] = {}
        """A generator's id → the generator, its state."""
        # 1. and 2. attributes, and the tensors and objects in them
        for path, submodule in module.named_modules():
            self._attributes.append((path, vars(submodule), dict(vars(submodule))))
            own = (*submodule.named_parameters(recurse=False), *submodule.named_buffers(recurse=False))
            for name, tensor in own:
                self._keep(_joined(path, name), tensor)
            for name, value in vars(submodule).items():
                self._look_into(_joined(path, name), value)

    def _look_into(self, name: str, value: Any) -> None:
        """Keeps all tensors, generators, containers and objects inside of an attribute's value."""
        for part in walk(value):
            if isinstance(part.value, Tensor):
                self._keep(name, part.value)
            elif is_generator(part.value):
                self._generators.setdefault(id(part.value), (part.value, state_of(part.value)))
            # an object with several names is copied once, under its first name
            elif part.parts is not None and id(part.value) not in self._taken:
                self._taken[id(part.value)] = name, Taken(part.value)

    def _keep(self, name: str, tensor: Tensor) -> None:
        # Under a tracer each detach() takes a tenth of a millisecond or more, and every call makes a snapshot.
        if self._with_tensors and id(tensor) not in self._tensors:
            size = tensor.untyped_storage().nbytes() if storage_of(tensor) else 0
            state = _TensorState(name, tensor, tensor.detach(), tensor.requires_grad, version_of(tensor), size)
            self._tensors[id(tensor)] = state

    def storages(self) -> dict[int, str]:
        """The storage of each tensor that the model holds → the tensor's name."""
        # reversed, so that the first name of a tensor stays
        names = {storage_of(state.tensor): state.name for state in reversed(self._tensors.values())}
        return {storage: name for storage, name in names.items() if storage}

    @property
    def has_generators(self) -> bool:
        """Whether the model holds random generators. ``changes`` does not report their draws."""
        return bool(self._generators)

    def tensors(self) -> list[Tensor]:
        """The tensors of the model, and in its attributes, each once."""
        return [state.tensor for state in self._tensors.values()]

    def changes(self) -> Iterator[str]:
        """Yields the names of all changed attributes and tensors; for changed values of tensors see ``written``."""
        # 3. attributes, then contents, then tensors
        for path, now, before in self._attributes:
            for name in {**before, **now}:
                if not alike(now.get(name, MISSING), before.get(name, MISSING)):
                    yield _joined(path, name)
        yield from (name for name, taken in self._taken.values() if taken.has_changed)
        for state in self._tensors.values():
            yield from state.changes()

    def memos(self) -> list[Memo]:
        """The attributes of modules and of objects that were None and are plain values now."""
        tables = [(now, before) for _, now, before in self._attributes]
        tables += [taken.attributes for _, taken in self._taken.values()]
        were_none = ((now, name) for now, before in tables for name, value in before.items() if value is None)
        return [(now, name, now[name]) for now, name in were_none if isinstance(now.get(name), PLAIN_VALUE)]

    def written(self) -> Iterator[str]:
        """The names of the attributes, parameters and buffers with a tensor that was written, by the tensor's version
        in autograd."""
        return (state.name for state in self._tensors.values() if version_of(state.tensor) != state.version)

    def __enter__(self) -> Snapshot:
        """A snapshot is also a context, which ends with ``restore``."""
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Undoes every change that ``changes`` can report, and restores random generators."""
        # 4. A stack calls all of them, the last first, and then raises what one of them raised.
        with contextlib.ExitStack() as undo:
            for generator, before in self._generators.values():
                undo.callback(set_state, generator, before)
            for state in self._tensors.values():
                undo.callback(state.restore)
            for _, taken in self._taken.values():
                undo.callback(taken.put_back)
            # In place, as torch and the model refer to these tables, and before the containers and tensors in them.
            for _, now, before in self._attributes:
                undo.callback(now.update, before)
                undo.callback(now.clear)


@dataclass(frozen=True)
class _TensorState:
    """Where a tensor had its numbers, and whether it required a gradient, at the time of the snapshot."""

    name: str
    tensor: Tensor
    memory: Tensor
    """An alias of the tensor, which keeps the tensor's storage, shape and strides at the time of the snapshot."""
    requires_grad: bool
    version: int
    size: int
    """The number of bytes in the storage."""

    def changes(self) -> Iterator[str]:
        """Yields the name of the tensor's place in memory, and of its ``requires_grad``, if they have changed."""
        if _place_of(self.tensor) != _place_of(self.memory):
            yield f"{self.name}.data"
        if self.tensor.requires_grad != self.requires_grad:
            yield f"{self.name}.requires_grad"

    def restore(self) -> None:
        """Gives the tensor its storage, shape and strides back, the storage its size, and sets ``requires_grad``."""
        if _place_of(self.tensor) != _place_of(self.memory):
            self.tensor.data = self.memory
            if self.memory.untyped_storage().nbytes() != self.size:  # resize_() has enlarged the storage
                self.memory.untyped_storage().resize_(self.size)
        if self.tensor.requires_grad != self.requires_grad:
            self.tensor.requires_grad_(self.requires_grad)


class State:
    """All state that a run of modules may change and that can be restored: the snapshots, the values of ``tensors``,
    and the states of the global random generators and of the generators ``own``."""

    def __init__(
        self,
        snapshots: Sequence[Snapshot],
        tensors: Iterable[Tensor],
        devices: Iterable[torch.device],
        own: Generators,
        earlier: Iterable[Numbers] = (),
    ) -> None:
        self._snapshots, self._random = snapshots, RandomState(devices, own=own)
        same = {id(numbers.tensor): numbers for numbers in earlier if not numbers.was_written}
        self.numbers = [
            same.get(id(tensor)) or Numbers(tensor, tensor.detach().clone(), version_of(tensor)) for tensor in tensors
        ]

    @classmethod
    def from_modules(
        cls,
        modules: Sequence[nn.Module],
        devices: Iterable[torch.device],
        own: Generators,
        earlier: Iterable[Numbers] = (),
    ) -> State:
        """The state of modules, with the values of all dense tensors that the modules hold. ``earlier``: numbers of an
        earlier state, which serve again unless their tensor was written since."""
        snapshots = [Snapshot(module) for module in modules]
        tensors = {id(tensor): tensor for snapshot in snapshots for tensor in snapshot.tensors()}
        plain = (tensor for tensor in tensors.values() if tensor.layout is torch.strided and not tensor.is_quantized)
        return cls(snapshots, plain, devices, own, earlier)

    def bumped(self) -> frozenset[int]:
        """The ids of the tensors whose version has changed since."""
        return frozenset(id(numbers.tensor) for numbers in self.numbers if numbers.was_bumped)

    def restore(self, bumped: frozenset[int] = frozenset()) -> None:
        """Restores all state. ``bumped``: the ids of the tensors to restore by writes that raise their versions, as
        forward's writes do: an autograd graph that saved such a tensor then fails, instead of using other values."""
        with torch.no_grad(), contextlib.ExitStack() as undo:
            for numbers in self.numbers:
                undo.callback(numbers.restore, raises_version=id(numbers.tensor) in bumped)
            for snapshot in self._snapshots:
                undo.callback(snapshot.restore)
            undo.callback(self._random.restore)


class Numbers(NamedTuple):
    """A tensor, and a copy of its values at the time of the snapshot."""

    tensor: Tensor
    copy: Tensor
    version: int

    @property
    def was_bumped(self) -> bool:
        """Whether the tensor's version has changed. A batch norm's writes of its statistics do not count."""
        return version_of(self.tensor) != self.version

    @property
    def was_written(self) -> bool:
        """Whether the tensor's version or its numbers have changed. Compares all numbers if the version has not."""
        return self.was_bumped or not torch.equal(self.tensor, self.copy)

    def restore(self, raises_version: bool) -> None:
        """Puts the numbers back. ``raises_version``: by a write that raises the tensor's version."""
        tensor = self.tensor
        # copy_() on the tensor raises its version, and on .data it does not
        if raises_version:
            tensor.copy_(self.copy)
        # On a GPU a copy is faster than the wait for a comparison. An expanded tensor (stride 0) takes no copy.
        elif (is_accelerator(tensor.device) and 0 not in tensor.stride()) or not torch.equal(tensor, self.copy):
            tensor.data.copy_(self.copy)


def storage_of(tensor: Tensor) -> int:
    """The id of a tensor's storage; 0 for a tensor without a storage, such as a sparse tensor."""
    try:
        return storage_id(tensor)
    except (NotImplementedError, RuntimeError):
        return 0


def _place_of(tensor: Tensor) -> tuple[Any, ...]:
    """The id of a tensor's storage, the shape, the strides and the offset; for a tensor without strides, the id."""
    storage = storage_of(tensor)
    if not storage or tensor.layout is not torch.strided or tensor.is_nested:
        return (storage,)
    return storage, tensor.shape, tensor.stride(), tensor.storage_offset()


def _joined(path: str, name: str) -> str:
    """The name of an attribute in the model."""
    return f"{path}.{name}" if path else name
