"""What a model was before a capture: tells what forward has changed, and puts it back."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.torch_compat import bytes_of, storage_id
from fxpipe.trace.contents import Taken, walk

_MISSING = object()


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
        """Whether the model holds generators of random numbers: whether one has moved, ``changes`` does not tell."""
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


class RandomState:
    """Where the random number generators stand: Python's, NumPy's (if it is in use) and torch's on the CPU."""

    def __init__(self) -> None:
        numpy = sys.modules.get("numpy")
        self._python = random.getstate()
        self._numpy = numpy.random.get_state() if numpy is not None else None
        self._torch = torch.get_rng_state()

    def _numbers(self) -> tuple[Any, ...]:
        numpy = () if self._numpy is None else (self._numpy[1].tobytes(), *self._numpy[2:])
        return self._python, numpy, bytes_of(self._torch)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RandomState) and self._numbers() == other._numbers()

    __hash__ = None  # type: ignore[assignment]

    def rewind(self) -> bool:
        """Puts the generators back to where they stood; whether they had moved."""
        moved = RandomState() != self
        if moved:
            self.restore()
        return moved

    def restore(self) -> None:
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
