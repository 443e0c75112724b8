"""What a model was before a capture: finds what forward has changed, and puts it back."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fxpipe.seeds import RandomState
from fxpipe.torch_compat import bytes_of, storage_id, version_of
from fxpipe.trace.state.contents import Taken, alike, contents, walk

_MISSING = object()
_TABLES = frozenset({"_parameters", "_buffers", "_modules"})
Key = TypeVar("Key", bound=Hashable)


class Snapshot:
    """The attributes of a module and its submodules, the containers, objects and generators of random numbers in them,
    and the memory of their tensors."""

    def __init__(self, module: nn.Module) -> None:
        self._attributes: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self._taken: dict[int, tuple[str, Taken]] = {}
        self._tensors: dict[int, _TensorState] = {}
        self._rewind: list[Callable[[], Any]] = []
        for path, submodule in module.named_modules():
            self._attributes.append((path, vars(submodule), dict(vars(submodule))))
            for tensor_name, tensor in _own_tensors(submodule):
                self._keep(_joined(path, tensor_name), tensor)
            for name, value in vars(submodule).items():
                self._look_into(_joined(path, name), value)

    def _look_into(self, name: str, value: Any) -> None:
        for part in walk(value):
            if isinstance(part.value, Tensor):
                self._keep(name, part.value)
            elif part.parts is not None and id(part.value) not in self._taken:
                self._taken[id(part.value)] = name, Taken(part.value)
            elif (stands := generator_state(part.value)) is not None:
                self._rewind.append(stands[1])

    def _keep(self, name: str, tensor: Tensor) -> None:
        self._tensors.setdefault(id(tensor), _TensorState(name, tensor, tensor.detach(), tensor.requires_grad))

    def storages(self) -> dict[int, str]:
        """The memory of every tensor that the model holds, and the tensor's name."""
        found = {storage_of(state.tensor): state.name for state in reversed(self._tensors.values())}
        return {storage: name for storage, name in found.items() if storage}

    @property
    def has_generators(self) -> bool:
        """Whether the model holds generators of random numbers: whether one has moved, ``changes`` does not show."""
        return bool(self._rewind)

    def tensors(self) -> list[Tensor]:
        """Every tensor that the model holds."""
        return [state.tensor for state in self._tensors.values()]

    def changes(self) -> Iterator[str]:
        """The names of what is no longer as it was. What is written into a tensor is not seen here."""
        for path, now, before in self._attributes:
            for name in {**before, **now}:
                if now.get(name, _MISSING) is not before.get(name, _MISSING):
                    yield _joined(path, name)
        yield from (name for name, taken in self._taken.values() if taken.has_changed)
        for state in self._tensors.values():
            yield from state.changes()

    def restore(self) -> None:
        """Puts everything back that ``changes`` can see, and generators."""
        for _, now, before in self._attributes:
            now.clear()
            now.update(before)
        for _, taken in self._taken.values():
            taken.put_back()
        for state in self._tensors.values():
            state.restore()
        for rewind in self._rewind:
            rewind()


@dataclass(frozen=True)
class _TensorState:
    name: str
    tensor: Tensor
    memory: Tensor
    """Another tensor with the memory that the tensor has had."""
    requires_grad: bool

    def changes(self) -> Iterator[str]:
        if storage_of(self.tensor) != storage_of(self.memory):
            yield f"{self.name}.data"
        if self.tensor.requires_grad != self.requires_grad:
            yield f"{self.name}.requires_grad"

    def restore(self) -> None:
        if storage_of(self.tensor) != storage_of(self.memory):
            self.tensor.data = self.memory
        if self.tensor.requires_grad != self.requires_grad:
            self.tensor.requires_grad_(self.requires_grad)


class Attributes(Generic[Key]):
    """The attributes of modules, each module by a key, and what is in them, to be compared. ``tensors``: also how often
    tensors in them were written, and which are the buffers; but not the tables of submodules, parameters and buffers.
    """

    def __init__(self, modules: Mapping[Key, nn.Module], tensors: bool = False) -> None:
        self._modules, self._tensors = modules, tensors
        self._before = self._now()

    def changes(self) -> set[tuple[Key, str]]:
        """Those that are no longer as they were: the key of their module, their name."""
        now = self._now()
        return {
            (key, name)
            for key, before in self._before.items()
            for name in before.keys() | now[key].keys()
            if name not in before or name not in now[key] or not alike(before[name], now[key][name])
        }

    def values(self) -> Iterator[Any]:
        """Those that they had, and all that was in them, each once."""
        held = {id(one): one for table in self._before.values() for one in table.values()}
        parts = (part for one in held.values() for part in (one if type(one) is tuple else (one,)))
        yield from {id(part): part for part in parts}.values()

    def _now(self) -> dict[Key, dict[str, Any]]:
        known: dict[int, Any] = {}  # by identity, as one object of settings is in many modules
        return {key: self._of(module, known) for key, module in self._modules.items()}

    def _of(self, module: nn.Module, known: dict[int, Any]) -> dict[str, Any]:
        held = {name: one for name, one in vars(module).items() if not self._tensors or name not in _TABLES}
        for value in held.values():
            if id(value) not in known:
                known[id(value)] = _with_versions(contents(value)) if self._tensors else contents(value)
        found = {name: known[id(value)] for name, value in held.items()}
        return {**found, **module._buffers} if self._tensors else found


def _with_versions(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_with_versions, value))
    return (value, version_of(value)) if isinstance(value, Tensor) else value


class State:
    """All that running modules may change and that can be put back: see ``Snapshot``; the numbers in these tensors,
    and where the global generators stand."""

    def __init__(
        self, snapshots: Sequence[Snapshot], tensors: Iterable[Tensor], devices: Iterable[torch.device] = ()
    ) -> None:
        self._snapshots, self._random = snapshots, RandomState(devices)
        self.numbers = [Numbers(tensor, tensor.detach().clone(), version_of(tensor)) for tensor in tensors]

    @classmethod
    def of(cls, modules: Sequence[nn.Module], devices: Iterable[torch.device]) -> State:
        """With the numbers in all tensors that modules hold."""
        snapshots = [Snapshot(module) for module in modules]
        tensors = {id(tensor): tensor for snapshot in snapshots for tensor in snapshot.tensors()}
        plain = (tensor for tensor in tensors.values() if tensor.layout is torch.strided and not tensor.is_quantized)
        return cls(snapshots, plain, devices)

    def bumped(self) -> frozenset[int]:
        """The tensors that autograd has seen written since."""
        return frozenset(id(one.tensor) for one in self.numbers if one.was_bumped)

    def restore(self, bumped: frozenset[int] = frozenset()) -> None:
        """Puts all back. ``bumped``: the tensors that forward writes before autograd's eyes: so are they here, and a
        graph that needs one as it was fails in place of taking other numbers."""
        self._random.restore()
        for snapshot in self._snapshots:
            snapshot.restore()
        with torch.no_grad():
            for tensor, copy, _ in self.numbers:
                if id(tensor) in bumped:
                    tensor.copy_(copy)
                elif (tensor.is_cuda and 0 not in tensor.stride()) or not torch.equal(tensor, copy):
                    tensor.data.copy_(copy)


class Numbers(NamedTuple):
    """A tensor as it was."""

    tensor: Tensor
    copy: Tensor
    version: int

    @property
    def was_bumped(self) -> bool:
        """Whether autograd has seen that it was written: a batch norm writes its statistics behind its back."""
        return version_of(self.tensor) != self.version

    @property
    def was_written(self) -> bool:
        return self.was_bumped or not torch.equal(self.tensor, self.copy)


def storage_of(tensor: Tensor) -> int:
    """The identity of a tensor's memory; 0 for a tensor that has none of its own, such as a sparse one."""
    try:
        return storage_id(tensor)
    except (NotImplementedError, RuntimeError):
        return 0


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def generator_state(value: Any) -> tuple[Any, Callable[[], Any]] | None:
    """Where a generator of random numbers stands, to be compared, and what puts it back; None for what is none."""
    if isinstance(value, random.Random):
        state = value.getstate()
        return state, lambda: value.setstate(state)
    if isinstance(value, torch.Generator):
        numbers = value.get_state()
        return bytes_of(numbers), lambda: value.set_state(numbers)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        where = value.get_state()
        return pickle.dumps(where), lambda: value.set_state(where)
    if numpy is not None and isinstance(value, numpy.random.Generator):
        bits, where = value.bit_generator, value.bit_generator.state
        return pickle.dumps(where), lambda: setattr(bits, "state", where)
    return None
